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
// gated_norm_sums   SUMS 1: sum y; 5: sum dz*y, dz*s, s, dz*s*(x - mean), s*(x - mean). Block: LANES x 256/LANES
//   threads; a thread owns VEC neighbouring channels and each (256/LANES)-th pixel of a chunk. Grid: tiles of LANES*VEC
//   channels, then chunks, then samples. partials (SUMS, chunks, samples, C) float; chunks and LANES depend on the
//   sizes alone. WHOLE: a sample is one chunk; then the results are written at once.
// gated_norm_merge   Chunks in their order, a thread for each sample and channel: the means; or dgate, and
//   parts (samples, 4, C) float.
// gated_norm_parts   parts (samples, 2, C) float of the batch norm's two sums, as batch_norm_backward_merge takes them.
// gated_norm_apply, gated_norm_backward_apply   SampleShare.
//
// Cost, s = sizeof(T), per element: sums s bytes, 2s where there are five; apply 2s; backward_apply 3s. In place of the
// 2s + s + 2s forward and 2s + 2s + 2s + 3s backward of activation, means, product, gate gradient, its sum with that of
// the means, and a batch norm behind an activation. Floor on an H200 at 4.2 TB/s, bf16, per million elements: 0.48,
// 0.95, 0.95, 1.43 us.
#include "activation.cuh"
#include "affine.cuh"

constexpr int FEW = sizeof(T) == 4 ? 2 : 3;  // blocks on a multiprocessor: float32's vectors would spill in three

DEVICE float slope(float dy, float z, float y, float a) {
    return FUNCTION::gradient(dy, FUNCTION::KEEPS_OUTPUT ? y : z, a);
}

// FUNCTION at z, and its slope there. Special functions, four for each value of a SiLU, would take longer than memory
// does.
template <class F>
DEVICE void both(float z, float a, float& y, float& s) {
    y = F::value(z, a);
    s = F::gradient(1.0f, F::KEEPS_OUTPUT ? y : z, a);
}
template <>
__device__ __forceinline__ void both<silu>(float z, float, float& y, float& s) {
    const Swish at(z);
    y = z * at.of;
    s = at.slope;
}

// The k-th sum of a sample and channel.
DEVICE void finish(T* out, float* parts, int k, float sum, float factor, int sample, int channels, int channel) {
    if (k == 0) out[i64(sample) * channels + channel] = from_float<T>(sum * factor);
    if (k > 0) parts[(i64(sample) * 4 + k - 1) * channels + channel] = sum;
}

#if defined(SUMS)

#include "sample_cut.cuh"

constexpr bool BACK = SUMS > 1;

extern "C" __global__ void __launch_bounds__(256, BACK ? FEW : 4)
gated_norm_sums(const T* __restrict__ x, const T* __restrict__ dz, const float* __restrict__ moments,
                const float* __restrict__ gamma, const float* __restrict__ beta, float* __restrict__ partials,
                T* __restrict__ out, float* __restrict__ parts, float a, float factor, Cut cut) {
    await_predecessor();
    __shared__ float scratch[WARPS][SUMS][WIDTH];
    const int tile = blockIdx.x % cut.tiles, at = blockIdx.x / cut.tiles;
    const int chunk = at % cut.chunks, sample = at / cut.chunks;
    const int slot = threadIdx.x % LANES * VEC, depth = threadIdx.x / LANES;
    const int channel = tile * WIDTH + slot;
    const int first = chunk * cut.chunk, last = min(first + cut.chunk, cut.pixels);

    float sum[SUMS][VEC] = {};
    if (channel < cut.channels) {
        const T* left = x + i64(sample) * cut.pixels * cut.pitch[0] + channel;
        const T* right = BACK ? dz + i64(sample) * cut.pixels * cut.pitch[1] + channel : nullptr;
        float mean[VEC], scale[VEC], shift[VEC];
        load_affine(moments, gamma, beta, cut.channels, channel, mean, scale, shift);
        for (int p = first + depth; p < last; p += UNROLL * DEEP) {
            Raw<T, VEC> raw[UNROLL], more[BACK ? UNROLL : 1];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                if (p + u * DEEP >= last) break;
                raw[u] = load_raw<VEC>(left + (p + u * DEEP) * cut.pitch[0]);
                if (BACK) more[u] = load_raw<VEC>(right + (p + u * DEEP) * cut.pitch[1]);
            }
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                if (p + u * DEEP >= last) break;
                float v[VEC], g[VEC] = {};
                unpack(raw[u], v);
                if (BACK) unpack(more[u], g);
#pragma unroll
                for (int e = 0; e < VEC; ++e) {
                    const float z = normalize(v[e], mean[e], scale[e], shift[e]);
#if SUMS == 1
                    sum[0][e] += FUNCTION::value(z, a);
#else
                    float y, one;
                    both<FUNCTION>(z, a, y, one);
                    const float d = v[e] - mean[e], of = one == 0.0f ? 0.0f : g[e] * one;  // what is cut off is dropped
                    sum[0][e] = fmaf(g[e], y, sum[0][e]);
                    sum[1][e] += of;
                    sum[2][e] += one;
                    sum[3][e] = fmaf(of, d, sum[3][e]);
                    sum[4][e] = fmaf(one, d, sum[4][e]);
#endif
                }
            }
        }
    }
    // Depths within a warp, then warps in their order.
#pragma unroll
    for (int k = 0; k < SUMS; ++k)
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
#pragma unroll
            for (int offset = LANES; offset < 32; offset *= 2)
                sum[k][e] += __shfl_xor_sync(0xffffffffu, sum[k][e], offset);
            if (threadIdx.x % 32 < LANES) scratch[threadIdx.x / 32][k][slot + e] = sum[k][e];
        }
    __syncthreads();
    const int c = tile * WIDTH + threadIdx.x;
    if (threadIdx.x >= WIDTH || c >= cut.channels) return;
    const i64 stride = i64(cut.samples) * cut.channels, to = chunk * stride + i64(sample) * cut.channels + c;
#pragma unroll
    for (int k = 0; k < SUMS; ++k) {
        float all = scratch[0][k][threadIdx.x];
#pragma unroll
        for (int warp = 1; warp < WARPS; ++warp) all += scratch[warp][k][threadIdx.x];
        if (WHOLE) {
            finish(out, parts, k, all, factor, sample, cut.channels, c);
        } else {
            partials[k * cut.chunks * stride + to] = all;
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
        float sum = 0.0f;
        for (int chunk = 0; chunk < chunks; ++chunk) sum += partials[(i64(k) * chunks + chunk) * all + i];
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

extern "C" __global__ void __launch_bounds__(256, 4)
gated_norm_apply(const T* __restrict__ x, const float* __restrict__ moments, const float* __restrict__ gamma,
                 const float* __restrict__ beta, const T* __restrict__ gate, T* __restrict__ z, float a, int samples,
                 int channels, Walk walk) {
    await_predecessor();
    const SampleShare at(walk, samples);
    if (at.row >= at.rows) return;
    float mean[VEC], scale[VEC], shift[VEC], factor[VEC];
    load_affine(moments, gamma, beta, channels, at.channel, mean, scale, shift);
    load(gate + i64(at.sample) * channels + at.channel, factor);
    x += at.base(walk, walk.pitch[0]);
    z += at.base(walk, walk.pitch[1]);
    Raw<T, VEC> raw[UNROLL];
    for_rows<UNROLL>(
        at, [&](int u, int row) { raw[u] = load_raw<VEC>(x + row_offset(row, walk.pitch[0])); },
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
    if (BATCH) {
        load(moments + channels + at.channel, scale);
        const float inverse = float(1.0 / *count);
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
    dz += at.base(walk, walk.pitch[0]);
    x += at.base(walk, walk.pitch[1]);
    dx += at.base(walk, walk.pitch[2]);
    Raw<T, VEC> raw_dz[UNROLL], raw_x[UNROLL];
    for_rows<UNROLL>(
        at,
        [&](int u, int row) {
            raw_dz[u] = load_raw<VEC>(dz + row_offset(row, walk.pitch[0]));
            raw_x[u] = load_raw<VEC>(x + row_offset(row, walk.pitch[1]));
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
