// What losses over rows with labels share: which labels count, the gradient's factor, totals of a block.
#pragma once

DEVICE bool counts(i64 label, int classes, i64 ignore_index) {
    return label != ignore_index && label >= 0 && label < classes;
}

// What a row that counts has its gradient multiplied by: scale / totals[1], 0 where nothing counts.
DEVICE float gradient_factor(const double* totals, const float* scale) {
    return totals[1] > 0.0 ? (scale ? scale[0] : 1.0f) / float(totals[1]) : 0.0f;
}

// Row blockIdx.x of partial (blocks, COLUMNS): sums over the block, lanes by a tree, then warps in order.
template <int THREADS, int COLUMNS>
DEVICE void write_totals(const double (&mine)[COLUMNS], double* __restrict__ partial) {
    __shared__ double scratch[COLUMNS][THREADS / 32];
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        const double sum = warp_sum(mine[j]);
        if (threadIdx.x % 32 == 0) scratch[j][threadIdx.x / 32] = sum;
    }
    __syncthreads();
    if (threadIdx.x >= COLUMNS) return;
    double total = 0.0;
    for (int warp = 0; warp < THREADS / 32; ++warp) total += scratch[threadIdx.x][warp];
    partial[COLUMNS * i64(blockIdx.x) + threadIdx.x] = total;
}
