// Kernels in which LANES neighbouring threads (a power of two, up to the block of 256) share a row of channels.
//
// A thread takes runs of RUN = 16 / sizeof(T) elements, loaded VEC at a time, so that which thread adds what depends on
// the sizes alone and not on an array's alignment. A row is read once per step of the formula: between the steps it
// stays in the cache of its multiprocessor.
#pragma once

#define BLOCK 256

constexpr int RUN = 16 / int(sizeof(T)) > VEC ? 16 / int(sizeof(T)) : VEC;
constexpr int ROWS = BLOCK / LANES;  // rows that a block works on
static_assert(BLOCK % LANES == 0, "a block works on whole rows");

// WHOLE: a row fills the runs of its threads, so that no element has to be asked whether it is one.
#ifndef WHOLE
#define WHOLE 0
#endif
DEVICE bool within(int i, int channels) { return WHOLE || i < channels; }

// RUN elements from `first` on; what lies behind the row reads as `otherwise`.
template <class S>
DEVICE void load_run(const S* __restrict__ row, int first, int channels, float otherwise, float (&v)[RUN]) {
#pragma unroll
    for (int j = 0; j < RUN; j += VEC) {
        float part[VEC];
        if (within(first + j, channels)) {
            load(row + first + j, part);
        } else {
#pragma unroll
            for (int e = 0; e < VEC; ++e) part[e] = otherwise;
        }
#pragma unroll
        for (int e = 0; e < VEC; ++e) v[j + e] = part[e];
    }
}

DEVICE void store_run(T* __restrict__ row, int first, int channels, const float (&v)[RUN]) {
#pragma unroll
    for (int j = 0; j < RUN; j += VEC) {
        float part[VEC];
#pragma unroll
        for (int e = 0; e < VEC; ++e) part[e] = v[j + e];
        if (within(first + j, channels)) store(row + first + j, part);
    }
}

DEVICE float larger(float a, float b) { return clamp_below(a, b); }

// The sum (or the largest, NaN winning) over the threads of a row, in each of them. Every thread of the block takes
// part.
template <bool LARGEST = false>
DEVICE float over_row(float x) {
#pragma unroll
    for (int offset = (LANES < 32 ? LANES : 32) / 2; offset > 0; offset /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, x, offset);
        x = LARGEST ? larger(x, other) : x + other;
    }
    if (LANES <= 32) return x;
    __shared__ float scratch[BLOCK / 32];
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    const float* of_row = scratch + threadIdx.x / LANES * (LANES / 32);
    x = of_row[0];
#pragma unroll
    for (int warp = 1; warp < LANES / 32; ++warp) x = LARGEST ? larger(x, of_row[warp]) : x + of_row[warp];
    return x;
}

// This thread's row, and its part of it: runs that start at `first`, `first` + STEP, ...
struct RowShare {
    static constexpr int STEP = LANES * RUN;
    i64 row;
    int first;
    bool inside;

    __device__ __forceinline__ explicit RowShare(i64 rows) {
        row = i64(blockIdx.x) * ROWS + threadIdx.x / LANES;
        inside = row < rows;
        if (!inside) row = 0;
        first = threadIdx.x % LANES * RUN;
    }
};

#ifdef PER
// Kernels whose threads hold their part of PER rows at once: HELD runs of each row in registers, all loads in flight
// before the first is used. With HELD = 0 the rows are longer, PER is 1, and each step of the formula reads the row
// again.
static_assert(HELD > 0 || PER == 1, "rows that are read again are taken one at a time");

struct HeldRows {
    i64 first_row;
    int first;  // element of this thread's first run

    __device__ __forceinline__ HeldRows() {
        first_row = i64(blockIdx.x) * (PER * ROWS) + threadIdx.x / LANES;
        first = threadIdx.x % LANES * RUN;
    }
    __device__ __forceinline__ i64 row(int j) const { return first_row + j * ROWS; }
};

// f(r, i) for each run r of a thread, which begins at element i; held runs may lie behind the row.
template <class F>
DEVICE void for_runs(int first, int channels, F f) {
    if constexpr (HELD > 0) {
#pragma unroll
        for (int r = 0; r < HELD; ++r) f(r, first + r * RowShare::STEP);
    } else {
#pragma unroll 1
        for (int i = first; i < channels; i += RowShare::STEP) f(0, i);
    }
}

template <class S = T>
struct RowPart {
    Raw<S, VEC> parts[HELD > 0 ? HELD : 1][RUN / VEC];
    const S* row;

    __device__ __forceinline__ void fetch(const S* __restrict__ from, int first, int channels) {
        row = from;
        if constexpr (HELD > 0)
            for_runs(first, channels, [&](int r, int i) {
#pragma unroll
                for (int j = 0; j < RUN / VEC; ++j)
                    if (within(i + j * VEC, channels)) parts[r][j] = load_raw<VEC>(from + i + j * VEC);
            });
    }

    // Run r; what lies behind the row reads as `otherwise`.
    __device__ __forceinline__ void run(int r, int i, int channels, float otherwise, float (&v)[RUN]) const {
        if constexpr (HELD > 0) {
#pragma unroll
            for (int j = 0; j < RUN / VEC; ++j) {
                float part[VEC];
                unpack(parts[r][j], part);
#pragma unroll
                for (int e = 0; e < VEC; ++e) v[j * VEC + e] = within(i + j * VEC, channels) ? part[e] : otherwise;
            }
        } else {
            load_run(row, i, channels, otherwise, v);
        }
    }

    // The row's first element, in each of its threads.
    __device__ __forceinline__ float head() const {
        if constexpr (HELD > 0 && LANES <= 32) {
            const float own = to_float(parts[0][0].items[0]);
            return __shfl_sync(0xffffffffu, own, threadIdx.x % 32 & ~(LANES - 1));
        }
        return to_float(row[0]);
    }
};
#endif
