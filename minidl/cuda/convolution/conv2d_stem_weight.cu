// Weight gradient of a convolution of few input channels, 16-bit storage types; sm_80 and newer.
//
//   dw[k,r,s,c] = sum_{n,p,q} dy[n,p,q,k] x[n, p*sh - ph + r, q*sw - pw + s, c]
//
// Rows of the product are output channels, columns the positions (r, s, c) of a filter, each filter row padded to whole
// groups of eight, and the sum runs over the output pixels. A block sums a chunk of strips in order and leaves a
// float32 partial; sum_partials_kernel (channel_sum.cu) adds the partials in order. What chunks and strips there are
// depends on the sizes, and on whether wgmma multiplies, alone.
//
//   dy        pixels * dy_pitch + k                                          T
//   x         ((n*height + h)*width + w)*CHANNELS + c, dense                 T
//   partials  (chunks, K, KERNEL_H, KERNEL_W, CHANNELS) dense                float32
//
// No matrix unit reads windows from rows of the image as they are. They are rewritten first: for mma.sync as pairs of
// pixels (conv2d_stem_weight_pairs.cuh); on sm_90 for wgmma as lines of wider pixels (WARPGROUP,
// conv2d_stem_weight_lines.cuh), where windows then start at multiples of 16 bytes and no strip is narrower than
// others.
//
// A block walks down strips of the output, TILE_Q columns wide, row by row. What is rewritten is a ring of image rows
// to which a step adds the NEW rows that it sees first; a strip begins with WARMUP steps that do only that. While a row
// of dy is multiplied, the rows of the next step are rewritten and those of later ones arrive.
//
// Macros: those of conv2d_stem.cuh; TILE_M, the rows of a block, 32 or 64; STAGES of rows under way; BLOCKS per
// multiprocessor that the registers must leave room for; VEC_DY: values per access; and of pairs COLUMNS, the fragments
// of eight columns of a warp; WARPS_N warps side by side along the columns, the others share the pixels; RAGGED: 1 when
// a strip may be narrower than TILE_Q: windows behind its end must not be multiplied even by zero, for they may be
// infinite.
// Grid: chunks, row tiles, column tiles, the last fastest.
// Dynamic shared memory: STAGES * (TILE_Q * TILE_M * 2 + ROWS_BYTES) + RING * ROW_BYTES bytes, or if that is more what
// warps leave to each other at the end, of pairs WARPS_N * TILE_M * COLUMNS * 32 bytes.
// FLOP: 2 * pixels * K * KERNEL_H * KERNEL_W * CHANNELS, and as much again for the padding as the groups say.
// Bytes: dy once per column tile, x once per row and column tile and strip; 4 * chunks * |dw| twice.
// Reference: Chetlur et al., "cuDNN: efficient primitives for deep learning", 2014.
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
constexpr int NEW = STRIDE_H < KERNEL_H ? STRIDE_H : KERNEL_H;
constexpr int WARMUP = (KERNEL_H - 1) / NEW;
constexpr int RING = KERNEL_H + NEW;

DEVICE int pixel_row(int i);  // where pixel i of sixteen stands in the depth

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

    // Pixels of this row that are to be summed.
    __device__ __forceinline__ int pixels() const {
        return left <= problem.strip_rows && p < problem.out_height ? min(TILE_Q, problem.out_width - q) : 0;
    }
};

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

#if WARPGROUP
#include "conv2d_stem_weight_lines.cuh"
#else
#include "conv2d_stem_weight_pairs.cuh"
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
conv2d_stem_weight_kernel(const T* __restrict__ dy, const T* __restrict__ x, float* __restrict__ partials,
                          const __grid_constant__ Problem p) {
    await_predecessor();
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ int counts[STAGES];
    unsigned char* const stages = shared;  // first, for their chunks are permuted by address
    unsigned char* const ring = stages + STAGES * Gradient::BYTES;
    unsigned char* const rows = ring + RING * ROW_BYTES;

    u32 block = blockIdx.x;
    const u32 columns = block % p.tiles_n;
    block /= p.tiles_n;
    const int first_row = block % p.tiles_m * TILE_M;
    const int chunk = block / p.tiles_m;
    const int first_strip = chunk * p.chunk;
    const int steps = min(p.chunk, p.strips - first_strip) * (p.strip_rows + WARMUP);

    // The rows of x travel one step ahead of dy: they are rewritten while the step before is multiplied.
    Cursor next(p, first_strip);
    const Image image{p.height, p.values};
    const auto copy_rows = [&](int stage) {
        image.copy<NEW, LENGTH>(shared_address(rows) + stage * ROWS_BYTES, x + i64(next.image) * p.height * p.values,
                                next.p * STRIDE_H - p.padding_h + KERNEL_H - NEW, next.q * STEP + p.first);
    };
    int copied = 0;
    const auto copy = [&] {
        const int stage = copied % STAGES;
        const int pixels = next.pixels();
        if (threadIdx.x == 0) counts[stage] = pixels;
        if (pixels) {
            const i64 pixel = (i64(next.image) * p.out_height + next.p) * p.out_width + next.q;
            Gradient::copy(shared_address(stages) + stage * Gradient::BYTES, dy + pixel * p.dy_pitch + first_row,
                           p.dy_pitch, pixels, p.rows - first_row);
        }
        if (++copied < steps) {
            next.advance();
            copy_rows(copied % STAGES);
        }
        commit_copies();
    };

    copy_rows(0);
    commit_copies();
    for (int step = 0; step < STAGES - 1; ++step) {
        if (step < steps) copy();
        else commit_copies();
    }
    await_copies<STAGES - 1>();
    __syncthreads();
    Product product(stages, ring, p.shift, columns);
    int slot = KERNEL_H - NEW;  // of the ring, where the next new rows go
    rewrite(ring, rows, slot, p.shift);

    int stage = 0;
    for (int step = 0; step < steps; ++step) {
        await_copies<STAGES - 2>();
        __syncthreads();  // this step's dy and the next one's rows are there for all, its own are rewritten
        slot = slot + NEW < RING ? slot + NEW : slot + NEW - RING;
        const int pixels = counts[stage], next_stage = stage + 1 < STAGES ? stage + 1 : 0;
        product.take(stage, pixels, [&] {
            if (copied < steps) copy();
            else commit_copies();
            if (step + 1 < steps) rewrite(ring, rows + next_stage * ROWS_BYTES, slot, p.shift);
        });
        product.advance();
        stage = next_stage;
    }
    await_copies<0>();
    float* const to = partials + (i64(chunk) * p.rows + first_row) * (KERNEL_H * WINDOW);
    product.leave(shared, to, p.rows - first_row, columns);
}
