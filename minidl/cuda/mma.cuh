// Warp-level instructions of sm_80 and newer as functions: matrix loads from shared memory (ldmatrix) and matrix products
// (mma.sync) with float32 accumulation; what brings the operands there is in async_copies.cuh.
//
// Fragments, for lane = 4 * g + t (PTX ISA, "Matrix fragments for mma"); a word is two 16-bit values or one float32:
//   a[4]  16 rows x 8 words: (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4)
//   b[2]  8 words x 8 columns: (t, g), (t + 4, g)
//   d[4]  16 rows x 8 columns: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
#pragma once
#include "async_copies.cuh"

#if DTYPE == 0
#define MMA_WHOLE "m16n8k8.row.col.f32.tf32.tf32.f32"
#define MMA_HALF "m16n8k4.row.col.f32.tf32.tf32.f32"
#elif DTYPE == 1
#define MMA_WHOLE "m16n8k16.row.col.f32.bf16.bf16.f32"
#define MMA_HALF "m16n8k8.row.col.f32.bf16.bf16.f32"
#else
#define MMA_WHOLE "m16n8k16.row.col.f32.f16.f16.f32"
#define MMA_HALF "m16n8k8.row.col.f32.f16.f16.f32"
#endif

// Four 8x8 matrices of 16-bit values (or 8x4 of 32-bit words); lane i gives the address of row i % 8 of matrix i / 8.
DEVICE void load_matrices(u32 (&words)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(row)
                 : "memory");
}

DEVICE void load_matrices_transposed(u32 (&words)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(row)
                 : "memory");
}

// The bits of a float32 rounded to TF32, nearest, ties away from zero: mma alone would truncate.
DEVICE u32 round_to_tf32(u32 bits) {
    u32 rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
    return rounded;
}

// Splits float32 in two, as three products of TF32 want them: in `words` what TF32 holds, to nearest, and in `rest`
// what is left, of which the units ignore the last bit. The rounding may carry: a NaN that it turns into a zero is one
// in what is left.
template <int COUNT>
DEVICE void split_to_tf32(u32 (&words)[COUNT], u32 (&rest)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const u32 head = (words[i] + 0x1000) & 0xffffe000;
        rest[i] = __float_as_uint(__uint_as_float(words[i]) - __uint_as_float(head));
        words[i] = head;
    }
}

// d += a b, of the storage type (with DTYPE 0 of TF32 values): 16 rows times 8 columns, summed over 8 words.
DEVICE void multiply_fragments(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned." MMA_WHOLE " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same over half the depth: the first two words of a, the first of b.
DEVICE void multiply_halves(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned." MMA_HALF " {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b[0]));
}
