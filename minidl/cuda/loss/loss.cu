// Softmax cross entropy over rows of K logits, and its gradient; with -DSMOOTHED=1 also class weights, label smoothing
// and the place of each label among the logits.
//
//   logits (rows, K) at `pitch` elements per row; labels (rows,) of type LABEL; weights (K,) float or null for ones;
//   lse (rows,) float: log of the sum of exponentials; dlogits (rows, K) dense; totals double[COLUMNS]: loss, weights
//   of the labels that count, labels that are the first largest logit of their row, labels out of range; SMOOTHED:
//   labels that count, labels among the first `top`, both without rows whose loss is no number; partial (blocks,
//   COLUMNS) double: totals of each block's fixed run of rows.
//
//   loss of a row with label y, e = smoothing, w = weights: (1 - e) w_y (lse - x_y) + e/K sum_k w_k (lse - x_k)
//   (Szegedy et al., "Rethinking the Inception architecture", CVPR 2016; divided by the sum of w_y, as in torch.nn)
//
// Sums of a row are float32 around its running maximum (Milakov & Gimelshein, "Online normalizer calculation for
// softmax", 2018), so a row is read once. Rows are summed in float64: within a block by a fixed tree, then over blocks.
//
// -DCLASSES=K  short rows that are not 16-byte aligned (segmentation with 21 classes): short_rows.cuh; the forward pass
//              in RESIDENT blocks of a multiprocessor. Some 240 instructions per row of 21 classes of bfloat16: with 2
//              M rows two thirds of the time of the bytes. -DWEIGHTED=1 where there are weights.
// -DLANES=L    other rows: L neighbouring threads (1 .. 32 of a warp, or the block) share a row in vectors of VEC
//              elements, STEPS at a time. Vectors lie on absolute addresses: where a row does not start on one
//              (ALIGNED = 0), its first and last are read and written element by element.
// -DCOUNT=1    no logits: counts the labels that count, or adds up their weights, into totals[1], for a step that is cut
//              into micro-batches.
//
// bytes per row: forward K * sizeof(T) + label + 4, backward 2 * K * sizeof(T) + label + 4; about 6 FLOP per logit.
#ifndef SMOOTHED
#define SMOOTHED 0
#endif
#include "common.cuh"
#include "exponential.cuh"
#include "loss.cuh"

#ifdef CLASSES
#include "short_rows.cuh"
#elif defined(LANES)
#include "row.cuh"
#else
#define BLOCK 256
#endif

constexpr int COLUMNS = SMOOTHED ? 6 : 4;

struct Totals {
    double loss = 0.0, mass = 0.0;
    int valid = 0, correct = 0, outside = 0, among_top = 0;

    __device__ __forceinline__ void write(double* __restrict__ partial) const {
        const double weight = SMOOTHED ? mass : double(valid);
#if SMOOTHED
        const double sums[] = {loss, weight, double(correct), double(outside), double(valid), double(among_top)};
#else
        const double sums[] = {loss, weight, double(correct), double(outside)};
#endif
        write_totals<BLOCK>(sums, partial);
    }

    // A row, if its label `counted`, of weight `weight`; `spread`: sum of w_k (peak - x_k), `all`: of w_k. No term is
    // negative.
    __device__ __forceinline__ void add(bool counted, float log_sum, float below, float weight, float spread, float all,
                                        float smoothing, int classes) {
        float term = log_sum + below;
        if (SMOOTHED) {
            term *= weight;
            if (smoothing > 0.0f) term = fmaf(1.0f - smoothing, term, smoothing / classes * fmaf(all, log_sum, spread));
            mass += counted ? weight : 0.0f;
        }
        loss += counted ? term : 0.0f;
        valid += counted;
    }
};

#ifdef CLASSES
// ------------------------------------------------------------------------------------------------- a thread per row

// The weights in shared memory, where every thread of a warp reads the same one at a time; null for ones.
DEVICE const float* share_weights(const float* __restrict__ weights) {
    if (!WEIGHTED) return nullptr;
    __shared__ float shared[CLASSES];
    for (int k = threadIdx.x; k < CLASSES; k += BLOCK) shared[k] = weights[k];
    __syncthreads();
    return shared;
}

DEVICE float weight_at(const float* shared, int k) { return WEIGHTED ? shared[k] : 1.0f; }

// The sum of all weights, in the order of the classes.
DEVICE float all_weights(const float* shared) {
    if (!WEIGHTED) return CLASSES;
    float all = 0.0f;
    for (int k = 0; k < CLASSES; ++k) all += shared[k];
    return all;
}

#ifdef RESIDENT
extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
softmax_cross_entropy(const T* __restrict__ logits, const LABEL* __restrict__ labels, const float* __restrict__ weights,
                      float* __restrict__ lse, double* __restrict__ partial, i64 rows, int passes, i64 ignore_index,
                      float smoothing, int top) {
    await_predecessor();
    extern __shared__ uint4 memory[];
    const float* shared = share_weights(weights);
    const float all = SMOOTHED ? all_weights(shared) : 0.0f;
    Totals mine;
    for_labelled_rows(memory, logits, labels, rows, passes, ignore_index,
                      [&](i64 row, int count, const T* tile, int at, const i64(&label)[RUN]) {
        const Run run(tile, at);
        float log_sums[RUN];
#pragma unroll
        for (int r = 0; r < RUN; ++r) {
            const float peak = run.peak(r);
            const Around around(peak);
            float sum = 0.0f, spread = 0.0f;  // the latter of w (x - peak) log2(e)
#pragma unroll
            for (int k = 0; k < CLASSES; ++k) {
                const float power = around.power(run.at(r, k));
                sum += two_to_the(power);
                if (SMOOTHED) spread = WEIGHTED ? fmaf(shared[k], power, spread) : spread + power;
            }
            const float log_sum = around.log_sum(sum);
            log_sums[r] = peak + log_sum;
            const bool inside = u64(label[r]) < CLASSES, ignored = label[r] == ignore_index;
            const int target = inside ? int(label[r]) : 0;
            const T own = tile[element((at + r) * CLASSES + target)];
            const bool counted = inside && !ignored, known = !SMOOTHED || log_sum == log_sum;
            const bool first = run.first_equal(r, in_every_lane(from_float<T>(peak))) == target;
            mine.outside += !inside && !ignored;
            mine.add(counted, log_sum, peak - to_float(own), weight_at(shared, target), around.below(spread, all), all,
                     smoothing, CLASSES);
            mine.correct += counted && known && first;
            bool among = first;
            if (SMOOTHED && top > 1) {
                const u32 wanted = in_every_lane(own);
                among = run.marks(r, [&](u32 word) { return lane_greater(word, wanted); }).all() +
                        run.marks(r, [&](u32 word) { return lane_equal(word, wanted); }).before(target) < top;
            }
            mine.among_top += counted && known && among;
        }
        if (RUN <= count) {
            store(lse + row, log_sums);
        } else if (count > 0) {
            lse[row] = log_sums[0];
        }
    });
    mine.write(partial);
}

#else
extern "C" __global__ void __launch_bounds__(BLOCK, CLASSES > 32 ? 3 : SMOOTHED || CLASSES > 24 ? 6 : 8)
softmax_cross_entropy_backward(const T* __restrict__ logits, const LABEL* __restrict__ labels,
                               const float* __restrict__ weights, const float* __restrict__ lse,
                               const double* __restrict__ totals, const float* __restrict__ scale,
                               T* __restrict__ dlogits, i64 rows, i64 ignore_index, float smoothing) {
    await_predecessor();
    extern __shared__ uint4 memory[];
    const Rewrite at(memory, logits, rows);
    const float* shared = share_weights(weights);
    i64 label[RUNS][RUN];
    float norm[RUNS][RUN];
    at.fetch(labels, ignore_index, label);
    at.fetch(lse, 0.0f, norm);
    const float share = SMOOTHED ? smoothing / CLASSES : 0.0f;
    const float spread_out = SMOOTHED ? share * all_weights(shared) : 0.0f;
    const float whole = gradient_factor(totals, scale);
    await_copies<0>();
    __syncwarp();
#pragma unroll
    for (int part = 0; part < RUNS; ++part) {
        if (at.row(part) >= at.count) break;
        float factor[RUN], own[RUN];
#pragma unroll
        for (int r = 0; r < RUN; ++r) {
            const i64 of = label[part][r];
            const bool valid = counts(of, CLASSES, ignore_index);
            factor[r] = valid ? whole : 0.0f;
            own[r] = !SMOOTHED ? 1.0f : valid ? (1.0f - smoothing) * weight_at(shared, int(of)) : 0.0f;
        }
        const Run run(at.tile, at.row(part));
        at.change(part, [&](int r, int k) {
            const float p = exponential(run.at(r, k) - norm[part][r]), taken = k == int(label[part][r]) ? own[r] : 0.0f;
            const float less = SMOOTHED ? fmaf(share, weight_at(shared, k), taken) : taken;
            return factor[r] == 0.0f ? 0.0f : fmaf(own[r] + spread_out, p, -less) * factor[r];
        });
    }
    at.finish(dlogits);
}
#endif

#elif defined(LANES)
// ------------------------------------------------------------------------------------------------ many threads per row

static_assert(LANES <= 32 || LANES == BLOCK, "a row belongs to part of a warp, or to a block");

DEVICE float weight_of(const float* weights, int k) { return weights ? weights[k] : 1.0f; }

// Elements between the last vector boundary and p.
DEVICE int misalignment(const T* p) {
    return ALIGNED ? 0 : int(reinterpret_cast<u64>(p) / sizeof(T) % VEC);
}

// The vector of elements first .. first + VEC - 1 of a row; what lies outside the row reads as -inf.
DEVICE Raw<T, VEC> load_vector(const T* __restrict__ x, int first, int classes) {
    if (first >= 0 && first + VEC <= classes) return load_raw<VEC>(x + first);
    Raw<T, VEC> raw;
#pragma unroll
    for (int e = 0; e < VEC; ++e) {
        const int k = first + e;
        raw.items[e] = k >= 0 && k < classes ? x[k] : from_float<T>(__uint_as_float(0xff800000u));
    }
    return raw;
}

// Whether element k lies in the row.
DEVICE bool within_row(int k, int classes) { return u32(k) < u32(classes); }

// Part of a row: sums around its largest logit so far, and where the first vector that has it begins.
struct Part {
    float peak = -3.402823466e38f;  // finite, so that peak - peak is 0 in a part without elements
    float sum = 0.0f, spread = 0.0f, weights = 0.0f;  // of exp(x - peak), of w (peak - x), of w
    int where = 1 << 30, ahead = 0;

    __device__ __forceinline__ void raise(float highest) {
        sum *= exponential(peak - highest);
        if (SMOOTHED && weights != 0.0f) spread = fmaf(weights, highest - peak, spread);
        peak = highest;
    }
};

// Whether `label` is the first element equal to the row's largest, which first occurs in the vector at `where`.
DEVICE bool is_first_largest(const T* __restrict__ x, int label, float value, float peak, int where) {
    if (value != peak || label < where || label >= where + VEC) return false;
    for (int k = max(where, 0); k < label; ++k)
        if (to_float(x[k]) == peak) return false;
    return true;
}

extern "C" __global__ void __launch_bounds__(BLOCK, ALIGNED && !SMOOTHED ? 4 : 3)
softmax_cross_entropy(const T* __restrict__ logits, const LABEL* __restrict__ labels, const float* __restrict__ weights,
                      float* __restrict__ lse, double* __restrict__ partial, i64 rows, int classes, i64 pitch,
                      int passes, i64 ignore_index, float smoothing, int top) {
    await_predecessor();
    const int lane = threadIdx.x % LANES;
    Totals mine;
    for (int pass = 0; pass < passes; ++pass) {
        const i64 row = (i64(blockIdx.x) * passes + pass) * ROWS + threadIdx.x / LANES;
        const bool inside = row < rows;
        const T* x = logits + (inside ? row : 0) * pitch;
        const i64 label = inside ? i64(labels[row]) : ignore_index;
        const bool valid = counts(label, classes, ignore_index);
        const float own = valid ? to_float(x[label]) : 0.0f;
        const int shift = misalignment(x), end = inside ? classes : -shift;
        Part part;
        for (int first = lane * VEC - shift; first < end; first += STEPS * LANES * VEC) {
            Raw<T, VEC> raw[STEPS];
#pragma unroll
            for (int u = 0; u < STEPS; ++u) raw[u] = load_vector(x, first + u * (LANES * VEC), classes);
            float highest = part.peak;
#pragma unroll
            for (int u = 0; u < STEPS; ++u) {
                float v[VEC];
                unpack(raw[u], v);
#pragma unroll
                for (int e = 1; e < VEC; ++e) v[0] = fmaxf(v[0], v[e]);
                if (v[0] > highest) {
                    highest = v[0];
                    part.where = first + u * (LANES * VEC);
                }
            }
            part.raise(highest);
#pragma unroll
            for (int u = 0; u < STEPS; ++u) {
                float v[VEC];
                unpack(raw[u], v);
#pragma unroll
                for (int e = 0; e < VEC; ++e) {
                    part.sum += exponential(v[e] - part.peak);
                    const int k = first + u * (LANES * VEC) + e;
                    if (!SMOOTHED || !within_row(k, classes)) continue;
                    const float weight = weight_of(weights, k);
                    part.weights += weight;
                    part.spread = fmaf(weight, part.peak - v[e], part.spread);
                    part.ahead += v[e] > own || (v[e] == own && k < int(label));
                }
            }
        }
        const float own_peak = part.peak, peak = over_row<true>(own_peak);
        part.raise(peak);
        const float sum = over_row(part.sum);
        float spread = 0.0f, all = 0.0f, ahead = 0.0f;
        int where = 0;
        if (SMOOTHED) {
            spread = over_row(part.spread);
            all = over_row(part.weights);
            ahead = over_row(float(part.ahead));
        } else {  // the smallest of those that have the peak
            where = -int(over_row<true>(own_peak == peak ? -float(part.where) : -3.402823466e38f));
        }
        if (!inside || lane > 0) continue;
        const float log_sum = logf(sum);
        lse[row] = peak + log_sum;
        if (label == ignore_index) continue;
        if (!valid) {
            ++mine.outside;
            continue;
        }
        const float weight = SMOOTHED ? weight_of(weights, int(label)) : 1.0f;
        mine.add(true, log_sum, peak - own, weight, spread, all, smoothing, classes);
        const bool known = !SMOOTHED || log_sum == log_sum;
        mine.correct += SMOOTHED ? known && ahead == 0.0f : is_first_largest(x, int(label), own, peak, where);
        mine.among_top += known && ahead < float(top);
    }
    __syncthreads();
    mine.write(partial);
}

extern "C" __global__ void __launch_bounds__(BLOCK, (ALIGNED ? 4 : 3) - SMOOTHED)
softmax_cross_entropy_backward(const T* __restrict__ logits, const LABEL* __restrict__ labels,
                               const float* __restrict__ weights, const float* __restrict__ lse,
                               const double* __restrict__ totals, const float* __restrict__ scale,
                               T* __restrict__ dlogits, i64 rows, int classes, i64 pitch, i64 ignore_index,
                               float smoothing) {
    await_predecessor();
    const i64 row = i64(blockIdx.x) * ROWS + threadIdx.x / LANES;
    const float share = SMOOTHED ? smoothing / classes : 0.0f;
    float all = classes;
    if (SMOOTHED && weights) {
        all = 0.0f;
        for (int k = threadIdx.x % LANES; k < classes; k += LANES) all += weights[k];
        all = over_row(all);
    }
    if (row >= rows) return;
    const T* x = logits + row * pitch;
    T* dx = dlogits + row * classes;
    const i64 label = labels[row];
    const bool valid = counts(label, classes, ignore_index);
    const float factor = valid ? gradient_factor(totals, scale) : 0.0f, norm = lse[row];
    const float own = !SMOOTHED ? 1.0f : valid ? (1.0f - smoothing) * weight_of(weights, int(label)) : 0.0f;
    const float mass = SMOOTHED ? fmaf(share, all, own) : 1.0f;
    const int shift = misalignment(dx);
    for (int first = threadIdx.x % LANES * VEC - shift; first < classes; first += STEPS * LANES * VEC) {
        Raw<T, VEC> raw[STEPS];
#pragma unroll
        for (int u = 0; u < STEPS; ++u) raw[u] = load_vector(x, first + u * (LANES * VEC), classes);
#pragma unroll
        for (int u = 0; u < STEPS; ++u) {
            const int begin = first + u * (LANES * VEC);
            float v[VEC];
            unpack(raw[u], v);
#pragma unroll
            for (int e = 0; e < VEC; ++e) {
                const int k = begin + e;
                const float p = exponential(v[e] - norm);
                float less = k == label ? own : 0.0f;
                if (SMOOTHED && within_row(k, classes)) less = fmaf(share, weight_of(weights, k), less);
                v[e] = factor == 0.0f ? 0.0f : fmaf(mass, p, -less) * factor;
            }
            if (begin >= 0 && begin + VEC <= classes) {
                store(dx + begin, v);
            } else {
#pragma unroll
                for (int e = 0; e < VEC; ++e)
                    if (within_row(begin + e, classes)) dx[begin + e] = from_float<T>(v[e]);
            }
        }
    }
}

#else
// ------------------------------------------------------------------------------------------------------------- labels

// Threads of all blocks take turns, so neighbours read neighbours.
extern "C" __global__ void __launch_bounds__(BLOCK)
count_labels(const LABEL* __restrict__ labels, const float* __restrict__ weights, double* __restrict__ partial,
             i64 count, int classes, i64 ignore_index) {
    await_predecessor();
    int valid = 0;
    double mass = 0.0;
    for (i64 i = i64(blockIdx.x) * BLOCK + threadIdx.x; i < count; i += i64(gridDim.x) * BLOCK) {
        const i64 label = i64(labels[i]);
        const bool counted = counts(label, classes, ignore_index);
        valid += counted;
        if (weights && counted) mass += weights[label];
    }
    const double sums[COLUMNS] = {0.0, weights ? mass : double(valid), 0.0, 0.0};
    write_totals<BLOCK>(sums, partial);
}

#endif
