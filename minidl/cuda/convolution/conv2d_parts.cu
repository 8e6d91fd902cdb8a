// Sums of parts of the depth, as conv2d_hopper.cu leaves them where it is DIVIDED, made into its output:
//
//   out[r, c] = bias[c] + add[r, c] + sum over the parts, in order, of partial[part, r, c]
//
// Layout: partial (parts, rows, columns) float32; bias (columns,) float32 or null; add  r * add_pitch + c, or null; out
// dense. With RELU, what is stored is max(y, 0); NaN stays NaN.
// Macros: DTYPE, VEC (columns of a thread), RELU. Block: 128 threads. Grid: rows * columns / (128 * VEC).
// Bytes: the parts once, from the second-level cache where they fit.
#include "common.cuh"

constexpr int DEEP = 8;  // parts that a thread has in flight

extern "C" __global__ void __launch_bounds__(128)
conv2d_parts_kernel(const float* __restrict__ partial, const float* __restrict__ bias, const T* __restrict__ add,
                    T* __restrict__ out, i64 size, int columns, int parts, i64 add_pitch) {
    const i64 i = (i64(blockIdx.x) * 128 + threadIdx.x) * VEC;
    if (i >= size) return;
    const i64 row = i / columns;
    const int column = int(i - row * columns);
    float sum[VEC] = {};
    for (int first = 0; first < parts; first += DEEP) {
        Raw<float, VEC> raw[DEEP];
#pragma unroll
        for (int u = 0; u < DEEP; ++u)
            if (first + u < parts) raw[u] = load_raw<VEC>(partial + (first + u) * size + i);
#pragma unroll
        for (int u = 0; u < DEEP; ++u)
            if (first + u < parts)
#pragma unroll
                for (int e = 0; e < VEC; ++e) sum[e] += raw[u].items[e];
    }
    if (bias)
#pragma unroll
        for (int e = 0; e < VEC; ++e) sum[e] += bias[column + e];
    if (add) {
        float more[VEC];
        load(add + row * add_pitch + column, more);
#pragma unroll
        for (int e = 0; e < VEC; ++e) sum[e] += more[e];
    }
    if (RELU)
#pragma unroll
        for (int e = 0; e < VEC; ++e) sum[e] = clamp_below(sum[e], 0.0f);
    store(out + i, sum);
}
