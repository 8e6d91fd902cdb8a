// Resizing of images, nearest and bilinear, NHWC, and the gradient.
//
//   x (N, height, width, C) at a pitch per pixel; y (N, out_h, out_w, C) dense; dy at a pitch; dx dense.
//
// Along an axis output o reads inputs lo and lo + 1 with weights 1 - w and w, where lo + w = max((a o + b) / d, 0): whole
// numbers (resize_axis in shapes.py), so that every device finds the same pixels and weights. Backward each input pixel
// gathers from the outputs that read it, in their order.
//
// With -DFIXED=1 a, b and d of both axes are macros: quotients by small whole numbers are then a few instructions.
//
// A thread owns VEC neighbouring channels of one pixel. bytes: x once (neighbours share it through the caches) and y once;
// 8 FLOP per element of y each way when bilinear. Floor on an H200 at 4.2 TB/s, bf16, twofold: 0.60 us per million elements
// of y.
#include "common.cuh"
#include "grid.cuh"

struct Axis {
    int a, b, d, size, out;
};

// The axes as the compiler knows them.
DEVICE void settle(Axis& down, Axis& across) {
#if FIXED
    down.a = DOWN_A, down.b = DOWN_B, down.d = DOWN_D;
    across.a = ACROSS_A, across.b = ACROSS_B, across.d = ACROSS_D;
#endif
}

struct Tap {
    int low, high;
    float weight;  // of high
};

DEVICE Tap tap(const Axis& axis, int o) {
    const int at = max(axis.a * o + axis.b, 0), low = at / axis.d;
    const int high = min(low + BILINEAR, axis.size - 1);
    return {low, high, BILINEAR ? float(at - low * axis.d) / float(axis.d) : 0.0f};
}

// The first output whose low is at least i.
DEVICE int reader(const Axis& axis, int i) {
    if (i <= 0) return 0;
    if (i >= axis.size || axis.a == 0) return axis.out;
    return min((i * axis.d - axis.b + axis.a - 1) / axis.a, axis.out);
}

// With what weight output o reads input i.
DEVICE float share(const Axis& axis, int o, int i) {
    const Tap at = tap(axis, o);
    return (at.low == i ? 1.0f - at.weight : 0.0f) + (at.high == i ? at.weight : 0.0f);
}

#if defined(FORWARD)

extern "C" __global__ void __launch_bounds__(256)
upsample2d(const T* __restrict__ x, T* __restrict__ y, int n, int channels, i64 pitch, Axis down, Axis across) {
    settle(down, across);
    const int vectors = channels / VEC;
    const Place at = place(n * down.out, across.out * vectors);
    if (!at.inside) return;
    const int q = at.item / vectors, c = (at.item - q * vectors) * VEC;
    const Tap v = tap(down, at.row % down.out), h = tap(across, q);
    const i64 image = i64(at.row / down.out) * down.size;
    const T* top = x + (image + v.low) * across.size * pitch + c;
    Raw<T, VEC> raw = load_raw<VEC>(top + h.low * pitch);
    if (BILINEAR) {
        const T* bottom = x + (image + v.high) * across.size * pitch + c;
        const Raw<T, VEC> right = load_raw<VEC>(top + h.high * pitch), left_below = load_raw<VEC>(bottom + h.low * pitch);
        const Raw<T, VEC> right_below = load_raw<VEC>(bottom + h.high * pitch);
        float a[VEC], b[VEC], d[VEC], e[VEC];
        unpack(raw, a);
        unpack(right, b);
        unpack(left_below, d);
        unpack(right_below, e);
#pragma unroll
        for (int i = 0; i < VEC; ++i)
            a[i] = (a[i] * (1.0f - h.weight) + b[i] * h.weight) * (1.0f - v.weight) +
                   (d[i] * (1.0f - h.weight) + e[i] * h.weight) * v.weight;
        raw = pack<T>(a);
    }
    store_raw(y + (i64(at.row) * across.out + q) * channels + c, raw);
}

#else

extern "C" __global__ void __launch_bounds__(256, 4)
upsample2d_backward(const T* __restrict__ dy, T* __restrict__ dx, int n, int channels, i64 pitch, Axis down, Axis across) {
    settle(down, across);
    const int vectors = channels / VEC;
    const Place at = place(n * down.size, across.size * vectors);
    if (!at.inside) return;
    const int w = at.item / vectors, c = (at.item - w * vectors) * VEC, h = at.row % down.size;
    const i64 image = i64(at.row / down.size) * down.out;
    const int last_row = reader(down, h + 1), last_column = reader(across, w + 1);
    float sum[VEC] = {};
    for (int p = reader(down, h - BILINEAR); p < last_row; ++p) {
        const float weight = share(down, p, h);
        for (int q = reader(across, w - BILINEAR); q < last_column; ++q) {
            const float factor = weight * share(across, q, w);
            float g[VEC];
            load(dy + ((image + p) * across.out + q) * pitch + c, g);
#pragma unroll
            for (int i = 0; i < VEC; ++i) sum[i] = fmaf(g[i], factor, sum[i]);
        }
    }
    store(dx + (i64(at.row) * across.size + w) * channels + c, sum);
}

#endif
