// Products of warps on float32 in TF32 (mma.sync), for the weight gradient on Hopper: wgmma takes such operands only
// with the summed dimension innermost, and here it is the pixels.
//
// Operands are blocks of 32 pixels x 32 filters or channels, rows of 128 bytes as the copy engine leaves them (see
// wgmma.cuh). A thread of lane 4 * g + t has pixels 2 * t and 2 * t + 1 of every eight: with the swizzle no two
// threads that read together meet in a bank, and which pixel is which of a product's eight is the same for both
// operands. Of 16 rows g and g + 8 of a fragment are filters 2 * g and 2 * g + 1, which are read at once; of 8 columns
// g is channel g.
//
// Macros: TF32, 1: the engine has rounded the operands; 3: each is split in two, of whose products the smallest is left
// out (see tile.cuh), and every stage is summed apart, as the units cut long sums off.
#pragma once
#include "hopper.cuh"
#include "mma.cuh"

// Fragments of 8 pixels, of M blocks of rows and N of columns.
template <int M, int N>
struct Fragments {
    u32 rows[2 * M][4], columns[4 * N][2];
};

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
            const uint2 pair = load_shared_pair(places.row[i % 2][next] + offset + i / 2 * block_bytes);
            to.rows[i][2 * next] = pair.x, to.rows[i][2 * next + 1] = pair.y;
        }
#pragma unroll
    for (int j = 0; j < 4 * N; ++j)
#pragma unroll
        for (int next = 0; next < 2; ++next)
            to.columns[j][next] = load_shared_word(places.column[j % 4][next] + offset + j / 4 * block_bytes);
}

template <int I, int J>
DEVICE void clear(float (&sum)[I][J]) {
#pragma unroll
    for (int i = 0; i < I * J; ++i) sum[i / J][i % J] = 0.0f;
}

// sum[4 * j]...: the product of a fragment of the rows and of fragment j of the columns, of this thread filter 2 * g,
// channels 2 * t and 2 * t + 1, then filter 2 * g + 1.
template <int N>
DEVICE void multiply_columns(float (&sum)[4 * N], const u32 (&rows)[4], const u32 (&columns)[N][2]) {
#pragma unroll
    for (int j = 0; j < N; ++j) multiply_fragments(reinterpret_cast<float(&)[4]>(sum[4 * j]), rows, columns[j]);
}

// Adds the product of 8 pixels.
template <int M, int N>
DEVICE void multiply_eight(float (&sum)[2 * M][16 * N], Fragments<M, N>& of) {
    u32 columns_rest[4 * N][2];
    if constexpr (TF32 == 3)
#pragma unroll
        for (int j = 0; j < 4 * N; ++j) split_to_tf32(of.columns[j], columns_rest[j]);
#pragma unroll
    for (int i = 0; i < 2 * M; ++i) {
        if constexpr (TF32 == 3) {
            u32 rest[4];
            split_to_tf32(of.rows[i], rest);
            multiply_columns<4 * N>(sum[i], rest, of.columns);
            multiply_columns<4 * N>(sum[i], of.rows[i], columns_rest);
        }
        multiply_columns<4 * N>(sum[i], of.rows[i], of.columns);
    }
}
