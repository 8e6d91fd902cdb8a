// Batch normalisation over rows of channels (Ioffe and Szegedy 2015), split where a reduction over ranks can fall.
//
// Layout: x, y, dy, dx, add, masked: (rows, C) of T at a pitch; moments (2, C) float: mean and 1/sqrt(biased variance +
// eps); gamma, beta (C,) float or null; stats (R, 1 + 2C) double: count, means, M2 (sums of squared deviations);
// sums (2, C) double: sum dy, sum dy*xhat with xhat = (x - mean)*rstd; count (1,) double; signs (rows, S) bytes, see
// signs.cuh.
//
// Statistics take two kernels. The first cuts the rows into chunks, a function of the shape alone, and leaves one
// partial result per chunk and channel; the second (batch_norm_merge.cu) merges the chunks in a fixed order in double,
// and goes on to the moments where no other rank has a part in them. So the same bits come out on every device and for
// every pitch. Variances are never a difference of raw moments: each thread subtracts a pivot, the first value of its
// own, so a mean far from zero costs nothing, and partial (count, mean, M2) are merged as by Chan, Golub and LeVeque
// (1983).
//
// Mapping of the chunk kernels: block (columns, lanes) of at most 256 threads; thread (x, y) owns VEC channels of
// column tile blockIdx.y and the rows y, y + lanes, ... of chunk blockIdx.x. Three blocks fit a multiprocessor (two
// with two batch norms), and there are whole rounds of that on 132 of them: a few blocks more would run alone, as long
// as all others. Sums of two arrays have their rows on their way through shared memory (ahead.cuh): behind a SiLU, whose
// arithmetic is a third of the time, that takes a tenth to a sixth less than loads into registers, and leaves registers
// for a third block; without an activation it takes as long. Statistics, whose arithmetic is little, took 4 % longer.
// Mapping of the apply kernels: Share (common.cuh); parameters are loaded once per thread, which takes eight groups of
// rows where there are many of them (backward, and of two batch norms: 17 % less time at 256x14x14x256). Tried without
// gain in whole steps on an H200: rows from the last to the first, so that a pass begins where the convolution before
// it ended (its bytes are no longer in the cache), and loads marked as read for the last time (1 % slower on
// DenseNet-121).
//
// Cost, s = sizeof(T), per element (floor: bf16, 256x56x56x64, 51.4 M elements, at 4.2 TB/s):
//   stats            s bytes   4 FLOP    24.5 us        backward_stats   2s bytes   4 FLOP    48.9 us
//   apply           2s bytes   3 FLOP    48.9 us        backward_apply   3s bytes   5 FLOP    73.4 us
//   apply with an activation, and stats and apply behind one whose slope is recomputed from x: the same bytes, 3 FLOP
//   and those of the activation more; with a ReLU's mask read from y and the masked gradient left: backward_stats 4s
//   bytes; from signs 3s + 1/8; backward_apply with the sums of a second batch norm: 4s, where two kernels take 5s
//   (an added tensor: s bytes more). Partial results are below 5 % of the bytes.

#include "activation.cuh"
#include "affine.cuh"
#include "ahead.cuh"
#include "chunks.cuh"
#include "signs.cuh"

// An activation over the batch norm: a struct of activation.cuh, or this one, max(z, a), with the mask of a ReLU as the
// forward pass rounded its output.
struct bounded {
    static constexpr bool KEEPS_OUTPUT = false;
    DEVICE float value(float z, float a) { return clamp_below(z, a); }
    DEVICE float gradient(float dy, float z, float) { return z > RoundsToZero<T>::most ? dy : 0.0f; }
};
#ifndef FUNCTION
#define FUNCTION bounded
#define NAMED 0
#else
#define NAMED 1  // and may need the registers of a block less: GELU and the slope of SiLU spilled without
#endif

// dy times the slope of FUNCTION at z, what the batch norm makes of x.
DEVICE float behind(float dy, float z, float a) {
    return FUNCTION::gradient(dy, FUNCTION::KEEPS_OUTPUT ? FUNCTION::value(z, a) : z, a);
}

// ------------------------------------------------------------------------------------------------ forward: statistics
#if defined(STATS)

// mean (chunks, C) double, squares (chunks, C) float: the mean and M2 of each chunk.
extern "C" __global__ void __launch_bounds__(256, 3)
batch_norm_stats_kernel(const T* __restrict__ x, double* __restrict__ mean, float* __restrict__ squares, Chunks cut) {
    await_predecessor();
    const int width = blockDim.x * VEC, slot = threadIdx.x * VEC;  // channels of the tile, and where mine begin
    float* lane_mean = lanes;  // [lane][channel of the tile], relative to the chunk's pivot
    float* lane_squares = lane_mean + blockDim.y * width;
    float* pivots = lane_squares + blockDim.y * width;  // the first row of the chunk

    const Share at = chunk_share(cut, UNROLL);
    float pivot[VEC] = {}, sum[VEC] = {}, square[VEC] = {};
    Raw<T, VEC> raw[UNROLL];
    for_rows<UNROLL>(
        at, [&](int u, int row) { raw[u] = load_once<VEC>(x + row_offset(row, cut.pitch[0]) + at.channel); },
        [&](int u, int row) {
            float v[VEC];
            unpack(raw[u], v);
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                if (u == 0 && row == at.row) pivot[i] = v[i];
                const float d = v[i] - pivot[i];
                sum[i] += d;
                square[i] = fmaf(d, d, square[i]);
            }
        });

    if (threadIdx.y == 0) store(pivots + slot, pivot);
    __syncthreads();
    const int mine = at.row < at.rows ? ceil_div(at.rows - at.row, at.step) : 0;
    const float inverse = mine ? 1.0f / mine : 0.0f;
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
        const float offset = sum[i] * inverse;
        square[i] = clamp_below(fmaf(-sum[i], offset, square[i]), 0.0f);
        sum[i] = (pivot[i] - pivots[slot + i]) + offset;
    }
    store(lane_mean + threadIdx.y * width + slot, sum);
    store(lane_squares + threadIdx.y * width + slot, square);
    __syncthreads();

    // The lanes' results are merged in double, STRETCH lanes by each thread, then the stretches.
    const Stretch part(width);
    const int count = min(cut.rows - int(blockIdx.x) * cut.chunk_rows, cut.chunk_rows);
    const int rows = count / int(blockDim.y), longer = count % int(blockDim.y);  // lanes that have one row more
    double first = 0.0, second = 0.0;  // sums of rows * mean and of rows * mean^2 + M2
    if (part.inside)
#pragma unroll
        for (int lane = part.lane; lane < part.lane + STRETCH; ++lane) {
            const double m = lane_mean[lane * width + part.column], weighted = m * (rows + (lane < longer));
            first += weighted;
            second += fma(weighted, m, double(lane_squares[lane * width + part.column]));
        }
    double* firsts = reinterpret_cast<double*>(lane_mean);  // [stretch][channel of the tile]
    double* seconds = firsts + blockDim.y / STRETCH * width;
    __syncthreads();
    if (part.inside) {
        firsts[part.index] = first;
        seconds[part.index] = second;
    }
    __syncthreads();
    const int channel = blockIdx.y * width + part.column;
    if (part.lane > 0 || channel >= cut.channels) return;
    for (int i = part.index + width; i < int(blockDim.y) / STRETCH * width; i += width) {
        first += firsts[i];
        second += seconds[i];
    }
    const double shift = first / count;
    const i64 to = i64(blockIdx.x) * cut.channels + channel;
    mean[to] = double(pivots[part.column]) + shift;
    squares[to] = clamp_below(float(second - first * shift), 0.0f);
}

#endif

// ---------------------------------------------------------------------------------------------------- forward: apply
#if defined(APPLY)

// y = FUNCTION of (x - mean)*rstd*gamma + beta (+ add); a: of FUNCTION, which is `bounded` (0 for ReLU, -infinity
// without) where none is named. ADD: 0; 1; 2: `add` is batch-normalised as well, with the moments and parameters that
// follow it. SIGNS: those of y are written too.
extern "C" __global__ void __launch_bounds__(256, ADD || NAMED ? 3 : 4)
batch_norm_apply_kernel(const T* __restrict__ x, const float* __restrict__ moments, const float* __restrict__ gamma,
                        const float* __restrict__ beta, const T* __restrict__ add,
                        const float* __restrict__ add_moments, const float* __restrict__ add_gamma,
                        const float* __restrict__ add_beta, T* __restrict__ y, u8* __restrict__ signs, float a,
                        int channels, Walk walk) {
    await_predecessor();
    const Share at(walk, UNROLL);
    if (at.row >= at.rows) return;
    float mean[VEC], scale[VEC], shift[VEC], add_mean[VEC] = {}, add_scale[VEC] = {};
    Raw<T, VEC> raw[UNROLL], more[ADD ? UNROLL : 1];
    for_rows_prepared<UNROLL, true>(
        at,
        [&](int u, int row) {
            raw[u] = load_raw<VEC>(x + row_offset(row, walk.pitch[0]) + at.channel);
            if (ADD) more[u] = load_raw<VEC>(add + row_offset(row, walk.pitch[2]) + at.channel);
        },
        [&] {
            load_affine(moments, gamma, beta, channels, at.channel, mean, scale, shift);
            if (ADD == 2) {
                float add_shift[VEC];
                load_affine(add_moments, add_gamma, add_beta, channels, at.channel, add_mean, add_scale, add_shift);
#pragma unroll
                for (int i = 0; i < VEC; ++i) shift[i] += add_shift[i];
            }
        },
        [&](int u, int row) {
            float v[VEC], z[VEC] = {};
            unpack(raw[u], v);
            if (ADD) unpack(more[u], z);
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                v[i] = normalize(v[i], mean[i], scale[i], shift[i]);
                if (ADD == 1) v[i] += z[i];
                if (ADD == 2) v[i] = normalize(z[i], add_mean[i], add_scale[i], v[i]);
                v[i] = FUNCTION::value(v[i], a);
            }
            store(y + row_offset(row, walk.pitch[1]) + at.channel, v);
#if SIGNS
            store_signs(signs, row, channels, at.channel, v);
#endif
        });
}

#endif

// ----------------------------------------------------------------------------------------------- backward: statistics
#if defined(BACKWARD_STATS)

// partial (chunks, 2, C) float: per chunk, sum dy and sum dy*(x - mean). MASK: 0; 1: dy is the gradient behind
// FUNCTION, whose slope is recomputed from x; 2: behind a ReLU, whose mask is read from y, and the masked dy is left in
// `masked`, a dense array; 3: as 2, from the signs of y.
#if MASK == 3
typedef u8 Output;
#else
typedef T Output;
#endif

extern "C" __global__ void __launch_bounds__(256, 3)
batch_norm_backward_stats_kernel(const T* __restrict__ dy, const T* __restrict__ x,
                                 const float* __restrict__ moments, const float* __restrict__ gamma,
                                 const float* __restrict__ beta, const Output* __restrict__ y,
                                 T* __restrict__ masked, float* __restrict__ partial, float a, Chunks cut) {
    await_predecessor();
    const Share at = chunk_share(cut, UNROLL);
    float mean[VEC] = {}, sum[VEC] = {}, product[VEC] = {};
#if MASK < 2
    if (at.row < at.rows) {
        float scale[VEC], shift[VEC];
        Ahead<AHEAD, 1, 2> ahead(reinterpret_cast<T*>(lanes), threadIdx.y * blockDim.x + threadIdx.x,
                                 blockDim.x * blockDim.y);
        int asked = at.row;
        const auto ask = [&](auto start) {
            if (asked < at.rows) {
                start(0, 0, x + row_offset(asked, cut.pitch[0]) + at.channel);
                start(0, 1, dy + row_offset(asked, cut.pitch[1]) + at.channel);
            }
            asked += at.step;
        };
        ahead.fill(ask);
        load_affine(moments, gamma, beta, cut.channels, at.channel, mean, scale, shift);
#pragma unroll 1
        for (int row = at.row; row < at.rows; row += at.step) {
            Raw<T, VEC> raw[1][2];
            ahead.take(raw, ask);
            float v[VEC], g[VEC];
            unpack(raw[0][0], v);
            unpack(raw[0][1], g);
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                if (MASK == 1) g[i] = behind(g[i], normalize(v[i], mean[i], scale[i], shift[i]), a);
                sum[i] += g[i];
                product[i] = fmaf(g[i], v[i] - mean[i], product[i]);
            }
        }
    }
    __syncthreads();  // what is on its way lies where the lanes leave their sums
#else
    if (at.row < at.rows) load(moments + at.channel, mean);
    Raw<T, VEC> raw_dy[UNROLL], raw_x[UNROLL], raw_y[MASK == 2 ? UNROLL : 1];
    u32 positive[MASK == 3 ? UNROLL : 1];
    for_rows<UNROLL>(
        at,
        [&](int u, int row) {
            raw_x[u] = load_raw<VEC>(x + row_offset(row, cut.pitch[0]) + at.channel);
            raw_dy[u] = load_raw<VEC>(dy + row_offset(row, cut.pitch[1]) + at.channel);
#if MASK == 2
            raw_y[u] = load_raw<VEC>(y + row_offset(row, cut.pitch[2]) + at.channel);
#else
            positive[u] = load_signs(y, row, cut.channels, at.channel);
#endif
        },
        [&](int u, int row) {
            float g[VEC], v[VEC], out[VEC] = {};
            unpack(raw_dy[u], g);
            unpack(raw_x[u], v);
            if (MASK == 2) unpack(raw_y[u], out);
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                const bool passed = MASK == 2 ? out[i] > 0.0f : positive[MASK == 3 ? u : 0] >> i & 1u;
                g[i] = passed ? g[i] : 0.0f;
                sum[i] += g[i];
                product[i] = fmaf(g[i], v[i] - mean[i], product[i]);
            }
            store(masked + row_offset(row, cut.channels) + at.channel, g);
        });
#endif
    leave_sums(sum, product, partial, cut);
}

#endif

// ---------------------------------------------------------------------------------------------------- backward: apply
#if defined(BACKWARD_APPLY)

// dx = gamma*rstd*(dy - sums[0]/count - (x - mean)*rstd*sums[1]/count) (+ add); without sums (BATCH 0): gamma*rstd*dy,
// and x is read for the slope only. ADD, BATCH: 0 or 1. MASK: 0; 1: dy is the gradient behind FUNCTION, whose slope is
// recomputed from x. TABLE: a block works out once what its lanes know of their channels, for which each would read 272
// bytes beside as few as 96 of rows (14x14x256 and 32 images on an H200: 4.8 us, so 5.8; 56x56x64 and 256: 76, 78).
#if __CUDA_ARCH__ >= 900
// NVRTC 13.0 would spill under tanh in float16, and under hardswish with a sum.
constexpr int RESIDENT = BATCH && NAMED && (ADD || DTYPE == 2) ? 2 : BATCH || MASK ? 3 : 4;
#else
constexpr int RESIDENT = BATCH && MASK ? 2 : BATCH || MASK ? 3 : 4;  // its compiler would spill three vectors
#endif

extern "C" __global__ void __launch_bounds__(256, RESIDENT)
batch_norm_backward_apply_kernel(const T* __restrict__ dy, const T* __restrict__ x, const float* __restrict__ moments,
                                 const float* __restrict__ gamma, const float* __restrict__ beta,
                                 const double* __restrict__ sums, const double* __restrict__ count,
                                 const T* __restrict__ add, T* __restrict__ dx,
                                 float a, int channels, Walk walk) {
    await_predecessor();
    const Share at(walk, UNROLL);
#if TABLE
    extern __shared__ __align__(16) float table[];  // five numbers for each channel of the tile
#else
    if (at.row >= at.rows) return;
#endif
    float scale[VEC], mean[VEC], shift[VEC];
    InputGradient<BATCH> gradient;
    Raw<T, VEC> raw_dy[UNROLL], raw_x[BATCH || MASK ? UNROLL : 1], more[ADD ? UNROLL : 1];
    for_rows_prepared<UNROLL, !(BATCH && MASK && (ADD || NAMED))>(
        at,
        [&](int u, int row) {
            raw_dy[u] = load_raw<VEC>(dy + row_offset(row, walk.pitch[0]) + at.channel);
            if (BATCH || MASK) raw_x[u] = load_raw<VEC>(x + row_offset(row, walk.pitch[2]) + at.channel);
            if (ADD) more[u] = load_raw<VEC>(add + row_offset(row, walk.pitch[3]) + at.channel);
        },
        [&] {
#if TABLE
            const int width = blockDim.x * VEC, first = blockIdx.y * width, slot = threadIdx.x * VEC;
            float *scales = table, *shifts = scales + width, *bends = shifts + width, *offsets = bends + width;
            float* means = offsets + width;
            const int last = min(width, channels - first), threads = blockDim.x * blockDim.y;
            for (int c = threadIdx.y * blockDim.x + threadIdx.x; c < last; c += threads) {
                float m[1], s[1], b[1];
                load_affine(moments, gamma, beta, channels, first + c, m, s, b);
                const InputGradient<BATCH, 1> one(m, s, moments, sums, count, channels, first + c);
                scales[c] = s[0], shifts[c] = b[0], means[c] = m[0];
                if (BATCH) bends[c] = one.bend[0], offsets[c] = one.offset[0];
            }
            __syncthreads();
            if (at.row >= at.rows) return;
            load(scales + slot, scale);
            load(shifts + slot, shift);
            load(means + slot, mean);
            gradient.set(scale, mean, bends + slot, offsets + slot);
#else
            load_affine(moments, gamma, beta, channels, at.channel, mean, scale, shift);
            gradient = InputGradient<BATCH>(mean, scale, moments, sums, count, channels, at.channel);
#endif
        },
        [&](int u, int row) {
            float g[VEC], v[VEC] = {}, z[VEC] = {};
            unpack(raw_dy[u], g);
            if (BATCH || MASK) unpack(raw_x[u], v);
            if (ADD) unpack(more[u], z);
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                if (MASK) g[i] = behind(g[i], normalize(v[i], mean[i], scale[i], shift[i]), a);
                g[i] = ADD ? gradient(i, g[i], v[i], z[i]) : gradient(i, g[i], v[i]);
            }
            store(dx + row_offset(row, walk.pitch[1]) + at.channel, g);
        });
}

#endif

// ----------------------------------------------- backward: apply, and the statistics of another over the same dy
#if defined(BACKWARD_APPLY_STATS)

// dx as of batch_norm_backward_apply_kernel, dense; and for a batch norm of `other`, the other summand of a sum whose
// gradient dy is, what batch_norm_backward_stats_kernel leaves of chunks. Pitches: of x, dy, other.
extern "C" __global__ void __launch_bounds__(256, 2)
batch_norm_backward_apply_stats_kernel(const T* __restrict__ dy, const T* __restrict__ x,
                                       const float* __restrict__ moments, const float* __restrict__ gamma,
                                       const double* __restrict__ sums, const double* __restrict__ count,
                                       const T* __restrict__ other, const float* __restrict__ other_moments,
                                       T* __restrict__ dx, float* __restrict__ partial, Chunks cut) {
    await_predecessor();
    const Share at = chunk_share(cut, UNROLL);
    float other_mean[VEC] = {};
    InputGradient<true> gradient;
    float sum[VEC] = {}, product[VEC] = {};
    Raw<T, VEC> raw_dy[UNROLL], raw_x[UNROLL], raw_other[UNROLL];
    if (at.row < at.rows)
        for_rows_prepared<UNROLL, true>(
            at,
            [&](int u, int row) {
                raw_dy[u] = load_raw<VEC>(dy + row_offset(row, cut.pitch[1]) + at.channel);
                raw_x[u] = load_raw<VEC>(x + row_offset(row, cut.pitch[0]) + at.channel);
                raw_other[u] = load_raw<VEC>(other + row_offset(row, cut.pitch[2]) + at.channel);
            },
            [&] {
                float mean[VEC], scale[VEC], shift[VEC];
                load(other_moments + at.channel, other_mean);
                load_affine(moments, gamma, nullptr, cut.channels, at.channel, mean, scale, shift);
                gradient = InputGradient<true>(mean, scale, moments, sums, count, cut.channels, at.channel);
            },
            [&](int u, int row) {
                float g[VEC], v[VEC], w[VEC];
                unpack(raw_dy[u], g);
                unpack(raw_x[u], v);
                unpack(raw_other[u], w);
#pragma unroll
                for (int i = 0; i < VEC; ++i) {
                    sum[i] += g[i];
                    product[i] = fmaf(g[i], w[i] - other_mean[i], product[i]);
                    g[i] = gradient(i, g[i], v[i]);
                }
                store(dx + row_offset(row, cut.channels) + at.channel, g);
            });
    leave_sums(sum, product, partial, cut);
}

#endif
