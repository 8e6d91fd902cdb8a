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
#include "conv2d_stem_weight.cuh"

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

    const Place place(p);
    const int steps = min(p.chunk, p.strips - place.first_strip) * (p.strip_rows + WARMUP);

    // The rows of x travel one step ahead of dy: they are rewritten while the step before is multiplied.
    Cursor next(p, place.first_strip);
    int copied = 0;
    const auto copy = [&] {
        const int stage = copied % STAGES;
        const int pixels = next.pixels();
        if (threadIdx.x == 0) counts[stage] = pixels;
        if (pixels) {
            Gradient::copy(shared_address(stages) + stage * Gradient::BYTES,
                           dy + next.pixel() * p.dy_pitch + place.first_row, p.dy_pitch, pixels,
                           p.rows - place.first_row);
        }
        if (++copied < steps) {
            next.advance();
            copy_rows<LENGTH>(shared_address(rows) + copied % STAGES * ROWS_BYTES, x, next);
        }
        commit_copies();
    };

    copy_rows<LENGTH>(shared_address(rows), x, next);
    commit_copies();
    for (int step = 0; step < STAGES - 1; ++step) {
        if (step < steps) copy();
        else commit_copies();
    }
    await_copies<STAGES - 1>();
    __syncthreads();
    Product product(stages, ring, p.shift, place.columns);
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
    product.leave(shared, place.in(partials, p), p.rows - place.first_row, place.columns);
}
