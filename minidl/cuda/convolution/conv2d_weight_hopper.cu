// Weight gradient of a convolution on Hopper (sm_90a): the implicit matrix product of conv2d_weight.cu with operands
// copied by the engine (TMA, in im2col mode) and multiplied by warpgroups (wgmma), those of float32 by warps in TF32
// (mma.sync, conv2d_weight_hopper_tf32.cuh).
//
//   dw[k,r,s,c] = sum_{n,p,q} dy[n,p,q,k] x[n, p*sh - ph + r*dh, q*sw - pw + s*dw, c]
//
// Rows are the filters k of a group. Columns are blocks of SPAN, 64 of 16 bits or 32 of float32: a tap (r, s) and as
// many channels of it, the channels counted first; the last block of a tap may have fewer. The sum runs over the output
// pixels in chunks, each summed in order by one block; the blocks of a cluster add theirs up into one float32 partial,
// and conv2d_weight_sum.cu adds the partials, both in order. Where that leaves multiprocessors idle, a lot of tiles is
// what is cut into chunks, its steps tile after tile (TURNS; stream-K: Osama, Merrill, Cecka, Garland, Owens, 2023): a
// chunk may end one tile and begin the next, and writes at once a tile that it has all of. Lots begin alike, so that
// blocks of the same chunk sum up the same pixels at a time. Chunks depend on the sizes alone, so the bits depend
// neither on the grid nor on the device. Where a tap lies outside of an image, zeros are multiplied: a NaN reaches all
// taps of its own two channels.
//
// The arrays are seen through tensor maps (conv2d_weight_hopper.py makes them):
//   dy      (K, pixels), tiled: SPAN filters x SPAN pixels
//   x       (C, W, H, N), im2col: SPAN pixels x SPAN channels; FLAT: (C, pixels), tiled, for 1x1 without stride
//   output    (K, R, S, C / groups) dense, the gradient, set or added to                                float32
//   partials  (parts of all tiles, patches.rows / 16, TILE_N / SPAN, patches.columns / 8), for conv2d_weight_sum.cu
// A stage is blocks of SPAN rows, then of SPAN columns, each SPAN pixels of 128 bytes: both operands are MN-major, and
// pixels behind the last one are zeros.
//
// NORMALIZED: x is the input of a batch norm with a ReLU over it, normalised in registers
// (conv2d_weight_hopper_input.cuh).
//
// Macros: DTYPE, of float32 TF32 (1, 3); FLAT, NORMALIZED (16-bit types), with it BORDER, whether taps may lie outside
// of an image, or pixels of a stage behind the last; TILE_M x TILE_N, the tile of rows x columns; WARPGROUPS_M x
// WARPGROUPS_N that share it; STAGES of SPAN pixels; RESIDENT, blocks per multiprocessor; CLUSTER (1, 2), blocks that
// add up their chunks before they write a partial; TURNS, whether a lot has several tiles; OVERFLOWS, whether the L2
// cache cannot hold the gradient.
// Grid: one block per chunk of a partial, lot (tiles of a group as `rows_first` orders them, group) and partial, the
// first fastest, so that blocks which share pixels run together.
// Block: warpgroups that multiply, and one warp that keeps the pipeline filled, each lane one block of a stage; with
// BORDER another, which tells what of a stage is inside.
// Dynamic shared memory: STAGES * 128 * (TILE_M + TILE_N) bytes, later sums of TILE_M * TILE_N, and 1024.
// That operands leave the L2 cache first (`once`), where all blocks run at a time, gains 2 us of 46 at 1x1 1024-256 on
// 14x14 pixels, where partial sums then stay in the L2 cache, and for dy alone 6 of 133 at 64-256 on 56x56, where tiles
// share x; where operands are read again later it would cost up to a quarter (25088-4096 fully connected). The gradient
// of 411 MB there takes 105 us if it leaves first, 116 if it does not, 119 in the other order of tiles; stores alone
// take 93. Chunks of lots of tiles lose where x and dy are more than that cache holds, as each turn reads them again
// (1x1 512-256 on 28x28 pixels: 88 to 120 us).
// What did not shorten launches beside kernels that hold multiprocessors: docs/tuning.md.
// FLOP: 2 * K * R*S*C * pixels / groups. Bytes: dy and x once if the L2 cache keeps what the tiles of a chunk share,
// and 4 * partials * |dw| twice.
#include "conv2d_weight_hopper.cuh"
#if DTYPE == 0
#include "conv2d_weight_hopper_tf32.cuh"
#else
#include "wgmma.cuh"
#endif

constexpr int SPAN = 128 / sizeof(T);  // filters, channels and pixels of a block
constexpr int WARPGROUPS = WARPGROUPS_M * WARPGROUPS_N;
// A block alone on its multiprocessor shifts registers from the filling warps to the multiplying ones, which takes a
// whole warpgroup of them; of several blocks all threads have the same.
constexpr bool SHIFT = RESIDENT == 1;
#if BORDER
constexpr int FILLING = 2;  // warps that speak for a stage
#else
constexpr int FILLING = 1;
#endif
constexpr int THREADS = 128 * WARPGROUPS + (SHIFT ? 128 : 32 * FILLING);
using Registers = RegisterShares<128, WARPGROUPS == 2 ? 40 : 32, 128 * WARPGROUPS, WARPGROUPS == 2 ? 232 : 160>;
constexpr int ROWS = TILE_M / WARPGROUPS_M, COLUMNS = TILE_N / WARPGROUPS_N;  // of a warpgroup
constexpr int ROW_BLOCKS = TILE_M / SPAN, COLUMN_BLOCKS = TILE_N / SPAN;
constexpr int BLOCK_BYTES = SPAN * 128, STAGE_BYTES = (ROW_BLOCKS + COLUMN_BLOCKS) * BLOCK_BYTES;
static_assert(ROW_BLOCKS + COLUMN_BLOCKS <= 32, "a lane per block");

// Where in the tile a warpgroup's part begins.
DEVICE int row_of(int warpgroup) { return warpgroup % WARPGROUPS_M * ROWS; }
DEVICE int column_of(int warpgroup) { return warpgroup / WARPGROUPS_M * COLUMNS; }

struct Maps {
    TensorMap dy, x;
};

struct Problem {
    int steps;         // stages that make up the sum of a tile
    int lots, shared;  // lots of so many tiles
    int chunks;        // into which the steps of a lot are divided, one for each block
    int groups, rows, channels, columns;  // of a group
    int spans, blocks;  // blocks of columns: of a tap, of all taps
    int kernel_w;
    int pixels;  // of dy
    int height, width;
    int out_height, out_width;
    int stride_h, stride_w;
    int padding_h, padding_w;
    int dilation_h, dilation_w;
    int further_n, further_h, further_w;  // SPAN pixels, as images, rows and pixels
    int tiles_m, tiles_n;
    int turn_m, turn_n;  // tiles from one to the next along rows and columns
    int once;            // bits: what leaves the L2 cache first, of dy (1) and x (2)
    Patches patches;
    int mode;
};

// What is left of a block's chunk of the steps of its lot.
struct Portion {
    int lot, chunk;
    int next, end;

    __device__ __forceinline__ Portion() {}
    __device__ __forceinline__ explicit Portion(const Problem& p, u32 block = blockIdx.x) {
        const u32 index = block / CLUSTER, steps = p.steps * p.shared;
        const u32 turn = index / p.lots;
        lot = index - turn * p.lots;
        chunk = turn * CLUSTER + block % CLUSTER;
        // steps * chunk / chunks without 64 bits
        const u32 each = steps / p.chunks, rest = steps - each * p.chunks;
        next = each * chunk + rest * chunk / p.chunks;
        end = each * (chunk + 1) + rest * (chunk + 1) / p.chunks;
    }
};

// A tile, and a block's share of its sum.
struct Work {
    int group;
    int row, block;   // the first of it
    int first, last;  // steps
    int part;         // the partial sum that its cluster leaves, among those of all tiles
    bool whole;       // there is no other of the tile

    __device__ __forceinline__ Work() {}
    __device__ __forceinline__ Work(const Problem& p, const Portion& portion) {
        const int turn = TURNS ? portion.next / p.steps : 0, tile = turn * p.lots + portion.lot;
        row = tile / p.turn_m % p.tiles_m * TILE_M;
        block = tile / p.turn_n % p.tiles_n * COLUMN_BLOCKS;
        group = tile / (p.tiles_m * p.tiles_n);
        first = portion.next - turn * p.steps;
        last = portion.end - turn * p.steps;
        if (TURNS && last > p.steps) last = p.steps;
        part = portion.lot * (p.chunks / CLUSTER + p.shared - 1) + portion.chunk / CLUSTER + turn;
        whole = p.chunks == CLUSTER || (TURNS && last - first == p.steps);
    }
};

// The works of a block, one after another.
template <class F>
DEVICE void for_works(const Problem& p, Portion portion, Work one, F work) {
    work(one);
    if constexpr (TURNS)
        while ((portion.next += one.last - one.first) < portion.end) {
            one = Work(p, portion);
            work(one);
        }
}

// A block of columns; one behind the last lies behind the last channel, where all is zero.
struct Columns {
    int tap_h, tap_w, channel;

    __device__ __forceinline__ Columns() {}
    __device__ __forceinline__ Columns(const Problem& p, int block) {
        const int tap = block / p.spans;
        const bool inside = block < p.blocks;
        tap_h = inside ? tap / p.kernel_w : 0;
        tap_w = inside ? tap - tap_h * p.kernel_w : 0;
        channel = (inside ? block - tap * p.spans : p.spans) * SPAN;
    }
};

// Where the gradient has a block of columns from `channel` on; nothing of one behind the last.
DEVICE Target find_columns(const Problem& p, int block, int channel) {
    const int tap = block / p.spans;
    channel += (block - tap * p.spans) * SPAN;
    return {tap * p.channels + channel, block < p.blocks ? p.channels - channel : 0};
}

// Shared memory: stages, barriers.
struct Layout {
    u32 base;

    __device__ __forceinline__ u32 stage(int i) const { return base + i * STAGE_BYTES; }
    __device__ __forceinline__ u32 filled(int i) const { return base + STAGES * STAGE_BYTES + 8 * i; }
    __device__ __forceinline__ u32 emptied(int i) const { return filled(STAGES + i); }
    // Of a stage's block of columns, which pixels are inside.
    __device__ __forceinline__ u32 inside(int i, int block) const {
        return filled(2 * STAGES + i * COLUMN_BLOCKS + block);
    }
};

// What a lane of the warp that fills copies of each stage: lane i the i-th block.
struct Copied {
    int channel, offset_h, offset_w;
    Pixel pixel;  // the first of the first stage

    __device__ __forceinline__ Copied() {}
    __device__ __forceinline__ Copied(const Problem& p, const Work& work)
        : pixel(work.first * SPAN, p.out_height, p.out_width) {
        const int lane = threadIdx.x % 32;
        const Columns columns(p, work.block + lane - ROW_BLOCKS);
        // What is read of the next group is not written.
        channel = lane < ROW_BLOCKS ? work.group * p.rows + work.row + lane * SPAN
                                    : work.group * p.channels + columns.channel;
        offset_h = columns.tap_h * p.dilation_h, offset_w = columns.tap_w * p.dilation_w;
    }
};

// A warp: fills stage after stage.
DEVICE void fill(const Layout& at, const Maps& maps, const Problem& p, const Work& work, const Copied& copied,
                 Ring<STAGES>& ring) {
    const int lane = threadIdx.x % 32;
    const bool of_dy = lane < ROW_BLOCKS, busy = lane < ROW_BLOCKS + COLUMN_BLOCKS;
    const int channel = copied.channel;
    const Kept kept = p.once & (of_dy ? 1 : 2) ? Kept::BRIEFLY : Kept::USUALLY;
    Pixel pixel = copied.pixel;
    for (int step = work.first; step < work.last; ++step) {
        const u32 to = at.stage(ring.index) + lane * BLOCK_BYTES, barrier = at.filled(ring.index);
        barrier_wait(at.emptied(ring.index), ring.parity ^ 1);
        if (lane == 0) barrier_expect(barrier, STAGE_BYTES);
        __syncwarp();
        if (of_dy) {
            load_box(to, maps.dy, barrier, channel, step * SPAN, kept);
        } else if (busy) {
            if constexpr (FLAT)
                load_box(to, maps.x, barrier, channel, step * SPAN, kept);
            else
                load_pixels(to, maps.x, barrier, channel, pixel.x * p.stride_w - p.padding_w,
                            pixel.y * p.stride_h - p.padding_h, pixel.image, copied.offset_w, copied.offset_h, kept);
        }
        pixel.advance(p, p.out_height, p.out_width);
        ring.advance();
    }
}

#if NORMALIZED
#include "conv2d_weight_hopper_input.cuh"
#elif DTYPE
constexpr int BLOCKS = ROWS / 64;  // products along the rows
using Sum = float[BLOCKS][COLUMNS / 2];

// A warpgroup: sums up its part of the tile, from row and column on.
DEVICE void accumulate(Sum& sum, const Layout& at, Ring<STAGES>& ring, int steps, int row, int column) {
    const bool speaks = threadIdx.x % 32 == 0;
    u32 before = 0;
    for (int step = 0; step < steps; ++step) {
        barrier_wait(at.filled(ring.index), ring.parity);
        const u64 a = operand(at.stage(ring.index) + row / 64 * BLOCK_BYTES, BLOCK_BYTES);
        const u64 b = operand(at.stage(ring.index) + (ROW_BLOCKS + column / 64) * BLOCK_BYTES, BLOCK_BYTES);
        product_fence();
#pragma unroll
        for (int k = 0; k < SPAN / 16; ++k)
#pragma unroll
            for (int i = 0; i < BLOCKS; ++i)
                multiply<true, true>(sum[i], a + operand_step(i * BLOCK_BYTES + k * 2048), b + operand_step(k * 2048),
                                     step + k);
        commit_products();
        await_products<1>();  // those of the step before are done with their stage
        if (speaks && step > 0) barrier_arrive(before);
        before = at.emptied(ring.index);
        ring.advance();
    }
    await_products<0>();
    if (TURNS && speaks) barrier_arrive(before);
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) settle(sum[i]);
}

// Of a thread's accumulators: rows from product to product and from the first pair to the second, patches of a block.
constexpr int ACROSS = 64, DOWN = 8, PER = SPAN / 8;

// A thread's first row, from the first of its warp's patch on.
DEVICE int thread_row() { return threadIdx.x % 32 / 4; }

// A warp's part of the warpgroup's, from row and column on.
DEVICE void find_part(int& row, int& column) { row += threadIdx.x / 32 % 4 * 16; }

#else

// The warps of a warpgroup share its part of the tile, each with M blocks of rows and N of columns.
constexpr int WARPS_DOWN = ROWS >= 4 * COLUMNS ? 4 : COLUMNS >= 4 * ROWS ? 1 : 2;
constexpr int M = ROWS / WARPS_DOWN / SPAN, N = COLUMNS / (4 / WARPS_DOWN) / SPAN;
static_assert(M > 0 && N > 0 && M * N <= 4, "parts that registers can hold");
using Sum = float[2 * M][16 * N];

// A warp's part of the warpgroup's, from row and column on.
DEVICE void find_part(int& row, int& column) {
    const int warp = threadIdx.x / 32 % 4;
    row += warp % WARPS_DOWN * M * SPAN, column += warp / WARPS_DOWN * N * SPAN;
}

// A warp: sums up its part of the tile. Operands are read a product ahead, across stages too.
DEVICE void accumulate(Sum& sum, const Layout& at, Ring<STAGES>& ring, int steps, int row, int column) {
    find_part(row, column);
    const bool speaks = threadIdx.x % 32 == 0;
    const Places places(at.base + row / SPAN * BLOCK_BYTES, at.base + (ROW_BLOCKS + column / SPAN) * BLOCK_BYTES);
    Fragments<M, N> fragments[2];
    const auto read = [&](int stage, int k) {
        load_fragments(fragments[k % 2], places, stage * STAGE_BYTES + k * 1024, BLOCK_BYTES);
    };
    clear(sum);
    barrier_wait(at.filled(ring.index), ring.parity);
    read(ring.index, 0);
    for (int step = 0; step < steps; ++step) {
        const u32 emptied = at.emptied(ring.index);
#if TF32 == 3
        Sum total;
        clear(total);
#else
        Sum& total = sum;
#endif
#pragma unroll
        for (int k = 0; k < SPAN / 8; ++k) {
            if (k + 1 < SPAN / 8) {
                read(ring.index, k + 1);
            } else {
                ring.advance();
                if (step + 1 < steps) {
                    barrier_wait(at.filled(ring.index), ring.parity);
                    read(ring.index, 0);
                }
            }
            multiply_eight(total, fragments[k % 2]);
        }
        __syncwarp();
        if (speaks) barrier_arrive(emptied);
#if TF32 == 3
#pragma unroll
        for (int i = 0; i < 2 * M; ++i)
#pragma unroll
            for (int j = 0; j < 16 * N; ++j) sum[i][j] += total[i][j];
#endif
    }
}

constexpr int ACROSS = 16, DOWN = 1, PER = SPAN / 8;

DEVICE int thread_row() { return threadIdx.x % 32 / 4 * 2; }
#endif

template <Mode MODE>
DEVICE void put_sum(float* output, const Sum& sums, const Layout& at, const Problem& p, const Work& work, int row,
                    int column) {
#if NORMALIZED
    Turned sum;
    turn(sum, sums);
#else
    const Sum& sum = sums;
#endif
    find_part(row, column);
    const int first = (MODE == PART ? 0 : work.row) + row + thread_row();
    const int line = COLUMN_BLOCKS * 16 * p.patches.columns;  // values of a line of patches
    if (MODE == PART)
        output += (i64(work.part) * p.patches.rows + row) / 16 * line + column / SPAN * 16 * p.patches.columns +
                  column % SPAN * 16 + threadIdx.x % 32 * 4;
    finish<128 * WARPGROUPS, ACROSS, DOWN, PER, MODE>(
        sum, at.base, output, first, p.rows, column % SPAN, MODE == PART ? line : p.columns, p.patches,
        [&](int b) { return find_columns(p, work.block + column / SPAN + b, column % SPAN + thread_column()); });
}

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, RESIDENT)
conv2d_weight_hopper_kernel(const __grid_constant__ Maps maps, float* __restrict__ output,
                            float* __restrict__ partials, const float* __restrict__ moments,
                            const float* __restrict__ gamma, const float* __restrict__ beta,
                            const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Layout at{shared_address(shared)};
    if (threadIdx.x == THREADS - 1) prefetch_map(maps.dy), prefetch_map(maps.x);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i)
            barrier_init(at.filled(i), FILLING), barrier_init(at.emptied(i), 4 * WARPGROUPS);
        barrier_init_done();
    }
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // known to be the same in a warp
    const bool fills = warp == 4 * WARPGROUPS;
    // What the first copies need is worked out before memory may be touched.
    Portion filled;
    Work first;
    Copied start;
    if (fills) filled = Portion(p), first = Work(p, filled), start = Copied(p, first);
    __syncthreads();
    await_predecessor();
    // The two roles are the branches of one statement: only then ptxas counts registers for each apart.
    if (warp >= 4 * WARPGROUPS) {
        if constexpr (SHIFT) Registers::give();
        Ring<STAGES> ring;
        bool begun = true;
        if (fills)
            for_works(p, filled, first, [&](const Work& work) {
                if (!begun) start = Copied(p, work);
                begun = false;
                fill(at, maps, p, work, start, ring);
            });
#if BORDER
        if (warp == 4 * WARPGROUPS + 1) {
            const Portion portion(p);
            for_works(p, portion, Work(p, portion), [&](const Work& work) { tell_inside(at, p, work, ring); });
        }
#endif
    } else {
        if constexpr (SHIFT) Registers::take();
        int warpgroup = warp / 4;
        const Portion portion(p);
        Ring<STAGES> ring;
        for_works(p, portion, Work(p, portion), [&](Work work) {
            Sum sum;
#if NORMALIZED
            const Norm norm{moments, gamma, beta, p.channels};
            accumulate(sum, at, p, work, norm, ring, row_of(warpgroup), column_of(warpgroup));
#else
            accumulate(sum, at, ring, work.last - work.first, row_of(warpgroup), column_of(warpgroup));
#endif
#if DTYPE == 0 && TF32 == 3
            // There are no registers for it over the sum.
            work = Work(p, Portion(p, block_again())), warpgroup = warpgroup_again();
#endif
            const int row = row_of(warpgroup), column = column_of(warpgroup);
            if (!work.whole) {
                put_sum<PART>(partials, sum, at, p, work, row, column);
            } else {
                float* const to = output + i64(work.group) * p.rows * p.columns;
                p.mode == ADD ? put_sum<ADD>(to, sum, at, p, work, row, column)
                              : put_sum<SET>(to, sum, at, p, work, row, column);
            }
        });
    }
}
