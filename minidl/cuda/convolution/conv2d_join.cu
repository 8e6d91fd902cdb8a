// A residual sum that is made on its way into a 1x1 convolution on Hopper (sm_90a); 16-bit types, one group, no stride,
// no padding.
//
//   z[p,c] = max(x[p,c]*scale[c] + shift[c] + add[p,c], 0)     rounded to T: the ReLU over a batch norm and a shortcut
//   y[p,k] = sum_c z[p,c] w[k,c]
//
// p is a pixel, x the batch norm's input (normalize.cuh has the formula). z, its signs (signs.cuh) and y have the bits
// of passes of their own, as batch_norm_apply_kernel and conv2d_hopper.cu write them; but z, which others read as well,
// is written and not read again: three passes over the sum's arrays instead of four.
//
// TWO: the shortcut is the input of a batch norm, too.
//
// The arrays are seen through tensor maps (conv2d_join.py makes them), boxes of 64 x 64 unless it says otherwise:
//   x, add, z  (C, pixels)
//   signs      (C / 8, pixels) bytes: C / 8 x 64
//   w          (C, K): 64 x K
//   y          (K, pixels)
//   partial    with STATISTICS (tiles, 2, K) float32: sums of y and of its squares, for batch_norm_merge.cu
// A tile is 64 pixels. A stage is 64 channels of it: a box of x, where z takes its place, and one of add. The filters
// stay in shared memory.
//
// Macros: DTYPE (1, 2); TWO; STATISTICS (of DTYPE 1 alone); DEEP, stages of a tile, C / 64; FILTERS, K (64, 128, 256);
// STAGES in shared memory.
// Grid: blocks take tiles in turn (tickets.cuh). Block: three warpgroups, each a role: one multiplies and finishes y,
// one makes z, and of the last one thread fills and another stores z.
// Dynamic shared memory: `Layout::BYTES`.
// What bounds it is memory: a stage takes 1300 clocks to come and go at 4.2 TB/s, the products of 64 filters 130, and z
// some 500 of its warpgroup (by count of instructions). 1x1 256-64 at 56x56 pixels, 256 images, on an H200: 325 us, as
// long as a copy of its bytes; by the two kernels 420, with the merge of the statistics (331 here).
// FLOP: 2 * C * K * pixels. Bytes: x, add, z, y once, signs.
#define MASKED 0
#define BACKWARD 0
#include "affine.cuh"
#include "channel_table.cuh"
#include "conv2d_columns.cuh"
#include "signs.cuh"
#include "tickets.cuh"
#include "wgmma.cuh"

constexpr int PIXELS = 64, CHANNELS = 64;           // of a tile; of a stage
constexpr int BOX = PIXELS * 128, STAGE = 2 * BOX;  // bytes
constexpr int SLABS = FILTERS / 64;                 // of a tile's y
constexpr int SIGN_ROW = DEEP * CHANNELS / 8;       // bytes of a tile's signs in a row
constexpr int STRIPS = 2;                           // tiles whose signs are in shared memory

// The roles, by warpgroup; the last has two.
constexpr int MULTIPLY = 0, MAKE = 1, FILL = 2, THREADS = 3 * 128;

struct Maps {
    TensorMap x, add, w, z, signs, y;
};

struct Problem {
    int pixels, tiles, share, group;
};

// A batch norm of the channels: moments (2, C); gamma, beta (C,) or null.
struct Affine {
    const float *moments, *gamma, *beta;
};

struct Layout {
    static constexpr int OUTPUT = DEEP * FILTERS * 128 + STAGES * STAGE, SIGNS = OUTPUT + SLABS * BOX;
    static constexpr int FACTORS = SIGNS + STRIPS * PIXELS * SIGN_ROW;
    static constexpr int BARRIERS = FACTORS + (2 + TWO) * DEEP * CHANNELS * 4;
    static constexpr int TICKETS = BARRIERS + 8 * (3 * STAGES + STRIPS + 1), BYTES = TICKETS + STAGES * TICKET_BYTES;
    u32 base;

    __device__ __forceinline__ u32 filters(int i) const { return base + i * FILTERS * 128; }
    __device__ __forceinline__ u32 stage(int i) const { return filters(DEEP) + i * STAGE; }
    __device__ __forceinline__ u32 slab(int i) const { return base + OUTPUT + i * BOX; }
    __device__ __forceinline__ u32 strip(int i) const { return base + SIGNS + i * PIXELS * SIGN_ROW; }
    // scale, shift, and with TWO the shortcut's scale.
    __device__ __forceinline__ ChannelTable<DEEP * CHANNELS> factors() const { return {base + FACTORS}; }

    __device__ __forceinline__ u32 barrier(int i) const { return base + BARRIERS + 8 * i; }
    // Of a stage: it has come; z is there; all have done with it. Of a strip: it has been stored.
    __device__ __forceinline__ u32 come(int i) const { return barrier(i); }
    __device__ __forceinline__ u32 made(int i) const { return barrier(STAGES + i); }
    __device__ __forceinline__ u32 done(int i) const { return barrier(2 * STAGES + i); }
    __device__ __forceinline__ u32 stored(int i) const { return barrier(3 * STAGES + i); }
    __device__ __forceinline__ u32 filters_come() const { return barrier(3 * STAGES + STRIPS); }
    // The tile that begins with a stage.
    __device__ __forceinline__ u32 ticket(int i) const { return base + TICKETS + i * TICKET_BYTES; }
};

DEVICE void init_barriers(const Layout& at) {
    for (int i = 0; i < STAGES; ++i)
        barrier_init(at.come(i), 1), barrier_init(at.made(i), 4), barrier_init(at.done(i), 5);  // warps, and who stores
    for (int i = 0; i < STRIPS; ++i) barrier_init(at.stored(i), 1);
    barrier_init(at.filters_come(), 1);
    barrier_init_done();
}

// Whoever reads stages: the tile that begins with one, known to be there; -1 ends the row.
DEVICE int tile_at(const Layout& at, const Ring<STAGES>& ring) { return read_ticket(at.ticket(ring.index)).first; }

// One thread: fills stage after stage of a tile; -1 tells that there is none.
DEVICE void fill(const Layout& at, const Maps& maps, Ring<STAGES>& ring, int tile) {
    for (int i = 0; i < (tile < 0 ? 1 : DEEP); ++i) {
        const u32 to = at.stage(ring.index), barrier = at.come(ring.index);
        barrier_wait(at.done(ring.index), ring.parity ^ 1);
        if (i == 0) write_ticket(at.ticket(ring.index), {tile, 0});
        if (tile < 0) {
            barrier_arrive(barrier);
        } else {
            barrier_expect(barrier, STAGE);
            load_box(to, maps.x, barrier, i * CHANNELS, tile * PIXELS);
            load_box(to + BOX, maps.add, barrier, i * CHANNELS, tile * PIXELS);
        }
        ring.advance();
    }
}

// A thread of the warpgroup that makes: what it needs of eight neighbouring channels.
struct Factors {
    float scale[8], shift[8], further[8];

    // The warpgroup: works all of them out.
    DEVICE void prepare(const Layout& at, const Affine& main, const Affine& other) {
        constexpr int ALL = DEEP * CHANNELS;
        for (int c = threadIdx.x % 128; c < ALL; c += 128) {
            float mean[1], scale[1], shift[1];
            load_affine(main.moments, main.gamma, main.beta, ALL, c, mean, scale, shift);
            at.factors().store(0, c, scale[0]);
            float sum = shift[0];
            if constexpr (TWO) {
                load_affine(other.moments, other.gamma, other.beta, ALL, c, mean, scale, shift);
                at.factors().store(2, c, scale[0]);
                sum += shift[0];
            }
            at.factors().store(1, c, sum);
        }
        warpgroup_sync(1 + MAKE);
    }

    __device__ __forceinline__ Factors(const Layout& at, int channel) {
        at.factors().load(scale, 0, channel);
        at.factors().load(shift, 1, channel);
        if constexpr (TWO) at.factors().load(further, 2, channel);
    }

    // Of two values each, the channels i and i + 1; adds bits i and i + 1 of their signs.
    __device__ __forceinline__ u32 pair(u32 x, u32 add, int i, u32& signs) const {
        float v[2], other[2];
        unpack_word(x, v), unpack_word(add, other);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            v[e] = fmaf(v[e], scale[i + e], shift[i + e]);
            v[e] = TWO ? fmaf(other[e], further[i + e], v[e]) : v[e] + other[e];
            v[e] = clamp_below(v[e], 0.0f);
            signs |= v[e] > RoundsToZero<T>::most ? 1u << (i + e) : 0u;
        }
        return Rounding<T>::round_pair(v[0], v[1]);
    }
    __device__ __forceinline__ uint4 operator()(uint4 x, uint4 add, u32& signs) const {
        return make_uint4(pair(x.x, add.x, 0, signs), pair(x.y, add.y, 2, signs), pair(x.z, add.z, 4, signs),
                          pair(x.w, add.w, 6, signs));
    }
};

// The warpgroup that makes z, in the place of x, and its signs. A thread has the same eight channels of every sixteenth
// row of a stage.
DEVICE void make(const Layout& at) {
    constexpr int ROWS = PIXELS / 16, AHEAD = 2;  // of a thread; so many are asked for before they are needed
    const u32 thread = thread_again(), lane = thread % 32, vector = thread % 8, row = thread / 8;
    const u32 from = row * 128 + (vector ^ row % 8) * 16;
    Ring<STAGES> ring;
    Ring<STRIPS> strips;
    for (;;) {
        barrier_wait(at.come(ring.index), ring.parity);
        const int tile = tile_at(at, ring);
        if (tile < 0) break;
        barrier_wait(at.stored(strips.index), strips.parity ^ 1);
        u32 signs_to = at.strip(strips.index) + row * SIGN_ROW + vector / 4 * 4;
#pragma unroll 1
        for (int i = 0; i < DEEP; ++i, signs_to += CHANNELS / 8) {
            const Factors factors(at, i * CHANNELS + vector * 8);
            const u32 x = at.stage(ring.index) + from, add = x + BOX;
            if (i) barrier_wait(at.come(ring.index), ring.parity);
            uint4 values[AHEAD], others[AHEAD];
#pragma unroll
            for (int j = 0; j < AHEAD; ++j) {
                values[j] = load_shared(x + j * 16 * 128);
                others[j] = load_shared(add + j * 16 * 128);
            }
#pragma unroll
            for (int j = 0; j < ROWS; ++j) {
                u32 signs = 0;
                const uint4 z = factors(values[j % AHEAD], others[j % AHEAD], signs);
                if (j + AHEAD < ROWS) {
                    values[j % AHEAD] = load_shared(x + (j + AHEAD) * 16 * 128);
                    others[j % AHEAD] = load_shared(add + (j + AHEAD) * 16 * 128);
                }
                store_shared(x + j * 16 * 128, z, 1);
                signs <<= 8 * (vector % 4);  // of four neighbouring lanes, a word
                signs |= __shfl_xor_sync(0xffffffffu, signs, 1);
                signs |= __shfl_xor_sync(0xffffffffu, signs, 2);
                if (vector % 4 == 0) store_shared(signs_to + j * 16 * SIGN_ROW, __uint_as_float(signs));
            }
            fence_for_engine();
            __syncwarp();
            if (lane == 0) barrier_arrive(at.made(ring.index));
            ring.advance();
        }
        strips.advance();
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(at.made(ring.index));  // the others see the end, too
}

// A warp, of which one thread speaks: stores z stage after stage, and the signs of a tile with its last one.
DEVICE void store_sums(const Layout& at, const Maps& maps) {
    const bool speaks = threadIdx.x % 32 == 0;
    Ring<STAGES> ring;
    Ring<STRIPS> strips;
    for (;; strips.advance()) {
        barrier_wait(at.made(ring.index), ring.parity);
        const int tile = tile_at(at, ring);
        if (tile < 0) break;
        for (int i = 0; i < DEEP; ++i) {
            if (i) barrier_wait(at.made(ring.index), ring.parity);
            if (speaks) {
                store_box(maps.z, at.stage(ring.index), i * CHANNELS, tile * PIXELS);
                if (i == DEEP - 1) store_box(maps.signs, at.strip(strips.index), 0, tile * PIXELS);
                commit_stores();
                await_stores_read<0>();
                barrier_arrive(at.done(ring.index));
                if (i == DEEP - 1) barrier_arrive(at.stored(strips.index));
            }
            __syncwarp();
            ring.advance();
        }
    }
}

// A warpgroup: y, tile after tile.
DEVICE void multiply_tiles(const Layout& at, const Maps& maps, const Problem& p, float* partial) {
    Ring<STAGES> ring;
    barrier_wait(at.filters_come(), 0);
    for (;;) {
        float sum[FILTERS / 2];
        barrier_wait(at.made(ring.index), ring.parity);
        const int tile = tile_at(at, ring);
        if (tile < 0) break;
        for (int i = 0; i < DEEP; ++i) {
            if (i) barrier_wait(at.made(ring.index), ring.parity);
            const u64 a = operand(at.stage(ring.index)), b = operand(at.filters(i));
            product_fence();
#pragma unroll
            for (int k = 0; k < CHANNELS / 16; ++k)
                multiply<false>(sum, a + operand_step(k * 32), b + operand_step(k * 32), i + k);
            commit_products();
            await_products<0>();
            if (threadIdx.x % 32 == 0) barrier_arrive(at.done(ring.index));
            ring.advance();
        }
        settle(sum);

        if (threadIdx.x == 0) await_stores_read<0>();  // long since: of the tile before
        warpgroup_sync(1 + MULTIPLY);
#pragma unroll
        for (int s = 0; s < SLABS; ++s) put_square(*reinterpret_cast<float(*)[32]>(sum + 32 * s), at.slab(s));
        fence_for_engine();
        warpgroup_sync(1 + MULTIPLY);
        if (threadIdx.x == 0) {
#pragma unroll
            for (int s = 0; s < SLABS; ++s) store_box(maps.y, at.slab(s), s * 64, tile * PIXELS);
            commit_stores();
        }
        if constexpr (STATISTICS) {
            const int rows = p.pixels - tile * PIXELS;
#pragma unroll
            for (int s = 0; s < SLABS; ++s) {
                Tally tally;
                tally.start();
                tally.take<PIXELS, 2>(at.slab(s), rows >= PIXELS, [&](int i) { return i < rows; });
                ColumnShare().write(partial + i64(tile) * 2 * FILTERS, tally.result(), s * 64, FILTERS);
            }
        }
    }
    if (threadIdx.x == 0) await_stores_read<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
conv2d_join_kernel(const __grid_constant__ Maps maps, float* __restrict__ partial, const float* __restrict__ moments,
                   const float* __restrict__ gamma, const float* __restrict__ beta,
                   const float* __restrict__ add_moments, const float* __restrict__ add_gamma,
                   const float* __restrict__ add_beta, const __grid_constant__ Problem p, u32* counter) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Layout at{shared_address(shared)};
    if (threadIdx.x == 0) init_barriers(at);
    if (threadIdx.x == THREADS - 1) prefetch_map(maps.x), prefetch_map(maps.add), prefetch_map(maps.w);
    __syncthreads();
    await_predecessor();
    const int role = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // known to be the same in a warp
    if (role == FILL) {
        if (threadIdx.x == FILL * 128) {
            barrier_expect(at.filters_come(), DEEP * FILTERS * 128);
            for (int i = 0; i < DEEP; ++i) load_box(at.filters(i), maps.w, at.filters_come(), i * CHANNELS, 0);
            Ring<STAGES> ring;
            deal(counter, p.tiles, p.share, p.group, [&](int tile) { fill(at, maps, ring, tile); });
        } else if (threadIdx.x / 32 == FILL * 4 + 1) {
            store_sums(at, maps);
        }
    } else if (role == MAKE) {
        Factors::prepare(at, {moments, gamma, beta}, {add_moments, add_gamma, add_beta});
        make(at);
    } else {
        multiply_tiles(at, maps, p, partial);
    }
}
