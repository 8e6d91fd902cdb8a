// What chunks of rows found for a batch norm, merged in a fixed order in double, and what is of size C.
//
// Layout as in batch_norm.cu. Blocks of the merges: merge_lanes.cuh; the other kernels have a thread for each channel, or
// element. Cost: bytes below 5 % of what the chunks are of; time is that of one load, of the sums over a block and of the
// launch.
#include "common.cuh"
#include "batch_norm_moments.cuh"
#include "merge_lanes.cuh"

// stats (1 + 2C,) double from the partial results of batch_norm_stats_kernel. Deviations are taken from the first chunk's
// mean, in double.
extern "C" __global__ void __launch_bounds__(GROUP * LANES)
batch_norm_merge_kernel(const double* __restrict__ mean, const float* __restrict__ squares, double* __restrict__ stats, int rows,
                        int chunk_rows, int chunks, int channels) {
    await_predecessor();
    int channel = blockIdx.x * GROUP + threadIdx.x % GROUP;
    double v[3] = {};  // sums of count * d, count * d^2, M2
    if (channel < channels && chunks > 0) {
        struct Part {
            double mean;
            float squares;
        };
        const double origin = mean[channel];
        for_chunks<Part>(
            chunks,
            [&](int chunk) {
                const i64 from = i64(chunk) * channels + channel;
                return Part{mean[from], squares[from]};
            },
            [&](int chunk, const Part& part) {
                const double count = min(rows - chunk * chunk_rows, chunk_rows), d = part.mean - origin;
                v[0] += count * d;
                v[1] += count * d * d;
                v[2] += part.squares;
            });
    }
    sum_lanes(v);
    channel = blockIdx.x * GROUP + threadIdx.x / 32;
    if (threadIdx.x >= GROUP * 32 || threadIdx.x % 32 || channel >= channels) return;
    const double count = double(rows), shift = chunks ? v[0] / count : 0.0, m2 = v[2] + (v[1] - v[0] * shift);
    if (channel == 0) stats[0] = count;
    stats[1 + channel] = (chunks ? mean[channel] : 0.0) + shift;
    stats[1 + channels + channel] = m2 < 0.0 ? 0.0 : m2;
}

// sums (2, C) double from partial (chunks, 2, C) float; also the local parameter gradients where their pointers are not null.
extern "C" __global__ void __launch_bounds__(GROUP * LANES)
batch_norm_backward_merge_kernel(const float* __restrict__ partial, const float* __restrict__ moments, double* __restrict__ sums,
                                 float* __restrict__ dgamma, float* __restrict__ dbeta, int accumulate, int chunks,
                                 int channels) {
    await_predecessor();
    int channel = blockIdx.x * GROUP + threadIdx.x % GROUP;
    double v[2] = {};
    if (channel < channels) {
        for_chunks<float2>(
            chunks,
            [&](int chunk) {
                const float* from = partial + i64(chunk) * 2 * channels + channel;
                return make_float2(from[0], from[channels]);
            },
            [&](int, const float2& part) {
                v[0] += part.x;
                v[1] += part.y;
            });
    }
    sum_lanes(v);
    channel = blockIdx.x * GROUP + threadIdx.x / 32;
    if (threadIdx.x >= GROUP * 32 || threadIdx.x % 32 || channel >= channels) return;
    v[1] *= moments[channels + channel];
    sums[channel] = v[0];
    sums[channels + channel] = v[1];
    // Rounded first: a gradient that is added has the bits of one that stands alone.
    if (dbeta) dbeta[channel] = (accumulate ? dbeta[channel] : 0.0f) + float(v[0]);
    if (dgamma) dgamma[channel] = (accumulate ? dgamma[channel] : 0.0f) + float(v[1]);
}

// One thread per channel: merges the R rows of stats in order, writes moments, count and, in place, running statistics.
extern "C" __global__ void batch_norm_finalize_kernel(const double* __restrict__ stats, float* __restrict__ moments,
                                                      double* __restrict__ total, float* __restrict__ running_mean,
                                                      float* __restrict__ running_var, double eps, double momentum,
                                                      int parts, int channels) {
    await_predecessor();
    const int channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= channels) return;
    double count = 0.0, mean = 0.0, m2 = 0.0;
    for (int part = 0; part < parts; ++part) {
        const double* from = stats + i64(part) * (1 + 2 * i64(channels));
        const double more = from[0];
        if (more == 0.0) continue;
        const double both = count + more, d = from[1 + channel] - mean;
        mean += d * (more / both);
        m2 += from[1 + channels + channel] + d * d * (count * (more / both));
        count = both;
    }
    finalize(count, mean, m2, moments, {running_mean, running_var, momentum}, eps, channel, channels);
    if (channel == 0) *total = count;
}

// Statistics of some channels beside those of others over the same rows: stats of the channels together. One thread for
// each element.
extern "C" __global__ void batch_norm_concat_kernel(const double* __restrict__ first, const double* __restrict__ second,
                                                    double* __restrict__ stats, int first_channels, int channels) {
    await_predecessor();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i > 2 * channels) return;
    const int moment = max(i - 1, 0) / channels, channel = max(i - 1, 0) % channels, others = channels - first_channels;
    if (i == 0) {
        stats[i] = first[i];
    } else if (channel < first_channels) {
        stats[i] = first[1 + moment * first_channels + channel];
    } else {
        stats[i] = second[1 + moment * others + channel - first_channels];
    }
}

extern "C" __global__ void batch_norm_eval_moments_kernel(const float* __restrict__ running_mean,
                                                          const float* __restrict__ running_var,
                                                          float* __restrict__ moments, double eps, int channels) {
    await_predecessor();
    const int channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= channels) return;
    moments[channel] = running_mean[channel];
    moments[channels + channel] = float(1.0 / sqrt(double(running_var[channel]) + eps));
}
