// Softmax cross entropy with a probability for every class, and its gradient.
//
//   logits (rows, K) of T at a pitch; targets (rows, K) float, dense; weights (K,) float or null for ones; lse (rows,) float:
//   log of the sum of exponentials; dlogits (rows, K) dense; totals double[4]: loss, rows, rows whose first largest logit
//   stands where the first largest target does, 0; partial (blocks, 4) double: totals of each block's fixed run of rows.
//
//   With u_k = w_k ((1 - e) t_k + e/K), e = smoothing: loss of a row sum_k u_k (lse - x_k), its gradient
//   sum(u) exp(x_k - lse) - u_k, divided by the rows, as in torch.nn.CrossEntropyLoss.
//
// Mapping: row.cuh, one row at a time for a thread; forward `passes` groups of rows for a block. Per logit, with
// s = sizeof(T): forward s + 4 bytes, 9 FLOP, backward
// 2 s + 4 bytes, 8 FLOP; floor on an H200 at 4.2 TB/s in bf16 per million logits: 1.4 and 1.9 us.
#include "common.cuh"
#include "exponential.cuh"
#include "row.cuh"

constexpr int COLUMNS = 4;

// Targets as the loss sees them: smoothed, weighted; 0 behind the row.
DEVICE void load_share(const RowPart<float>& targets, const float* __restrict__ weights, int r, int i, int channels,
                       float keep, float spread, float (&u)[RUN]) {
    targets.run(r, i, channels, 0.0f, u);
#pragma unroll
    for (int e = 0; e < RUN; ++e) {
        const bool inside = within(i + e, channels);
        u[e] = inside ? fmaf(keep, u[e], spread) * (weights ? weights[i + e] : 1.0f) : 0.0f;
    }
}

// Blocks that a multiprocessor holds, with the rows in registers.
constexpr int RESIDENT = HELD > 2 ? 2 : HELD == 2 ? 3 : 4;

#if defined(FORWARD)

extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
soft_cross_entropy(const T* __restrict__ logits, const float* __restrict__ targets, const float* __restrict__ weights,
                   float* __restrict__ lse, double* __restrict__ partial, i64 rows, int channels, i64 pitch, int passes,
                   float keep, float spread) {
    __shared__ double scratch[32];
    double loss = 0.0;
    int counted = 0, right = 0;
    const float least = __uint_as_float(0xff800000u);
    for (int pass = 0; pass < passes; ++pass) {
        const i64 row = (i64(blockIdx.x) * passes + pass) * ROWS + threadIdx.x / LANES;
        const int first = threadIdx.x % LANES * RUN;
        const bool inside = row < rows;
        const T* x = logits + (inside ? row : 0) * pitch;
        const float* t = targets + (inside ? row : 0) * channels;
        RowPart<> logit;
        RowPart<float> target;
        logit.fetch(x, first, channels);
        target.fetch(t, first, channels);
        float v[RUN], u[RUN], peak = least, top = least, total = 0.0f, mass = 0.0f, below = 0.0f;
        for_runs(first, channels, [&](int r, int i) {
            logit.run(r, i, channels, least, v);
            target.run(r, i, channels, least, u);
#pragma unroll
            for (int e = 0; e < RUN; ++e) {
                peak = larger(peak, v[e]);
                top = larger(top, u[e]);
            }
        });
        peak = over_row<true>(peak);
        top = over_row<true>(top);
        float first_peak = least, first_top = least;  // places, negated: the largest is the first
        for_runs(first, channels, [&](int r, int i) {
            logit.run(r, i, channels, least, v);
            target.run(r, i, channels, least, u);
#pragma unroll
            for (int e = 0; e < RUN; ++e) {
                const float place = within(i + e, channels) ? -float(i + e) : least;
                if (v[e] == peak) first_peak = larger(first_peak, place);
                if (u[e] == top) first_top = larger(first_top, place);
            }
            load_share(target, weights, r, i, channels, keep, spread, u);
            float part = 0.0f, weight = 0.0f, less = 0.0f;
#pragma unroll
            for (int e = 0; e < RUN; ++e) {
                part += exponential(v[e] - peak);
                weight += u[e];
                less += within(i + e, channels) ? u[e] * (peak - v[e]) : 0.0f;
            }
            total += part;
            mass += weight;
            below += less;
        });
        total = over_row(total);
        mass = over_row(mass);
        below = over_row(below);
        first_peak = over_row<true>(first_peak);
        first_top = over_row<true>(first_top);
        if (!inside || first > 0) continue;
        const float log_sum = logf(total);
        lse[row] = peak + log_sum;
        loss += double(mass) * log_sum + below;
        ++counted;
        right += first_peak == first_top;
    }
    const double mine[COLUMNS] = {loss, double(counted), double(right), 0.0};
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        __syncthreads();
        const double sum = block_sum<BLOCK>(mine[j], scratch);
        if (threadIdx.x == 0) partial[COLUMNS * i64(blockIdx.x) + j] = sum;
    }
}

#else

extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
soft_cross_entropy_backward(const T* __restrict__ logits, const float* __restrict__ targets,
                            const float* __restrict__ weights, const float* __restrict__ lse,
                            const double* __restrict__ totals, const float* __restrict__ scale, T* __restrict__ dlogits,
                            i64 rows, int channels, i64 pitch, float keep, float spread) {
    const RowShare at(rows);
    RowPart<> logit;
    RowPart<float> target;
    logit.fetch(logits + at.row * pitch, at.first, channels);
    target.fetch(targets + at.row * channels, at.first, channels);
    float v[RUN], u[RUN], mass = 0.0f;
    for_runs(at.first, channels, [&](int r, int i) {
        load_share(target, weights, r, i, channels, keep, spread, u);
        float weight = 0.0f;
#pragma unroll
        for (int e = 0; e < RUN; ++e) weight += u[e];
        mass += weight;
    });
    mass = over_row(mass);
    if (!at.inside) return;
    const float factor = totals[1] > 0.0 ? (scale ? scale[0] : 1.0f) / float(totals[1]) : 0.0f, norm = lse[at.row];
    for_runs(at.first, channels, [&](int r, int i) {
        logit.run(r, i, channels, 0.0f, v);
        load_share(target, weights, r, i, channels, keep, spread, u);
#pragma unroll
        for (int e = 0; e < RUN; ++e) v[e] = fmaf(mass, exponential(v[e] - norm), -u[e]) * factor;
        store_run(dlogits + at.row * channels, i, channels, v);
    });
}

#endif
