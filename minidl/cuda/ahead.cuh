// Rows that are on their way while those before are worked on: GROUPS groups of EACH rows of ARRAYS arrays, through
// shared memory, where each thread has a part of its own. Of loads into registers a thread has as many under way only
// until the first comes: then it works on all of them, and has none.
#pragma once
#include "async_copies.cuh"

// One vector; of whole 16 bytes it may be kept out of L1.
template <bool PAST_L1>
DEVICE void start_copy(T* to, const T* __restrict__ from) {
    constexpr int BYTES = VEC * int(sizeof(T));
    if constexpr (BYTES == 16 && PAST_L1) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
    } else if constexpr (BYTES >= 4) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(BYTES)
                     : "memory");
    } else {  // too little for the instruction
        store_raw(to, load_raw<VEC>(from));
    }
}

template <int GROUPS, int EACH, int ARRAYS, bool PAST_L1 = true>
struct Ahead {
    T *first, *next;  // this thread's vectors of the first group, and of that which is to be worked on next
    int part;         // elements from one of its vectors to another

    // `memory`: GROUPS * EACH * ARRAYS vectors for each of `threads` threads.
    __device__ __forceinline__ Ahead(T* memory, int thread, int threads)
        : first(memory + thread * VEC), next(first), part(threads * VEC) {}

    // ask(start) asks for the group behind that of the last call: start(e, k, from) for each array of each of its rows
    // that exist. To be called once.
    template <class Ask>
    __device__ __forceinline__ void fill(Ask ask) {
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) start(first + i * EACH * ARRAYS * part, ask);
    }

    // A group, what does not exist left as it was; another is asked for in its place.
    template <class Ask>
    __device__ __forceinline__ void take(Raw<T, VEC> (&raw)[EACH][ARRAYS], Ask ask) {
        await_copies<GROUPS - 1>();
#pragma unroll
        for (int e = 0; e < EACH; ++e)
#pragma unroll
            for (int k = 0; k < ARRAYS; ++k) raw[e][k] = load_raw<VEC>(next + (e * ARRAYS + k) * part);
        start(next, ask);
        next = next == first + (GROUPS - 1) * EACH * ARRAYS * part ? first : next + EACH * ARRAYS * part;
    }

private:
    template <class Ask>
    __device__ __forceinline__ void start(T* to, Ask ask) {
        ask([&](int e, int k, const T* from) { start_copy<PAST_L1>(to + (e * ARRAYS + k) * part, from); });
        commit_copies();
    }
};
