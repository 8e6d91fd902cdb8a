// Asynchronous copies from global to shared memory by threads (cp.async), sm_80 and newer.
#pragma once
#include "shared_address.cuh"

// Starts the copy of BYTES (4, 8 or 16) bytes; an invalid source is not read and zeros are written instead.
template <int BYTES>
DEVICE void copy_async(u32 to, const void* global, bool valid) {
    const int readable = valid ? BYTES : 0;
    if constexpr (BYTES == 16) {
        // .cg keeps streamed tiles out of L1.
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(readable)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(global), "n"(BYTES), "r"(readable)
                     : "memory");
    }
}

// COUNT neighbouring values of the storage type. cp.async moves at least 4 bytes: a single 16-bit value goes through a
// register instead, and is there when the function returns.
template <int COUNT>
DEVICE void copy_values(u32 to, const void* from, bool valid) {
    constexpr int BYTES = COUNT * sizeof(T);
    if constexpr (BYTES >= 4) {
        copy_async<BYTES>(to, from, valid);
    } else {
        u16 bits = 0;
        if (valid) bits = __ldg(static_cast<const u16*>(from));
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(bits) : "memory");
    }
}

// Closes the group of the copies started since the last call.
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING groups of this thread are under way.
template <int PENDING>
DEVICE void await_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
