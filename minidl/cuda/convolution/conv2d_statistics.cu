// What patches of a convolution's output left for a batch norm, added up: conv2d_hopper.cu and conv2d_halo.cu leave two
// values per channel of each patch, what a warpgroup stores of a tile. A result depends on sizes and the tile, not on
// which block computed which patch when.
//
// Layout: partial (patches, 2, C) float; sums (R, 2, C) of SUM, float or double; stats (1 + 2C) double as of batch_norm.cu.
// Block: (COLUMNS, LANES) threads; a thread adds up every LANES-th row of its column in double, the lanes are added in
// order.
// conv2d_finalize_kernel goes on to what batch_norm_finalize_kernel makes of the statistics, for one rank.
// Cost: reads 8 bytes per patch and channel: of a bf16 tensor whose patches have 64 pixels 6 per cent of the bytes.
#include "common.cuh"
#include "batch_norm_moments.cuh"

constexpr int COLUMNS = 32, LANES = 8, MOST_LANES = 32;

// The sums of rows first..last of N columns that lie `apart`, a chain of additions each; on the first lane.
template <int COUNT, int N, class S>
DEVICE void sum_columns(double (&sum)[N], const S* from, int apart, int pitch, int first, int last, bool inside) {
    __shared__ double parts[N][COUNT][COLUMNS];
    if (inside)
#pragma unroll 8
        for (int i = first + int(threadIdx.y); i < last; i += COUNT)
#pragma unroll
            for (int k = 0; k < N; ++k) sum[k] += from[i64(i) * pitch + k * apart];
#pragma unroll
    for (int k = 0; k < N; ++k) parts[k][threadIdx.y][threadIdx.x] = sum[k];
    __syncthreads();
    if (threadIdx.y == 0)
#pragma unroll
        for (int lane = 1; lane < COUNT; ++lane)
#pragma unroll
            for (int k = 0; k < N; ++k) sum[k] += parts[k][lane][threadIdx.x];
}

// Sums of every `per` patches. Grid: (chunks, tiles of columns), LANES lanes.
extern "C" __global__ void __launch_bounds__(COLUMNS * LANES)
conv2d_sums_kernel(const float* __restrict__ partial, SUM* __restrict__ sums, int patches, int per, int columns) {
    await_predecessor();
    const int column = blockIdx.y * COLUMNS + threadIdx.x, first = blockIdx.x * per;
    const bool inside = column < columns;
    double sum[1] = {};
    sum_columns<LANES>(sum, partial + column, 0, columns, first, min(first + per, patches), inside);
    if (threadIdx.y == 0 && inside) sums[i64(blockIdx.x) * columns + column] = SUM(sum[0]);
}

// Mean and sum of squared deviations from sums and sums of squares (rows, 2, channels); on the first lane.
struct Moments {
    double mean, deviations;

    __device__ __forceinline__ Moments(const SUM* __restrict__ sums, int rows, int channel, int channels, int count) {
        double total[2] = {};
        sum_columns<MOST_LANES>(total, sums + channel, channels, 2 * channels, 0, rows, channel < channels);
        mean = total[0] / count;
        deviations = fma(-total[0], mean, total[1]);
        // Of values with eight bits, two that differ leave more than this; less is the rounding of the sums.
        if (deviations < total[1] * 0x1p-50) deviations = 0.0;
    }
};

// Statistics (1 + 2C,). Grid: tiles of channels, MOST_LANES lanes.
extern "C" __global__ void __launch_bounds__(COLUMNS * MOST_LANES)
conv2d_moments_kernel(const SUM* __restrict__ sums, double* __restrict__ stats, int rows, int channels, int count) {
    await_predecessor();
    const int channel = blockIdx.x * COLUMNS + threadIdx.x;
    const Moments found(sums, rows, channel, channels, count);
    if (threadIdx.y > 0 || channel >= channels) return;
    if (channel == 0) stats[0] = count;
    stats[1 + channel] = found.mean;
    stats[1 + channels + channel] = found.deviations;
}

// The same grid. total: (1,), the count.
extern "C" __global__ void __launch_bounds__(COLUMNS * MOST_LANES)
conv2d_finalize_kernel(const SUM* __restrict__ sums, float* __restrict__ moments, double* __restrict__ total,
                       float* __restrict__ running_mean, float* __restrict__ running_var, double eps, double momentum,
                       int rows, int channels, int count) {
    await_predecessor();
    const int channel = blockIdx.x * COLUMNS + threadIdx.x;
    const Moments found(sums, rows, channel, channels, count);
    if (threadIdx.y > 0 || channel >= channels) return;
    if (channel == 0) *total = count;
    const Running running = {running_mean, running_var, momentum};
    finalize(count, found.mean, found.deviations, moments, running, eps, channel, channels);
}
