// The product of a large sparse matrix and a few samples in 16-bit types on sm_90: "load sparse, compute dense", where
// 256 output features share the dense operand.
//
// A thread block owns four block rows of 64 output features (transposed: block columns) and a slice of the summed ones.
// Eight warps fetch blocks of A, each its own: elements wait in registers for a free stage of the ring, where the warp
// clears a dense 64 x 64 tile and scatters them into it. A warpgroup multiplies the four tiles of a stage by 64 samples
// of x, which the copy engine brings once for all of them: 64 x 16 times 16 x 256 (wgmma), samples along the rows, so
// that expanded tiles are read once from shared memory. The slices are a cluster; each of its blocks adds its share of
// the outputs, in the order of the slices, from everyone's shared memory. Slices depend on the sizes alone.
//
// Structural zeros are multiplied: an infinity or NaN in x reaches every output of its sample.
//
//   indptr, indices, values   csb_scatter.cuh, csb.cuh                        T
//   x         a map of (samples, summed features), boxes of 64 x 64            T
//   y         sample * features + feature;  bias (features) or null            T;  float32
//
// Grid: groups of four block rows (fastest), slices. Shared memory: SHARED.
// Bytes: 4 nnz from memory, x once per group (from L2), y; FLOP 2 M K 64 on tensor cores. The bound is shared memory,
// for each block of 64 x 64 at 90 %: 64 cycles to clear it, some 45 to scatter it (three or four lanes meet a bank), 80 to
// read it and x: 8192 x 8192 in 13 us, where its bytes take 7 and x for each block row took 24 (csb_skinny.cu).
// After H. Xia et al., "Flash-LLM", VLDB 2024.
//
// Macros: DTYPE (1, 2), TRANSPOSED, SLICES (1, 2, 4, 8), VEC_Y (features per store: 4 or 1).
#include "csb_scatter.cuh"
#include "hopper.cuh"

struct Problem {
    int samples, features;
    int rows, steps;  // blocks along the output and the summed features
    int across;       // block columns of the stored matrix
    int relu;
};

constexpr int SIDE = 64, BLOCKS = 4, FEATURES = BLOCKS * SIDE, SAMPLES = 64;
constexpr int FETCHERS = 8, THREADS = 128 + 32 * FETCHERS;
constexpr int TILE = SIDE * 128, STAGE = (BLOCKS + 1) * TILE, STAGES = 5;  // x behind the tiles
constexpr int SUM_PITCH = FEATURES + 8;  // floats: eight rows of pairs meet different banks
constexpr int SHARE = FEATURES / SLICES;  // output features that a block adds up
static_assert(SAMPLES * SUM_PITCH * 4 <= STAGES * STAGE, "sums take the place of stages");

// Where two elements go in a swizzled tile.
struct Place {
    static __device__ __forceinline__ u32 of(u32 pair) {
        const u32 high = pair >> 8 & 0x00ff00ff, low = pair & 0x00ff00ff;
        const u32 out = TRANSPOSED ? low : high, k = TRANSPOSED ? high : low;
        return (out << 7) + (k << 1 ^ (out & 0x00070007) << 4);
    }
};

struct Slice {
    int first, count;  // steps

    __device__ __forceinline__ explicit Slice(const Problem& p) {
        const int slice = blockIdx.y;
        first = static_cast<int>(i64(slice) * p.steps / SLICES);
        count = static_cast<int>(i64(slice + 1) * p.steps / SLICES) - first;
    }
};

// Into the L2 cache.
DEVICE void ask_for(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

DEVICE void fetch_blocks(const int* __restrict__ indptr, const u16* __restrict__ indices, const T* __restrict__ values,
                         const TensorMap& x, const Problem& p, u32 stages, u32 full, u32 empty) {
    const int lane = threadIdx.x % 32;
    const Slice slice(p);
    const int blocks = BLOCKS * slice.count;
    const auto find = [&](int number, int& begin, int& end) {
        const int step = slice.first + number / BLOCKS, row = blockIdx.x * BLOCKS + number % BLOCKS;
        begin = end = 0;
        if (number >= blocks || row >= p.rows) return;
        const i64 block = TRANSPOSED ? i64(step) * p.across + row : i64(row) * p.across + step;
        begin = __ldg(indptr + block), end = __ldg(indptr + block + 1);
    };
    typedef Elements<Place, 8> Block;
    Block next;
    int begin, end, after_begin, after_end;
    const int mine = threadIdx.x / 32 - 4;
    find(mine, begin, end);
    next.fetch(indices, values, begin & ~3, end);
    find(mine + FETCHERS, after_begin, after_end);
    for (int number = mine; number < blocks; number += FETCHERS) {
        const int step = number / BLOCKS, index = step % STAGES;
        const u32 stage = stages + index * STAGE, tile = stage + number % BLOCKS * TILE;
        for (int e = after_begin + 64 * lane; e < after_end; e += 64 * 32) ask_for(indices + e), ask_for(values + e);
        barrier_wait(empty + 8 * index, (step / STAGES & 1) ^ 1);
        if (number % BLOCKS == 0 && lane == 0) {
            barrier_expect(full + 8 * index, TILE);
            load_box(stage + BLOCKS * TILE, x, full + 8 * index, (slice.first + step) * SIDE, 0);
        }
#pragma unroll
        for (int i = 0; i < TILE / 512; ++i) store_shared(tile + 16 * (lane + 32 * i), make_float4(0, 0, 0, 0));
        __syncwarp();
        int first = begin & ~3;
        for (; first + Block::CHUNK < end; first += Block::CHUNK) {
            next.scatter(tile, first, begin, end);
            next.fetch(indices, values, first + Block::CHUNK, end);
        }
        next.scatter(tile, first, begin, end);
        fence_for_engine();
        __syncwarp();
        if (lane == 0) barrier_arrive(full + 8 * index);
        // Not before: a fence waits for loads under way.
        begin = after_begin, end = after_end;
        asm volatile("" : "+r"(begin)::"memory");
        next.fetch(indices, values, begin & ~3, end);
        find(number + 2 * FETCHERS, after_begin, after_end);
    }
}

DEVICE void multiply_stages(float (&sum)[128], const Problem& p, u32 stages, u32 full, u32 empty) {
    const Slice slice(p);
    const auto release = [&](int step) {
        if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * (step % STAGES));
    };
    for (int step = 0; step < slice.count; ++step) {
        const int index = step % STAGES;
        const u32 stage = stages + index * STAGE;
        barrier_wait(full + 8 * index, step / STAGES & 1);
        const u64 left = operand(stage + BLOCKS * TILE), right = operand(stage);
        product_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
            multiply<false>(sum, left + operand_step(32 * k), right + operand_step(32 * k), 1);
        commit_products();
        if (step > 0) {
            await_products<1>();
            release(step - 1);
        }
    }
    await_products<0>();
    settle(sum);
}

extern "C" __global__ void __cluster_dims__(1, SLICES) __launch_bounds__(THREADS, 1)
csb_skinny_hopper_kernel(const int* __restrict__ indptr, const u16* __restrict__ indices, const T* __restrict__ values,
                         const __grid_constant__ TensorMap x, const float* __restrict__ bias, T* __restrict__ y,
                         const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ u64 barriers[2 * STAGES];
    const u32 stages = shared_address(shared), full = shared_address(barriers), empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) barrier_init(full + 8 * i, BLOCKS + 1), barrier_init(empty + 8 * i, 4);
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x >= 128) {
        give_registers<144>();
        fetch_blocks(indptr, indices, values, x, p, stages, full, empty);
    } else {
        take_registers<216>();
        float sum[128] = {};
        multiply_stages(sum, p, stages, full, empty);
        const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
        for (int j = 0; j < 32; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float* const to = reinterpret_cast<float*>(shared) + (row + 8 * i) * SUM_PITCH + 8 * j + lane % 4 * 2;
                *reinterpret_cast<float2*>(to) = make_float2(sum[4 * j + 2 * i], sum[4 * j + 2 * i + 1]);
            }
    }
    cluster_sync();
    for (int i = threadIdx.x; i < SAMPLES * SHARE / 4; i += THREADS) {
        const int sample = i / (SHARE / 4), inside = cluster_rank() * SHARE + i % (SHARE / 4) * 4;
        const int feature = blockIdx.x * FEATURES + inside;
        if (sample >= p.samples || feature >= p.features) continue;
        float v[4] = {};
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) {
            const float4 part = load_from_block(stages + 4 * (sample * SUM_PITCH + inside), slice);
            v[0] += part.x, v[1] += part.y, v[2] += part.z, v[3] += part.w;
        }
        T* const to = y + i64(sample) * p.features + feature;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (bias && feature + e < p.features) v[e] += bias[feature + e];
            if (p.relu) v[e] = clamp_below(v[e], 0.0f);
            if (VEC_Y == 1 && feature + e < p.features) to[e] = from_float<T>(v[e]);
        }
        if constexpr (VEC_Y == 4) store<T, 4>(to, v);
    }
    cluster_sync();
}
