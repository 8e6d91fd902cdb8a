// How the kernels of Hopper normalise their input as they read it: x is the input of a batch norm with a ReLU over it,
// and what a product sees are relu((x - mean)*rstd*gamma + beta), rounded as batch_norm.cu rounds them, to the bit. They
// are never in memory. Padding lies behind the ReLU: its zeros stay zeros.
#pragma once
#include "hopper.cuh"

// The batch norm: moments (2, channels), mean and rstd; gamma, beta (channels,).
struct Norm {
    const float *moments, *gamma, *beta;
    int channels;
};

// What two neighbouring channels need; behind the last one zeros, which make zeros of zeros.
struct Affine {
    float2 mean = {0, 0}, scale = {0, 0}, shift = {0, 0};

    __device__ __forceinline__ Affine() {}
    __device__ __forceinline__ Affine(const Norm& norm, int channel) {
        if (channel >= norm.channels) return;
        mean = *reinterpret_cast<const float2*>(norm.moments + channel);
        scale = *reinterpret_cast<const float2*>(norm.moments + norm.channels + channel);
        const float2 gamma = *reinterpret_cast<const float2*>(norm.gamma + channel);
        shift = *reinterpret_cast<const float2*>(norm.beta + channel);
        scale.x *= gamma.x, scale.y *= gamma.y;
    }

    // Of a pair of values as they lie in memory. The rounding keeps NaN.
    __device__ __forceinline__ u32 operator()(u32 pair) const {
        Raw<T, 2> raw;
        raw.pairs[0] = pair;
        float v[2];
        unpack(raw, v);
        v[0] = fmaf(v[0] - mean.x, scale.x, shift.x);
        v[1] = fmaf(v[1] - mean.y, scale.y, shift.y);
        u32 y;
#if DTYPE == 1
        asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(v[1]), "f"(v[0]));
#else
        asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(v[1]), "f"(v[0]));
#endif
        return y;
    }
};
