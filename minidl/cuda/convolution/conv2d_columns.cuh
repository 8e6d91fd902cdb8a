// What conv2d_hopper.cu and conv2d_halo.cu take of each column, an output channel, on the way out: sums for a batch
// norm above, or mask and sums for a ReLU and a batch norm below, or for a bias there.
#pragma once
#include "hopper.cuh"
#include "normalize.cuh"

// Sums of each column that patches leave: a bias below wants one, a batch norm two.
constexpr bool FOR_BIAS = MASKED == 3 || (BACKWARD && STATISTICS);
constexpr int SUMS = FOR_BIAS ? 1 : STATISTICS || MASKED ? 2 : 0;

// A warp takes 16 columns of rows of 128 bytes across: words[i] of 16 rows are, of column lane / 4 of eight i / 2, rows
// i % 2 * 8 + lane % 4 * 2 + {0, 1}. Where a lane's row of the four matrices is in such rows:
DEVICE u32 columns_across() {
    const u32 thread = thread_again(), lane = thread % 32, chunk = thread / 32 * 2 + lane / 16;
    return lane % 16 * 128 + (chunk ^ lane % 8) * 16;
}

DEVICE void unpack_word(u32 word, float (&v)[2]) {
    Raw<T, 2> raw;
    raw.pairs[0] = word;
    unpack(raw, v);
}

#if DTYPE
// Writes a warpgroup's 64 x 64 results, rounded, to rows of 128 bytes.
DEVICE void put_square(const float (&sum)[32], u32 to) {
    const u32 thread = thread_again(), lane = thread % 32, row = thread / 32 * 16 + lane % 16;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = Rounding<T>::round_pair(sum[8 * j + 2 * i], sum[8 * j + 2 * i + 1]);
        store_matrices(to + row * 128 + ((2 * j + lane / 16) ^ row % 8) * 16, words);
    }
}
#endif

// Two bytes of shared memory.
DEVICE u32 load_pair(u32 address) {
    u16 pair;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(pair) : "r"(address) : "memory");
    return pair;
}

// Zeros in place of rows that are not `inside`.
template <class Inside>
DEVICE void keep_inside(u32 (&words)[4], Inside inside) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = i % 2 * 8 + int(thread_again() % 4) * 2;
        words[i] &= (inside(row) ? 0xffffu : 0u) | (inside(row + 1) ? 0xffff0000u : 0u);
    }
}

// Sums over the lanes that have the same columns.
DEVICE float sum_columns(float v) {
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

// Of two values of each of the warp's columns, the one that this lane writes: to which column, and whether the second.
struct ColumnShare {
    int column;
    bool second;

    __device__ __forceinline__ ColumnShare() {
        const u32 thread = thread_again(), lane = thread % 32;
        column = thread / 32 * 16 + lane % 2 * 8 + lane / 4;
        second = lane & 2;
    }

    __device__ __forceinline__ float pick(const float (&first)[2], const float (&other)[2]) const {
        const float upper = second ? other[1] : first[1], lower = second ? other[0] : first[0];
        return column & 8 ? upper : lower;
    }

    // Into `to` (SUMS, columns), for the slab whose columns begin at `from`. Not between slabs: the fence for the
    // engine would wait for it.
    __device__ __forceinline__ void write(float* to, float value, int from, int columns) const {
        if (second < SUMS && from + column < columns) to[second * columns + from + column] = value;
    }
};

// Sums and sums of squares of what a warpgroup stores, column by column, of the rounded values: bfloat16 has eight
// bits, so float32 holds what some hundred squares of one binade add up to, and nothing is lost where a mean far from
// zero would make differences of such sums treacherous. (By plain arithmetic: tensor cores would do it in fewer
// instructions, two products for 16 rows of 16 columns where this issues 24, but they are what a convolution waits for:
// 3x3 on 64 channels takes 12 % longer so, 6 % here, 256-1024 channels 14 and 11 %, 128-512 channels 11 and 13 %. Left
// to warps that are otherwise idle, one for each warpgroup, where all slabs of a tile have buffers: shallow tiles wait
// for them, 128-512 channels at 28x28 pixels in tiles of 192x128 124 us for 84, and deep ones gain nothing.)
struct Tally {
    float sums[2], squares[2];

    __device__ __forceinline__ void start() {
#pragma unroll
        for (int j = 0; j < 2; ++j) sums[j] = squares[j] = 0.0f;
    }

    // Takes in 16 rows of the warp's columns, in words across.
    __device__ __forceinline__ void add(const u32 (&x)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float v[2];
            unpack_word(x[i], v);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                sums[i / 2] += v[e];
                if constexpr (!FOR_BIAS) squares[i / 2] = fmaf(v[e], v[e], squares[i / 2]);
            }
        }
    }

    // Takes in ROWS rows of a slab that the whole warpgroup has written, UNROLL times 16 at once; those `inside`, or
    // `whole`.
    template <int ROWS, int UNROLL, class Inside>
    __device__ __forceinline__ void take(u32 slab, bool whole, Inside inside) {
        const u32 from = slab + columns_across();
#pragma unroll UNROLL
        for (int k = 0; k < ROWS; k += 16) {
            u32 x[4];
            load_matrices<true>(x, from + k * 128);
            if (!whole) keep_inside(x, [&](int row) { return inside(k + row); });
            add(x);
        }
    }

    // This lane's share of the sums and the sums of squares.
    __device__ __forceinline__ float result() {
#pragma unroll
        for (int j = 0; j < 2; ++j) sums[j] = sum_columns(sums[j]), squares[j] = sum_columns(squares[j]);
        return ColumnShare().pick(sums, squares);
    }
};

// What a data gradient does for the ReLU and the batch norm below: it counts where the ReLU's output was positive, and
// with x the batch norm's input, sum g and sum g*(x - mean) of each column are taken on the way; without one sum g.
struct Below {
    const float *moments, *gamma, *beta;  // (2, columns): mean and rstd; (columns,) or null
    const float* other;                   // moments of another batch norm under the same sum, for a PAIR
};
constexpr bool PAIR = MASKED == 5;            // sum g and sum g*(x - mean) of two batch norms
constexpr bool SIGNED = MASKED == 4 || PAIR;  // of the ReLU's output its signs are read (signs.cuh)
constexpr int SIGN_CHUNK = 16;                // bytes of a row of signs that the engine moves at least
constexpr int READ = MASKED == 2 || PAIR ? 2 : 1;  // arrays of T that are read for it

// The byte from which on the engine fetches the signs of columns from `column` on, and where in a row their first is.
DEVICE int first_signs(int column) { return column / 8 / SIGN_CHUNK * SIGN_CHUNK; }
DEVICE int signs_within(int column) { return column / 8 % SIGN_CHUNK; }

#if DTYPE
struct Masking {
    float mean[2], scale[2], shift[2], sum[2], product[2];
    float other_product[2];  // of a PAIR

    __device__ __forceinline__ Masking() {}
    __device__ __forceinline__ Masking(const Below& below, int column, int columns) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            sum[j] = product[j] = 0.0f;
            if constexpr (FOR_BIAS) continue;
            const u32 thread = thread_again();
            const int at = column + int(thread / 32 * 16 + j * 8 + thread % 32 / 4);
            const bool there = at < columns;
            mean[j] = there ? below.moments[at] : 0.0f;
            other_product[j] = 0.0f;
            if constexpr (MASKED == 1) {
                scale[j] = there ? below.moments[columns + at] : 0.0f;
                scale[j] *= there && below.gamma ? below.gamma[at] : 1.0f;
                shift[j] = shift_of(mean[j], scale[j], there && below.beta ? below.beta[at] : 0.0f);
            }
        }
    }

    // Masks 16 rows of the warp's columns by outputs of the ReLU alone, and adds them up.
    __device__ __forceinline__ void cut_off(u32 (&gradients)[4], const u32 (&outputs)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float out[2], g[2];
            unpack_word(outputs[i], out);
            gradients[i] &= (out[0] > 0.0f ? 0xffffu : 0u) | (out[1] > 0.0f ? 0xffff0000u : 0u);
            unpack_word(gradients[i], g);
            sum[i / 2] += g[0];
            sum[i / 2] += g[1];
        }
    }

    // Masks 16 rows of the warp's columns, in words across. MASKED 1: the mask follows from the inputs x; 2: from the
    // ReLU's outputs; 3: from those, which come in the place of inputs; 4: from outputs[i % 2], bits 0, 8, 16, 24 of
    // which are the signs of this lane's two columns in its first row, then in its second.
    __device__ __forceinline__ void mask(u32 (&gradients)[4], const u32 (&inputs)[4], const u32 (&outputs)[4]) {
        if constexpr (FOR_BIAS) {
            cut_off(gradients, inputs);
            return;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int j = i / 2;
            float g[2], v[2], out[2];
            unpack_word(gradients[i], g);
            unpack_word(inputs[i], v);
            if constexpr (MASKED == 2) unpack_word(outputs[i], out);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const bool positive = MASKED == 1 ? was_positive(v[e], mean[j], scale[j], shift[j])
                                      : SIGNED    ? outputs[i % 2] & 1u << (16 * e + 8 * j)
                                                  : out[e] > 0.0f;
                v[e] -= mean[j];
                g[e] = positive ? g[e] : 0.0f;
                sum[j] += g[e];
                product[j] = fmaf(g[e], v[e], product[j]);
            }
            gradients[i] = Rounding<T>::round_pair(g[0], g[1]);
        }
    }

    // Where this lane's first row has the signs of its warp's columns, in rows of PITCH bytes.
    template <int PITCH>
    static __device__ __forceinline__ u32 signs_across() {
        const u32 thread = thread_again();
        return thread % 4 * 2 * PITCH + thread / 32 * 2;
    }

    // Signs of 16 rows, as `mask` takes them.
    template <int PITCH>
    static __device__ __forceinline__ void load_signs(u32 (&outputs)[4], u32 from) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 first = load_pair(from + i * 8 * PITCH), second = load_pair(from + (i * 8 + 1) * PITCH);
            outputs[i] = (first | second << 16) >> thread_again() % 32 / 4;
        }
    }

    // The same of a slab, where x, and y if it is read, lie as it does. Addresses are those of the lane's row, or of
    // signs, whose rows are PITCH bytes apart.
    template <int PITCH>
    __device__ __forceinline__ void take(u32 slab, u32 x, u32 y) {
        u32 gradients[4], inputs[4], outputs[4];
        load_matrices<true>(gradients, slab);
        load_matrices<true>(inputs, x);
        if constexpr (MASKED == 2) load_matrices<true>(outputs, y);
        if constexpr (SIGNED) load_signs<PITCH>(outputs, y);
        mask(gradients, inputs, outputs);
        store_matrices<true>(slab, gradients);
    }

    // Of BYTES of a slab that is masked, from `column` on, what the other batch norm wants, whose x lies as it does. (By a
    // loop of its own: where two blocks share a multiprocessor, registers lack for both.)
    template <int BYTES, int UNROLL>
    __device__ __forceinline__ void take_other(u32 slab, u32 x, const Below& below, int column, int columns) {
        float other_mean[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const u32 thread = thread_again();
            const int at = column + int(thread / 32 * 16 + j * 8 + thread % 32 / 4);
            other_mean[j] = at < columns ? below.other[at] : 0.0f;
        }
#pragma unroll UNROLL
        for (int k = 0; k < BYTES; k += 16 * 128) {
            u32 gradients[4], inputs[4];
            load_matrices<true>(gradients, slab + k);
            load_matrices<true>(inputs, x + k);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float g[2], v[2];
                unpack_word(gradients[i], g);
                unpack_word(inputs[i], v);
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    other_product[i / 2] = fmaf(g[e], v[e] - other_mean[i / 2], other_product[i / 2]);
            }
        }
    }

    // This lane's share of both sums.
    __device__ __forceinline__ float result() {
#pragma unroll
        for (int j = 0; j < 2; ++j) sum[j] = sum_columns(sum[j]), product[j] = sum_columns(product[j]);
        return ColumnShare().pick(sum, product);
    }
    // Then, of the other batch norm's.
    __device__ __forceinline__ float other_result() {
#pragma unroll
        for (int j = 0; j < 2; ++j) other_product[j] = sum_columns(other_product[j]);
        return ColumnShare().pick(sum, other_product);
    }
};
#endif
