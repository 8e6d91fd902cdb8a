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
// -DCLASSES=K  short rows that are not 16-byte aligned (segmentation with 21 classes). The rows of a block are one run
//              of memory: it is copied through shared memory in 16-byte vectors, then each thread takes one row. With
//              STAGES = 2 the forward pass copies the next rows while it works on these.
// -DLANES=L    other rows: L neighbouring threads (1 .. 32 of a warp, or the block) share a row in vectors of VEC
//              elements, STEPS at a time. Vectors lie on absolute addresses: where a row does not start on one
//              (ALIGNED = 0), its first and last are read and written element by element.
//
// bytes per row: forward K * sizeof(T) + label + 4, backward 2 * K * sizeof(T) + label + 4; about 6 FLOP per logit.
#include "common.cuh"

#define BLOCK 256
#define NONE 0x7fffffff

// e^x within 2 units in the last place; terms below 2^-126 are flushed, far under the rounding of any sum they join.
DEVICE float exponential(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
    return y;
}

struct Totals {
    double loss = 0.0;
    int valid = 0, correct = 0, outside = 0;
};

// Writes the block's totals: the same tree whatever the device.
DEVICE void write_partial(const Totals& mine, double* __restrict__ partial) {
    __shared__ double losses[32];
    __shared__ int counts[3][32];
    const double loss = block_sum<BLOCK>(mine.loss, losses);
    const int valid = block_sum<BLOCK>(mine.valid, counts[0]);
    const int correct = block_sum<BLOCK>(mine.correct, counts[1]);
    const int outside = block_sum<BLOCK>(mine.outside, counts[2]);
    if (threadIdx.x > 0) return;
    partial += 4 * i64(blockIdx.x);
    partial[0] = loss;
    partial[1] = valid;
    partial[2] = correct;
    partial[3] = outside;
}

// What one valid row contributes to its gradient: factor = scale / number of valid labels, 0 where nothing counts.
DEVICE float gradient_factor(i64 label, int classes, i64 ignore_index, const double* totals, const float* scale) {
    if (label == ignore_index || label < 0 || label >= classes || totals[1] == 0.0) return 0.0f;
    return (scale ? scale[0] : 1.0f) / float(totals[1]);
}

#ifdef CLASSES
// ------------------------------------------------------------------------------------------------- a thread per row

constexpr int WIDTH = 16 / int(sizeof(T));                                         // elements in a 16-byte vector
constexpr int READ = CLASSES % 8 == 0 && WIDTH == 8 ? 8 : CLASSES % 4 == 0 ? 4 : CLASSES % 2 == 0 ? 2 : 1;
static_assert(CLASSES <= 64, "a row is held in registers");

// Starts the copy of `count` elements from one 16-byte aligned place to another, by the whole block: a part of the group
// that is committed and awaited next.
DEVICE void start_copy(T* to, const T* __restrict__ from, int count) {
    const int vectors = count / WIDTH;
    for (int i = threadIdx.x; i < vectors; i += BLOCK)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(u32(__cvta_generic_to_shared(to + i * WIDTH))),
                     "l"(from + i * WIDTH)
                     : "memory");
    const int i = vectors * WIDTH + threadIdx.x;
    if (i < count) to[i] = from[i];
}

// `count` elements from one 16-byte aligned place to another, by the whole block, four vectors in flight.
DEVICE void copy_run(T* __restrict__ to, const T* __restrict__ from, int count) {
    const int vectors = count / WIDTH;
    for (int i = threadIdx.x; i < vectors; i += 4 * BLOCK) {
        Raw<T, WIDTH> raw[4];
#pragma unroll
        for (int u = 0; u < 4; ++u)
            if (i + u * BLOCK < vectors) raw[u] = load_raw<WIDTH>(from + (i + u * BLOCK) * WIDTH);
#pragma unroll
        for (int u = 0; u < 4; ++u)
            if (i + u * BLOCK < vectors) store_raw(to + (i + u * BLOCK) * WIDTH, raw[u]);
    }
    const int i = vectors * WIDTH + threadIdx.x;
    if (i < count) to[i] = from[i];
}

DEVICE void load_row(const T* row, float (&v)[CLASSES]) {
#pragma unroll
    for (int k = 0; k < CLASSES; k += READ) {
        float part[READ];
        load(row + k, part);
#pragma unroll
        for (int e = 0; e < READ; ++e) v[k + e] = part[e];
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK, CLASSES <= 32 ? 4 : 2)
softmax_cross_entropy(const T* __restrict__ logits, const LABEL* __restrict__ labels, float* __restrict__ lse,
                      double* __restrict__ partial, i64 rows, int passes, i64 ignore_index) {
    extern __shared__ uint4 memory[];
    T* tiles = reinterpret_cast<T*>(memory);  // STAGES of them: with two, the next rows arrive during the work on these
    const auto start_pass = [&](int pass) {
        const i64 first = (i64(blockIdx.x) * passes + pass) * BLOCK;
        if (pass < passes && first < rows)
            start_copy(tiles + pass % STAGES * (BLOCK * CLASSES), logits + first * CLASSES,
                       int(min(i64(BLOCK), rows - first)) * CLASSES);
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    Totals mine;
    if (STAGES > 1) start_pass(0);
    for (int pass = 0; pass < passes; ++pass) {
        const i64 first = (i64(blockIdx.x) * passes + pass) * BLOCK, row = first + threadIdx.x;
        if (first >= rows) break;
        const i64 label = row < rows ? i64(labels[row]) : 0;
        if (pass > 0) __syncthreads();
        start_pass(pass + STAGES - 1);
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
        __syncthreads();
        if (row >= rows) continue;

        const T* tile = tiles + pass % STAGES * (BLOCK * CLASSES);
        const T* x = tile + threadIdx.x * CLASSES;
        float v[CLASSES];
        load_row(x, v);
        float peak = v[0], sum = 0.0f;
        int largest = 0;
#pragma unroll
        for (int k = 1; k < CLASSES; ++k)
            if (v[k] > peak) {
                peak = v[k];
                largest = k;
            }
#pragma unroll
        for (int k = 0; k < CLASSES; ++k) sum += exponential(v[k] - peak);
        const float log_sum = logf(sum);
        lse[row] = peak + log_sum;
        if (label == ignore_index) continue;
        if (label < 0 || label >= CLASSES) {
            ++mine.outside;
            continue;
        }
        mine.loss += double(log_sum) + double(peak - to_float(x[label]));
        ++mine.valid;
        mine.correct += label == largest;
    }
    write_partial(mine, partial);
}

extern "C" __global__ void __launch_bounds__(BLOCK, CLASSES <= 32 ? 4 : 2)
softmax_cross_entropy_backward(const T* __restrict__ logits, const LABEL* __restrict__ labels,
                               const float* __restrict__ lse, const double* __restrict__ totals,
                               const float* __restrict__ scale, T* __restrict__ dlogits, i64 rows, i64 ignore_index) {
    extern __shared__ uint4 memory[];
    T* tile = reinterpret_cast<T*>(memory);
    const i64 first = i64(blockIdx.x) * BLOCK, row = first + threadIdx.x;
    const int count = int(min(i64(BLOCK), rows - first)) * CLASSES;
    const i64 label = row < rows ? i64(labels[row]) : 0;
    const float norm = row < rows ? lse[row] : 0.0f;
    copy_run(tile, logits + first * CLASSES, count);
    __syncthreads();
    if (row < rows) {
        const float factor = gradient_factor(label, CLASSES, ignore_index, totals, scale);
        T* x = tile + threadIdx.x * CLASSES;
        float v[CLASSES];
        load_row(x, v);
#pragma unroll
        for (int k = 0; k < CLASSES; ++k) {
            const float p = exponential(v[k] - norm);
            v[k] = factor == 0.0f ? 0.0f : (k == label ? p - 1.0f : p) * factor;
        }
#pragma unroll
        for (int k = 0; k < CLASSES; k += READ) {
            float part[READ];
#pragma unroll
            for (int e = 0; e < READ; ++e) part[e] = v[k + e];
            store(x + k, part);
        }
    }
    __syncthreads();
    copy_run(dlogits + first * CLASSES, tile, count);
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
    const float factor = gradient_factor(label, classes, ignore_index, totals, scale), norm = lse[row];
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

#else
// ------------------------------------------------------------------------------------------------------------- totals

#define THREADS 1024

// One block adds the blocks' totals: thread t takes partials t, t + 1024, ..., then a tree.
extern "C" __global__ void __launch_bounds__(THREADS)
softmax_cross_entropy_totals(const double* __restrict__ partial, double* __restrict__ totals, int blocks) {
    __shared__ double scratch[4][32];
    double mine[4] = {};
#pragma unroll 4
    for (int i = threadIdx.x; i < blocks; i += THREADS)
#pragma unroll
        for (int j = 0; j < 4; ++j) mine[j] += partial[4 * i + j];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const double total = block_sum<THREADS>(mine[j], scratch[j]);
        if (threadIdx.x == 0) totals[j] = total;
    }
}

#endif
