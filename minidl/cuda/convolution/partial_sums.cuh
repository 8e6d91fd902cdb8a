// Sums of values that lie `pitch` apart, in a fixed order: thread (i, j) of a block of WIDTH x SPLIT adds values j, j +
// SPLIT, ... of VEC neighbours, then a tree adds those of a column. Macros: VEC (1, 4), SPLIT (1 to 128, a power of two).
#pragma once
#include "common.cuh"

constexpr int WIDTH = VEC == 1 && SPLIT > 32 ? 8 : 256 / SPLIT;
constexpr int DEEP = 8;  // partials that a thread has in flight

DEVICE void add(float (&sum)[VEC], const float (&value)[VEC]) {
#pragma unroll
    for (int e = 0; e < VEC; ++e) sum[e] += value[e];
}

// Of `count` values from `partials` on, for all threads of a block; whether this thread has got a result.
DEVICE bool sum_up(const float* __restrict__ partials, i64 pitch, int count, float (&sum)[VEC]) {
    const int lane = threadIdx.x % WIDTH, part = threadIdx.x / WIDTH;
#pragma unroll
    for (int e = 0; e < VEC; ++e) sum[e] = 0.0f;
    for (int first = part; first < count; first += DEEP * SPLIT) {
        Raw<float, VEC> raw[DEEP];
#pragma unroll
        for (int u = 0; u < DEEP; ++u)
            if (first + u * SPLIT < count) raw[u] = load_once<VEC>(partials + (first + u * SPLIT) * pitch);
#pragma unroll
        for (int u = 0; u < DEEP; ++u)
            if (first + u * SPLIT < count) add(sum, raw[u].items);
    }
    if constexpr (SPLIT > 1) {
        __shared__ __align__(16) float scratch[SPLIT][WIDTH][VEC];
#pragma unroll
        for (int e = 0; e < VEC; ++e) scratch[part][lane][e] = sum[e];
        // The last levels of the tree are one thread's: a barrier costs more than its additions.
        constexpr int LAST = SPLIT < 8 ? SPLIT : 8;
#pragma unroll
        for (int half = SPLIT / 2; half >= LAST; half /= 2) {
            __syncthreads();
            if (part < half) {
                add(sum, scratch[part + half][lane]);
#pragma unroll
                for (int e = 0; e < VEC; ++e) scratch[part][lane][e] = sum[e];
            }
        }
        __syncthreads();
        if (part > 0) return false;
        float last[LAST][VEC];
#pragma unroll
        for (int j = 0; j < LAST; ++j)
#pragma unroll
            for (int e = 0; e < VEC; ++e) last[j][e] = scratch[j][lane][e];
#pragma unroll
        for (int half = LAST / 2; half > 0; half /= 2)
#pragma unroll
            for (int j = 0; j < half; ++j) add(last[j], last[j + half]);
#pragma unroll
        for (int e = 0; e < VEC; ++e) sum[e] = last[0][e];
    }
    return part == 0;
}
