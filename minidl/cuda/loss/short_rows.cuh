// Short dense rows of CLASSES elements that are not 16-byte aligned (segmentation with 21 classes), one or two for a
// thread.
//
// The rows of a warp are one run of memory, a tile: it is copied through shared memory in 16-byte vectors, then each thread
// takes its rows. With STAGES = 2 the next rows are copied during the work on these. Warps do not wait for each other.
#pragma once
#include "lanes.cuh"

#define BLOCK 128

constexpr int WIDTH = 16 / int(sizeof(T));  // elements in a 16-byte vector
// Rows of a thread: two where one of 16-bit values would begin or end within a word of shared memory.
constexpr int RUN = sizeof(T) == 2 && CLASSES % 2 ? 2 : 1;
constexpr int TILE = 32 * RUN;     // rows that a warp works on at a time, by itself
constexpr int ROWS = BLOCK * RUN;  // and a block
constexpr int READ = RUN * CLASSES % 4 == 0 ? 4 : RUN * CLASSES % 2 == 0 ? 2 : 1;
static_assert(CLASSES <= 64, "a row is held in registers");

DEVICE void copy_vector(u32 to, const T* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Starts the copy of `count` elements, at most a tile, from one 16-byte aligned place to another, by the whole warp: a
// part of the group that is committed and awaited next.
DEVICE void start_copy(T* to, const T* __restrict__ from, int count) {
    constexpr int VECTORS = TILE * CLASSES / WIDTH;
    const int lane = threadIdx.x % 32;
    const u32 target = u32(__cvta_generic_to_shared(to + lane * WIDTH));
    const T* source = from + lane * WIDTH;
    if (count == TILE * CLASSES) {  // nearly always: no comparison for each vector
#pragma unroll
        for (int u = 0; u < ceil_div(VECTORS, 32); ++u)
            if (u < VECTORS / 32 || lane < VECTORS % 32) copy_vector(target + u * 32 * 16, source + u * 32 * WIDTH);
        return;
    }
    const int vectors = count / WIDTH, i = vectors * WIDTH + lane;
    for (int u = 0; u * 32 + lane < vectors; ++u) copy_vector(target + u * 32 * 16, source + u * 32 * WIDTH);
    if (i < count) to[i] = from[i];
}

DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all but the last GROUPS groups of the whole warp.
template <int GROUPS>
DEVICE void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
    __syncwarp();
}

// Copies `count` elements of a warp's tile back to memory, when the whole warp has written them.
DEVICE void write_back(T* __restrict__ to, const T* from, int count) {
    __syncwarp();
    const int vectors = count / WIDTH;
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < vectors; i += 32) store_raw(to + i * WIDTH, load_raw<WIDTH>(from + i * WIDTH));
    const int i = vectors * WIDTH + threadIdx.x % 32;
    if (i < count) to[i] = from[i];
}

// work(row, x, label) for this thread's part of each of the block's `passes` groups of rows: the first of its RUN rows,
// where that lies in shared memory, and the labels, `ignore_index` behind the last row. `memory`: STAGES tiles a warp.
template <class F>
DEVICE void for_labelled_rows(uint4* memory, const T* __restrict__ from, const LABEL* __restrict__ labels, i64 rows,
                              int passes, i64 ignore_index, F work) {
    T* tiles = reinterpret_cast<T*>(memory) + threadIdx.x / 32 * (STAGES * TILE * CLASSES);
    const i64 begin = (i64(blockIdx.x) * passes * BLOCK + threadIdx.x / 32 * 32) * RUN;  // of the warp's first tile
    const auto start_tile = [&](int pass) {
        const i64 first = begin + i64(pass) * ROWS;
        if (pass < passes && first < rows)
            start_copy(tiles + pass % STAGES * (TILE * CLASSES), from + first * CLASSES,
                       int(min(i64(TILE), rows - first)) * CLASSES);
        commit_copies();
    };
    if (STAGES > 1) start_tile(0);
    for (int pass = 0; pass < passes && begin + i64(pass) * ROWS < rows; ++pass) {
        const i64 row = begin + i64(pass) * ROWS + threadIdx.x % 32 * RUN;
        i64 label[RUN];
#pragma unroll
        for (int r = 0; r < RUN; ++r) label[r] = row + r < rows ? i64(labels[row + r]) : ignore_index;
        if (pass > 0) __syncwarp();
        start_tile(pass + STAGES - 1);
        await_copies<STAGES - 1>();
        if (row < rows) work(row, tiles + (pass % STAGES * TILE + threadIdx.x % 32 * RUN) * CLASSES, label);
    }
}

// A tile of rows that is read, changed in place and written elsewhere.
struct Rewrite {
    T* tile;
    i64 begin;  // the warp's first row
    int count, row;  // rows of the warp, and the first of this thread among them

    __device__ __forceinline__ Rewrite(uint4* memory, const T* __restrict__ from, i64 rows) {
        tile = reinterpret_cast<T*>(memory) + threadIdx.x / 32 * (TILE * CLASSES);
        begin = (i64(blockIdx.x) * BLOCK + threadIdx.x / 32 * 32) * RUN;
        count = int(min(i64(TILE), max(rows - begin, i64(0))));
        row = threadIdx.x % 32 * RUN;
        start_copy(tile, from + begin * CLASSES, count * CLASSES);
        commit_copies();
    }
    // What `from` (rows,) holds for this thread's rows, `otherwise` behind the last.
    template <class S, class X>
    __device__ __forceinline__ void fetch(const S* __restrict__ from, X otherwise, X (&values)[RUN]) const {
#pragma unroll
        for (int r = 0; r < RUN; ++r) values[r] = row + r < count ? X(from[begin + row + r]) : otherwise;
    }
    // Puts value(r, k) of this thread's rows r in the place of their elements k, and the tile to its place in `to`.
    template <class F>
    __device__ __forceinline__ void finish(T* __restrict__ to, F value) const {
        if (row < count) {
            T* x = tile + row * CLASSES;
#pragma unroll
            for (int i = 0; i < RUN * CLASSES; i += READ) {
                float part[READ];
#pragma unroll
                for (int e = 0; e < READ; ++e) part[e] = value((i + e) / CLASSES, (i + e) % CLASSES);
                store(x + i, part);
            }
        }
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
    // The first of them; some large number where there is none.
    __device__ __forceinline__ int first() const {
        u32 place = 0x7fffffffu;
#pragma unroll
        for (int j = COUNT - 1; j >= 0; --j)
#pragma unroll
            for (int lane = 0; lane < PER_WORD; ++lane) {
                const u32 of_lane = PER_WORD == 1 ? bits[j] : bits[j] >> lane * EACH & ((1u << EACH) - 1);
                if (of_lane) place = min(place, u32((__ffs(of_lane) - 1 + j * EACH) * PER_WORD + lane));
            }
        return int(place) - shift;
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

    __device__ __forceinline__ explicit Run(const T* from) {
#pragma unroll
        for (int i = 0; i < RUN * CLASSES; i += READ) {
            const Raw<T, READ> part = load_raw<READ>(from + i);
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
