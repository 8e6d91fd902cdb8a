// Sums of columns in a fixed order: totals[c] = sum over rows of partial[row, c] of SOURCE, double or u32, in double.
//
// One block for WIDE neighbouring columns (a power of two up to 16): BLOCK / WIDE rows at a time, and DEPTH of these on
// their way; then a tree within each warp, and over the warps. sizeof(SOURCE) bytes and 1 operation per element; the
// second step of reductions whose blocks leave a row each.
#include "common.cuh"

#define BLOCK 512
constexpr int ROWS = BLOCK / WIDE, DEPTH = 8, WARPS = BLOCK / 32;

DEVICE double sum_of(double) { return 0.0; }
DEVICE u64 sum_of(u32) { return 0; }

extern "C" __global__ void __launch_bounds__(BLOCK)
column_totals(const SOURCE* __restrict__ partial, double* __restrict__ totals, int rows, int columns) {
    await_predecessor();
    typedef decltype(sum_of(SOURCE())) Sum;
    __shared__ Sum scratch[WIDE][WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * WIDE;
    const SOURCE* from = partial + min(first + int(threadIdx.x) % WIDE, columns - 1);
    Sum sum = 0;
#pragma unroll 1
    for (int row = threadIdx.x / WIDE; row < rows; row += DEPTH * ROWS) {
        SOURCE part[DEPTH];
#pragma unroll
        for (int u = 0; u < DEPTH; ++u) {
            const int at = row + u * ROWS;
            part[u] = at < rows ? from[i64(at) * columns] : SOURCE(0);
        }
#pragma unroll
        for (int u = 0; u < DEPTH; ++u) sum += part[u];
    }
#pragma unroll
    for (int offset = 16; offset >= WIDE; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (lane < WIDE) scratch[lane][warp] = sum;
    __syncthreads();
    if (warp >= WIDE || first + warp >= columns) return;
    sum = warp_sum(lane < WARPS ? scratch[warp][lane] : Sum(0));
    if (lane == 0) totals[first + warp] = double(sum);
}
