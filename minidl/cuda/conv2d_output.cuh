// How the results of a warpgroup leave in conv2d_hopper.cu and conv2d_halo.cu: in slabs, each through one of SLABS
// buffers in shared memory, stored by the copy engine; what is to be added to a slab is brought into its buffer before.
#pragma once
#include "hopper.cuh"

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
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = Rounding<T>::round_pair(d[2 * i], d[2 * i + 1]);
    store_matrices<ACROSS>(place, words);
}

// Statistics of what a warpgroup stores, column by column, as batch normalisation wants them: of the rounded values, with
// squares of deviations from a pivot, the first of them, so that a mean far from zero costs nothing. A warp does 16
// columns; a lane two of them, lane / 4 of both eights, and of every 8 rows those from 2 * (lane % 4) on.
struct Tally {
    float pivot[2], sum[2], square[2];

    // Takes in ROWS rows of a slab that the whole warpgroup has written; `begin`: as the first. Rows count where `inside`
    // says so, all if `whole`.
    template <int ROWS, class Inside>
    __device__ __forceinline__ void take(u32 slab, bool begin, bool whole, Inside inside) {
        const int lane = threadIdx.x % 32, chunk = threadIdx.x % 128 / 32 * 2 + lane / 16;
        const u32 from = slab + lane % 16 * 128 + (chunk ^ lane % 8) * 16;
        if (begin) start(from);
        if (whole) {
            u32 words[ROWS / 16][4];
#pragma unroll
            for (int k = 0; k < ROWS / 16; ++k) load_matrices<true>(words[k], from + k * (16 * 128));
#pragma unroll
            for (int k = 0; k < ROWS / 16; ++k) add(words[k], [](int) { return true; });
        } else {
#pragma unroll 1
            for (int k = 0; k < ROWS / 16; ++k) {
                u32 words[4];
                load_matrices<true>(words, from + k * (16 * 128));
                add(words, [&](int row) { return inside(16 * k + row); });
            }
        }
    }

    // Writes means and, `columns` further, sums of squared deviations of `rows` rows, for the columns from `column` on.
    __device__ __forceinline__ void leave(float* to, int rows, int column, int columns) {
        const float inverse = 1.0f / rows;
        float mean[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], 1);
            square[j] += __shfl_xor_sync(0xffffffffu, square[j], 1);
            sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], 2);
            square[j] += __shfl_xor_sync(0xffffffffu, square[j], 2);
            const float offset = sum[j] * inverse;
            mean[j] = pivot[j] + offset;
            square[j] = clamp_below(fmaf(-sum[j], offset, square[j]), 0.0f);
        }
        const int lane = threadIdx.x % 32, second = lane % 2, at = column + threadIdx.x % 128 / 32 * 16 + second * 8 + lane / 4;
        if (at < columns) to[lane / 2 % 2 * columns + at] = lane & 2 ? square[second] : mean[second];
    }

private:
    __device__ __forceinline__ void start(u32 from) {
        u32 words[4];
        load_matrices<true>(words, from);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            Raw<T, 2> raw;
            raw.pairs[0] = __shfl_sync(0xffffffffu, words[2 * j], threadIdx.x % 32 & ~3);
            float first[2];
            unpack(raw, first);
            pivot[j] = first[0];
            sum[j] = square[j] = 0.0f;
        }
    }

    // 16 rows.
    template <class Inside>
    __device__ __forceinline__ void add(const u32 (&words)[4], Inside inside) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            Raw<T, 2> raw;
            raw.pairs[0] = words[i];
            float v[2];
            unpack(raw, v);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float d = inside(i % 2 * 8 + threadIdx.x % 4 * 2 + e) ? v[e] - pivot[i / 2] : 0.0f;
                sum[i / 2] += d;
                square[i / 2] = fmaf(d, d, square[i / 2]);
            }
        }
    }
};

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
    __device__ __forceinline__ bool added() const { return place.p.added; }  // whether there is an array to be added

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
