// The product of a large sparse matrix and at most 64 samples in 16-bit types on sm_90: "load sparse, compute dense",
// where 256 output features share the samples.
//
// A unit is four blocks of 64 x 64 one below the other (transposed: side by side): 256 output features, 64 summed ones.
// Sixteen warps expand blocks, each into a dense tile of its own: elements wait in registers until the tile has been
// multiplied, then zeros go where the elements before them went, and they themselves to their places. A warpgroup
// multiplies the four tiles of a unit by 64 samples of x, which the copy engine brings once for all of them: 64 x 16
// times 16 x 256 (wgmma), samples along the rows, so that tiles are read once from shared memory. A thread block takes
// units in order, summed features fastest, as many as any other; where the output features change, and at its end, it
// leaves its sums, which csb_skinny_hopper_fold_kernel adds in order. Shares depend on the sizes alone.
//
// Tiles are written by threads and read by the unit for products, which needs a fence between. Those that multiply
// issue it, behind the barrier: in the warps that expand it would wait for all their loads under way.
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
// for a block of 64 x 64 at 90 %: 88 cycles to clear and scatter (three or four lanes meet a bank), 64 to read it, 32
// for x: 8192 x 8192 in 13 us.
// After H. Xia et al., "Flash-LLM", VLDB 2024.
//
// Macros: DTYPE (1, 2), TRANSPOSED, ROUNDS (of 128 elements, of a block on its way).
#include "hopper.cuh"

struct Problem {
    int samples, features;
    int rows;          // blocks along the output features
    int steps, units;  // blocks along the summed features; steps of all groups
    int across;        // block columns of the stored matrix
    int box;           // bytes of x that a step brings
    int relu;
};

#ifndef STAGES
#define STAGES 4
#endif
constexpr int SIDE = 64, BLOCKS = 4, FEATURES = BLOCKS * SIDE;
constexpr int FETCHERS = STAGES * BLOCKS, THREADS = 128 + 32 * FETCHERS;
constexpr int TILE = SIDE * 128, STAGE = (BLOCKS + 1) * TILE;  // x behind the tiles
constexpr int CHUNK = 32 * 4 * ROUNDS;

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

// Where two elements go in a tile, swizzled as the unit reads it: bytes from its begin, packed like their indices. Of
// whatever an index says the place is in the tile.
DEVICE u32 places_of(u32 pair) {
    const u32 high = pair >> 8 & 0x003f003f, low = pair & 0x003f003f;
    const u32 out = TRANSPOSED ? low : high, k = TRANSPOSED ? high : low;
    return (out << 7) + (k << 1 ^ (out & 0x00070007) << 4);
}

// The elements of a block on their way to a tile.
struct Elements {
    int begin, end;
    uint2 indices[ROUNDS], values[ROUNDS];

    __device__ __forceinline__ int element(int round, int first) const {
        return first + 4 * (32 * round + static_cast<int>(threadIdx.x % 32));
    }

    __device__ __forceinline__ void fetch(const u16* __restrict__ from, const T* __restrict__ values_from, int first) {
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const int e = element(r, first);
            if (e < end) {
                indices[r] = __ldg(reinterpret_cast<const uint2*>(from + e));
                values[r] = __ldg(reinterpret_cast<const uint2*>(values_from + e));
            }
        }
    }

    // Turns indices into places.
    __device__ __forceinline__ void scatter(u32 tile, int first) {
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const int e = element(r, first);
            indices[r].x = places_of(indices[r].x), indices[r].y = places_of(indices[r].y);
            if (e >= begin && e < end) put(tile + (indices[r].x & 0xffff), values[r].x);
            if (e + 1 >= begin && e + 1 < end) put(tile + (indices[r].x >> 16), values[r].x >> 16);
            if (e + 2 >= begin && e + 2 < end) put(tile + (indices[r].y & 0xffff), values[r].y);
            if (e + 3 >= begin && e + 3 < end) put(tile + (indices[r].y >> 16), values[r].y >> 16);
        }
    }
};

// Where the last elements of a tile went. Words that a block shares with its neighbours make places that hold nothing.
struct Places {
    int first, end;
    uint2 places[ROUNDS];

    __device__ __forceinline__ void keep(const Elements& block, int from) {
        first = block.begin & ~3, end = block.end;
        if (from != first) end = first + CHUNK + 1;  // there were more than are known
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) places[r] = block.indices[r];
    }

    __device__ __forceinline__ void clear(u32 tile) const {
        const int lane = threadIdx.x % 32;
        if (end - first > CHUNK) {
#pragma unroll
            for (int i = 0; i < TILE / 512; ++i) store_shared(tile + 16 * (lane + 32 * i), make_float4(0, 0, 0, 0));
            return;
        }
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            if (first + 4 * (32 * r + lane) < end) {
                put(tile + (places[r].x & 0xffff), 0), put(tile + (places[r].x >> 16), 0);
                put(tile + (places[r].y & 0xffff), 0), put(tile + (places[r].y >> 16), 0);
            }
        }
    }
};

// A warp expands one block of every STAGES-th unit.
DEVICE void expand(const int* __restrict__ indptr, const u16* __restrict__ indices, const T* __restrict__ values,
                   const TensorMap& x, const Problem& p, u32 stages, u32 full, u32 empty) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4, stage = warp / BLOCKS, mine = warp % BLOCKS;
    const u32 at = stages + stage * STAGE, tile = at + mine * TILE;
    full += 8 * stage, empty += 8 * stage;
    const Units share(p);
    const auto find = [&](int unit, int& begin, int& end) {
        begin = end = 0;
        const int step = unit % p.steps, row = unit / p.steps * BLOCKS + mine;
        if (unit >= share.last || row >= p.rows) return;
        const int block = TRANSPOSED ? step * p.across + row : row * p.across + step;  // of fewer than 2^31
        begin = __ldg(indptr + block), end = __ldg(indptr + block + 1);
    };
    Elements next;
    Places before;
    before.first = 0, before.end = CHUNK + 1;  // nothing is known of the tile
    int unit = share.first + stage, after_begin, after_end;
    find(unit, next.begin, next.end);
    next.fetch(indices, values, next.begin & ~3);
    find(unit + STAGES, after_begin, after_end);
    for (u32 parity = 1; unit < share.last; unit += STAGES, parity ^= 1) {
        barrier_wait(empty, parity);
        if (mine == 0 && lane == 0) {
            barrier_expect(full, p.box);
            load_box(at + BLOCKS * TILE, x, full, unit % p.steps * SIDE, 0);
        }
        before.clear(tile);
        __syncwarp();
        int first = next.begin & ~3;
        next.scatter(tile, first);
        for (; first + CHUNK < next.end;) {
            first += CHUNK;
            next.fetch(indices, values, first);
            next.scatter(tile, first);
        }
        before.keep(next, first);
        __syncwarp();
        if (lane == 0) barrier_arrive(full);
        next.begin = after_begin, next.end = after_end;
        next.fetch(indices, values, next.begin & ~3);
        find(unit + 2 * STAGES, after_begin, after_end);
    }
}

// Leaves the sums of a group of output features: row g of a warp's 16 is a sample.
DEVICE void leave(float* __restrict__ to, const float (&sum)[2][64], int samples) {
    const int lane = threadIdx.x % 32, sample = threadIdx.x / 32 * 16 + lane / 4;
    to += sample * FEATURES + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i)
        if (sample + 8 * i < samples) {
#pragma unroll
            for (int j = 0; j < FEATURES / 8; ++j)
                *reinterpret_cast<float2*>(to + 8 * i * FEATURES + 8 * j) =
                    make_float2(sum[j / 16][4 * (j % 16) + 2 * i], sum[j / 16][4 * (j % 16) + 2 * i + 1]);
        }
}

// The samples of a unit, for a warp its 16 rows.
struct Samples {
    u32 words[4][4];

    __device__ __forceinline__ void load(u32 x) {
        const int row = threadIdx.x / 32 * 16 + threadIdx.x % 16, right = threadIdx.x % 32 / 16;
#pragma unroll
        for (int k = 0; k < 4; ++k) load_matrices(words[k], x + row * 128 + ((2 * k + right ^ row % 8) << 4));
    }
};

DEVICE void multiply_units(float* __restrict__ partials, const Problem& p, u32 stages, u32 full, u32 empty) {
    const Units share(p);
    Ring<STAGES> ring;
    for (int unit = share.first; unit < share.last;) {
        const int group = unit / p.steps, first = unit, behind = (group + 1) * p.steps;
        const int last = behind < share.last ? behind : share.last;
        float sum[2][64];
        Samples samples[2];
        int before = -1;
        const auto release = [&] {
            if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * before);
        };
        const auto step = [&](Samples& left) {
            if (before >= 0 && !barrier_over(full + 8 * ring.index, ring.parity)) {
                await_products<0>();
                release();
                before = -1;
            }
            barrier_wait(full + 8 * ring.index, ring.parity);
            fence_for_engine();
            const u32 at = stages + ring.index * STAGE;
            const u64 right = operand(at);
            left.load(at + BLOCKS * TILE);
            product_fence();
#pragma unroll
            for (int k = 0; k < 4; ++k)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    multiply(sum[h], left.words[k], right + operand_step(2 * TILE * h + 32 * k), unit > first || k);
            commit_products();
            if (before >= 0) {
                await_products<1>();
                release();
            }
            before = ring.index;
            ring.advance();
        };
#pragma unroll 1
        while (true) {
            step(samples[0]);
            if (++unit == last) break;
            step(samples[1]);
            if (++unit == last) break;
        }
        await_products<0>();
        release();
        settle(sum[0]), settle(sum[1]);
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
        give_registers<64>();
        expand(indptr, indices, values, x, p, stages, full, empty);
    } else {
        take_registers<216>();
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
