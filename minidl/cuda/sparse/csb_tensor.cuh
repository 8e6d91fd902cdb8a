// What the sparse products on Hopper need beside hopper.cuh: copies that complete on a barrier. Racecheck does not see
// that they do, and is told of this file (scripts/sanitize.py); those of async_copies.cuh it sees.
#pragma once
#include "async_copies.cuh"
#include "hopper.cuh"

// As copy_async; an invalid source is not read, wherever it points.
template <int BYTES>
DEVICE void copy_to_stage(u32 to, const void* from, bool valid) {
    const int readable = valid ? BYTES : 0;
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(readable)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(readable)
                     : "memory");
}

// Copies neighbouring bytes, a multiple of 16, all aligned to as much.
DEVICE void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
                 : "memory");
}
