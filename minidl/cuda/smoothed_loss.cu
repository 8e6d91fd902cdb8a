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
// Mapping: row.cuh, `passes` groups of rows for a block. Per logit: forward sizeof(T) bytes, 8 FLOP, backward 2 sizeof(T)
// bytes, 6 FLOP. Without weights, smoothing and TOP the kernels of loss.cu do it in fewer instructions.
#include "common.cuh"
#include "exponential.cuh"
#include "row.cuh"

constexpr int COLUMNS = 6;

DEVICE float weight_of(const float* weights, int k) { return weights ? weights[k] : 1.0f; }

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
            double all = channels;
            if (weights) {
                all = 0.0;
                for (int k = 0; k < channels; ++k) all += weights[k];
            }
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
    float all = float(channels), v[RUN];
    if (weights && smoothing > 0.0f) {
        all = 0.0f;
        for (int k = 0; k < channels; ++k) all += weights[k];
    }
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
