// Layer normalisation over rows of channels (Ba, Kiros and Hinton 2016). The parameter gradients: sample_sums in
// group_norm.cu.
//
// x, dy, add: (rows, channels) of T at a pitch; y, dx: dense; moments (2, rows) float: mean, 1/sqrt(biased variance + eps);
// gamma, beta (channels,) float or null.
//   FORWARD:  y = (x - mean) * rstd * gamma + beta. The variance is the mean of squared deviations from the mean.
//   else:     dx = rstd * (g - mean of g - xhat * mean of g*xhat) + add, with g = dy * gamma
//
// Mapping: row.cuh. With -DONCE=1 no thread has more than one run of a row, which then stays in its registers. Cost per
// element, s = sizeof(T): forward 2s bytes, 8 FLOP; backward 3s bytes, 10 FLOP (+ s with add); floor on an H200 at 4.2 TB/s
// in bf16 per million elements: 0.95 and 1.43 us.
#include "common.cuh"
#include "row.cuh"

// RUN values per channel, `otherwise` where there are none.
DEVICE void load_values(const float* __restrict__ values, int first, int channels, float otherwise, float (&v)[RUN]) {
    if (values) {
        load_run(values, first, channels, otherwise, v);
    } else {
#pragma unroll
        for (int e = 0; e < RUN; ++e) v[e] = otherwise;
    }
}

// What lies behind the row becomes `value`, where a run may reach beyond it.
DEVICE void fill_behind(int first, int channels, float value, float (&v)[RUN]) {
#pragma unroll
    for (int e = 0; e < RUN; ++e)
        if (RUN > VEC && first + e >= channels) v[e] = value;
}

#if defined(FORWARD)

extern "C" __global__ void __launch_bounds__(BLOCK, ONCE ? 6 : 4)
layer_norm_kernel(const T* __restrict__ x, const float* __restrict__ gamma, const float* __restrict__ beta,
                  T* __restrict__ y, float* __restrict__ moments, i64 rows, int channels, i64 pitch, float eps) {
    const RowShare at(rows);
    const T* row = x + at.row * pitch;
    const float pivot = rows > 0 ? to_float(row[0]) : 0.0f;
    float v[RUN], total = 0.0f, square = 0.0f;
    for (int i = at.first; i < channels; i += RowShare::STEP) {
        load_run(row, i, channels, pivot, v);
#pragma unroll
        for (int e = 0; e < RUN; ++e) total += v[e] - pivot;
    }
    const float mean = pivot + over_row(total) / float(channels);
    for (int i = at.first; i < channels; i += RowShare::STEP) {
        if (ONCE) fill_behind(i, channels, mean, v);
        else load_run(row, i, channels, mean, v);
        float part = 0.0f;  // sums of runs, and then of these: long rows lose fewer digits
#pragma unroll
        for (int e = 0; e < RUN; ++e) part = fmaf(v[e] - mean, v[e] - mean, part);
        square += part;
    }
    const float rstd = 1.0f / sqrtf(over_row(square) / float(channels) + eps);
    if (!at.inside) return;
    if (at.first == 0) {
        moments[at.row] = mean;
        moments[rows + at.row] = rstd;
    }
    for (int i = at.first; i < channels; i += RowShare::STEP) {
        float scale[RUN], shift[RUN];
        if (!ONCE) load_run(row, i, channels, mean, v);
        load_values(gamma, i, channels, 1.0f, scale);
        load_values(beta, i, channels, 0.0f, shift);
#pragma unroll
        for (int e = 0; e < RUN; ++e) v[e] = fmaf((v[e] - mean) * rstd, scale[e], shift[e]);
        store_run(y + at.row * channels, i, channels, v);
    }
}

#else

extern "C" __global__ void __launch_bounds__(BLOCK, 4)
layer_norm_backward_kernel(const T* __restrict__ dy, const T* __restrict__ x, const float* __restrict__ moments,
                           const float* __restrict__ gamma, const T* __restrict__ add, T* __restrict__ dx, i64 rows,
                           int channels, i64 dy_pitch, i64 x_pitch, i64 add_pitch) {
    const RowShare at(rows);
    const T *gradient = dy + at.row * dy_pitch, *row = x + at.row * x_pitch;
    const float mean = moments[at.row], rstd = moments[rows + at.row];
    float g[RUN], v[RUN], scale[RUN], first = 0.0f, second = 0.0f;
    const auto read = [&](int i) {
        load_run(gradient, i, channels, 0.0f, g);
        load_run(row, i, channels, mean, v);
        load_values(gamma, i, channels, 1.0f, scale);
#pragma unroll
        for (int e = 0; e < RUN; ++e) {
            g[e] = __fmul_rn(g[e], scale[e]);  // never half of a fused sum: all variants round alike
            v[e] = (v[e] - mean) * rstd;
        }
    };
    for (int i = at.first; i < channels; i += RowShare::STEP) {
        read(i);
#pragma unroll
        for (int e = 0; e < RUN; ++e) {
            first += g[e];
            second = fmaf(g[e], v[e], second);
        }
    }
    first = over_row(first) / float(channels);
    second = over_row(second) / float(channels);
    if (!at.inside) return;
    for (int i = at.first; i < channels; i += RowShare::STEP) {
        if (!ONCE) read(i);
        float more[RUN] = {};
        if (ADD) load_run(add + at.row * add_pitch, i, channels, 0.0f, more);
#pragma unroll
        for (int e = 0; e < RUN; ++e) g[e] = fmaf(fmaf(-v[e], second, g[e] - first), rstd, more[e]);
        store_run(dx + at.row * channels, i, channels, g);
    }
}

#endif
