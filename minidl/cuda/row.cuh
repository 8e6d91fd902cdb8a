// Kernels in which LANES neighbouring threads (1 .. 32 of a warp, or the block of 256) share a row of channels.
//
// A thread takes runs of RUN = 16 / sizeof(T) elements, loaded VEC at a time, so that which thread adds what depends on the
// sizes alone and not on an array's alignment. A row is read once per step of the formula: between the steps it stays in the
// cache of its multiprocessor.
#pragma once

#define BLOCK 256

constexpr int RUN = 16 / int(sizeof(T)) > VEC ? 16 / int(sizeof(T)) : VEC;
constexpr int ROWS = BLOCK / LANES;  // rows that a block works on
static_assert(LANES <= 32 || LANES == BLOCK, "a row belongs to part of a warp, or to a block");

// RUN elements from `first` on; what lies behind the row reads as `otherwise`.
template <class S>
DEVICE void load_run(const S* __restrict__ row, int first, int channels, float otherwise, float (&v)[RUN]) {
#pragma unroll
    for (int j = 0; j < RUN; j += VEC) {
        float part[VEC];
        if (first + j < channels) {
            load(row + first + j, part);
        } else {
#pragma unroll
            for (int e = 0; e < VEC; ++e) part[e] = otherwise;
        }
#pragma unroll
        for (int e = 0; e < VEC; ++e) v[j + e] = part[e];
    }
}

DEVICE void store_run(T* __restrict__ row, int first, int channels, const float (&v)[RUN]) {
#pragma unroll
    for (int j = 0; j < RUN; j += VEC) {
        float part[VEC];
#pragma unroll
        for (int e = 0; e < VEC; ++e) part[e] = v[j + e];
        if (first + j < channels) store(row + first + j, part);
    }
}

DEVICE float larger(float a, float b) { return clamp_below(a, b); }

// The sum (or the largest, NaN winning) over the threads of a row, in each of them. Every thread of the block takes part.
template <bool LARGEST = false>
DEVICE float over_row(float x) {
#pragma unroll
    for (int offset = (LANES < 32 ? LANES : 32) / 2; offset > 0; offset /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, x, offset);
        x = LARGEST ? larger(x, other) : x + other;
    }
    if (LANES <= 32) return x;
    __shared__ float scratch[BLOCK / 32];
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    x = scratch[0];
#pragma unroll
    for (int warp = 1; warp < BLOCK / 32; ++warp) x = LARGEST ? larger(x, scratch[warp]) : x + scratch[warp];
    return x;
}

// This thread's row, and its part of it: runs that start at `first`, `first` + STEP, ...
struct RowShare {
    static constexpr int STEP = LANES * RUN;
    i64 row;
    int first;
    bool inside;

    __device__ __forceinline__ explicit RowShare(i64 rows) {
        row = i64(blockIdx.x) * ROWS + threadIdx.x / LANES;
        inside = row < rows;
        if (!inside) row = 0;
        first = threadIdx.x % LANES * RUN;
    }
};
