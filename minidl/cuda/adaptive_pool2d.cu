// Average pooling over adaptive bins, NHWC: cell i of P averages pixels floor(i*H/P) .. ceil((i+1)*H/P).
//
//   x, dx: (N, IN_H, IN_W, channels)     y, dy: (N, OUT_H, OUT_W, channels)
//   x and dy may be pitched (`pitch` elements from pixel to pixel); everything written is dense. A thread owns VEC
//   neighbouring channels; VEC divides channels and pitch. All sums are float32 in a fixed order.
//
// adaptive_avg_pool2d   blockDim.y threads share the pixels of a cell, blockIdx.y splits them further; a second kernel
//                       then merges the splits' sums, in order. bytes: x once + y (+ 8 * splits per output element
//                       where split)
// adaptive_avg_pool2d_backward   thread: one dx column of `strip` rows. bytes: dy + dx
//
// Loads come before their first use in groups as large as registers allow.
//
// Variants: -DOUT_H, OUT_W, IN_H, IN_W.
#include "common.cuh"
#include "grid.cuh"

#define BLOCK 256

// The sizes are compile-time constants, so that bin arithmetic needs no division and one cell is a plain reduction. The
// one cell that holds everything is said outright: compilers do not know that i / size is 0.
DEVICE int bin_begin(int cell, int cells, int size) { return size == 1 ? 0 : int(i64(cell) * size / cells); }
DEVICE int bin_end(int cell, int cells, int size) {
    return size == 1 ? 1 : int((i64(cell + 1) * size + cells - 1) / cells);
}

// block (lanes, groups): lane = (cell, channels) item, group = every groups-th pixel of the cell. blockIdx.y = split.
// partial: (splits, items, VEC) float32 where splits > 1, else unused.
extern "C" __global__ void __launch_bounds__(BLOCK, 4)
adaptive_avg_pool2d(const T* __restrict__ x, T* __restrict__ y, float* __restrict__ partial, int items, int channels,
                    i64 pitch) {
    await_predecessor();
    __shared__ float sums[BLOCK * VEC];
    const int vectors = channels / VEC, item = blockIdx.x * blockDim.x + threadIdx.x;
    const bool inside = item < items;
    const int cell = item / vectors, c = (item - cell * vectors) * VEC;
    const int n = cell / (OUT_H * OUT_W), p = cell / OUT_W % OUT_H, q = cell % OUT_W;
    const int h0 = bin_begin(p, OUT_H, IN_H), w0 = bin_begin(q, OUT_W, IN_W);
    const int width = bin_end(q, OUT_W, IN_W) - w0, pixels = (bin_end(p, OUT_H, IN_H) - h0) * width;
    const int per_split = ceil_div(pixels, int(gridDim.y)), begin = blockIdx.y * per_split;
    const int end = inside ? min(begin + per_split, pixels) : begin;
    const T* corner = x + ((i64(n) * IN_H + h0) * IN_W + w0) * pitch + c;

    constexpr int AHEAD = 7;  // pixels in flight
    float sum[VEC] = {};
    const Raw<T, VEC> zero = pack<T>(sum);
    for (int i = begin + threadIdx.y; i < end; i += AHEAD * blockDim.y) {
        Raw<T, VEC> raw[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            const int pixel = i + u * blockDim.y, row = pixel / width;
            raw[u] = zero;
            if (pixel < end) raw[u] = load_once<VEC>(corner + (i64(row) * (IN_W - width) + pixel) * pitch);
        }
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            float value[VEC];
            unpack(raw[u], value);
#pragma unroll
            for (int e = 0; e < VEC; ++e) sum[e] += value[e];
        }
    }
    if (blockDim.y > 1) {
        const int slot = threadIdx.y * blockDim.x + threadIdx.x, stride = blockDim.x * blockDim.y;
#pragma unroll
        for (int e = 0; e < VEC; ++e) sums[e * stride + slot] = sum[e];
        for (int half = blockDim.y / 2; half > 0; half /= 2) {
            __syncthreads();
            if (threadIdx.y < half)
#pragma unroll
                for (int e = 0; e < VEC; ++e) {
                    sum[e] += sums[e * stride + slot + half * blockDim.x];
                    sums[e * stride + slot] = sum[e];
                }
        }
        if (threadIdx.y > 0) return;
    }
    if (!inside) return;
    if (gridDim.y > 1) {
        store(partial + (i64(blockIdx.y) * items + item) * VEC, sum);
        return;
    }
#pragma unroll
    for (int e = 0; e < VEC; ++e) sum[e] /= float(pixels);
    store(y + i64(item) * VEC, sum);
}

// y = the splits' sums over the number of pixels. Thread: one item.
extern "C" __global__ void __launch_bounds__(BLOCK, 4)
adaptive_avg_pool2d_merge(const float* __restrict__ partial, T* __restrict__ y, int items, int channels, int splits) {
    await_predecessor();
    const int item = blockIdx.x * BLOCK + threadIdx.x;
    if (item >= items) return;
    const int cell = item / (channels / VEC), p = cell / OUT_W % OUT_H, q = cell % OUT_W;
    const int height = bin_end(p, OUT_H, IN_H) - bin_begin(p, OUT_H, IN_H);
    const int width = bin_end(q, OUT_W, IN_W) - bin_begin(q, OUT_W, IN_W);
    float sum[VEC] = {};
#pragma unroll 4
    for (int split = 0; split < splits; ++split) {
        float value[VEC];
        load(partial + (i64(split) * items + item) * VEC, value);
#pragma unroll
        for (int e = 0; e < VEC; ++e) sum[e] += value[e];
    }
#pragma unroll
    for (int e = 0; e < VEC; ++e) sum[e] /= float(height * width);
    store(y + i64(item) * VEC, sum);
}

extern "C" __global__ void __launch_bounds__(BLOCK, 4)
adaptive_avg_pool2d_backward(const T* __restrict__ dy, T* __restrict__ dx, int rows, int strips, int strip,
                             int channels, i64 pitch) {
    await_predecessor();
    const int vectors = channels / VEC;
    const Place at = place(rows, IN_W * vectors);
    if (!at.inside) return;
    const int n = at.row / strips, w = at.item / vectors, c = (at.item - w * vectors) * VEC;
    // Cells whose bins hold coordinate i: i * P / H rounded down, up to (i + 1) * P / H rounded up.
    const int q_begin = bin_begin(w, IN_W, OUT_W), q_end = bin_end(w, IN_W, OUT_W);
    const int h_begin = (at.row - n * strips) * strip, h_end = min(h_begin + strip, IN_H);
    int p_begin = -1, p_end = -1;
    Raw<T, VEC> out;
    for (int h = h_begin; h < h_end; ++h) {
        const int begin = bin_begin(h, IN_H, OUT_H), end = bin_end(h, IN_H, OUT_H);
        if (begin != p_begin || end != p_end) {  // else this row lies in the same bins as the last
            p_begin = begin;
            p_end = end;
            float sum[VEC] = {};
            for (int p = p_begin; p < p_end; ++p)
                for (int q = q_begin; q < q_end; ++q) {
                    const int bin_h = bin_end(p, OUT_H, IN_H) - bin_begin(p, OUT_H, IN_H);
                    const int bin_w = bin_end(q, OUT_W, IN_W) - bin_begin(q, OUT_W, IN_W);
                    const float share = 1.0f / (float(bin_h) * float(bin_w));
                    float gradient[VEC];
                    load(dy + ((i64(n) * OUT_H + p) * OUT_W + q) * pitch + c, gradient);
#pragma unroll
                    for (int e = 0; e < VEC; ++e) sum[e] += gradient[e] * share;
                }
            out = pack<T>(sum);
        }
        store_raw(dx + ((i64(n) * IN_H + h) * IN_W + w) * channels + c, out);
    }
}
