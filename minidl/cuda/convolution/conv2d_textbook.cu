// Convolution as it is taught, in exact float32: what Ha, Adufu and Kim ("Empirical Experiments for Convolution Layer
// Optimization on Multi-GPUs") compare. Baselines of benchmarks/bench_unet.py; the library never chooses them by
// itself.
//
//   y[n,p,q,k] = bias[k] + sum_{r,s,c} x[n, p*sh - ph + r*dh, q*sw - pw + s*dw, c] w[k,r,s,c]
//
//   x     x[((n*height + h)*width + w)*pitch + c]    float32
//   w     (K, R, S, C) dense                          float32
//   bias  (K,) float32 or null
//   y     (images, out_height, out_width, K) dense    float32
//
// direct_kernel: a thread for each value of y, all operands from global memory.
//   Grid: ceil(values / 256) blocks of 256 threads. FLOP: 2 * values * R*S*C. Bytes: as many loads as FLOP, from the
//   caches.
//
// tiled_kernel: a block computes TILE x TILE pixels of one image, FILTERS channels of each. For CHUNK input channels at
// a time it copies the pixels that its tile sees, padding included, and the filters into shared memory; a thread sums
// up one pixel's FILTERS channels from there.
//   Grid: x counts column tiles, row tiles and images, columns fastest; y blocks of FILTERS channels. TILE * TILE
//   threads. Dynamic shared memory: 4 * CHUNK * (patch_h * patch_w + FILTERS * R * S) bytes, where a patch is what a
//   tile sees. Bytes: x once per FILTERS channels and 1 + halo of a tile, w once per tile.
#include "common.cuh"

constexpr int TILE = 16, FILTERS = 16, CHUNK = 8;

struct Problem {
    i64 pitch;
    int images, height, width, channels;
    int out_height, out_width, filters;
    int kernel_h, kernel_w;
    int stride_h, stride_w;
    int padding_h, padding_w;
    int dilation_h, dilation_w;
    int tiles_h, tiles_w;
};

DEVICE bool inside(const Problem& p, int h, int w) {
    return static_cast<u32>(h) < static_cast<u32>(p.height) && static_cast<u32>(w) < static_cast<u32>(p.width);
}

extern "C" __global__ void direct_kernel(const float* __restrict__ x, const float* __restrict__ w,
                                         const float* __restrict__ bias, float* __restrict__ y,
                                         const __grid_constant__ Problem p) {
    await_predecessor();
    const i64 index = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    const i64 pixel = index / p.filters;
    const int k = static_cast<int>(index - pixel * p.filters);
    const i64 line = pixel / p.out_width;
    const int column = static_cast<int>(pixel - line * p.out_width);
    const i64 image = line / p.out_height;
    const int row = static_cast<int>(line - image * p.out_height);
    if (image >= p.images) return;
    const float* filter = w + i64(k) * p.kernel_h * p.kernel_w * p.channels;
    float sum = 0.0f;
    for (int r = 0; r < p.kernel_h; ++r)
        for (int s = 0; s < p.kernel_w; ++s, filter += p.channels) {
            const int from_h = row * p.stride_h - p.padding_h + r * p.dilation_h;
            const int from_w = column * p.stride_w - p.padding_w + s * p.dilation_w;
            if (!inside(p, from_h, from_w)) continue;
            const float* from = x + ((image * p.height + from_h) * p.width + from_w) * p.pitch;
            for (int c = 0; c < p.channels; ++c) sum += from[c] * filter[c];
        }
    y[index] = sum + (bias ? bias[k] : 0.0f);
}

extern "C" __global__ void __launch_bounds__(TILE * TILE)
tiled_kernel(const float* __restrict__ x, const float* __restrict__ w, const float* __restrict__ bias,
             float* __restrict__ y, const __grid_constant__ Problem p) {
    await_predecessor();
    extern __shared__ float shared[];
    const int patch_h = (TILE - 1) * p.stride_h + (p.kernel_h - 1) * p.dilation_h + 1;
    const int patch_w = (TILE - 1) * p.stride_w + (p.kernel_w - 1) * p.dilation_w + 1;
    const int taps = p.kernel_h * p.kernel_w;
    float* const patch = shared;                               // [patch_h][patch_w][CHUNK]
    float* const filters = shared + patch_h * patch_w * CHUNK;  // [taps][CHUNK][FILTERS]

    u32 block = blockIdx.x;
    const int first_column = block % p.tiles_w * TILE;
    block /= p.tiles_w;
    const int first_row = block % p.tiles_h * TILE;
    const i64 image = block / p.tiles_h;
    const int first_filter = blockIdx.y * FILTERS;
    const int local_row = threadIdx.x / TILE, local_column = threadIdx.x % TILE;
    const int corner_h = first_row * p.stride_h - p.padding_h, corner_w = first_column * p.stride_w - p.padding_w;

    float sum[FILTERS] = {};
    for (int first_channel = 0; first_channel < p.channels; first_channel += CHUNK) {
        for (int i = threadIdx.x; i < patch_h * patch_w * CHUNK; i += TILE * TILE) {
            const int pixel = i / CHUNK, c = first_channel + i % CHUNK;
            const int h = corner_h + pixel / patch_w, at = corner_w + pixel % patch_w;
            const bool there = c < p.channels && inside(p, h, at);
            patch[i] = there ? x[((image * p.height + h) * p.width + at) * p.pitch + c] : 0.0f;
        }
        for (int i = threadIdx.x; i < FILTERS * taps * CHUNK; i += TILE * TILE) {
            const int k = i / (taps * CHUNK), rest = i % (taps * CHUNK), c = first_channel + rest % CHUNK;
            const bool there = c < p.channels && first_filter + k < p.filters;
            const i64 from = (i64(first_filter + k) * taps + rest / CHUNK) * p.channels + c;
            filters[rest * FILTERS + k] = there ? w[from] : 0.0f;
        }
        __syncthreads();
        for (int tap = 0; tap < taps; ++tap) {
            const int h = local_row * p.stride_h + tap / p.kernel_w * p.dilation_h;
            const int at = local_column * p.stride_w + tap % p.kernel_w * p.dilation_w;
            const float* values = patch + (h * patch_w + at) * CHUNK;
            const float* row = filters + tap * CHUNK * FILTERS;
#pragma unroll
            for (int c = 0; c < CHUNK; ++c)
#pragma unroll
                for (int k = 0; k < FILTERS; ++k) sum[k] += values[c] * row[c * FILTERS + k];
        }
        __syncthreads();
    }
    const int row = first_row + local_row, column = first_column + local_column;
    if (row >= p.out_height || column >= p.out_width) return;
    float* to = y + ((image * p.out_height + row) * p.out_width + column) * p.filters;
    for (int k = 0; k < FILTERS && first_filter + k < p.filters; ++k)
        to[first_filter + k] = sum[k] + (bias ? bias[first_filter + k] : 0.0f);
}
