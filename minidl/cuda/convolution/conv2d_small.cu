// Products of small matrices with any sizes: fully connected layers of few rows and channels, all three passes.
//
//   output[i, j] = bias[j] + sum_d a[i, d] b[j, d] (+ add[i, j])
//
//   pass              a             b     sum over
//   forward           x  (N, C)     w     channels C
//   data gradient     dy (N, K)     w^T   filters K
//   weight gradient   dy^T          x^T   rows N; output float32, added to with `accumulate`
//
//   a, b      steps apart in both directions as Problem says          T
//   bias      (columns,) float32 or null
//   add       (rows, columns), rows add_row apart                     T or null
//   output    (rows, columns) dense                                   T, or float32 where WEIGHT is 1
//
// Tiles of matrix units would be fewer than multiprocessors here, and channels that fill no vector are no matter: a
// thread sums ROWS values of one column, LANES neighbouring threads share its depth and add up their sums by pairs.
// Both follow from the sizes alone (conv2d_small.py), hence every bit.
// Block: 256 threads, 256 / LANES columns. Grid: slabs of columns x rows, slabs fastest. Macros: DTYPE, LANES (1 to
// 32), WEIGHT. FLOP: 2 per product. Floor: a launch; all operands lie in the caches.
#include "common.cuh"

struct Problem {
    i64 a_row, a_depth, b_column, b_depth, add_row;
    int rows, columns, depth, slabs, accumulate;
};

constexpr int ROWS = 4;

#if WEIGHT
typedef float Out;
#else
typedef T Out;
#endif

extern "C" __global__ void __launch_bounds__(256)
conv2d_small_kernel(const T* __restrict__ a, const T* __restrict__ b, const float* __restrict__ bias,
                    const T* __restrict__ add, Out* __restrict__ output, const __grid_constant__ Problem p) {
    await_predecessor();
    const int lane = threadIdx.x % LANES, column = (blockIdx.x % p.slabs * 256 + threadIdx.x) / LANES;
    const int first = blockIdx.x / p.slabs * ROWS;
    const T* row[ROWS];  // those behind the last read it again
#pragma unroll
    for (int r = 0; r < ROWS; ++r) row[r] = a + (first + r < p.rows ? first + r : p.rows - 1) * p.a_row;
    const T* const other = b + (column < p.columns ? column : p.columns - 1) * p.b_column;

    float sum[ROWS] = {};
#pragma unroll 4
    for (int d = lane; d < p.depth; d += LANES) {
        const float factor = to_float(other[d * p.b_depth]);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) sum[r] = fmaf(to_float(row[r][d * p.a_depth]), factor, sum[r]);
    }
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2)
#pragma unroll
        for (int r = 0; r < ROWS; ++r) sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], step);
    if (column >= p.columns || lane > 0) return;
    const float shift = bias ? bias[column] : 0.0f;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (first + r >= p.rows) return;
        Out* const to = output + i64(first + r) * p.columns + column;
        float value = sum[r] + shift;
        if (add) value += to_float(add[(first + r) * p.add_row + column]);
#if WEIGHT
        *to = p.accumulate ? *to + value : value;
#else
        *to = from_float<T>(value);
#endif
    }
}
