// Merging partial results per chunk and channel in a fixed order, in double: blocks of GROUP channels (one 32-byte
// sector of floats) by LANES threads over the chunks.
//
// Variants: -DSHARES=1, 2, 4 or 8, into how many the chunks are shared out, each summed by the lanes of a block;
// -DCLUSTER=SHARES where blocks of a cluster are these (compute capability 9.0 and newer), or 1: one block sums one
// share after another, in the same order. Blocks: CLUSTER for each group of channels.
//
// On an H200 256 threads take 1.5 to 2.5 us with few chunks, 1.1 of them the launch, and some 0.5 us more for each
// round of loads; 1024 threads begin 1.1 us later, and clusters of such blocks wait for each other's multiprocessors
// (eight: 20 us for 256 channels). Two channels a thread, half the blocks: 1 us less where chunks have 6 MB and more of
// 256 channels on, as much more for 64, and 0.2 to 0.6 more for small ones. Twice the blocks in clusters: nothing.
// Four channels a thread, as many blocks, a quarter of the rounds: nothing (25.7 MB of 256 channels 14 us, of 64 17
// us). Counters in global memory, by which the last block of any number would go on, must be zero at first and apart
// for kernels that run beside each other; the last block of the kernel that leaves the chunks would read all of them
// alone.
#pragma once
#include "await_here.cuh"
#if CLUSTER > 1
#include "hopper.cuh"
#define CLUSTERED __cluster_dims__(CLUSTER)
#else
#define CLUSTERED
#endif

constexpr int GROUP = 8, LANES = 32;
constexpr int WARPS = GROUP * LANES / 32;
constexpr int RESIDENT = 2;  // blocks a multiprocessor, for which registers must suffice
static_assert(WARPS == GROUP, "a warp sums a channel of the group");
static_assert(CLUSTER == 1 || CLUSTER == SHARES, "a block has one share, or all");

// The group's channel whose chunks this thread reads, and that whose totals it has at the end.
DEVICE int read_channel() { return blockIdx.x / CLUSTER * GROUP + threadIdx.x % GROUP; }
DEVICE int total_channel() { return blockIdx.x / CLUSTER * GROUP + threadIdx.x / 32; }

#if CLUSTER > 1
// Where the first block of a cluster counts the bytes that have come.
DEVICE u32 come() {
    __shared__ u64 barrier;
    return shared_address(&barrier);
}
#endif

// What a kernel that merges begins with: it waits for the one before, and that the blocks of a cluster have begun is
// told meanwhile; then the next one may come.
DEVICE void begin_merge() {
#if CLUSTER > 1
    if (threadIdx.x == 0) barrier_init(come(), 1), barrier_init_done();
    __syncwarp();
    cluster_arrive_relaxed();
#endif
    await_predecessor();
    let_next_in();
}

// Whether this thread has totals at the end.
DEVICE bool has_total(int channels) {
#if CLUSTER > 1
    if (cluster_rank() > 0) return false;
#endif
    return threadIdx.x % 32 == 0 && total_channel() < channels;
}

// add(v, chunk, what) with what load(chunk * pitch) gave, for a thread's chunks in order, so many at once: what a merge
// takes is the time of one load, and of the instructions, also those for chunks that there are not.
template <int AHEAD, class What, int N, class Load, class Add>
DEVICE void add_chunks(double (&v)[N], int first, int chunks, int pitch, Load load, Add add) {
    constexpr int STEP = SHARES * LANES;
    i64 at = i64(first) * pitch;
#pragma unroll 1
    for (int begin = first; begin < chunks; begin += AHEAD * STEP) {
        What what[AHEAD] = {};
#pragma unroll
        for (int i = 0; i < AHEAD; ++i, at += STEP * pitch) {
            asm volatile("" : "+l"(at));  // or each is a product of its own
            if (begin + i * STEP < chunks) what[i] = load(at);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) await_here(what[i]);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
            if (SUMS || begin + i * STEP < chunks) add(v, begin + i * STEP, what[i]);  // of sums zero adds nothing
    }
}

// The totals over `chunks` chunks of a channel, if it is there, in the threads that have them; add(v, chunk, what) adds
// what load(chunk * pitch) gave. To be called once, by all threads, after begin_merge().
template <class What, int N, class Load, class Add>
DEVICE void sum_chunks(double (&total)[N], bool there, int chunks, int pitch, Load load, Add add) {
    __shared__ double parts[N][GROUP][WARPS], shares[SHARES][GROUP][N];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#if CLUSTER > 1
    const int first = cluster_rank(), last = first + 1;
    if (first == 0 && threadIdx.x == 0) barrier_expect(come(), sizeof(shares));
#else
    constexpr int first = 0, last = SHARES;
#endif
    for (int share = first; share < last; ++share) {
        double v[N] = {};
        const int first_chunk = share * LANES + threadIdx.x / GROUP, last_chunk = there ? chunks : 0;
        if (chunks <= 2 * SHARES * LANES)
            add_chunks<2, What>(v, first_chunk, last_chunk, pitch, load, add);
        else if (chunks <= 4 * SHARES * LANES || !SUMS)
            add_chunks<4, What>(v, first_chunk, last_chunk, pitch, load, add);
        else
            add_chunks<16, What>(v, first_chunk, last_chunk, pitch, load, add);
        if (share > first) __syncthreads();  // parts have been read
#pragma unroll
        for (int i = 0; i < N; ++i) {
            v[i] += __shfl_xor_sync(0xffffffffu, v[i], 8);
            v[i] += __shfl_xor_sync(0xffffffffu, v[i], 16);
            if (lane < GROUP) parts[i][lane][warp] = v[i];
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
    cluster_wait();  // the first block has begun
    if (lane == 0)
#pragma unroll
        for (int i = 0; i < N; ++i)
            send_to_block(in_block(shared_address(&shares[first][warp][i]), 0), in_block(come(), 0), total[i]);
    if (first > 0) return;
    barrier_wait_for_cluster(come(), 0);
#endif
    if (lane == 0)  // in the first block, of what this thread wrote itself or what came
#pragma unroll
        for (int i = 0; i < N; ++i) {
            total[i] = 0.0;
#pragma unroll
            for (int share = 0; share < SHARES; ++share) total[i] += shares[share][warp][i];
        }
}
