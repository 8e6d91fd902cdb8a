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

// Neighbouring columns of one row.
DEVICE void put(float* to, float first, float second, bool add) {
    if constexpr (VEC_Y == 2) {
        float2& pair = *reinterpret_cast<float2*>(to);
        if (add) first += pair.x, second += pair.y;
        pair = make_float2(first, second);
    } else {
        to[0] = add ? to[0] + first : first;
        to[1] = add ? to[1] + second : second;
    }
}

// Four accumulators of a thread: two columns from `channel` on of a row and of the row 8 further down.
// output: the gradient from some tap's first channel on; rows, columns, channels: of all of it.
DEVICE void put_quad(float* output, float4 quad, int row, int rows, int columns, int channel, int channels, bool add) {
    if (channel >= channels) return;
    float* const to = output + i64(row) * columns + channel;
    if (row < rows) put(to, quad.x, quad.y, add);
    if (row + 8 < rows) put(to + 8 * i64(columns), quad.z, quad.w, add);
}

// Adds up what the blocks of a cluster have summed, in the order of their ranks, each block its share of every thread's
// accumulators, and writes it. write(i, j, quad): accumulators 4 * j to 4 * j + 3 of product i. space: shared memory
// for all sums of the block, which the copy engine has done with; THREADS: of the multiplying warpgroups.
template <int THREADS, int BLOCKS, int N, class Write>
DEVICE void finish(const float (&sum)[BLOCKS][N], u32 space, Write write) {
    constexpr int QUADS = N / 4;
    if constexpr (CLUSTER == 1) {
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
            for (int j = 0; j < QUADS; ++j)
                write(i, j, make_float4(sum[i][4 * j], sum[i][4 * j + 1], sum[i][4 * j + 2], sum[i][4 * j + 3]));
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
        const int first = cluster_rank() * SHARE;
#pragma unroll 2
        for (int share = first; share < first + SHARE; ++share) {
            float4 part[CLUSTER];
#pragma unroll
            for (int rank = 0; rank < CLUSTER; ++rank) part[rank] = load_from_block(space + share * THREADS * 16, rank);
            float4 total = part[0];
#pragma unroll
            for (int rank = 1; rank < CLUSTER; ++rank) {
                total.x += part[rank].x, total.y += part[rank].y;
                total.z += part[rank].z, total.w += part[rank].w;
            }
            write(share / QUADS, share % QUADS, total);
        }
        cluster_sync();  // others may still be reading
    }
}
