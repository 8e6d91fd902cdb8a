// Products of conv2d_stem_weight.cu on sm_90a, from lines (stem_lines.cuh): the windows as columns, across the depth, which are
// the pixels. A product has one group of eight values of each of ROWS rows of a filter, and there is one for each group of a
// window. What is not of the filter is summed and not written. Rows must be equally far apart: the ring stands there twice, so
// that they follow each other wherever in it they begin, and of a low filter a product reads on behind it. dy comes from registers: in shared memory each product of so few
// columns would read it anew. (Products of four groups of one row, 32 columns, seven for four of these: 190 us for 7x7 of three
// channels, 256x112x112x64, on an H200, where the bytes take 121.)
#pragma once

constexpr int WINDOWS = TILE_Q;
constexpr int ROWS = KERNEL_H <= 4 ? 4 : 8;
#define AGAIN 1
#define CUT 0
#include "stem_lines.cuh"
static_assert(KERNEL_H <= ROWS && TILE_M == 64);

DEVICE int pixel_row(int i) { return i; }

// The operand of all windows from `address` on, for hopper.cuh: MN-major and not swizzled, with eight of the depth, 16 bytes
// each, one after the other, the next eight 128 bytes and the next eight columns a line further.
DEVICE u64 windows_from(u32 address) {
    return u64((address & 0x3ffff) >> 4 | (128 >> 4) << 16) | u64(ROW_BYTES >> 4) << 32;
}

// 64 rows, 16 of each warp, by all columns.
struct Product {
    float sum[ACROSS][ROWS * 4];
    u32 lines, gradients;
    int first = 0;  // row of the ring under the filter's first

    __device__ __forceinline__ Product(unsigned char* stages, unsigned char* ring, int, u32) {
#pragma unroll
        for (int j = 0; j < ACROSS; ++j)
#pragma unroll
            for (float& value : sum[j]) value = 0.0f;
        lines = shared_address(ring);
        const int lane = threadIdx.x % 32;
        const int own = threadIdx.x / 32 * 32;  // bytes to this warp's rows
        gradients = shared_address(stages) + (Gradient::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8) ^ own);
    }

    // A row of dy, if it has `pixels`, while `meanwhile` is done.
    template <class Work>
    __device__ __forceinline__ void take(int stage, int pixels, Work meanwhile) {
        if (!pixels) return meanwhile();
        const u32 from = gradients + stage * Gradient::BYTES, at = lines + first * ROW_BYTES;
        u32 a[DEPTHS][4];
#pragma unroll
        for (int i = 0; i < DEPTHS; ++i) load_matrices_transposed(a[i], from + i * 16 * Gradient::PITCH);
        product_fence();
#pragma unroll
        for (int i = 0; i < DEPTHS; ++i)
#pragma unroll
            for (int j = 0; j < ACROSS; ++j) multiply<true>(sum[j], a[i], windows_from(at + i * 256 + j * 16), 1);
        commit_products();
        meanwhile();
        await_products<0>();
#pragma unroll
        for (int j = 0; j < ACROSS; ++j) settle(sum[j]);
#pragma unroll
        for (int i = 0; i < DEPTHS; ++i)  // they have been the unit's, too
#pragma unroll
            for (u32& word : a[i]) asm volatile("" : "+r"(word));
    }

    __device__ __forceinline__ void advance() { first = first + NEW < RING ? first + NEW : first + NEW - RING; }

    // `to`: the first of `rows` filters of a partial.
    __device__ __forceinline__ void leave(unsigned char*, float* to, int rows, u32) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < ACROSS; ++j)
#pragma unroll
            for (int i = 0; i < KERNEL_H * 4; ++i) {
                const int row = threadIdx.x / 32 * 16 + i / 2 % 2 * 8 + lane / 4;
                const int value = lane % 4 * 2 + i % 2, pixel = j * STRIDE_W + value / WIDE, channel = value % WIDE;
                if (row < rows && pixel < KERNEL_W && channel < CHANNELS)
                    to[(row * KERNEL_H + i / 4) * WINDOW + pixel * CHANNELS + channel] = sum[j][i];
            }
    }
};
