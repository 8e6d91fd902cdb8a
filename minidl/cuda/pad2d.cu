// Padding and cropping of the two spatial axes, NHWC.
//
//   x (N, height, width, channels) at `pitch` elements per pixel; y (N, out_h, out_w, channels) dense:
//   y[n, p, q] = x[n, p - top, q - left] inside the image, `value` outside. Negative top and left crop.
//
// A thread owns VEC neighbouring channels of one output column and STRIP rows of it, all of whose loads are issued
// before the first store. bytes: what is kept of x + y; no FLOP.
#include "common.cuh"
#include "grid.cuh"

#define STRIP 4

extern "C" __global__ void __launch_bounds__(256)
pad2d(const T* __restrict__ x, T* __restrict__ y, int rows, int strips, int height, int width, int channels, i64 pitch,
      int out_h, int out_w, int top, int left, float value) {
    await_predecessor();
    const int vectors = channels / VEC;
    const Place at = place(rows, out_w * vectors);
    if (!at.inside) return;
    const int n = at.row / strips, p = (at.row - n * strips) * STRIP;
    const int q = at.item / vectors, c = (at.item - q * vectors) * VEC;
    const int h = p - top, w = q - left;
    float fill[VEC];
#pragma unroll
    for (int e = 0; e < VEC; ++e) fill[e] = value;

    Raw<T, VEC> pixels[STRIP];
#pragma unroll
    for (int i = 0; i < STRIP; ++i) {
        pixels[i] = pack<T>(fill);
        if (p + i < out_h && u32(h + i) < u32(height) && u32(w) < u32(width))
            pixels[i] = load_raw<VEC>(x + ((i64(n) * height + h + i) * width + w) * pitch + c);
    }
#pragma unroll
    for (int i = 0; i < STRIP; ++i)
        if (p + i < out_h) store_raw(y + ((i64(n) * out_h + p + i) * out_w + q) * channels + c, pixels[i]);
}
