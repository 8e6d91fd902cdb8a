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
//   Golub and LeVeque (1983), within a warp by shuffles, then warp by warp. Chunks and LANES depend on the sizes alone.
// group_norm_moments, group_norm_group_sums   WIDTH threads (4 to 32, or the block of 128) for a group of a sample, in
//   double.
// group_norm_apply, group_norm_backward_apply   SampleShare: blocks keep to a sample, threads to their channels, so
//   that what a group says is read once for many pixels.
//
// Cost, s = sizeof(T), per element: sample_sums s bytes for KIND 0, else 2s, 4 FLOP; apply 2s bytes 3 FLOP;
// backward_apply 3s bytes 5 FLOP (+ s with add). Floor on an H200 at 4.2 TB/s, bf16, per million elements: 0.48, 0.95,
// 0.95, 1.43 us.
#include "common.cuh"

#if defined(KIND)

// The pixels of each sample in chunks, channels in tiles, as planned by `sample_sums` of group_norm.py.
struct Cut {
    i64 pitch[2];
    int pixels, chunk, chunks, channels, samples, tiles, group, groups;
};

constexpr int DEEP = 256 / LANES;  // pixels that a block reads at a time
constexpr int WIDTH = LANES * VEC;
constexpr int WARPS = 256 / 32;

// Sums, or moments of `count` values, of a channel.
struct Gathered {
    float one, two;

    // Those of `theirs` values more, which may be none; there are never fewer of its own.
    __device__ __forceinline__ void merge(float x, float y, float count, float theirs) {
        if (KIND) {
            one += x;
            two += y;
        } else {
            const bool some = theirs > 0.0f;
            const float delta = some ? x - one : 0.0f, share = some ? theirs / (count + theirs) : 0.0f;
            one = fmaf(delta, share, one);
            two += fmaf(delta * delta * count, share, y);
        }
    }
};

extern "C" __global__ void __launch_bounds__(256, 4)
sample_sums(const T* __restrict__ a, const T* __restrict__ b, const float* __restrict__ moments,
            float* __restrict__ partials, Cut cut) {
    await_predecessor();
    __shared__ float scratch[WARPS][2][WIDTH], counts[WARPS];
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
        float mean[UNROLL], scale[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            if (p + u * DEEP >= last) break;
            raw[u] = load_once<VEC>(left + (p + u * DEEP) * cut.pitch[0]);
            if (KIND) more[u] = load_once<VEC>(right + (p + u * DEEP) * cut.pitch[1]);
            if (KIND == 2) mean[u] = moments[p + u * DEEP];
            if (KIND == 2) scale[u] = moments[cut.pixels + p + u * DEEP];
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            if (p + u * DEEP >= last) break;
            float v[VEC], w[VEC];
            unpack(raw[u], v);
            if (KIND) unpack(more[u], w);
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
                    two[e] = fmaf(v[e], KIND == 1 ? w[e] - pivot[e] : (w[e] - mean[u]) * scale[u], two[e]);
                }
            }
        }
    }
    float count = float(max(ceil_div(last - first - depth + DEEP, DEEP) - 1, 0));  // of this thread's pixels
    Gathered mine[VEC];
#pragma unroll
    for (int e = 0; e < VEC; ++e) {
        mine[e] = {one[e], KIND == 1 ? two[e] * rstd[e] : two[e]};
        if (KIND == 0 && count > 0.0f) {
            const float offset = one[e] / count;
            mine[e] = {pivot[e] + offset, fmaxf(fmaf(-one[e], offset, two[e]), 0.0f)};
        }
    }
    // Depths within a warp, then warps in their order.
#pragma unroll
    for (int offset = LANES; offset < 32; offset *= 2) {
        const float theirs = __shfl_xor_sync(0xffffffffu, count, offset);
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
            const float x = __shfl_xor_sync(0xffffffffu, mine[e].one, offset);
            const float y = __shfl_xor_sync(0xffffffffu, mine[e].two, offset);
            mine[e].merge(x, y, count, theirs);
        }
        count += theirs;
    }
    if (threadIdx.x % 32 < LANES) {
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
            scratch[threadIdx.x / 32][0][slot + e] = mine[e].one;
            scratch[threadIdx.x / 32][1][slot + e] = mine[e].two;
        }
        if (lane == 0) counts[threadIdx.x / 32] = count;
    }
    __syncthreads();
    const int c = tile * WIDTH + threadIdx.x;
    if (threadIdx.x >= WIDTH || c >= cut.channels) return;
    Gathered all = {scratch[0][0][threadIdx.x], scratch[0][1][threadIdx.x]};
    float so_far = counts[0];
#pragma unroll
    for (int warp = 1; warp < WARPS; ++warp) {
        all.merge(scratch[warp][0][threadIdx.x], scratch[warp][1][threadIdx.x], so_far, counts[warp]);
        so_far += counts[warp];
    }
    const i64 stride = i64(cut.samples) * cut.channels, to = chunk * stride + i64(sample) * cut.channels + c;
    partials[to] = all.one;
    if (KIND != 3) partials[cut.chunks * stride + to] = all.two;
}

#elif defined(MERGE)

#define THREADS 128

// Which group a thread works for, and its place among the WIDTH threads that do.
struct Member {
    int at, thread;
    bool inside;

    __device__ __forceinline__ explicit Member(int all) {
        at = blockIdx.x * (THREADS / WIDTH) + threadIdx.x / WIDTH;
        thread = threadIdx.x % WIDTH;
        inside = at < all;
    }
    // The sum over these threads, in each of them. `scratch` is used once.
    static __device__ __forceinline__ double sum(double x, double* scratch) {
        if (WIDTH > 32) return block_sum<THREADS>(x, scratch);
#pragma unroll
        for (int offset = WIDTH / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
        return x;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
group_norm_moments(const float* __restrict__ partials, float* __restrict__ moments, int samples, int pixels, int chunk,
                   int chunks, int channels, int group, float eps) {
    await_predecessor();
    __shared__ double scratch[2][32];
    const int groups = channels / group, all = samples * groups;
    const Member me(all);
    const int sample = me.at / groups, terms = me.inside ? chunks * group : 0;
    const i64 stride = i64(samples) * channels;
    const float* mean = partials + i64(sample) * channels + (me.at - sample * groups) * group;
    const float* squares = mean + chunks * stride;
    double total = 0.0;
    for (int i = me.thread; i < terms; i += WIDTH) {
        const int k = i / group;
        total += double(mean[k * stride + i % group]) * min(chunk, pixels - k * chunk);
    }
    const double count = double(pixels) * group, centre = Member::sum(total, scratch[0]) / count;
    double spread = 0.0;
    for (int i = me.thread; i < terms; i += WIDTH) {
        const int k = i / group;
        const double d = double(mean[k * stride + i % group]) - centre;
        spread += double(squares[k * stride + i % group]) + d * d * min(chunk, pixels - k * chunk);
    }
    spread = Member::sum(spread, scratch[1]) / count;
    if (!me.inside || me.thread > 0) return;
    moments[me.at] = float(centre);
    moments[all + me.at] = float(1.0 / sqrt(spread + double(eps)));
}

// partials: of KIND 1, sums of dy and of dy*xhat.
extern "C" __global__ void __launch_bounds__(THREADS)
group_norm_group_sums(const float* __restrict__ partials, const float* __restrict__ gamma, float* __restrict__ sums,
                      int samples, int pixels, int chunks, int channels, int group) {
    await_predecessor();
    __shared__ double scratch[2][32];
    const int groups = channels / group, all = samples * groups;
    const Member me(all);
    const int sample = me.at / groups, begin = (me.at - sample * groups) * group;
    const int terms = me.inside ? chunks * group : 0;
    const i64 stride = i64(samples) * channels;
    const float* first = partials + i64(sample) * channels + begin;
    const float* second = first + chunks * stride;
    double one = 0.0, two = 0.0;
    for (int i = me.thread; i < terms; i += WIDTH) {
        const int k = i / group, c = i - k * group;
        const double weight = gamma ? gamma[begin + c] : 1.0f;
        one += weight * first[k * stride + c];
        two += weight * second[k * stride + c];
    }
    one = Member::sum(one, scratch[0]);
    two = Member::sum(two, scratch[1]);
    if (!me.inside || me.thread > 0) return;
    const double count = double(pixels) * group;
    sums[me.at] = float(one / count);
    sums[all + me.at] = float(two / count);
}

#else

#include "sample_share.cuh"

// Walks over the groups of neighbouring channels with one division.
struct GroupOf {
    u32 index, place;

    __device__ __forceinline__ GroupOf(u32 channel, u32 group) : index(channel / group), place(channel % group) {}
    __device__ __forceinline__ void next(u32 group) {
        const bool ends = !SINGLE && ++place == group;
        if (ends) place = 0;
        index += ends;
    }
};

DEVICE float value_or(const float* p, int channel, float otherwise) { return p ? p[channel] : otherwise; }

extern "C" __global__ void __launch_bounds__(256, VEC < 8 || SINGLE ? 4 : 3)
group_norm_apply(const T* __restrict__ x, const float* __restrict__ moments, const float* __restrict__ gamma,
                 const float* __restrict__ beta, T* __restrict__ y, int samples, int group, int groups, Walk walk) {
    await_predecessor();
    const SampleShare at(walk, samples);
    if (at.row >= at.rows) return;
    float scale[VEC], shift[VEC], mean[VEC];
    const i64 all = i64(samples) * groups;
    moments += i64(at.sample) * groups;
    GroupOf of(at.channel, group);
#pragma unroll
    for (int e = 0; e < VEC; ++e, of.next(group)) {
        mean[e] = moments[of.index];
        scale[e] = moments[all + of.index] * value_or(gamma, at.channel + e, 1.0f);
        shift[e] = value_or(beta, at.channel + e, 0.0f);
    }
    x += at.base(walk, walk.pitch[0]);
    y += at.base(walk, walk.pitch[1]);
    Raw<T, VEC> raw[UNROLL];
    for_rows<UNROLL>(
        at, [&](int u, int row) { raw[u] = load_raw<VEC>(x + row_offset(row, walk.pitch[0])); },
        [&](int u, int row) {
            float v[VEC];
            unpack(raw[u], v);
#pragma unroll
            for (int e = 0; e < VEC; ++e) v[e] = fmaf(v[e] - mean[e], scale[e], shift[e]);
            store(y + row_offset(row, walk.pitch[1]), v);
        });
}

// dx = rstd (dy gamma - sums[0] - xhat sums[1]) + add, as dy `slope` - (x - mean) `bend` - `shift` + add.
extern "C" __global__ void __launch_bounds__(256, (VEC < 8 ? 4 : SINGLE ? 3 : 2) - (ADD && VEC < 8))
group_norm_backward_apply(const T* __restrict__ dy, const T* __restrict__ x, const float* __restrict__ moments,
                          const float* __restrict__ gamma, const float* __restrict__ sums,
                          const T* __restrict__ add, T* __restrict__ dx, int samples, int group, int groups,
                          Walk walk) {
    await_predecessor();
    const SampleShare at(walk, samples);
    if (at.row >= at.rows) return;
    float slope[VEC], bend[VEC], shift[VEC], mean[VEC];
    const i64 all = i64(samples) * groups;
    moments += i64(at.sample) * groups;
    sums += i64(at.sample) * groups;
    GroupOf of(at.channel, group);
#pragma unroll
    for (int e = 0; e < VEC; ++e, of.next(group)) {
        const float rstd = moments[all + of.index];
        mean[e] = moments[of.index];
        slope[e] = rstd * value_or(gamma, at.channel + e, 1.0f);
        bend[e] = rstd * rstd * sums[all + of.index];
        shift[e] = rstd * sums[of.index];
    }
    dy += at.base(walk, walk.pitch[0]);
    x += at.base(walk, walk.pitch[1]);
    dx += at.base(walk, walk.pitch[2]);
    if (ADD) add += at.base(walk, walk.pitch[3]);
    Raw<T, VEC> raw_dy[UNROLL], raw_x[UNROLL], raw_add[ADD ? UNROLL : 1];
    for_rows<UNROLL>(
        at,
        [&](int u, int row) {
            raw_dy[u] = load_raw<VEC>(dy + row_offset(row, walk.pitch[0]));
            raw_x[u] = load_raw<VEC>(x + row_offset(row, walk.pitch[1]));
            if (ADD) raw_add[u] = load_raw<VEC>(add + row_offset(row, walk.pitch[3]));
        },
        [&](int u, int row) {
            float g[VEC], v[VEC], more[VEC] = {};
            unpack(raw_dy[u], g);
            unpack(raw_x[u], v);
            if (ADD) unpack(raw_add[u], more);
#pragma unroll
            for (int e = 0; e < VEC; ++e)
                g[e] = fmaf(g[e], slope[e], -shift[e]) - (v[e] - mean[e]) * bend[e] + more[e];
            store(dx + row_offset(row, walk.pitch[2]), g);
        });
}

#endif
