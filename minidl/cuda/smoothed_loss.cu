// Softmax cross entropy with class weights and label smoothing, the place of each label among the logits, and the gradient.
//
//   logits (rows, K) of T at a pitch; labels (rows,) of LABEL; weights (K,) float or null for ones; lse (rows,) float: log of
//   the sum of exponentials; dlogits (rows, K) dense; totals double[6]: weighted loss, sum of the labels' weights, labels
//   that are the first largest logit, labels out of range, valid labels, labels among the first TOP; partial (blocks, 6)
//   double: totals of each block's fixed run of rows.
//
//   loss of a row with label y, e = smoothing, w = weights: (1 - e) w_y (lse - x_y) + e/K sum_k w_k (lse - x_k)
//   (Szegedy et al., "Rethinking the Inception architecture", CVPR 2016; divided by the sum of w_y, as in torch.nn)
//
// Mapping: `passes` groups of rows for a block; -DCLASSES=K: short_rows.cuh, a thread for one or two rows, with
// -DWEIGHTED=1 where there are weights; -DLANES=L: row.cuh. Per logit: forward sizeof(T) bytes, 8 FLOP, backward
// 2 sizeof(T) bytes, 6 FLOP.
// Without weights, smoothing and TOP the kernels of loss.cu do it in fewer instructions.
#include "common.cuh"
#include "exponential.cuh"

constexpr int COLUMNS = 6;

DEVICE float weight_of(const float* weights, int k) { return weights ? weights[k] : 1.0f; }

// The sum of all weights, in the order of the classes.
template <class X>
DEVICE X all_weights(const float* weights, int classes) {
    if (!weights) return X(classes);
    X all = 0;
    for (int k = 0; k < classes; ++k) all += weights[k];
    return all;
}

#ifdef CLASSES
#include "short_rows.cuh"
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

extern "C" __global__ void __launch_bounds__(BLOCK, CLASSES <= 32 ? 6 : 3)
smoothed_cross_entropy(const T* __restrict__ logits, const LABEL* __restrict__ labels, const float* __restrict__ weights,
                       float* __restrict__ lse, double* __restrict__ partial, i64 rows, int passes, i64 ignore_index,
                       float smoothing, int top) {
    extern __shared__ uint4 memory[];
    T* tiles = reinterpret_cast<T*>(memory) + threadIdx.x / 32 * (STAGES * TILE * CLASSES);
    const i64 begin = (i64(blockIdx.x) * passes * BLOCK + threadIdx.x / 32 * 32) * RUN;  // of the warp's first tile
    const auto start_tile = [&](int pass) {
        const i64 first = begin + i64(pass) * ROWS;
        if (pass < passes && first < rows)
            start_copy(tiles + pass % STAGES * (TILE * CLASSES), logits + first * CLASSES,
                       int(min(i64(TILE), rows - first)) * CLASSES);
        commit_copies();
    };
    if (STAGES > 1) start_tile(0);
    const float* shared = share_weights(weights);
    const double all = all_weights<double>(shared, CLASSES), spread_out = double(smoothing) / CLASSES;
    double loss = 0.0, mass = 0.0;
    int first_largest = 0, outside = 0, valid = 0, among_top = 0;
    for (int pass = 0; pass < passes && begin + i64(pass) * ROWS < rows; ++pass) {
        const i64 row = begin + i64(pass) * ROWS + threadIdx.x % 32 * RUN;
        i64 label[RUN];
#pragma unroll
        for (int r = 0; r < RUN; ++r) label[r] = row + r < rows ? i64(labels[row + r]) : ignore_index;
        if (pass > 0) __syncwarp();
        start_tile(pass + STAGES - 1);
        await_copies<STAGES - 1>();
        if (row >= rows) continue;

        const T* x = tiles + (pass % STAGES * TILE + threadIdx.x % 32 * RUN) * CLASSES;
        const Run run(x);
        float log_sums[RUN];
#pragma unroll
        for (int r = 0; r < RUN; ++r) {
            const float peak = run.peak(r);
            float sum = 0.0f, spread = 0.0f;
#pragma unroll
            for (int k = 0; k < CLASSES; ++k) {
                const float below = peak - run.at(r, k);
                sum += exponential(-below);
                spread = fmaf(weight_at(shared, k), below, spread);
            }
            const float log_sum = logf(sum);
            log_sums[r] = peak + log_sum;
            const bool inside = u64(label[r]) < CLASSES, counts = inside && label[r] != ignore_index;
            const int target = inside ? int(label[r]) : 0;
            const T own = x[r * CLASSES + target];
            const u32 wanted = in_every_lane(own);
            const Marks above = run.marks(r, [&](u32 word) { return lane_greater(word, wanted); });
            const Marks equal = run.marks(r, [&](u32 word) { return lane_equal(word, wanted); });
            const int ahead = above.all() + equal.before(target);
            const float weight = weight_at(shared, target);
            double term = double(weight) * (double(log_sum) + double(peak - to_float(own)));
            if (smoothing > 0.0f) term = (1.0 - smoothing) * term + spread_out * (all * log_sum + spread);
            loss += counts ? term : 0.0;
            mass += counts ? weight : 0.0f;
            first_largest += counts && ahead == 0;
            among_top += counts && ahead < top;
            valid += counts;
            outside += !inside && label[r] != ignore_index;
        }
        if (row + RUN <= rows) {
            store(lse + row, log_sums);
        } else {
            lse[row] = log_sums[0];
        }
    }
    __shared__ double scratch[COLUMNS][32];
    const double mine[COLUMNS] = {loss, mass, double(first_largest), double(outside), double(valid), double(among_top)};
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        const double total = block_sum<BLOCK>(mine[j], scratch[j]);
        if (threadIdx.x == 0) partial[COLUMNS * i64(blockIdx.x) + j] = total;
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK, CLASSES <= 32 ? 6 : 3)
smoothed_cross_entropy_backward(const T* __restrict__ logits, const LABEL* __restrict__ labels,
                                const float* __restrict__ weights, const float* __restrict__ lse,
                                const double* __restrict__ totals, const float* __restrict__ scale,
                                T* __restrict__ dlogits, i64 rows, i64 ignore_index, float smoothing) {
    extern __shared__ uint4 memory[];
    T* tile = reinterpret_cast<T*>(memory) + threadIdx.x / 32 * (TILE * CLASSES);
    const i64 begin = (i64(blockIdx.x) * BLOCK + threadIdx.x / 32 * 32) * RUN;
    const int count = int(min(i64(TILE), max(rows - begin, i64(0)))), row = threadIdx.x % 32 * RUN;
    start_copy(tile, logits + begin * CLASSES, count * CLASSES);
    commit_copies();
    const float* shared = share_weights(weights);
    i64 label[RUN];
    float norm[RUN];
#pragma unroll
    for (int r = 0; r < RUN; ++r) {
        const bool inside = row + r < count;
        label[r] = inside ? i64(labels[begin + row + r]) : ignore_index;
        norm[r] = inside ? lse[begin + row + r] : 0.0f;
    }
    const float share = smoothing / CLASSES, spread_out = share * all_weights<float>(shared, CLASSES);
    const float whole = totals[1] > 0.0 ? (scale ? scale[0] : 1.0f) / float(totals[1]) : 0.0f;
    await_copies<0>();
    if (row < count) {
        T* x = tile + row * CLASSES;
        const Run run(x);
        float factor[RUN], own[RUN];
#pragma unroll
        for (int r = 0; r < RUN; ++r) {
            const bool counts = label[r] != ignore_index && u64(label[r]) < CLASSES;
            factor[r] = counts ? whole : 0.0f;
            own[r] = counts ? (1.0f - smoothing) * weight_at(shared, int(label[r])) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < RUN * CLASSES; i += READ) {
            float part[READ];
#pragma unroll
            for (int e = 0; e < READ; ++e) {
                const int r = (i + e) / CLASSES, k = (i + e) % CLASSES;
                const float p = exponential(run.at(r, k) - norm[r]);
                const float less = fmaf(share, weight_at(shared, k), k == int(label[r]) ? own[r] : 0.0f);
                part[e] = factor[r] == 0.0f ? 0.0f : fmaf(own[r] + spread_out, p, -less) * factor[r];
            }
            store(x + i, part);
        }
    }
    write_back(dlogits + begin * CLASSES, tile, count * CLASSES);
}

#else
#include "row.cuh"
// ------------------------------------------------------------------------------------------------ many threads per row

#if defined(FORWARD)

extern "C" __global__ void __launch_bounds__(BLOCK, 4)
smoothed_cross_entropy(const T* __restrict__ logits, const LABEL* __restrict__ labels, const float* __restrict__ weights,
                       float* __restrict__ lse, double* __restrict__ partial, i64 rows, int channels, i64 pitch,
                       int passes, i64 ignore_index, float smoothing, int top) {
    __shared__ double scratch[32];
    double mine[COLUMNS] = {};
    for (int pass = 0; pass < passes; ++pass) {
        const i64 row = (i64(blockIdx.x) * passes + pass) * ROWS + threadIdx.x / LANES;
        const int first = threadIdx.x % LANES * RUN;
        const bool inside = row < rows;
        const T* x = logits + (inside ? row : 0) * pitch;
        const i64 label = inside ? i64(labels[row]) : ignore_index;
        const bool valid = label != ignore_index && label >= 0 && label < channels;
        const float own = valid ? to_float(x[label]) : 0.0f, least = __uint_as_float(0xff800000u);
        float v[RUN], peak = least, total = 0.0f, spread = 0.0f, before = 0.0f;
        for (int i = first; i < channels; i += LANES * RUN) {
            load_run(x, i, channels, least, v);
#pragma unroll
            for (int e = 0; e < RUN; ++e) peak = larger(peak, v[e]);
        }
        peak = over_row<true>(peak);
        for (int i = first; i < channels; i += LANES * RUN) {
            load_run(x, i, channels, least, v);
            float part = 0.0f;
#pragma unroll
            for (int e = 0; e < RUN; ++e) {
                part += exponential(v[e] - peak);
                before += v[e] > own || (v[e] == own && i + e < label) ? 1.0f : 0.0f;
                if (smoothing > 0.0f && i + e < channels) spread += weight_of(weights, i + e) * (peak - v[e]);
            }
            total += part;
        }
        total = over_row(total);
        before = over_row(before);
        if (smoothing > 0.0f) spread = over_row(spread);
        if (!inside || first > 0) continue;
        const float log_sum = logf(total);
        lse[row] = peak + log_sum;
        if (label == ignore_index) continue;
        if (!valid) {
            mine[3] += 1.0;
            continue;
        }
        const float weight = weight_of(weights, int(label));
        double term = double(weight) * (double(log_sum) + double(peak - own));
        if (smoothing > 0.0f) {
            const double all = all_weights<double>(weights, channels);
            term = (1.0 - smoothing) * term + double(smoothing) / channels * (all * log_sum + spread);
        }
        mine[0] += term;
        mine[1] += weight;
        mine[2] += before < 1.0f;
        mine[4] += 1.0;
        mine[5] += before < float(top);
    }
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        __syncthreads();
        const double sum = block_sum<BLOCK>(mine[j], scratch);
        if (threadIdx.x == 0) partial[COLUMNS * i64(blockIdx.x) + j] = sum;
    }
}

#else

extern "C" __global__ void __launch_bounds__(BLOCK, 4)
smoothed_cross_entropy_backward(const T* __restrict__ logits, const LABEL* __restrict__ labels,
                                const float* __restrict__ weights, const float* __restrict__ lse,
                                const double* __restrict__ totals, const float* __restrict__ scale,
                                T* __restrict__ dlogits, i64 rows, int channels, i64 pitch, i64 ignore_index,
                                float smoothing) {
    const RowShare at(rows);
    if (!at.inside) return;
    const T* x = logits + at.row * pitch;
    const i64 label = labels[at.row];
    const bool counts = label != ignore_index && label >= 0 && label < channels && totals[1] > 0.0;
    const float factor = counts ? (scale ? scale[0] : 1.0f) / float(totals[1]) : 0.0f;
    const float share = smoothing / channels;
    const float own = counts ? (1.0f - smoothing) * weight_of(weights, int(label)) : 0.0f;
    const float all = smoothing > 0.0f ? all_weights<float>(weights, channels) : 0.0f;
    float v[RUN];
    const float norm = lse[at.row], mass = own + share * all;
    for (int i = at.first; i < channels; i += RowShare::STEP) {
        load_run(x, i, channels, 0.0f, v);
#pragma unroll
        for (int e = 0; e < RUN; ++e) {
            const float less = (smoothing > 0.0f && i + e < channels ? share * weight_of(weights, i + e) : 0.0f) +
                               (i + e == label ? own : 0.0f);
            v[e] = counts ? fmaf(mass, exponential(v[e] - norm), -less) * factor : 0.0f;
        }
        store_run(dlogits + at.row * channels, i, channels, v);
    }
}

#endif
#endif
