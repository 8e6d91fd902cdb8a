// How a batch norm's statistics become moments (2, C), mean and 1/sqrt(biased variance + eps), and running statistics.
#pragma once
#include "common.cuh"

// Running statistics of a channel: (C,) each or null, updated in place, the variance with the unbiased one. They are read
// when this is made, long before they are needed.
struct Running {
    float *mean, *variance;
    double momentum, old_mean, old_variance;

    // Of a channel, or of none below zero.
    __device__ __forceinline__ Running(float* mean, float* variance, double momentum, int channel)
        : mean(mean), variance(variance), momentum(momentum) {
        old_mean = mean && channel >= 0 ? mean[channel] : 0.0f;
        old_variance = variance && channel >= 0 ? variance[channel] : 0.0f;
    }

    __device__ __forceinline__ void finalize(double count, double batch_mean, double m2, float* __restrict__ moments,
                                             double eps, int channel, int channels) const {
        const double biased = count > 0.0 ? m2 / count : 0.0;
        moments[channel] = float(batch_mean);
        moments[channels + channel] = float(1.0 / sqrt(biased + eps));
        if (count == 0.0) return;
        const double unbiased = count > 1.0 ? m2 / (count - 1.0) : biased;
        if (mean) mean[channel] = float((1.0 - momentum) * old_mean + momentum * batch_mean);
        if (variance) variance[channel] = float((1.0 - momentum) * old_variance + momentum * unbiased);
    }
};
