// Products of conv2d_stem_weight.cu on sm_90a, from lines (stem_lines.cuh): the windows as columns, across the depth, which are
// the pixels. A product has 32 values of a filter's row, so many pixels of the window as that makes; what is not of the filter
// is summed and not written. dy comes from registers: in shared memory each product of so few columns would read it anew.
#pragma once

constexpr int VALUES = 32;  // of a filter's row, in a product
constexpr int ROW_BYTES = (TILE_Q - 1) * 16 + VALUES * 2;
#define CUT 0
#include "stem_lines.cuh"
static_assert(ACROSS * GROUP <= VALUES && TILE_M == 64);

DEVICE int pixel_row(int i) { return i; }

// The operand of all windows from `address` on, for hopper.cuh: MN-major and not swizzled, with eight of the depth, 16 bytes
// each, one after the other, the next eight 128 bytes and the next eight columns 16 bytes further.
DEVICE u64 windows_from(u32 address) { return u64((address & 0x3ffff) >> 4) | u64(128 >> 4) << 16 | u64(16 >> 4) << 32; }

// 64 rows, 16 of each warp, by all columns.
struct Product {
    float sum[KERNEL_H][VALUES / 2];
    u32 lines, gradients;
    int first = 0;  // row of the ring under the filter's first

    __device__ __forceinline__ Product(unsigned char* stages, unsigned char* ring, int, u32) {
#pragma unroll
        for (int r = 0; r < KERNEL_H; ++r)
#pragma unroll
            for (float& value : sum[r]) value = 0.0f;
        lines = shared_address(ring);
        const int lane = threadIdx.x % 32;
        const int own = threadIdx.x / 32 * 32;  // bytes to this warp's rows
        gradients = shared_address(stages) + (Gradient::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8) ^ own);
    }

    // A row of dy, if it has `pixels`, while `meanwhile` is done.
    template <class Work>
    __device__ __forceinline__ void take(int stage, int pixels, Work meanwhile) {
        if (!pixels) return meanwhile();
        const u32 from = gradients + stage * Gradient::BYTES;
        u32 a[DEPTHS][4];
#pragma unroll
        for (int i = 0; i < DEPTHS; ++i) load_matrices_transposed(a[i], from + i * 16 * Gradient::PITCH);
        product_fence();
#pragma unroll
        for (int i = 0; i < DEPTHS; ++i)
#pragma unroll
            for (int r = 0; r < KERNEL_H; ++r) {
                const int row = first + r < RING ? first + r : first + r - RING;
                multiply<true>(sum[r], a[i], windows_from(lines + row * ROW_BYTES + i * 256), 1);
            }
        commit_products();
        meanwhile();
        await_products<0>();
#pragma unroll
        for (int r = 0; r < KERNEL_H; ++r) settle(sum[r]);
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
        for (int r = 0; r < KERNEL_H; ++r)
#pragma unroll
            for (int i = 0; i < VALUES / 2; ++i) {
                const int row = threadIdx.x / 32 * 16 + i / 2 % 2 * 8 + lane / 4;
                const int value = i / 4 * 8 + lane % 4 * 2 + i % 2, pixel = value / WIDE, channel = value % WIDE;
                if (row < rows && pixel < KERNEL_W && channel < CHANNELS)
                    to[(row * KERNEL_H + r) * WINDOW + pixel * CHANNELS + channel] = sum[r][i];
            }
    }
};
