// What kernels do with the elements of a thread, VEC neighbouring channels, between a batch norm and a max pooling.
#pragma once
#include "affine.cuh"

// relu((x - mean)*rstd*gamma + beta) of a thread's channels, rounded to T as a pass of its own would.
struct Normalizer {
    float mean[VEC], scale[VEC], shift[VEC];

    __device__ __forceinline__ Normalizer(const float* moments, const float* gamma, const float* beta, int channels,
                                          int c) {
        load_affine(moments, gamma, beta, channels, c, mean, scale, shift);
    }

    __device__ __forceinline__ Raw<T, VEC> operator()(const Raw<T, VEC>& raw) const {
        float v[VEC];
        unpack(raw, v);
#pragma unroll
        for (int i = 0; i < VEC; ++i) v[i] = normalize(v[i], mean[i], scale[i], shift[i]);
        Raw<T, VEC> y = pack<T>(v);  // before the ReLU, which takes two lanes at a time then
#pragma unroll
        for (int i = 0; i < (VEC * int(sizeof(T)) + 3) / 4; ++i) y.pairs[i] = lane_max(y.pairs[i], 0);
        return y;
    }
};

#ifdef TILE_H
// gamma*rstd*(g - sums[0]/count - (x - mean)*rstd*sums[1]/count); without BATCH gamma*rstd*g.
struct NormalizedBackward {
    const T *x, *dx;  // of one shape, dense
    const float *moments, *gamma;
    const double *sums, *count;
    int channels;
    InputGradient<BATCH> gradient;
    Raw<T, VEC> raw[BATCH ? TILE_H : 1][BATCH ? STRIDE_W : 1];

    __device__ __forceinline__ void begin(int c) {
        float mean[VEC], scale[VEC], shift[VEC];
        load_affine(moments, gamma, nullptr, channels, c, mean, scale, shift);
        gradient = InputGradient<BATCH>(mean, scale, moments, sums, count, channels, c);
    }

    __device__ __forceinline__ void expect(int ih, int iw, i64, const T* place) {
#if BATCH
        raw[ih][iw] = load_raw<VEC>(x + (place - dx));
#endif
    }

    template <class Sum>
    __device__ __forceinline__ void operator()(int ih, int iw, T* place, const Sum& sum) const {
        float g[VEC], v[VEC] = {};
        unpack(sum.rounded(), g);  // as rounded by the pass that it replaces
        if (BATCH) unpack(raw[ih][iw], v);
#pragma unroll
        for (int i = 0; i < VEC; ++i) g[i] = gradient(i, g[i], v[i]);
        store(place, g);
    }
};
#endif
