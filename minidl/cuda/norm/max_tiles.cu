// A batch norm under a ReLU whose output is read whole and pooled as well, by windows that lie side by side: the skip
// connections of a U-Net (Ronneberger et al. 2015).
//
// Layout: x (N, height, width, C), y and add like it, each at a pitch; pooled, dy (N, out_h, out_w, C), pooled dense, dy at a
// pitch; dx dense. moments, gamma, beta, sums, count, partial: as in batch_norm.cu.
//
// The windows, KERNEL_H x KERNEL_W pixels, move by as much: they tile the image, and a thread has a whole one. So the
// place of a maximum is found again from x, which the backward pass reads anyway, in the rounding of the forward pass; nobody
// keeps it. The first of equal maxima gets the gradient, as in pool2d.cu; where one is NaN nobody does, for the ReLU stops it.
// Tiles that reach beyond the image count as rows too: they have a window where it counts (p < out_h and q < out_w).
//
//   forward          y = relu(x*scale + shift); pooled = the largest of each window of y
//   backward_stats   g = (add + what the window's maximum gets of dy, rounded to T) where y > 0, else 0; per chunk of tiles
//                    sum g and sum g*(x - mean)
//   backward_apply   dx = gamma*rstd*(g - sums[0]/count - (x - mean)*rstd*sums[1]/count); without BATCH gamma*rstd*g
//
// Mapping: the rows of chunks.cuh are tiles. Loads of a whole tile are under way before the first is used: behind branches,
// or in vectors of 16 bytes, for which registers lack, the last of them waited for the first (on an H200, of the shape below,
// 227 and 299 us with branches, 157 and 227 in 16 bytes; as it is 147 and 228, forward 179, add and y at twice the pitch).
// Cost of a tile of 2x2 pixels, s = sizeof(T), per element of x: forward 2.25 s bytes, backward_stats 2.25 s, backward_apply
// 3.25 s: 7.75 where an apply and a pooling forward, the pooling's gradient with its sum, statistics and apply take 10.75 s
// (floor: bf16, 32x256x256x64, 134 M elements, at 4.2 TB/s: 144, 144 and 208 us). Instructions for each element: forward 6,
// backward 14 and 15; a quarter to a half more where tiles are RAGGED, some of them reaching beyond the image.
//
// Variants: -DFORWARD, -DSTATS or -DAPPLY; -DKERNEL_H, KERNEL_W; -DRAGGED=0|1; backward -DADD=0|1; apply -DBATCH=0|1.
#include "common.cuh"
#include "lanes.cuh"

#include "batch_norm_pool.cuh"
#include "chunks.cuh"

constexpr int PIXELS = KERNEL_H * KERNEL_W;
constexpr int WORDS = (VEC * int(sizeof(T)) + 3) / 4;  // registers that hold a thread's channels

typedef Raw<T, VEC> Lanes;

struct Tiling {
    int down, across;  // tiles of an image
    int height, width, out_h, out_w;
    int dy_pitch;
};

// The tiles that a thread comes to: where their pixels and windows are. In place of pixels and windows that do not exist
// stand their nearest neighbours, for loads behind branches would wait for those before.
struct Tile {
    const Tiling& tiling;
    int number, line, column;  // among all; of its image's tiles, or of all images' where these are whole
    int image = 0;

    __device__ __forceinline__ Tile(const Tiling& t, int number) : tiling(t), number(number) {
        line = u32(number) / u32(t.across), column = number - line * t.across;
        if (RAGGED) image = u32(line) / u32(t.down), line -= image * t.down;
    }
    __device__ __forceinline__ void advance(int tiles) {
        number += tiles, column += tiles;
        while (column >= tiling.across) {
            column -= tiling.across, ++line;
            if (RAGGED && line == tiling.down) line = 0, ++image;
        }
    }
    __device__ __forceinline__ int below() const { return tiling.height - 1 - line * KERNEL_H; }  // pixels, the first not
    __device__ __forceinline__ int right() const { return tiling.width - 1 - column * KERNEL_W; }
    __device__ __forceinline__ bool inside(int i) const {
        return !RAGGED || (i / KERNEL_W <= below() && i % KERNEL_W <= right());
    }
    __device__ __forceinline__ bool counts() const { return !RAGGED || (line < tiling.out_h && column < tiling.out_w); }
    __device__ __forceinline__ u32 window() const {
        if (!RAGGED) return number;
        return (image * tiling.out_h + min(line, tiling.out_h - 1)) * tiling.out_w + min(column, tiling.out_w - 1);
    }
    // The place of its first pixel in an array, and elements from there to the i-th.
    template <class X>
    __device__ __forceinline__ X* first(X* array, int pitch) const {
        return array + u64(u32((image * tiling.height + line * KERNEL_H) * tiling.width + column * KERNEL_W)) * u32(pitch);
    }
    __device__ __forceinline__ i64 offset(int i, int pitch) const {
        int h = i / KERNEL_W, w = i % KERNEL_W;
        if (RAGGED) h = min(h, below()), w = min(w, right());
        return i64(h) * (i64(tiling.width) * pitch) + i64(w) * pitch;
    }
};

DEVICE Lanes lanes_of(u32 word) {
    Lanes all;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) all.pairs[i] = word;
    return all;
}

// Loads the pixels of a tile.
DEVICE void load_tile(const T* __restrict__ x, int pitch, int channel, const Tile& tile, Lanes (&raw)[PIXELS]) {
    const T* from = tile.first(x + channel, pitch);
#pragma unroll
    for (int i = 0; i < PIXELS; ++i) raw[i] = load_raw<VEC>(from + tile.offset(i, pitch));
}

// What the ReLU makes of a tile, the lowest number off the image, and the largest of that.
DEVICE Lanes rectify(const Normalizer& normalized, const Tile& tile, const Lanes (&raw)[PIXELS], Lanes (&y)[PIXELS]) {
    Lanes largest = lanes_of(LOWEST);
#pragma unroll
    for (int i = 0; i < PIXELS; ++i) {
        y[i] = normalized(raw[i]);
#pragma unroll
        for (int j = 0; j < WORDS; ++j) {
            if (!tile.inside(i)) y[i].pairs[j] = LOWEST;
            largest.pairs[j] = lane_max(largest.pairs[j], y[i].pairs[j]);
        }
    }
    return largest;
}

#if defined(FORWARD)

// Pitches: of x, y.
extern "C" __global__ void __launch_bounds__(256, 4)
batch_norm_max_tiles_kernel(const T* __restrict__ x, const float* __restrict__ moments, const float* __restrict__ gamma,
                            const float* __restrict__ beta, T* __restrict__ y, T* __restrict__ pooled, Tiling tiling,
                            Chunks cut) {
    await_predecessor();
    const Share at = chunk_share(cut, 1);
    if (at.row >= at.rows) return;
    const Normalizer normalized(moments, gamma, beta, cut.channels, at.channel);
    for (Tile tile(tiling, at.row); tile.number < at.rows; tile.advance(at.step)) {
        Lanes raw[PIXELS], values[PIXELS];
        load_tile(x, cut.pitch[0], at.channel, tile, raw);
        const Lanes largest = rectify(normalized, tile, raw, values);
        T* to = tile.first(y + at.channel, cut.pitch[1]);
#pragma unroll
        for (int i = 0; i < PIXELS; ++i)
            if (tile.inside(i)) store_raw<VEC>(to + tile.offset(i, cut.pitch[1]), values[i]);
        if (tile.counts()) store_raw<VEC>(pooled + u64(tile.window()) * u32(cut.channels) + at.channel, largest);
    }
}

#else

// Without a packed comparison (bfloat16 before Hopper) three blocks would spill.
constexpr int RESIDENT = DTYPE == 1 && __CUDA_ARCH__ < 900 ? 2 : 3;

// A tile on the way back: what was read of x, and the gradient of the batch norm's output. Pitches: of x, add.
struct Gradients {
    Lanes raw[PIXELS], g[PIXELS];

    __device__ __forceinline__ Gradients(const Normalizer& normalized, const Tile& tile, const Tiling& tiling,
                                         const Chunks& cut, int channel, const T* __restrict__ dy,
                                         const T* __restrict__ x, const T* __restrict__ add) {
        Lanes more[PIXELS], y[PIXELS];
        load_tile(x, cut.pitch[0], channel, tile, raw);
        if (ADD) load_tile(add, cut.pitch[1], channel, tile, more);
        Lanes share = load_raw<VEC>(dy + u64(tile.window()) * u32(tiling.dy_pitch) + channel);
        const Lanes largest = rectify(normalized, tile, raw, y);
#pragma unroll
        for (int j = 0; j < WORDS; ++j)
            if (!tile.counts()) share.pairs[j] = 0;
#pragma unroll
        for (int i = 0; i < PIXELS; ++i) {
#pragma unroll
            for (int j = 0; j < WORDS; ++j) {
                const u32 mine = lane_equal(y[i].pairs[j], largest.pairs[j]);
                u32 gradient = share.pairs[j] & mine;
                share.pairs[j] &= ~mine;  // nothing is left for another of equal ones
                if (ADD) gradient = lane_add(gradient, more[i].pairs[j]);
                g[i].pairs[j] = gradient & lane_greater(y[i].pairs[j], 0);
            }
        }
    }
};

#if defined(STATS)

// partial (chunks, 2, C).
extern "C" __global__ void __launch_bounds__(256, RESIDENT)
batch_norm_max_tiles_backward_stats_kernel(const T* __restrict__ dy, const T* __restrict__ add, const T* __restrict__ x,
                                           const float* __restrict__ moments, const float* __restrict__ gamma,
                                           const float* __restrict__ beta, float* __restrict__ partial, Tiling tiling,
                                           Chunks cut) {
    await_predecessor();
    const Share at = chunk_share(cut, 1);
    float sum[VEC] = {}, product[VEC] = {};
    if (at.row < at.rows) {
        const Normalizer normalized(moments, gamma, beta, cut.channels, at.channel);
        for (Tile tile(tiling, at.row); tile.number < at.rows; tile.advance(at.step)) {
            const Gradients found(normalized, tile, tiling, cut, at.channel, dy, x, add);
#pragma unroll
            for (int i = 0; i < PIXELS; ++i) {
                float g[VEC], v[VEC];
                unpack(found.g[i], g);  // zeros off the image
                unpack(found.raw[i], v);
#pragma unroll
                for (int e = 0; e < VEC; ++e) {
                    sum[e] += g[e];
                    product[e] = fmaf(g[e], v[e] - normalized.mean[e], product[e]);
                }
            }
        }
    }
    leave_sums(sum, product, partial, cut);
}

#else

extern "C" __global__ void __launch_bounds__(256, RESIDENT)
batch_norm_max_tiles_backward_apply_kernel(const T* __restrict__ dy, const T* __restrict__ add, const T* __restrict__ x,
                                           const float* __restrict__ moments, const float* __restrict__ gamma,
                                           const float* __restrict__ beta, const double* __restrict__ sums,
                                           const double* __restrict__ count, T* __restrict__ dx, Tiling tiling,
                                           Chunks cut) {
    await_predecessor();
    const Share at = chunk_share(cut, 1);
    if (at.row >= at.rows) return;
    const Normalizer normalized(moments, gamma, beta, cut.channels, at.channel);
    const InputGradient<BATCH> gradient(normalized.mean, normalized.scale, moments, sums, count, cut.channels, at.channel);
    for (Tile tile(tiling, at.row); tile.number < at.rows; tile.advance(at.step)) {
        const Gradients found(normalized, tile, tiling, cut, at.channel, dy, x, add);
        T* to = tile.first(dx + at.channel, cut.channels);
#pragma unroll
        for (int i = 0; i < PIXELS; ++i) {
            float g[VEC], v[VEC];
            unpack(found.g[i], g);
            unpack(found.raw[i], v);
#pragma unroll
            for (int e = 0; e < VEC; ++e) g[e] = gradient(e, g[e], v[e]);
            if (tile.inside(i)) store(to + tile.offset(i, cut.channels), g);
        }
    }
}

#endif
#endif
