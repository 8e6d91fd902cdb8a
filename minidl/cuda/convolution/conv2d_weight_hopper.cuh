// What the weight gradients of Hopper share: clusters, and how sums leave the registers.
// Macros: CLUSTER (1, 2), blocks that add up their sums before they write them; VEC_Y (1, 2), values per access to the
// output.
#pragma once
#include "hopper.cuh"

// Without clusters the hardware fills one group of multiprocessors (GPC) with blocks before it goes on to the next;
// clusters, even of one block, it deals out over the groups (seen on an H200). Blocks in a row share pixels, and are
// served faster within one group.
#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER)
#else
#define CLUSTERED
#endif

// What a thread writes of some columns: its first column in the gradient, and how many there are from that one on.
struct Target {
    int column, left;
};

// Neighbouring columns of one row, set or added to: a parameter of the template, as is what else is known of all, since
// branches would cost more than the stores.
template <bool ADD>
DEVICE void put_pair(float* to, float first, float second) {
    if constexpr (VEC_Y == 2) {
        float2& pair = *reinterpret_cast<float2*>(to);
        const float2 before = ADD ? pair : make_float2(0.0f, 0.0f);
        pair = ADD ? make_float2(before.x + first, before.y + second) : make_float2(first, second);
    } else {
        to[0] = ADD ? to[0] + first : first;
        to[1] = ADD ? to[1] + second : second;
    }
}

// Adds up what the blocks of a cluster have summed, in the order of their ranks, each block its share of every thread's
// accumulators, and writes it. Of product i of a thread accumulators 4 * j to 4 * j + 3 are two columns of row `row` +
// ACROSS * i, and of the row DOWN further down; columns follow each other from 8 to 8, PER times.
// find(b): this thread's part of the b-th columns. output: this partial sum. space: shared memory for all sums of the
// block, which the copy engine has done with; THREADS: of the multiplying warpgroups.
template <int THREADS, int ACROSS, int DOWN, int PER, bool ADD, int BLOCKS, int N, class Find>
DEVICE void finish(const float (&sum)[BLOCKS][N], u32 space, float* output, int row, int rows, i64 pitch, Find find) {
    constexpr int QUADS = N / 4;
    static_assert(QUADS % PER == 0, "whole spans of columns");
    const auto write = [&](const Target& at, int i, int j, const float4& quad) {
        const int here = row + ACROSS * i;
        float* const to = output + here * pitch + at.column + 8 * j;
        if (8 * j < at.left && here < rows) put_pair<ADD>(to, quad.x, quad.y);
        if (8 * j < at.left && here + DOWN < rows) put_pair<ADD>(to + DOWN * pitch, quad.z, quad.w);
    };
    if constexpr (CLUSTER == 1) {
#pragma unroll
        for (int b = 0; b < QUADS / PER; ++b) {
            Target at = find(b);
            asm volatile("" : "+r"(at.column), "+r"(at.left)::"memory");  // one by one: no registers for all addresses
#pragma unroll
            for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
                for (int j = 0; j < PER; ++j) {
                    const float* const four = sum[i] + 4 * (b * PER + j);
                    write(at, i, j, make_float4(four[0], four[1], four[2], four[3]));
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
        constexpr int TOGETHER = SHARE % PER ? PER / 2 : PER;
        static_assert(SHARE % TOGETHER == 0, "whole spans of columns, or halves");
        const int first = cluster_rank() * SHARE;
#pragma unroll 1
        for (int share = first; share < first + SHARE; share += TOGETHER) {
            float4 part[TOGETHER][CLUSTER];
#pragma unroll
            for (int j = 0; j < TOGETHER; ++j)
#pragma unroll
                for (int rank = 0; rank < CLUSTER; ++rank)
                    part[j][rank] = load_from_block(space + (share + j) * THREADS * 16, rank);
            const int quad = share % QUADS;
            const Target at = find(quad / PER);
#pragma unroll
            for (int j = 0; j < TOGETHER; ++j) {
                float4 total = part[j][0];
#pragma unroll
                for (int rank = 1; rank < CLUSTER; ++rank) {
                    total.x += part[j][rank].x, total.y += part[j][rank].y;
                    total.z += part[j][rank].z, total.w += part[j][rank].w;
                }
                write(at, share / QUADS, quad % PER + j, total);
            }
        }
        cluster_sync();  // others may still be reading
    }
}
