// Products of warps on float32 in TF32 (mma.sync), for the weight gradient on Hopper: wgmma takes such operands only with
// the summed dimension innermost, and here it is the pixels.
//
// Operands are blocks of 32 pixels x 32 filters or channels, rows of 128 bytes as the copy engine leaves them (see
// hopper.cuh). A thread of lane 4 * g + t has pixels 2 * t and 2 * t + 1 of every eight: with the swizzle no two threads
// that read together meet in a bank, and which pixel is which of a product's eight is the same for both operands. Of 16
// rows g and g + 8 of a fragment are filters 2 * g and 2 * g + 1, which are read at once; of 8 columns g is channel g.
//
// Macros: TF32, 1: the engine has rounded the operands; 3: each is split in two, of whose products the smallest is left
// out (see tile.cuh), and every stage is summed apart, as the units cut long sums off.
#pragma once
#include "hopper.cuh"

// Fragments of 8 pixels, of M blocks of rows and N of columns.
template <int M, int N>
struct Fragments {
    u32 rows[2 * M][4], columns[4 * N][2];
};

DEVICE u32 load_word(u32 address) {
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
}

DEVICE uint2 load_pair(u32 address) {
    uint2 pair;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(pair.x), "=r"(pair.y) : "r"(address) : "memory");
    return pair;
}

// Where this thread's words are in a block of rows or columns, for each fragment of it and both pixels.
struct Places {
    u32 row[2][2], column[4][2];

    __device__ __forceinline__ Places(u32 rows, u32 columns) {
        const u32 g = threadIdx.x % 32 / 4, pixel = threadIdx.x % 4 * 2;
#pragma unroll
        for (u32 next = 0; next < 2; ++next) {
            const u32 line = (pixel + next) * 128, twist = pixel + next;
#pragma unroll
            for (u32 f = 0; f < 2; ++f) row[f][next] = rows + line + ((4 * f + g / 2 ^ twist) << 4) + g % 2 * 8;
#pragma unroll
            for (u32 f = 0; f < 4; ++f) column[f][next] = columns + line + ((2 * f + g / 4 ^ twist) << 4) + g % 4 * 4;
        }
    }
};

// offset: of the stage, and of the eight pixels in it.
template <int M, int N>
DEVICE void load_fragments(Fragments<M, N>& to, const Places& places, u32 offset, int block_bytes) {
#pragma unroll
    for (int i = 0; i < 2 * M; ++i)
#pragma unroll
        for (int next = 0; next < 2; ++next) {
            const uint2 pair = load_pair(places.row[i % 2][next] + offset + i / 2 * block_bytes);
            to.rows[i][2 * next] = pair.x, to.rows[i][2 * next + 1] = pair.y;
        }
#pragma unroll
    for (int j = 0; j < 4 * N; ++j)
#pragma unroll
        for (int next = 0; next < 2; ++next)
            to.columns[j][next] = load_word(places.column[j % 4][next] + offset + j / 4 * block_bytes);
}

// Of each word what TF32 holds, to nearest, and what is left, of which the units ignore the last bit. A NaN that the
// carry turns into a zero is one in what is left.
template <int COUNT, int WORDS>
DEVICE void split_words(u32 (&words)[COUNT][WORDS], u32 (&rest)[COUNT][WORDS]) {
#pragma unroll
    for (int i = 0; i < COUNT * WORDS; ++i) {
        u32& word = words[i / WORDS][i % WORDS];
        const u32 head = (word + 0x1000) & 0xffffe000;
        rest[i / WORDS][i % WORDS] = __float_as_uint(__uint_as_float(word) - __uint_as_float(head));
        word = head;
    }
}

// sum[i][4 * j]...: of fragment i of the rows and j of the columns, of this thread filter 2 * g, channels 2 * t and
// 2 * t + 1, then filter 2 * g + 1.
template <int M, int N>
DEVICE void multiply_fragments(float (&sum)[2 * M][16 * N], const u32 (&a)[2 * M][4], const u32 (&b)[4 * N][2]) {
#pragma unroll
    for (int i = 0; i < 2 * M; ++i)
#pragma unroll
        for (int j = 0; j < 4 * N; ++j) {
            float* const d = sum[i] + 4 * j;
            asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                "{%0, %1, %2, %3};"
                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                : "r"(a[i][0]), "r"(a[i][1]), "r"(a[i][2]), "r"(a[i][3]), "r"(b[j][0]), "r"(b[j][1]));
        }
}

template <int I, int J>
DEVICE void clear(float (&sum)[I][J]) {
#pragma unroll
    for (int i = 0; i < I * J; ++i) sum[i / J][i % J] = 0.0f;
}

// Adds the product of 8 pixels.
template <int M, int N>
DEVICE void multiply_eight(float (&sum)[2 * M][16 * N], Fragments<M, N>& of) {
    if constexpr (TF32 == 3) {
        Fragments<M, N> rest;
        split_words(of.rows, rest.rows);
        split_words(of.columns, rest.columns);
        multiply_fragments<M, N>(sum, rest.rows, of.columns);
        multiply_fragments<M, N>(sum, of.rows, rest.columns);
    }
    multiply_fragments<M, N>(sum, of.rows, of.columns);
}
