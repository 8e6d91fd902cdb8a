// What patches of a convolution's output left for a batch norm, added up: conv2d_hopper.cu and conv2d_halo.cu leave two
// values per channel of each patch, what a warpgroup stores of a tile. A result depends on sizes and the tile, not on
// which block computed which patch when.
//
// Layout: partial (patches, 2, C) float; sums (R, 2, C) of SUM, float or double; stats (1 + 2C) double as of batch_norm.cu.
// Block: (COLUMNS, LANES) threads; a thread adds up every LANES-th row of its column in double, the lanes are added in
// order.
// Cost: reads 8 bytes per patch and channel: of a bf16 tensor whose patches have 64 pixels 6 per cent of the bytes.
#include "common.cuh"
#include "overlap.cuh"

constexpr int COLUMNS = 32, LANES = 8, MOST_LANES = 32;

// The sum of rows first..last of a column; on the first lane.
template <int COUNT, class S>
DEVICE double sum_column(const S* from, int pitch, int first, int last, bool inside) {
    __shared__ double parts[COUNT][COLUMNS];
    double sum = 0.0;
    if (inside)
#pragma unroll 8
        for (int i = first + int(threadIdx.y); i < last; i += COUNT) sum += from[i64(i) * pitch];
    __syncthreads();
    parts[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0)
#pragma unroll
        for (int lane = 1; lane < COUNT; ++lane) sum += parts[lane][threadIdx.x];
    return sum;
}

// Sums of every `per` patches. Grid: (chunks, tiles of columns), LANES lanes.
extern "C" __global__ void __launch_bounds__(COLUMNS * LANES)
conv2d_sums_kernel(const float* __restrict__ partial, SUM* __restrict__ sums, int patches, int per, int columns) {
    wait_for_inputs();
    const int column = blockIdx.y * COLUMNS + threadIdx.x, first = blockIdx.x * per;
    const bool inside = column < columns;
    const double sum = sum_column<LANES>(partial + column, columns, first, min(first + per, patches), inside);
    if (threadIdx.y == 0 && inside) sums[i64(blockIdx.x) * columns + column] = SUM(sum);
}

// Count, means and sums of squared deviations from sums and sums of squares. Grid: tiles of channels, MOST_LANES lanes.
extern "C" __global__ void __launch_bounds__(COLUMNS * MOST_LANES)
conv2d_moments_kernel(const SUM* __restrict__ sums, double* __restrict__ stats, int rows, int channels, int count) {
    wait_for_inputs();
    const int channel = blockIdx.x * COLUMNS + threadIdx.x;
    const bool inside = channel < channels;
    const double sum = sum_column<MOST_LANES>(sums + channel, 2 * channels, 0, rows, inside);
    const double squares = sum_column<MOST_LANES>(sums + channels + channel, 2 * channels, 0, rows, inside);
    if (threadIdx.y > 0 || !inside) return;
    const double mean = sum / count, deviations = fma(-sum, mean, squares);
    // Of values with eight bits, two that differ leave more than this; less is the rounding of the sums.
    const double least = squares * 0x1p-50;
    if (channel == 0) stats[0] = count;
    stats[1 + channel] = mean;
    stats[1 + channels + channel] = deviations < least ? 0.0 : deviations;
}
