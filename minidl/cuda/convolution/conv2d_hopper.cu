// Convolution, forward and data gradient, on Hopper (sm_90a): the implicit matrix product of conv2d.cu with operands
// gathered by the copy engine (TMA, in im2col mode) and multiplied by warpgroups (wgmma). 16-bit types, or float32, in
// one group, whose operands the engine rounds to TF32 on their way to shared memory.
//
//   forward (BACKWARD = 0):
//     y[n,p,q,k]  = bias[k] + add[n,p,q,k] + sum_{r,s,c} x[n, p*sh - ph + r*dh, q*sw - pw + s*dw, c] w[k,r,s,c]
//   data gradient (BACKWARD = 1):
//     dx[n,h,w,c] = bias[c] + add[n,h,w,c] + sum_{r,s,k} dy[n,p,q,k] w[k,r,s,c]
//                   over the r, s for which there are p, q with p*sh - ph + r*dh = h and q*sw - pw + s*dw = w
//
// One product of rows (output pixels) x columns (output channels), summed over depth: chunks of DEPTH source channels,
// 128 bytes, over the taps within a chunk, which is the order of conv2d.cu. A strided data gradient falls apart into
// classes of output pixels (see conv2d.cu); SPREAD = 1 says that there are up to four of them, whose pixels lie apart
// in the output. Those without taps (of 1x1/2 filters three of four) are neither fetched nor multiplied.
//
// All arrays are seen through tensor maps (conv2d_hopper.py makes them):
//   source  (C, W, H, N), im2col: TILE_M pixels x DEPTH channels; FLAT: (C, pixels), tiled, for 1x1 without stride
//   filter  (C, taps, K), tiled: DEPTH channels x 1 x TILE_N filters; data gradient of 16-bit types 64 x 1 x 64, of
//           float32 filters that conv2d_turn.cu has turned to (K, taps, C), like forward
//   output, add  (columns, pixels), tiled, DEPTH channels x 64 pixels; SPREAD: (columns, W, H, N) of a class's pixels,
//           im2col
// With STATISTICS (bfloat16, not SPREAD) sums and sums of squares of each warpgroup's rows of the output go to partial
// (patches, 2, columns), from which batch_norm_merge.cu goes on; of a data gradient, of any 16-bit type, sums alone,
// (patches, columns), for the bias of the layer below.
//
// MASKED, of a data gradient, or of the forward pass that is a transposed convolution's: it counts where the output of
// the ReLU below was positive; 1: of a ReLU over a batch norm whose input x is read, 2: of any other, whose output y is
// read beside x. Both are of the output's shape and seen as `add` is. For the batch norm's backward pass sums of g and
// of g*(x - mean) over these rows go to partial (patches, 2, columns). 3: of a ReLU without a batch norm, of which
// y alone is read; sums as with STATISTICS. 4: as 2, but of y its signs are read (signs.cuh), once for a tile, bytes
// that are seen as `add` is; boxes of them begin at multiples of 16 bytes, as the engine wants it. 5: as 4, where the
// sum below the ReLU is of two batch norms: the other one's input is read, too, and its sums go to other_partial.
//
// NORMALIZED, of a forward pass: the source is the input of a batch norm with a ReLU over it, which conv2d_input.cuh
// puts in between: rows reach the units through registers, in which what a chunk of channels needs stays over all taps.
// An otherwise idle warp brings that from memory, beside the stage where the chunk begins. SINGLE: of 1x1 filters
// without padding.
//
// GROUPED, of 16-bit types: 0, one; 1, several, a tile's columns are of one and so is its depth; 2, likewise of two
// that have 32 channels each: a stage has the channels of both, which are multiplied apart, and a filter's taps follow
// each other in its rows.
//
// SPACED (FLAT): add has but every second pixel of every second line of the images, the others' addend is zero; threads
// copy it, as no box of the engine has such rows.
//
// SWAPPED, of 16-bit types: columns come first in the products, 64 of them for each warpgroup, and rows second: TILE_M
// may be any multiple of 16, so that tiles fill the multiprocessors once. Results lie across in registers, and leave in
// slabs of TILE_M rows.
//
// RELU, of a forward pass: what is stored is max(y, 0); NaN stays NaN.
//
// TAIL: of a depth that does not fill its last stage that stage begins early, with channels that the one before it had,
// and of its products the first TAIL are left out. Of 16 images on an H200, with whole last stages beside it: data
// gradient of 3x3 96-96 at 35x35 pixels 14.4 us (16.0), of 1x7 160-160 at 17x17 8.5 (9.4); 1x1 filters about as before.
//
// CUT (1, 2): blocks that share the depth of a tile; two, a cluster, finish half of its columns each
// (conv2d_hopper_cut.cuh), and have this tile alone.
//
// DIVIDED (FLAT; 1, 2, 4, 8; else 0), for few rows: conv2d_divided_kernel instead, in which so many blocks share the
// depth of a tile.
//
// Macros: DTYPE (0 without STATISTICS, MASKED and NORMALIZED), BACKWARD, FLAT, SPREAD, STATISTICS, MASKED, NORMALIZED
// (and with it SINGLE), SPACED, RELU, GROUPED, CUT, DIVIDED, SWAPPED; TILE_M x TILE_N, the tile of rows x columns;
// STAGES of the pipeline; STEPS, products along the depth of a stage, fewer than four where the depth is less; TAIL;
// SLABS, output buffers per warpgroup; RESIDENT, blocks per multiprocessor.
// Grid: blocks take tiles in turn (tickets.cuh): what is in flight at any time is one stretch of memory, and column
// tiles are counted first, so that blocks which share source pixels run together.
// Block: two warpgroups multiply, three where a tile has 192 rows, one where it has 64, as many rows each, SWAPPED 64
// columns; one thread of another keeps the pipeline filled, across tiles too.
// Dynamic shared memory: STAGES * 128 * (TILE_M + TILE_N) + WARPGROUPS * SLABS * SLAB_BYTES + 1024 bytes, and what a
// cluster sends.
// Where the time of a launch goes, and what did not shorten it: docs/tuning.md.
// Thin sources, of less than 128 bytes a pixel, are bound by the engine: it fills 150 million rows with zeros per
// second on each multiprocessor, which is what 32 channels take with every tile.
// FLOP: 2 * rows * columns * depth * taps. Bytes: source + filter + output (+ add), the source once per column tile and
// tap as far as the L2 cache does not keep it.
#include "conv2d_columns.cuh"
#include "tickets.cuh"
#include "wgmma.cuh"

constexpr int DEPTH = 128 / sizeof(T);  // values of a stage, 128 bytes per row
// A data gradient reads filters across, which the units do for 16-bit types only; others are turned before.
constexpr bool ACROSS = BACKWARD && sizeof(T) == 2;
constexpr int WARPGROUPS = SWAPPED ? TILE_N / 64 : TILE_M == 192 ? 3 : TILE_M == 64 ? 1 : 2;
// Whether registers go from filling to multiplying threads, for which it takes a whole warpgroup of the former.
constexpr bool SHIFT = RESIDENT == 1 && WARPGROUPS > 1;
constexpr int PARTS = DIVIDED ? DIVIDED : CUT;  // stretches of the depth
constexpr bool FILLS_MORE = NORMALIZED || (SPREAD && MASKED);  // than 40 registers are enough for
using Registers =
    RegisterShares<128, FILLS_MORE ? 56 : 40, 128 * WARPGROUPS, WARPGROUPS == 3 ? 152 : FILLS_MORE ? 224 : 232>;
static_assert(!NORMALIZED || SHIFT, "warps or registers to spare");
static_assert(!GROUPED || (DTYPE && !NORMALIZED && PARTS == 1 && (GROUPED == 1 || TILE_N == 64)),
              "whole groups of 16 bits");
static_assert(!SWAPPED || (DTYPE && !NORMALIZED && !GROUPED && PARTS == 1 && TILE_M % 16 == 0 && TILE_N % 64 == 0),
              "blocks of 16 rows and 64 columns of 16 bits, whole");
static_assert(!SPACED || (FLAT && BACKWARD && DTYPE), "rows in the order of pixels, of 16 bits");
constexpr int THREADS = 128 * WARPGROUPS + (SHIFT ? 128 : 32);
constexpr int ROWS = SWAPPED ? TILE_M : TILE_M / WARPGROUPS;  // of a warpgroup
constexpr int BLOCKS = SWAPPED ? 1 : ROWS / 64;               // products along them
constexpr int ACCUMULATORS = (SWAPPED ? TILE_M : TILE_N) / 2;  // of a product
constexpr int A_BYTES = TILE_M * 128, STAGE_BYTES = A_BYTES + TILE_N * 128;
constexpr int FILTER_BLOCK = 64 * 128;  // bytes between blocks of 64 columns: of a data gradient, or SWAPPED
constexpr int SLAB_ROWS = SWAPPED ? TILE_M : 64, SLAB_COLUMNS = DEPTH, SLAB_BYTES = SLAB_ROWS * 128;
constexpr int OWN = TILE_N / CUT;  // columns of a tile that a block finishes
static_assert(OWN * CUT == TILE_N && OWN % SLAB_COLUMNS == 0, "whole slabs");
constexpr int CLASSES = SPREAD ? 4 : 1;
constexpr int BARRIER_BYTES = 256, AFFINE_BYTES = 512, SENT_BYTES = (CUT - 1) * TILE_M * OWN * 4;

struct Maps {
    TensorMap filter;
    TensorMap source[CLASSES], output[CLASSES], add[CLASSES];
#if MASKED
    TensorMap below[READ + SIGNED][CLASSES];  // x, and y if it is read, or another x, or signs; or y alone
#endif
};

// Row (n, i, j) of a class, n * height * width + i * width + j, starts at source pixel (first_h + i*step_h, first_w +
// j*step_w). Its tap (a, b) is moved from there by (offset_h + a*delta_h, offset_w + b*delta_w) and has the filter's
// tap + a*tap_step_h + b*tap_step_w.
struct Class {
    int tiles, rows;  // tiles_m of it, and all of its rows
    int height, width;
    int first_h, first_w;
    int taps_h, taps_w;
    int offset_h, offset_w;
    int tap;
};

struct Problem {
    int tiles, share, group, tiles_n;
    int columns, depth;
    int source_h, source_w;  // pixels of an image of the source
    int step_h, step_w;
    int delta_h, delta_w;
    int tap_step_h, tap_step_w;
    int added;        // elements per pixel of the array to be added; 0: there is none
    int stage_bytes;  // that are fetched for a stage
    int group_columns;  // of a group, or of the two of a tile
    int count, cycles;  // the first classes, which have taps; rounds that each of them has for sure
    Class classes[4];
};

#include "conv2d_hopper_tile.cuh"

// Shared memory: stages, slabs of output per warpgroup, barriers.
struct Layout {
    u32 base;

    __device__ __forceinline__ u32 stage(int i) const { return base + i * STAGE_BYTES; }
    __device__ __forceinline__ u32 slab(int warpgroup, int i) const {
        return base + STAGES * STAGE_BYTES + (warpgroup * SLABS + i) * SLAB_BYTES;
    }
    __device__ __forceinline__ u32 barriers() const { return slab(WARPGROUPS, 0) + SENT_BYTES; }
    __device__ __forceinline__ u32 filled(int i) const { return barriers() + 8 * i; }
    __device__ __forceinline__ u32 emptied(int i) const { return barriers() + 8 * (STAGES + i); }
    __device__ __forceinline__ u32 added(int warpgroup, int i) const {
        return barriers() + 8 * (2 * STAGES + warpgroup * SLABS + i);
    }
    // The tile that begins with a stage.
    __device__ __forceinline__ u32 ticket(int i) const { return added(WARPGROUPS, 0) + TICKET_BYTES * i; }
    // That the other block of a cluster has sent its sums, and where they lie (conv2d_hopper_cut.cuh).
    __device__ __forceinline__ u32 come() const { return ticket(STAGES); }
    __device__ __forceinline__ u32 sent() const { return slab(WARPGROUPS, 0); }
    // Of the batch norm below, what the channels of a stage need (conv2d_hopper_input.cuh).
    __device__ __forceinline__ u32 affine(int i) const { return barriers() + BARRIER_BYTES + i * AFFINE_BYTES; }
};

#include "conv2d_hopper_output.cuh"

using Sum = float[BLOCKS][ACCUMULATORS];

#if CUT > 1
#include "conv2d_hopper_cut.cuh"
#endif

#if MASKED
#include "conv2d_hopper_below.cuh"
#endif

// One thread: fills stage after stage of a tile, of which there is one if only to tell its number; -1 ends the row.
DEVICE void fill(const Layout& at, const Maps& maps, const Problem& p, Ring<STAGES>& ring, int number) {
    const Tile tile(p, number);
    const Class& c = p.classes[tile.index];
    const TensorMap& source = maps.source[tile.index];
    const Pixel start(c, tile.row);
    const int h = c.first_h + start.y * p.step_h, w = c.first_w + start.x * p.step_w;
    barrier_wait(at.emptied(ring.index), ring.parity ^ 1);
    write_ticket(at.ticket(ring.index), number < 0 ? Ticket{-1, 0} : tile.ticket());
    if (number < 0 || (SPREAD && c.taps_h * c.taps_w == 0)) barrier_arrive(at.filled(ring.index)), ring.advance();
    if (number < 0) return;
    for (int channel = tile.begin; channel < tile.end; channel += DEPTH)
        for (int a = 0; a < c.taps_h; ++a)
#pragma unroll 1
            for (int b = 0; b < c.taps_w; ++b) {
                const u32 to = at.stage(ring.index), barrier = at.filled(ring.index);
                const int first = TAIL ? min(channel, p.depth - DEPTH) : channel, from = tile.source + first;
                barrier_wait(at.emptied(ring.index), ring.parity ^ 1);
                barrier_expect(barrier, p.stage_bytes);
                if constexpr (FLAT)
                    load_box(to, source, barrier, from, tile.row);
                else
                    load_pixels(to, source, barrier, from, w, h, start.image, c.offset_w + b * p.delta_w,
                                c.offset_h + a * p.delta_h);
                const int tap = c.tap + a * p.tap_step_h + b * p.tap_step_w;
                if constexpr (GROUPED == 2) {
                    load_box(to + A_BYTES, maps.filter, barrier, tap * 32, 0, tile.column);
                } else if constexpr (ACROSS) {
                    const int column = GROUPED ? tile.column % p.group_columns : tile.column;
#pragma unroll
                    for (int j = 0; j < TILE_N; j += 64)
                        if (j < p.columns)
                            load_box(to + A_BYTES + j / 64 * FILTER_BLOCK, maps.filter, barrier, column + j, tap, from);
                } else {
                    load_box(to + A_BYTES, maps.filter, barrier, first, tap, tile.column);
                }
                ring.advance();
            }
#if MASKED
    if (p.added || c.taps_h * c.taps_w) fill_below(at, maps, p, ring, tile.own());
#endif
}

#if NORMALIZED
#include "conv2d_hopper_input.cuh"
#endif

// Of the sums of 64 columns those of the first or the second 32.
DEVICE float (&half(float (&sum)[ACCUMULATORS], int which))[16] {
    return *reinterpret_cast<float(*)[16]>(sum + 16 * which);
}

// A warpgroup: stages `step` to `end` of a tile, but for the first products of each; `before`: the one last taken.
template <int FIRST>
DEVICE void multiply_stages(Sum& sum, const Layout& at, Ring<STAGES>& ring, int step, int end, int warpgroup,
                            u32& before) {
    constexpr int B_STEP = ACROSS ? 16 * 128 : 32;
    const bool speaks = threadIdx.x % 32 == 0;
    for (; step < end; ++step) {
        barrier_wait(at.filled(ring.index), ring.parity);
        const u32 filters = at.stage(ring.index) + A_BYTES + (SWAPPED ? warpgroup * FILTER_BLOCK : 0);
        const u64 a = operand(at.stage(ring.index) + (SWAPPED ? 0 : warpgroup * (ROWS * 128)));
        const u64 b = operand(filters, ACROSS ? FILTER_BLOCK : 16);
        product_fence();
#pragma unroll
        for (int k = FIRST; k < STEPS; ++k)
#pragma unroll
            for (int i = 0; i < BLOCKS; ++i) {
                const u64 rows = a + operand_step(i * 64 * 128 + k * 32);
                if constexpr (GROUPED == 2)
                    multiply<ACROSS>(half(sum[i], k / 2), rows,
                                     b + operand_step(ACROSS ? k * B_STEP : k / 2 * 32 * 128 + k % 2 * B_STEP),
                                     step + k % 2);
                else if constexpr (SWAPPED)
                    multiply<false, ACROSS>(sum[i], b + operand_step(k * B_STEP), rows, step + k - FIRST);
                else
                    multiply<ACROSS>(sum[i], rows, b + operand_step(k * B_STEP), step + k - FIRST);
            }
        commit_products();
        await_products<1>();  // those of the step before are done with their stage
        if (speaks && step > 0) barrier_arrive(before);
        before = at.emptied(ring.index);
        ring.advance();
    }
}

// A warpgroup: sums up its rows of one tile, `steps` stages of it, of which the last `late` begin early.
DEVICE void accumulate(Sum& sum, const Layout& at, Ring<STAGES>& ring, int steps, int late, int warpgroup) {
    u32 before = 0;
    if constexpr (TAIL) steps -= late;
    multiply_stages<0>(sum, at, ring, 0, steps, warpgroup, before);
    if constexpr (TAIL) multiply_stages<TAIL>(sum, at, ring, steps, steps + late, warpgroup, before);
    await_products<0>();
    if (threadIdx.x % 32 == 0) barrier_arrive(before);
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) settle(sum[i]);
}

// Adds the bias to accumulators of two blocks of 8 columns from `column` on; SWAPPED: of a warpgroup's, which they are
// from.
DEVICE void add_bias(float (&d)[8], const float* bias, int column, int columns) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        if constexpr (SWAPPED) {
            const int at = column + threadIdx.x % 128 / 32 * 16 + 8 * j + threadIdx.x % 32 / 4;
            const float shift = at < columns ? bias[at] : 0.0f;
            d[2 * j] += shift, d[2 * j + 1] += shift, d[2 * j + 4] += shift, d[2 * j + 5] += shift;
            continue;
        }
        const int at = column + 8 * j + threadIdx.x % 4 * 2;
        if (at < columns) {
            const float2 shift = *reinterpret_cast<const float2*>(bias + at);
            d[4 * j] += shift.x, d[4 * j + 1] += shift.y, d[4 * j + 2] += shift.x, d[4 * j + 3] += shift.y;
        }
    }
}

// The sums of a class without taps. (Accumulators that are set to zero make ptxas wait for each product.)
struct Zeros {
    struct Row {
        __device__ __forceinline__ float operator[](int) const { return 0.0f; }
    };
    __device__ __forceinline__ Row operator[](int) const { return {}; }
};

using Found = float[Place::COUNT / BLOCKS];  // of each range of columns, what a lane has to write

// What there is for a batch norm of a warpgroup's rows of a tile.
DEVICE void leave_sums(const Place& place, const Tile& tile, const Found& found, float* partial) {
    if constexpr (SUMS) {
        constexpr int PATCHES = SWAPPED ? 1 : WARPGROUPS;  // of a tile, below each other
        float* const to =
            partial + i64(tile.rows(place.p) * PATCHES + place.warpgroup % PATCHES) * SUMS * place.p.columns;
#pragma unroll
        for (int s = 0; s < Place::COUNT; s += BLOCKS)
            ColumnShare().write(to, found[s / BLOCKS], place.column(tile, s), place.p.columns);
    }
}

template <class Sums>
DEVICE void write(Output& output, const Tile& tile, const Sums& sum, const float* bias, float* partial,
                  float* other_partial, const Below& below, Ring<STAGES>& ring) {
    const Place& place = output.place;
    constexpr int LAST = BLOCKS - 1;  // of the slabs of one range of columns
    constexpr int TAKEN = 2;  // times 16 rows at once
    Found found, other;
    Tally tally;
#if MASKED
    Masking masking;
    const Ring<STAGES> signs = ring;
    if (SIGNED) ring.advance();
#endif
#pragma unroll
    for (int group = 0; group < output.GROUPS; ++group) {
        const int begin = group * output.AT_ONCE;
        output.open(tile, group);
        const u32 thread = thread_again();
#pragma unroll
        for (int i = 0; i < output.AT_ONCE; ++i) {
            const int first = (begin + i) / BLOCKS * SLAB_COLUMNS;
            const int column = SWAPPED ? place.column(tile, 0) : tile.column + first;
#pragma unroll
            for (int j = 0; j < (SWAPPED ? SLAB_ROWS : SLAB_COLUMNS); j += 16) {
                float d[8];
#pragma unroll
                for (int e = 0; e < 8; ++e) d[e] = sum[(begin + i) % BLOCKS][(first + j) / 2 + e];
                if (!MASKED && bias) add_bias(d, bias, SWAPPED ? column : column + j, place.p.columns);
                put(d, output.buffer(i), j, thread, output.added());
            }
            if (!MASKED) output.close(tile, begin + i, output.buffer(i));
        }
#if MASKED
        output.share();
#pragma unroll
        for (int s = begin; s < begin + output.AT_ONCE; ++s) {
            if (s % BLOCKS == 0) masking = Masking(below, place.column(tile, s), place.p.columns);
            mask_slab(masking, output.buffer(s - begin), place, tile, ring, signs, s, below);
            output.close(tile, s, output.buffer(s - begin));
            if (s % BLOCKS == LAST) {
                found[s / BLOCKS] = masking.result();
                if (PAIR) other[s / BLOCKS] = masking.other_result();
            }
        }
#endif
        if constexpr (STATISTICS) {
#pragma unroll
            for (int s = begin; s < begin + output.AT_ONCE; ++s) {
                const int rows = place.p.classes[0].rows - place.row(tile, s);
                if (s % BLOCKS == 0) tally.start();
                tally.take<SLAB_ROWS, TAKEN>(output.buffer(s - begin), rows >= SLAB_ROWS,
                                             [&](int i) { return i < rows; });
                if (s % BLOCKS == LAST) found[s / BLOCKS] = tally.result();
            }
        }
        output.leave();
    }
    leave_sums(place, tile, found, partial);
    if (PAIR) leave_sums(place, tile, other, other_partial);
}

// The first thread, of a block.
DEVICE void init_barriers(const Layout& at) {
    constexpr int FILLING = NORMALIZED ? 2 : 1;  // threads that speak for the engine, and for the warp beside it
    for (int i = 0; i < STAGES; ++i) barrier_init(at.filled(i), FILLING), barrier_init(at.emptied(i), 4 * WARPGROUPS);
    for (int i = 0; i < WARPGROUPS * SLABS; ++i) barrier_init(at.added(0, i), SPACED ? 128 : 1);
#if CUT > 1
    init_exchange(at);
#endif
    barrier_init_done();
}

#if DIVIDED
#include "conv2d_hopper_divided.cuh"
#else
#if CUT > 1
#define CLUSTERED __cluster_dims__(CUT)
#else
#define CLUSTERED
#endif

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, RESIDENT)
conv2d_hopper_kernel(const __grid_constant__ Maps maps, const float* __restrict__ bias, float* __restrict__ partial,
                     const float* __restrict__ moments, const float* __restrict__ gamma,
                     const float* __restrict__ beta, const float* __restrict__ other_moments,
                     float* __restrict__ other_partial, const __grid_constant__ Problem p, u32* counter,
                     const T* __restrict__ spaced) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Layout at{shared_address(shared)};
    if (threadIdx.x == 0) init_barriers(at);
    if (threadIdx.x == THREADS - 1) prefetch_map(maps.source[0]), prefetch_map(maps.filter);
    __syncwarp();
    if constexpr (CUT > 1) cluster_arrive();
    await_predecessor();
    if constexpr (CUT > 1)
        cluster_wait();
    else
        __syncthreads();

    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // known to be the same in a warp
    // The two roles are the branches of one statement: only then ptxas counts registers for each apart.
    if (warpgroup == WARPGROUPS) {
        if constexpr (SHIFT) Registers::give();
        if (threadIdx.x == 128 * WARPGROUPS) {
            Ring<STAGES> ring;
            deal(counter, p.tiles, p.share, p.group, [&](int number) { fill(at, maps, p, ring, number); });
        }
#if NORMALIZED
        if (threadIdx.x / 32 == 4 * WARPGROUPS + 1) fill_affine(at, p, {moments, gamma, beta, p.depth});
#endif
    } else {
        if constexpr (SHIFT) Registers::take();
        Ring<STAGES> ring;
        Output output{{at, maps, p, warpgroup, spaced}};
        const Below below{moments, gamma, beta, other_moments};
        for (;;) {
            barrier_wait(at.filled(ring.index), ring.parity);
            const Ticket ticket = read_ticket(at.ticket(ring.index));
            if (ticket.first < 0) break;
            const Tile tile(p, ticket);
            const Class& c = p.classes[tile.index];
            const int taps = c.taps_h * c.taps_w, steps = taps * ceil_div(tile.end - tile.begin, DEPTH);
            if (SPREAD && steps == 0) {
                if (thread_again() % 32 == 0) barrier_arrive(at.emptied(ring.index));
                ring.advance();
            }
            const Tile own = tile.own();
            output.prepare(own);
            if constexpr (SPREAD)
                if (steps == 0) {
                    if (output.added() || (!MASKED && bias)) {
                        write(output, own, Zeros(), bias, partial, other_partial, below, ring);
                    } else {
                        output.store_zeros(own);
                        leave_sums(output.place, own, {}, partial);
                        if (PAIR) leave_sums(output.place, own, {}, other_partial);
                    }
                    continue;
                }
            Sum sum;
#if NORMALIZED
            accumulate(sum, at, p, tile, ring, warpgroup);
#else
            accumulate(sum, at, ring, steps, tile.ends(p) ? taps : 0, warpgroup);
#endif
#if CUT > 1
            Whole whole;
            exchange(whole, sum, at);
            write(output, own, whole, bias, partial, other_partial, below, ring);
            break;
#else
            write(output, own, sum, bias, partial, other_partial, below, ring);
#endif
        }
        output.drain();
    }
}
#endif
