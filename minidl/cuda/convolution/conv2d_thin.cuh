// What the kernels of thin 1x1 convolutions share: products between rows of many channels and rows of FEW, which
// memory bounds. See conv2d_thin.cu and conv2d_thin_weight.cu.
#pragma once
#include "mma.cuh"
#include "normalize.cuh"

constexpr int WIDTH = 16 / int(sizeof(T));  // channels of a vector
constexpr bool UNITS = sizeof(T) == 2;      // matrix units multiply; float32 is multiplied as it is
constexpr int OCTETS = (FEW + 7) / 8;       // of the few
typedef Raw<T, WIDTH> Vector;

// As the product takes it: with TF32 rounded to that.
DEVICE T operand(T x) {
#if TF32
    return __uint_as_float(round_to_tf32(__float_as_uint(x)));
#else
    return x;
#endif
}

DEVICE void clear(Vector& v) { v.words[0] = make_uint4(0, 0, 0, 0); }

// A vector from `channel` on, VEC at a time; zeros behind the last channel.
template <int VEC_>
DEVICE Vector fetch(const T* __restrict__ row, int channel, int channels) {
    Vector v;
    if constexpr (VEC_ == WIDTH) {
        clear(v);
        if (channel < channels) v = load_once<WIDTH>(row + channel);
    } else {
#pragma unroll
        for (int j = 0; j < WIDTH; j += VEC_) {
            Raw<T, VEC_> part;
#pragma unroll
            for (int e = 0; e < VEC_; ++e) part.items[e] = from_float<T>(0.0f);
            if (channel + j < channels) part = load_raw<VEC_>(row + channel + j);
#pragma unroll
            for (int e = 0; e < VEC_; ++e) v.items[j + e] = part.items[e];
        }
    }
    return v;
}

// Of WIDTH neighbouring channels of the input of a batch norm with a ReLU over it: that ReLU's output, for `affine`
// pairs of scale and shift.
DEVICE void normalize(Vector& x, const float2 (&affine)[WIDTH]) {
    float v[WIDTH];
    unpack(x, v);
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) v[e] = clamp_below(fmaf(v[e], affine[e].x, affine[e].y), 0.0f);
    x = pack<T>(v);
}

// A channel's scale and shift (normalize.cuh, where the mean is in the shift); zeros behind the last channel.
DEVICE float2 affine_of(const float* moments, const float* gamma, const float* beta, int channel, int channels) {
    if (channel >= channels) return {0.0f, 0.0f};
    const float scale = moments[channels + channel] * gamma[channel];
    return {scale, shift_of(moments[channel], scale, beta[channel])};
}

// FEW values of a row, VEC_ at a time, as floats.
template <int VEC_>
DEVICE void fetch_few(const T* __restrict__ row, float (&v)[FEW]) {
#pragma unroll
    for (int f = 0; f < FEW; f += VEC_) {
        float part[VEC_];
        load(row + f, part);
#pragma unroll
        for (int e = 0; e < VEC_; ++e) v[f + e] = part[e];
    }
}

