// The product of csb_skinny.cu, a sparse matrix times a few samples in 16-bit types, on Hopper's matrix units (sm_90a).
//
// A warpgroup owns a block row of 64 output features (transposed: a block column). Its 128 threads fetch the elements
// of a block into registers AHEAD blocks before they are wanted, scatter them into a dense 64 x 64 tile in shared
// memory, multiply the tile with 64 samples of x (wgmma, float32 sums), and clear it again; four tiles take turns, so
// that one barrier a block is enough. Four warpgroups share the pieces of x, which the copy engine brings: read by each
// from L2, they would cost more than the matrix. The blocks of a cluster take a slice of the summed features each and
// add up in order. Slices depend on the sizes alone, so the bits do not depend on the device.
//
// Structural zeros are multiplied: an infinity or NaN in x reaches every output of its sample.
//
//   indptr, indices   as in csb.cuh, of side 64;  values (nnz)               T
//   x         seen through a tensor map: boxes of 64 features x 64 samples   T
//   y         sample * features + feature;  bias (features) or null          T;  float32
//
// Grid: slices of groups of four block rows. Block: four warpgroups and the warp that fetches x.
// Dynamic shared memory: (4 * TILES + STAGES) * 8 KiB, barriers and 1024.
// Bytes: 4 nnz, x once per group (from L2), y; FLOP 128 M K on tensor cores.
// After H. Xia et al., "Flash-LLM", VLDB 2024.
//
// Macros: DTYPE (1, 2), TRANSPOSED, SLICES (1, 2, 4, 8: blocks of a cluster), VEC_Y (4, 1: values per store).
#include "hopper.cuh"

struct Problem {
    int samples, features;
    int rows, steps;  // blocks along the output and the summed features
    int across;       // block columns of the stored matrix
    int relu;
};

constexpr int SIDE = 64, GROUPS = 4, MULTIPLIERS = 128 * GROUPS, THREADS = MULTIPLIERS + 32;
constexpr int TILE = SIDE * 128, TILES = 4, AHEAD = TILES, STAGES = 6;
constexpr int CHUNK = 512;              // elements that a warpgroup holds of a block
constexpr int SUM_PITCH = SIDE + 4;     // floats from sample to sample of sums in shared memory
constexpr int SHARE = SIDE / SLICES;    // samples whose sums a block adds up

// The elements of a block that a thread holds, four neighbouring ones.
struct Elements {
    int begin, end;  // of the block
    uint2 indices, values;

    __device__ __forceinline__ void find(const int* __restrict__ indptr, int block, bool there) {
        begin = there ? __ldg(indptr + block) : 0;
        end = there ? __ldg(indptr + block + 1) : 0;
    }

    __device__ __forceinline__ int first(int chunk) const { return (begin & ~3) + chunk + threadIdx.x % 128 * 4; }

    __device__ __forceinline__ void fetch(const u16* __restrict__ from, const T* __restrict__ values_from, int chunk) {
        const int e = first(chunk);
        indices = values = make_uint2(0, 0);
        if (e < end) {
            indices = __ldg(reinterpret_cast<const uint2*>(from + e));
            values = __ldg(reinterpret_cast<const uint2*>(values_from + e));
        }
    }
};

// Where two elements lie in a tile, packed: rows of 128 bytes, 16-byte chunks swizzled by row % 8.
DEVICE u32 places(u32 pair) {
    const u32 high = pair >> 8 & 0x003f003f, low = pair & 0x003f003f;
    const u32 out = TRANSPOSED ? low : high, k = TRANSPOSED ? high : low;
    return out << 7 | (k << 1 ^ (out & 0x00070007) << 4);
}

DEVICE void put(u32 address, u32 value) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<u16>(value)) : "memory");
}

DEVICE void scatter(u32 tile, const Elements& block, uint2 at, int chunk) {
    const int e = block.first(chunk);
    const auto mine = [&](int i) { return e + i >= block.begin && e + i < block.end; };
    if (mine(0)) put(tile + (at.x & 0xffff), block.values.x);
    if (mine(1)) put(tile + (at.x >> 16), block.values.x >> 16);
    if (mine(2)) put(tile + (at.y & 0xffff), block.values.y);
    if (mine(3)) put(tile + (at.y >> 16), block.values.y >> 16);
}

DEVICE void clear_all(u32 tile) {
#pragma unroll
    for (int i = 0; i < TILE / 2048; ++i) store_shared(tile + 2048 * i + threadIdx.x % 128 * 16, make_float4(0, 0, 0, 0));
}

// Elements that are not the block's own clear a place, too, of a tile that is to be clear.
DEVICE void clear(u32 tile, uint2 at) {
    put(tile + (at.x & 0xffff), 0);
    put(tile + (at.x >> 16), 0);
    put(tile + (at.y & 0xffff), 0);
    put(tile + (at.y >> 16), 0);
}

struct Barriers {
    u32 full, empty;
};

// What a warpgroup does: its sums over the steps from first to last.
DEVICE void accumulate(float (&sum)[32], const int* __restrict__ indptr, const u16* __restrict__ indices,
                       const T* __restrict__ values, const Problem& p, int row, int first, int last, u32 tiles,
                       u32 stages, const Barriers& barriers) {
    const int group = threadIdx.x / 128;
    const bool speaks = threadIdx.x % 32 == 0;
    const auto block_of = [&](int step) { return TRANSPOSED ? step * p.across + row : row * p.across + step; };
    const auto there = [&](int step) { return step < last && row < p.rows; };
    Elements blocks[AHEAD], next;
    uint2 at[TILES];
    bool large[TILES];
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) {
        clear_all(tiles + u * TILE);
        blocks[u].find(indptr, block_of(first + u), there(first + u));
        at[u] = make_uint2(0, 0), large[u] = false;
    }
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) blocks[u].fetch(indices, values, 0);
    next.find(indptr, block_of(first + AHEAD), there(first + AHEAD));
    warpgroup_sync(1 + group);
    Ring<STAGES> filled, emptied;
    for (int base = first; base < last; base += TILES) {
#pragma unroll
        for (int u = 0; u < TILES; ++u) {
            const int step = base + u;
            if (step >= last) break;
            const u32 tile = tiles + u * TILE;
            await_products<1>();  // the step before the last one is done with its piece of x
            if (step >= first + 2) {
                if (speaks) barrier_arrive(barriers.empty + 8 * emptied.index);
                emptied.advance();
            }
            Elements& block = blocks[u];
            const bool any = block.begin < block.end;
            at[u] = make_uint2(places(block.indices.x), places(block.indices.y));
            scatter(tile, block, at[u], 0);
            large[u] = block.end - (block.begin & ~3) > CHUNK;
            for (int chunk = CHUNK; chunk < block.end - (block.begin & ~3); chunk += CHUNK) {
                block.fetch(indices, values, chunk);
                scatter(tile, block, make_uint2(places(block.indices.x), places(block.indices.y)), chunk);
            }
            block.begin = next.begin, block.end = next.end;
            block.fetch(indices, values, 0);
            next.find(indptr, block_of(step + AHEAD + 1), there(step + AHEAD + 1));
            fence_for_engine();
            warpgroup_sync(1 + group);  // all of the tile is there, and the step before the last one is done for all
            barrier_wait(barriers.full + 8 * filled.index, filled.parity);
            product_fence();
            if (any) {
                const u64 a = operand(tile), b = operand(stages + filled.index * TILE);
#pragma unroll
                for (int k = 0; k < SIDE / 16; ++k)
                    multiply<false>(sum, a + operand_step(32) * k, b + operand_step(32) * k, 1);
            }
            commit_products();
            filled.advance();
            constexpr int HALF = TILES / 2;
            if (large[(u + HALF) % TILES]) clear_all(tiles + (u + HALF) % TILES * TILE);
            else clear(tiles + (u + HALF) % TILES * TILE, at[(u + HALF) % TILES]);
        }
    }
    await_products<0>();
    settle(sum);
}

// Sums of a warpgroup to shared memory, [sample][feature].
DEVICE void stage(const float (&sum)[32], float* to) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    to += lane % 4 * 2 * SUM_PITCH + 16 * warp + lane / 4;
#pragma unroll
    for (int j = 0; j < SIDE / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) to[(8 * j + i % 2) * SUM_PITCH + i / 2 * 8] = sum[4 * j + i];
}

// Adds up the slices' sums of a warpgroup's features and a share of the samples, in order; + bias, ReLU, rounded once.
DEVICE void write(T* __restrict__ y, const float* __restrict__ bias, const Problem& p, int row, u32 sums) {
    const int thread = threadIdx.x % 128, feature = row * SIDE + thread % 16 * 4;
    const int first = (SLICES > 1 ? cluster_rank() : 0) * SHARE;
    for (int sample = first + thread / 16; sample < first + SHARE; sample += 8) {
        float total[4] = {};
#pragma unroll
        for (int rank = 0; rank < SLICES; ++rank) {
            const float4 part = load_from_block(sums + 4 * (sample * SUM_PITCH + thread % 16 * 4), rank);
            total[0] += part.x, total[1] += part.y, total[2] += part.z, total[3] += part.w;
        }
        if (sample >= p.samples) continue;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (bias && feature + i < p.features) total[i] += bias[feature + i];
            if (p.relu) total[i] = clamp_below(total[i], 0.0f);
        }
        T* const to = y + i64(sample) * p.features + feature;
        if constexpr (VEC_Y == 4) {
            if (feature < p.features) store<T, 4>(to, total);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (feature + i < p.features) to[i] = from_float<T>(total[i]);
        }
    }
}

extern "C" __global__ void __cluster_dims__(SLICES) __launch_bounds__(THREADS, 1)
csb_skinny_hopper_kernel(const int* __restrict__ indptr, const u16* __restrict__ indices,
                         const T* __restrict__ values, const __grid_constant__ TensorMap x,
                         const float* __restrict__ bias, T* __restrict__ y, const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 stages = shared_address(shared), tiles = stages + STAGES * TILE;
    const Barriers barriers = {tiles + GROUPS * TILES * TILE, tiles + GROUPS * TILES * TILE + 8 * STAGES};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i)
            barrier_init(barriers.full + 8 * i, 1), barrier_init(barriers.empty + 8 * i, MULTIPLIERS / 32);
        barrier_init_done();
    }
    __syncthreads();
    const int slice = blockIdx.x % SLICES, group = blockIdx.x / SLICES;
    const int first = static_cast<int>(i64(p.steps) * slice / SLICES);
    const int last = static_cast<int>(i64(p.steps) * (slice + 1) / SLICES);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // known to be the same in a warp
    const int row = group * GROUPS + warp / 4;
    const u32 own = tiles + warp / 4 * TILES * TILE;
    if (warp == MULTIPLIERS / 32) {
        Ring<STAGES> ring;
        for (int step = first; step < last; ++step) {
            barrier_wait(barriers.empty + 8 * ring.index, ring.parity ^ 1);
            if (threadIdx.x % 32 == 0) {
                barrier_expect(barriers.full + 8 * ring.index, TILE);
                load_box(stages + ring.index * TILE, x, barriers.full + 8 * ring.index, step * SIDE, 0);
            }
            __syncwarp();
            ring.advance();
        }
    } else {
        float sum[32] = {};
        accumulate(sum, indptr, indices, values, p, row, first, last, own, stages, barriers);
        warpgroup_sync(1 + warp / 4);  // the tiles are no longer read
        stage(sum, reinterpret_cast<float*>(shared + (own - stages)));
    }
    cluster_sync();
    if (warp < MULTIPLIERS / 32) write(y, bias, p, row, own);
    cluster_sync();  // others may still be reading
}
