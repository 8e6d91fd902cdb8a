// Group normalisation (Wu and He, ECCV 2018), and sums over the pixels of each sample.
//
// x, a, b, dy, y, dx, add: (samples, pixels, C) of T at a pitch per pixel; a group is C / groups neighbouring channels.
// moments (2, samples, groups) float: mean and 1/sqrt(biased variance + eps); gamma, beta (C,) float or null;
// partials (2, chunks, samples, C) float; sums (2, samples, groups) float: means over a group of dy*gamma and of
// dy*gamma*xhat.
//
// sample_sums   KIND 0: mean and M2 (sum of squared deviations) of x per chunk of pixels, sample and channel
//               KIND 1: sum of dy, sum of dy*xhat, with the moments of the sample's group
//               KIND 2: the same with moments (2, rows) of each row: the parameter gradients of a layer norm
//               KIND 3: sum of a*b alone (partials (1, ...)): the gradient of a gate
//   Block: LANES x 256/LANES threads; a thread owns VEC neighbouring channels and each (256/LANES)-th pixel of a chunk.
//   Grid: tiles of LANES*VEC channels, then chunks, then samples, in one dimension. A variance is never a difference of
//   raw moments: each thread subtracts a pivot, the first value of its own; (count, mean, M2) are merged as by Chan,
//   Golub and LeVeque (1983) in a tree over the depth of the block. Chunks and LANES depend on the sizes alone.
// group_norm_moments, group_norm_group_sums   one block for each sample and group, in double.
// group_norm_apply, group_norm_backward_apply   Share (common.cuh).
//
// Cost, s = sizeof(T), per element: sample_sums s bytes for KIND 0, else 2s, 4 FLOP; apply 2s bytes 3 FLOP; backward_apply
// 3s bytes 5 FLOP (+ s with add). Floor on an H200 at 4.2 TB/s, bf16, per million elements: 0.48, 0.95, 0.95, 1.43 us.
#include "common.cuh"

#if defined(KIND)

struct Cut {
    i64 pitch[2];
    int pixels, chunk, chunks, channels, samples, tiles, group, groups;
};

constexpr int DEEP = 256 / LANES;  // pixels that a block reads at a time
constexpr int WIDTH = LANES * VEC;

extern "C" __global__ void __launch_bounds__(256, 2)
sample_sums(const T* __restrict__ a, const T* __restrict__ b, const float* __restrict__ moments,
            float* __restrict__ partials, Cut cut) {
    __shared__ float scratch[2][DEEP][WIDTH];
    const int tile = blockIdx.x % cut.tiles, at = blockIdx.x / cut.tiles;
    const int chunk = at % cut.chunks, sample = at / cut.chunks;
    const int lane = threadIdx.x % LANES, depth = threadIdx.x / LANES, slot = lane * VEC;
    const int channel = tile * WIDTH + slot;
    const int first = chunk * cut.chunk, last = min(first + cut.chunk, cut.pixels);
    const bool inside = channel < cut.channels;
    const T* left = a + i64(sample) * cut.pixels * cut.pitch[0] + channel;
    const T* right = KIND ? b + i64(sample) * cut.pixels * cut.pitch[1] + channel : nullptr;

    float one[VEC] = {}, two[VEC] = {}, pivot[VEC] = {}, rstd[VEC];
    if (KIND == 1 && inside) {
        const float* mean = moments + i64(sample) * cut.groups;
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
            pivot[e] = mean[(channel + e) / cut.group];
            rstd[e] = mean[i64(cut.samples) * cut.groups + (channel + e) / cut.group];
        }
    }
    for (int p = first + depth; inside && p < last; p += UNROLL * DEEP) {
        Raw<T, VEC> raw[UNROLL], more[KIND ? UNROLL : 1];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            if (p + u * DEEP >= last) break;
            raw[u] = load_raw<VEC>(left + (p + u * DEEP) * cut.pitch[0]);
            if (KIND) more[u] = load_raw<VEC>(right + (p + u * DEEP) * cut.pitch[1]);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            if (p + u * DEEP >= last) break;
            float v[VEC], w[VEC];
            unpack(raw[u], v);
            if (KIND) unpack(more[u], w);
            const float mean = KIND == 2 ? moments[p + u * DEEP] : 0.0f;
            const float scale = KIND == 2 ? moments[cut.pixels + p + u * DEEP] : 0.0f;
#pragma unroll
            for (int e = 0; e < VEC; ++e) {
                if (KIND == 0) {
                    if (u == 0 && p == first + depth) pivot[e] = v[e];
                    const float d = v[e] - pivot[e];
                    one[e] += d;
                    two[e] = fmaf(d, d, two[e]);
                } else if (KIND == 3) {
                    one[e] = fmaf(v[e], w[e], one[e]);
                } else {
                    one[e] += v[e];
                    two[e] = fmaf(v[e], KIND == 1 ? w[e] - pivot[e] : (w[e] - mean) * scale, two[e]);
                }
            }
        }
    }
    float count = first + depth < last ? ceil_div(last - first - depth, DEEP) : 0.0f;
#pragma unroll
    for (int e = 0; e < VEC; ++e) {
        if (KIND == 1) two[e] *= rstd[e];
        if (KIND == 0 && count > 0.0f) {
            const float offset = one[e] / count;
            two[e] = fmaxf(fmaf(-one[e], offset, two[e]), 0.0f);
            one[e] = pivot[e] + offset;
        }
        scratch[0][depth][slot + e] = one[e];
        scratch[1][depth][slot + e] = two[e];
    }
    for (int half = DEEP / 2; half > 0; half /= 2) {
        __syncthreads();
        const int other = first + depth + half;
        // How many pixels stand behind the partner: those of depths other, other + 2 half, ...
        float theirs = 0.0f;
        if (KIND == 0)
            for (int d = other; d < min(first + DEEP, last); d += 2 * half) theirs += ceil_div(last - d, DEEP);
        if (depth < half)
#pragma unroll
            for (int e = 0; e < VEC; ++e) {
                const float x = scratch[0][depth + half][slot + e], y = scratch[1][depth + half][slot + e];
                if (KIND) {
                    one[e] += x;
                    two[e] += y;
                } else if (theirs > 0.0f) {
                    const float delta = x - one[e], share = theirs / (count + theirs);
                    one[e] = fmaf(delta, share, one[e]);
                    two[e] += y + delta * delta * count * share;
                }
                scratch[0][depth][slot + e] = one[e];
                scratch[1][depth][slot + e] = two[e];
            }
        count += theirs;
    }
    if (depth > 0 || !inside) return;
    const i64 stride = i64(cut.samples) * cut.channels, to = chunk * stride + i64(sample) * cut.channels + channel;
#pragma unroll
    for (int e = 0; e < VEC; ++e) {
        partials[to + e] = one[e];
        if (KIND != 3) partials[cut.chunks * stride + to + e] = two[e];
    }
}

#elif defined(MERGE)

#define THREADS 128

// grid: samples * groups
extern "C" __global__ void __launch_bounds__(THREADS)
group_norm_moments(const float* __restrict__ partials, float* __restrict__ moments, int pixels, int chunk, int chunks,
                   int channels, int group, float eps) {
    __shared__ double scratch[2][32];
    const int groups = channels / group, g = blockIdx.x % groups, samples = gridDim.x / groups;
    const i64 sample = blockIdx.x / groups, stride = i64(samples) * channels;
    const float* mean = partials + sample * channels + g * group;
    const float* squares = mean + chunks * stride;
    double total = 0.0;
    for (int i = threadIdx.x; i < chunks * group; i += THREADS) {
        const int k = i / group;
        total += double(mean[k * stride + i % group]) * min(chunk, pixels - k * chunk);
    }
    const double count = double(pixels) * group, centre = block_sum<THREADS>(total, scratch[0]) / count;
    double spread = 0.0;
    for (int i = threadIdx.x; i < chunks * group; i += THREADS) {
        const int k = i / group;
        const double d = double(mean[k * stride + i % group]) - centre;
        spread += double(squares[k * stride + i % group]) + d * d * min(chunk, pixels - k * chunk);
    }
    spread = block_sum<THREADS>(spread, scratch[1]) / count;
    if (threadIdx.x > 0) return;
    moments[blockIdx.x] = float(centre);
    moments[gridDim.x + blockIdx.x] = float(1.0 / sqrt(spread + double(eps)));
}

// first, second: (samples, channels): sums of dy and of dy*xhat over a sample.
extern "C" __global__ void __launch_bounds__(THREADS)
group_norm_group_sums(const float* __restrict__ first, const float* __restrict__ second,
                      const float* __restrict__ gamma, float* __restrict__ sums, int pixels, int channels, int group) {
    __shared__ double scratch[2][32];
    const int groups = channels / group, begin = blockIdx.x % groups * group;
    const i64 sample = blockIdx.x / groups;
    double one = 0.0, two = 0.0;
    for (int i = threadIdx.x; i < group; i += THREADS) {
        const double weight = gamma ? gamma[begin + i] : 1.0f;
        one += weight * first[sample * channels + begin + i];
        two += weight * second[sample * channels + begin + i];
    }
    one = block_sum<THREADS>(one, scratch[0]);
    two = block_sum<THREADS>(two, scratch[1]);
    if (threadIdx.x > 0) return;
    const double count = double(pixels) * group;
    sums[blockIdx.x] = float(one / count);
    sums[gridDim.x + blockIdx.x] = float(two / count);
}

#else

// The values of the groups of VEC channels from `channel` on; SINGLE: they are of one group.
DEVICE void load_groups(const float* __restrict__ values, int channel, int group, float (&v)[VEC]) {
#pragma unroll
    for (int e = 0; e < VEC; ++e) v[e] = e > 0 && SINGLE ? v[0] : values[(channel + e) / group];
}

DEVICE void load_or(const float* p, int channel, float otherwise, float (&v)[VEC]) {
#pragma unroll
    for (int e = 0; e < VEC; ++e) v[e] = p ? p[channel + e] : otherwise;
}

extern "C" __global__ void __launch_bounds__(256, SINGLE ? 3 : 2)
group_norm_apply(const T* __restrict__ x, const float* __restrict__ moments, const float* __restrict__ gamma,
                 const float* __restrict__ beta, T* __restrict__ y, int pixels, int group, int groups, i64 all,
                 Walk walk) {
    const Share at(walk, UNROLL);
    float scale[VEC], shift[VEC];
    if (at.rows > 0) {
        load_or(gamma, at.channel, 1.0f, scale);
        load_or(beta, at.channel, 0.0f, shift);
    }
    Raw<T, VEC> raw[UNROLL];
    for_rows<UNROLL>(
        at, [&](int u, int row) { raw[u] = load_raw<VEC>(x + row_offset(row, walk.pitch[0]) + at.channel); },
        [&](int u, int row) {
            const float* of = moments + i64(row / pixels) * groups;
            float v[VEC], mean[VEC], rstd[VEC];
            load_groups(of, at.channel, group, mean);
            load_groups(of + all, at.channel, group, rstd);
            unpack(raw[u], v);
#pragma unroll
            for (int e = 0; e < VEC; ++e) v[e] = fmaf((v[e] - mean[e]) * rstd[e], scale[e], shift[e]);
            store(y + row_offset(row, walk.pitch[1]) + at.channel, v);
        });
}

extern "C" __global__ void __launch_bounds__(256, SINGLE ? 3 : 2)
group_norm_backward_apply(const T* __restrict__ dy, const T* __restrict__ x, const float* __restrict__ moments,
                          const float* __restrict__ gamma, const float* __restrict__ sums,
                          const T* __restrict__ add, T* __restrict__ dx, int pixels, int group, int groups, i64 all,
                          Walk walk) {
    const Share at(walk, UNROLL);
    float scale[VEC];
    if (at.rows > 0) load_or(gamma, at.channel, 1.0f, scale);
    Raw<T, VEC> raw_dy[UNROLL], raw_x[UNROLL];
    for_rows<UNROLL>(
        at,
        [&](int u, int row) {
            raw_dy[u] = load_raw<VEC>(dy + row_offset(row, walk.pitch[0]) + at.channel);
            raw_x[u] = load_raw<VEC>(x + row_offset(row, walk.pitch[1]) + at.channel);
        },
        [&](int u, int row) {
            const i64 sample = i64(row / pixels) * groups;
            float g[VEC], v[VEC], mean[VEC], rstd[VEC], one[VEC], two[VEC], more[VEC] = {};
            load_groups(moments + sample, at.channel, group, mean);
            load_groups(moments + all + sample, at.channel, group, rstd);
            load_groups(sums + sample, at.channel, group, one);
            load_groups(sums + all + sample, at.channel, group, two);
            unpack(raw_dy[u], g);
            unpack(raw_x[u], v);
            if (ADD) load(add + row_offset(row, walk.pitch[3]) + at.channel, more);
#pragma unroll
            for (int e = 0; e < VEC; ++e) {
                const float xhat = (v[e] - mean[e]) * rstd[e];
                g[e] = fmaf(fmaf(g[e], scale[e], -one[e]) - xhat * two[e], rstd[e], more[e]);
            }
            store(dx + row_offset(row, walk.pitch[2]) + at.channel, g);
        });
}

#endif
