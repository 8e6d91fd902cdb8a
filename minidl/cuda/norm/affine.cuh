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

// The gradient of a batch norm's input from g, that of its output, of N channels: gamma*rstd*(g - level - (x -
// mean)*slope) with level = sums[0]/count and slope = rstd*sums[1]/count; where the moments are constants, not
// OF_BATCH, gamma*rstd*g. Of 16-bit types g*scale + (x*bend + offset): two instructions of four, that err as their
// forward pass does (normalize.cuh).
template <bool OF_BATCH, int N = VEC>
struct InputGradient {
    float scale[N], bend[OF_BATCH ? N : 1], offset[OF_BATCH ? N : 1], mean[OF_BATCH && !FOLDED ? N : 1];

    __device__ __forceinline__ InputGradient() {}
    __device__ __forceinline__ InputGradient(const float (&means)[N], const float (&scales)[N],
                                             const float* moments, const double* sums, const double* count,
                                             int channels, int channel) {
        if constexpr (OF_BATCH) {
            load(moments + channels + channel, bend);  // rstd
            const float inverse = inverse_of(*count);
            const Raw<double, N> dy_sum = load_raw<N>(sums + channel);
            const Raw<double, N> dy_xhat = load_raw<N>(sums + channels + channel);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                offset[i] = float(dy_sum.items[i]) * inverse;
                bend[i] *= float(dy_xhat.items[i]) * inverse;
                if constexpr (FOLDED) {
                    offset[i] = fmaf(means[i], bend[i], -offset[i]) * scales[i];
                    bend[i] *= -scales[i];
                } else {
                    mean[i] = means[i];
                }
            }
        }
#pragma unroll
        for (int i = 0; i < N; ++i) scale[i] = scales[i];
    }

    // As another block's, or thread's, was made.
    __device__ __forceinline__ void set(const float (&scales)[N], const float (&means)[N], const float* bends,
                                        const float* offsets) {
        if constexpr (OF_BATCH) {
            load(bends, bend);
            load(offsets, offset);
        }
#pragma unroll
        for (int i = 0; i < N; ++i) {
            scale[i] = scales[i];
            if constexpr (OF_BATCH && !FOLDED) mean[i] = means[i];
        }
    }

    // Of the i-th channel; with `add` on top.
    __device__ __forceinline__ float operator()(int i, float g, float x) const {
        if constexpr (OF_BATCH && FOLDED) return fmaf(g, scale[i], fmaf(x, bend[i], offset[i]));
        return (*this)(i, g, x, 0.0f);
    }
    __device__ __forceinline__ float operator()(int i, float g, float x, float add) const {
        if constexpr (!OF_BATCH) return fmaf(g, scale[i], add);  // no negative zero without `add`
        if constexpr (FOLDED) return (*this)(i, g, x) + add;
        return fmaf(g - fmaf(x - mean[i], bend[i], offset[i]), scale[i], add);
    }
};
