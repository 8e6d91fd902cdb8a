// Layer normalisation over rows of channels (Ba, Kiros and Hinton 2016). The parameter gradients: sample_sums in
// group_norm.cu.
//
// x, dy, add: (rows, channels) of T at a pitch; y, dx: dense; moments (2, rows) float: mean, 1/sqrt(biased variance +
// eps); gamma, beta (channels,) float or null.
//   FORWARD:  y = (x - mean) * rstd * gamma + beta. The variance is the mean of squared deviations from the mean.
//   else:     dx = rstd * (g - mean of g - xhat * mean of g*xhat) + add, with g = dy * gamma
//
// Mapping: row.cuh, PER rows for a thread. Cost per element, s = sizeof(T): forward 2s bytes, 8 FLOP; backward 3s
// bytes, 10 FLOP (+ s with add); floor on an H200 at 4.2 TB/s in bf16 per million elements: 0.95 and 1.43 us. A row of
// 64 channels is eight threads' work of some 110 instructions each: half of what fits into that time.
#include "common.cuh"
#include "row.cuh"

// RUN values per channel, `otherwise` where there are none.
DEVICE void load_values(const float* __restrict__ values, int first, int channels, float otherwise, float (&v)[RUN]) {
    if (values) {
        load_run(values, first, channels, otherwise, v);
    } else {
#pragma unroll
        for (int e = 0; e < RUN; ++e) v[e] = otherwise;
    }
}

#if defined(FORWARD)

extern "C" __global__ void __launch_bounds__(BLOCK, PER > 2 ? 3 : 4)
layer_norm_kernel(const T* __restrict__ x, const float* __restrict__ gamma, const float* __restrict__ beta,
                  T* __restrict__ y, float* __restrict__ moments, i64 rows, int channels, i64 pitch, float eps) {
    await_predecessor();
    const HeldRows at;
    const float inverse = 1.0f / float(channels);
    RowPart<> part[PER];
    float mean[PER], rstd[PER];
#pragma unroll
    for (int j = 0; j < PER; ++j) part[j].fetch(x + (at.row(j) < rows ? at.row(j) : 0) * pitch, at.first, channels);
#pragma unroll
    for (int j = 0; j < PER; ++j) {
        const float pivot = part[j].head();
        float v[RUN], total = 0.0f, square = 0.0f;
        for_runs(at.first, channels, [&](int r, int i) {
            part[j].run(r, i, channels, pivot, v);
#pragma unroll
            for (int e = 0; e < RUN; ++e) total += v[e] - pivot;
        });
        mean[j] = fmaf(over_row(total), inverse, pivot);
        for_runs(at.first, channels, [&](int r, int i) {
            part[j].run(r, i, channels, mean[j], v);
            float sum = 0.0f;  // sums of runs, and then of these: long rows lose fewer digits
#pragma unroll
            for (int e = 0; e < RUN; ++e) sum = fmaf(v[e] - mean[j], v[e] - mean[j], sum);
            square += sum;
        });
        rstd[j] = rsqrtf(fmaf(over_row(square), inverse, eps));
        if (at.first == 0 && at.row(j) < rows) {
            moments[at.row(j)] = mean[j];
            moments[rows + at.row(j)] = rstd[j];
        }
    }
    for_runs(at.first, channels, [&](int r, int i) {
        float scale[RUN], shift[RUN];
        load_values(gamma, i, channels, 1.0f, scale);
        load_values(beta, i, channels, 0.0f, shift);
#pragma unroll
        for (int j = 0; j < PER; ++j) {
            if (at.row(j) >= rows) break;
            float v[RUN];
            part[j].run(r, i, channels, mean[j], v);
#pragma unroll
            for (int e = 0; e < RUN; ++e) v[e] = fmaf((v[e] - mean[j]) * rstd[j], scale[e], shift[e]);
            store_run(y + at.row(j) * channels, i, channels, v);
        }
    });
}

#else

extern "C" __global__ void __launch_bounds__(BLOCK, HELD > 1 ? 3 : 4)
layer_norm_backward_kernel(const T* __restrict__ dy, const T* __restrict__ x, const float* __restrict__ moments,
                           const float* __restrict__ gamma, const T* __restrict__ add, T* __restrict__ dx, i64 rows,
                           int channels, i64 dy_pitch, i64 x_pitch, i64 add_pitch) {
    await_predecessor();
    const HeldRows at;
    const float inverse = 1.0f / float(channels);
    RowPart<> gradient[PER], part[PER];
    float mean[PER], rstd[PER], first[PER] = {}, second[PER] = {};
#pragma unroll
    for (int j = 0; j < PER; ++j) {
        const i64 row = at.row(j) < rows ? at.row(j) : 0;
        gradient[j].fetch(dy + row * dy_pitch, at.first, channels);
        part[j].fetch(x + row * x_pitch, at.first, channels);
        mean[j] = moments[row];
        rstd[j] = moments[rows + row];
    }
    // g = dy * gamma and xhat of run r of row j.
    const auto read = [&](int j, int r, int i, const float (&scale)[RUN], float (&g)[RUN], float (&xhat)[RUN]) {
        gradient[j].run(r, i, channels, 0.0f, g);
        part[j].run(r, i, channels, mean[j], xhat);
#pragma unroll
        for (int e = 0; e < RUN; ++e) {
            g[e] = __fmul_rn(g[e], scale[e]);  // never half of a fused sum: all variants round alike
            xhat[e] = (xhat[e] - mean[j]) * rstd[j];
        }
    };
    for_runs(at.first, channels, [&](int r, int i) {
        float g[RUN], xhat[RUN], scale[RUN];
        load_values(gamma, i, channels, 1.0f, scale);
#pragma unroll
        for (int j = 0; j < PER; ++j) {
            read(j, r, i, scale, g, xhat);
#pragma unroll
            for (int e = 0; e < RUN; ++e) {
                first[j] += g[e];
                second[j] = fmaf(g[e], xhat[e], second[j]);
            }
        }
    });
#pragma unroll
    for (int j = 0; j < PER; ++j) {
        first[j] = over_row(first[j]) * inverse;
        second[j] = over_row(second[j]) * inverse;
    }
    for_runs(at.first, channels, [&](int r, int i) {
        float g[RUN], xhat[RUN], scale[RUN];
        load_values(gamma, i, channels, 1.0f, scale);
#pragma unroll
        for (int j = 0; j < PER; ++j) {
            if (at.row(j) >= rows) break;
            float more[RUN] = {};
            read(j, r, i, scale, g, xhat);
            if (ADD) load_run(add + at.row(j) * add_pitch, i, channels, 0.0f, more);
#pragma unroll
            for (int e = 0; e < RUN; ++e) g[e] = fmaf(fmaf(-xhat[e], second[j], g[e] - first[j]), rstd[j], more[e]);
            store_run(dx + at.row(j) * channels, i, channels, g);
        }
    });
}

#endif
