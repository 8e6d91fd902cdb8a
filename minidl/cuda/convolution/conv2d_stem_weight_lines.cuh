// Columns and products of conv2d_stem_weight.cu on sm_90a: windows read by wgmma from shared memory as they lie there.
//
// The image rows are rewritten as lines (conv2d_stem_lines.cuh). A product has 32 values of a filter's row, so many pixels
// of the window as that makes; what is not of the filter is summed and not written.
// dy comes from registers: in shared memory each product of so few columns would read it anew.
//
// 7x7 of three channels, 256x112x112x64 on an H200: 190 us, the sum of the partials included, where pairs take 297 and cuDNN
// 1131 (bytes 121, products with their padding 97). What was tried besides, forward too: docs/tuning.md.
#pragma once
#include "conv2d_stem_lines.cuh"

constexpr int VALUES = 32;  // of a filter's row, in a product
static_assert(ACROSS * GROUP <= VALUES && TILE_M == 64);

constexpr int ROW_BYTES = (TILE_Q - 1) * 16 + VALUES * 2;

DEVICE int pixel_row(int i) { return i; }

// The operand of all windows from `address` on, for wgmma.cuh: MN-major and not swizzled, with eight of the depth, 16 bytes
// each, one after the other, the next eight 128 bytes and the next eight columns 16 bytes further.
DEVICE u64 windows_from(u32 address) { return u64((address & 0x3ffff) >> 4) | u64(128 >> 4) << 16 | u64(16 >> 4) << 32; }

// Rewrites NEW rows of LENGTH values, whose first window begins at `shift`, as lines, from row `slot` of the ring on, by
// LANES threads.
template <int LANES = THREADS>
DEVICE void rewrite(unsigned char* ring, const unsigned char* rows, int slot, int shift, int thread = threadIdx.x) {
    constexpr int EACH = (NEW * LINE + LANES - 1) / LANES;
#pragma unroll
    for (int u = 0; u < EACH; ++u) {
        const int i = thread + u * LANES;
        if (i >= NEW * LINE) break;
        const int row = i / LINE, group = i % LINE, place = slot + row < RING ? slot + row : slot + row - RING;
        const u16* const from = reinterpret_cast<const u16*>(rows) + row * LENGTH + shift + group * STEP;
        *reinterpret_cast<uint4*>(ring + place * ROW_BYTES + group * 16) = line_group(from);
    }
    fence_for_engine();
}

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
        const int own = threadIdx.x % THREADS / 32 * 32;  // bytes to this warp's rows
        gradients = shared_address(stages) + (Gradient::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8) ^ own);
    }

    // The operands of a row of dy, in the unit's hands from `start` until the wait for its group and `settle`.
    struct Row {
        u32 a[DEPTHS][4];

        __device__ __forceinline__ void settle() {
#pragma unroll
            for (int i = 0; i < DEPTHS; ++i)
#pragma unroll
                for (u32& word : a[i]) asm volatile("" : "+r"(word));
        }
    };

    // Starts the products of a stage's row, a group.
    __device__ __forceinline__ void start(Row& row, int stage) {
        const u32 from = gradients + stage * Gradient::BYTES;
#pragma unroll
        for (int i = 0; i < DEPTHS; ++i) load_matrices_transposed(row.a[i], from + i * 16 * Gradient::PITCH);
        u64 windows[KERNEL_H];
#pragma unroll
        for (int r = 0; r < KERNEL_H; ++r)
            windows[r] = windows_from(lines + (first + r < RING ? first + r : first + r - RING) * ROW_BYTES);
        product_fence();
#pragma unroll
        for (int i = 0; i < DEPTHS; ++i)
#pragma unroll
            for (int r = 0; r < KERNEL_H; ++r)
                multiply<true>(sum[r], row.a[i], windows[r] + operand_step(i * 256), 1);
        commit_products();
    }

    // After the wait for all groups.
    __device__ __forceinline__ void settle_sums() {
#pragma unroll
        for (int r = 0; r < KERNEL_H; ++r) settle(sum[r]);
    }

    // A row of dy, if it has `pixels`, while `meanwhile` is done.
    template <class Work>
    __device__ __forceinline__ void take(int stage, int pixels, Work meanwhile) {
        if (!pixels) return meanwhile();
        Row row;
        start(row, stage);
        meanwhile();
        await_products<0>();
        settle_sums();
        row.settle();
    }

    __device__ __forceinline__ void advance() { first = first + NEW < RING ? first + NEW : first + NEW - RING; }

    // `to`: the first of `rows` filters of a partial.
    __device__ __forceinline__ void leave(unsigned char*, float* to, int rows, u32) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int r = 0; r < KERNEL_H; ++r)
#pragma unroll
            for (int i = 0; i < VALUES / 2; ++i) {
                const int row = threadIdx.x % THREADS / 32 * 16 + i / 2 % 2 * 8 + lane / 4;
                const int value = i / 4 * 8 + lane % 4 * 2 + i % 2, pixel = value / WIDE, channel = value % WIDE;
                if (row < rows && pixel < KERNEL_W && channel < CHANNELS)
                    to[(row * KERNEL_H + r) * WINDOW + pixel * CHANNELS + channel] = sum[r][i];
            }
    }
};
