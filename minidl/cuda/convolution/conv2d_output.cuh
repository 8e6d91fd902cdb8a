// How the results of a warpgroup leave in conv2d_hopper.cu: in slabs, each through one of SLABS buffers in shared
// memory, stored by the copy engine; what is to be added to a slab is brought into its buffer before.
#pragma once
#include "conv2d_columns.cuh"

#if DTYPE
// Writes 16 x 16 results of a warp, accumulators of two blocks of 8 columns, to columns from j on of a slab of 64 rows
// that holds the addend, if any; `thread` of the warpgroup.
DEVICE void put(float (&d)[8], u32 slab, int j, u32 thread, bool added) {
    // Lane i holds the address of row i % 8 of matrix i / 8: upper and lower 8 rows, then the next 8 columns.
    const u32 lane = thread % 32, row = thread / 32 * 16 + lane % 16, chunk = lane / 16;
    const u32 place = slab + row * 128 + ((j / 8 + chunk) ^ row % 8) * 16;
    u32 words[4];
    if (added) {
        load_matrices(words, place);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float other[2];
            unpack_word(words[i], other);
            d[2 * i] += other[0], d[2 * i + 1] += other[1];
        }
    }
    if constexpr (RELU) {
#pragma unroll
        for (int i = 0; i < 8; ++i) d[i] = clamp_below(d[i], 0.0f);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = Rounding<T>::round_pair(d[2 * i], d[2 * i + 1]);
    store_matrices(place, words);
}
#else
DEVICE void put(float (&d)[8], u32 slab, int j, u32 thread, bool added) {
    const u32 lane = thread % 32, row = thread / 32 * 16 + lane / 4, pair = lane % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        // Values 2 i and 2 i + 1 are in block i / 2, 8 rows further down if i is odd; a chunk holds two pairs.
        const u32 place =
            slab + (row + i % 2 * 8) * 128 + ((j / 4 + i / 2 * 2 + pair / 2) ^ row % 8) * 16 + pair % 2 * 8;
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

// Place says where the slabs of a tile lie:
//   COUNT, BYTES            slabs of a warpgroup's part of a tile, bytes of a buffer
//   buffer(i), filled(i)    addresses of a buffer and of the barrier of its addend
//   load(to, barrier, tile, s), store(tile, s, from)    start the engine; store knows when slab s does not exist
//   gather(to, barrier, tile, s)    with SPACED instead of load: copies by all threads of the warpgroup
//   p.added                 whether there is an array to be added
//
// Slabs leave in groups: all of a tile where there are buffers for them, which then waits for nothing, else one by one.
template <class Place>
struct Output {
    static constexpr int AT_ONCE = SLABS >= Place::COUNT ? Place::COUNT : 1, GROUPS = Place::COUNT / AT_ONCE;
    static_assert(Place::COUNT % AT_ONCE == 0 && SLABS % AT_ONCE == 0, "groups fill the ring of buffers");
    static constexpr int AHEAD = SLABS > AT_ONCE;  // addends are fetched while the group before them is worked on

    Place place;
    int warpgroup;
    Ring<SLABS> next, fetched;  // the first buffer of the next group, and of the next addends
    u32 cleared = 0;            // whether the first holds zeros; ptxas spills a bool, in some variants

    __device__ __forceinline__ bool speaks() const { return threadIdx.x % 128 == 0; }
    __device__ __forceinline__ bool added() const { return !STATISTICS && place.p.added; }  // an array is
    __device__ __forceinline__ u32 buffer(int i) const { return place.buffer(next.index + i); }

    // Whether this thread fetches addends.
    __device__ __forceinline__ bool fetches() const { return SPACED || speaks(); }

    // Fetches the addends of a group as soon as its buffers are free.
    template <class Tile>
    __device__ __forceinline__ void fetch(const Tile& tile, int group) {
        if (speaks()) await_stores_read<0>();
        if constexpr (SPACED) warpgroup_sync(1 + warpgroup);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const u32 to = place.buffer(fetched.index + i), barrier = place.filled(fetched.index + i);
            if constexpr (SPACED) {
                place.gather(to, barrier, tile, group * AT_ONCE + i);
            } else {
                barrier_expect(barrier, Place::BYTES);
                place.load(to, barrier, tile, group * AT_ONCE + i);
            }
        }
        fetched.advance(AT_ONCE);
    }

    // Before the sum of a tile is known.
    template <class Tile>
    __device__ __forceinline__ void prepare(const Tile& tile) {
        if (added() && fetches()) fetch(tile, 0);
    }

    // Waits for the buffers of a group, and for its addends.
    template <class Tile>
    __device__ __forceinline__ void open(const Tile& tile, int group) {
        if (added()) {
            if (fetches() && group + AHEAD < GROUPS && group + AHEAD > 0) fetch(tile, group + AHEAD);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) barrier_wait(place.filled(next.index + i), next.parity);
        } else {
            if (speaks()) await_stores_read<SLABS / AT_ONCE - 1>();
            if (SPREAD && cleared && speaks()) await_stores_read<0>();
            cleared = 0;
            warpgroup_sync(1 + warpgroup);
        }
    }

    // Stores a tile of zeros, where nothing is added: all slabs from one buffer, so that no store waits for another.
    template <class Tile>
    __device__ __forceinline__ void store_zeros(const Tile& tile) {
        if (!cleared) {
            if (speaks()) await_stores_read<0>();
            warpgroup_sync(1 + warpgroup);
            for (int at = threadIdx.x % 128 * 16; at < Place::BYTES; at += 128 * 16)
                store_shared(buffer(0) + at, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
            fence_for_engine();
            warpgroup_sync(1 + warpgroup);
            cleared = 1;
        }
        if (speaks()) {
#pragma unroll
            for (int s = 0; s < Place::COUNT; ++s) place.store(tile, s, buffer(0));
            commit_stores();
        }
    }

    // Before a thread reads of the group what others have written.
    __device__ __forceinline__ void share() const { warpgroup_sync(1 + warpgroup); }

    // Stores a group, which all threads have written.
    template <class Tile>
    __device__ __forceinline__ void close(const Tile& tile, int group) {
        fence_for_engine();
        warpgroup_sync(1 + warpgroup);
        if (speaks()) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) place.store(tile, group * AT_ONCE + i, buffer(i));
            commit_stores();
        }
    }

    // After the last look at a group.
    __device__ __forceinline__ void leave() { next.advance(AT_ONCE); }

    // Before the block ends.
    __device__ __forceinline__ void drain() const {
        if (speaks()) await_stores_read<0>();
    }
};
