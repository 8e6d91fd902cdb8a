// Operand tiles in shared memory and the product of two of them, for the implicit-GEMM convolutions.
//
// A stage of the pipeline holds 128 bytes of depth (the summed dimension): DEPTH = 64 values of 16 bits or 32 of 32.
// That is the same on every device, because the order of a sum follows from it; the number of stages is not.
// An operand tile has EXTENT rows (or columns) of the product and comes in two orders, whichever way the operand is
// contiguous in memory; both take EXTENT * 128 bytes and are permuted in chunks of 16 bytes so that neither the
// copies into them nor the fragment loads out of them meet a bank twice:
//   DEPTH_INNER   EXTENT rows of 128 bytes of depth; chunk ^= row % 8
//   otherwise     DEPTH rows of EXTENT values;      chunk ^= depth % 8 (16-bit) or depth % 4 * 2 (32-bit)
// The accumulators stay in registers; `stage` spreads them out as float32 rows in shared memory,
// where the epilogue picks them up in the order in which they are written to global memory.
//
// Macros: DTYPE, and TF32 (1: float32 operands rounded to TF32 on tensor cores; 3: each split into two such, of whose
// products the smallest is left out, which comes near to float32's accuracy (Ootomo, Yokota, "Recovering single
// precision accuracy from Tensor Cores", 2022); 0: float32 products are exact FFMA).
// Every sum runs over the depth in the same order whatever the tile, so results do not depend on the tile chosen.
#pragma once
#include "common.cuh"
#include "mma.cuh"

constexpr int WARPS = 2, THREADS = 32 * WARPS * WARPS;  // along the rows and along the columns of a block's tile
constexpr int DEPTH_BYTES = 128;
constexpr int DEPTH = DEPTH_BYTES / sizeof(T);
constexpr int CHUNK = 16 / sizeof(T);

template <int EXTENT, bool DEPTH_INNER>
struct Tile {
    static constexpr int BYTES = EXTENT * DEPTH_BYTES;
    static constexpr int PITCH = DEPTH_INNER ? DEPTH_BYTES : EXTENT * static_cast<int>(sizeof(T));

    // What the chunk numbers of a row are permuted with (exclusive or).
    static __device__ __forceinline__ constexpr int twist(int row) {
        return DEPTH_INNER || sizeof(T) == 2 ? row & 7 : (row & 3) << 1;
    }

    // Byte offset of one value; the values of an aligned chunk of 16 bytes stay together.
    static __device__ __forceinline__ int offset(int extent, int depth) {
        const int row = DEPTH_INNER ? extent : depth, column = DEPTH_INNER ? depth : extent;
        const int byte = column * static_cast<int>(sizeof(T));
        return row * PITCH + (((byte >> 4) ^ twist(row)) << 4) + (byte & 15);
    }

    // An offset moved by rows and chunks whose bits are clear in its own row and chunk: no carry, so constants stay
    // constants and one register serves many accesses.
    static __device__ __forceinline__ int moved(int offset, int rows, int chunks) {
        return (offset + rows * PITCH) ^ ((twist(rows) ^ chunks) << 4);
    }
};

// Column of a staged float32 row: rows of a quad land in different banks when fragments are written.
__device__ __forceinline__ int staged_column(int row, int column) { return column ^ ((row & 3) << 3); }

#if DTYPE != 0 || TF32

// Tensor-core product: WARPS x WARPS warps, each with its part of rows and columns in fragments of 16 x 8.
template <int ROWS, int COLUMNS, bool A_DEPTH_INNER, bool B_DEPTH_INNER>
struct TileProduct {
    using A = Tile<ROWS, A_DEPTH_INNER>;
    using B = Tile<COLUMNS, B_DEPTH_INNER>;
    static constexpr int M = ROWS / WARPS / 16;
    static constexpr int N = COLUMNS / WARPS / 8;
    static constexpr int STEP = 32 / sizeof(T);  // depth of one mma: 32 bytes
    static_assert(N % 2 == 0, "column fragments are loaded in pairs");

    float sum[M][N][4];
    u32 tiles;             // shared memory
    int a_start, b_start;  // this thread's first value in the operands' tiles, as ldmatrix wants it

    __device__ __forceinline__ explicit TileProduct(const unsigned char* shared) : tiles(shared_address(shared)) {
        const int lane = threadIdx.x % 32;
        a_start = A_DEPTH_INNER ? A::offset(warp_row() + lane % 16, lane / 16 * CHUNK)
                                : A::offset(warp_row() + lane / 8 % 2 * 8, lane % 8 + lane / 16 * 8);
        b_start = B_DEPTH_INNER ? B::offset(warp_column() + lane % 8 + lane / 16 * 8, lane / 8 % 2 * CHUNK)
                                : B::offset(warp_column() + lane / 16 * 8, lane % 16);
#pragma unroll
        for (int i = 0; i < M; ++i)
#pragma unroll
            for (int j = 0; j < N; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) sum[i][j][e] = 0.0f;
    }

    static __device__ __forceinline__ int warp_row() { return threadIdx.x / 32 / WARPS * (ROWS / WARPS); }
    static __device__ __forceinline__ int warp_column() { return threadIdx.x / 32 % WARPS * (COLUMNS / WARPS); }

    // A word of a tile of 32-bit values: ldmatrix transposes 16-bit values only.
    static __device__ __forceinline__ u32 load_word(u32 address) {
        u32 word;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
        return word;
    }

    // Fragment i of the rows.
    __device__ __forceinline__ void load_a(u32 (&a)[4], u32 tile, int i, int depth) const {
        if constexpr (A_DEPTH_INNER) {
            load_matrices(a, tile + A::moved(a_start, 16 * i, depth / CHUNK));
        } else if constexpr (sizeof(T) == 2) {
            load_matrices_transposed(a, tile + A::moved(a_start, depth, 2 * i));
        } else {
            const int row = warp_row() + 16 * i + threadIdx.x % 32 / 4;
#pragma unroll
            for (int e = 0; e < 4; ++e)
                a[e] = load_word(tile + A::offset(row + e % 2 * 8, depth + threadIdx.x % 4 + e / 2 * 4));
        }
    }

    // Fragments j and j + 1 of the columns.
    __device__ __forceinline__ void load_b(u32 (&b)[4], u32 tile, int j, int depth) const {
        if constexpr (B_DEPTH_INNER) {
            load_matrices(b, tile + B::moved(b_start, 8 * j, depth / CHUNK));
        } else if constexpr (sizeof(T) == 2) {
            load_matrices_transposed(b, tile + B::moved(b_start, depth, j));
        } else {
            const int column = warp_column() + 8 * j + threadIdx.x % 32 / 4;
#pragma unroll
            for (int e = 0; e < 4; ++e)
                b[e] = load_word(tile + B::offset(column + e / 2 * 8, depth + threadIdx.x % 4 + e % 2 * 4));
        }
    }

    template <int COUNT>
    static __device__ __forceinline__ void round(u32 (&words)[COUNT]) {
#pragma unroll
        for (int e = 0; e < COUNT; ++e) words[e] = round_to_tf32(words[e]);
    }

    // Adds the product of the tiles at offset `stage`. `meanwhile` is called once the first operands are on their way.
    template <class Work>
    __device__ __forceinline__ void accumulate(int stage, Work meanwhile) {
#if TF32 == 3
        // A stage is summed apart: the units cut sums off, which adds up over a long one.
        float total[M][N][4] = {};
#else
        float(&total)[M][N][4] = sum;
#endif
#pragma unroll
        for (int depth = 0; depth < DEPTH; depth += STEP) {
            u32 a[M][4], b[N][2];
#pragma unroll
            for (int i = 0; i < M; ++i) load_a(a[i], tiles + stage, i, depth);
#pragma unroll
            for (int j = 0; j < N; j += 2) {
                u32 pair[4];
                load_b(pair, tiles + stage + A::BYTES, j, depth);
                b[j][0] = pair[0], b[j][1] = pair[1], b[j + 1][0] = pair[2], b[j + 1][1] = pair[3];
            }
            if (depth == 0) meanwhile();
#if TF32 == 3
            // Small products first. What is left of the columns is held for two fragments at a time: registers are few.
            u32 a_rest[M][4];
#pragma unroll
            for (int i = 0; i < M; ++i) split_to_tf32(a[i], a_rest[i]);
#pragma unroll
            for (int j = 0; j < N; j += 2) {
                u32 b_rest[2][2];
#pragma unroll
                for (int k = 0; k < 2; ++k) split_to_tf32(b[j + k], b_rest[k]);
#pragma unroll
                for (int i = 0; i < M; ++i)
#pragma unroll
                    for (int k = 0; k < 2; ++k) multiply_fragments(total[i][j + k], a_rest[i], b[j + k]);
#pragma unroll
                for (int i = 0; i < M; ++i)
#pragma unroll
                    for (int k = 0; k < 2; ++k) multiply_fragments(total[i][j + k], a[i], b_rest[k]);
#pragma unroll
                for (int i = 0; i < M; ++i)
#pragma unroll
                    for (int k = 0; k < 2; ++k) multiply_fragments(total[i][j + k], a[i], b[j + k]);
            }
#else
#if DTYPE == 0
#pragma unroll
            for (int i = 0; i < M; ++i) round(a[i]);
#pragma unroll
            for (int j = 0; j < N; ++j) round(b[j]);
#endif
#pragma unroll
            for (int i = 0; i < M; ++i)
#pragma unroll
                for (int j = 0; j < N; ++j) multiply_fragments(total[i][j], a[i], b[j]);
#endif
        }
#if TF32 == 3
#pragma unroll
        for (int i = 0; i < M; ++i)
#pragma unroll
            for (int j = 0; j < N; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) sum[i][j][e] += total[i][j][e];
#endif
    }

    __device__ __forceinline__ void stage(float* rows) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < M; ++i)
#pragma unroll
            for (int j = 0; j < N; ++j)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int row = warp_row() + 16 * i + 8 * half + lane / 4;
                    const int column = staged_column(row, warp_column() + 8 * j + lane % 4 * 2);
                    *reinterpret_cast<float2*>(rows + row * COLUMNS + column) =
                        make_float2(sum[i][j][2 * half], sum[i][j][2 * half + 1]);
                }
    }
};

#else

// Exact float32: 16 x 8 threads of (ROWS / 16) x 8 sums each. Depth-inner operands are read in pairs along the depth,
// so a thread's rows are 16 apart and its columns 8 apart; the others in fours along the extent.
template <int ROWS, int COLUMNS, bool A_DEPTH_INNER, bool B_DEPTH_INNER>
struct TileProduct {
    using A = Tile<ROWS, A_DEPTH_INNER>;
    using B = Tile<COLUMNS, B_DEPTH_INNER>;
    static constexpr int M = ROWS / 16;
    static constexpr int N = COLUMNS / 8;
    static_assert(M % 4 == 0 && N % 4 == 0, "rows and columns are read in fours");

    float sum[M][N];
    const unsigned char* tiles;  // shared memory

    __device__ __forceinline__ explicit TileProduct(const unsigned char* shared) : tiles(shared) {
#pragma unroll
        for (int i = 0; i < M; ++i)
#pragma unroll
            for (int j = 0; j < N; ++j) sum[i][j] = 0.0f;
    }

    static __device__ __forceinline__ int row(int i) {
        const int y = threadIdx.x / 8;
        return A_DEPTH_INNER ? y + 16 * i : i / 4 * 64 + y * 4 + i % 4;
    }

    static __device__ __forceinline__ int column(int j) {
        const int x = threadIdx.x % 8;
        return B_DEPTH_INNER ? x + 8 * j : j / 4 * 32 + x * 4 + j % 4;
    }

    // values[d][e] for two depths from `depth` and COUNT rows or columns; `at` maps e to its place in the tile.
    template <class Operand, bool INNER, int COUNT, class Place>
    static __device__ __forceinline__ void load(float (&values)[2][COUNT], const unsigned char* tile, int depth,
                                                Place at) {
        if constexpr (INNER) {
#pragma unroll
            for (int e = 0; e < COUNT; ++e) {
                const float2 v = *reinterpret_cast<const float2*>(tile + Operand::offset(at(e), depth));
                values[0][e] = v.x, values[1][e] = v.y;
            }
        } else {
#pragma unroll
            for (int d = 0; d < 2; ++d)
#pragma unroll
                for (int e = 0; e < COUNT; e += 4) {
                    const float4 v = *reinterpret_cast<const float4*>(tile + Operand::offset(at(e), depth + d));
                    values[d][e] = v.x, values[d][e + 1] = v.y, values[d][e + 2] = v.z, values[d][e + 3] = v.w;
                }
        }
    }

    // A stage is summed apart before it joins the total, which keeps the rounding error of a long sum small.
    template <class Work>
    __device__ __forceinline__ void accumulate(int stage, Work meanwhile) {
        meanwhile();
        float part[M][N] = {};
        // Unrolled further, the compiler would hold more operands than there are registers.
#pragma unroll 2
        for (int depth = 0; depth < DEPTH; depth += 2) {
            float a[2][M], b[2][N];
            load<A, A_DEPTH_INNER>(a, tiles + stage, depth, row);
            load<B, B_DEPTH_INNER>(b, tiles + stage + A::BYTES, depth, column);
#pragma unroll
            for (int d = 0; d < 2; ++d)
#pragma unroll
                for (int i = 0; i < M; ++i)
#pragma unroll
                    for (int j = 0; j < N; ++j) part[i][j] = fmaf(a[d][i], b[d][j], part[i][j]);
        }
#pragma unroll
        for (int i = 0; i < M; ++i)
#pragma unroll
            for (int j = 0; j < N; ++j) sum[i][j] += part[i][j];
    }

    __device__ __forceinline__ void stage(float* rows) const {
#pragma unroll
        for (int i = 0; i < M; ++i)
#pragma unroll
            for (int j = 0; j < N; ++j) rows[row(i) * COLUMNS + staged_column(row(i), column(j))] = sum[i][j];
    }
};

#endif
