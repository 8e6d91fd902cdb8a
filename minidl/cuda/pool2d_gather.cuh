// How the backward kernels of pool2d.cu gather: each pixel the windows that cover it, a tile of pixels at a time.
#pragma once

// Windows that may cover a tile, of those the ones whose values are loaded before the first is used.
constexpr int AHEAD_H = COVER_H * COVER_W <= 4 ? COVER_H : 1;
constexpr int AHEAD_W = COVER_W <= 4 ? COVER_W : 1;
static_assert(TILE_H == 1 || TILE_H == STRIDE_H, "pixels of a tile are covered by the same windows");

struct Geometry {
    int rows, strips, strip;  // of tiles: a thread takes `strip` tiles below each other, an image has `strips` of them
    int height, width, channels, out_h, out_w, pad_h, pad_w;
};

// Where a gathering thread works: image, column of windows, first channel.
struct Column {
    int n, b, c;
};

// A pixel's sum in float32.
struct Sum {
    float value[VEC] = {};

    __device__ __forceinline__ Raw<T, VEC> rounded() const { return pack<T>(value); }
    __device__ __forceinline__ void plus(const Raw<T, VEC>& other) {
        float more[VEC];
        unpack(other, more);
#pragma unroll
        for (int i = 0; i < VEC; ++i) value[i] += more[i];
    }
};

// Writes sums as they are. `begin` is told the channels that a thread keeps to; `expect`, before the sums of a tile are
// taken, each of its pixels: row and column in the tile, number among all, place in dx.
struct Plainly {
    __device__ __forceinline__ void begin(int) {}
    __device__ __forceinline__ void expect(int, int, i64, const T*) {}
    template <class Sum>
    __device__ __forceinline__ void operator()(int, int, T* place, const Sum& sum) const {
        store_raw(place, sum.rounded());
    }
};

#if ADD
// Adds another gradient, `pitch` elements from pixel to pixel.
struct Adding {
    const T* add;
    i64 pitch;
    Raw<T, VEC> more[TILE_H][STRIDE_W];

    __device__ __forceinline__ void begin(int c) { add += c; }
    __device__ __forceinline__ void expect(int ih, int iw, i64 pixel, const T*) {
        more[ih][iw] = load_raw<VEC>(add + pixel * pitch);
    }
    template <class Sum>
    __device__ __forceinline__ void operator()(int ih, int iw, T* place, Sum& sum) const {
        sum.plus(more[ih][iw]);
        store_raw(place, sum.rounded());
    }
};
#endif

// The gather of the backward kernels. For each window that may cover a tile, `up` above and `left` of window (a, b),
// fetch(column, a, up, left) gives what it holds (a default Window is one off the image); then comes
// add(window, tap, sum) for each pixel of the tile and the window's tap on it, windows in row order; then
// write(ih, iw, place, sum).
template <class Window, class Sum, class Fetch, class Add, class Write = Plainly>
DEVICE void gather(const Geometry& g, T* __restrict__ dx, Fetch fetch, Add add, Write write = Write()) {
    const int vectors = g.channels / VEC, lines = TILE_H == 1 ? g.height : ceil_div(g.height + g.pad_h, TILE_H);
    const Place at = place(g.rows, ceil_div(g.width + g.pad_w, STRIDE_W) * vectors);
    if (!at.inside) return;
    const int n = at.row / g.strips, b = at.item / vectors, c = (at.item - b * vectors) * VEC;
    const int begin = (at.row - n * g.strips) * g.strip, end = min(begin + g.strip, lines);
    const Column here = {n, b, c};
    write.begin(c);
    const int w0 = b * STRIDE_W - g.pad_w;
    T* image = dx + (i64(n) * g.height * g.width + w0) * g.channels + c;
    const i64 dx_line = i64(g.width) * g.channels;
#pragma unroll 1
    for (int line = begin; line < end; ++line) {
        const int top = TILE_H == 1 ? line + g.pad_h : line * STRIDE_H;  // of the tile, on the padded image
        const int a = top / STRIDE_H, phase = TILE_H == 1 ? top - a * STRIDE_H : 0;

        // Calls pixel(ih, iw, number, place) for those on the image.
        const auto for_pixels = [&](auto pixel) {
#pragma unroll
            for (int ih = 0; ih < TILE_H; ++ih)
#pragma unroll
                for (int iw = 0; iw < STRIDE_W; ++iw) {
                    const int h = top - g.pad_h + ih, w = w0 + iw;
                    if (u32(h) < u32(g.height) && u32(w) < u32(g.width))
                        pixel(ih, iw, (i64(n) * g.height + h) * g.width + w,
                              image + (top - g.pad_h) * dx_line + (ih * dx_line + iw * g.channels));
                }
        };
        for_pixels([&](int ih, int iw, i64 number, T* at) { write.expect(ih, iw, number, at); });
        Sum sum[TILE_H][STRIDE_W];
        // Window a - j reaches row i of the tile with tap r where r * DILATION_H = phase + i + j * STRIDE_H; columns
        // likewise. j descends, so that windows come in row order.
#pragma unroll UNROLLED(COVER_H / AHEAD_H)
        for (int j0 = COVER_H - 1; j0 >= 0; j0 -= AHEAD_H)
#pragma unroll UNROLLED(COVER_W / AHEAD_W)
            for (int k0 = COVER_W - 1; k0 >= 0; k0 -= AHEAD_W) {
                Window windows[AHEAD_H][AHEAD_W];
#pragma unroll
                for (int j = 0; j < AHEAD_H; ++j)
#pragma unroll
                    for (int k = 0; k < AHEAD_W; ++k) {
                        const int up = j0 - j, left = k0 - k;
                        windows[j][k] = Window();
                        if (u32(a - up) < u32(g.out_h) && u32(b - left) < u32(g.out_w))
                            windows[j][k] = fetch(here, a, up, left);
                    }
#pragma unroll
                for (int j = 0; j < AHEAD_H; ++j)
#pragma unroll
                    for (int k = 0; k < AHEAD_W; ++k)
#pragma unroll
                        for (int ih = 0; ih < TILE_H; ++ih)
#pragma unroll
                            for (int iw = 0; iw < STRIDE_W; ++iw) {
                                const int reach_h = phase + ih + (j0 - j) * STRIDE_H, r = reach_h / DILATION_H;
                                const int reach_w = iw + (k0 - k) * STRIDE_W, s = reach_w / DILATION_W;
                                const bool tap = r * DILATION_H == reach_h && s * DILATION_W == reach_w;
                                if (tap && r < KERNEL_H && s < KERNEL_W)
                                    add(windows[j][k], r * KERNEL_W + s, sum[ih][iw]);
                            }
            }
        for_pixels([&](int ih, int iw, i64, T* at) { write(ih, iw, at, sum[ih][iw]); });
    }
}
