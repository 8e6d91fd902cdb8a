// The sampled product of csb_sampled.cu in 16-bit types on Hopper (sm_90a): operands copied by the engine (TMA) and
// multiplied by warpgroups (wgmma). With SPLIT of float32 operands, each as a head and a rest in bfloat16 (csb_split.cu):
// every 64 samples are summed three times, head * head, head * rest, rest * head. What is left out, and what infinities
// become, is as in csb_tensor.cu.
//
//   out[e] = sum over samples of dy[row of e, sample] * x[column of e, sample],   for the elements e of a pattern
//
// A block multiplies a dense tile of 128 rows x TILE_N columns over a chunk of samples, leaves it in shared memory, and
// warps pick the elements of 64 x 64 parts of it, which are neighbours in `out`: no dense gradient reaches memory. Each
// chunk leaves one float32 partial per element; sum_partials_kernel (channel_sum.cu) adds them in order. Chunks depend on
// the sizes alone, so the bits do not depend on the device.
//
//   indptr, indices   as in csb.cuh
//   dy, x     seen through tensor maps (csb_sampled_hopper.py): boxes of 64 features x 64 samples, the features
//             fastest with FEATURES_LAST, else the samples; with SPLIT heads, then rests
//   output    (chunks, nnz) dense; with one chunk the gradient itself, set or added to           float32
//
// Grid: column tiles (fastest), row tiles, chunks. Block: two warpgroups that multiply, 64 rows each, and one that
// fetches. Dynamic shared memory: STAGES * (16 KiB + TILE_N * 128) (at least the tile's TILE_N * 512 + 4 KiB) + 1024.
// FLOP: 2 M K samples, dense; with SPLIT 6. Bytes: dy and x once if the L2 cache keeps what tiles share; 2 nnz; 4 chunks
// nnz twice.
//
// Macros: DTYPE (1, 2), SPLIT, SIDE, FEATURES_LAST, TILE_N (64, 128, 256), STAGES.
#include "csb.cuh"
#include "hopper.cuh"
#include "wgmma.cuh"

constexpr int DEPTH = 64, TILE_M = 128;
constexpr int ROW_BLOCKS = TILE_M / 64, BLOCKS = ROW_BLOCKS + TILE_N / 64;  // boxes of a stage
constexpr int BLOCK_BYTES = 64 * 128, STAGE = BLOCKS * BLOCK_BYTES;
constexpr int MULTIPLIERS = 256, THREADS = MULTIPLIERS + 128;
using Registers = RegisterShares<128, 40, MULTIPLIERS, 232>;
constexpr int PITCH = TILE_N + 8;  // floats of the tile in shared memory: the rows of a quad meet different banks

struct Maps {
    TensorMap dy, x;
};

struct Problem {
    i64 nnz;
    Matrix a;
    int tiles_m, tiles_n;
    int steps, chunks;  // stages that make up the sum, and among how many blocks they are divided
    int accumulate;
};

// One warp fills stage after stage; lane i fetches the i-th box of each.
DEVICE void fill(u32 shared, u32 full, u32 empty, const Maps& maps, int row, int column, int first, int last) {
    const int lane = threadIdx.x % 32;
    const bool of_dy = lane < ROW_BLOCKS;
    const int feature = of_dy ? row + 64 * lane : column + 64 * (lane - ROW_BLOCKS);
    Ring<STAGES> ring;
    for (int step = first; step < last; ++step) {
        const u32 to = shared + ring.index * STAGE + lane * BLOCK_BYTES, barrier = full + 8 * ring.index;
        barrier_wait(empty + 8 * ring.index, ring.parity ^ 1);
        if (lane == 0) barrier_expect(barrier, STAGE);
        __syncwarp();
        if (lane < BLOCKS) {
            const TensorMap& map = of_dy ? maps.dy : maps.x;
#if SPLIT
            const int sample = step / 3 * DEPTH, rest = step % 3 == (of_dy ? 2 : 1);
            load_box(to, map, barrier, FEATURES_LAST ? feature : sample, FEATURES_LAST ? sample : feature, rest);
#else
            const int sample = step * DEPTH;
            load_box(to, map, barrier, FEATURES_LAST ? feature : sample, FEATURES_LAST ? sample : feature);
#endif
        }
        ring.advance();
    }
}

// A warpgroup multiplies its 64 rows.
DEVICE void accumulate(float (&sum)[TILE_N / 2], u32 shared, u32 full, u32 empty, int block, int steps) {
    constexpr bool ACROSS = FEATURES_LAST;
    constexpr int GROUP = ACROSS ? BLOCK_BYTES : 16, NEXT = ACROSS ? 2048 : 32;  // 16 samples further
    const bool speaks = threadIdx.x % 32 == 0;
    Ring<STAGES> ring;
    u32 before = 0;
    for (int step = 0; step < steps; ++step) {
        barrier_wait(full + 8 * ring.index, ring.parity);
        const u32 stage = shared + ring.index * STAGE;
        const u64 a = operand(stage + block * BLOCK_BYTES, GROUP), b = operand(stage + ROW_BLOCKS * BLOCK_BYTES, GROUP);
        product_fence();
#pragma unroll
        for (int k = 0; k < DEPTH / 16; ++k)
            multiply<ACROSS, ACROSS>(sum, a + operand_step(k * NEXT), b + operand_step(k * NEXT), step + k);
        commit_products();
        await_products<1>();  // those of the step before are done with their stage
        if (speaks && step > 0) barrier_arrive(before);
        before = empty + 8 * ring.index;
        ring.advance();
    }
    await_products<0>();
    settle(sum);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
csb_sampled_hopper_kernel(const int* __restrict__ indptr, const u16* __restrict__ indices,
                          const __grid_constant__ Maps maps, float* __restrict__ output,
                          const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) unsigned char stages[];
    const u32 shared = shared_address(stages), full = shared + STAGES * STAGE, empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, MULTIPLIERS / 32);
        barrier_init_done();
    }
    await_predecessor();
    __syncthreads();
    u32 index = blockIdx.x;
    const int column = index % p.tiles_n * TILE_N;
    index /= p.tiles_n;
    const int row = index % p.tiles_m * TILE_M, chunk = index / p.tiles_m;
    const int first = static_cast<int>(i64(p.steps) * chunk / p.chunks);
    const int last = static_cast<int>(i64(p.steps) * (chunk + 1) / p.chunks);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // known to be the same in a warp
    if (warp >= MULTIPLIERS / 32) {
        Registers::give();
        if (warp == MULTIPLIERS / 32) fill(shared, full, empty, maps, row, column, first, last);
    } else {
        Registers::take();
        float sum[TILE_N / 2];
        accumulate(sum, shared, full, empty, warp / 4, last - first);
        warpgroups_sync<MULTIPLIERS>(1);  // the stages are no longer read
        float* const tile = reinterpret_cast<float*>(stages);
        const int lane = threadIdx.x % 32;
        float* const to = tile + (warp * 16 + lane / 4) * PITCH + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < TILE_N / 8; ++j) {
            *reinterpret_cast<float2*>(to + 8 * j) = make_float2(sum[4 * j], sum[4 * j + 1]);
            *reinterpret_cast<float2*>(to + 8 * PITCH + 8 * j) = make_float2(sum[4 * j + 2], sum[4 * j + 3]);
        }
        warpgroups_sync<MULTIPLIERS>(1);
        constexpr int SHARE = 256 / TILE_N;  // warps of a part
        const int down = warp / 4 * 64, right = warp % 4 / SHARE * 64, thread = warp % SHARE * 32 + lane;
        float* const out = output + chunk * p.nnz;
        const auto pick = [&](int e, int r, int c) {
            const float value = tile[(down + r) * PITCH + right + c];
            out[e] = p.accumulate ? out[e] + value : value;
        };
        for_elements<32 * SHARE, 64, 64>(indptr, indices, p.a, row + down, column + right, thread, pick);
    }
}
