// How the results of a warpgroup leave in conv2d_hopper.cu and conv2d_halo.cu: in slabs, each through one of SLABS
// buffers in shared memory, stored by the copy engine; what is to be added to a slab is brought into its buffer before.
#pragma once
#include "hopper.cuh"
#include "relu_mask.cuh"

#if DTYPE
// What is done to 16 x 16 results of a warp between sum and store. d: accumulators of two blocks of 8 columns; place:
// where the lane's row of the four 8x8 matrices is, in a slab that holds the addend if any. ACROSS: as for matrices.
template <bool ACROSS>
DEVICE void finish(float (&d)[8], u32 place, bool added) {
    u32 words[4];
    if (added) {
        load_matrices<ACROSS>(words, place);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            Raw<T, 2> raw;
            raw.pairs[0] = words[i];
            float other[2];
            unpack(raw, other);
            d[2 * i] += other[0], d[2 * i + 1] += other[1];
        }
    }
    if constexpr (RELU) {
#pragma unroll
        for (int i = 0; i < 8; ++i) d[i] = clamp_below(d[i], 0.0f);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = Rounding<T>::round_pair(d[2 * i], d[2 * i + 1]);
    store_matrices<ACROSS>(place, words);
}

// Writes 16 x 16 results of a warp, two blocks of 8 columns, to columns from j on of a slab of 64 rows; `thread` of the
// warpgroup.
DEVICE void put(float (&d)[8], u32 slab, int j, u32 thread, bool added) {
    // Lane i holds the address of row i % 8 of matrix i / 8: upper and lower 8 rows, then the next 8 columns.
    const u32 lane = thread % 32, row = thread / 32 * 16 + lane % 16, chunk = lane / 16;
    finish<false>(d, slab + row * 128 + ((j / 8 + chunk) ^ row % 8) * 16, added);
}
#else
DEVICE void put(float (&d)[8], u32 slab, int j, u32 thread, bool added) {
    const u32 lane = thread % 32, row = thread / 32 * 16 + lane / 4, pair = lane % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        // Values 2 i and 2 i + 1 are in block i / 2, 8 rows further down if i is odd; a chunk holds two pairs.
        const u32 place = slab + (row + i % 2 * 8) * 128 + ((j / 4 + i / 2 * 2 + pair / 2) ^ row % 8) * 16 + pair % 2 * 8;
        float2 value = {d[2 * i], d[2 * i + 1]};
        if (added) {
            float2 other;
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(other.x), "=f"(other.y) : "r"(place) : "memory");
            value.x += other.x, value.y += other.y;
        }
        if constexpr (RELU) value = {clamp_below(value.x, 0.0f), clamp_below(value.y, 0.0f)};
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(place), "f"(value.x), "f"(value.y) : "memory");
    }
}
#endif

// A warp takes 16 columns of a slab across: words[i] of 16 rows are, of column lane / 4 of eight i / 2, rows
// i % 2 * 8 + lane % 4 * 2 + {0, 1}. Where a lane's row of the four matrices is in a slab:
DEVICE u32 columns_across() {
    const u32 thread = thread_again(), lane = thread % 32, chunk = thread / 32 * 2 + lane / 16;
    return lane % 16 * 128 + (chunk ^ lane % 8) * 16;
}

DEVICE void unpack_word(u32 word, float (&v)[2]) {
    Raw<T, 2> raw;
    raw.pairs[0] = word;
    unpack(raw, v);
}

// Sums over the lanes that have the same columns.
DEVICE float sum_columns(float v) {
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

// Of two values of each of the warp's columns, the one that this lane writes: to which column, and whether the second.
struct ColumnShare {
    int column;
    bool second;

    __device__ __forceinline__ ColumnShare() {
        const u32 thread = thread_again(), lane = thread % 32;
        column = thread / 32 * 16 + lane % 2 * 8 + lane / 4;
        second = lane & 2;
    }

    __device__ __forceinline__ float pick(const float (&first)[2], const float (&other)[2]) const {
        const float upper = second ? other[1] : first[1], lower = second ? other[0] : first[0];
        return column & 8 ? upper : lower;
    }

    // Into `to` (2, columns), for the slab whose columns begin at `from`. Not between slabs: the fence for the engine
    // would wait for it.
    __device__ __forceinline__ void write(float* to, float value, int from, int columns) const {
        if (from + column < columns) to[second * columns + from + column] = value;
    }
};

// Sums and sums of squares of what a warpgroup stores, column by column, of the rounded values: bfloat16 has eight
// bits, so float32 holds what some hundred squares of one binade add up to, and nothing is lost where a mean far from
// zero would make differences of such sums treacherous. (By plain arithmetic: tensor cores would do it in fewer
// instructions, but they are what a convolution waits for.)
struct Tally {
    float sums[2], squares[2];

    __device__ __forceinline__ void start() {
#pragma unroll
        for (int j = 0; j < 2; ++j) sums[j] = squares[j] = 0.0f;
    }

    // Takes in ROWS rows of a slab that the whole warpgroup has written, UNROLL times 16 at once; those `inside`, or
    // `whole`.
    template <int ROWS, int UNROLL, class Inside>
    __device__ __forceinline__ void take(u32 slab, bool whole, Inside inside) {
        const u32 from = slab + columns_across();
#pragma unroll UNROLL
        for (int k = 0; k < ROWS; k += 16) {
            u32 x[4];
            load_matrices<true>(x, from + k * 128);
            if (!whole) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int row = k + i % 2 * 8 + int(thread_again() % 4) * 2;
                    x[i] &= (inside(row) ? 0xffffu : 0u) | (inside(row + 1) ? 0xffff0000u : 0u);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float v[2];
                unpack_word(x[i], v);
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    sums[i / 2] += v[e];
                    squares[i / 2] = fmaf(v[e], v[e], squares[i / 2]);
                }
            }
        }
    }

    // This lane's share of the sums and the sums of squares.
    __device__ __forceinline__ float result() {
#pragma unroll
        for (int j = 0; j < 2; ++j) sums[j] = sum_columns(sums[j]), squares[j] = sum_columns(squares[j]);
        return ColumnShare().pick(sums, squares);
    }
};

// What a data gradient does for the ReLU and the batch norm below: it counts where the ReLU's output was positive, and
// with x the batch norm's input, sum g and sum g*(x - mean) of each column are taken on the way.
struct Below {
    const float *moments, *gamma, *beta;  // (2, columns): mean and rstd; (columns,) or null
};
constexpr bool SUMS = MASKED == 1 || MASKED == 2;  // 3: no batch norm
constexpr int READ = MASKED == 2 ? 2 : 1;          // arrays that are read for it

#if DTYPE
struct Masking {
    float mean[2], scale[2], shift[2], sum[2], product[2];

    __device__ __forceinline__ Masking() {}
    __device__ __forceinline__ Masking(const Below& below, int column, int columns) {
        if constexpr (!SUMS) return;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const u32 thread = thread_again();
            const int at = column + int(thread / 32 * 16 + j * 8 + thread % 32 / 4);
            const bool there = at < columns;
            mean[j] = there ? below.moments[at] : 0.0f;
            if constexpr (MASKED == 1) {
                scale[j] = there ? below.moments[columns + at] : 0.0f;
                scale[j] *= there && below.gamma ? below.gamma[at] : 1.0f;
                shift[j] = there && below.beta ? below.beta[at] : 0.0f;
            }
            sum[j] = product[j] = 0.0f;
        }
    }

    // Masks 16 rows of a slab by the ReLU's output y alone.
    static __device__ __forceinline__ void cut_off(u32 slab, u32 y) {
        u32 gradients[4], outputs[4];
        load_matrices<true>(gradients, slab);
        load_matrices<true>(outputs, y);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float out[2];
            unpack_word(outputs[i], out);
            gradients[i] &= (out[0] > 0.0f ? 0xffffu : 0u) | (out[1] > 0.0f ? 0xffff0000u : 0u);
        }
        store_matrices<true>(slab, gradients);
    }

    // Masks 16 rows of a slab, whose gradients are `inside` or do not count. MASKED 1: the mask follows from x; 2: it
    // is read from the ReLU's output y; 3: likewise, and there is no x. Addresses are those of the lane's row.
    template <class Inside>
    __device__ __forceinline__ void take(u32 slab, u32 x, u32 y, Inside inside) {
        if constexpr (!SUMS) {
            cut_off(slab, x);
            return;
        }
        u32 gradients[4], inputs[4], outputs[4];
        load_matrices<true>(gradients, slab);
        load_matrices<true>(inputs, x);
        if constexpr (MASKED == 2) load_matrices<true>(outputs, y);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int j = i / 2;
            float g[2], v[2], out[2];
            unpack_word(gradients[i], g);
            unpack_word(inputs[i], v);
            if constexpr (MASKED == 2) unpack_word(outputs[i], out);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                v[e] -= mean[j];
                const bool positive = MASKED == 1 ? was_positive(v[e], scale[j], shift[j]) : out[e] > 0.0f;
                g[e] = positive && inside(i % 2 * 8 + threadIdx.x % 4 * 2 + e) ? g[e] : 0.0f;
                sum[j] += g[e];
                product[j] = fmaf(g[e], v[e], product[j]);
            }
            gradients[i] = Rounding<T>::round_pair(g[0], g[1]);
        }
        store_matrices<true>(slab, gradients);
    }

    // This lane's share of both sums.
    __device__ __forceinline__ float result() {
        if constexpr (!SUMS) return 0.0f;
#pragma unroll
        for (int j = 0; j < 2; ++j) sum[j] = sum_columns(sum[j]), product[j] = sum_columns(product[j]);
        return ColumnShare().pick(sum, product);
    }
};
#endif

// Place says where the slabs of a tile lie:
//   COUNT, BYTES            slabs of a warpgroup's part of a tile, bytes of a buffer
//   buffer(i), filled(i)    addresses of a buffer and of the barrier of its addend
//   load(to, barrier, tile, s), store(tile, s, from)    start the engine; store knows when slab s does not exist
//   p.added                 whether there is an array to be added
template <class Place>
struct Output {
    static constexpr int AHEAD = SLABS > 1;  // addends are fetched while the slab before them is worked on

    Place place;
    int warpgroup;
    Ring<SLABS> next, fetched;  // the buffer of the next slab, and of the next addend

    __device__ __forceinline__ bool speaks() const { return threadIdx.x % 128 == 0; }
    __device__ __forceinline__ bool added() const { return !STATISTICS && place.p.added; }  // whether there is an array to be added

    // One thread: fetches the addend of slab s as soon as its buffer is free.
    template <class Tile>
    __device__ __forceinline__ void fetch(const Tile& tile, int s) {
        const u32 barrier = place.filled(fetched.index);
        await_stores_read<0>();
        barrier_expect(barrier, Place::BYTES);
        place.load(place.buffer(fetched.index), barrier, tile, s);
        fetched.advance();
    }

    // Before the sum of a tile is known.
    template <class Tile>
    __device__ __forceinline__ void prepare(const Tile& tile) {
        if (added() && speaks()) fetch(tile, 0);
    }

    // Waits for the buffer of slab s, and for its addend.
    template <class Tile>
    __device__ __forceinline__ u32 open(const Tile& tile, int s) {
        if (added()) {
            if (speaks() && s + AHEAD < Place::COUNT && s + AHEAD > 0) fetch(tile, s + AHEAD);
            barrier_wait(place.filled(next.index), next.parity);
        } else {
            if (speaks()) await_stores_read<SLABS - 1>();
            warpgroup_sync(1 + warpgroup);
        }
        return place.buffer(next.index);
    }

    // Before a thread reads of the slab what others have written.
    __device__ __forceinline__ void share() const { warpgroup_sync(1 + warpgroup); }

    // Stores slab s, which all threads have written.
    template <class Tile>
    __device__ __forceinline__ void close(const Tile& tile, int s) {
        fence_for_engine();
        warpgroup_sync(1 + warpgroup);
        if (speaks()) {
            place.store(tile, s, place.buffer(next.index));
            commit_stores();
        }
        next.advance();
    }

    // Before the block ends.
    __device__ __forceinline__ void drain() const {
        if (speaks()) await_stores_read<0>();
    }
};
