// What the weight gradients of Hopper share: clusters, how images are walked, and how sums leave the registers.
// Macros: CLUSTER (1, 2), blocks that add up their sums before they write them; OVERFLOWS: the gradient leaves the L2
// cache first.
#pragma once
#include "hopper.cuh"

#ifndef TURNS
#define TURNS 0
#define OVERFLOWS 0
#endif

// Without clusters the hardware fills one group of multiprocessors (GPC) with blocks before it goes on to the next;
// clusters, even of one block, it deals out over the groups (seen on an H200). Blocks in a row share pixels, and are
// served faster within one group.
#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER)
#else
#define CLUSTERED
#endif

// A pixel of images of height x width, or a point of a grid over them, and those a stage further: `further_n`, `_h` and
// `_w` of the problem, which are a stage as images, rows and pixels.
struct Pixel {
    int image, y, x;

    __device__ __forceinline__ Pixel() {}
    __device__ __forceinline__ Pixel(int index, int height, int width) {
        const int line = index / width;
        x = index - line * width;
        image = line / height;
        y = line - image * height;
    }

    template <class Problem>
    __device__ __forceinline__ void advance(const Problem& p, int height, int width) {
        x += p.further_w;
        y += p.further_h;
        image += p.further_n;
        if (x >= width) x -= width, ++y;
        if (y >= height) y -= height, ++image;
    }
};

// What a partial sum holds of a tile: rows, and columns of each span. Multiples of 16, all but where the gradient has
// fewer.
struct Patches {
    int rows, columns;
};
constexpr bool WHOLE = TURNS;  // always all of it: there are no registers to leave some out

// What a thread writes of some columns: its first column in the gradient, and how many there are from that one on.
struct Target {
    int column, left;
};

// Where sums go: over the gradient, added to it, or into a partial sum. A parameter of templates, as is what else is
// known of all stores, since branches would cost more than the stores.
enum Mode { SET, ADD, PART };

// The first of the four columns of sixteen that this thread writes.
DEVICE int thread_column() { return threadIdx.x % 2 * 8 + threadIdx.x % 4 / 2 * 4; }

template <Mode MODE>
DEVICE void put_four(float* to, float4 four) {
    float4& there = *reinterpret_cast<float4*>(to);
    if constexpr (MODE == ADD) {
        const float4 before = there;
        four.x += before.x, four.y += before.y, four.z += before.z, four.w += before.w;
    }
    if constexpr (MODE != PART && OVERFLOWS)
        asm volatile("st.global.cs.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(four.x), "f"(four.y), "f"(four.z),
                     "f"(four.w)
                     : "memory");
    else
        there = four;
}

// Of two neighbouring patches, 8 columns each, what this thread holds: two columns of row `row` and of the row DOWN
// further. Neighbours trade their halves before: then four threads write 64 bytes of a row.
template <int DOWN, Mode MODE>
DEVICE void put_patches(float* output, i64 pitch, int row, int rows, const Target& at, int j, const float4& left,
                        const float4& right) {
    float* const to = output + row * pitch + at.column + 8 * j;
    const bool odd = threadIdx.x % 2;
    float4 mine = odd ? right : left, traded = odd ? left : right;
    traded.x = __shfl_xor_sync(0xffffffffu, traded.x, 1), traded.y = __shfl_xor_sync(0xffffffffu, traded.y, 1);
    traded.z = __shfl_xor_sync(0xffffffffu, traded.z, 1), traded.w = __shfl_xor_sync(0xffffffffu, traded.w, 1);
    const float4 before = odd ? traded : mine, after = odd ? mine : traded;
    const bool inside = 8 * j < at.left;
    if (inside && row < rows) put_four<MODE>(to, make_float4(before.x, before.y, after.x, after.y));
    if (inside && row + DOWN < rows)
        put_four<MODE>(to + DOWN * pitch, make_float4(before.z, before.w, after.z, after.w));
    asm volatile("" ::: "memory");
}

// Adds up what the blocks of a cluster have summed, in the order of their ranks, each block its share of every thread's
// accumulators, and writes it. Of product i of a thread accumulators 4 * j to 4 * j + 3 are two columns of row `row` +
// ACROSS * i, and of the row DOWN further down; columns follow each other from 8 to 8, PER times.
// find(b): this thread's part of the b-th columns. output: the gradient, of which a row is `pitch` values; or of a
// partial sum this thread's place in the patch of its first accumulators, where a line of patches is so many values:
// a patch is 16 rows x 8 columns, four values of each lane, so that a warp writes 512 bytes at a time. row: of a partial
// sum, counted in the tile. column: the first of them in a span. patches: of a partial sum.
// space: shared memory for all sums of the block, which the copy engine has done with; THREADS: of the multiplying
// warpgroups.
template <int THREADS, int ACROSS, int DOWN, int PER, Mode MODE, int BLOCKS, int N, class Find>
DEVICE void finish(const float (&sum)[BLOCKS][N], u32 space, float* output, int row, int rows, int column, i64 pitch,
                   Patches patches, Find find) {
    constexpr int QUADS = N / 4, PATCH = 128;
    static_assert(QUADS % PER == 0 && PER % 2 == 0, "whole spans of columns");
    const auto write = [&](const Target& at, int b, int i, int j, const float4& left, const float4& right) {
        if constexpr (MODE == PART) {
            if (!WHOLE && (column + 8 * j >= patches.columns || row + ACROSS * i >= patches.rows)) return;
            float* const to = output + i * (ACROSS / 16) * pitch + b * patches.columns * 16 + j * PATCH;
            put_four<SET>(to, left), put_four<SET>(to + PATCH, right);
        } else {
            put_patches<DOWN, MODE>(output, pitch, row + ACROSS * i, rows, at, j, left, right);
        }
    };
    if constexpr (CLUSTER == 1) {
#pragma unroll
        for (int b = 0; b < QUADS / PER; ++b) {
            Target at = {};
            if constexpr (MODE != PART) {
                at = find(b);
                // One by one: there are no registers for all addresses.
                asm volatile("" : "+r"(at.column), "+r"(at.left)::"memory");
            }
#pragma unroll
            for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
                for (int j = 0; j < PER; j += 2) {
                    const float* const s = sum[i] + 4 * (b * PER + j);
                    write(at, b, i, j, make_float4(s[0], s[1], s[2], s[3]), make_float4(s[4], s[5], s[6], s[7]));
                }
        }
    } else {
        constexpr int SHARE = BLOCKS * QUADS / CLUSTER;
        static_assert(SHARE * CLUSTER == BLOCKS * QUADS, "equal shares");
        space += threadIdx.x * 16;
        warpgroups_sync<THREADS>(1);  // the stages are no longer read
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
            for (int j = 0; j < QUADS; ++j)
                store_shared(space + (i * QUADS + j) * THREADS * 16,
                             make_float4(sum[i][4 * j], sum[i][4 * j + 1], sum[i][4 * j + 2], sum[i][4 * j + 3]));
        cluster_sync();
        constexpr int MOST = PER > 2 ? PER : 8, TOGETHER = SHARE % MOST ? MOST / 2 : MOST;
        static_assert(SHARE % TOGETHER == 0 && TOGETHER % 2 == 0,
                      "whole spans of columns, halves, or pairs of patches");
        const int first = cluster_rank() * SHARE;
#pragma unroll 1
        for (int share = first; share < first + SHARE; share += TOGETHER) {
            float4 part[TOGETHER][CLUSTER];
#pragma unroll
            for (int j = 0; j < TOGETHER; ++j)
#pragma unroll
                for (int rank = 0; rank < CLUSTER; ++rank)
                    part[j][rank] = load_from_block(space + (share + j) * THREADS * 16, rank);
#pragma unroll
            for (int j = 0; j < TOGETHER; ++j)
#pragma unroll
                for (int rank = 1; rank < CLUSTER; ++rank) {
                    part[j][0].x += part[j][rank].x, part[j][0].y += part[j][rank].y;
                    part[j][0].z += part[j][rank].z, part[j][0].w += part[j][rank].w;
                }
            Target at = {};
#pragma unroll
            for (int j = 0; j < TOGETHER; j += 2) {
                const int quad = (share + j) % QUADS;
                if (MODE != PART && j % PER == 0) at = find(quad / PER);
                write(at, quad / PER, (share + j) / QUADS, quad % PER, part[j][0], part[j + 1][0]);
            }
        }
        cluster_sync();  // others may still be reading
    }
}
