// How the kernels for both gradients make dy, the gradient of a batch norm's input, of a tile in shared memory
// (conv2d_both.cu, conv2d_both_wide.cu).
#pragma once
#include "conv2d_above.cuh"
#include "conv2d_columns.cuh"

// What a thread that makes needs of eight neighbouring filters.
struct Factors {
    float scale[8], bend[8], offset[8];

    template <int ALL>
    __device__ __forceinline__ Factors(const ChannelTable<ALL>& all, int filter) {
        all.load(scale, 0, filter);
        all.load(bend, 1, filter);
        all.load(offset, 2, filter);
    }

    // Of two values each, the filters i and i + 1.
    __device__ __forceinline__ u32 pair(u32 dz, u32 y, int i) const {
        float g[2], v[2];
        unpack_word(dz, g), unpack_word(y, v);
#pragma unroll
        for (int e = 0; e < 2; ++e) g[e] = fmaf(g[e], scale[i + e], fmaf(v[e], bend[i + e], offset[i + e]));
        return Rounding<T>::round_pair(g[0], g[1]);
    }
    __device__ __forceinline__ uint4 operator()(uint4 dz, uint4 y) const {
        return make_uint4(pair(dz.x, y.x, 0), pair(dz.y, y.y, 2), pair(dz.z, y.z, 4), pair(dz.w, y.w, 6));
    }
};

// A thread's part of a tile of 64 pixels by VECTORS times eight filters, in boxes of eight vectors each, those of dz
// first, then as many of y: of one vector every STEP-th row. dy takes the place of dz.
template <int VECTORS>
struct Made {
    static constexpr int STEP = 128 / VECTORS, ROWS = 64 / STEP, BOX_BYTES = 64 * 128;
    static constexpr int AHEAD = 2;  // rows that are asked for before they are needed
    static_assert(STEP % 8 == 0, "chunks are permuted alike");
    int vector, row;

    __device__ __forceinline__ explicit Made(int thread) : vector(thread % VECTORS), row(thread / VECTORS) {}

    // `left`: pixels that there are from the tile's first on.
    __device__ __forceinline__ void make(u32 stage, const Factors& factors, int left) const {
        const u32 dz = stage + vector / 8 * BOX_BYTES + row * 128 + (vector % 8 ^ row % 8) * 16;
        const u32 y = dz + VECTORS / 8 * BOX_BYTES;
        uint4 gradients[AHEAD], values[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
            gradients[j] = load_shared(dz + j * STEP * 128);
            values[j] = load_shared(y + j * STEP * 128);
        }
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
            const uint4 made = factors(gradients[j % AHEAD], values[j % AHEAD]);
            if (j + AHEAD < ROWS) {
                gradients[j % AHEAD] = load_shared(dz + (j + AHEAD) * STEP * 128);
                values[j % AHEAD] = load_shared(y + (j + AHEAD) * STEP * 128);
            }
            store_shared(dz + j * STEP * 128, made, 1);
        }
        if (left < 64) {  // behind the last pixel dy is zero; a choice for each value would be a branch each
#pragma unroll
            for (int j = 0; j < ROWS; ++j)
                store_shared(dz + j * STEP * 128, make_uint4(0, 0, 0, 0), row + j * STEP >= left);
        }
    }
};
