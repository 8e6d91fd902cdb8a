// Merging partial results per chunk and channel in a fixed order, in double: blocks of GROUP channels (one 32-byte sector of
// floats) by LANES threads over the chunks.
//
// Variants: -DMERGE=32 or 128, the lanes.
#pragma once
#include "common.cuh"

constexpr int GROUP = 8, LANES = MERGE;
constexpr int WARPS = GROUP * LANES / 32;
static_assert(WARPS >= GROUP && WARPS <= 32, "a warp sums a channel of the group");

// Sums over the lanes of a block of GROUP * LANES threads. Warp c < GROUP returns the totals of channel c of the group.
template <int N>
DEVICE void sum_lanes(double (&v)[N]) {
    __shared__ double parts[N][GROUP][WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        v[i] += __shfl_xor_sync(0xffffffffu, v[i], 8);
        v[i] += __shfl_xor_sync(0xffffffffu, v[i], 16);
        if (lane < GROUP) parts[i][lane][warp] = v[i];
    }
    __syncthreads();
    if (warp < GROUP)
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = warp_sum(lane < WARPS ? parts[i][warp][lane] : 0.0);
}

// add(chunk, what) with what load(chunk) gave, for this thread's chunks in order: as many loads as a thread mostly has are
// on their way at once, for what a merge takes is the time of one.
template <class What, class Load, class Add>
DEVICE void for_chunks(int chunks, Load load, Add add) {
    constexpr int AHEAD = 8;
    for (int begin = threadIdx.x / GROUP; begin < chunks; begin += AHEAD * LANES) {
        What what[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
            if (begin + i * LANES < chunks) what[i] = load(begin + i * LANES);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
            if (begin + i * LANES < chunks) add(begin + i * LANES, what[i]);
    }
}
