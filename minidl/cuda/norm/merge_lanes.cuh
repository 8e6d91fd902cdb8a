// Merging partial results per chunk and channel in a fixed order, in double: blocks of GROUP channels (one 32-byte sector of
// floats) by LANES threads over the chunks.
//
// Variants: -DEACH=1 or 4, neighbouring channels of a thread, which reads them together; -DSHARES=1, 2, 4 or 8, into how
// many the chunks are shared out, each summed by the lanes of a block; -DCLUSTER=SHARES where blocks of a cluster are these
// (compute capability 9.0 and newer), or 1: one block sums one share after another, in the same order. Blocks: CLUSTER for
// each group of channels.
//
// On an H200 256 threads take 2.5 us with few chunks and 1 us more for each round of loads; 1024 threads begin 1.1 us later,
// and clusters of such blocks wait for each other's multiprocessors (eight: 20 us for 256 channels). Two channels a thread,
// half the blocks: 1 us less where chunks have 6 MB and more of 256 channels on, as much more for 64, and 0.2 to 0.6 more for
// small ones.
// Counters in global memory, by which the last block of any number would go on, must be zero at first and apart for
// kernels that run beside each other; the last block of the kernel that leaves the chunks would read all of them alone.
#pragma once
#include "common.cuh"
#if CLUSTER > 1
#include "hopper.cuh"
#define CLUSTERED __cluster_dims__(CLUSTER)
#else
#define CLUSTERED
#endif

constexpr int GROUP = 8, THREADS = 256, ACROSS = GROUP / EACH, LANES = THREADS / ACROSS;
constexpr int WARPS = THREADS / 32;
static_assert(WARPS == GROUP, "a warp sums a channel of the group");
static_assert(CLUSTER == 1 || CLUSTER == SHARES, "a block has one share, or all");

// The first of the group's channels whose chunks this thread reads, and that whose totals it has at the end.
DEVICE int read_channel() { return blockIdx.x / CLUSTER * GROUP + threadIdx.x % ACROSS * EACH; }
DEVICE int total_channel() { return blockIdx.x / CLUSTER * GROUP + threadIdx.x / 32; }

// Whether this thread has totals at the end.
DEVICE bool has_total(int channels) {
#if CLUSTER > 1
    if (cluster_rank() > 0) return false;
#endif
    return threadIdx.x % 32 == 0 && total_channel() < channels;
}

// What a chunk has of a thread's channels.
template <class What>
struct Chunk {
    What of[EACH];
};

// Two floats of each channel, from two rows.
DEVICE Chunk<float2> load_pairs(const float* first, const float* second) {
    const Raw<float, EACH> one = load_raw<EACH>(first), other = load_raw<EACH>(second);
    Chunk<float2> chunk;
#pragma unroll
    for (int e = 0; e < EACH; ++e) chunk.of[e] = make_float2(one.items[e], other.items[e]);
    return chunk;
}

// add(v, chunk, what) with what load(chunk) gave of each channel, for a thread's chunks in order: as many loads as a thread
// mostly has are on their way at once, for what a merge takes is the time of one.
template <class What, int N, class Load, class Add>
DEVICE void add_chunks(double (&v)[EACH][N], int first, int chunks, Load load, Add add) {
    constexpr int AHEAD = sizeof(Chunk<What>) > 8 ? 4 : SHARES == 8 ? 16 : 8, STEP = SHARES * LANES;
    for (int begin = first; begin < chunks; begin += AHEAD * STEP) {
        Chunk<What> what[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
            if (begin + i * STEP < chunks) what[i] = load(begin + i * STEP);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
            if (begin + i * STEP < chunks)
#pragma unroll
                for (int e = 0; e < EACH; ++e) add(v[e], begin + i * STEP, what[i].of[e]);
    }
}

// Of four values of each lane the sum over lanes that have the same: after two steps, in which lanes that are 2 and 4 apart
// divide them, of the one that is left: value lane / 2 % 2 * 2 + lane / 4 % 2.
DEVICE double sum_divided(double a, double b, double c, double d) {
    const bool upper = threadIdx.x & 2, odd = threadIdx.x & 4;
    const double first = (upper ? c : a) + __shfl_xor_sync(0xffffffffu, upper ? a : c, 2);
    const double second = (upper ? d : b) + __shfl_xor_sync(0xffffffffu, upper ? b : d, 2);
    return (odd ? second : first) + __shfl_xor_sync(0xffffffffu, odd ? first : second, 4);
}

// The channel of the group that a lane below GROUP has after that.
DEVICE int divided_channel(int lane) { return EACH == 1 ? lane : lane % 2 * 4 + lane / 2 % 2 * 2 + lane / 4; }

// The totals of a channel over `chunks` chunks, in the threads that have them; add(v, chunk, what) adds what load(chunk)
// gave. To be called once, by all threads.
template <class What, int N, class Load, class Add>
DEVICE void sum_chunks(double (&total)[N], int chunks, Load load, Add add) {
    __shared__ double parts[N][GROUP][WARPS], shares[SHARES][GROUP][N];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#if CLUSTER > 1
    cluster_arrive();  // that the first block has begun is known below, before others write into it
    const int first = cluster_rank(), last = first + 1;
#else
    constexpr int first = 0, last = SHARES;
#endif
    for (int share = first; share < last; ++share) {
        double v[EACH][N] = {};
        add_chunks<What>(v, share * LANES + threadIdx.x / ACROSS, chunks, load, add);
        if (share > first) __syncthreads();  // parts have been read
#pragma unroll
        for (int i = 0; i < N; ++i) {
            double one = EACH == 1 ? v[0][i] : sum_divided(v[0][i], v[1 % EACH][i], v[2 % EACH][i], v[3 % EACH][i]);
            one += __shfl_xor_sync(0xffffffffu, one, 8);
            one += __shfl_xor_sync(0xffffffffu, one, 16);
            if (lane < GROUP) parts[i][divided_channel(lane)][warp] = one;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < N; ++i) {
            total[i] = lane < WARPS ? parts[i][warp][lane] : 0.0;
#pragma unroll
            for (int offset = WARPS / 2; offset > 0; offset /= 2)
                total[i] += __shfl_xor_sync(0xffffffffu, total[i], offset);
            if (CLUSTER == 1 && SHARES > 1 && lane == 0) shares[share][warp][i] = total[i];
        }
    }
    if (SHARES == 1) return;
#if CLUSTER > 1
    cluster_wait();
    if (lane == 0)
#pragma unroll
        for (int i = 0; i < N; ++i) store_in_block(shared_address(&shares[first][warp][i]), 0, total[i]);
    __syncwarp();
    cluster_arrive();
    cluster_wait();
#endif
    if (lane == 0)  // in the first block, of what this thread wrote itself or what others did
#pragma unroll
        for (int i = 0; i < N; ++i) {
            total[i] = 0.0;
#pragma unroll
            for (int share = 0; share < SHARES; ++share) total[i] += shares[share][warp][i];
        }
}
