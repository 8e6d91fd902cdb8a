// How a batch norm's statistics become moments (2, C), mean and 1/sqrt(biased variance + eps), and running statistics.
#pragma once
#include "common.cuh"

struct Running {
    float *mean, *variance;  // (C,) or null; updated in place, the variance with the unbiased one
    double momentum;
};

DEVICE void finalize(double count, double mean, double m2, float* __restrict__ moments, const Running& running, double eps,
                     int channel, int channels) {
    const double variance = count > 0.0 ? m2 / count : 0.0;
    moments[channel] = float(mean);
    moments[channels + channel] = float(1.0 / sqrt(variance + eps));
    if (count == 0.0) return;
    const double unbiased = count > 1.0 ? m2 / (count - 1.0) : variance, momentum = running.momentum;
    if (running.mean) running.mean[channel] = float((1.0 - momentum) * running.mean[channel] + momentum * mean);
    if (running.variance)
        running.variance[channel] = float((1.0 - momentum) * running.variance[channel] + momentum * unbiased);
}
