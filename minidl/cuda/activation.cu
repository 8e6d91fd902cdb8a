// ReLU and its gradient.
//
// x, y, dy, add, dx: any shape, T, dense or rows at a pitch. relu: y = max(x, 0), NaN stays NaN.
// relu_backward: dx = dy where y > 0, else 0 (+ add when ADD is 1).
//
// Mapping: Share (common.cuh). Cost per element, s = sizeof(T): relu 2s bytes, relu_backward 3s, with add 4s; at most 2
// FLOP; floor on an H200 at 4.2 TB/s in bf16 per million elements: 0.95, 1.43 and 1.90 us.

#include "common.cuh"

#if defined(FORWARD)

extern "C" __global__ void __launch_bounds__(256, 4) relu_kernel(const T* __restrict__ x, T* __restrict__ y, Walk walk) {
    const Share at(walk, UNROLL);
    Raw<T, VEC> raw[UNROLL];
    for_rows<UNROLL>(
        at, [&](int u, int row) { raw[u] = load_raw<VEC>(x + row_offset(row, walk.pitch[0]) + at.channel); },
        [&](int u, int row) {
            float v[VEC];
            unpack(raw[u], v);
#pragma unroll
            for (int i = 0; i < VEC; ++i) v[i] = clamp_below(v[i], 0.0f);
            store(y + row_offset(row, walk.pitch[1]) + at.channel, v);
        });
    const i64 i = tail_element(walk);
    if (i >= 0) y[i] = from_float<T>(clamp_below(to_float(x[i]), 0.0f));
}

#else

DEVICE float masked(float dy, float y, float add) { return (y > 0.0f ? dy : 0.0f) + add; }

extern "C" __global__ void __launch_bounds__(256, 4)
relu_backward_kernel(const T* __restrict__ dy, const T* __restrict__ y, const T* __restrict__ add, T* __restrict__ dx,
                     Walk walk) {
    const Share at(walk, UNROLL);
    Raw<T, VEC> raw_dy[UNROLL], raw_y[UNROLL], more[ADD ? UNROLL : 1];
    for_rows<UNROLL>(
        at,
        [&](int u, int row) {
            raw_dy[u] = load_raw<VEC>(dy + row_offset(row, walk.pitch[0]) + at.channel);
            raw_y[u] = load_raw<VEC>(y + row_offset(row, walk.pitch[1]) + at.channel);
            if (ADD) more[u] = load_raw<VEC>(add + row_offset(row, walk.pitch[3]) + at.channel);
        },
        [&](int u, int row) {
            float g[VEC], v[VEC], z[VEC] = {};
            unpack(raw_dy[u], g);
            unpack(raw_y[u], v);
            if (ADD) unpack(more[u], z);
#pragma unroll
            for (int i = 0; i < VEC; ++i) g[i] = masked(g[i], v[i], z[i]);
            store(dx + row_offset(row, walk.pitch[2]) + at.channel, g);
        });
    const i64 i = tail_element(walk);
    if (i >= 0) dx[i] = from_float<T>(masked(to_float(dy[i]), to_float(y[i]), ADD ? to_float(add[i]) : 0.0f));
}

#endif
