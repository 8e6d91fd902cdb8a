// Sums over the GPUs of one host, through memory of the others that the driver has mapped here (CUDA IPC), NVLink or
// PCIe.
//
// Each rank runs the same kernel; `peers` holds the address, here, of every rank's channel or array. Values are added
// in rank order, whatever the size and the way, in ACC (float for float32, bfloat16 and float16, rounded once): all
// ways give the same bits, on all ranks. No block waits for another block of its own grid, only for its namesake on
// other ranks.
//
//   flagged    every 8 bytes travel with their flag in one 16-byte store into a slot of each other rank: one trip
//   one_shot   each rank copies its array into its mailbox, and then reads all mailboxes
//   two_shot   on arrays that lie in mapped memory: each rank reads its share of all of them, writes the sum into all
//
// A channel of a rank, by `peers`: slots [2][RANKS][SLOTS] of 16 bytes, flags [2][2][BLOCKS][RANKS] u32, the mailbox
// [2][MAILBOX] bytes. Calls on a channel follow each other in stream order; `state` counts them (its epoch) on the
// device, so a captured call may be replayed. Everything alternates between two halves: a rank that starts call e + 2
// has finished e + 1, where it heard of all others, which had therefore finished reading e. A flag is an epoch,
// compared for equality.
//
// Who waits gives up when `stop[0]` is set by the host, or after `limit` nanoseconds; it then sets `stop[1]`, and the
// sums are worth nothing: the host ends the job.
//
// FLOP: (RANKS - 1) per element. Bytes over the links and rank: flagged 2 (RANKS - 1) S out, one_shot (RANKS - 1) S in,
// two_shot (RANKS - 1) / RANKS S in and as much out.

#include "common.cuh"

#ifndef KIND
#define KIND 0
#endif

#if KIND == 0
typedef float E; typedef float ACC;
#elif KIND == 1
typedef bf16 E; typedef float ACC;
#elif KIND == 2
typedef f16 E; typedef float ACC;
#elif KIND == 3
typedef double E; typedef double ACC;
#elif KIND == 4
typedef int E; typedef int ACC;
#elif KIND == 5
typedef i64 E; typedef i64 ACC;
#elif KIND == 6  // bytes that are only moved, by eights; 7: single ones
typedef u64 E; typedef u64 ACC;
#elif KIND == 7
typedef u8 E; typedef u8 ACC;
#endif

#ifndef WIDE  // whether arrays consist of 16 bytes at a time
#define WIDE 1
#endif
#ifndef ALIGNED  // whether this rank's array may be accessed so; the others need not agree
#define ALIGNED 1
#endif

constexpr int PER_WORD = 8 / sizeof(E);
constexpr int PER_VECTOR = WIDE ? 16 / sizeof(E) : 1;
constexpr int UNROLL = RANKS >= 8 ? 1 : 8 / RANKS;
constexpr i64 SLOT_BYTES = 16;
constexpr i64 FLAGS_AT = 2ll * RANKS * SLOTS * SLOT_BYTES;
constexpr i64 MAILBOX_AT = FLAGS_AT + 2ll * 2 * BLOCKS * RANKS * 4;
constexpr u32 PATIENCE = 512;  // looks between two glances at the clock

struct Peers { u64 at[RANKS]; };
typedef const __grid_constant__ Peers GridPeers;

// ---- accesses that other GPUs see, or that see theirs

DEVICE uint4 look(const uint4* p) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
DEVICE void drop(uint4* p, uint4 v) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE u32 acquire(const u32* p) {
    u32 v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
DEVICE void release(u32* p, u32 v) { asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }

// Never through the read-only path: what lies there changes while the kernel runs.
DEVICE void fetch(u8& v, const u8* p) {
    u32 wide;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(wide) : "l"(p) : "memory");
    v = u8(wide);
}
DEVICE void fetch(u16& v, const u16* p) { asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory"); }
DEVICE void fetch(u32& v, const u32* p) { asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); }
DEVICE void fetch(uint2& v, const uint2* p) {
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
}
DEVICE void fetch(uint4& v, const uint4* p) {
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
}

typedef Raw<E, PER_VECTOR> Vector;

DEVICE Vector fetched(u64 base, i64 index) {
    Vector v;
    fetch(v.words[0], reinterpret_cast<const Vector::word*>(base) + index);
    return v;
}
DEVICE void put(u64 base, i64 index, const Vector& v) { reinterpret_cast<Vector::word*>(base)[index] = v.words[0]; }

// The same of this rank's own array.
DEVICE Vector own_vector(const E* array, i64 index) {
    if (ALIGNED) return fetched(reinterpret_cast<u64>(array), index);
    Vector v;
#pragma unroll
    for (int j = 0; j < PER_VECTOR; ++j) v.items[j] = array[index * PER_VECTOR + j];
    return v;
}
DEVICE void put_own(E* array, i64 index, const Vector& v) {
    if (ALIGNED) {
        put(reinterpret_cast<u64>(array), index, v);
    } else {
#pragma unroll
        for (int j = 0; j < PER_VECTOR; ++j) array[index * PER_VECTOR + j] = v.items[j];
    }
}

// ---- adding

DEVICE ACC widened(E x) {
#if KIND == 1 || KIND == 2
    return to_float(x);
#else
    return x;
#endif
}
DEVICE E narrowed(ACC x) {
#if KIND == 1 || KIND == 2
    return from_float<E>(x);
#else
    return x;
#endif
}

// The sum of N elements of each rank, in rank order.
template <int N>
DEVICE void add(E (&total)[N], const E (&first)[N], bool begin, ACC (&sums)[N], bool end) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
        sums[j] = begin ? widened(first[j]) : sums[j] + widened(first[j]);
        if (end) total[j] = narrowed(sums[j]);
    }
}

DEVICE Vector added(const Vector (&parts)[RANKS]) {
    Vector total;
    ACC sums[PER_VECTOR];
#pragma unroll
    for (int r = 0; r < RANKS; ++r) add(total.items, parts[r].items, r == 0, sums, r == RANKS - 1);
    return total;
}

// ---- waiting

struct Watch {
    volatile u32* stop;
    u64 limit, since;
    u32 looks;
    __device__ __forceinline__ Watch(u32* stop, u64 limit) : stop(stop), limit(limit), since(0), looks(0) {}
    // Whether to wait no longer.
    __device__ __forceinline__ bool over() {
        if (++looks % PATIENCE) return false;
        u64 now;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        if (since == 0) since = now;
        if (now - since < limit && stop[0] == 0 && stop[1] == 0) return false;
        stop[1] = 1;
        return true;
    }
};

// This block's namesakes on all ranks have come so far, and what they stored before is seen here.
DEVICE void meet(const Peers& peers, int rank, int stage, u32 epoch, u32* stop, u64 limit) {
    __syncthreads();
    const int other = threadIdx.x;
    if (other < RANKS && other != rank) {
        const i64 flags = FLAGS_AT + 4 * ((((epoch & 1) * 2 + stage) * i64(BLOCKS) + blockIdx.x) * RANKS);
        release(reinterpret_cast<u32*>(peers.at[other] + flags) + rank, epoch);
        const u32* theirs = reinterpret_cast<const u32*>(peers.at[rank] + flags) + other;
        Watch watch(stop, limit);
        while (acquire(theirs) != epoch && !watch.over()) {}
    }
    __syncthreads();
}

// The number of this call. The last block to finish a call counts it.
DEVICE u32 begun(const u32* state) { return *reinterpret_cast<const volatile u32*>(state) + 1; }
DEVICE void finish(u32* state, u32 epoch) {
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(state + 1, 1u) == gridDim.x - 1) {
        state[1] = 0;
        state[0] = epoch;
    }
}

// ---- the ways

union Bits {
    uint2 word;
    E items[PER_WORD];
    __device__ __forceinline__ Bits() {}
};

DEVICE uint4* slot(const Peers& peers, int owner, u32 epoch, int sender, i64 i) {
    return reinterpret_cast<uint4*>(peers.at[owner]) + ((epoch & 1) * RANKS + sender) * i64(SLOTS) + i;
}

DEVICE Bits packed(const E* array, i64 word, i64 size) {
    Bits bits;
    bits.word = make_uint2(0, 0);
#pragma unroll
    for (int j = 0; j < PER_WORD; ++j)
        if (word * PER_WORD + j < size) bits.items[j] = array[word * PER_WORD + j];
    return bits;
}

DEVICE void unpack(E* array, i64 word, i64 size, const Bits& bits) {
#pragma unroll
    for (int j = 0; j < PER_WORD; ++j)
        if (word * PER_WORD + j < size) array[word * PER_WORD + j] = bits.items[j];
}

DEVICE void send_words(const E* array, i64 size, const Peers& peers, int rank, u32 epoch, i64 first, i64 step) {
    for (i64 i = first; i * PER_WORD < size; i += step) {
        const uint2 word = packed(array, i, size).word;
#pragma unroll
        for (int k = 1; k < RANKS; ++k)
            drop(slot(peers, (rank + k) % RANKS, epoch, rank, i), make_uint4(word.x, epoch, word.y, epoch));
    }
}

DEVICE Bits received(const Peers& peers, int rank, u32 epoch, int sender, i64 i, Watch& watch) {
    const uint4* place = slot(peers, rank, epoch, sender, i);
    uint4 found = look(place);
    while ((found.y != epoch || found.w != epoch) && !watch.over()) found = look(place);
    Bits bits;
    bits.word = make_uint2(found.x, found.z);
    return bits;
}

#if KIND < 6

// grid: a thread for each word of 8 bytes, fewer if they are many; at most SLOTS words.
extern "C" __global__ void __launch_bounds__(512, 1)
flagged(E* array, i64 size, GridPeers peers, int rank, u32* state, u32* stop, u64 limit) {
    const u32 epoch = begun(state);
    const i64 first = i64(blockIdx.x) * blockDim.x + threadIdx.x, step = i64(gridDim.x) * blockDim.x;
    send_words(array, size, peers, rank, epoch, first, step);
    Watch watch(stop, limit);
    for (i64 i = first; i * PER_WORD < size; i += step) {
        Bits total;
        ACC sums[PER_WORD];
#pragma unroll
        for (int r = 0; r < RANKS; ++r) {
            const Bits part = r == rank ? packed(array, i, size) : received(peers, rank, epoch, r, i, watch);
            add(total.items, part.items, r == 0, sums, r == RANKS - 1);
        }
        unpack(array, i, size, total);
    }
    finish(state, epoch);
}

// Of `array` in steps of a vector, this block's; the same on all ranks.
extern "C" __global__ void __launch_bounds__(512, 1)
one_shot(E* array, i64 vectors, GridPeers peers, int rank, u32* state, u32* stop, u64 limit) {
    const u32 epoch = begun(state);
    const i64 first = i64(blockIdx.x) * blockDim.x + threadIdx.x, step = i64(gridDim.x) * blockDim.x;
    const u64 box = MAILBOX_AT + (epoch & 1) * u64(MAILBOX);
    for (i64 i = first; i < vectors; i += step) put(peers.at[rank] + box, i, own_vector(array, i));
    meet(peers, rank, 0, epoch, stop, limit);
    for (i64 i = first; i < vectors; i += step) {
        Vector parts[RANKS];
#pragma unroll
        for (int r = 0; r < RANKS; ++r)
            parts[r] = r == rank ? own_vector(array, i) : fetched(peers.at[r] + box, i);
        put_own(array, i, added(parts));
    }
    finish(state, epoch);
}

// `arrays`: where each rank's array lies; this rank's share of the vectors is [begin, end).
extern "C" __global__ void __launch_bounds__(512, 1)
two_shot(GridPeers arrays, i64 begin, i64 end, GridPeers peers, int rank, u32* state, u32* stop, u64 limit) {
    const u32 epoch = begun(state);
    const i64 step = i64(gridDim.x) * blockDim.x;
    meet(peers, rank, 0, epoch, stop, limit);
    for (i64 i = begin + i64(blockIdx.x) * blockDim.x + threadIdx.x; i < end; i += UNROLL * step) {
        Vector parts[UNROLL][RANKS];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
#pragma unroll
            for (int r = 0; r < RANKS; ++r)
                if (i + u * step < end) parts[u][r] = fetched(arrays.at[r], i + u * step);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (i + u * step < end) {
                const Vector total = added(parts[u]);
#pragma unroll
                for (int r = 0; r < RANKS; ++r) put(arrays.at[r], i + u * step, total);
            }
    }
    meet(peers, rank, 1, epoch, stop, limit);
    finish(state, epoch);
}

#else

// `gathered`: [RANKS][size], the arrays of all ranks.
extern "C" __global__ void __launch_bounds__(512, 1)
gather(const E* array, E* gathered, i64 size, GridPeers peers, int rank, u32* state, u32* stop, u64 limit) {
    const u32 epoch = begun(state);
    const i64 first = i64(blockIdx.x) * blockDim.x + threadIdx.x, step = i64(gridDim.x) * blockDim.x;
    send_words(array, size, peers, rank, epoch, first, step);
    Watch watch(stop, limit);
    for (i64 i = first; i * PER_WORD < size; i += step)
#pragma unroll
        for (int r = 0; r < RANKS; ++r)
            unpack(gathered + r * size, i, size,
                   r == rank ? packed(array, i, size) : received(peers, rank, epoch, r, i, watch));
    finish(state, epoch);
}

#endif
