// What segmentation counts: the sums of a Dice loss, its gradient, and the confusion matrix.
//
//   p (rows, K) of T at a pitch: probabilities, or logits for the confusion matrix; labels (rows,) of LABEL; sums
//   double[3K + 1]: for each class the probability on its pixels, the probability on all valid pixels, its pixels; then
//   the labels out of range. partial (chunks, 3K + 1) double. found (blocks or 1, K*K + 1) u32: [label, prediction],
//   then the labels out of range.
//
// dice_sums       -DCLASSES=K: short_rows.cuh, also where rows are aligned: a thread that has a whole row needs a third
//                 of the instructions of four that share it; else a block of LANES * VEC classes by 256/LANES rows,
//                 grid (tiles of classes, chunks of rows, which follow from the sizes).
// dice_backward   -DCLASSES=K: short_rows.cuh, else row.cuh. With D = sums[1] + sums[2] + smooth and p the softmax of
//                 the logits:
//                 dL/dp_k = (-2 [k = label] + (2 sums[0] + smooth) / D) / (K D);  dlogits = p (dL/dp - sum of dL/dp p)
// confusion       likewise; whole numbers are added atomically, whose order changes nothing, in shared memory where
//                 they fit.
// Bytes: sums sizeof(T) per element, backward 2 sizeof(T), confusion sizeof(T).
#include "common.cuh"
#include "loss.cuh"

#if defined(CLASSES)
#include "short_rows.cuh"

#if defined(SUMS)

// A thread's sums by label lie in shared memory, where no other thread's are, and the block's counts of pixels behind
// them; then the tiles.
extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
dice_sums(const T* __restrict__ p, const LABEL* __restrict__ labels, double* __restrict__ partial, i64 rows, int passes,
          i64 ignore_index) {
    await_predecessor();
    constexpr int IN_FRONT = CLASSES * BLOCK / 4 + (CLASSES + 4) / 4;
    extern __shared__ uint4 memory[];
    float* hits = reinterpret_cast<float*>(memory) + threadIdx.x;  // of class k at k * BLOCK
    u32* pixels = reinterpret_cast<u32*>(memory) + CLASSES * BLOCK;  // and in the last those that do not count
    float mass[CLASSES] = {};
    int outside = 0;
#pragma unroll
    for (int k = 0; k < CLASSES; ++k) hits[k * BLOCK] = 0.0f;
    if (threadIdx.x <= CLASSES) pixels[threadIdx.x] = 0;
    __syncthreads();
    for_labelled_rows(memory + IN_FRONT, p, labels, rows, passes, ignore_index,
                      [&](i64, int, const T* tile, int at, const i64(&label)[RUN]) {
        Run run(tile, at);
        u32 keep[RUN];
#pragma unroll
        for (int r = 0; r < RUN; ++r) {
            const bool valid = counts(label[r], CLASSES, ignore_index);
            const int own = valid ? int(label[r]) : 0;
            keep[r] = valid ? ~0u : 0u;
            outside += !valid && label[r] != ignore_index;
            hits[own * BLOCK] += valid ? to_float(tile[element((at + r) * CLASSES + own)]) : 0.0f;
            atomicAdd(pixels + (valid ? own : CLASSES), 1u);
        }
        u32 any = 0u, all = ~0u;
#pragma unroll
        for (int r = 0; r < RUN; ++r) any |= keep[r], all &= keep[r];
        if (!any) return;
        if (RUN > 1 && !all) run.clear(keep);
#pragma unroll
        for (int r = 0; r < RUN; ++r)
#pragma unroll
            for (int k = 0; k < CLASSES; ++k) mass[k] += run.at(r, k);
    });

    // A warp adds what its own threads found, a lane for each class; all lanes read other banks. Then the warps in
    // order.
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    double* totals = reinterpret_cast<double*>(of_warp(memory + IN_FRONT));  // hits, masses, outside
    const auto sum_columns = [&](int columns, int place) {
        __syncwarp();
        for (int k = lane; k < columns; k += 32) {
            double sum = 0.0;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float4 v = reinterpret_cast<const float4*>(memory)[(k * BLOCK + warp * 32) / 4 + (i + lane) % 8];
                sum += double((v.x + v.y) + (v.z + v.w));
            }
            totals[place + k] = sum;
        }
        __syncwarp();
    };
    sum_columns(CLASSES, 0);
#pragma unroll
    for (int k = 0; k < CLASSES; ++k) hits[k * BLOCK] = mass[k];
    sum_columns(CLASSES, CLASSES);
    outside = warp_sum(outside);
    if (lane == 0) totals[2 * CLASSES] = outside;
    __syncthreads();
    for (int k = threadIdx.x; k < 3 * CLASSES + 1; k += BLOCK) {
        const bool counted = k / CLASSES == 2;
        double sum = counted ? double(pixels[k - 2 * CLASSES]) : 0.0;
#pragma unroll
        for (int w = 0; w < BLOCK / 32; ++w) {
            const double* const of = reinterpret_cast<const double*>(of_warp(memory + IN_FRONT, w));
            if (!counted) sum += of[k < 2 * CLASSES ? k : 2 * CLASSES];
        }
        partial[i64(blockIdx.x) * (3 * CLASSES + 1) + k] = sum;
    }
}

#elif defined(CONFUSION)

DEVICE bool is_number(T x) { return to_float(x) == to_float(x); }

// Shared memory: the block's counts, up to a multiple of 16 bytes, then the tiles.
extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
confusion(const T* __restrict__ p, const LABEL* __restrict__ labels, u32* __restrict__ found, i64 rows, int passes,
          i64 ignore_index) {
    await_predecessor();
    constexpr int SIZE = CLASSES * CLASSES + 1;
    extern __shared__ uint4 memory[];
    u32* local = reinterpret_cast<u32*>(memory);
    for (int i = threadIdx.x; i <= SIZE; i += BLOCK) local[i] = 0;  // the last: of rows that do not count
    __syncthreads();
    for_labelled_rows(memory + SIZE / 4 + 1, p, labels, rows, passes, ignore_index,
                      [&](i64, int, const T* tile, int at, const i64(&label)[RUN]) {
        const Run run(tile, at);
        int where[RUN];
        bool known = true;
#pragma unroll
        for (int r = 0; r < RUN; ++r) {
            const float peak = run.peak(r);
            where[r] = run.first_equal(r, in_every_lane(from_float<T>(peak)));
            known &= peak == peak;
        }
        if (!known)  // the first NaN
#pragma unroll
            for (int r = 0; r < RUN; ++r)
#pragma unroll 1
                for (int k = CLASSES - 1; k >= 0; --k)
                    if (!is_number(tile[element((at + r) * CLASSES + k)])) where[r] = k;
#pragma unroll
        for (int r = 0; r < RUN; ++r) {
            const int cell = u64(label[r]) < CLASSES ? int(label[r]) * CLASSES + where[r] : SIZE - 1;
            atomicAdd(local + (label[r] == ignore_index ? SIZE : cell), 1u);
        }
    });
    __syncthreads();
    for (int i = threadIdx.x; i < SIZE; i += BLOCK) found[i64(blockIdx.x) * SIZE + i] = local[i];
}

#else

extern "C" __global__ void __launch_bounds__(BLOCK, CLASSES <= 32 ? 6 : 2)
dice_backward(const T* __restrict__ p, const LABEL* __restrict__ labels, const double* __restrict__ sums,
              const float* __restrict__ scale, T* __restrict__ dlogits, i64 rows, i64 ignore_index, float smooth) {
    await_predecessor();
    extern __shared__ uint4 memory[];
    __shared__ float slopes[CLASSES], less[CLASSES];  // dL/dp of a class, and by how much less it is on its own pixels
    const Rewrite at(memory, p, rows);
    i64 given[RUNS][RUN];
    at.fetch(labels, ignore_index, given);
    const float factor = (scale ? scale[0] : 1.0f) / CLASSES;
    for (int k = threadIdx.x; k < CLASSES; k += BLOCK) {
        const float inverse = 1.0f / (float(sums[CLASSES + k] + sums[2 * CLASSES + k]) + smooth);
        slopes[k] = (2.0f * float(sums[k]) + smooth) * inverse * inverse * factor;
        less[k] = 2.0f * inverse * factor;
    }
    await_copies<0>();
    __syncthreads();
#pragma unroll
    for (int part = 0; part < RUNS; ++part) {
        if (at.row(part) >= at.count) break;
        const Run run(at.tile, at.row(part));
        int label[RUN];  // -1 where nothing counts
        float own[RUN], total[RUN];
#pragma unroll
        for (int r = 0; r < RUN; ++r) {
            label[r] = counts(given[part][r], CLASSES, ignore_index) ? int(given[part][r]) : -1;
            own[r] = label[r] >= 0 ? less[label[r]] : 0.0f;
            total[r] = 0.0f;
#pragma unroll
            for (int k = 0; k < CLASSES; ++k)
                total[r] = fmaf(slopes[k] - (k == label[r] ? own[r] : 0.0f), run.at(r, k), total[r]);
        }
        at.change(part, [&](int r, int k) {
            const float slope = slopes[k] - (k == label[r] ? own[r] : 0.0f);
            return label[r] < 0 ? 0.0f : run.at(r, k) * (slope - total[r]);
        });
    }
    at.finish(dlogits);
}

#endif
#elif defined(SUMS)

// LANES threads of VEC classes share a row, 256/LANES rows a step.
extern "C" __global__ void __launch_bounds__(256)
dice_sums(const T* __restrict__ p, const LABEL* __restrict__ labels, double* __restrict__ partial, i64 rows, i64 chunk,
          int classes, i64 pitch, i64 ignore_index) {
    await_predecessor();
    constexpr int DEEP = 256 / LANES, STEPS = 4;
    __shared__ double scratch[4][256];
    const int k = (blockIdx.x * LANES + threadIdx.x % LANES) * VEC;
    const i64 first = blockIdx.y * chunk, last = min(first + chunk, rows);
    float hit[VEC] = {}, mass[VEC] = {}, pixels[VEC] = {}, outside = 0.0f;
    for (i64 group = first + threadIdx.x / LANES; group < last; group += STEPS * DEEP) {
        i64 label[STEPS];
        Raw<T, VEC> raw[STEPS];
#pragma unroll
        for (int u = 0; u < STEPS; ++u) {
            const i64 row = group + u * DEEP;
            label[u] = row < last ? i64(labels[row]) : ignore_index;
            if (row < last && k < classes) raw[u] = load_raw<VEC>(p + row * pitch + k);
        }
#pragma unroll
        for (int u = 0; u < STEPS; ++u) {
            const bool valid = counts(label[u], classes, ignore_index);
            outside += !valid && label[u] != ignore_index ? 1.0f : 0.0f;
            if (!valid || k >= classes) continue;
            float v[VEC];
            unpack(raw[u], v);
#pragma unroll
            for (int e = 0; e < VEC; ++e) {
                mass[e] += v[e];
                hit[e] += int(label[u]) == k + e ? v[e] : 0.0f;
                pixels[e] += int(label[u]) == k + e ? 1.0f : 0.0f;
            }
        }
    }
    double* to = partial + i64(blockIdx.y) * (3 * classes + 1);
#pragma unroll
    for (int e = 0; e < VEC; ++e) {
        const double mine[4] = {hit[e], mass[e], pixels[e], outside};
        __syncthreads();
#pragma unroll
        for (int j = 0; j < 4; ++j) scratch[j][threadIdx.x] = mine[j];
        for (int half = 128; half >= LANES; half /= 2) {
            __syncthreads();
            if (threadIdx.x < half)
#pragma unroll
                for (int j = 0; j < 4; ++j) scratch[j][threadIdx.x] += scratch[j][threadIdx.x + half];
        }
        if (threadIdx.x >= LANES || k >= classes) continue;
#pragma unroll
        for (int j = 0; j < 3; ++j) to[j * classes + k + e] = scratch[j][threadIdx.x];
        if (k + e == 0) to[3 * classes] = scratch[3][0];
    }
}

#else
#include "row.cuh"

// work(row, first, part, label) for this thread's part of each row of the block's `passes` groups, which begins at
// element `first`; all threads of a row take part, also of those behind the last.
template <class F>
DEVICE void for_labelled_parts(const T* __restrict__ p, const LABEL* __restrict__ labels, i64 rows, int channels,
                               i64 pitch, int passes, i64 ignore_index, F work) {
    const HeldRows at;
    for (int pass = 0; pass < passes; ++pass) {
        const i64 begin = (i64(blockIdx.x) * (passes - 1) + pass) * (PER * ROWS);  // before this block's own rows
        RowPart<> part[PER];
        i64 label[PER];
#pragma unroll
        for (int j = 0; j < PER; ++j) {
            const i64 row = begin + at.row(j);
            part[j].fetch(p + (row < rows ? row : 0) * pitch, at.first, channels);
            label[j] = row < rows ? i64(labels[row]) : ignore_index;
        }
#pragma unroll
        for (int j = 0; j < PER; ++j) work(begin + at.row(j), at.first, part[j], label[j]);
    }
}

#if defined(CONFUSION)

extern "C" __global__ void __launch_bounds__(BLOCK, 4)
confusion(const T* __restrict__ p, const LABEL* __restrict__ labels, u32* __restrict__ found, i64 rows, int channels,
          i64 pitch, int passes, i64 ignore_index) {
    await_predecessor();
    extern __shared__ u32 local[];
    const int size = channels * channels + 1;
    if (SHARED) {
        for (int i = threadIdx.x; i < size; i += BLOCK) local[i] = 0;
        __syncthreads();
    }
    u32* own = SHARED ? local : found;
    const float least = __uint_as_float(0xff800000u);
    for_labelled_parts(p, labels, rows, channels, pitch, passes, ignore_index,
                       [&](i64, int first, const RowPart<>& part, i64 label) {
        float v[RUN], peak = least, where = 1e9f;
        for_runs(first, channels, [&](int r, int i) {
            part.run(r, i, channels, least, v);
#pragma unroll
            for (int e = 0; e < RUN; ++e) peak = larger(peak, v[e]);
        });
        peak = over_row<true>(peak);
        for_runs(first, channels, [&](int r, int i) {
            part.run(r, i, channels, least, v);
#pragma unroll
            for (int e = RUN - 1; e >= 0; --e)
                if (within(i + e, channels) && (v[e] == peak || v[e] != v[e])) where = fminf(where, float(i + e));
        });
        where = -over_row<true>(-where);
        if (first > 0 || label == ignore_index) return;
        const bool valid = counts(label, channels, ignore_index) && where < float(channels);
        atomicAdd(own + (valid ? int(label) * channels + int(where) : size - 1), 1u);
    });
    if (!SHARED) return;
    __syncthreads();
    for (int i = threadIdx.x; i < size; i += BLOCK) found[i64(blockIdx.x) * size + i] = local[i];
}

#else

extern "C" __global__ void __launch_bounds__(BLOCK, 4)
dice_backward(const T* __restrict__ p, const LABEL* __restrict__ labels, const double* __restrict__ sums,
              const float* __restrict__ scale, T* __restrict__ dlogits, i64 rows, int channels, i64 pitch, int passes,
              i64 ignore_index, float smooth) {
    await_predecessor();
    extern __shared__ float2 slopes[];  // dL/dp of a class, and by how much less it is on its own pixels
    const float factor = (scale ? scale[0] : 1.0f) / channels;
    const auto slope = [&](int k) {
        const float inverse = 1.0f / (float(sums[channels + k] + sums[2 * channels + k]) + smooth);
        return make_float2((2.0f * float(sums[k]) + smooth) * inverse * inverse * factor, 2.0f * inverse * factor);
    };
    if (SHARED) {
        for (int k = threadIdx.x; k < channels; k += BLOCK) slopes[k] = slope(k);
        __syncthreads();
    }
    for_labelled_parts(p, labels, rows, channels, pitch, passes, ignore_index,
                       [&](i64 row, int first, const RowPart<>& part, i64 label) {
        const bool valid = counts(label, channels, ignore_index);
        const auto of = [&](int k) {
            const float2 both = SHARED ? slopes[k] : slope(k);
            return both.x - (k == int(label) ? both.y : 0.0f);
        };
        float v[RUN], total = 0.0f;
        for_runs(first, channels, [&](int r, int i) {
            part.run(r, i, channels, 0.0f, v);
#pragma unroll
            for (int e = 0; e < RUN; ++e)
                if (within(i + e, channels)) total = fmaf(of(i + e), v[e], total);
        });
        total = over_row(total);
        if (row >= rows) return;
        for_runs(first, channels, [&](int r, int i) {
            part.run(r, i, channels, 0.0f, v);
#pragma unroll
            for (int e = 0; e < RUN; ++e)
                if (within(i + e, channels)) v[e] = valid ? v[e] * (of(i + e) - total) : 0.0f;
            store_run(dlogits + row * channels, i, channels, v);
        });
    });
}

#endif
#endif
