// What the two kernels for convolutions of few input channels share: the rows of the image under a tile of output
// pixels, in shared memory. sm_80 and newer.
//
// The values of an image row, channel by channel and pixel by pixel, are one sequence of width * CHANNELS values, and
// what a tap row of the filter sees of it, KERNEL_W * CHANNELS values, is contiguous: its window. Windows of
// neighbouring output pixels start STRIDE_W * CHANNELS values apart. A row in shared memory starts at a value whose
// index is a multiple of eight, before the image perhaps; values outside of the image are zeros.
//
// Macros: DTYPE; CHANNELS, KERNEL_H, KERNEL_W, STRIDE_H, STRIDE_W; TILE_Q, the columns of a tile of output pixels, a
// multiple of 16; VEC_X, the values of x per access, at most 16 bytes.
#pragma once
#include "common.cuh"
#include "mma.cuh"

constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int GROUP = 8;                         // values of a window that a fragment takes at a time
constexpr int WINDOW = KERNEL_W * CHANNELS;      // values
constexpr int STEP = STRIDE_W * CHANNELS;        // values from one window to the next
constexpr int NEW = STRIDE_H < KERNEL_H ? STRIDE_H : KERNEL_H;  // rows of the image that a row of pixels sees first
constexpr int WARMUP = (KERNEL_H - 1) / NEW;                    // rows of pixels above, which saw the others

// Values of a row in shared memory: the last window of a tile, padded to `groups`, wherever in an aligned eight the
// first begins.
DEVICE constexpr int row_length(int groups) { return (7 + (TILE_Q - 1) * STEP + groups * GROUP + 7) / 8 * 8; }

// An image's rows as a tile finds them.
struct Image {
    int height, values;  // rows, and values of a row: width * CHANNELS

    // Starts the copy of ROWS rows of LENGTH values from (row, value), where `value` is a multiple of eight, by LANES
    // threads.
    template <int ROWS, int LENGTH, int LANES = THREADS>
    __device__ __forceinline__ void copy(u32 to, const T* image, int row, int value, int thread = threadIdx.x) const {
        constexpr int VECTORS = LENGTH / VEC_X;
#pragma unroll 4
        for (int i = thread; i < ROWS * VECTORS; i += LANES) {
            const int y = i / VECTORS, x = i % VECTORS * VEC_X;
            const bool inside = static_cast<u32>(row + y) < static_cast<u32>(height) &&
                                static_cast<u32>(value + x) < static_cast<u32>(values);
            copy_values<VEC_X>(to + (y * LENGTH + x) * int(sizeof(T)), image + i64(row + y) * values + value + x,
                               inside);
        }
    }
};
