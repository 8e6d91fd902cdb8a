// Softmax cross entropy with a probability for every class, and its gradient.
//
//   logits (rows, K) of T at a pitch; targets (rows, K) float, dense; weights (K,) float or null for ones; lse (rows,)
//   float: log of the sum of exponentials; dlogits (rows, K) dense; totals double[4]: loss, rows, rows whose first
//   largest logit stands where the first largest target does, 0; partial (blocks, 4) double: totals of each block's
//   fixed run of rows.
//
//   With u_k = w_k ((1 - e) t_k + e/K), e = smoothing: loss of a row sum_k u_k (lse - x_k), its gradient
//   sum(u) exp(x_k - lse) - u_k, divided by the rows, as in torch.nn.CrossEntropyLoss.
//
// Mapping: row.cuh, one row at a time for a thread; forward `passes` groups of rows for a block, STEPS runs of a row
// loaded before the first is used. Per logit, with s = sizeof(T): forward s + 4 bytes, 9 FLOP, backward 2 s + 4 bytes, 8
// FLOP; floor on an H200 at 4.2 TB/s in bf16 per million logits: 1.4 and 1.9 us.
#include "common.cuh"
#include "exponential.cuh"
#include "loss.cuh"
#include "row.cuh"

constexpr int COLUMNS = 4;

#if defined(FORWARD)
constexpr int STEPS = 2, RESIDENT = 4;  // runs of a row on their way to a thread; blocks of a multiprocessor

// A thread's part of a row, read once: sums around its largest logit so far (Milakov & Gimelshein, 2018).
struct Part {
    float peak = -3.402823466e38f, top = peak;  // finite, so that peak - peak is 0 in a part without elements
    float total = 0.0f, mass = 0.0f, below = 0.0f;  // of exp(x - peak), of u, of u (peak - x)
    int where = -1, top_where = -1;  // the first runs that have the largest logit and the largest target

    __device__ __forceinline__ void raise(float highest) {
        total *= exponential(peak - highest);
        if (mass != 0.0f) below = fmaf(mass, highest - peak, below);
        peak = highest;
    }
};

// The first of RUN elements from `first` on that is equal to `value`; -1 where none is.
template <class S>
DEVICE int place_of(const S* __restrict__ row, int first, int channels, float value) {
    for (int k = max(first, 0); k < min(first + RUN, channels); ++k)
        if (to_float(row[k]) == value) return k;
    return -1;
}

extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
soft_cross_entropy(const T* __restrict__ logits, const float* __restrict__ targets, const float* __restrict__ weights,
                   float* __restrict__ lse, double* __restrict__ partial, i64 rows, int channels, i64 pitch, int passes,
                   float keep, float spread) {
    await_predecessor();
    double loss = 0.0;
    int counted = 0, right = 0;
    const float least = __uint_as_float(0xff800000u);
    for (int pass = 0; pass < passes; ++pass) {
        const i64 row = (i64(blockIdx.x) * passes + pass) * ROWS + threadIdx.x / LANES;
        const int first = threadIdx.x % LANES * RUN;
        const bool inside = row < rows;
        const T* x = logits + (inside ? row : 0) * pitch;
        const float* t = targets + (inside ? row : 0) * channels;
        Part mine;
        for (int begin = first; begin < channels; begin += STEPS * RowShare::STEP) {
            float v[STEPS][RUN], u[STEPS][RUN], highest = mine.peak;
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                load_run(x, begin + s * RowShare::STEP, channels, least, v[s]);
                load_run(t, begin + s * RowShare::STEP, channels, least, u[s]);
            }
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                float largest = v[s][0], most = u[s][0];
#pragma unroll
                for (int e = 1; e < RUN; ++e) {
                    largest = larger(largest, v[s][e]);
                    most = larger(most, u[s][e]);
                }
                if (largest > highest) mine.where = begin + s * RowShare::STEP;
                if (most > mine.top) mine.top_where = begin + s * RowShare::STEP;
                highest = larger(highest, largest);
                mine.top = larger(mine.top, most);
            }
            mine.raise(highest);
#pragma unroll
            for (int s = 0; s < STEPS; ++s)
#pragma unroll
                for (int j = 0; j < RUN; j += VEC) {
                    const int k = begin + s * RowShare::STEP + j;
                    if (k >= channels) continue;
#pragma unroll
                    for (int e = 0; e < VEC; ++e) {
                        const float share = fmaf(keep, u[s][j + e], spread) * (weights ? weights[k + e] : 1.0f);
                        mine.total += exponential(v[s][j + e] - mine.peak);
                        mine.mass += share;
                        mine.below = fmaf(share, mine.peak - v[s][j + e], mine.below);
                    }
                }
        }
        const float own = mine.peak, highest = over_row<true>(own), most = over_row<true>(mine.top);
        mine.raise(highest);
        const float total = over_row(mine.total), mass = over_row(mine.mass), below = over_row(mine.below);
        // Places as floats, negated: the largest is the first.
        const float where = over_row<true>(own == highest && mine.where >= 0 ? -float(mine.where) : least);
        const float top_where =
            over_row<true>(mine.top == most && mine.top_where >= 0 ? -float(mine.top_where) : least);
        if (!inside || first > 0) continue;
        const float log_sum = logf(total);
        lse[row] = highest + log_sum;
        loss += double(mass) * log_sum + below;
        ++counted;
        right += where > least &&
                 place_of(x, int(-where), channels, highest) == place_of(t, int(-top_where), channels, most);
    }
    const double totals[COLUMNS] = {loss, double(counted), double(right), 0.0};
    write_totals<BLOCK>(totals, partial);
}

#else

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
constexpr int RESIDENT = HELD == 2 ? 3 : 4;

extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
soft_cross_entropy_backward(const T* __restrict__ logits, const float* __restrict__ targets,
                            const float* __restrict__ weights, const float* __restrict__ lse,
                            const double* __restrict__ totals, const float* __restrict__ scale, T* __restrict__ dlogits,
                            i64 rows, int channels, i64 pitch, float keep, float spread) {
    await_predecessor();
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
    const float factor = gradient_factor(totals, scale), norm = lse[at.row];
    for_runs(at.first, channels, [&](int r, int i) {
        logit.run(r, i, channels, 0.0f, v);
        load_share(target, weights, r, i, channels, keep, spread, u);
#pragma unroll
        for (int e = 0; e < RUN; ++e) v[e] = fmaf(mass, exponential(v[e] - norm), -u[e]) * factor;
        store_run(dlogits + at.row * channels, i, channels, v);
    });
}

#endif
