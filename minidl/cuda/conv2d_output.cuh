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
