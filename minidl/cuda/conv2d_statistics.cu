// Statistics of a convolution's output from those of its patches, which the kernels for Hopper leave: the means and sums
// of squared deviations of batch_norm.cu, a patch being what a warpgroup stores of a tile.
//
// Layout: partial (patches, 2, C) float, mean and M2 of each patch; mean (chunks, C) double and squares (chunks, C) float,
// mean and M2 of each chunk; counts (chunks,) double, its pixels. batch_norm_merge_kernel goes on from there.
// An image of `height` x `width` is cut into patches, `across` in a line, `down` lines; those at its edges are smaller.
//
// Grid: (chunks, tiles of 32 channels); block (32, LANES): a thread merges every LANES-th of the `per` patches of a chunk,
// in double, relative to the first one's mean; the lanes are merged in order. Patches are those of a tile, so a result
// depends on sizes and the tile, not on which block computed it when.
// Cost: reads 8 bytes per patch and channel, 3 per cent of the bytes of a bf16 tensor whose patches have 128 pixels.
#include "common.cuh"

constexpr int COLUMNS = 32, LANES = 8;

struct Cut {
    int patches, per, channels;
    int across, down, width, height, patch_width, patch_height;
};

DEVICE int pixels(const Cut& cut, int patch) {
    const int line = patch / cut.across;
    const int x = (patch - line * cut.across) * cut.patch_width, y = line % cut.down * cut.patch_height;
    return min(cut.width - x, cut.patch_width) * min(cut.height - y, cut.patch_height);
}

extern "C" __global__ void __launch_bounds__(COLUMNS * LANES)
conv2d_statistics_kernel(const float* __restrict__ partial, double* __restrict__ mean, float* __restrict__ squares,
                         double* __restrict__ counts, Cut cut) {
    __shared__ double parts[4][LANES][COLUMNS];
    const int lane = threadIdx.y, channel = blockIdx.y * COLUMNS + threadIdx.x;
    const int first = blockIdx.x * cut.per, last = min(first + cut.per, cut.patches);
    const float* from = partial + channel;
    double origin = 0.0, v[4] = {};  // sums of count, count * d, count * d^2, M2 with d the distance from the origin
    if (channel < cut.channels) {
        origin = from[i64(first) * 2 * cut.channels];
#pragma unroll 4
        for (int patch = first + lane; patch < last; patch += LANES) {
            const float* at = from + i64(patch) * 2 * cut.channels;
            const double count = pixels(cut, patch), d = at[0] - origin;
            v[0] += count;
            v[1] += count * d;
            v[2] += count * d * d;
            v[3] += at[cut.channels];
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) parts[i][lane][threadIdx.x] = v[i];
    __syncthreads();
    if (lane > 0 || channel >= cut.channels) return;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        for (int other = 1; other < LANES; ++other) v[i] += parts[i][other][threadIdx.x];
    const double shift = v[1] / v[0];
    const i64 to = i64(blockIdx.x) * cut.channels + channel;
    mean[to] = origin + shift;
    squares[to] = clamp_below(float(v[3] + (v[2] - v[1] * shift)), 0.0f);
    if (channel == 0) counts[blockIdx.x] = v[0];
}

// Sums of every `per` of (patches, columns) float: (chunks, columns) float, grid and block as above.
extern "C" __global__ void __launch_bounds__(COLUMNS * LANES)
conv2d_sums_kernel(const float* __restrict__ partial, float* __restrict__ sums, int patches, int per, int columns) {
    __shared__ double parts[LANES][COLUMNS];
    const int lane = threadIdx.y, column = blockIdx.y * COLUMNS + threadIdx.x;
    const int first = blockIdx.x * per, last = min(first + per, patches);
    double sum = 0.0;
    if (column < columns)
#pragma unroll 8
        for (int patch = first + lane; patch < last; patch += LANES) sum += partial[i64(patch) * columns + column];
    parts[lane][threadIdx.x] = sum;
    __syncthreads();
    if (lane > 0 || column >= columns) return;
    for (int other = 1; other < LANES; ++other) sum += parts[other][threadIdx.x];
    sums[i64(blockIdx.x) * columns + column] = float(sum);
}
