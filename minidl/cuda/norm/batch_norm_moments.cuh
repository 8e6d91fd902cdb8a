// How a batch norm's statistics become moments (2, C), mean and 1/sqrt(biased variance + eps), and running statistics.
#pragma once
#include "await_here.cuh"

// A number of rows and what sums over them are multiplied by, ready before the sums are: 1/rows, or 0; 1/(rows - 1), or
// 1.
struct Count {
    double rows, inverse, unbiased;
};

// 1/sqrt(x) to the last bits, of a normal number: without the branch for others that a library has, and its registers.
DEVICE double inverse_root(double x) {
    double root;
    asm("rsqrt.approx.ftz.f64 %0, %1;" : "=d"(root) : "d"(x));
#pragma unroll
    for (int i = 0; i < 2; ++i) root = fma(0.5 * root, fma(-x * root, root, 1.0), root);
    return root;
}

// Running statistics of a channel: (C,) each or null, updated in place, the variance with the unbiased one. They are
// read when this is made.
struct Running {
    float *mean, *variance;
    double momentum;
    float old_mean, old_variance;

    // Of a channel, or of none below zero.
    __device__ __forceinline__ Running(float* mean, float* variance, double momentum, int channel)
        : mean(mean), variance(variance), momentum(momentum) {
        old_mean = mean && channel >= 0 ? mean[channel] : 0.0f;
        old_variance = variance && channel >= 0 ? variance[channel] : 0.0f;
    }

    __device__ __forceinline__ void finalize(const Count& count, double batch_mean, double m2,
                                             float* __restrict__ moments, double eps, int channel, int channels) const {
        moments[channel] = float(batch_mean);
        moments[channels + channel] = float(inverse_root(m2 * count.inverse + eps));
        if (count.rows == 0.0) return;
        float before = old_mean, variance_before = old_variance;
        await_here(before);
        await_here(variance_before);
        const double unbiased = m2 * count.unbiased;
        if (mean) mean[channel] = float((1.0 - momentum) * before + momentum * batch_mean);
        if (variance) variance[channel] = float((1.0 - momentum) * variance_before + momentum * unbiased);
    }
};
