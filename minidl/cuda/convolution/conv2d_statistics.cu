// What patches of a convolution's output left for a batch norm, added up: conv2d_hopper.cu and conv2d_halo.cu leave two
// values per channel of each patch, what a warpgroup stores of a tile. A result depends on sizes and the tile, not on
// which block computed which patch when.
//
// Layout: partial (patches, 2, C) float; sums (R, 2, C) of SUM, float or double; stats (1 + 2C) double as of batch_norm.cu.
// conv2d_finalize_kernel goes on to what batch_norm_finalize_kernel makes of the statistics, for one rank.
// Cost: reads 8 bytes per patch and channel: of a bf16 tensor whose patches have 64 pixels 6 per cent of the bytes.
#include "common.cuh"

#if defined(MERGE)
#include "batch_norm_moments.cuh"
#include "merge_lanes.cuh"

// Mean and sum of squared deviations of `count` values from sums and sums of squares (rows, 2, channels). Block: as of
// merge_lanes.cuh.
struct Moments {
    double mean, deviations;
    int channel;
    bool first;  // of the threads that know them

    __device__ __forceinline__ Moments(const SUM* __restrict__ sums, int count, int rows, int channels) {
        struct Pair {
            SUM sum, square;
        };
        double total[2] = {};
        channel = blockIdx.x * GROUP + threadIdx.x % GROUP;
        if (channel < channels)
            for_chunks<Pair>(
                rows,
                [&](int row) {
                    const SUM* from = sums + i64(row) * 2 * channels + channel;
                    return Pair{from[0], from[channels]};
                },
                [&](int, const Pair& pair) {
                    total[0] += pair.sum;
                    total[1] += pair.square;
                });
        sum_lanes(total);
        channel = blockIdx.x * GROUP + threadIdx.x / 32;
        first = threadIdx.x < GROUP * 32 && threadIdx.x % 32 == 0 && channel < channels;
        mean = total[0] / count;
        deviations = fma(-total[0], mean, total[1]);
        // Of values with eight bits, two that differ leave more than this; less is the rounding of the sums.
        if (deviations < total[1] * 0x1p-50) deviations = 0.0;
    }
};

// Statistics (1 + 2C,).
extern "C" __global__ void __launch_bounds__(GROUP * LANES)
conv2d_moments_kernel(const SUM* __restrict__ sums, double* __restrict__ stats, int count, int rows, int channels) {
    const Moments found(sums, count, rows, channels);
    if (!found.first) return;
    if (found.channel == 0) stats[0] = count;
    stats[1 + found.channel] = found.mean;
    stats[1 + channels + found.channel] = found.deviations;
}

// total: (1,), the count.
extern "C" __global__ void __launch_bounds__(GROUP * LANES)
conv2d_finalize_kernel(const SUM* __restrict__ sums, float* __restrict__ moments, double* __restrict__ total,
                       float* __restrict__ running_mean, float* __restrict__ running_var, double eps, double momentum,
                       int count, int rows, int channels) {
    const Moments found(sums, count, rows, channels);
    if (!found.first) return;
    if (found.channel == 0) *total = count;
    const Running running = {running_mean, running_var, momentum};
    finalize(count, found.mean, found.deviations, moments, running, eps, found.channel, channels);
}

#else

constexpr int COLUMNS = 32, LANES = 8;

// Sums of every `per` patches. Grid: (chunks, tiles of columns); block: COLUMNS by LANES, each of which adds up every
// LANES-th patch in double; the lanes are added in order.
extern "C" __global__ void __launch_bounds__(COLUMNS * LANES)
conv2d_sums_kernel(const float* __restrict__ partial, SUM* __restrict__ sums, int patches, int per, int columns) {
    __shared__ double parts[LANES][COLUMNS];
    const int column = blockIdx.y * COLUMNS + threadIdx.x, first = blockIdx.x * per;
    const int last = min(first + per, patches);
    double sum = 0.0;
    if (column < columns)
#pragma unroll 8
        for (int i = first + int(threadIdx.y); i < last; i += LANES) sum += partial[i64(i) * columns + column];
    parts[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || column >= columns) return;
#pragma unroll
    for (int lane = 1; lane < LANES; ++lane) sum += parts[lane][threadIdx.x];
    sums[i64(blockIdx.x) * columns + column] = SUM(sum);
}
#endif
