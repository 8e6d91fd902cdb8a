// Sums of columns in a fixed order: totals[c] = sum over rows of partial[row, c], all float64.
//
// One block of 256 threads for each column: thread t takes rows t, t + 256, ..., then a tree. 8 bytes and 1 FLOP per
// element; the second step of reductions whose blocks leave a row each.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
column_totals(const double* __restrict__ partial, double* __restrict__ totals, int rows, int columns) {
    await_predecessor();
    __shared__ double scratch[32];
    double sum = 0.0;
#pragma unroll 4
    for (int row = threadIdx.x; row < rows; row += 256) sum += partial[i64(row) * columns + blockIdx.x];
    sum = block_sum<256>(sum, scratch);
    if (threadIdx.x == 0) totals[blockIdx.x] = sum;
}
