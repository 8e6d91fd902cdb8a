// How the results of a warpgroup leave in conv2d_hopper.cu, a part of that file: in slabs, each through one of SLABS
// buffers in shared memory, stored by the copy engine; what is to be added to a slab is brought into its buffer before.
#pragma once

#if DTYPE
// Writes 16 x 16 results of a warp, accumulators of two blocks of 8 columns, to columns from j on of a slab of 64 rows
// that holds the addend, if any; `thread` of the warpgroup. SWAPPED: of 8 rows, to rows from j on, across.
DEVICE void put(float (&d)[8], u32 slab, int j, u32 thread, bool added) {
    // Lane i holds the address of row i % 8 of matrix i / 8: upper and lower 8 rows, then the next 8 columns.
    const u32 lane = thread % 32, begin = thread / 32 * 16;
    const u32 row = SWAPPED ? j + lane / 16 * 8 + lane % 8 : begin + lane % 16;
    const u32 chunk = SWAPPED ? begin / 8 + lane / 8 % 2 : j / 8 + lane / 16;
    const u32 place = slab + row * 128 + (chunk ^ row % 8) * 16;
    u32 words[4];
    if (added) {
        load_matrices<SWAPPED != 0>(words, place);
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
    store_matrices<SWAPPED != 0>(place, words);
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

// Where the slabs of a warpgroup's part of a tile lie, in shared memory and in the arrays.
struct Place {
    static constexpr int COUNT = SWAPPED ? 1 : BLOCKS * OWN / SLAB_COLUMNS;

    const Layout& at;
    const Maps& maps;
    const Problem& p;
    int warpgroup;
    const T* spaced = nullptr;  // with SPACED what is to be added

    // A buffer, and the barrier of its addend.
    __device__ __forceinline__ u32 buffer(int i) const { return at.slab(warpgroup, i); }
    __device__ __forceinline__ u32 filled(int i) const { return at.added(warpgroup, i); }
    __device__ __forceinline__ int row(const Tile& tile, int s) const {
        return SWAPPED ? tile.row : tile.row + warpgroup * ROWS + s % BLOCKS * 64;
    }
    __device__ __forceinline__ int column(const Tile& tile, int s) const {
        return tile.column + (SWAPPED ? warpgroup : s / BLOCKS) * SLAB_COLUMNS;
    }

    // Starts the engine with the addend of slab s.
    __device__ __forceinline__ void load(u32 to, u32 barrier, const Tile& tile, int s) const {
        load(maps.add[tile.index], to, barrier, tile, s, column(tile, s));
    }

    // The rows of slab s from `column` of a map on.
    __device__ __forceinline__ void load(const TensorMap& map, u32 to, u32 barrier, const Tile& tile, int s,
                                         int column) const {
        if constexpr (SPREAD) {
            const Pixel from(p.classes[tile.index], row(tile, s));
            load_pixels(to, map, barrier, column, from.x, from.y, from.image, 0, 0);
        } else {
            load_box(to, map, barrier, column, row(tile, s));
        }
    }

    // The addend of slab s where only every second pixel has one; each thread copies a chunk of every 16th row.
    __device__ __forceinline__ void gather(u32 to, u32 barrier, const Tile& tile, int s) const {
        const Class& c = p.classes[0];
        const int thread = thread_again(), first = thread / 8, chunk = thread % 8;
        const int channel = column(tile, s) + chunk * 8;
        const int down = (c.height + 1) / 2, across = (c.width + 1) / 2, begin = row(tile, s) + first;
        Pixel pixel(c, begin);
#pragma unroll
        for (int i = 0; i < SLAB_ROWS; i += 16) {
            const bool there = begin + i < c.rows && channel < p.columns && pixel.y % 2 == 0 && pixel.x % 2 == 0;
            const i64 from = (i64(pixel.image) * down + pixel.y / 2) * across + pixel.x / 2;
            copy_chunk(to + (first + i) * 128 + (chunk ^ first % 8) * 16,
                       spaced + (there ? from * p.added + channel : 0), there);
            pixel.advance(c, 16);
        }
        arrive_with_copies(barrier);
    }

    // Starts it with slab s, if it exists.
    __device__ __forceinline__ void store(const Tile& tile, int s, u32 from) const {
        if (row(tile, s) >= p.classes[tile.index].rows || column(tile, s) >= p.columns) return;
        const TensorMap& output = maps.output[tile.index];
        if constexpr (SPREAD) {
            const Pixel to(p.classes[tile.index], row(tile, s));
            store_pixels(output, from, column(tile, s), to.x, to.y, to.image);
        } else {
            store_box(output, from, column(tile, s), row(tile, s));
        }
    }
};

// Buffers are waited for in groups: for all slabs of a tile where there are as many, which then waits for nothing, else
// one by one. Each slab leaves when it is written: the engine reads it while the next one is.
struct Output {
    static constexpr int AT_ONCE = SLABS >= Place::COUNT ? Place::COUNT : 1, GROUPS = Place::COUNT / AT_ONCE;
    static_assert(Place::COUNT % AT_ONCE == 0 && SLABS % AT_ONCE == 0, "groups fill the ring of buffers");
    static constexpr int AHEAD = SLABS > AT_ONCE;  // addends are fetched while the group before them is worked on

    Place place;
    Ring<SLABS> next, fetched;  // the first buffer of the next group, and of the next addends
    u32 cleared = 0;            // whether the first holds zeros; ptxas spills a bool, in some variants

    __device__ __forceinline__ bool speaks() const { return threadIdx.x % 128 == 0; }
    __device__ __forceinline__ bool added() const { return !STATISTICS && place.p.added; }  // an array is
    __device__ __forceinline__ u32 buffer(int i) const { return place.buffer(next.index + i); }

    // Whether this thread fetches addends.
    __device__ __forceinline__ bool fetches() const { return SPACED || speaks(); }

    // Fetches the addends of a group as soon as its buffers are free.
    __device__ __forceinline__ void fetch(const Tile& tile, int group) {
        if (speaks()) await_stores_read<0>();
        if constexpr (SPACED) warpgroup_sync(1 + place.warpgroup);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const u32 to = place.buffer(fetched.index + i), barrier = place.filled(fetched.index + i);
            if constexpr (SPACED) {
                place.gather(to, barrier, tile, group * AT_ONCE + i);
            } else {
                barrier_expect(barrier, SLAB_BYTES);
                place.load(to, barrier, tile, group * AT_ONCE + i);
            }
        }
        fetched.advance(AT_ONCE);
    }

    // Before the sum of a tile is known.
    __device__ __forceinline__ void prepare(const Tile& tile) {
        if (added() && fetches()) fetch(tile, 0);
    }

    // Waits for the buffers of a group, and for its addends.
    __device__ __forceinline__ void open(const Tile& tile, int group) {
        if (added()) {
            if (fetches() && group + AHEAD < GROUPS && group + AHEAD > 0) fetch(tile, group + AHEAD);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) barrier_wait(place.filled(next.index + i), next.parity);
        } else {
            if (speaks()) await_stores_read<SLABS - AT_ONCE>();
            if (SPREAD && cleared && speaks()) await_stores_read<0>();
            cleared = 0;
            warpgroup_sync(1 + place.warpgroup);
        }
    }

    // Stores a tile of zeros, where nothing is added: all slabs from one buffer, so that no store waits for another.
    __device__ __forceinline__ void store_zeros(const Tile& tile) {
        if (!cleared) {
            if (speaks()) await_stores_read<0>();
            warpgroup_sync(1 + place.warpgroup);
            for (int at = threadIdx.x % 128 * 16; at < SLAB_BYTES; at += 128 * 16)
                store_shared(buffer(0) + at, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
            fence_for_engine();
            warpgroup_sync(1 + place.warpgroup);
            cleared = 1;
        }
        if (speaks()) {
#pragma unroll
            for (int s = 0; s < Place::COUNT; ++s) place.store(tile, s, buffer(0));
            commit_stores();
        }
    }

    // Before a thread reads of the group what others have written.
    __device__ __forceinline__ void share() const { warpgroup_sync(1 + place.warpgroup); }

    // Stores slab s, which all threads have written to a buffer.
    __device__ __forceinline__ void close(const Tile& tile, int s, u32 from) const {
        fence_for_engine();
        warpgroup_sync(1 + place.warpgroup);
        if (speaks()) {
            place.store(tile, s, from);
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
