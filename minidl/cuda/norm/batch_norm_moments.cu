// What is of size C in a batch norm: statistics of ranks merged into moments, those of arrays side by side put
// together, moments of the running statistics. Layout as in batch_norm.cu; a thread for each channel, or element.
#include "batch_norm_moments.cuh"

// Merges the R rows of stats in order, writes moments, count and, in place, running statistics.
extern "C" __global__ void batch_norm_finalize_kernel(const double* __restrict__ stats, float* __restrict__ moments,
                                                      double* __restrict__ total, float* __restrict__ running_mean,
                                                      float* __restrict__ running_var, double eps, double momentum,
                                                      int parts, int channels) {
    await_predecessor();
    const int channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= channels) return;
    const Running running(running_mean, running_var, momentum, channel);
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
    const Count all = {count, count > 0.0 ? 1.0 / count : 0.0, count > 1.0 ? 1.0 / (count - 1.0) : 1.0};
    running.finalize(all, mean, m2, moments, eps, channel, channels);
    if (channel == 0) *total = count;
}

// Statistics of some channels beside those of others over the same rows: stats of the channels together.
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
