// Both gradients of a 1x1 convolution to few filters under a batch norm on Hopper (sm_90a), from one read of what its
// output's gradient is made of and one of its input; 16-bit types, one group, no stride, no padding.
//
//   dy[p,k] = dz[p,k]*scale[k] + (y[p,k]*bend[k] + offset[k])     as in conv2d_both.cu, never in memory
//   dw[k,c] = sum_p dy[p,k] x[p,c]
//   dx[p,c] = sum_k dy[p,k] w[k,c] + add[p,c]
//
// BELOW: x is a ReLU's output; dx is masked where that is not positive, and summed for a batch norm under the ReLU, whose
// input is `raw`, as in conv2d_hopper.cu (MASKED 2 there). This is the first convolution of a residual block, and what
// comes down the shortcut is `add`. By kernels of their own x is read twice and dy, small beside it, three times. BELOW 2:
// under the ReLU is a sum of two batch norms; of the other one, whose input is `other`, sums are taken, too.
//
// A block owns COLUMNS columns c, all filters k and a chunk of the pixels, 64 at a time: dw stays in registers until its
// last tile. Columns come and go in pieces of 64; dy is made once for all of them. Chunks depend on the sizes alone, so
// the bits depend neither on the grid nor on the device.
//
// The arrays are seen through tensor maps (conv2d_both_wide.py makes them), boxes of 64 x 64 unless it says otherwise:
//   dz, y         (K, pixels)
//   w             (C, K): 64 x FILTERS
//   x, raw, other, add, dx  (C, pixels)
//   spaced        ADD 2: of (images, height, width, C) every second pixel of every second line, T
//   partials      (chunks, K, C) float32, for sum_partials_kernel
//   sums          with BELOW: (BELOW, chunks * parts, 2, C) float32, for batch_norm_merge.cu; a part is TILES_OF_PART
//                 tiles
// A stage is what dy of a tile is made of: boxes of dz, where dy takes their place, then of y. A slot is a piece of a
// tile: x, the addend, where dx takes its place, and with BELOW raw, and `other`.
//
// Macros: DTYPE (1, 2); FILTERS (64, 128), room for those there are; BELOW (0, 1, 2); ADD, 0: nothing is added, 1: an array
// like dx, 2: `spaced`; STAGES and SLOTS in shared memory.
// Grid: column blocks first, then chunks. Block: five warpgroups, each a role: two make dx of every other piece, one
// multiplies for dw, one makes dy and brings what is spaced; of the last one a warp fills stages, one slots, one stores.
// Dynamic shared memory: `Layout::BYTES`.
// What bounds it is memory: of 64 filters and 256 columns a piece of 64 pixels takes 2000 clocks to come and go at 4.2
// TB/s, its products 260, mask and sums some 900 of a warpgroup (by count of instructions) and shared memory 800. On an
// H200, 256 images, with an addend and one batch norm below: 256-64 at 56x56 pixels 463 us, a copy of its arrays 441;
// 512-128 at 28x28 237 and 220, 256-128 at 56x56 507 and 490 (bench_fusion.py --parts convolutions has the peers). With
// a spaced addend the last takes 488 where the copy would take 422; why is not known.
// FLOP: 4 * K * C * pixels. Bytes: x, dx, add, raw once, dz and y once (from the L2 cache for further columns);
// 4 * chunks * |dw| twice.
#define MASKED (BELOW ? 2 : 0)
#define BACKWARD 1
#define STATISTICS 0
#include "conv2d_columns.cuh"
#include "conv2d_both_make.cuh"
#include "wgmma.cuh"

constexpr int PIXELS = 64, BOX = PIXELS * 128;                   // of a tile; bytes
constexpr int HALVES = FILTERS / 64, PIECES = 4 / HALVES, COLUMNS = 64 * PIECES;
constexpr int STAGE = 2 * HALVES * BOX, FILTER_PIECE = FILTERS * 128;
constexpr int SLOT = (2 + BELOW) * BOX;
constexpr int TILES_OF_PART = 4;
static_assert(HALVES == 1 || HALVES == 2, "the sums of dw fill the registers of a warpgroup");

// The roles, by warpgroup; those of the last, by warp.
constexpr int DATA = 0, WEIGHT = 2, MAKE = 3, MOVE = 4, THREADS = 5 * 128;
constexpr int FILL_STAGES = 0, FILL_SLOTS = 1, STORE = 2;
constexpr int EACH = 65536 / THREADS / 8 * 8;  // registers of a thread at first
constexpr int FOR_DATA = 96, FOR_WEIGHT = 168, FOR_MAKE = 80, FOR_MOVE = 40;
static_assert(2 * FOR_DATA + FOR_WEIGHT + FOR_MAKE + FOR_MOVE <= 5 * EACH, "no more registers than there are");

struct Maps {
    TensorMap dz, y, w, x, dx, add, raw, other;
};

struct Problem {
    int pixels, tiles;      // tiles of the pixels
    int channels, columns;  // of the convolution's input: all of them, blocks of them
    int filters, chunks;
    int parts;              // of a chunk
    int height, width;      // of an image, where the addend is spaced
    int added;              // elements between pixels of that
};

// A block's columns, in pieces, and its tiles of pixels.
struct Part {
    int column, pieces, chunk, first, last;

    __device__ __forceinline__ explicit Part(const Problem& p) {
        chunk = blockIdx.x / p.columns;
        column = (blockIdx.x - chunk * p.columns) * COLUMNS;
        pieces = min(PIECES, (p.channels - column + 63) / 64);
        const int each = p.tiles / p.chunks, rest = p.tiles - each * p.chunks;
        first = each * chunk + min(chunk, rest);
        last = first + each + (chunk < rest);
    }
};

struct Layout {
    static constexpr int SLOTS_AT = PIECES * FILTER_PIECE + STAGES * STAGE;
    static constexpr int FACTORS = SLOTS_AT + SLOTS * SLOT, BARRIERS = FACTORS + 3 * FILTERS * 4;
    static constexpr int BYTES = BARRIERS + 8 * (3 * STAGES + 4 * SLOTS + 1);
    u32 base;

    __device__ __forceinline__ u32 filters(int piece) const { return base + piece * FILTER_PIECE; }
    __device__ __forceinline__ u32 stage(int i) const { return base + PIECES * FILTER_PIECE + i * STAGE; }
    // Of a slot: x; the addend, then dx; with BELOW raw, and the other one.
    __device__ __forceinline__ u32 input(int i) const { return base + SLOTS_AT + i * SLOT; }
    __device__ __forceinline__ u32 output(int i) const { return input(i) + BOX; }
    __device__ __forceinline__ u32 raw(int i) const { return input(i) + 2 * BOX; }
    // scale, bend and offset of the filters.
    __device__ __forceinline__ ChannelTable<FILTERS> factors() const { return {base + FACTORS}; }

    __device__ __forceinline__ u32 barrier(int i) const { return base + BARRIERS + 8 * i; }
    // Of a stage: it has come; dy is there; all have done with it.
    __device__ __forceinline__ u32 come(int i) const { return barrier(i); }
    __device__ __forceinline__ u32 made(int i) const { return barrier(STAGES + i); }
    __device__ __forceinline__ u32 done(int i) const { return barrier(2 * STAGES + i); }
    // Of a slot: it has come; a spaced addend has; dx is there; it is multiplied and stored.
    __device__ __forceinline__ u32 slot_come(int i) const { return barrier(3 * STAGES + i); }
    __device__ __forceinline__ u32 added(int i) const { return barrier(3 * STAGES + SLOTS + i); }
    __device__ __forceinline__ u32 finished(int i) const { return barrier(3 * STAGES + 2 * SLOTS + i); }
    __device__ __forceinline__ u32 slot_done(int i) const { return barrier(3 * STAGES + 3 * SLOTS + i); }
    __device__ __forceinline__ u32 filters_come() const { return barrier(3 * STAGES + 4 * SLOTS); }
};

DEVICE void init_barriers(const Layout& at) {
    for (int i = 0; i < STAGES; ++i)
        barrier_init(at.come(i), 1), barrier_init(at.made(i), 4), barrier_init(at.done(i), 12);  // warps of three roles
    for (int i = 0; i < SLOTS; ++i) {
        barrier_init(at.slot_come(i), 1), barrier_init(at.added(i), 128), barrier_init(at.finished(i), 4);
        barrier_init(at.slot_done(i), 9);  // warps that multiply, those of the other half of the pieces, and who stores
    }
    barrier_init(at.filters_come(), 1);
    barrier_init_done();
}

// A warp's part in a warpgroup's arrival.
DEVICE void arrive(u32 barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// One thread: all filters, once, then stage after stage.
DEVICE void fill_stages(const Layout& at, const Maps& maps, const Part& part) {
    barrier_expect(at.filters_come(), part.pieces * FILTER_PIECE);
    for (int j = 0; j < part.pieces; ++j)
        load_box(at.filters(j), maps.w, at.filters_come(), part.column + j * 64, 0);
    Ring<STAGES> ring;
    for (int tile = part.first; tile < part.last; ++tile) {
        const u32 to = at.stage(ring.index), barrier = at.come(ring.index);
        barrier_wait(at.done(ring.index), ring.parity ^ 1);
        barrier_expect(barrier, STAGE);
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            load_box(to + h * BOX, maps.dz, barrier, h * 64, tile * PIXELS);
            load_box(to + (HALVES + h) * BOX, maps.y, barrier, h * 64, tile * PIXELS);
        }
        ring.advance();
    }
}

// One thread: slot after slot.
DEVICE void fill_slots(const Layout& at, const Maps& maps, const Part& part) {
    Ring<SLOTS> ring;
    for (int tile = part.first; tile < part.last; ++tile)
        for (int j = 0; j < part.pieces; ++j) {
            const int slot = ring.index, column = part.column + j * 64, row = tile * PIXELS;
            const u32 barrier = at.slot_come(slot);
            barrier_wait(at.slot_done(slot), ring.parity ^ 1);
            barrier_expect(barrier, (1 + (ADD == 1) + BELOW) * BOX);
            load_box(at.input(slot), maps.x, barrier, column, row);
            if constexpr (ADD == 1) load_box(at.output(slot), maps.add, barrier, column, row);
            if constexpr (BELOW) load_box(at.raw(slot), maps.raw, barrier, column, row);
            if constexpr (BELOW == 2) load_box(at.raw(slot) + BOX, maps.other, barrier, column, row);
            ring.advance();
        }
}

// One thread: stores slot after slot.
DEVICE void store(const Layout& at, const Maps& maps, const Part& part) {
    Ring<SLOTS> ring;
    for (int tile = part.first; tile < part.last; ++tile)
        for (int j = 0; j < part.pieces; ++j) {
            barrier_wait(at.finished(ring.index), ring.parity);
            store_box(maps.dx, at.output(ring.index), part.column + j * 64, tile * PIXELS);
            commit_stores();
            await_stores_read<0>();
            barrier_arrive(at.slot_done(ring.index));
            ring.advance();
        }
}

// A thread's part of an addend that only every second pixel has: a chunk of every 16th row of a slot.
struct Spaced {
    static constexpr int ROWS = PIXELS / 16;
    int from[ROWS];  // pixels that have one; -1: none

    __device__ __forceinline__ Spaced(const Problem& p, int tile) {
        const int down = (p.height + 1) / 2, across = (p.width + 1) / 2;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int pixel = tile * PIXELS + int(thread_again()) / 8 + i * 16, line = pixel / p.width;
            const int image = line / p.height, x = pixel - line * p.width, y = line - image * p.height;
            const bool there = pixel < p.pixels && y % 2 == 0 && x % 2 == 0;
            from[i] = there ? (image * down + y / 2) * across + x / 2 : -1;
        }
    }

    // Starts the copy of 64 channels.
    __device__ __forceinline__ void copy(u32 to, u32 barrier, const T* spaced, const Problem& p, int channel) const {
        const int row = thread_again() / 8, chunk = thread_again() % 8;
        channel += chunk * 8;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const bool there = from[i] >= 0 && channel < p.channels;
            copy_chunk(to + (row + i * 16) * 128 + (chunk ^ row % 8) * 16,
                       spaced + (there ? i64(from[i]) * p.added + channel : 0), there);
        }
        arrive_with_copies(barrier);
    }
};

// The warpgroup that makes dy, in the place of dz; with ADD 2 it brings the addends of a tile's slots then.
DEVICE void make(const Layout& at, const Above& above, const Problem& p, const Part& part, const T* spaced) {
    put_factors(at.factors(), above, p.filters);
    for (int k = p.filters + thread_again(); k < FILTERS; k += 128)
        for (int i = 0; i < 3; ++i) at.factors().store(i, k, 0.0f);
    warpgroup_sync(1 + MAKE);
    const Made<FILTERS / 8> made(thread_again());
    const Factors factors(at.factors(), made.vector * 8);
    Ring<STAGES> ring;
    Ring<SLOTS> slots;
    for (int tile = part.first; tile < part.last; ++tile) {
        barrier_wait(at.come(ring.index), ring.parity);
        made.make(at.stage(ring.index), factors, PIXELS);  // behind the last pixel x is zero
        fence_for_engine();
        arrive(at.made(ring.index));
        ring.advance();
        if constexpr (ADD == 2) {
            const Spaced addend(p, tile);
#pragma unroll 1
            for (int j = 0; j < part.pieces; ++j, slots.advance()) {
                barrier_wait(at.slot_done(slots.index), slots.parity ^ 1);
                addend.copy(at.output(slots.index), at.added(slots.index), spaced, p, part.column + j * 64);
            }
        }
    }
}

// The warpgroup that sums dw up.
DEVICE void sum_weight(const Layout& at, const Problem& p, const Part& part, float* partials) {
    float sum[HALVES][PIECES][32];
    Ring<STAGES> ring;
    Ring<SLOTS> slots;
    for (int tile = part.first; tile < part.last; ++tile) {
        const bool begun = tile > part.first;
        barrier_wait(at.made(ring.index), ring.parity);
        const u64 a = operand(at.stage(ring.index));
#pragma unroll
        for (int j = 0; j < PIECES; ++j) {
            if (j >= part.pieces) break;
            barrier_wait(at.slot_come(slots.index), slots.parity);
            const u64 b = operand(at.input(slots.index));
            product_fence();
#pragma unroll
            for (int h = 0; h < HALVES; ++h)
#pragma unroll
                for (int k = 0; k < PIXELS / 16; ++k)
                    multiply<true, true>(sum[h][j], a + operand_step(h * BOX + k * 2048), b + operand_step(k * 2048),
                                         begun || k);
            commit_products();
            await_products<0>();
            if (threadIdx.x % 32 == 0) barrier_arrive(at.slot_done(slots.index));
            slots.advance();
        }
        if (threadIdx.x % 32 == 0) barrier_arrive(at.done(ring.index));
        ring.advance();
    }
    const u32 thread = thread_again(), lane = thread % 32;
#pragma unroll
    for (int h = 0; h < HALVES; ++h)
#pragma unroll
        for (int j = 0; j < PIECES; ++j) {
            if (j >= part.pieces) break;
            settle(sum[h][j]);
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const int k = h * 64 + thread / 32 * 16 + i % 2 * 8 + lane / 4;
                const int c = part.column + j * 64 + i / 2 * 8 + lane % 4 * 2;
                if (k < p.filters && c < p.channels)
                    *reinterpret_cast<float2*>(partials + (i64(part.chunk) * p.filters + k) * p.channels + c) =
                        make_float2(sum[h][j][2 * i], sum[h][j][2 * i + 1]);
            }
        }
}

// Adds what lies at `to` to a warpgroup's 64 x 64 results and writes these there, rounded.
DEVICE void put_added(const float (&sum)[32], u32 to) {
    const u32 thread = thread_again(), lane = thread % 32, row = thread / 32 * 16 + lane % 16;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const u32 place = to + row * 128 + ((2 * j + lane / 16) ^ row % 8) * 16;
        u32 words[4];
        load_matrices(words, place);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float add[2];
            unpack_word(words[i], add);
            words[i] = Rounding<T>::round_pair(sum[8 * j + 2 * i] + add[0], sum[8 * j + 2 * i + 1] + add[1]);
        }
        store_matrices(place, words);
    }
}

DEVICE void await_slot(const Layout& at, const Ring<SLOTS>& slots) {
    barrier_wait(at.slot_come(slots.index), slots.parity);
    if constexpr (ADD == 2) barrier_wait(at.added(slots.index), slots.parity);
}

#if BELOW
// Writes a part of the sums of 64 columns, and begins anew.
DEVICE void leave_sums(Masking& masking, float* sums, float* others, int part, int column, int columns) {
    const i64 at = i64(part) * 2 * columns;
    ColumnShare().write(sums + at, masking.result(), column, columns);
    if constexpr (BELOW == 2) ColumnShare().write(others + at, masking.other_result(), column, columns);
#pragma unroll
    for (int i = 0; i < 2; ++i) masking.sum[i] = masking.product[i] = masking.other_product[i] = 0.0f;
}
#endif

// A warpgroup: dx of the `own`-th of every two pieces.
DEVICE void make_data(const Layout& at, const Problem& p, const Part& part, int own, const Below& below, float* sums) {
    Ring<STAGES> ring;
    Ring<SLOTS> slots;
#if BELOW
    Masking masking[PIECES];
#pragma unroll
    for (int j = 0; j < PIECES; ++j)
        if (j % 2 == own) masking[j] = Masking(below, part.column + j * 64, p.channels);
    sums += i64(part.chunk) * p.parts * 2 * p.channels;
    float* const others = sums + i64(p.chunks) * p.parts * 2 * p.channels;
    int left = TILES_OF_PART, parts = 0;
#endif
    barrier_wait(at.filters_come(), 0);
    for (int tile = part.first; tile < part.last; ++tile) {
        barrier_wait(at.made(ring.index), ring.parity);
        const u64 a = operand(at.stage(ring.index));
#pragma unroll
        for (int j = 0; j < PIECES; ++j) {
            if (j >= part.pieces) break;
            if (j % 2 == own) {
                const u64 b = operand(at.filters(j));
                float sum[32];
                product_fence();
#pragma unroll
                for (int k = 0; k < FILTERS / 16; ++k)
                    multiply<true>(sum, a + operand_step(k / 4 * BOX + k % 4 * 32), b + operand_step(k * 2048), k);
                commit_products();
                await_products<0>();
                settle(sum);
                const u32 to = at.output(slots.index);
                await_slot(at, slots);  // what it held before is stored, too
                if constexpr (ADD)
                    put_added(sum, to);
                else
                    put_square(sum, to);
#if BELOW
                warpgroup_sync(1 + DATA + own);
                const u32 x = at.input(slots.index) + columns_across();
#pragma unroll 1
                for (int k = 0; k < PIXELS; k += 16)
                    masking[j].take<128>(x + BOX + k * 128, x + 2 * BOX + k * 128, x + k * 128);
                if constexpr (BELOW == 2)
                    masking[j].take_other<BOX, 1>(x + BOX, x + 3 * BOX, below, part.column + j * 64, p.channels);
#endif
                fence_for_engine();
                arrive(at.finished(slots.index));
            } else {  // who lets rounds of a barrier go by could not tell the next but one from the next
                await_slot(at, slots);
                arrive(at.slot_done(slots.index));
            }
            slots.advance();
        }
        arrive(at.done(ring.index));
        ring.advance();
#if BELOW
        if (--left == 0 || tile == part.last - 1) {
#pragma unroll
            for (int j = 0; j < PIECES; ++j)
                if (j % 2 == own) leave_sums(masking[j], sums, others, parts, part.column + j * 64, p.channels);
            left = TILES_OF_PART, ++parts;
        }
#endif
    }
#if BELOW
    for (; parts < p.parts; ++parts)  // a chunk may have a tile less than others
#pragma unroll
        for (int j = 0; j < PIECES; ++j)
            if (j % 2 == own) leave_sums(masking[j], sums, others, parts, part.column + j * 64, p.channels);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
conv2d_both_wide_kernel(const __grid_constant__ Maps maps, float* __restrict__ partials, float* __restrict__ sums,
                        const float* __restrict__ moments, const float* __restrict__ gamma,
                        const double* __restrict__ dy_sums, const double* __restrict__ count,
                        const float* __restrict__ below_moments, const float* __restrict__ other_moments,
                        const T* __restrict__ spaced, const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Layout at{shared_address(shared)};
    if (threadIdx.x == 0) init_barriers(at);
    if (threadIdx.x == THREADS - 1)
        prefetch_map(maps.dz), prefetch_map(maps.y), prefetch_map(maps.w), prefetch_map(maps.x), prefetch_map(maps.dx);
    __syncthreads();
    await_predecessor();
    const int role = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // known to be the same in a warp
    // The roles are the branches of one statement: only then ptxas counts registers for each apart.
    if (role == MOVE) {
        set_registers<EACH, FOR_MOVE>();
        const int warp = __shfl_sync(0xffffffffu, threadIdx.x % 128 / 32, 0);
        const bool speaks = threadIdx.x % 32 == 0;
        if (warp == FILL_STAGES && speaks) fill_stages(at, maps, Part(p));
        if (warp == FILL_SLOTS && speaks) fill_slots(at, maps, Part(p));
        if (warp == STORE && speaks) store(at, maps, Part(p));
    } else if (role == MAKE) {
        set_registers<EACH, FOR_MAKE>();
        make(at, {moments, gamma, dy_sums, count}, p, Part(p), spaced);
    } else if (role == WEIGHT) {
        set_registers<EACH, FOR_WEIGHT>();
        sum_weight(at, p, Part(p), partials);
    } else {
        set_registers<EACH, FOR_DATA>();
        make_data(at, p, Part(p), role - DATA, {below_moments, nullptr, nullptr, other_moments}, sums);
    }
}
