// What the sparse products on Hopper need beside hopper.cuh: copies that complete on a barrier, and wgmma on TF32 with
// the left operand in registers.
#pragma once
#include "hopper.cuh"

// Starts the copy of BYTES (4, 8 or 16) bytes; an invalid source is not read, wherever it points, and zeros are written.
template <int BYTES>
DEVICE void copy_async(u32 to, const void* from, bool valid) {
    const int readable = valid ? BYTES : 0;
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(readable)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(readable)
                     : "memory");
}

// Closes the group of the copies started since the last call.
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING groups of this thread's copies are under way.
template <int PENDING>
DEVICE void await_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// Copies neighbouring bytes, a multiple of 16, all aligned to as much.
DEVICE void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
                 : "memory");
}

// The bits of a float32 rounded to TF32, nearest, ties away from zero.
DEVICE u32 round_to_tf32(float value) {
    u32 rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
    return rounded;
}

// d = a b, added to d when `keep`: 64 x 8 times 8 x 128 in TF32, or 64 x 16 times 16 x 128 in a 16-bit type. `a`: rows g
// and g + 8, positions t, then t + 4 (pairs of them); `b`: a K-major operand in shared memory.
#if DTYPE
DEVICE void multiply_words(float (&d)[64], const u32 (&a)[4], u64 b, int keep) { multiply(d, a, b, keep); }
#else
#define TF32_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TF32_16(i) TF32_4(i), TF32_4(i + 4), TF32_4(i + 8), TF32_4(i + 12)
DEVICE void multiply_words(float (&d)[64], const u32 (&a)[4], u64 b, int keep) {
    asm volatile(
        "{\n .reg .pred keep;\n setp.ne.b32 keep, %69, 0;\n"
        " wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
        "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, "
        "%35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, "
        "%57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, keep, 1, 1;\n}"
        : TF32_16(0), TF32_16(16), TF32_16(32), TF32_16(48)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}
#undef TF32_4
#undef TF32_16
#endif
