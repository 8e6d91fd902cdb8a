// Activation functions and their gradients.
//
// x, y, dy, kept, add, dx: any shape, T, dense or rows at a pitch. FUNCTION names one of the structs of activation.cuh:
//   activate:            y = value(x);  NaN stays NaN
//   activate_backward:   dx = dy * slope(kept) (+ add when ADD is 1), where kept is the output y or the input x, as the
//                        struct says. What a ReLU cuts off is dropped, not multiplied: infinite gradients leave no NaN.
//
// Mapping: Share (common.cuh). Cost per element, s = sizeof(T): activate 2s bytes, activate_backward 3s, with add 4s;
// floor on an H200 at 4.2 TB/s in bf16 per million elements: 0.95, 1.43 and 1.90 us. Up to some 25 instructions per
// element (the error function) fit into that time.

#include "activation.cuh"

#if defined(FORWARD)

extern "C" __global__ void __launch_bounds__(256, 4)
activate_kernel(const T* __restrict__ x, T* __restrict__ y, float a, Walk walk) {
    await_predecessor();
    const Share at(walk, UNROLL);
    Raw<T, VEC> raw[UNROLL];
    for_rows<UNROLL>(
        at, [&](int u, int row) { raw[u] = load_raw<VEC>(x + row_offset(row, walk.pitch[0]) + at.channel); },
        [&](int u, int row) {
            float v[VEC];
            unpack(raw[u], v);
#pragma unroll
            for (int i = 0; i < VEC; ++i) v[i] = FUNCTION::value(v[i], a);
            store(y + row_offset(row, walk.pitch[1]) + at.channel, v);
        });
    const i64 i = tail_element(walk);
    if (i >= 0) y[i] = from_float<T>(FUNCTION::value(to_float(x[i]), a));
}

#else

extern "C" __global__ void __launch_bounds__(256, 4)
activate_backward_kernel(const T* __restrict__ dy, const T* __restrict__ kept, const T* __restrict__ add,
                         T* __restrict__ dx, float a, Walk walk) {
    await_predecessor();
    const Share at(walk, UNROLL);
    Raw<T, VEC> raw_dy[UNROLL], raw_kept[UNROLL], more[ADD ? UNROLL : 1];
    for_rows<UNROLL>(
        at,
        [&](int u, int row) {
            raw_dy[u] = load_raw<VEC>(dy + row_offset(row, walk.pitch[0]) + at.channel);
            raw_kept[u] = load_raw<VEC>(kept + row_offset(row, walk.pitch[1]) + at.channel);
            if (ADD) more[u] = load_raw<VEC>(add + row_offset(row, walk.pitch[3]) + at.channel);
        },
        [&](int u, int row) {
            float g[VEC], v[VEC], z[VEC] = {};
            unpack(raw_dy[u], g);
            unpack(raw_kept[u], v);
            if (ADD) unpack(more[u], z);
#pragma unroll
            for (int i = 0; i < VEC; ++i) g[i] = FUNCTION::gradient(g[i], v[i], a) + z[i];
            store(dx + row_offset(row, walk.pitch[2]) + at.channel, g);
        });
    const i64 i = tail_element(walk);
    if (i >= 0)
        dx[i] =
            from_float<T>(FUNCTION::gradient(to_float(dy[i]), to_float(kept[i]), a) + (ADD ? to_float(add[i]) : 0.0f));
}

#endif
