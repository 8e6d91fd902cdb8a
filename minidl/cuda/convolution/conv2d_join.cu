// An array that is made of two on its way into a 1x1 convolution on Hopper (sm_90a), and written for others who read it;
// 16-bit types, one group, no stride, no padding.
//
//   z[p,c] = max(x[p,c]*scale[c] + shift[c] + add[p,c], 0)        the ReLU over a batch norm and a shortcut
//   y[p,k] = sum_c z[p,c] w[k,c]
//
// BACKWARD, the gradient of a batch norm's input, on its way into a data gradient:
//
//   z[p,k] = x[p,k]*scale[k] + (add[p,k]*bend[k] + offset[k])     x the gradient of its output, add its input
//   y[p,c] = sum_k z[p,k] w[k,c]
//
// p is a pixel (normalize.cuh and affine.cuh have the formulas), z is rounded to T before it is multiplied. z, its
// signs (signs.cuh) and y have the bits of passes of their own, as batch_norm.cu and conv2d_hopper.cu write them; but z
// is written and not read again: three passes over arrays of its size instead of four.
//
// TWO: the shortcut is the input of a batch norm, too. BELOW, backward: y is masked and summed for a ReLU over a batch
// norm below, as in conv2d_hopper.cu (MASKED 1 there).
//
// Below DEPTH is that of the product, the channels of z, and WIDTH that of y. The arrays are seen through tensor maps
// (conv2d_join.py makes them), boxes of 64 channels x 64 pixels unless it says otherwise; a group is 64 pixels:
//   x, add, z  (DEPTH, pixels)
//   signs      forward (DEPTH / 8, pixels) bytes: SIGN_ROW x 64 pixels
//   w          (C, K): forward 64 channels x PIECE_WIDTH filters, BACKWARD 64 x 64
//   y, below   (WIDTH, pixels)
//   partial    with STATISTICS or BELOW (groups, 2, WIDTH) float32: sums of y and of its squares, or those of
//              batch_norm_backward_stats, for batch_norm_merge.cu
// A stage is 64 channels of a tile: boxes of x, where z takes its place, and of add. RESIDENT: tiles are one group, and
// the filters stay in shared memory; else two, which share pieces of the filters that come with the stages; but
// tiles of a last round that are at most half as many as multiprocessors are cut in two, one group each.
//
// Macros: DTYPE (1, 2); BACKWARD; TWO; BELOW; STATISTICS (forward, of DTYPE 1); DEEP, stages of a tile, DEPTH / 64;
// WIDTH (64, 128, 256); RESIDENT; STAGES and PIECES in shared memory.
// Grid: blocks take tiles in turn (tickets.cuh). Block: warpgroups, each a role: one, or two, multiply and finish y,
// one makes z, and of the last one thread fills stages, another stores z, a third fills pieces.
// Dynamic shared memory: `Layout::BYTES`.
// What bounds it is memory: a stage of 64 pixels takes 1300 clocks to come and go at 4.2 TB/s, its products with 64
// filters 130, and z some 500 of its warpgroup (by count of instructions). 1x1 256-64 at 56x56 pixels, 256 images, on
// an H200: 325 us, as long as a copy of its bytes; by the two kernels 420, with the merge of the statistics (331 here).
// Where filters come along: 1024-256 at 14x14 98 us, BACKWARD 105; by two kernels 115 and 128, a copy 80 and 86, and 93
// without products, without making, without filters. Three pieces under way instead of five: 112 and 124. Of 128 images,
// 196 tiles, the last 64 cut in two, 56 and 59; of whole tiles 62 and 63 (in a step).
// FLOP: 2 * C * K * pixels. Bytes: x, add, z, y once, signs, and what is below; the filters, unless they are RESIDENT,
// for each tile from the L2 cache.
#define MASKED (BACKWARD && BELOW)
#include "conv2d_above.cuh"
#include "conv2d_columns.cuh"
#include "signs.cuh"
#include "tickets.cuh"
#include "wgmma.cuh"

constexpr int CONSUMERS = RESIDENT ? 1 : 2;
constexpr int PIXELS = 64 * CONSUMERS, CHANNELS = 64;          // of a tile; of a stage
constexpr int SLAB = 64 * 128;                                 // bytes of a box
constexpr int BOX = CONSUMERS * SLAB, STAGE = 2 * BOX;         // of x, of a tile; of a stage
constexpr int SLABS = WIDTH / 64, BUFFERS = RESIDENT ? SLABS : 1;  // of a consumer's part of a tile; in shared memory
constexpr int PIECE_WIDTH = RESIDENT ? WIDTH : 128, PIECE = PIECE_WIDTH * 128;
constexpr int PARTS = WIDTH / PIECE_WIDTH;                     // pieces of a stage
// Who fills pieces knows a tile by its first stage, and must not take a stage two rounds before for that.
static_assert(RESIDENT || PIECES < PARTS * STAGES, "the round between has come when the last pieces are asked for");
constexpr int STRIPS = 2, STRIP = DEEP < 4 ? DEEP : 4;         // of signs, in shared memory; stages of one
constexpr int SIGN_ROW = STRIP * CHANNELS / 8;                 // bytes
constexpr int SIGN_SLAB = 64 * SIGN_ROW;
constexpr int TABLES = BACKWARD ? 3 : 2 + TWO;                 // numbers that are needed of each channel

// The roles, by warpgroup, those of the last by warp.
constexpr int MULTIPLY = 0, MAKE = CONSUMERS, FILL = CONSUMERS + 1, THREADS = (CONSUMERS + 2) * 128;
constexpr int EACH = 65536 / THREADS / 8 * 8;  // registers of a thread at first
constexpr int FOR_MULTIPLY = RESIDENT ? EACH : 184, FOR_MAKE = RESIDENT ? EACH : 96, FOR_FILL = RESIDENT ? EACH : 48;
static_assert(CONSUMERS * FOR_MULTIPLY + FOR_MAKE + FOR_FILL <= (CONSUMERS + 2) * EACH, "no more than there are");

struct Maps {
    TensorMap x, add, w, z, y;
#if BACKWARD
    TensorMap below;
#else
    TensorMap signs;
#endif
};

// whole: tiles of as many groups as there are CONSUMERS; the others have one.
struct Problem {
    int pixels, tiles, whole, share, group;
};

// The groups of pixels of a tile: the first, and how many there are.
DEVICE Ticket groups_of(int tile, const Problem& p) {
    if (tile < 0) return {-1, 0};
    return tile < p.whole ? Ticket{tile * CONSUMERS, CONSUMERS} : Ticket{p.whole * (CONSUMERS - 1) + tile, 1};
}

struct Layout {
    static constexpr int FILTERS = RESIDENT ? DEEP : PIECES, OUTPUT = FILTERS * PIECE + STAGES * STAGE;
    static constexpr int BELOWS = OUTPUT + CONSUMERS * BUFFERS * SLAB, SIGNS = BELOWS + (MASKED ? CONSUMERS * SLAB : 0);
    static constexpr int FACTORS = SIGNS + (BACKWARD ? 0 : STRIPS * CONSUMERS * SIGN_SLAB);
    static constexpr int BARRIERS = FACTORS + TABLES * DEEP * CHANNELS * 4;
    static constexpr int TICKETS = BARRIERS + 8 * (3 * STAGES + STRIPS + CONSUMERS + 2 * (RESIDENT ? 1 : PIECES));
    static constexpr int BYTES = TICKETS + STAGES * TICKET_BYTES;
    u32 base;

    // Pieces of the filters: RESIDENT that of a stage.
    __device__ __forceinline__ u32 piece(int i) const { return base + i * PIECE; }
    __device__ __forceinline__ u32 stage(int i) const { return base + FILTERS * PIECE + i * STAGE; }
    // Of a consumer.
    __device__ __forceinline__ u32 slab(int consumer, int i) const {
        return base + OUTPUT + (consumer * BUFFERS + i) * SLAB;
    }
    __device__ __forceinline__ u32 below(int consumer) const { return base + BELOWS + consumer * SLAB; }
    __device__ __forceinline__ u32 strip(int i) const { return base + SIGNS + i * CONSUMERS * SIGN_SLAB; }
    // scale, shift, and with TWO the shortcut's scale; BACKWARD scale, bend and offset.
    __device__ __forceinline__ ChannelTable<DEEP * CHANNELS> factors() const { return {base + FACTORS}; }

    __device__ __forceinline__ u32 barrier(int i) const { return base + BARRIERS + 8 * i; }
    // Of a stage: it has come; z is there; all have done with it. Of a strip: it has been stored. Of a piece: it has
    // come (RESIDENT all have); all have done with it.
    __device__ __forceinline__ u32 come(int i) const { return barrier(i); }
    __device__ __forceinline__ u32 made(int i) const { return barrier(STAGES + i); }
    __device__ __forceinline__ u32 done(int i) const { return barrier(2 * STAGES + i); }
    __device__ __forceinline__ u32 stored(int i) const { return barrier(3 * STAGES + i); }
    __device__ __forceinline__ u32 below_come(int consumer) const { return barrier(3 * STAGES + STRIPS + consumer); }
    __device__ __forceinline__ u32 piece_come(int i) const { return barrier(3 * STAGES + STRIPS + CONSUMERS + 2 * i); }
    __device__ __forceinline__ u32 piece_done(int i) const { return piece_come(i) + 8; }
    // The tile that begins with a stage.
    __device__ __forceinline__ u32 ticket(int i) const { return base + TICKETS + i * TICKET_BYTES; }
};

DEVICE void init_barriers(const Layout& at) {
    for (int i = 0; i < STAGES; ++i) {
        barrier_init(at.come(i), 1), barrier_init(at.made(i), 4);
        barrier_init(at.done(i), 4 * CONSUMERS + 1);  // warps, and who stores
    }
    for (int i = 0; i < STRIPS; ++i) barrier_init(at.stored(i), 1);
    for (int i = 0; i < CONSUMERS; ++i) barrier_init(at.below_come(i), 1);
    for (int i = 0; i < (RESIDENT ? 1 : PIECES); ++i)
        barrier_init(at.piece_come(i), 1), barrier_init(at.piece_done(i), 4 * CONSUMERS);
    barrier_init_done();
}

// Whoever reads stages: the groups of the tile that begins with one, known to be there; a negative one ends the row.
DEVICE Ticket tile_at(const Layout& at, const Ring<STAGES>& ring) { return read_ticket(at.ticket(ring.index)); }

// One thread: fills stage after stage of a tile; one without groups tells that there is none.
DEVICE void fill(const Layout& at, const Maps& maps, Ring<STAGES>& ring, const Ticket& tile) {
    for (int i = 0; i < (tile.first < 0 ? 1 : DEEP); ++i) {
        const u32 barrier = at.come(ring.index);
        barrier_wait(at.done(ring.index), ring.parity ^ 1);
        if (i == 0) write_ticket(at.ticket(ring.index), tile);
        if (tile.first < 0) {
            barrier_arrive(barrier);
        } else {
            barrier_expect(barrier, 2 * SLAB * tile.second);
#pragma unroll
            for (int half = 0; half < CONSUMERS; ++half) {
                if (half == tile.second) break;
                const u32 to = at.stage(ring.index) + half * SLAB;
                load_box(to, maps.x, barrier, i * CHANNELS, (tile.first + half) * 64);
                load_box(to + BOX, maps.add, barrier, i * CHANNELS, (tile.first + half) * 64);
            }
        }
        ring.advance();
    }
}

// Loads the filters of a part of a stage.
DEVICE void load_piece(u32 to, const Maps& maps, u32 barrier, int stage, int part) {
    if constexpr (BACKWARD) {
        for (int i = 0; i < PIECE_WIDTH; i += 64)
            load_box(to + i * 128, maps.w, barrier, part * PIECE_WIDTH + i, stage * CHANNELS);
    } else {
        load_box(to, maps.w, barrier, stage * CHANNELS, part * PIECE_WIDTH);
    }
}

// One thread: all pieces, once; or unless RESIDENT a warp, of which one thread speaks: for each tile.
DEVICE void fill_pieces(const Layout& at, const Maps& maps) {
#if RESIDENT
    barrier_expect(at.piece_come(0), DEEP * PIECE);
    for (int i = 0; i < DEEP; ++i) load_piece(at.piece(i), maps, at.piece_come(0), i, 0);
#else
    const bool speaks = threadIdx.x % 32 == 0;
    Ring<STAGES> ring;
    Ring<PIECES> pieces;
    for (;;) {
        barrier_wait(at.come(ring.index), ring.parity);
        if (tile_at(at, ring).first < 0) break;
#pragma unroll 1
        for (int i = 0; i < DEEP * PARTS; ++i) {
            barrier_wait(at.piece_done(pieces.index), pieces.parity ^ 1);
            if (speaks) {
                barrier_expect(at.piece_come(pieces.index), PIECE);
                load_piece(at.piece(pieces.index), maps, at.piece_come(pieces.index), i / PARTS, i % PARTS);
            }
            __syncwarp();
            pieces.advance();
        }
#pragma unroll 1
        for (int i = 0; i < DEEP; ++i) ring.advance();
    }
#endif
}

#include "conv2d_join_make.cuh"

// A warp, of which one thread speaks: stores z stage after stage, and the signs of a strip with its last one.
DEVICE void store_sums(const Layout& at, const Maps& maps) {
    const bool speaks = threadIdx.x % 32 == 0;
    Ring<STAGES> ring;
    Ring<STRIPS> strips;
    for (;;) {
        barrier_wait(at.made(ring.index), ring.parity);
        const Ticket tile = tile_at(at, ring);
        if (tile.first < 0) break;
        for (int i = 0; i < DEEP; ++i) {
            const bool last = i % STRIP == STRIP - 1 || i == DEEP - 1;
            if (i) barrier_wait(at.made(ring.index), ring.parity);
            if (speaks) {
#pragma unroll
                for (int half = 0; half < CONSUMERS; ++half) {
                    if (half == tile.second) break;
                    const int pixel = (tile.first + half) * 64;
                    store_box(maps.z, at.stage(ring.index) + half * SLAB, i * CHANNELS, pixel);
#if !BACKWARD
                    const u32 signs = at.strip(strips.index) + half * SIGN_SLAB;
                    if (last) store_box(maps.signs, signs, i / STRIP * SIGN_ROW, pixel);
#endif
                }
                commit_stores();
                await_stores_read<0>();
                barrier_arrive(at.done(ring.index));
                if (last) barrier_arrive(at.stored(strips.index));
            }
            __syncwarp();
            ring.advance();
            if (last) strips.advance();
        }
    }
}

// A warpgroup for which a tile has no pixels: all of its stages and pieces.
DEVICE void let_go_by(const Layout& at, Ring<STAGES>& ring, Ring<RESIDENT ? 1 : PIECES>& pieces) {
#pragma unroll 1
    for (int i = 0; i < DEEP; ++i) {
        if (i) barrier_wait(at.made(ring.index), ring.parity);
#pragma unroll 1
        for (int part = 0; part < PARTS; ++part) {
            barrier_wait(at.piece_come(pieces.index), pieces.parity);
            if (threadIdx.x % 32 == 0) barrier_arrive(at.piece_done(pieces.index));
            pieces.advance();
        }
        if (threadIdx.x % 32 == 0) barrier_arrive(at.done(ring.index));
        ring.advance();
    }
}

// A warpgroup: its 64 pixels of y, tile after tile.
DEVICE void multiply_tiles(const Layout& at, const Maps& maps, const Problem& p, const Affine& below, float* partial) {
    const int consumer = MULTIPLY + (CONSUMERS > 1 ? int(warpgroup_again()) : 0);
    const bool speaks = thread_again() == 0;
    Ring<STAGES> ring;
    Ring<RESIDENT ? 1 : PIECES> pieces;
    [[maybe_unused]] u32 below_parity = 0;
    if (RESIDENT) barrier_wait(at.piece_come(0), 0);
    for (;;) {
        float sum[PARTS][PIECE_WIDTH / 2];
        barrier_wait(at.made(ring.index), ring.parity);
        const Ticket tile = tile_at(at, ring);
        if (tile.first < 0) break;
        if (CONSUMERS > 1 && __reduce_or_sync(0xffffffffu, consumer >= tile.second)) {  // known to be the same
            let_go_by(at, ring, pieces);
            continue;
        }
        const int first = (tile.first + consumer) * 64;
        const auto load_below = [&](int s) {
#if MASKED
            if (!speaks) return;
            barrier_expect(at.below_come(consumer), SLAB);
            load_box(at.below(consumer), maps.below, at.below_come(consumer), s * 64, first);
#endif
        };
        load_below(0);
#pragma unroll 1
        for (int i = 0; i < DEEP; ++i) {
            if (i) barrier_wait(at.made(ring.index), ring.parity);
            const u64 a = operand(at.stage(ring.index) + consumer * SLAB);
            auto next = pieces;
            product_fence();
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                if (!RESIDENT) barrier_wait(at.piece_come(next.index), next.parity);
                const u64 b = operand(at.piece(RESIDENT ? i : next.index), BACKWARD ? SLAB : 16);
#pragma unroll
                for (int k = 0; k < CHANNELS / 16; ++k)
                    multiply<BACKWARD>(sum[part], a + operand_step(k * 32), b + operand_step(k * (BACKWARD ? 2048 : 32)),
                                       i + k);
                commit_products();
                next.advance();
            }
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                if (part < PARTS - 1) await_products<1>();
                else await_products<0>();
                if (!RESIDENT && threadIdx.x % 32 == 0) barrier_arrive(at.piece_done(pieces.index));
                pieces.advance();
            }
            if (threadIdx.x % 32 == 0) barrier_arrive(at.done(ring.index));
            ring.advance();
        }
#pragma unroll
        for (int part = 0; part < PARTS; ++part) settle(sum[part]);

        const int rows = p.pixels - first;
        float* const sums = partial + i64(tile.first + consumer) * 2 * WIDTH;
#pragma unroll
        for (int s = 0; s < SLABS; s += BUFFERS) {
            if (speaks) await_stores_read<0>();  // of those before
            warpgroup_sync(1 + consumer);
#pragma unroll
            for (int i = 0; i < BUFFERS; ++i)
                put_square(*reinterpret_cast<float(*)[32]>(&sum[0][0] + 32 * (s + i)), at.slab(consumer, i));
#if MASKED
            warpgroup_sync(1 + consumer);
            barrier_wait(at.below_come(consumer), below_parity);
            below_parity ^= 1;
            Masking masking({below.moments, below.gamma, below.beta}, s * 64, WIDTH);
            const u32 lane_from = columns_across();
#pragma unroll 1
            for (int k = 0; k < 64; k += 16)
                masking.take<128>(at.slab(consumer, 0) + lane_from + k * 128, at.below(consumer) + lane_from + k * 128, 0);
            ColumnShare().write(sums, masking.result(), s * 64, WIDTH);
#endif
            fence_for_engine();
            warpgroup_sync(1 + consumer);
            if (s + BUFFERS < SLABS) load_below(s + BUFFERS);
            if (speaks) {
#pragma unroll
                for (int i = 0; i < BUFFERS; ++i) store_box(maps.y, at.slab(consumer, i), (s + i) * 64, first);
                commit_stores();
            }
            if constexpr (STATISTICS) {
#pragma unroll
                for (int i = 0; i < BUFFERS; ++i) {
                    Tally tally;
                    tally.start();
                    tally.take<64, 2>(at.slab(consumer, i), rows >= 64, [&](int row) { return row < rows; });
                    ColumnShare().write(sums, tally.result(), (s + i) * 64, WIDTH);
                }
            }
        }
    }
    if (speaks) await_stores_read<0>();
}

// What the threads of a block do. `prepare`: the warpgroup that makes z, first; below: the batch norm below.
template <class Prepare>
DEVICE void play_roles(const Maps& maps, const Problem& p, u32* counter, float* partial, const Affine& below,
                       Prepare prepare) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Layout at{shared_address(shared)};
    if (threadIdx.x == 0) init_barriers(at);
    if (threadIdx.x == THREADS - 1) prefetch_map(maps.x), prefetch_map(maps.add), prefetch_map(maps.w);
    __syncthreads();
    await_predecessor();
    const int role = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // known to be the same in a warp
    // The roles are the branches of one statement: only then ptxas counts registers for each apart.
    if (role == FILL) {
        set_registers<EACH, FOR_FILL>();
        const int warp = __shfl_sync(0xffffffffu, threadIdx.x % 128 / 32, 0);
        if (warp == 0) {
            if (threadIdx.x % 32 == 0) {
                if (RESIDENT) fill_pieces(at, maps);
                Ring<STAGES> ring;
                deal(counter, p.tiles, p.share, p.group, [&](int tile) { fill(at, maps, ring, groups_of(tile, p)); });
            }
        } else if (warp == 1) {
            store_sums(at, maps);
        } else if (warp == 2) {
            if (!RESIDENT) fill_pieces(at, maps);
        }
    } else if (role == MAKE) {
        set_registers<EACH, FOR_MAKE>();
        prepare(at);
        make(at, p);
    } else {
        set_registers<EACH, FOR_MULTIPLY>();
        multiply_tiles(at, maps, p, below, partial);
    }
}

#if BACKWARD
extern "C" __global__ void __launch_bounds__(THREADS, 1)
conv2d_join_backward_kernel(const __grid_constant__ Maps maps, float* __restrict__ partial,
                            const float* __restrict__ moments, const float* __restrict__ gamma,
                            const double* __restrict__ sums, const double* __restrict__ count,
                            const float* __restrict__ below_moments, const float* __restrict__ below_gamma,
                            const float* __restrict__ below_beta, const __grid_constant__ Problem p, u32* counter) {
    play_roles(maps, p, counter, partial, {below_moments, below_gamma, below_beta},
               [&](const Layout& at) { Factors::prepare(at, Above{moments, gamma, sums, count}); });
}
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1)
conv2d_join_kernel(const __grid_constant__ Maps maps, float* __restrict__ partial, const float* __restrict__ moments,
                   const float* __restrict__ gamma, const float* __restrict__ beta,
                   const float* __restrict__ add_moments, const float* __restrict__ add_gamma,
                   const float* __restrict__ add_beta, const __grid_constant__ Problem p, u32* counter) {
    play_roles(maps, p, counter, partial, {}, [&](const Layout& at) {
        Factors::prepare(at, {moments, gamma, beta}, {add_moments, add_gamma, add_beta});
    });
}
#endif
