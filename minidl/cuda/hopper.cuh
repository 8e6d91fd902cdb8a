// Instructions of sm_90a as functions: barriers in shared memory (mbarrier), the copy engine (TMA), clusters, and loads
// and stores of what these hand on; matrix products are in wgmma.cuh. Racecheck does not see the engine arrive, so it
// is told that accesses of this file are in order (scripts/sanitize.py): kernels of other devices have their own, of
// async_copies.cuh and mma.cuh.
#pragma once
#include "common.cuh"
#include "shared_address.cuh"

// Encoded on the host (hopper.py), read by the copy engine from the kernel's parameters.
struct __align__(64) TensorMap { u64 words[16]; };

// ---- barriers

DEVICE void barrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers known to the copy engine; for the thread that initialised them.
DEVICE void barrier_init_done() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and keeps the phase open until the copy engine has written as many bytes.
DEVICE void barrier_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase of this parity is over. No way out: a trap in this loop would make ptxas serialise the
// products.
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n .reg .pred done;\nwait:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        " @!done bra wait;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Where in a ring of COUNT buffers a thread stands, and the parity of its round.
template <int COUNT>
struct Ring {
    int index = 0;
    u32 parity = 0;

    __device__ __forceinline__ void advance(int steps = 1) {
        index += steps;
        if (index >= COUNT) index -= COUNT, parity ^= 1;
    }
};

// The thread's number in its warpgroup, read anew: what follows from threadIdx would be kept over the products, in
// registers that they need.
DEVICE u32 thread_again() {
    u32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread % 128;
}

// The warpgroup's number, and the block's, likewise.
DEVICE u32 warpgroup_again() {
    u32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread / 128;
}

DEVICE u32 block_again() {
    u32 block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    return block;
}

// A barrier of one warpgroup's 128 threads; ids from 1, as 0 is __syncthreads.
DEVICE void warpgroup_sync(int id) { asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory"); }

// ---- copies by the engine: coordinates are given fastest dimension first; what lies outside is read as 0, not written

// Lets the engine fetch a map before the first copy asks for it.
DEVICE void prefetch_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// How long the L2 cache keeps what a copy reads: as usual; or, where all who read it do so at about the same time, its
// lines are the first that it gives up.
enum class Kept : u64 { USUALLY = 0x1000000000000000, BRIEFLY = 0x12f0000000000000 };

DEVICE void load_box(u32 to, const TensorMap& map, u32 barrier, int c0, int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
        "[%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1)
        : "memory");
}

DEVICE void load_box(u32 to, const TensorMap& map, u32 barrier, int c0, int c1, Kept kept) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%3, %4}], [%2], %5;" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "l"(kept)
        : "memory");
}

DEVICE void load_box(u32 to, const TensorMap& map, u32 barrier, int c0, int c1, int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
        "[%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

DEVICE void load_box(u32 to, const TensorMap& map, u32 barrier, int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

// A column of pixels of an image (C, W, H, N) from (c, w, h, n) on, walking the map's bounding box, each pixel moved by
// an offset (at most 254).
DEVICE void load_pixels(u32 to, const TensorMap& map, u32 barrier, int c, int w, int h, int n, int offset_w,
                        int offset_h) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(n), "h"(static_cast<u16>(offset_w)),
        "h"(static_cast<u16>(offset_h))
        : "memory");
}

DEVICE void load_pixels(u32 to, const TensorMap& map, u32 barrier, int c, int w, int h, int n, int offset_w,
                        int offset_h, Kept kept) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%3, %4, %5, %6}], [%2], {%7, %8}, %9;" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(n), "h"(static_cast<u16>(offset_w)),
        "h"(static_cast<u16>(offset_h)), "l"(kept)
        : "memory");
}

DEVICE void store_box(const TensorMap& map, u32 from, int c0, int c1) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
                 "r"(from), "r"(c0), "r"(c1)
                 : "memory");
}

DEVICE void store_box(const TensorMap& map, u32 from, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
                 "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}

DEVICE void store_pixels(const TensorMap& map, u32 from, int c, int w, int h, int n) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.im2col_no_offs.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
            &map),
        "r"(from), "r"(c), "r"(w), "r"(h), "r"(n)
        : "memory");
}

DEVICE void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most PENDING groups of this thread's stores still read shared memory.
template <int PENDING>
DEVICE void await_stores_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory"); }

// Lets the threads of a warpgroup, which have FROM registers each, go on with TO. Who takes waits until there are as
// many; where there never are, for ever.
template <int FROM, int TO>
DEVICE void set_registers() {
    if constexpr (TO < FROM) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(TO));
    if constexpr (TO > FROM) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(TO));
}

// How a block alone on its multiprocessor shares out the registers: all its threads begin with as many, GIVING of them
// keep LEFT each, TAKING go on with TAKEN. Whole warpgroups do so, of a kernel whose __launch_bounds__ say all of these
// threads.
template <int GIVING, int LEFT, int TAKING, int TAKEN>
struct RegisterShares {
    static constexpr int BLOCK = GIVING + TAKING, EACH = 65536 / BLOCK / 8 * 8;
    static_assert(GIVING * LEFT + TAKING * TAKEN <= BLOCK * EACH, "no more registers than there are");
    DEVICE void give() { set_registers<EACH, LEFT>(); }
    DEVICE void take() { set_registers<EACH, TAKEN>(); }
};

// Starts a copy of 16 bytes by this thread, of zeros where there are none.
DEVICE void copy_chunk(u32 to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

// Arrives once the copies that this thread has started are done.
DEVICE void arrive_with_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Orders this thread's own writes to shared memory before what the engine does after the next barrier.
DEVICE void fence_for_engine() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- matrix loads and stores: four 8x8 matrices of 16-bit values, lane i gives the address of row i % 8 of matrix i /
// 8. ACROSS: what lies in memory as rows are the columns of the matrices in registers.

template <bool ACROSS = false>
DEVICE void load_matrices(u32 (&words)[4], u32 row) {
    if constexpr (ACROSS)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                     : "r"(row)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                     : "r"(row)
                     : "memory");
}

// Turns 8 x 8 float32 of a warp, of which a lane has values 2q and 2q + 1 of row g, over: it then has them of column g.
DEVICE void turn_over(float& first, float& second) {
    u32 low = __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x5410);
    u32 high = __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x7632);
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(low));
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(high));
    first = __uint_as_float(__byte_perm(low, high, 0x5410));
    second = __uint_as_float(__byte_perm(low, high, 0x7632));
}

template <bool ACROSS = false>
DEVICE void store_matrices(u32 row, const u32 (&words)[4]) {
    if constexpr (ACROSS)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(words[0]),
                     "r"(words[1]), "r"(words[2]), "r"(words[3])
                     : "memory");
    else
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(words[0]),
                     "r"(words[1]), "r"(words[2]), "r"(words[3])
                     : "memory");
}

// ---- clusters: blocks that run together and read each other's shared memory

DEVICE int cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return static_cast<int>(rank);
}

// All threads of the cluster that have not exited; what they wrote to shared memory before is seen by all after. In two
// halves: who arrives goes on until it must know that all have.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

// cluster_arrive where nothing but initialised barriers is to be seen after: that waits for all loads and stores that
// are under way.
DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }

// The address there of what is at this block's `address`.
DEVICE u32 in_block(u32 address, int rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// Stores four values, or one, in another block, which counts their bytes at a barrier of its own; both by their
// addresses there.
DEVICE void send_to_block(u32 address, u32 barrier, float4 value) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(address),
        "r"(barrier), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
        : "memory");
}

DEVICE void send_to_block(u32 address, u32 barrier, double value) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f64 [%0], %2, [%1];" ::"r"(address),
                 "r"(barrier), "d"(value)
                 : "memory");
}

// As barrier_wait, for what another block of the cluster has sent.
DEVICE void barrier_wait_for_cluster(u32 barrier, u32 parity) {
    asm volatile(
        "{\n .reg .pred done;\nwait:\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        " @!done bra wait;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// What another block has at the same address.
DEVICE float4 load_from_block(u32 address, int rank) {
    float4 value;
    asm volatile(
        "{\n .reg .b32 there;\n mapa.shared::cluster.u32 there, %4, %5;\n"
        " ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
        : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
        : "r"(address), "r"(rank)
        : "memory");
    return value;
}

DEVICE uint4 load_shared(u32 address) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
}

DEVICE u32 load_shared_word(u32 address) {
    u32 value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

DEVICE uint2 load_shared_pair(u32 address) {
    uint2 value;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(address) : "memory");
    return value;
}

DEVICE void store_shared(u32 address, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

DEVICE void store_shared(u32 address, uint2 value) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(value.x), "r"(value.y) : "memory");
}

// A predicated store is no branch: what makes the value may be mixed with other work.
DEVICE void store_shared(u32 address, uint4 value, u32 wanted) {
    asm volatile(
        "{\n .reg .pred wanted;\n setp.ne.b32 wanted, %5, 0;\n"
        " @wanted st.shared.v4.u32 [%0], {%1, %2, %3, %4};\n}" ::"r"(address),
        "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(wanted)
        : "memory");
}

DEVICE void store_shared(u32 address, float4 value) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(value.x), "f"(value.y), "f"(value.z),
                 "f"(value.w)
                 : "memory");
}

// A barrier of several warpgroups.
template <int THREADS>
DEVICE void warpgroups_sync(int id) { asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory"); }
