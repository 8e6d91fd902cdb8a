// A batch norm's parameters of N neighbouring channels, for kernels whose threads keep to their channels.
#pragma once
#include "normalize.cuh"

template <int N>
DEVICE void load_or(const float* p, float otherwise, float (&v)[N]) {
    if (p) {
        load(p, v);
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = otherwise;
    }
}

// Mean, scale and shift (normalize.cuh): as the forward pass has them, to the bit.
template <int N>
DEVICE void load_affine(const float* moments, const float* gamma, const float* beta, int channels, int channel,
                        float (&mean)[N], float (&scale)[N], float (&shift)[N]) {
    load(moments + channel, mean);
    load(moments + channels + channel, scale);
    load_or(gamma ? gamma + channel : nullptr, 1.0f, shift);
#pragma unroll
    for (int i = 0; i < N; ++i) scale[i] *= shift[i];
    load_or(beta ? beta + channel : nullptr, 0.0f, shift);
#pragma unroll
    for (int i = 0; i < N; ++i) shift[i] = shift_of(mean[i], scale[i], shift[i]);
}

// What is taken off the gradient of VEC channels: level + (x - mean)*slope.
DEVICE void load_sums(const float* moments, const double* sums, const double* count, int channels, int channel,
                      float (&level)[VEC], float (&slope)[VEC]) {
    load(moments + channels + channel, slope);  // rstd
    const float inverse = inverse_of(*count);
    const Raw<double, VEC> dy_sum = load_raw<VEC>(sums + channel), dy_xhat = load_raw<VEC>(sums + channels + channel);
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
        level[i] = float(dy_sum.items[i]) * inverse;
        slope[i] *= float(dy_xhat.items[i]) * inverse;
    }
}
