// Squeeze and excitation over a batch norm under an activation, of which only the batch norm's input x is kept: with
// y = FUNCTION((x - mean)*rstd*gamma + beta) the means of y over the pixels of each sample, and z = y * gate, a gate
// for each sample and channel; backward what gate, parameters and x get of dz.
//
// x, dz, z, dx: (samples, pixels, C) of T at a pitch per pixel; gate, dmean, means, dgate (samples, C) of T; moments
// (2, C), gamma, beta (C,) float, the last two or null; sums (2, C) double and count (1,) as of batch_norm.cu.
//
// The gradient of y is dy = dz*gate + dmean/pixels, where dmean, that of the means, is only known once dgate has been
// through the layers that made the gate of the means. Both are constants of a sample and channel, so sums over its
// pixels that are taken before they are known are enough: with s the slope of FUNCTION, and of the batch norm's two
//   sums sum dy*s         = gate * sum dz*s         + dmean/pixels * sum s
//   sum dy*s*(x - m) = gate * sum dz*s*(x - m) + dmean/pixels * sum s*(x - m)
// and one pass over dz and x leaves these four beside sum dz*y, the gradient of the gate.
//
// gated_norm_sums   SUMS 1: sum y; 5: sum dz*y, dz*s, s, dz*s*(x - mean), s*(x - mean). Block: columns x lanes, up to
//   256 threads; a thread owns VEC neighbouring channels and each lanes-th pixel of a chunk, PIXELS at a time. What
//   MOST of them give it adds to its own place in shared memory: no float32 sum is longer. Grid: tiles of columns*VEC
//   channels, then chunks, then groups of `each` samples, which a block takes one after the other: the next one's first
//   pixels are on their way (ahead.cuh) while its lanes add up. partials (SUMS, chunks, samples, C) float; chunks and
//   lanes depend on the sizes alone. WHOLE: a sample is one chunk, as where there are many; then the results are
//   written at once.
// gated_norm_merge   Chunks in their order, a thread for each sample and channel: the means; or dgate, and
//   parts (samples, 4, C) float.
// gated_norm_parts   parts (samples, 2, C) float of the batch norm's two sums, as batch_norm_backward_merge takes them.
// gated_norm_apply, gated_norm_backward_apply   SampleShare.
//
// Cost, s = sizeof(T), per element: sums s bytes, 2s where there are five; apply 2s; backward_apply 3s. In place of the
// 2s + s + 2s forward and 2s + 2s + 2s + 3s backward of activation, means, product, gate gradient, its sum with that of
// the means, and a batch norm behind an activation. Floor on an H200 at 4.2 TB/s, bf16, per million elements: 0.48,
// 0.95, 0.95, 1.43 us. A SiLU's sums take two special functions for each element, of which a multiprocessor makes 16 a
// clock: as long as reading two bytes. Forward four values of a 16-bit type (two of float32, which has time and needs
// the range) share a denominator, which leaves five for four elements; backward memory takes twice as long. Eight
// instructions an element forward, 17 backward, and 3 and 5 of how they come. Measured on an H200, bf16, 256 maps of
// 56x56x256: 95 us forward and 195 backward, where the bytes take 98 and 197 at the rate of a copy. Two values on a
// denominator take 14 % longer, blocks for three on a multiprocessor in place of two 8 % backward.
#include "activation.cuh"
#include "affine.cuh"

constexpr int FEW = sizeof(T) == 4 ? 2 : 3;  // blocks on a multiprocessor: float32's vectors would spill in three

DEVICE float slope(float dy, float z, float y, float a) {
    return FUNCTION::gradient(dy, FUNCTION::KEEPS_OUTPUT ? y : z, a);
}

// What is summed over pixels, of u = UNIT z; `of`, `sum` and y are UNIT times what FUNCTION makes of z. all(): that,
// the slope there, and that times g: what FUNCTION cuts off is dropped, not multiplied.
template <class F>
struct Summand {
    static constexpr float UNIT = 1.0f;
    DEVICE float of(float u, float a) { return F::value(u, a); }
    template <int N>
    DEVICE float sum(const float (&u)[N], float a) {
        float sum = of(u[0], a);
#pragma unroll
        for (int i = 1; i < N; ++i) sum += of(u[i], a);
        return sum;
    }
    DEVICE void all(float g, float u, float a, float& y, float& slope, float& of) {
        y = F::value(u, a);
        slope = F::gradient(1.0f, F::KEEPS_OUTPUT ? y : u, a);
        of = slope == 0.0f ? 0.0f : g * slope;
    }
};
// A SiLU, which cuts off nothing, in units of its exponential's argument: a product less for each value. N values on
// one denominator, and value and slope from one logistic function: special functions, two for each, would take longer
// than memory does. Where the exponential is held back the value is below 2^(-120/N) of z.
template <>
struct Summand<silu> {
    static constexpr float UNIT = -1.4426950408889634f, BACK = -0.6931471805599453f;
    DEVICE float below(float u, float most) { return 1.0f + two_to_the(clamp_above(u, most)); }
    DEVICE float of(float u, float) { return u * reciprocal(below(u, 120.0f)); }
    template <int N>
    DEVICE float sum(const float (&u)[N], float) {
        float above[N], under[N];
#pragma unroll
        for (int i = 0; i < N; ++i) above[i] = u[i], under[i] = below(u[i], 120.0f / N);
#pragma unroll
        for (int n = N / 2; n > 0; n /= 2)
#pragma unroll
            for (int i = 0; i < n; ++i) {
                above[i] = fmaf(above[i], under[n + i], above[n + i] * under[i]);
                under[i] *= under[n + i];
            }
        return above[0] * reciprocal(under[0]);
    }
    DEVICE void all(float g, float u, float, float& y, float& slope, float& of) {
        const float t = two_to_the(sizeof(T) == 2 ? u : clamp_above(u, 126.0f)), whole = reciprocal(1.0f + t);
        y = u * whole;
        // As Swish has it (activation.cuh).
        slope = sizeof(T) == 2 ? fmaf(BACK, fmaf(-y, whole, y), whole) : whole * fmaf(u, BACK * (t * whole), 1.0f);
        of = g * slope;
    }
};

// The k-th sum of a sample and N neighbouring channels.
template <int N>
DEVICE void finish(T* out, float* parts, int k, float (&sum)[N], float factor, int sample, int channels, int channel) {
    if (k > 0) return store(parts + (i64(sample) * 4 + k - 1) * channels + channel, sum);
#pragma unroll
    for (int e = 0; e < N; ++e) sum[e] *= factor;
    store(out + i64(sample) * channels + channel, sum);
}

#if defined(SUMS)

#include "ahead.cuh"

template <int N>
DEVICE void add(const float* more, float (&sum)[N]) {
    float v[N];
    load(more, v);
#pragma unroll
    for (int e = 0; e < N; ++e) sum[e] += v[e];
}

// How the pixels of each sample are cut into chunks, and how many samples a block takes (gated_norm.py).
struct Cut {
    int pitch[2];
    int pixels, chunk, chunks, channels, samples, each, tiles;
};

constexpr bool BACK = SUMS > 1;
constexpr int FEWER = VEC < 4 ? VEC : 4;  // channels of a thread where lanes add up
typedef Summand<FUNCTION> Sum;

extern "C" __global__ void __launch_bounds__(256, BACK ? 2 : 3)
gated_norm_sums(const T* __restrict__ x, const T* __restrict__ dz, const float* __restrict__ moments,
                const float* __restrict__ gamma, const float* __restrict__ beta, float* __restrict__ partials,
                T* __restrict__ out, float* __restrict__ parts, float a, float factor, Cut cut) {
    await_predecessor();
    extern __shared__ __align__(16) float scratch[];  // [sum][lane][channel of the tile]; behind it what is on its way
    const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
    const int width = blockDim.x * VEC, slot = threadIdx.x * VEC, lanes = blockDim.y;
    const int tile = blockIdx.x % cut.tiles, at = blockIdx.x / cut.tiles, chunk = at % cut.chunks;
    const int channel = tile * width + slot, begin = at / cut.chunks * cut.each;
    const int end = min(begin + cut.each, cut.samples);
    const int first = chunk * cut.chunk + threadIdx.y, last = min(chunk * cut.chunk + cut.chunk, cut.pixels);
    const bool some = channel < cut.channels && first < last;

    Ahead<AHEAD, PIXELS, BACK ? 2 : 1> ahead(reinterpret_cast<T*>(scratch + SUMS * lanes * width), thread, threads);
    int asked = begin, pixel = first;  // sample and pixel that are to be asked for
    const T *next_x = x + channel + row_offset(begin * cut.pixels + first, cut.pitch[0]),
            *next_dz = dz + channel + row_offset(begin * cut.pixels + first, cut.pitch[1]);
    const auto ask = [&](auto start) {
        if (asked >= end) return;
#pragma unroll
        for (int e = 0; e < PIXELS; ++e) {
            if (pixel < last) {
                start(e, 0, next_x);
                if (BACK) start(e, 1, next_dz);
            }
            pixel += lanes;
            next_x += lanes * cut.pitch[0];
            next_dz += lanes * cut.pitch[1];
        }
        if (pixel < last) return;
        const int on = cut.pixels + first - pixel;  // to the first pixel of the next sample
        next_x += row_offset(on, cut.pitch[0]);
        next_dz += row_offset(on, cut.pitch[1]);
        pixel = first, ++asked;
    };
    float mean[VEC] = {}, scale[VEC] = {}, shift[VEC] = {};
    if (some) {
        ahead.fill(ask);
        load_affine(moments, gamma, beta, cut.channels, channel, mean, scale, shift);
#pragma unroll
        for (int e = 0; e < VEC; ++e) scale[e] *= Sum::UNIT, shift[e] *= Sum::UNIT;
    }
#pragma unroll 1
    for (int sample = begin; sample < end; ++sample) {
#pragma unroll 1
        for (int part = first; part == first || part < last; part += MOST * lanes) {
            const int stop = min(part + MOST * lanes, last);
            float sum[SUMS][VEC] = {};
#pragma unroll 1
            for (int p = part; some && p < stop; p += PIXELS * lanes) {
                Raw<T, VEC> raw[PIXELS][BACK ? 2 : 1];
                ahead.take(raw, ask);
#if SUMS == 1
                float v[PIXELS][VEC];
#pragma unroll
                for (int i = 0; i < PIXELS; ++i) unpack(raw[i][0], v[i]);
                if (p + (PIXELS - 1) * lanes < last) {
#pragma unroll
                    for (int e = 0; e < VEC; ++e) {
                        float u[PIXELS];
#pragma unroll
                        for (int i = 0; i < PIXELS; ++i) u[i] = normalize(v[i][e], mean[e], scale[e], shift[e]);
                        sum[0][e] += Sum::sum(u, a);
                    }
                    continue;
                }
#pragma unroll
                for (int i = 0; i < PIXELS - 1; ++i) {
                    if (p + i * lanes >= last) break;
#pragma unroll
                    for (int e = 0; e < VEC; ++e)
                        sum[0][e] += Sum::of(normalize(v[i][e], mean[e], scale[e], shift[e]), a);
                }
#else
                float v[VEC], w[VEC];
                unpack(raw[0][0], v);
                unpack(raw[0][1], w);
#pragma unroll
                for (int e = 0; e < VEC; ++e) {
                    const float u = normalize(v[e], mean[e], scale[e], shift[e]), d = v[e] - mean[e];
                    float y, one, of;
                    Sum::all(w[e], u, a, y, one, of);
                    sum[0][e] = fmaf(w[e], y, sum[0][e]);
                    sum[1][e] += of;
                    sum[2][e] += one;
                    sum[3][e] = fmaf(of, d, sum[3][e]);
                    sum[4][e] = fmaf(one, d, sum[4][e]);
                }
#endif
            }
            if (part == first && sample > begin) __syncthreads();  // the sample before has been read
#pragma unroll
            for (int k = 0; k < SUMS; ++k) {
                float* own = scratch + (k * lanes + threadIdx.y) * width + slot;
                if (part > first) add(own, sum[k]);
                store(own, sum[k]);
            }
        }
        // Lanes in their order.
        __syncthreads();
        for (int c = thread * FEWER; c < width; c += threads * FEWER) {
            const int to = tile * width + c;
            if (to >= cut.channels) break;
            float all[SUMS][FEWER] = {};
#pragma unroll 4
            for (int lane = 0; lane < lanes; ++lane)
#pragma unroll
                for (int k = 0; k < SUMS; ++k) add(scratch + (k * lanes + lane) * width + c, all[k]);
#pragma unroll
            for (int e = 0; e < FEWER; ++e) all[0][e] *= 1.0f / Sum::UNIT;
#pragma unroll
            for (int k = 0; k < SUMS; ++k) {
                if (WHOLE) finish(out, parts, k, all[k], factor, sample, cut.channels, to);
                else store(partials + (i64(k * cut.chunks + chunk) * cut.samples + sample) * cut.channels + to, all[k]);
            }
        }
    }
}

#elif defined(MERGED)

extern "C" __global__ void __launch_bounds__(256)
gated_norm_merge(const float* __restrict__ partials, T* __restrict__ out, float* __restrict__ parts, int all,
                 int channels, int chunks, float factor) {
    await_predecessor();
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i >= all) return;
    const int sample = i / channels, channel = i - sample * channels;
#pragma unroll
    for (int k = 0; k < MERGED; ++k) {
        float sum[1] = {};
        for (int chunk = 0; chunk < chunks; ++chunk) sum[0] += partials[(i64(k) * chunks + chunk) * all + i];
        finish(out, parts, k, sum, factor, sample, channels, channel);
    }
}

#elif defined(PARTS)

extern "C" __global__ void __launch_bounds__(256)
gated_norm_parts(const float* __restrict__ four, const T* __restrict__ gate, const T* __restrict__ dmean,
                 float* __restrict__ two, int all, int channels, float share) {
    await_predecessor();
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i >= all) return;
    const int sample = i / channels, channel = i - sample * channels;
    const float g = to_float(gate[i]), m = to_float(dmean[i]) * share;
    const float* from = four + i64(sample) * 4 * channels + channel;
    float* to = two + i64(sample) * 2 * channels + channel;
    to[0] = fmaf(g, from[0], m * from[channels]);
    to[channels] = fmaf(g, from[2 * channels], m * from[3 * channels]);
}

#else

#include "sample_share.cuh"

#if defined(APPLY)

extern "C" __global__ void __launch_bounds__(256, 3)
gated_norm_apply(const T* __restrict__ x, const float* __restrict__ moments, const float* __restrict__ gamma,
                 const float* __restrict__ beta, const T* __restrict__ gate, T* __restrict__ z, float a, int samples,
                 int channels, Walk walk) {
    await_predecessor();
    const SampleShare at(walk, samples);
    if (at.row >= at.rows) return;
    float mean[VEC], scale[VEC], shift[VEC], factor[VEC];
    x += at.base(walk, walk.pitch[0]);
    z += at.base(walk, walk.pitch[1]);
    Raw<T, VEC> raw[UNROLL];
    for_rows_prepared<UNROLL, true>(
        at, [&](int u, int row) { raw[u] = load_raw<VEC>(x + row_offset(row, walk.pitch[0])); },
        [&] {
            load_affine(moments, gamma, beta, channels, at.channel, mean, scale, shift);
            load(gate + i64(at.sample) * channels + at.channel, factor);
        },
        [&](int u, int row) {
            float v[VEC];
            unpack(raw[u], v);
#pragma unroll
            for (int e = 0; e < VEC; ++e)
                v[e] = FUNCTION::value(normalize(v[e], mean[e], scale[e], shift[e]), a) * factor[e];
            store(z + row_offset(row, walk.pitch[1]), v);
        });
}

#else

// dx = gamma*rstd*(g - sums[0]/count - (x - mean)*rstd*sums[1]/count) with g = dy times the slope; without sums (BATCH
// 0): gamma*rstd*g.
extern "C" __global__ void __launch_bounds__(256, FEW)
gated_norm_backward_apply(const T* __restrict__ dz, const T* __restrict__ x, const float* __restrict__ moments,
                          const float* __restrict__ gamma, const float* __restrict__ beta,
                          const T* __restrict__ gate, const T* __restrict__ dmean, const double* __restrict__ sums,
                          const double* __restrict__ count, T* __restrict__ dx, float a, float share, int samples,
                          int channels, Walk walk) {
    await_predecessor();
    const SampleShare at(walk, samples);
    if (at.row >= at.rows) return;
    float mean[VEC], scale[VEC], shift[VEC], level[VEC] = {}, bend[VEC] = {}, factor[VEC], added[VEC];
    dz += at.base(walk, walk.pitch[0]);
    x += at.base(walk, walk.pitch[1]);
    dx += at.base(walk, walk.pitch[2]);
    Raw<T, VEC> raw_dz[UNROLL], raw_x[UNROLL];
    for_rows_prepared<UNROLL, true>(
        at,
        [&](int u, int row) {
            raw_dz[u] = load_raw<VEC>(dz + row_offset(row, walk.pitch[0]));
            raw_x[u] = load_raw<VEC>(x + row_offset(row, walk.pitch[1]));
        },
        [&] {
            if (BATCH) {
                load(moments + channels + at.channel, scale);
                const float inverse = inverse_of(*count);
                const Raw<double, VEC> one = load_raw<VEC>(sums + at.channel),
                                       two = load_raw<VEC>(sums + channels + at.channel);
#pragma unroll
                for (int e = 0; e < VEC; ++e) {
                    level[e] = float(one.items[e]) * inverse;
                    bend[e] = scale[e] * (float(two.items[e]) * inverse);
                }
            }
            load_affine(moments, gamma, beta, channels, at.channel, mean, scale, shift);
            load(gate + i64(at.sample) * channels + at.channel, factor);
            load(dmean + i64(at.sample) * channels + at.channel, added);
#pragma unroll
            for (int e = 0; e < VEC; ++e) added[e] *= share;
        },
        [&](int u, int row) {
            float g[VEC], v[VEC];
            unpack(raw_dz[u], g);
            unpack(raw_x[u], v);
#pragma unroll
            for (int e = 0; e < VEC; ++e) {
                const float z = normalize(v[e], mean[e], scale[e], shift[e]);
                const float y = FUNCTION::KEEPS_OUTPUT ? FUNCTION::value(z, a) : z;
                g[e] = slope(fmaf(g[e], factor[e], added[e]), z, y, a);
                if (BATCH) g[e] -= fmaf(v[e] - mean[e], bend[e], level[e]);
                g[e] *= scale[e];
            }
            store(dx + row_offset(row, walk.pitch[2]), g);
        });
}

#endif
#endif
