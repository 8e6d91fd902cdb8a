// Matrix products of a warpgroup, four warps, on operands in shared memory (wgmma); sm_90a.
//
// Operands lie in shared memory as rows of 128 bytes, 64 16-bit values or 32 of float32 (DTYPE 0, whose products round
// to TF32), whose 16-byte chunks are swizzled: chunk c of row r is at place c ^ r % 8 (CU_TENSOR_MAP_SWIZZLE_128B).
// Eight rows, 1024 bytes and aligned to that, make an atom.
//
// Accumulators of a 64 x N product, for thread t of the warpgroup, warp w = t / 32, lane = 4 * g + q:
// d[4 * j + 2 * i + e] is row 16 * w + 8 * i + g, column 8 * j + 2 * q + e.
#pragma once
#include "common.cuh"

DEVICE void product_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
DEVICE void await_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

// Keeps the compiler from moving reads of accumulators before the wait for them.
template <int N>
DEVICE void settle(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Describes an operand. With the depth along the rows (K-major) groups of eight rows are `group` bytes apart, 1024
// where atoms follow each other; it may start at any row of an atom, and the next product's depth is 32 bytes further.
// With the depth across the rows (MN-major) atoms follow each other along the depth, and blocks of 64 rows or columns
// are `block` bytes apart; 16 values further are 2048 bytes further.
DEVICE u64 operand(u32 address, int block = 16, int group = 1024) {
    return u64((address & 0x3ffff) >> 4) | u64(block >> 4) << 16 | u64(group >> 4) << 32 | 1ull << 62;
}

// What an operand's description grows by when its address does.
DEVICE constexpr u64 operand_step(int bytes) { return bytes >> 4; }

#if DTYPE == 0
#define WGMMA_SHAPE(N) "m64n" N "k8.f32.tf32.tf32"
#define WGMMA_ACROSS(FLAGS) ""
#elif DTYPE == 1
#define WGMMA_SHAPE(N) "m64n" N "k16.f32.bf16.bf16"
#define WGMMA_ACROSS(FLAGS) ", " FLAGS
#else
#define WGMMA_SHAPE(N) "m64n" N "k16.f32.f16.f16"
#define WGMMA_ACROSS(FLAGS) ", " FLAGS
#endif
#define WGMMA(N, REGISTERS, A, B, KEEP, A_ACROSS, B_ACROSS)                                                    \
    "{\n .reg .pred keep;\n setp.ne.b32 keep, %" KEEP ", 0;\n"                                                \
    " wgmma.mma_async.sync.aligned." WGMMA_SHAPE(N) " {" REGISTERS "}, %" A ", %" B                            \
    ", keep, 1, 1" WGMMA_ACROSS("%" A_ACROSS ", %" B_ACROSS) ";\n}"
#define WGMMA_0_15 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_0_31                                                                                              \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
    "%23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_32_39 "%32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_32_47 WGMMA_32_39 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_32_55 WGMMA_32_47 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_32_63                                                                                              \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
    "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_64_79 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_64_95                                                                                              \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, " \
    "%85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_96_111                                                                                                \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_112_127                                                                                        \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_16(i) WGMMA_4(i), WGMMA_4(i + 4), WGMMA_4(i + 8), WGMMA_4(i + 12)
#define WGMMA_INPUTS "l"(a), "l"(b), "r"(keep), "n"(int(A_ACROSS)), "n"(int(B_ACROSS))

// d = a b, added to d when `keep`: 64 x 16 times 16 x N, of float32 64 x 8 times 8 x N. ACROSS: that operand is
// MN-major, which only 16-bit ones can be. The accumulators are the unit's until the wait for the group; call
// product_fence() before the first.
template <bool B_ACROSS, bool A_ACROSS = false>
DEVICE void multiply(float (&d)[16], u64 a, u64 b, int keep) {
    asm volatile(WGMMA("32", WGMMA_0_15, "16", "17", "18", "19", "20") : WGMMA_16(0) : WGMMA_INPUTS);
}

template <bool B_ACROSS, bool A_ACROSS = false>
DEVICE void multiply(float (&d)[32], u64 a, u64 b, int keep) {
    asm volatile(WGMMA("64", WGMMA_0_31, "32", "33", "34", "35", "36") : WGMMA_16(0), WGMMA_16(16) : WGMMA_INPUTS);
}

template <bool B_ACROSS, bool A_ACROSS = false>
DEVICE void multiply(float (&d)[40], u64 a, u64 b, int keep) {
    asm volatile(WGMMA("80", WGMMA_0_31 ", " WGMMA_32_39, "40", "41", "42", "43", "44")
                 : WGMMA_16(0), WGMMA_16(16), WGMMA_4(32), WGMMA_4(36)
                 : WGMMA_INPUTS);
}

template <bool B_ACROSS, bool A_ACROSS = false>
DEVICE void multiply(float (&d)[48], u64 a, u64 b, int keep) {
    asm volatile(WGMMA("96", WGMMA_0_31 ", " WGMMA_32_47, "48", "49", "50", "51", "52")
                 : WGMMA_16(0), WGMMA_16(16), WGMMA_16(32)
                 : WGMMA_INPUTS);
}

template <bool B_ACROSS, bool A_ACROSS = false>
DEVICE void multiply(float (&d)[56], u64 a, u64 b, int keep) {
    asm volatile(WGMMA("112", WGMMA_0_31 ", " WGMMA_32_55, "56", "57", "58", "59", "60")
                 : WGMMA_16(0), WGMMA_16(16), WGMMA_16(32), WGMMA_4(48), WGMMA_4(52)
                 : WGMMA_INPUTS);
}

template <bool B_ACROSS, bool A_ACROSS = false>
DEVICE void multiply(float (&d)[64], u64 a, u64 b, int keep) {
    asm volatile(WGMMA("128", WGMMA_0_31 ", " WGMMA_32_63, "64", "65", "66", "67", "68")
                 : WGMMA_16(0), WGMMA_16(16), WGMMA_16(32), WGMMA_16(48)
                 : WGMMA_INPUTS);
}

template <bool B_ACROSS, bool A_ACROSS = false>
DEVICE void multiply(float (&d)[80], u64 a, u64 b, int keep) {
    asm volatile(WGMMA("160", WGMMA_0_31 ", " WGMMA_32_63 ", " WGMMA_64_79, "80", "81", "82", "83", "84")
                 : WGMMA_16(0), WGMMA_16(16), WGMMA_16(32), WGMMA_16(48), WGMMA_16(64)
                 : WGMMA_INPUTS);
}

template <bool B_ACROSS, bool A_ACROSS = false>
DEVICE void multiply(float (&d)[96], u64 a, u64 b, int keep) {
    asm volatile(WGMMA("192", WGMMA_0_31 ", " WGMMA_32_63 ", " WGMMA_64_95, "96", "97", "98", "99", "100")
                 : WGMMA_16(0), WGMMA_16(16), WGMMA_16(32), WGMMA_16(48), WGMMA_16(64), WGMMA_16(80)
                 : WGMMA_INPUTS);
}

template <bool B_ACROSS, bool A_ACROSS = false>
DEVICE void multiply(float (&d)[112], u64 a, u64 b, int keep) {
    asm volatile(WGMMA("224", WGMMA_0_31 ", " WGMMA_32_63 ", " WGMMA_64_95 ", " WGMMA_96_111, "112", "113", "114",
                       "115", "116")
                 : WGMMA_16(0), WGMMA_16(16), WGMMA_16(32), WGMMA_16(48), WGMMA_16(64), WGMMA_16(80), WGMMA_16(96)
                 : WGMMA_INPUTS);
}

template <bool B_ACROSS, bool A_ACROSS = false>
DEVICE void multiply(float (&d)[128], u64 a, u64 b, int keep) {
    asm volatile(WGMMA("256", WGMMA_0_31 ", " WGMMA_32_63 ", " WGMMA_64_95 ", " WGMMA_96_111 ", " WGMMA_112_127, "128",
                       "129", "130", "131", "132")
                 : WGMMA_16(0), WGMMA_16(16), WGMMA_16(32), WGMMA_16(48), WGMMA_16(64), WGMMA_16(80), WGMMA_16(96),
                   WGMMA_16(112)
                 : WGMMA_INPUTS);
}

// The same with a in registers, 64 x 16, of float32 64 x 8: of each warp the words (g, 2q), (g + 8, 2q), (g, 2q + 8), (g + 8, 2q + 8) of
// its 16 rows, of float32 (g, q), (g + 8, q), (g, q + 4), (g + 8, q + 4). They too are the unit's until the wait.
#define WGMMA_WORDS(N, REGISTERS, A0, A1, A2, A3, B, KEEP, ACROSS)                                            \
    "{\n .reg .pred keep;\n setp.ne.b32 keep, %" KEEP ", 0;\n"                                                \
    " wgmma.mma_async.sync.aligned." WGMMA_SHAPE(N) " {" REGISTERS "}, {%" A0 ", %" A1 ", %" A2 ", %" A3 "}, %" B \
    ", keep, 1, 1" WGMMA_ACROSS("%" ACROSS) ";\n}"
#define WGMMA_WORD_INPUTS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep), "n"(int(B_ACROSS))

template <bool B_ACROSS = false>
DEVICE void multiply(float (&d)[16], const u32 (&a)[4], u64 b, int keep) {
    asm volatile(WGMMA_WORDS("32", WGMMA_0_15, "16", "17", "18", "19", "20", "21", "22")
                 : WGMMA_16(0)
                 : WGMMA_WORD_INPUTS);
}

template <bool B_ACROSS = false>
DEVICE void multiply(float (&d)[32], const u32 (&a)[4], u64 b, int keep) {
    asm volatile(WGMMA_WORDS("64", WGMMA_0_31, "32", "33", "34", "35", "36", "37", "38")
                 : WGMMA_16(0), WGMMA_16(16)
                 : WGMMA_WORD_INPUTS);
}

template <bool B_ACROSS = false>
DEVICE void multiply(float (&d)[40], const u32 (&a)[4], u64 b, int keep) {
    asm volatile(WGMMA_WORDS("80", WGMMA_0_31 ", " WGMMA_32_39, "40", "41", "42", "43", "44", "45", "46")
                 : WGMMA_16(0), WGMMA_16(16), WGMMA_4(32), WGMMA_4(36)
                 : WGMMA_WORD_INPUTS);
}

template <bool B_ACROSS = false>
DEVICE void multiply(float (&d)[48], const u32 (&a)[4], u64 b, int keep) {
    asm volatile(WGMMA_WORDS("96", WGMMA_0_31 ", " WGMMA_32_47, "48", "49", "50", "51", "52", "53", "54")
                 : WGMMA_16(0), WGMMA_16(16), WGMMA_16(32)
                 : WGMMA_WORD_INPUTS);
}

template <bool B_ACROSS = false>
DEVICE void multiply(float (&d)[56], const u32 (&a)[4], u64 b, int keep) {
    asm volatile(WGMMA_WORDS("112", WGMMA_0_31 ", " WGMMA_32_55, "56", "57", "58", "59", "60", "61", "62")
                 : WGMMA_16(0), WGMMA_16(16), WGMMA_16(32), WGMMA_4(48), WGMMA_4(52)
                 : WGMMA_WORD_INPUTS);
}

template <bool B_ACROSS = false>
DEVICE void multiply(float (&d)[64], const u32 (&a)[4], u64 b, int keep) {
    asm volatile(WGMMA_WORDS("128", WGMMA_0_31 ", " WGMMA_32_63, "64", "65", "66", "67", "68", "69", "70")
                 : WGMMA_16(0), WGMMA_16(16), WGMMA_16(32), WGMMA_16(48)
                 : WGMMA_WORD_INPUTS);
}

template <bool B_ACROSS = false>
DEVICE void multiply(float (&d)[96], const u32 (&a)[4], u64 b, int keep) {
    asm volatile(
        WGMMA_WORDS("192", WGMMA_0_31 ", " WGMMA_32_63 ", " WGMMA_64_95, "96", "97", "98", "99", "100", "101", "102")
        : WGMMA_16(0), WGMMA_16(16), WGMMA_16(32), WGMMA_16(48), WGMMA_16(64), WGMMA_16(80)
        : WGMMA_WORD_INPUTS);
}

template <bool B_ACROSS = false>
DEVICE void multiply(float (&d)[128], const u32 (&a)[4], u64 b, int keep) {
    asm volatile(WGMMA_WORDS("256", WGMMA_0_31 ", " WGMMA_32_63 ", " WGMMA_64_95 ", " WGMMA_96_111 ", " WGMMA_112_127,
                             "128", "129", "130", "131", "132", "133", "134")
                 : WGMMA_16(0), WGMMA_16(16), WGMMA_16(32), WGMMA_16(48), WGMMA_16(64), WGMMA_16(80), WGMMA_16(96),
                   WGMMA_16(112)
                 : WGMMA_WORD_INPUTS);
}
