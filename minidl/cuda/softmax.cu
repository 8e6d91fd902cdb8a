// Softmax over rows of channels, and its gradient.
//
// x, dy, y, dx: (rows, channels) of T; inputs at a pitch, results dense.
//   FORWARD:  y = exp(x - max) / sum of exp(x - max)
//   else:     dx = y * (dy - sum of dy * y)
//
// Mapping: row.cuh. With -DONCE=1 no thread has more than one run of a row, which then stays in its registers. Cost per
// element, s = sizeof(T): forward 2s bytes, 5 FLOP, backward 3s bytes, 4 FLOP; floor on an H200 at 4.2 TB/s in bf16 per
// million elements: 0.95 and 1.43 us.
#include "common.cuh"
#include "exponential.cuh"
#include "row.cuh"

#if defined(FORWARD)

extern "C" __global__ void __launch_bounds__(BLOCK, 4)
softmax_kernel(const T* __restrict__ x, T* __restrict__ y, i64 rows, int channels, i64 pitch) {
    const RowShare at(rows);
    const T* row = x + at.row * pitch;
    const float least = __uint_as_float(0xff800000u);
    float v[RUN], peak = least, total = 0.0f;
    for (int i = at.first; i < channels; i += RowShare::STEP) {
        load_run(row, i, channels, least, v);
#pragma unroll
        for (int e = 0; e < RUN; ++e) peak = larger(peak, v[e]);
    }
    peak = over_row<true>(peak);
    for (int i = at.first; i < channels; i += RowShare::STEP) {
        if (!ONCE) load_run(row, i, channels, least, v);
        float part = 0.0f;  // sums of runs, and then of these: long rows lose fewer digits
#pragma unroll
        for (int e = 0; e < RUN; ++e) part += v[e] = exponential(v[e] - peak);
        total += part;
    }
    const float inverse = 1.0f / over_row(total);
    if (!at.inside) return;
    for (int i = at.first; i < channels; i += RowShare::STEP) {
        if (!ONCE) {
            load_run(row, i, channels, least, v);
#pragma unroll
            for (int e = 0; e < RUN; ++e) v[e] = exponential(v[e] - peak);
        }
#pragma unroll
        for (int e = 0; e < RUN; ++e) v[e] *= inverse;
        store_run(y + at.row * channels, i, channels, v);
    }
}

#else

extern "C" __global__ void __launch_bounds__(BLOCK, 4)
softmax_backward_kernel(const T* __restrict__ dy, const T* __restrict__ y, T* __restrict__ dx, i64 rows, int channels,
                        i64 dy_pitch, i64 y_pitch) {
    const RowShare at(rows);
    const T *gradient = dy + at.row * dy_pitch, *row = y + at.row * y_pitch;
    float g[RUN], v[RUN], total = 0.0f;
    for (int i = at.first; i < channels; i += RowShare::STEP) {
        load_run(gradient, i, channels, 0.0f, g);
        load_run(row, i, channels, 0.0f, v);
#pragma unroll
        for (int e = 0; e < RUN; ++e) total = fmaf(g[e], v[e], total);
    }
    total = over_row(total);
    if (!at.inside) return;
    for (int i = at.first; i < channels; i += RowShare::STEP) {
        load_run(gradient, i, channels, 0.0f, g);
        load_run(row, i, channels, 0.0f, v);
#pragma unroll
        for (int e = 0; e < RUN; ++e) g[e] = v[e] * (g[e] - total);
        store_run(dx + at.row * channels, i, channels, g);
    }
}

#endif
