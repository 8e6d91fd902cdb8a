// Pooling over windows and over adaptive bins, NHWC.
//
//   x, dx: (N, height, width, channels)     y, dy: (N, out_h, out_w, channels)     index: as y, dense, u8 or u16
//   x and dy may be pitched (`pitch` elements from pixel to pixel); everything written is dense. A thread owns VEC
//   neighbouring channels; VEC divides channels and pitch. All sums are float32 in a fixed order.
//
// max_pool2d            thread: one output column of `strip` rows (so that rows shared by windows come from L1). 16-bit
//                       maxima are taken two lanes per instruction: comparing scalars would cost more than memory.
//                       bytes: x once + y + index; R*S comparisons per output
// max_pool2d_backward   thread: STRIDE_W neighbouring pixels of one row. It gathers, in window order, the gradients of
//                       the windows whose maximum lies there. bytes: dy + index once + dx
// avg_pool2d            as max_pool2d; divisor as in PyTorch: the window clipped to the image, or (count_include_pad)
//                       to the padded image. bytes: x once + y
// avg_pool2d_backward   as max_pool2d_backward. bytes: dy once + dx
// adaptive_avg_pool2d   output cell i averages pixels floor(i*H/P) .. ceil((i+1)*H/P). blockDim.y threads share the
//                       pixels of a cell, blockIdx.y splits them further; a second kernel then merges the splits' sums,
//                       in order. bytes: x once + y (+ 8 * splits per output element where split)
// adaptive_avg_pool2d_backward   thread: one dx column of `strip` rows. bytes: dy + dx
//
// Variants: -DINDEX_BITS=8|16 (max), -DOUT_H (adaptive, with OUT_W, IN_H, IN_W), neither (average).
#include "common.cuh"
#include "grid.cuh"

#define BLOCK 256

#ifndef OUT_H

static_assert(STRIDE_H > 0 && STRIDE_W > 0 && DILATION_H > 0 && DILATION_W > 0, "a window moves and reaches forward");

#define UNROLLED(count) ((count) <= 8 ? (count) : 1)

// Windows that may cover one pixel, along each axis.
constexpr int COVER_H = (KERNEL_H - 1) * DILATION_H / STRIDE_H + 1;
constexpr int COVER_W = (KERNEL_W - 1) * DILATION_W / STRIDE_W + 1;
// Taps of one window row that are loaded before the first is used.
constexpr int TAPS = KERNEL_W <= 5 ? KERNEL_W : 4;

#endif

#ifdef INDEX_BITS
// ------------------------------------------------------------------------------------------------------------ maximum

#if INDEX_BITS == 8
typedef u8 index_t;
#else
typedef u16 index_t;
#endif

typedef Raw<T, VEC> Lanes;
constexpr int WORDS = (VEC * int(sizeof(T)) + 3) / 4;   // registers that hold a thread's channels
constexpr int PER_WORD = sizeof(T) == 4 ? 1 : 2;        // channels in one register

#if DTYPE == 0
constexpr u32 LOWEST = 0xff800000u, ONE_PER_LANE = 1u;

DEVICE u32 lane_max(u32 a, u32 b) {
    u32 y;
    asm("max.NaN.f32 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
// `if_greater` in the lanes where a > b, `otherwise` elsewhere.
DEVICE u32 lane_select(u32 a, u32 b, u32 if_greater, u32 otherwise) {
    return __uint_as_float(a) > __uint_as_float(b) ? if_greater : otherwise;
}
#else
constexpr u32 ONE_PER_LANE = 0x00010001u;
#if DTYPE == 1
constexpr u32 LOWEST = 0xff80ff80u;
#define LANE_TYPE "bf16x2"
#else
constexpr u32 LOWEST = 0xfc00fc00u;
#define LANE_TYPE "f16x2"
#endif

DEVICE u32 lane_max(u32 a, u32 b) {
    u32 y;
    asm("max.NaN." LANE_TYPE " %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
DEVICE u32 lane_select(u32 a, u32 b, u32 if_greater, u32 otherwise) {
#if DTYPE == 2 || __CUDA_ARCH__ >= 900
    u32 mask;
    asm("set.gt.u32." LANE_TYPE " %0, %1, %2;" : "=r"(mask) : "r"(a), "r"(b));
#else
    // Before Hopper bfloat16 has no packed comparison.
    const u32 low = __uint_as_float(a << 16) > __uint_as_float(b << 16) ? 0x0000ffffu : 0u;
    const u32 high = __uint_as_float(a & 0xffff0000u) > __uint_as_float(b & 0xffff0000u) ? 0xffff0000u : 0u;
    const u32 mask = low | high;
#endif
    return (if_greater & mask) | (otherwise & ~mask);
}
#endif

DEVICE bool is_nan(T value) {
    const float x = to_float(value);
    return x != x;
}

DEVICE bool any_nan(u32 word) {
    Raw<T, PER_WORD> lanes;
    lanes.pairs[0] = word;
    return is_nan(lanes.items[0]) || is_nan(lanes.items[PER_WORD - 1]);
}

DEVICE u32 lane(const u32 (&words)[WORDS], int i) {
    return PER_WORD == 1 ? words[i] : (words[i / 2] >> (16 * (i % 2))) & 0xffffu;
}

DEVICE void load_lanes(const T* __restrict__ p, u32 (&words)[WORDS]) {
    const Lanes raw = load_raw<VEC>(p);
#pragma unroll
    for (int i = 0; i < WORDS; ++i) words[i] = raw.pairs[i];
    if (VEC * sizeof(T) == 2) words[0] &= 0xffffu;
}

// Overwrites the index of each channel that has a NaN in the window at (h0, w0).
DEVICE void place_nans(const T* __restrict__ image, index_t* __restrict__ index, int h0, int w0, int height, int width,
                       i64 pitch) {
#pragma unroll 1
    for (int tap = 0; tap < KERNEL_H * KERNEL_W; ++tap) {
        const int h = h0 + tap / KERNEL_W * DILATION_H, w = w0 + tap % KERNEL_W * DILATION_W;
        if (u32(h) >= u32(height) || u32(w) >= u32(width)) continue;
#pragma unroll 1
        for (int i = 0; i < VEC; ++i)
            if (is_nan(image[(i64(h) * width + w) * pitch + i])) index[i] = index_t(tap);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK, 4)
max_pool2d(const T* __restrict__ x, T* __restrict__ y, index_t* __restrict__ index, int rows, int strips, int strip,
           int height, int width, int channels, i64 pitch, int out_h, int out_w, int pad_h, int pad_w) {
    const int vectors = channels / VEC;
    const Place at = place(rows, out_w * vectors);
    if (!at.inside) return;
    const int n = at.row / strips, q = at.item / vectors, c = (at.item - q * vectors) * VEC;
    const int w0 = q * STRIDE_W - pad_w;
    const int first_s = w0 < 0 ? ceil_div(-w0, DILATION_W) : 0;
    const T* image = x + i64(n) * height * width * pitch + c;
    const int p_begin = (at.row - n * strips) * strip, p_end = min(p_begin + strip, out_h);

    for (int p = p_begin; p < p_end; ++p) {
        const int h0 = p * STRIDE_H - pad_h;
        const int first_r = h0 < 0 ? ceil_div(-h0, DILATION_H) : 0;
        u32 best[WORDS], where[WORDS];
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            best[i] = LOWEST;
            where[i] = (first_r * KERNEL_W + first_s) * ONE_PER_LANE;
        }
#pragma unroll UNROLLED(KERNEL_H)
        for (int r = 0; r < KERNEL_H; ++r) {
            const int h = h0 + r * DILATION_H;
            if (u32(h) >= u32(height)) continue;
            const T* line = image + i64(h) * width * pitch;
#pragma unroll 1
            for (int s0 = 0; s0 < KERNEL_W; s0 += TAPS) {
                u32 taps[TAPS][WORDS];
#pragma unroll
                for (int s = 0; s < TAPS; ++s) {
                    const int w = w0 + (s0 + s) * DILATION_W;
                    if (s0 + s < KERNEL_W && u32(w) < u32(width)) {
                        load_lanes(line + w * pitch, taps[s]);
                    } else {
#pragma unroll
                        for (int i = 0; i < WORDS; ++i) taps[s][i] = LOWEST;
                    }
                }
                // Strictly greater: the first of equal maxima keeps its place.
#pragma unroll
                for (int s = 0; s < TAPS; ++s)
#pragma unroll
                    for (int i = 0; i < WORDS; ++i) {
                        where[i] = lane_select(taps[s][i], best[i], (r * KERNEL_W + s0 + s) * ONE_PER_LANE, where[i]);
                        best[i] = lane_max(best[i], taps[s][i]);
                    }
            }
        }
        const i64 out = ((i64(n) * out_h + p) * out_w + q) * channels + c;
        Raw<T, VEC> maximum;
        Raw<index_t, VEC> position;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) maximum.pairs[i] = best[i];
#pragma unroll
        for (int i = 0; i < VEC; ++i) position.items[i] = index_t(lane(where, i));
        store_raw<VEC>(y + out, maximum);
        store_raw<VEC>(index + out, position);
        // A NaN is greater than nothing, so its place (of several, the last) is looked up off the common path.
        u32 all = best[0];
#pragma unroll
        for (int i = 1; i < WORDS; ++i) all = lane_max(all, best[i]);
        if (any_nan(all)) place_nans(image, index + out, h0, w0, height, width, pitch);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK, 4)
max_pool2d_backward(const T* __restrict__ dy, const index_t* __restrict__ index, T* __restrict__ dx, int rows,
                    int height, int width, int channels, i64 pitch, int out_h, int out_w, int pad_h, int pad_w) {
    const int vectors = channels / VEC;
    const Place at = place(rows, ceil_div(width + pad_w, STRIDE_W) * vectors);
    if (!at.inside) return;
    const int n = at.row / height, h = at.row - n * height;
    const int b = at.item / vectors, c = (at.item - b * vectors) * VEC;
    const int a = (h + pad_h) / STRIDE_H, phase = (h + pad_h) - a * STRIDE_H;

    float sum[STRIDE_W][VEC] = {};
    // Window (a - j) reaches this row with tap r where r * DILATION_H = phase + j * STRIDE_H; columns likewise.
    // j descends, so that windows come in row order.
#pragma unroll UNROLLED(COVER_H)
    for (int j = COVER_H - 1; j >= 0; --j) {
        const int p = a - j, reach = phase + j * STRIDE_H, r = reach / DILATION_H;
        if (u32(p) >= u32(out_h) || r >= KERNEL_H || r * DILATION_H != reach) continue;
#pragma unroll UNROLLED(COVER_W)
        for (int k = COVER_W - 1; k >= 0; --k) {
            const int q = b - k;
            if (u32(q) >= u32(out_w)) continue;
            const i64 window = (i64(n) * out_h + p) * out_w + q;
            float gradient[VEC];
            load(dy + window * pitch + c, gradient);
            const Raw<index_t, VEC> place = load_raw<VEC>(index + window * channels + c);
#pragma unroll
            for (int i = 0; i < STRIDE_W; ++i) {
                const int reach_w = i + k * STRIDE_W, s = reach_w / DILATION_W;
                if (s >= KERNEL_W || s * DILATION_W != reach_w) continue;
#pragma unroll
                for (int e = 0; e < VEC; ++e)
                    if (place.items[e] == r * KERNEL_W + s) sum[i][e] += gradient[e];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < STRIDE_W; ++i) {
        const int w = b * STRIDE_W + i - pad_w;
        if (u32(w) < u32(width)) store(dx + (i64(at.row) * width + w) * channels + c, sum[i]);
    }
}

#elif !defined(OUT_H)
// ------------------------------------------------------------------------------------------------------------ average

// Pixels that a window divides by along one axis.
DEVICE int window_length(int begin, int kernel, int size, int pad, int include_pad) {
    int end = min(begin + kernel, size + pad);
    if (!include_pad) {
        begin = max(begin, 0);
        end = min(end, size);
    }
    return end - begin;
}

extern "C" __global__ void __launch_bounds__(BLOCK, 4)
avg_pool2d(const T* __restrict__ x, T* __restrict__ y, int rows, int strips, int strip, int height, int width,
           int channels, i64 pitch, int out_h, int out_w, int pad_h, int pad_w, int include_pad) {
    const int vectors = channels / VEC;
    const Place at = place(rows, out_w * vectors);
    if (!at.inside) return;
    const int n = at.row / strips, q = at.item / vectors, c = (at.item - q * vectors) * VEC;
    const int w0 = q * STRIDE_W - pad_w;
    const T* image = x + i64(n) * height * width * pitch + c;
    const int p_begin = (at.row - n * strips) * strip, p_end = min(p_begin + strip, out_h);

    for (int p = p_begin; p < p_end; ++p) {
        const int h0 = p * STRIDE_H - pad_h;
        float sum[VEC] = {};
#pragma unroll UNROLLED(KERNEL_H)
        for (int r = 0; r < KERNEL_H; ++r) {
            const int h = h0 + r;
            if (u32(h) >= u32(height)) continue;
            const T* line = image + i64(h) * width * pitch;
#pragma unroll 1
            for (int s0 = 0; s0 < KERNEL_W; s0 += TAPS) {
                const float zeros[VEC] = {};
                Raw<T, VEC> taps[TAPS];
#pragma unroll
                for (int s = 0; s < TAPS; ++s) {
                    const int w = w0 + s0 + s;
                    if (s0 + s < KERNEL_W && u32(w) < u32(width)) {
                        taps[s] = load_raw<VEC>(line + w * pitch);
                    } else {
                        taps[s] = pack<T>(zeros);
                    }
                }
#pragma unroll
                for (int s = 0; s < TAPS; ++s) {
                    float value[VEC];
                    unpack(taps[s], value);
#pragma unroll
                    for (int i = 0; i < VEC; ++i) sum[i] += value[i];
                }
            }
        }
        const float divisor = float(max(window_length(h0, KERNEL_H, height, pad_h, include_pad), 1)) *
                              float(max(window_length(w0, KERNEL_W, width, pad_w, include_pad), 1));
#pragma unroll
        for (int i = 0; i < VEC; ++i) sum[i] /= divisor;
        store(y + ((i64(n) * out_h + p) * out_w + q) * channels + c, sum);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK, 4)
avg_pool2d_backward(const T* __restrict__ dy, T* __restrict__ dx, int rows, int height, int width, int channels,
                    i64 pitch, int out_h, int out_w, int pad_h, int pad_w, int include_pad) {
    const int vectors = channels / VEC;
    const Place at = place(rows, ceil_div(width + pad_w, STRIDE_W) * vectors);
    if (!at.inside) return;
    const int n = at.row / height, h = at.row - n * height;
    const int b = at.item / vectors, c = (at.item - b * vectors) * VEC;
    const int a = (h + pad_h) / STRIDE_H, phase = (h + pad_h) - a * STRIDE_H;

    float sum[STRIDE_W][VEC] = {};
#pragma unroll UNROLLED(COVER_H)
    for (int j = COVER_H - 1; j >= 0; --j) {
        const int p = a - j;
        if (u32(p) >= u32(out_h) || phase + j * STRIDE_H >= KERNEL_H) continue;
        const int length_h = window_length(p * STRIDE_H - pad_h, KERNEL_H, height, pad_h, include_pad);
#pragma unroll UNROLLED(COVER_W)
        for (int k = COVER_W - 1; k >= 0; --k) {
            const int q = b - k;
            if (u32(q) >= u32(out_w)) continue;
            const int length_w = window_length(q * STRIDE_W - pad_w, KERNEL_W, width, pad_w, include_pad);
            const float share = 1.0f / (float(length_h) * float(length_w));
            float gradient[VEC];
            load(dy + ((i64(n) * out_h + p) * out_w + q) * pitch + c, gradient);
#pragma unroll
            for (int i = 0; i < STRIDE_W; ++i) {
                if (i + k * STRIDE_W >= KERNEL_W) continue;
#pragma unroll
                for (int e = 0; e < VEC; ++e) sum[i][e] += gradient[e] * share;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < STRIDE_W; ++i) {
        const int w = b * STRIDE_W + i - pad_w;
        if (u32(w) < u32(width)) store(dx + (i64(at.row) * width + w) * channels + c, sum[i]);
    }
}

#else
// ------------------------------------------------------------------------------------------------------ adaptive bins

// The sizes are compile-time constants, so that bin arithmetic needs no division and one cell is a plain reduction.
DEVICE int bin_begin(int cell, int cells, int size) { return int(i64(cell) * size / cells); }
DEVICE int bin_end(int cell, int cells, int size) { return int((i64(cell + 1) * size + cells - 1) / cells); }

// block (lanes, groups): lane = (cell, channels) item, group = every groups-th pixel of the cell. blockIdx.y = split.
// partial: (splits, items, VEC) float32 where splits > 1, else unused.
extern "C" __global__ void __launch_bounds__(BLOCK, 4)
adaptive_avg_pool2d(const T* __restrict__ x, T* __restrict__ y, float* __restrict__ partial, int items, int channels,
                    i64 pitch) {
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

    float sum[VEC] = {};
#pragma unroll 4
    for (int i = begin + threadIdx.y; i < end; i += blockDim.y) {
        const int row = i / width;
        float value[VEC];
        load(corner + (i64(row) * (IN_W - width) + i) * pitch, value);
#pragma unroll
        for (int e = 0; e < VEC; ++e) sum[e] += value[e];
    }
    if (blockDim.y > 1) {
        const int slot = threadIdx.y * blockDim.x + threadIdx.x, stride = blockDim.x * blockDim.y;
#pragma unroll
        for (int e = 0; e < VEC; ++e) sums[e * stride + slot] = sum[e];
        __syncthreads();
        if (threadIdx.y > 0) return;
#pragma unroll
        for (int e = 0; e < VEC; ++e)
            for (int group = 1; group < blockDim.y; ++group) sum[e] += sums[e * stride + group * blockDim.x + slot];
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
    const int vectors = channels / VEC;
    const Place at = place(rows, IN_W * vectors);
    if (!at.inside) return;
    const int n = at.row / strips, w = at.item / vectors, c = (at.item - w * vectors) * VEC;
    // Cells whose bins hold coordinate i: i * P / H rounded down, up to (i + 1) * P / H rounded up.
    const int q_begin = bin_begin(w, IN_W, OUT_W), q_end = bin_end(w, IN_W, OUT_W);
    const int h_begin = (at.row - n * strips) * strip, h_end = min(h_begin + strip, IN_H);
    for (int h = h_begin; h < h_end; ++h) {
        const int p_begin = bin_begin(h, IN_H, OUT_H), p_end = bin_end(h, IN_H, OUT_H);
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
        store(dx + ((i64(n) * IN_H + h) * IN_W + w) * channels + c, sum);
    }
}

#endif
