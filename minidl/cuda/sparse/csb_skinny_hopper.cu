// csb_skinny.cu's product on sm_90, of a sparse matrix and at most 64 samples in 16-bit types: "load sparse, compute
// dense", where 256 output features share the samples.
//
// A unit is four blocks of 64 x 64 one below the other (transposed: side by side): 256 output features, 64 summed ones.
// Sixteen warps expand blocks, each into a dense tile of its own: elements wait in registers until the tile has been
// multiplied, then zeros go where the elements before them went, and they themselves to their places. A warpgroup
// multiplies the four tiles of a unit by 64 samples of x, which the copy engine brings once for all of them: 64 x 16
// times 16 x 128 (wgmma), samples along the rows, so that tiles are read once from shared memory.
//
// Units are split evenly among the thread blocks, summed features fastest, because there are fewer groups of 256 output
// features than multiprocessors. Where the group changes, and at its end, a block leaves its sums in float32, and
// csb_skinny_hopper_fold_kernel adds those of a group in order: the bits depend on the sizes alone.
//
// Tiles are written by threads and read by the unit for products, which needs a fence between. Those that multiply issue
// it, behind the barrier: in the warps that expand it would wait for all their loads under way.
//
// Structural zeros are multiplied: an infinity or NaN in x reaches every output of its sample.
//
//   indptr, indices   as in csb.cuh, of side 64;  values (nnz)               T;  read in words of four elements
//   x         a map of (samples, summed features), boxes of 64 features        T
//   partials  (blocks + groups of 256 output features, samples, 256)           float32; b + g: block b's sums for group g
//   y         sample * features + feature;  bias (features) or null            T;  float32
//
// Grid: blocks that share the units. Dynamic shared memory: STAGES * (40 KiB + 16).
// Bytes: 4 nnz from memory, x once per group (from L2), y; FLOP 2 M K 64 on tensor cores. The bound is shared memory,
// for a block of 64 x 64 at 90 %: 88 cycles to clear and scatter (three or four lanes meet a bank), 64 to read it, 20
// for x: 8192 x 8192 in 13 us. It takes twice as long (H200, 26 us when this was taken apart): 6 us are launches, filling
// the pipeline and adding up; of the rest stores to tiles cost 7, products 3, clearing 1, x nothing.
// After H. Xia et al., "Flash-LLM", VLDB 2024.
//
// Macros: DTYPE (1, 2), TRANSPOSED.
#include "hopper.cuh"
#include "wgmma.cuh"

constexpr u32 NONE = ~0u;

struct Problem {
    int samples, features;
    int rows;          // blocks along the output features
    int steps, units;  // blocks along the summed features; steps of all groups
    int across;        // block columns of the stored matrix
    int box;           // bytes of x that a step brings
    int relu;
};

constexpr int SIDE = 64, BLOCKS = 4, FEATURES = BLOCKS * SIDE, STAGES = 4;
constexpr int WIDTH = 128, HALVES = FEATURES / WIDTH;  // 256 at once take more registers than 640 threads begin with
constexpr int FETCHERS = STAGES * BLOCKS, THREADS = 128 + 32 * FETCHERS;
using Registers = RegisterShares<32 * FETCHERS, 72, 128, 184>;
constexpr int TILE = SIDE * 128, STAGE = (BLOCKS + 1) * TILE;  // x behind the tiles
constexpr int ROUNDS = 4, CHUNK = 32 * ROUNDS;                 // words of four elements that a warp holds

// Which units a thread block takes.
struct Units {
    int first, last;

    __device__ __forceinline__ explicit Units(const Problem& p) {
        first = static_cast<int>(i64(p.units) * blockIdx.x / gridDim.x);
        last = static_cast<int>(i64(p.units) * (blockIdx.x + 1) / gridDim.x);
    }
};

DEVICE void put(u32 address, u32 value) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<u16>(value)) : "memory");
}

// Where two elements go in a tile, swizzled as the unit reads it: bytes from its begin, packed like their indices.
DEVICE u32 places_of(u32 pair) {
    const u32 row = TRANSPOSED ? pair << 7 & 0x1f801f80 : pair >> 1 & 0x1f801f80;
    const u32 column = TRANSPOSED ? pair >> 7 & 0x007e007e : pair << 1 & 0x007e007e;
    const u32 swizzle = TRANSPOSED ? pair << 4 & 0x00700070 : pair >> 4 & 0x00700070;
    return row | (column ^ swizzle);
}

DEVICE void put_pair(u32 tile, u32 places, u32 low, u32 high) {
    put(tile + (places & 0xffff), low);
    put(tile + (places >> 16), high);
}

// The elements of a block on their way to a tile: words of four, and those at its ends, which share their words with the
// blocks beside it.
struct Elements {
    int first, words;  // not the ends
    uint2 indices[ROUNDS], values[ROUNDS];
    u32 end_index, end_value;

    __device__ __forceinline__ void fetch_words(const u16* __restrict__ from, const T* __restrict__ values_from) {
        const int lane = threadIdx.x % 32;
        const uint2* i = reinterpret_cast<const uint2*>(from + first) + lane;
        const uint2* v = reinterpret_cast<const uint2*>(values_from + first) + lane;
        asm volatile("" : "+l"(i), "+l"(v));  // else the compiler makes each address anew
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
            if (lane + 32 * r < words) indices[r] = __ldg(i + 32 * r), values[r] = __ldg(v + 32 * r);
    }

    __device__ __forceinline__ void fetch(const u16* __restrict__ from, const T* __restrict__ values_from, int begin,
                                          int end) {
        const int lane = threadIdx.x % 32, e = lane < 4 ? begin + lane : (end & ~3) + lane - 4;
        first = begin + 3 & ~3, words = (end - first) >> 2;
        fetch_words(from, values_from);
        end_index = NONE;
        if (lane < 8 && e >= begin && e < end) end_index = __ldg(from + e), end_value = values_from[e].bits;
    }

    // Turns indices into places.
    __device__ __forceinline__ void scatter(u32 tile) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
            if (lane + 32 * r < words) {
                indices[r].x = places_of(indices[r].x), indices[r].y = places_of(indices[r].y);
                put_pair(tile, indices[r].x, values[r].x, values[r].x >> 16);
                put_pair(tile, indices[r].y, values[r].y, values[r].y >> 16);
            }
        if (end_index != NONE) {
            end_index = places_of(end_index);
            put(tile + end_index, end_value);
        }
    }

    // Zeros where the elements went.
    __device__ __forceinline__ void clear(u32 tile) const {
        const int lane = threadIdx.x % 32;
        if (words > CHUNK) {
#pragma unroll
            for (int i = 0; i < TILE / 512; ++i) store_shared(tile + 16 * (lane + 32 * i), make_float4(0, 0, 0, 0));
            return;
        }
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
            if (lane + 32 * r < words) put_pair(tile, indices[r].x, 0, 0), put_pair(tile, indices[r].y, 0, 0);
        if (end_index != NONE) put(tile + end_index, 0);
    }
};

// A place in the blocks that a warp expands, every STAGES-th unit.
struct Path {
    int step, row;

    __device__ __forceinline__ Path(const Problem& p, int unit, int mine)
        : step(unit % p.steps), row(unit / p.steps * BLOCKS + mine) {}

    __device__ __forceinline__ void advance(const Problem& p) {
        for (step += STAGES; step >= p.steps; step -= p.steps) row += BLOCKS;
    }

    // The bounds of the block; empty behind the last unit.
    __device__ __forceinline__ int2 find(const int* __restrict__ indptr, const Problem& p, bool there) const {
        if (!there || row >= p.rows) return make_int2(0, 0);
        const int block = TRANSPOSED ? step * p.across + row : row * p.across + step;  // of fewer than 2^31
        return make_int2(__ldg(indptr + block), __ldg(indptr + block + 1));
    }
};

// A warp expands one block of every STAGES-th unit.
DEVICE void expand(const int* __restrict__ indptr, const u16* __restrict__ indices, const T* __restrict__ values,
                   const TensorMap& x, const Problem& p, u32 stages, u32 full, u32 empty) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4, stage = warp / BLOCKS, mine = warp % BLOCKS;
    const u32 at = stages + stage * STAGE, tile = at + mine * TILE;
    full += 8 * stage, empty += 8 * stage;
    const Units share(p);
    int unit = share.first + stage;
    Path here(p, unit, mine), ahead = here;
    const int2 bounds = ahead.find(indptr, p, unit < share.last);
    ahead.advance(p);
    int2 next = ahead.find(indptr, p, unit + STAGES < share.last);
    Elements block;
    block.fetch(indices, values, bounds.x, bounds.y);
    Elements before;
    before.words = CHUNK + 1;  // nothing is known of the tile
    for (u32 parity = 1; unit < share.last; unit += STAGES, parity ^= 1) {
        barrier_wait(empty, parity);
        if (mine == 0 && lane == 0) {
            barrier_expect(full, p.box);
            load_box(at + BLOCKS * TILE, x, full, here.step * SIDE, 0);
        }
        before.clear(tile);
        __syncwarp();
        block.scatter(tile);
        before = block;
        block.end_index = NONE;  // is at its place
        while (block.words > CHUNK) {
            block.first += 4 * CHUNK, block.words -= CHUNK;
            block.fetch_words(indices, values);
            block.scatter(tile);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(full);
        block.fetch(indices, values, next.x, next.y);
        ahead.advance(p), here.advance(p);
        next = ahead.find(indptr, p, unit + 2 * STAGES < share.last);
    }
}

// Leaves the sums of a group of output features: row g of a warp's 16 is a sample.
DEVICE void leave(float* __restrict__ to, const float (&sum)[HALVES][WIDTH / 2], int samples) {
    const int lane = threadIdx.x % 32, sample = threadIdx.x / 32 * 16 + lane / 4;
    to += sample * FEATURES + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i)
        if (sample + 8 * i < samples) {
#pragma unroll
            for (int j = 0; j < FEATURES / 8; ++j) {
                const float* const pair = sum[j / (WIDTH / 8)] + j % (WIDTH / 8) * 4 + 2 * i;
                *reinterpret_cast<float2*>(to + 8 * i * FEATURES + 8 * j) = make_float2(pair[0], pair[1]);
            }
        }
}

// Each unit is done with before the next one is looked for, so that its tiles are free at once: to begin the next one's
// products behind those under way gains nothing, as expanding is what takes long.
DEVICE void multiply_units(float* __restrict__ partials, const Problem& p, u32 stages, u32 full, u32 empty) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane % 16;
    const Units share(p);
    Ring<STAGES> ring;
    for (int unit = share.first; unit < share.last;) {
        const int group = unit / p.steps, first = unit, behind = (group + 1) * p.steps;
        const int last = behind < share.last ? behind : share.last;
        float sum[HALVES][WIDTH / 2];
#pragma unroll 1
        for (; unit < last; ++unit) {
            barrier_wait(full + 8 * ring.index, ring.parity);
            fence_for_engine();
            const u32 at = stages + ring.index * STAGE, x = at + BLOCKS * TILE + row * 128;
            const u64 tiles = operand(at);
            u32 samples[4][4];
#pragma unroll
            for (int k = 0; k < 4; ++k) load_matrices(samples[k], x + ((2 * k + lane / 16 ^ row % 8) << 4));
            product_fence();
#pragma unroll
            for (int k = 0; k < 4; ++k)
#pragma unroll
                for (int h = 0; h < HALVES; ++h)
                    multiply(sum[h], samples[k], tiles + operand_step(WIDTH * 128 * h + 32 * k), unit > first || k);
            commit_products();
            await_products<0>();
            if (lane == 0) barrier_arrive(empty + 8 * ring.index);
            ring.advance();
        }
#pragma unroll
        for (int h = 0; h < HALVES; ++h) settle(sum[h]);
        leave(partials + i64(blockIdx.x + group) * p.samples * FEATURES, sum, p.samples);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
csb_skinny_hopper_kernel(const int* __restrict__ indptr, const u16* __restrict__ indices, const T* __restrict__ values,
                         const __grid_constant__ TensorMap x, float* __restrict__ partials,
                         const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 stages = shared_address(shared), full = stages + STAGES * STAGE, empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) barrier_init(full + 8 * i, BLOCKS + 1), barrier_init(empty + 8 * i, 4);
        barrier_init_done();
    }
    await_predecessor();
    __syncthreads();
    if (threadIdx.x >= 128) {
        Registers::give();
        expand(indptr, indices, values, x, p, stages, full, empty);
    } else {
        Registers::take();
        multiply_units(partials, p, stages, full, empty);
    }
}

// y = the sums added in order, + bias, ReLU, rounded once: four features of a sample a thread.
extern "C" __global__ void __launch_bounds__(256)
csb_skinny_hopper_fold_kernel(const float* __restrict__ partials, const float* __restrict__ bias, T* __restrict__ y,
                              int blocks, const __grid_constant__ Problem p) {
    await_predecessor();
    const int quads = ceil_div(p.features, 4), i = blockIdx.x * 256 + threadIdx.x;
    const int sample = i / quads, feature = i % quads * 4, group = feature / FEATURES;
    if (sample >= p.samples) return;
    const auto block_of = [&](int unit) { return static_cast<int>((i64(unit + 1) * blocks - 1) / p.units); };
    const int first = block_of(group * p.steps), last = block_of((group + 1) * p.steps - 1);
    const i64 slot = i64(p.samples) * FEATURES;
    const float* from = partials + (first + group) * slot + sample * FEATURES + feature % FEATURES;
    float sum[4] = {};
#pragma unroll 4
    for (int block = first; block <= last; ++block, from += slot) {
        const float4 part = *reinterpret_cast<const float4*>(from);
        sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
    }
    T* const to = y + i64(sample) * p.features + feature;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        if (bias && feature + e < p.features) sum[e] += bias[feature + e];
        if (p.relu) sum[e] = clamp_below(sum[e], 0.0f);
    }
    if (p.features % 4 == 0) {
        store<T, 4>(to, sum);
    } else {
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (feature + e < p.features) to[e] = from_float<T>(sum[e]);
    }
}
