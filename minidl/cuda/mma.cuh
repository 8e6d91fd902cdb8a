// Warp-level instructions of sm_80 and newer as functions: asynchronous copies from global to shared memory, matrix
// loads from shared memory (ldmatrix) and matrix products (mma.sync) with float32 accumulation. All inline PTX of the
// implicit-GEMM kernels is here.
//
// Fragments, for lane = 4 * g + t (PTX ISA, "Matrix fragments for mma"); a word is two 16-bit values or one float32:
//   a[4]  16 rows x 8 words: (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4)
//   b[2]  8 words x 8 columns: (t, g), (t + 4, g)
//   c[4]  16 rows x 8 columns: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
#pragma once
#include "shared_address.cuh"

// Starts the copy of BYTES (4, 8 or 16) bytes; an invalid source is not read and zeros are written instead.
template <int BYTES>
__device__ __forceinline__ void copy_async(unsigned int to, const void* global, bool valid) {
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

// Closes the group of the copies started since the last call.
__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most PENDING groups of this thread are under way.
template <int PENDING>
__device__ __forceinline__ void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four 8x8 matrices of 16-bit values (or 8x4 of 32-bit words); lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(unsigned int (&words)[4], unsigned int row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(row)
                 : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(unsigned int (&words)[4], unsigned int row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(row)
                 : "memory");
}

// The bits of a float32 rounded to TF32, nearest, ties away from zero: mma alone would truncate.
__device__ __forceinline__ unsigned int round_to_tf32(unsigned int bits) {
    unsigned int rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
    return rounded;
}

#define MINIDL_MMA(SUFFIX)                                                                                     \
    asm("mma.sync.aligned." SUFFIX " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"           \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                       \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

__device__ __forceinline__ void mma_bf16(float (&c)[4], const unsigned int (&a)[4], const unsigned int (&b)[2]) {
    MINIDL_MMA("m16n8k16.row.col.f32.bf16.bf16.f32");
}

__device__ __forceinline__ void mma_f16(float (&c)[4], const unsigned int (&a)[4], const unsigned int (&b)[2]) {
    MINIDL_MMA("m16n8k16.row.col.f32.f16.f16.f32");
}

__device__ __forceinline__ void mma_tf32(float (&c)[4], const unsigned int (&a)[4], const unsigned int (&b)[2]) {
    MINIDL_MMA("m16n8k8.row.col.f32.tf32.tf32.f32");
}

// Half the depth: the first two words of a, the first of b.
#define MINIDL_MMA_HALF(SHAPE, TYPE)                                                                             \
    asm("mma.sync.aligned." SHAPE ".row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "      \
        "{%0, %1, %2, %3};"                                                                                      \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                         \
        : "r"(a[0]), "r"(a[1]), "r"(b[0]))

__device__ __forceinline__ void mma_bf16_half(float (&c)[4], const unsigned int (&a)[4], const unsigned int (&b)[2]) {
    MINIDL_MMA_HALF("m16n8k8", "bf16");
}

__device__ __forceinline__ void mma_f16_half(float (&c)[4], const unsigned int (&a)[4], const unsigned int (&b)[2]) {
    MINIDL_MMA_HALF("m16n8k8", "f16");
}

__device__ __forceinline__ void mma_tf32_half(float (&c)[4], const unsigned int (&a)[4], const unsigned int (&b)[2]) {
    MINIDL_MMA_HALF("m16n8k4", "tf32");
}

#undef MINIDL_MMA
#undef MINIDL_MMA_HALF
