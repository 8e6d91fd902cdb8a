// Pooling over windows, NHWC.
//
//   x, dx: (N, height, width, channels)     y, dy: (N, out_h, out_w, channels)     index: as y, dense, u8 or u16
//   x and dy may be pitched (`pitch` elements from pixel to pixel); everything written is dense. A thread owns VEC
//   neighbouring channels; VEC divides channels and pitch. All sums are float32 in a fixed order.
//
// max_pool2d            thread: one output column of `strip` rows (so that rows shared by windows come from L1). 16-bit
//                       maxima are taken two lanes per instruction: comparing scalars would cost more than memory.
//                       bytes: x once + y + index; R*S comparisons per output
// max_pool2d_backward   thread: `strip` tiles below each other, of TILE_H by STRIDE_W pixels that the same windows
//                       cover. Each pixel gathers, in window order, the gradients of the windows whose maximum it is.
//                       bytes: dy + index once + dx (+ a gradient that is added, with ADD). Of 16-bit types and few
//                       windows two channels at a time (pool2d_terms.cuh; 3x3, stride 2: 309 instructions per tile of 8
//                       channels, of 405 one by one), addresses from one line to the next. To carry windows down to the
//                       next tile, or ask for its own before, took 2 % less, and with a batch norm as long
// avg_pool2d            as max_pool2d; divisor as in PyTorch: the window clipped to the image, or (count_include_pad)
//                       to the padded image. bytes: x once + y
// avg_pool2d_backward   as max_pool2d_backward. bytes: dy once + dx
//
// Loads come before their first use in groups as large as registers allow: whole small windows, all windows of a tile.
//
// With NORMALIZED the maximum is over what a ReLU makes of a batch norm's output, which is never written:
//
// max_pool2d            x is the batch norm's input; `largest`, as y, gets that of each maximum, for the batch norm's
//                       sums. A row of taps that the next window has too is normalised once, and its maximum carried
//                       down the strip; what AHEAD windows have besides is on its way through shared memory
//                       (ahead.cuh; 256x112x112x64 on an H200: 162 us; one window's in registers 193; 159 of bytes); a
//                       column off the image is read, and counts, as the next one on it, for a choice between taps and
//                       nothing took a quarter of all instructions (3x3, stride 2: 392 per output of 8 channels)
// batch_norm_max_pool2d_backward   the batch norm's input gradient from dy, that of y masked by the ReLU: the gather of
//                       max_pool2d_backward, rounded to T as a pass of its own would, and batch_norm.cu's formula on
//                       it. bytes: dy + index + x once + dx
//
// Variants: -DINDEX_BITS=8|16 (max), without (average); -DNORMALIZED=0|1; backward -DTILE_H, STRIDE_H or 1, -DADD=0|1;
// of the batch norm -DBATCH=1, or 0 where its moments are constants.
#include "common.cuh"
#include "grid.cuh"
#include "lanes.cuh"

#define BLOCK 256

static_assert(STRIDE_H > 0 && STRIDE_W > 0 && DILATION_H > 0 && DILATION_W > 0, "a window moves and reaches forward");

#define UNROLLED(count) ((count) <= 8 ? (count) : 1)

// Windows that may cover one pixel, along each axis.
constexpr int COVER_H = (KERNEL_H - 1) * DILATION_H / STRIDE_H + 1;
constexpr int COVER_W = (KERNEL_W - 1) * DILATION_W / STRIDE_W + 1;
// Rows and columns of a window that are loaded before the first is used.
constexpr int TAP_ROWS = KERNEL_H * KERNEL_W <= 9 ? KERNEL_H : 1;
constexpr int TAPS = KERNEL_W <= 5 ? KERNEL_W : 4;

// Loads taps s0 .. s0 + TAPS of row h of a window whose first tap is at column w0; `blank` is what a tap off the image
// holds.
template <int DILATE_W>
DEVICE void load_row(const T* __restrict__ image, int h, int w0, int s0, int height, int width, i64 pitch,
                     const Raw<T, VEC>& blank, Raw<T, VEC> (&taps)[TAPS]) {
    const T* line = image + i64(h) * width * pitch;
#pragma unroll
    for (int s = 0; s < TAPS; ++s) {
        const int w = w0 + (s0 + s) * DILATE_W;
        const bool inside = s0 + s < KERNEL_W && u32(h) < u32(height) && u32(w) < u32(width);
        taps[s] = blank;
        if (inside) taps[s] = load_raw<VEC>(line + w * pitch);
    }
}

// The same of some rows from h0 on.
template <int DILATE_H, int DILATE_W, int ROWS>
DEVICE void load_taps(const T* __restrict__ image, int h0, int w0, int s0, int height, int width, i64 pitch,
                      const Raw<T, VEC>& blank, Raw<T, VEC> (&taps)[ROWS][TAPS]) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
        load_row<DILATE_W>(image, h0 + r * DILATE_H, w0, s0, height, width, pitch, blank, taps[r]);
}

#ifdef TILE_H
#include "pool2d_gather.cuh"
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

// The largest of some taps in each lane: its value, where it was and (NORMALIZED) what was read there.
struct Maximum {
    u32 best[WORDS], where[WORDS], source[NORMALIZED ? WORDS : 1];

    __device__ __forceinline__ Maximum() {}
    __device__ __forceinline__ explicit Maximum(int first) {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            best[i] = LOWEST;
            where[i] = first * ONE_PER_LANE;
            if (NORMALIZED) source[i] = 0;
        }
    }

    // Of one tap.
    __device__ __forceinline__ Maximum(const Lanes& values, u32 position, const Lanes& raw) {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            best[i] = values.pairs[i], where[i] = position;
            if (NORMALIZED) source[i] = raw.pairs[i];
        }
    }

    // Strictly greater: the first of equal maxima keeps its place. `position` of taps in every lane.
    __device__ __forceinline__ void take(int i, u32 value, u32 position, u32 raw) {
        if (NORMALIZED) source[i] = lane_select(value, best[i], raw, source[i]);
        where[i] = lane_select(value, best[i], position, where[i]);
        best[i] = lane_max(best[i], value);
    }
    __device__ __forceinline__ void take(const Lanes& values, u32 position, const Lanes& raw) {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) take(i, values.pairs[i], position, raw.pairs[i]);
    }
    __device__ __forceinline__ void take(const Lanes& values, int tap) { take(values, tap * ONE_PER_LANE, values); }
    __device__ __forceinline__ void take(const Maximum& other, int offset) {
#pragma unroll
        for (int i = 0; i < WORDS; ++i)
            take(i, other.best[i], other.where[i] + offset * ONE_PER_LANE, other.source[NORMALIZED ? i : 0]);
    }
};

#if NORMALIZED
#include "batch_norm_pool.cuh"
#include "ahead.cuh"

// Rows that a window has in common with the next: normalised once by a thread that holds the whole window.
constexpr bool WHOLE = TAP_ROWS == KERNEL_H && TAPS == KERNEL_W && DILATION_H == 1 && DILATION_W == 1;
constexpr int OVERLAP = WHOLE && KERNEL_H > STRIDE_H ? KERNEL_H - STRIDE_H : 0;
#else
constexpr int OVERLAP = 0;
#endif
constexpr int ROWS = OVERLAP > 0 ? STRIDE_H : TAP_ROWS;

#ifndef TILE_H  // of the forward pass
// Without a packed comparison (bfloat16 before Hopper) two blocks would spill.
constexpr int RESIDENT = !NORMALIZED ? 3 : DTYPE == 1 && __CUDA_ARCH__ < 900 ? 1 : 2;

extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
max_pool2d(const T* __restrict__ x, T* __restrict__ y, index_t* __restrict__ index, T* __restrict__ largest,
           const float* __restrict__ moments, const float* __restrict__ gamma, const float* __restrict__ beta, int rows,
           int strips, int strip, int height, int width, int channels, i64 pitch, int out_h, int out_w, int pad_h,
           int pad_w) {
    await_predecessor();
    const int vectors = channels / VEC;
    const Place at = place(rows, out_w * vectors);
    if (!at.inside) return;
    const int n = at.row / strips, q = at.item / vectors, c = (at.item - q * vectors) * VEC;
    const int w0 = q * STRIDE_W - pad_w;
    const int first_s = w0 < 0 ? ceil_div(-w0, DILATION_W) : 0;
    const T* image = x + i64(n) * height * width * pitch + c;
    const int p_begin = (at.row - n * strips) * strip, p_end = min(p_begin + strip, out_h);
    Lanes lowest;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) lowest.pairs[i] = LOWEST;
#if NORMALIZED
    const Normalizer normalized(moments, gamma, beta, channels, c);
    // The largest of one row's taps of a window whose first tap is at (h, w0), what is off the image left out.
    const auto row_maximum = [&](const Lanes (&taps)[TAPS], int h, int s0) {
        Maximum row(first_s);
#pragma unroll
        for (int s = 0; s < TAPS; ++s) {
            const bool inside =
                s0 + s < KERNEL_W && u32(h) < u32(height) && u32(w0 + (s0 + s) * DILATION_W) < u32(width);
            Lanes values = normalized(taps[s]);
#pragma unroll
            for (int i = 0; i < WORDS; ++i) values.pairs[i] = inside ? values.pairs[i] : LOWEST;
            row.take(values, (s0 + s) * ONE_PER_LANE, taps[s]);
        }
        return row;
    };
    // The same of whole windows: in place of a column off the image stands the next on it, under that one's number.
    i64 column[TAPS];
    u32 position[TAPS];
    const auto line_of = [&](int h) { return image + i64(min(max(h, 0), height - 1)) * width * pitch; };
    const auto line_maximum = [&](const Lanes (&taps)[TAPS], int h) {
        Maximum row(normalized(taps[0]), position[0], taps[0]);
#pragma unroll
        for (int s = 1; s < TAPS; ++s) row.take(normalized(taps[s]), position[s], taps[s]);
#pragma unroll
        for (int i = 0; i < WORDS; ++i) row.best[i] = u32(h) < u32(height) ? row.best[i] : LOWEST;
        return row;
    };
    // What a window has and the one before has not.
    extern __shared__ uint4 memory[];
    Ahead<AHEAD, ROWS, TAPS, false> ahead(reinterpret_cast<T*>(memory), threadIdx.y * blockDim.x + threadIdx.x,
                                          blockDim.x * blockDim.y);
    int asked = p_begin;
    const auto ask = [&](auto start) {
        if (asked < p_end)
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const T* line = line_of(asked * STRIDE_H - pad_h + OVERLAP + r);
#pragma unroll
                for (int s = 0; s < TAPS; ++s) start(r, s, line + column[s]);
            }
        ++asked;
    };
    Maximum carried[OVERLAP > 0 ? OVERLAP : 1];  // of the rows that the window before has, too
    Lanes taps[ROWS][TAPS];                      // with such, of a window's other rows
    if (OVERLAP > 0) {
#pragma unroll
        for (int s = 0; s < TAPS; ++s) {
            const int w = min(max(w0 + s, 0), width - 1);
            column[s] = w * pitch, position[s] = (w - w0) * ONE_PER_LANE;
        }
        Lanes above[OVERLAP > 0 ? OVERLAP : 1][TAPS];
        const int h0 = p_begin * STRIDE_H - pad_h;
#pragma unroll
        for (int r = 0; r < OVERLAP; ++r)
#pragma unroll
            for (int s = 0; s < TAPS; ++s) above[r][s] = load_raw<VEC>(line_of(h0 + r) + column[s]);
        ahead.fill(ask);
#pragma unroll
        for (int r = 0; r < OVERLAP; ++r) carried[r] = line_maximum(above[r], h0 + r);
    }
#endif
    for (int p = p_begin; p < p_end; ++p) {
        const int h0 = p * STRIDE_H - pad_h;
        const int first_r = h0 < 0 ? ceil_div(-h0, DILATION_H) : 0;
        Maximum found(first_r * KERNEL_W + first_s);
#if NORMALIZED
        if constexpr (OVERLAP > 0) ahead.take(taps, ask);
#pragma unroll
        for (int r = 0; r < OVERLAP; ++r) {
            if (r == 0) found = carried[0];
            else found.take(carried[r], r * KERNEL_W);
            if (r >= STRIDE_H) carried[r - STRIDE_H] = carried[r];
        }
#endif
#pragma unroll UNROLLED(KERNEL_H / ROWS)
        for (int r0 = OVERLAP; r0 < KERNEL_H; r0 += ROWS)
#pragma unroll 1
            for (int s0 = 0; s0 < KERNEL_W; s0 += TAPS) {
#if !NORMALIZED
                Lanes taps[ROWS][TAPS];
#endif
                const int h = h0 + r0 * DILATION_H;
                if (OVERLAP == 0)
                    load_taps<DILATION_H, DILATION_W>(image, h, w0, s0, height, width, pitch, lowest, taps);
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
#if NORMALIZED
                    Maximum row;
                    if constexpr (OVERLAP > 0) {
                        row = line_maximum(taps[r], h + r);
                    } else {
                        row = row_maximum(taps[r], h + r * DILATION_H, s0);
                    }
                    found.take(row, (r0 + r) * KERNEL_W);
                    if (OVERLAP > 0 && OVERLAP + r >= STRIDE_H) carried[OVERLAP + r - STRIDE_H] = row;
#else
#pragma unroll
                    for (int s = 0; s < TAPS; ++s) found.take(taps[r][s], (r0 + r) * KERNEL_W + s0 + s);
#endif
                }
            }
        const i64 out = ((i64(n) * out_h + p) * out_w + q) * channels + c;
        Raw<T, VEC> maximum;
        Raw<index_t, VEC> position;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) maximum.pairs[i] = found.best[i];
#pragma unroll
        for (int i = 0; i < VEC; ++i) position.items[i] = index_t(lane(found.where, i));
        store_raw<VEC>(y + out, maximum);
        store_raw<VEC>(index + out, position);
#if NORMALIZED
        Raw<T, VEC> raw;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) raw.pairs[i] = found.source[i];
        store_raw<VEC>(largest + out, raw);
#endif
#if !NORMALIZED  // where the place of a NaN is of no consequence: the ReLU stops its gradient
        // A NaN is greater than nothing, so its place (of several, the last) is looked up off the common path.
        u32 all = found.best[0];
#pragma unroll
        for (int i = 1; i < WORDS; ++i) all = lane_max(all, found.best[i]);
        if (any_nan(all)) place_nans(image, index + out, h0, w0, height, width, pitch);
#endif
    }
}

#else
#include "pool2d_terms.cuh"

// Each pixel gets the sum of the gradients whose maximum it was; `write` says what is made of it.
template <class Write>
DEVICE void gather_maxima(const T* __restrict__ dy, const index_t* __restrict__ index, T* __restrict__ dx,
                          const Geometry& g, i64 pitch, Write write) {
    const i64 dy_line = g.out_w * pitch, index_line = i64(g.out_w) * g.channels;
    gather<Window, typename Either<PACKED, Terms, Sum>::type>(
        g, dx,
        [&](const Column& at, int a, int up, int left) {
            const i64 first = i64(at.n) * g.out_h * g.out_w + at.b;
            const T* from = dy + (first * pitch + at.c) + a * dy_line;
            const index_t* place = index + (first * g.channels + at.c) + a * index_line;
            Window window;
            window.dy = load_raw<VEC>(from - (up * dy_line + left * pitch));
            window.place = load_raw<VEC>(place - (up * index_line + left * g.channels));
            return window;
        },
        [&](const Window& window, int tap, auto& sum) {
            if constexpr (PACKED) {
                sum.take(window, tap);
            } else {
                float gradient[VEC];
                unpack(window.dy, gradient);
#pragma unroll
                for (int e = 0; e < VEC; ++e)
                    if (window.tap(e) == tap) sum.value[e] += gradient[e];
            }
        },
        write);
}

#if !NORMALIZED
extern "C" __global__ void __launch_bounds__(BLOCK, 3)
max_pool2d_backward(const T* __restrict__ dy, const index_t* __restrict__ index, const T* __restrict__ add,
                    T* __restrict__ dx, Geometry g, i64 pitch, i64 add_pitch) {
    await_predecessor();
#if ADD
    gather_maxima(dy, index, dx, g, pitch, Adding{add, add_pitch});
#else
    gather_maxima(dy, index, dx, g, pitch, Plainly());
#endif
}
#else
extern "C" __global__ void __launch_bounds__(BLOCK, 2)
batch_norm_max_pool2d_backward(const T* __restrict__ dy, const index_t* __restrict__ index, const T* __restrict__ x,
                               const float* __restrict__ moments, const float* __restrict__ gamma,
                               const double* __restrict__ sums, const double* __restrict__ count, T* __restrict__ dx,
                               Geometry g, i64 pitch) {
    await_predecessor();
    gather_maxima(dy, index, dx, g, pitch, NormalizedBackward{x, dx, moments, gamma, sums, count, g.channels});
}
#endif
#endif

#else
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

#ifndef TILE_H
extern "C" __global__ void __launch_bounds__(BLOCK, 3)
avg_pool2d(const T* __restrict__ x, T* __restrict__ y, int rows, int strips, int strip, int height, int width,
           int channels, i64 pitch, int out_h, int out_w, int pad_h, int pad_w, int include_pad) {
    await_predecessor();
    const int vectors = channels / VEC;
    const Place at = place(rows, out_w * vectors);
    if (!at.inside) return;
    const int n = at.row / strips, q = at.item / vectors, c = (at.item - q * vectors) * VEC;
    const int w0 = q * STRIDE_W - pad_w;
    const T* image = x + i64(n) * height * width * pitch + c;
    const int p_begin = (at.row - n * strips) * strip, p_end = min(p_begin + strip, out_h);

    const float zeros[VEC] = {};
    const Raw<T, VEC> zero = pack<T>(zeros);

    for (int p = p_begin; p < p_end; ++p) {
        const int h0 = p * STRIDE_H - pad_h;
        float sum[VEC] = {};
#pragma unroll UNROLLED(KERNEL_H / TAP_ROWS)
        for (int r0 = 0; r0 < KERNEL_H; r0 += TAP_ROWS)
#pragma unroll 1
            for (int s0 = 0; s0 < KERNEL_W; s0 += TAPS) {
                Raw<T, VEC> taps[TAP_ROWS][TAPS];
                load_taps<1, 1>(image, h0 + r0, w0, s0, height, width, pitch, zero, taps);
#pragma unroll
                for (int r = 0; r < TAP_ROWS; ++r)
#pragma unroll
                    for (int s = 0; s < TAPS; ++s) {
                        float value[VEC];
                        unpack(taps[r][s], value);
#pragma unroll
                        for (int i = 0; i < VEC; ++i) sum[i] += value[i];
                    }
            }
        const float divisor = float(max(window_length(h0, KERNEL_H, height, pad_h, include_pad), 1)) *
                              float(max(window_length(w0, KERNEL_W, width, pad_w, include_pad), 1));
#pragma unroll
        for (int i = 0; i < VEC; ++i) sum[i] /= divisor;
        store(y + ((i64(n) * out_h + p) * out_w + q) * channels + c, sum);
    }
}

#else
struct Window {
    Raw<T, VEC> dy;
    float share = 0.0f;

    __device__ __forceinline__ Window() {
        const float zeros[VEC] = {};
        dy = pack<T>(zeros);
    }
};

extern "C" __global__ void __launch_bounds__(BLOCK, 4)
avg_pool2d_backward(const T* __restrict__ dy, T* __restrict__ dx, Geometry g, i64 pitch, int include_pad) {
    await_predecessor();
    gather<Window, Sum>(
        g, dx,
        [&](const Column& at, int a, int up, int left) {
            const int p = a - up, q = at.b - left;
            Window window;
            window.dy = load_raw<VEC>(dy + ((i64(at.n) * g.out_h + p) * g.out_w + q) * pitch + at.c);
            const int length_h = window_length(p * STRIDE_H - g.pad_h, KERNEL_H, g.height, g.pad_h, include_pad);
            const int length_w = window_length(q * STRIDE_W - g.pad_w, KERNEL_W, g.width, g.pad_w, include_pad);
            window.share = 1.0f / (float(length_h) * float(length_w));
            return window;
        },
        [&](const Window& window, int, Sum& sum) {
            float gradient[VEC];
            unpack(window.dy, gradient);
#pragma unroll
            for (int e = 0; e < VEC; ++e) sum.value[e] += gradient[e] * window.share;
        });
}
#endif

#endif
