// What segmentation counts: the sums of a Dice loss, its gradient, and the confusion matrix.
//
//   p (rows, K) of T at a pitch: probabilities, or logits for the confusion matrix; labels (rows,) of LABEL; sums double[3K + 1]:
//   for each class the probability on its pixels, the probability on all valid pixels, its pixels; then the labels out of
//   range. partial (chunks, 3K + 1) double. counts u32[K*K + 1]: [label, prediction], then the labels out of range.
//
// dice_sums       Block: LANES classes by 256/LANES rows; grid (tiles of classes, chunks of rows, which follow from the sizes).
// dice_backward   -DCLASSES=K: short_rows.cuh, else row.cuh. With D = sums[1] + sums[2] + smooth and p the softmax of the logits:
//                 dL/dp_k = (-2 [k = label] + (2 sums[0] + smooth) / D) / (K D);  dlogits = p (dL/dp - sum of dL/dp p)
// confusion       likewise; whole numbers are added atomically, whose order changes nothing, in shared memory where they fit.
// Bytes: sums sizeof(T) per element, backward 2 sizeof(T), confusion sizeof(T).
#include "common.cuh"

DEVICE bool counts_as(i64 label, int classes, i64 ignore_index) {
    return label != ignore_index && label >= 0 && label < classes;
}

#if defined(SUMS)

extern "C" __global__ void __launch_bounds__(256)
dice_sums(const T* __restrict__ p, const LABEL* __restrict__ labels, double* __restrict__ partial, i64 rows, i64 chunk,
          int classes, i64 pitch, i64 ignore_index) {
    constexpr int DEEP = 256 / LANES;
    __shared__ double scratch[4][256];
    const int k = blockIdx.x * LANES + threadIdx.x % LANES;
    const i64 first = blockIdx.y * chunk, last = min(first + chunk, rows);
    float hit = 0.0f, mass = 0.0f, pixels = 0.0f, outside = 0.0f;
    for (i64 row = first + threadIdx.x / LANES; row < last; row += DEEP) {
        const i64 label = labels[row];
        if (!counts_as(label, classes, ignore_index)) {
            outside += label != ignore_index;
            continue;
        }
        const float v = k < classes ? to_float(p[row * pitch + k]) : 0.0f;
        mass += v;
        hit += label == k ? v : 0.0f;
        pixels += label == k;
    }
    const double mine[4] = {hit, mass, pixels, outside};
#pragma unroll
    for (int j = 0; j < 4; ++j) scratch[j][threadIdx.x] = mine[j];
    for (int half = 128; half >= LANES; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
#pragma unroll
            for (int j = 0; j < 4; ++j) scratch[j][threadIdx.x] += scratch[j][threadIdx.x + half];
    }
    __syncthreads();
    if (threadIdx.x >= LANES) return;
    double* to = partial + i64(blockIdx.y) * (3 * classes + 1);
    if (k < classes)
#pragma unroll
        for (int j = 0; j < 3; ++j) to[j * classes + k] = scratch[j][threadIdx.x];
    if (k == 0) to[3 * classes] = scratch[3][0];
}

#elif defined(WIDEN)

extern "C" __global__ void widen_counts(const u32* __restrict__ counts, double* __restrict__ out, int size) {
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i < size) out[i] = counts[i];
}

#elif defined(CLASSES)
#include "short_rows.cuh"

#if defined(CONFUSION)

// Shared memory: the block's counts, up to a multiple of 16 bytes, then STAGES tiles for each warp.
extern "C" __global__ void __launch_bounds__(BLOCK, CLASSES <= 32 ? 6 : 3)
confusion(const T* __restrict__ p, const LABEL* __restrict__ labels, u32* __restrict__ counts, i64 rows, int passes,
          i64 ignore_index) {
    constexpr int SIZE = CLASSES * CLASSES + 1;
    extern __shared__ uint4 memory[];
    u32* local = reinterpret_cast<u32*>(memory);
    T* tiles = reinterpret_cast<T*>(memory + ceil_div(SIZE, 4)) + threadIdx.x / 32 * (STAGES * TILE * CLASSES);
    const i64 begin = (i64(blockIdx.x) * passes * BLOCK + threadIdx.x / 32 * 32) * RUN;  // of the warp's first tile
    const auto start_tile = [&](int pass) {
        const i64 first = begin + i64(pass) * ROWS;
        if (pass < passes && first < rows)
            start_copy(tiles + pass % STAGES * (TILE * CLASSES), p + first * CLASSES,
                       int(min(i64(TILE), rows - first)) * CLASSES);
        commit_copies();
    };
    if (STAGES > 1) start_tile(0);
    for (int i = threadIdx.x; i < SIZE; i += BLOCK) local[i] = 0;
    __syncthreads();
    for (int pass = 0; pass < passes && begin + i64(pass) * ROWS < rows; ++pass) {
        const i64 row = begin + i64(pass) * ROWS + threadIdx.x % 32 * RUN;
        if (pass > 0) __syncwarp();
        start_tile(pass + STAGES - 1);
        await_copies<STAGES - 1>();
        if (row >= rows) continue;
        const Run run(tiles + (pass % STAGES * TILE + threadIdx.x % 32 * RUN) * CLASSES);
#pragma unroll
        for (int r = 0; r < RUN; ++r) {
            const i64 label = row + r < rows ? i64(labels[row + r]) : ignore_index;
            if (label == ignore_index) continue;
            const float peak = run.peak(r);
            int where = 0;
#pragma unroll
            for (int k = CLASSES - 1; k >= 0; --k)
                if (run.at(r, k) == peak || run.at(r, k) != run.at(r, k)) where = k;
            atomicAdd(local + (u64(label) < CLASSES ? int(label) * CLASSES + where : SIZE - 1), 1u);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < SIZE; i += BLOCK)
        if (local[i]) atomicAdd(counts + i, local[i]);
}

#else

extern "C" __global__ void __launch_bounds__(BLOCK, CLASSES <= 32 ? 6 : 2)
dice_backward(const T* __restrict__ p, const LABEL* __restrict__ labels, const double* __restrict__ sums,
              const float* __restrict__ scale, T* __restrict__ dlogits, i64 rows, i64 ignore_index, float smooth) {
    extern __shared__ uint4 memory[];
    __shared__ float slopes[CLASSES], less[CLASSES];  // dL/dp of a class, and by how much less it is on its own pixels
    T* tile = reinterpret_cast<T*>(memory) + threadIdx.x / 32 * (TILE * CLASSES);
    const i64 begin = (i64(blockIdx.x) * BLOCK + threadIdx.x / 32 * 32) * RUN;
    const int count = int(min(i64(TILE), max(rows - begin, i64(0)))), row = threadIdx.x % 32 * RUN;
    start_copy(tile, p + begin * CLASSES, count * CLASSES);
    commit_copies();
    const float factor = (scale ? scale[0] : 1.0f) / CLASSES;
    for (int k = threadIdx.x; k < CLASSES; k += BLOCK) {
        const float inverse = 1.0f / (float(sums[CLASSES + k] + sums[2 * CLASSES + k]) + smooth);
        slopes[k] = (2.0f * float(sums[k]) + smooth) * inverse * inverse * factor;
        less[k] = 2.0f * inverse * factor;
    }
    __syncthreads();
    await_copies<0>();
    if (row < count) {
        T* x = tile + row * CLASSES;
        const Run run(x);
        int label[RUN];  // -1 where nothing counts
        float own[RUN], total[RUN];
#pragma unroll
        for (int r = 0; r < RUN; ++r) {
            const i64 given = row + r < count ? i64(labels[begin + row + r]) : ignore_index;
            label[r] = counts_as(given, CLASSES, ignore_index) ? int(given) : -1;
            own[r] = label[r] >= 0 ? less[label[r]] : 0.0f;
            total[r] = 0.0f;
#pragma unroll
            for (int k = 0; k < CLASSES; ++k)
                total[r] = fmaf(slopes[k] - (k == label[r] ? own[r] : 0.0f), run.at(r, k), total[r]);
        }
#pragma unroll
        for (int i = 0; i < RUN * CLASSES; i += READ) {
            float part[READ];
#pragma unroll
            for (int e = 0; e < READ; ++e) {
                const int r = (i + e) / CLASSES, k = (i + e) % CLASSES;
                const float slope = slopes[k] - (k == label[r] ? own[r] : 0.0f);
                part[e] = label[r] < 0 ? 0.0f : run.at(r, k) * (slope - total[r]);
            }
            store(x + i, part);
        }
    }
    write_back(dlogits + begin * CLASSES, tile, count * CLASSES);
}

#endif
#else
#include "row.cuh"

#if defined(CONFUSION)

extern "C" __global__ void __launch_bounds__(BLOCK, 4)
confusion(const T* __restrict__ p, const LABEL* __restrict__ labels, u32* __restrict__ counts, i64 rows, int channels,
          i64 pitch, int passes, i64 ignore_index) {
    extern __shared__ u32 local[];
    const int size = channels * channels + 1;
    if (SHARED) {
        for (int i = threadIdx.x; i < size; i += BLOCK) local[i] = 0;
        __syncthreads();
    }
    u32* own = SHARED ? local : counts;
    const float least = __uint_as_float(0xff800000u);
    for (int pass = 0; pass < passes; ++pass) {
        const i64 row = (i64(blockIdx.x) * passes + pass) * ROWS + threadIdx.x / LANES;
        const int first = threadIdx.x % LANES * RUN;
        const bool inside = row < rows;
        const T* x = p + (inside ? row : 0) * pitch;
        float v[RUN], peak = least, where = 1e9f;
        for (int i = first; i < channels; i += LANES * RUN) {
            load_run(x, i, channels, least, v);
#pragma unroll
            for (int e = 0; e < RUN; ++e) peak = larger(peak, v[e]);
        }
        peak = over_row<true>(peak);
        for (int i = first; i < channels; i += LANES * RUN) {
            load_run(x, i, channels, least, v);
#pragma unroll
            for (int e = RUN - 1; e >= 0; --e)
                if (i + e < channels && (v[e] == peak || v[e] != v[e])) where = fminf(where, float(i + e));
        }
        where = -over_row<true>(-where);
        if (!inside || first > 0) continue;
        const i64 label = labels[row];
        if (label == ignore_index) continue;
        const bool valid = counts_as(label, channels, ignore_index) && where < float(channels);
        atomicAdd(own + (valid ? int(label) * channels + int(where) : size - 1), 1u);
    }
    if (!SHARED) return;
    __syncthreads();
    for (int i = threadIdx.x; i < size; i += BLOCK)
        if (local[i]) atomicAdd(counts + i, local[i]);
}

#else

extern "C" __global__ void __launch_bounds__(BLOCK, 4)
dice_backward(const T* __restrict__ p, const LABEL* __restrict__ labels, const double* __restrict__ sums,
              const float* __restrict__ scale, T* __restrict__ dlogits, i64 rows, int channels, i64 pitch,
              i64 ignore_index, float smooth) {
    const RowShare at(rows);
    const T* x = p + at.row * pitch;
    const i64 label = labels[at.row];
    const bool valid = counts_as(label, channels, ignore_index);
    const float factor = valid ? (scale ? scale[0] : 1.0f) / channels : 0.0f;
    const auto slope = [&](int k) {
        const float inverse = 1.0f / (float(sums[channels + k] + sums[2 * channels + k]) + smooth);
        return ((2.0f * float(sums[k]) + smooth) * inverse - (k == label ? 2.0f : 0.0f)) * inverse * factor;
    };
    float v[RUN], total = 0.0f;
    for (int i = at.first; i < channels; i += RowShare::STEP) {
        load_run(x, i, channels, 0.0f, v);
#pragma unroll
        for (int e = 0; e < RUN; ++e)
            if (i + e < channels) total = fmaf(slope(i + e), v[e], total);
    }
    total = over_row(total);
    if (!at.inside) return;
    for (int i = at.first; i < channels; i += RowShare::STEP) {
        load_run(x, i, channels, 0.0f, v);
#pragma unroll
        for (int e = 0; e < RUN; ++e)
            if (i + e < channels) v[e] *= slope(i + e) - total;
        store_run(dlogits + at.row * channels, i, channels, v);
    }
}

#endif
#endif
