// Short dense rows of CLASSES elements (segmentation with 21 classes), RUNS times one or two for a thread.
//
// The rows of a warp are one run of memory, a tile: it is copied through shared memory in 16-byte vectors, with its
// labels, then each thread takes its rows. With STAGES = 2 the next tile is copied during the work on this one. Warps
// do not wait for each other. What keeps the memory busy is bytes under way: of rows of three classes a thread takes
// eight, and no thread waits for a label that it has only just asked for.
#pragma once
#include "async_copies.cuh"
#include "lanes.cuh"

#define BLOCK 128

constexpr int WIDTH = 16 / int(sizeof(T));  // elements in a 16-byte vector
// Neighbouring rows of a thread: two where one of 16-bit values would begin or end within a word of shared memory.
constexpr int RUN = sizeof(T) == 2 && CLASSES % 2 ? 2 : 1;
constexpr int PART = 32 * RUN;       // rows of one run of all threads of a warp
constexpr int TILE = RUNS * PART;    // rows that a warp works on at a time, by itself
constexpr int ROWS = BLOCK / 32 * TILE;  // and a block
constexpr int READ = RUN * CLASSES % WIDTH == 0 ? WIDTH : RUN * CLASSES % 4 == 0 ? 4 : RUN * CLASSES % 2 == 0 ? 2 : 1;
static_assert(CLASSES <= 64, "a row is held in registers");

// Rows of whole vectors, some power of two of them: where they start in the same banks of shared memory, their vectors
// change places.
constexpr int VECTORS = CLASSES % WIDTH ? 1 : CLASSES / WIDTH;  // in a row, or odd
constexpr int SWAPPED = (VECTORS & -VECTORS) < 8 ? VECTORS & -VECTORS : 8, APART = VECTORS % 16 ? 8 : 16;
DEVICE int place_of(int vector) { return vector ^ (vector / APART & (SWAPPED - 1)); }
// Where element i of a tile lies; those of a vector, and of READ, stay together.
DEVICE int element(int i) { return SWAPPED == 1 ? i : place_of(i / WIDTH) * WIDTH + i % WIDTH; }

// Starts the copy of `count` of the MOST elements from one 16-byte aligned place to another, by the whole warp: a part
// of the group that is committed and awaited next. `place` is where a vector goes.
template <int MOST, class S, class Place>
DEVICE void start_copy(S* to, const S* __restrict__ from, int count, Place place) {
    constexpr int WIDE = 16 / int(sizeof(S)), ALL = MOST / WIDE;
    const int lane = threadIdx.x % 32;
    const u32 target = shared_address(to);
    const uint4* source = reinterpret_cast<const uint4*>(from);
    if (count == MOST) {  // nearly always: no comparison for each vector
#pragma unroll
        for (int u = 0; u < ceil_div(ALL, 32); ++u)
            if (u < ALL / 32 || lane < ALL % 32)
                copy_async<16>(target + place(u * 32 + lane) * 16, source + u * 32 + lane, true);
        return;
    }
    const int vectors = count / WIDE, i = vectors * WIDE + lane;
    for (int v = lane; v < vectors; v += 32) copy_async<16>(target + place(v) * 16, source + v, true);
    if (i < count) to[place(vectors) * WIDE + lane] = from[i];
}

DEVICE void start_rows(T* to, const T* __restrict__ from, int rows) {
    start_copy<TILE * CLASSES>(to, from, rows * CLASSES, [](int vector) { return place_of(vector); });
}

// Copies `count` elements of a warp's tile back to memory, when the whole warp has written them.
DEVICE void write_back(T* __restrict__ to, const T* from, int count) {
    __syncwarp();
    const int vectors = count / WIDTH, lane = threadIdx.x % 32;
#pragma unroll 4
    for (int i = lane; i < vectors; i += 32) store_raw(to + i * WIDTH, load_raw<WIDTH>(from + place_of(i) * WIDTH));
    if (vectors * WIDTH + lane < count) to[vectors * WIDTH + lane] = from[place_of(vectors) * WIDTH + lane];
}

constexpr int TILE_BYTES = TILE * CLASSES * int(sizeof(T)), STAGE_BYTES = TILE_BYTES + TILE * int(sizeof(LABEL));

// The part of a warp of the block's tiles: STAGES tiles with their labels.
DEVICE u8* of_warp(uint4* memory, int warp = threadIdx.x / 32) {
    return reinterpret_cast<u8*>(memory) + warp * (STAGES * STAGE_BYTES);
}

// work(row, count, tile, at, label) for the runs of this thread in each of the block's `passes` groups of rows: the
// first of RUN rows, how many of them there are, the warp's tile, where in it they begin, and their labels. Behind the
// last row those are `ignore_index`, and the row is whatever was there. Labels lie on a 16-byte boundary. `memory`:
// STAGES tiles a warp.
template <class F>
DEVICE void for_labelled_rows(uint4* memory, const T* __restrict__ from, const LABEL* __restrict__ labels, i64 rows,
                              int passes, i64 ignore_index, F work) {
    u8* stages = of_warp(memory);
    const i64 begin = (i64(blockIdx.x) * passes * (BLOCK / 32) + threadIdx.x / 32) * TILE;  // the warp's first tile
    const auto start_tile = [&](int pass) {
        const i64 first = begin + i64(pass) * ROWS;
        if (pass < passes && first < rows) {
            u8* stage = stages + pass % STAGES * STAGE_BYTES;
            const int count = int(min(i64(TILE), rows - first));
            start_rows(reinterpret_cast<T*>(stage), from + first * CLASSES, count);
            start_copy<TILE>(reinterpret_cast<LABEL*>(stage + TILE_BYTES), labels + first, count,
                             [](int vector) { return vector; });
        }
        commit_copies();
    };
    if (STAGES > 1) start_tile(0);
    for (int pass = 0; pass < passes && begin + i64(pass) * ROWS < rows; ++pass) {
        const i64 first = begin + i64(pass) * ROWS;
        if (pass > 0) __syncwarp();
        start_tile(pass + STAGES - 1);
        await_copies<STAGES - 1>();
        __syncwarp();
        const u8* stage = stages + pass % STAGES * STAGE_BYTES;
        const LABEL* given = reinterpret_cast<const LABEL*>(stage + TILE_BYTES);
        const int count = int(min(i64(TILE), rows - first));
#pragma unroll
        for (int part = 0; part < RUNS; ++part) {
            const int at = part * PART + threadIdx.x % 32 * RUN;
            i64 label[RUN];
#pragma unroll
            for (int r = 0; r < RUN; ++r) label[r] = at + r < count ? i64(given[at + r]) : ignore_index;
            work(first + at, count - at, reinterpret_cast<const T*>(stage), at, label);
        }
    }
    let_next_in();  // a few blocks that add up what these leave
}

// A tile of rows that is read, changed in place and written elsewhere.
struct Rewrite {
    T* tile;
    i64 begin;  // the warp's first row
    int count;  // rows of the warp

    __device__ __forceinline__ Rewrite(uint4* memory, const T* __restrict__ from, i64 rows) {
        tile = reinterpret_cast<T*>(memory) + threadIdx.x / 32 * (TILE * CLASSES);
        begin = (i64(blockIdx.x) * (BLOCK / 32) + threadIdx.x / 32) * TILE;
        count = int(min(i64(TILE), max(rows - begin, i64(0))));
        start_rows(tile, from + begin * CLASSES, count);
        commit_copies();
    }
    // The first row of a thread's run `part`, within the tile.
    static __device__ __forceinline__ int row(int part) { return part * PART + threadIdx.x % 32 * RUN; }
    // What `from` (rows,) holds for this thread's rows, `otherwise` behind the last.
    template <class S, class X>
    __device__ __forceinline__ void fetch(const S* __restrict__ from, X otherwise, X (&values)[RUNS][RUN]) const {
#pragma unroll
        for (int part = 0; part < RUNS; ++part)
#pragma unroll
            for (int r = 0; r < RUN; ++r)
                values[part][r] = row(part) + r < count ? X(from[begin + row(part) + r]) : otherwise;
    }
    // Puts value(r, k) in the place of the elements k of the rows r of a run.
    template <class F>
    __device__ __forceinline__ void change(int part, F value) const {
#pragma unroll
        for (int i = 0; i < RUN * CLASSES; i += READ) {
            float v[READ];
#pragma unroll
            for (int e = 0; e < READ; ++e) v[e] = value((i + e) / CLASSES, (i + e) % CLASSES);
            store(tile + element(row(part) * CLASSES + i), v);
        }
    }
    __device__ __forceinline__ void finish(T* __restrict__ to) const {
        write_back(to + begin * CLASSES, tile, count * CLASSES);
    }
};

// Which elements of a row a comparison holds for, a bit each: that of element k is bit `place / PER_WORD` of lane
// `place % PER_WORD`, where place = k + how many elements of the row before share the first word.
struct Marks {
    static constexpr int EACH = 32 / PER_WORD, COUNT = (CLASSES / PER_WORD + 1) / EACH + 1;
    u32 bits[COUNT];
    int shift;

    __device__ __forceinline__ int all() const {
        int count = 0;
#pragma unroll
        for (int j = 0; j < COUNT; ++j) count += __popc(bits[j]);
        return count;
    }
    // Of the elements before `end`.
    __device__ __forceinline__ int before(int end) const {
        int count = 0;
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            u32 mask = 0;
#pragma unroll
            for (int lane = 0; lane < PER_WORD; ++lane) {
                const int places = (end + shift + PER_WORD - 1 - lane) / PER_WORD - j * EACH;
                const u32 of_lane = places >= EACH ? u32((1ull << EACH) - 1) : (1u << max(places, 0)) - 1;
                mask |= of_lane << lane * EACH % 32;
            }
            count += __popc(bits[j] & mask);
        }
        return count;
    }
};

// The rows of a thread as they lie in shared memory.
struct Run {
    static constexpr int WORDS = RUN * CLASSES / PER_WORD;
    u32 words[WORDS];

    // Of a tile, from its row `at`.
    __device__ __forceinline__ Run(const T* tile, int at) {
#pragma unroll
        for (int i = 0; i < RUN * CLASSES; i += READ) {
            const Raw<T, READ> part = load_raw<READ>(tile + element(at * CLASSES + i));
#pragma unroll
            for (int j = 0; j < READ / PER_WORD; ++j) words[i / PER_WORD + j] = part.pairs[j];
        }
    }
    __device__ __forceinline__ float at(int row, int k) const {
        const int i = row * CLASSES + k;
        return lane(words[i / PER_WORD], i % PER_WORD);
    }
    static __device__ __forceinline__ float lane(u32 word, int i) {
        Raw<T, PER_WORD> raw;
        raw.pairs[0] = word;
        float v[PER_WORD];
        unpack(raw, v);
        return v[i];
    }
    // The largest element of a row; NaN if there is one.
    __device__ __forceinline__ float peak(int row) const {
        const int first = row * CLASSES, end = first + CLASSES;
        u32 best = LOWEST;
#pragma unroll
        for (int w = 0; w < WORDS; ++w)
            if (w * PER_WORD >= first && (w + 1) * PER_WORD <= end) best = lane_max(best, words[w]);
        float y = clamp_below(lane(best, 0), lane(best, PER_WORD - 1));
        if (first % PER_WORD) y = clamp_below(y, at(row, 0));
        if (end % PER_WORD) y = clamp_below(y, at(row, CLASSES - 1));
        return y;
    }
    // The first element of a row that equals what is `wanted` in every lane; some large number where none does.
    __device__ __forceinline__ int first_equal(int row, u32 wanted) const {
        const int first = row * CLASSES, end = first + CLASSES;
        u32 where = 0x7fff7fffu;  // for each lane
#pragma unroll
        for (int w = WORDS - 1; w >= 0; --w) {
            const int k = w * PER_WORD - first;  // of the first lane
            if (k + PER_WORD <= 0 || k >= CLASSES) continue;
            if (PER_WORD == 1) {
                where = __uint_as_float(words[w]) == __uint_as_float(wanted) ? k : where;
                continue;
            }
            u32 mask = lane_equal(words[w], wanted);
            if (k < 0) mask &= 0xffff0000u;
            if (w * PER_WORD + PER_WORD > end) mask &= 0x0000ffffu;
            where = (where & ~mask) | (((u32(k) & 0xffffu) | u32(k + 1) << 16) & mask);
        }
        return PER_WORD == 1 ? int(where) : min(int(where & 0xffffu), int(where >> 16));
    }
    // Makes the rows of which keep[r] is 0 zeros; of those it is ~0u of nothing changes.
    __device__ __forceinline__ void clear(const u32 (&keep)[RUN]) {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            const u32 low = keep[w * PER_WORD / CLASSES], high = keep[(w * PER_WORD + PER_WORD - 1) / CLASSES];
            words[w] &= PER_WORD == 1 || RUN == 1 ? low : (low & 0x0000ffffu) | (high & 0xffff0000u);
        }
    }
    // compare(word) gives all bits of the lanes that it holds for.
    template <class Compare>
    __device__ __forceinline__ Marks marks(int row, Compare compare) const {
        const int first = row * CLASSES, end = first + CLASSES, begin = first / PER_WORD;
        Marks found;
        found.shift = first % PER_WORD;
#pragma unroll
        for (int j = 0; j < Marks::COUNT; ++j) found.bits[j] = 0;
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            if ((w + 1) * PER_WORD <= first || w * PER_WORD >= end) continue;
            u32 lanes = ONE_PER_LANE;
            if (w * PER_WORD < first) lanes &= 0xffff0000u;
            if ((w + 1) * PER_WORD > end) lanes &= 0x0000ffffu;
            const int at = w - begin;
            found.bits[at / Marks::EACH] |= compare(words[w]) & lanes << at % Marks::EACH;
        }
        return found;
    }
};
