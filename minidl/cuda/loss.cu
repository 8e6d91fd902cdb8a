// Softmax cross entropy over rows of K logits, and its gradient.
//
//   logits (rows, K) at `pitch` elements per row; labels (rows,) of type LABEL; lse (rows,) float32: log of the sum of
//   exponentials; dlogits (rows, K) dense; totals float64[4]: sum of -log p[label], valid labels, labels that are the
//   first largest logit of their row, labels out of range; partial (blocks, 4) float64: totals of each block's fixed
//   run of rows.
//
// Sums of a row are float32 around its running maximum (Milakov & Gimelshein, "Online normalizer calculation for
// softmax", 2018), so a row is read once. Rows are summed in float64: within a block by a fixed tree, then over blocks.
//
// -DCLASSES=K  short rows that are not 16-byte aligned (segmentation with 21 classes): short_rows.cuh; the forward pass
//              with STAGES tiles for a warp. Some 260 instructions per row of 21 classes of bfloat16: with 2 M rows two
//              thirds of the time of the bytes.
// -DLANES=L    other rows: L neighbouring threads (1 .. 32 of a warp, or the block) share a row in vectors of VEC
//              elements, STEPS at a time. Vectors lie on absolute addresses: where a row does not start on one
//              (ALIGNED = 0), its first and last are read and written element by element.
// -DCOUNT=1    no logits: counts the labels that count into totals[1], for a step that is cut into micro-batches.
//
// bytes per row: forward K * sizeof(T) + label + 4, backward 2 * K * sizeof(T) + label + 4; about 6 FLOP per logit.
#include "common.cuh"
#include "exponential.cuh"

#ifdef CLASSES
#include "short_rows.cuh"
#else
#define BLOCK 256
#endif
#define NONE 0x7fffffff

struct Totals {
    double loss = 0.0;
    int valid = 0, correct = 0, outside = 0;
};

// Writes the block's totals: lanes by a tree, then warps in order, the same whatever the device.
DEVICE void write_partial(const Totals& mine, double* __restrict__ partial) {
    __shared__ double scratch[4][BLOCK / 32];
    double sums[4] = {mine.loss, double(mine.valid), double(mine.correct), double(mine.outside)};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        sums[j] = warp_sum(sums[j]);
        if (threadIdx.x % 32 == 0) scratch[j][threadIdx.x / 32] = sums[j];
    }
    __syncthreads();
    if (threadIdx.x >= 4) return;
    double total = 0.0;
    for (int warp = 0; warp < BLOCK / 32; ++warp) total += scratch[threadIdx.x][warp];
    partial[4 * i64(blockIdx.x) + threadIdx.x] = total;
}

// What a row that counts has its gradient multiplied by: scale / number of valid labels, 0 where nothing counts.
DEVICE float gradient_factor(const double* totals, const float* scale) {
    return totals[1] == 0.0 ? 0.0f : (scale ? scale[0] : 1.0f) / float(totals[1]);
}

DEVICE bool counts(i64 label, int classes, i64 ignore_index) {
    return label != ignore_index && label >= 0 && label < classes;
}

#ifdef CLASSES
// ------------------------------------------------------------------------------------------------- a thread per row

extern "C" __global__ void __launch_bounds__(BLOCK, CLASSES <= 32 ? 8 : 3)
softmax_cross_entropy(const T* __restrict__ logits, const LABEL* __restrict__ labels, float* __restrict__ lse,
                      double* __restrict__ partial, i64 rows, int passes, i64 ignore_index) {
    extern __shared__ uint4 memory[];
    // STAGES tiles for each warp: with two, the next rows arrive during the work on these.
    T* tiles = reinterpret_cast<T*>(memory) + threadIdx.x / 32 * (STAGES * TILE * CLASSES);
    const i64 begin = (i64(blockIdx.x) * passes * BLOCK + threadIdx.x / 32 * 32) * RUN;  // of the warp's first tile
    const auto start_tile = [&](int pass) {
        const i64 first = begin + i64(pass) * ROWS;
        if (pass < passes && first < rows)
            start_copy(tiles + pass % STAGES * (TILE * CLASSES), logits + first * CLASSES,
                       int(min(i64(TILE), rows - first)) * CLASSES);
        commit_copies();
    };
    Totals mine;
    if (STAGES > 1) start_tile(0);
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
            float sum = 0.0f;
#pragma unroll
            for (int k = 0; k < CLASSES; ++k) sum += exponential(run.at(r, k) - peak);
            const float log_sum = logf(sum);
            log_sums[r] = peak + log_sum;
            const bool inside = u64(label[r]) < CLASSES, ignored = label[r] == ignore_index;
            const int target = inside ? int(label[r]) : 0;
            const T own = x[r * CLASSES + target];
            const u32 wanted = in_every_lane(own);
            const Marks equal = run.marks(r, [&](u32 word) { return lane_equal(word, wanted); });
            const double term = double(log_sum) + double(peak - to_float(own));
            mine.loss += inside && !ignored ? term : 0.0;
            mine.valid += inside && !ignored;
            mine.correct += inside && !ignored && to_float(own) == peak && equal.before(target) == 0;
            mine.outside += !inside && !ignored;
        }
        if (row + RUN <= rows) {
            store(lse + row, log_sums);
        } else {
            lse[row] = log_sums[0];
        }
    }
    write_partial(mine, partial);
}

extern "C" __global__ void __launch_bounds__(BLOCK, CLASSES <= 32 ? 8 : 3)
softmax_cross_entropy_backward(const T* __restrict__ logits, const LABEL* __restrict__ labels,
                               const float* __restrict__ lse, const double* __restrict__ totals,
                               const float* __restrict__ scale, T* __restrict__ dlogits, i64 rows, i64 ignore_index) {
    extern __shared__ uint4 memory[];
    T* tile = reinterpret_cast<T*>(memory) + threadIdx.x / 32 * (TILE * CLASSES);
    const i64 begin = (i64(blockIdx.x) * BLOCK + threadIdx.x / 32 * 32) * RUN;
    const int count = int(min(i64(TILE), max(rows - begin, i64(0)))), row = threadIdx.x % 32 * RUN;
    start_copy(tile, logits + begin * CLASSES, count * CLASSES);
    commit_copies();
    i64 label[RUN];
    float norm[RUN];
#pragma unroll
    for (int r = 0; r < RUN; ++r) {
        const bool inside = row + r < count;
        label[r] = inside ? i64(labels[begin + row + r]) : ignore_index;
        norm[r] = inside ? lse[begin + row + r] : 0.0f;
    }
    await_copies<0>();
    if (row < count) {
        const float valid_factor = gradient_factor(totals, scale);
        float factor[RUN];
#pragma unroll
        for (int r = 0; r < RUN; ++r) factor[r] = counts(label[r], CLASSES, ignore_index) ? valid_factor : 0.0f;
        T* x = tile + row * CLASSES;
        const Run run(x);
#pragma unroll
        for (int i = 0; i < RUN * CLASSES; i += READ) {
            float part[READ];
#pragma unroll
            for (int e = 0; e < READ; ++e) {
                const int r = (i + e) / CLASSES, k = (i + e) % CLASSES;
                const float p = exponential(run.at(r, k) - norm[r]);
                part[e] = factor[r] == 0.0f ? 0.0f : (k == int(label[r]) ? p - 1.0f : p) * factor[r];
            }
            store(x + i, part);
        }
    }
    write_back(dlogits + begin * CLASSES, tile, count * CLASSES);
}

#elif defined(LANES)
// ------------------------------------------------------------------------------------------------ many threads per row

static_assert(LANES <= 32 || LANES == BLOCK, "a row belongs to part of a warp, or to a block");
constexpr int ROWS = BLOCK / LANES;  // rows that a block works on at a time

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

// Part of a row: its largest logit, the sum of exponentials around it, and where the first vector that has it begins.
struct Running {
    float peak = -3.402823466e38f;  // finite, so that peak - peak is 0 in a part without elements
    float sum = 0.0f;
    int where = NONE;

    __device__ __forceinline__ void merge(float other_peak, float other_sum, int other_where) {
        if (other_peak > peak || (other_peak == peak && other_where < where)) where = other_where;
        const float highest = fmaxf(peak, other_peak);
        sum = sum * exponential(peak - highest) + other_sum * exponential(other_peak - highest);
        peak = highest;
    }
};

// Thread lane 0 of the row gets the whole row.
DEVICE void merge_lanes(Running& mine) {
#pragma unroll
    for (int offset = min(LANES, 32) / 2; offset > 0; offset /= 2)
        mine.merge(__shfl_xor_sync(0xffffffffu, mine.peak, offset), __shfl_xor_sync(0xffffffffu, mine.sum, offset),
                   __shfl_xor_sync(0xffffffffu, mine.where, offset));
    if (LANES <= 32) return;
    __shared__ float peaks[BLOCK / 32], sums[BLOCK / 32];
    __shared__ int wheres[BLOCK / 32];
    const int own = threadIdx.x / 32;
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        peaks[own] = mine.peak;
        sums[own] = mine.sum;
        wheres[own] = mine.where;
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int warp = 1; warp < BLOCK / 32; ++warp) mine.merge(peaks[warp], sums[warp], wheres[warp]);
}

// Whether `label` is the first element equal to the row's largest, which first occurs in the vector at `where`.
DEVICE bool is_first_largest(const T* __restrict__ x, int label, float value, const Running& row) {
    if (value != row.peak || label < row.where || label >= row.where + VEC) return false;
    for (int k = max(row.where, 0); k < label; ++k)
        if (to_float(x[k]) == row.peak) return false;
    return true;
}

extern "C" __global__ void __launch_bounds__(BLOCK, ALIGNED ? 4 : 3)
softmax_cross_entropy(const T* __restrict__ logits, const LABEL* __restrict__ labels, float* __restrict__ lse,
                      double* __restrict__ partial, i64 rows, int classes, i64 pitch, int passes, i64 ignore_index) {
    const int lane = threadIdx.x % LANES;
    Totals mine;
    for (int pass = 0; pass < passes; ++pass) {
        const i64 row = (i64(blockIdx.x) * passes + pass) * ROWS + threadIdx.x / LANES;
        const bool inside = row < rows;
        const T* x = logits + (inside ? row : 0) * pitch;
        i64 label = ignore_index;
        float value = 0.0f;
        if (inside && lane == 0) {
            label = labels[row];
            if (label >= 0 && label < classes) value = to_float(x[label]);
        }
        const int shift = misalignment(x), end = inside ? classes : -shift;
        Running run;
        for (int first = lane * VEC - shift; first < end; first += STEPS * LANES * VEC) {
            Raw<T, VEC> raw[STEPS];
#pragma unroll
            for (int u = 0; u < STEPS; ++u) raw[u] = load_vector(x, first + u * (LANES * VEC), classes);
            const float before = run.peak;
#pragma unroll
            for (int u = 0; u < STEPS; ++u) {
                float v[VEC];
                unpack(raw[u], v);
                float highest = v[0];
#pragma unroll
                for (int e = 1; e < VEC; ++e) highest = fmaxf(highest, v[e]);
                if (highest > run.peak) {
                    run.peak = highest;
                    run.where = first + u * (LANES * VEC);
                }
            }
            run.sum *= exponential(before - run.peak);
#pragma unroll
            for (int u = 0; u < STEPS; ++u) {
                float v[VEC];
                unpack(raw[u], v);
#pragma unroll
                for (int e = 0; e < VEC; ++e) run.sum += exponential(v[e] - run.peak);
            }
        }
        merge_lanes(run);
        if (!inside || lane > 0) continue;
        const float log_sum = logf(run.sum);
        lse[row] = run.peak + log_sum;
        if (label == ignore_index) continue;
        if (label < 0 || label >= classes) {
            ++mine.outside;
            continue;
        }
        mine.loss += double(log_sum) + double(run.peak - value);
        ++mine.valid;
        mine.correct += is_first_largest(x, int(label), value, run);
    }
    __syncthreads();
    write_partial(mine, partial);
}

extern "C" __global__ void __launch_bounds__(BLOCK, ALIGNED ? 4 : 3)
softmax_cross_entropy_backward(const T* __restrict__ logits, const LABEL* __restrict__ labels,
                               const float* __restrict__ lse, const double* __restrict__ totals,
                               const float* __restrict__ scale, T* __restrict__ dlogits, i64 rows, int classes,
                               i64 pitch, i64 ignore_index) {
    const i64 row = i64(blockIdx.x) * ROWS + threadIdx.x / LANES;
    if (row >= rows) return;
    const T* x = logits + row * pitch;
    T* dx = dlogits + row * classes;
    const i64 label = labels[row];
    const float factor = counts(label, classes, ignore_index) ? gradient_factor(totals, scale) : 0.0f;
    const float norm = lse[row];
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
                const float p = exponential(v[e] - norm);
                v[e] = factor == 0.0f ? 0.0f : (begin + e == label ? p - 1.0f : p) * factor;
            }
            if (begin >= 0 && begin + VEC <= classes) {
                store(dx + begin, v);
            } else {
#pragma unroll
                for (int e = 0; e < VEC; ++e)
                    if (begin + e >= 0 && begin + e < classes) dx[begin + e] = from_float<T>(v[e]);
            }
        }
    }
}

#elif defined(COUNT)
// ------------------------------------------------------------------------------------------------------------- labels

// Threads of all blocks take turns, so neighbours read neighbours.
extern "C" __global__ void __launch_bounds__(BLOCK)
count_labels(const LABEL* __restrict__ labels, double* __restrict__ partial, i64 count, int classes, i64 ignore_index) {
    Totals mine;
    for (i64 i = i64(blockIdx.x) * BLOCK + threadIdx.x; i < count; i += i64(gridDim.x) * BLOCK)
        mine.valid += counts(i64(labels[i]), classes, ignore_index);
    write_partial(mine, partial);
}

#else
// ------------------------------------------------------------------------------------------------------------- totals

#define THREADS 128

// One block adds the blocks' totals: thread t column t % 4 of partials t / 4, t / 4 + 32, ..., then a tree.
extern "C" __global__ void __launch_bounds__(THREADS)
softmax_cross_entropy_totals(const double* __restrict__ partial, double* __restrict__ totals, int blocks) {
    __shared__ double scratch[4][THREADS / 32];
    const int lane = threadIdx.x % 32, column = lane % 4;
    double mine = 0.0;
#pragma unroll 16
    for (int i = threadIdx.x / 4; i < blocks; i += THREADS / 4) mine += partial[4 * i + column];
#pragma unroll
    for (int offset = 16; offset >= 4; offset /= 2) mine += __shfl_xor_sync(0xffffffffu, mine, offset);
    if (lane < 4) scratch[column][threadIdx.x / 32] = mine;
    __syncthreads();
    if (threadIdx.x >= 4) return;
    double total = 0.0;
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; ++warp) total += scratch[threadIdx.x][warp];
    totals[threadIdx.x] = total;
}

#endif
