// What the kernels for weight gradients of convolutions of few input channels share (conv2d_stem_weight.cu has what they
// do): how blocks walk down strips of the output, and how a row of dy lies in shared memory.
#pragma once
#include "conv2d_stem.cuh"

struct Problem {
    i64 dy_pitch;
    int strips, chunk;   // in all, and in a chunk
    int height, values;  // of x: rows, values of a row
    int out_height, out_width, rows;
    int padding_h;
    int first, shift;    // first value of the leftmost strip's rows, and where the first window starts from there
    int strips_p, strip_rows, segments;  // strips of an image one below the other, their rows, and side by side
    int tiles_m, tiles_n;
};

constexpr int DEPTHS = TILE_Q / 16;  // products of 16 pixels in a row of a strip
constexpr int RING = KERNEL_H + NEW;

DEVICE int pixel_row(int i);  // where pixel i of sixteen stands in the depth

// What a block sums: of a chunk of strips TILE_M rows by a column tile.
struct Place {
    u32 columns;
    int first_row, chunk, first_strip;

    __device__ __forceinline__ explicit Place(const Problem& p) {
        u32 block = blockIdx.x;
        columns = block % p.tiles_n;
        block /= p.tiles_n;
        first_row = block % p.tiles_m * TILE_M;
        chunk = block / p.tiles_m;
        first_strip = chunk * p.chunk;
    }

    // Its first filter in the partials.
    __device__ __forceinline__ float* in(float* partials, const Problem& p) const {
        return partials + (i64(chunk) * p.rows + first_row) * (KERNEL_H * WINDOW);
    }
};

// The steps of a chunk, one after the other: WARMUP and strip_rows of each strip.
struct Cursor {
    const Problem& problem;
    int strip, image, p, q;  // the row of the output, and its first column
    int left;                // rows of the strip from here on

    __device__ __forceinline__ Cursor(const Problem& problem, int strip) : problem(problem), strip(strip) { enter(); }

    __device__ __forceinline__ void enter() {
        const int column = strip / problem.strips_p;
        p = (strip - column * problem.strips_p) * problem.strip_rows - WARMUP;
        image = column / problem.segments;
        q = (column - image * problem.segments) * TILE_Q;
        left = problem.strip_rows + WARMUP;
    }

    __device__ __forceinline__ void advance() {
        ++p;
        if (--left == 0) ++strip, enter();
    }

    // The first pixel of this row, among all.
    __device__ __forceinline__ i64 pixel() const {
        return (i64(image) * problem.out_height + p) * problem.out_width + q;
    }

    // Pixels of this row that are to be summed.
    __device__ __forceinline__ int pixels() const {
        return left <= problem.strip_rows && p < problem.out_height ? min(TILE_Q, problem.out_width - q) : 0;
    }
};

// Starts the copy of the NEW rows of the image, LENGTH values each, that a step sees first, by LANES threads.
template <int LENGTH, int LANES = THREADS>
DEVICE void copy_rows(u32 to, const T* x, const Cursor& at, int thread = threadIdx.x) {
    const Problem& p = at.problem;
    const int row = at.p * STRIDE_H - p.padding_h + KERNEL_H - NEW;
    Image{p.height, p.values}.copy<NEW, LENGTH, LANES>(to, x + i64(at.image) * p.height * p.values, row,
                                                       at.q * STEP + p.first, thread);
}

// dy of one row: TILE_Q pixels of TILE_M channels, chunks of 16 bytes permuted as ldmatrix wants them.
struct Gradient {
    static constexpr int PITCH = TILE_M * 2;
    static constexpr int BYTES = TILE_Q * PITCH;

    static __device__ __forceinline__ int offset(int row, int channel) {
        const int twist = TILE_M == 64 ? row % 8 : row / 2 % 4;
        return row * PITCH + ((channel / 8 ^ twist) * 16) + channel % 8 * 2;
    }

    // `from`: the row's first pixel and this block's first channel.
    static __device__ __forceinline__ void copy(u32 to, const T* from, i64 pitch, int pixels, int channels) {
        constexpr int VECTORS = TILE_M / VEC_DY;
        constexpr int LANES = THREADS / VECTORS, EACH = (TILE_Q + LANES - 1) / LANES;  // pixels side by side, of a thread
        const int channel = threadIdx.x % VECTORS * VEC_DY, first = threadIdx.x / VECTORS;
        if (channel >= channels) pixels = 0;
        from += first * pitch + channel;
#pragma unroll 8
        for (int u = 0; u < EACH; ++u, from += LANES * pitch) {
            const int i = first + u * LANES;
            if (TILE_Q % LANES == 0 || i < TILE_Q)
                copy_values<VEC_DY>(to + offset(i / 16 * 16 + pixel_row(i % 16), channel), from, i < pixels);
        }
    }
};
