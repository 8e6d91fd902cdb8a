// The float32 product of a sparse matrix and a dense one on tensor cores of sm_90, by three products of narrower numbers
// (3xTF32, bf16x3): y = A x, + bias, ReLU. The matrix comes expanded into dense tiles (csb_spread.cu), each element
// split into a head of the narrower type and a rest; x is split on its way to the unit. head * head + head * rest +
// rest * head are summed in float32.
//
// Structural zeros are multiplied: an infinity or NaN in x reaches every output of its sample, and infinities become
// NaN. Error: what is left out is at most 2^-20 (bf16: 3 * 2^-16 and a little) of a product; the unit cuts each of the
// 3 * depth / 8 sums that it adds up at 2^-23 of the total: a bound of its own, stated in docs/sparse.md and tested.
//
// In shared memory the summed features of a tile are permuted, so that a lane's fragments of x are whole float4: the
// one that TF32 instruction s (0..3) takes at position p (0..7) is number 16 (s / 2) + 4 (p % 4) + 2 (s % 2) + p / 4 of
// the tile; bf16 instruction s (0, 1) takes at position p (0..15) number 16 s + 4 (p % 8 / 2) + 2 (p / 8) + p % 2.
//
//   tiles     csb_spread.cu
//   x         feature * x_pitch + sample, or with FEATURES_LAST sample * x_pitch + feature      float32
//   y         dense in the same orientation;  bias (features) or null                           float32
//
// A block owns 128 output features x 256 samples. One warpgroup fetches, two multiply 128 samples each.
// Grid: blocks that take tiles in turn, output features fastest. Dynamic shared memory: STAGES * (64 KiB (bf16: 48) +
// 16).
// FLOP: 6 M K samples, dense. Bytes: 8 (bf16: 4) M K per sample tile and x per tile of output features from L2, y. In
// bf16 that, 31 bytes a cycle and multiprocessor at the full rate, is more than L2 gives.
//
// To leave out the summed features that are empty in a window of sorted output features did not pay: a kernel
// that gathers the others took 1.2 to 1.4 times as long at 98 %, and more where it is denser (docs/sparse.md).
//
// Macros: DTYPE (0: TF32, 1: bf16), STAGES, FEATURES_LAST, VEC_X (floats per copy), VEC_Y (floats per store: 2, features
// first 4, or 1).
#include "csb_tensor.cuh"
#include "store_whole.cuh"
#include "wgmma.cuh"

struct Problem {
    i64 x_pitch, samples;
    int features, depth;
    int steps;       // tiles of summed features
    int tiles_down;  // tiles of output features
    int tiles;
    int relu;
};

constexpr int ROWS = 128, SAMPLES = 256, DEPTH = 32;
constexpr int INSTRUCTIONS = DTYPE ? 1 : 2;      // for 16 summed features
constexpr int HALF_BYTES = DTYPE ? 32 : 64;      // of a row of a tile, 16 summed features
constexpr int W_BYTES = (DTYPE ? 1 : 2) * ROWS * DEPTH * 4, RESTS = DTYPE ? 2 * HALF_BYTES : W_BYTES / 2, STAGE = W_BYTES + SAMPLES * DEPTH * 4;
constexpr int FETCHERS = 128, THREADS = 3 * FETCHERS;
using Registers = RegisterShares<FETCHERS, 40, 2 * FETCHERS, 232>;

// Where the float4 that begins at a sample and a summed feature of the stage lies: rows of 128 bytes, chunks swizzled
// so that eight lanes which read fragments meet different banks. Features first: 32 samples of a warp make a tile.
DEVICE int x_offset(int sample, int feature) {
    if (FEATURES_LAST) return sample * 128 + ((feature / 4 ^ (sample & 1) << 2) << 4) + feature % 4 * 4;
    return sample / 32 * 4096 + feature * 128 + ((sample % 32 / 4 ^ (feature / 4 % 4) << 1) << 4) + sample % 4 * 4;
}

DEVICE void fetch_x(u32 to, const float* __restrict__ x, const Problem& p, i64 sample, int feature) {
    constexpr int ACROSS = (FEATURES_LAST ? DEPTH : SAMPLES) / VEC_X, DOWN = FEATURES_LAST ? SAMPLES : DEPTH;
    constexpr int GROUP = FETCHERS < ACROSS ? ACROSS / FETCHERS : 1;  // columns of a thread
    constexpr int STEP = FETCHERS < ACROSS ? 1 : FETCHERS / ACROSS;
    const i64 left = FEATURES_LAST ? p.samples - sample : p.depth - feature;
    const int rows = static_cast<int>(left < DOWN ? left : DOWN);
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
        const int column = (threadIdx.x % ACROSS + g * FETCHERS) * VEC_X, row = threadIdx.x / ACROSS;
        const float* from = FEATURES_LAST ? x + (sample + row) * p.x_pitch + feature + column
                                          : x + (feature + row) * p.x_pitch + sample + column;
        const bool inside = FEATURES_LAST ? feature + column < p.depth : sample + column < p.samples;
#pragma unroll 8
        for (int i = row; i < DOWN; i += STEP) {
            const bool valid = inside && i < rows;
            const int place = FEATURES_LAST ? x_offset(i, column) : x_offset(column, i);
            copy_to_stage<4 * VEC_X>(to + place, valid ? from : x, valid);
            from += STEP * p.x_pitch;
        }
    }
}

typedef u32 Fragments[INSTRUCTIONS][2][4];  // [instruction][64 samples][word]

// What the unit gets of four summed features of four samples.
DEVICE void split(Fragments& head, Fragments& rest, const float (&x)[4][4]) {
#if DTYPE
#pragma unroll
    for (int k = 0; k < 4; k += 2)
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const u32 both = Rounding<bf16>::round_pair(x[k][m], x[k + 1][m]);
            head[0][m / 2][m % 2 + k] = both;
            rest[0][m / 2][m % 2 + k] = Rounding<bf16>::round_pair(x[k][m] - __uint_as_float(both << 16),
                                                             x[k + 1][m] - __uint_as_float(both & 0xffff0000));
        }
#else
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            u32& h = head[k / 2][m / 2][m % 2 + k % 2 * 2];
            h = __float_as_uint(x[k][m]) + 0x1000 & 0xffffe000;  // rounded to TF32, cheaper than by cvt
            rest[k / 2][m / 2][m % 2 + k % 2 * 2] = __float_as_uint(x[k][m] - __uint_as_float(h));  // cut by the unit
        }
#endif
}

// Fragments of x for 16 summed features.
DEVICE void fragments(Fragments& head, Fragments& rest, const unsigned char* x, int half) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4, g = lane / 4, t = lane % 4;
    const int feature = 16 * half + 4 * t;
    float values[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        // Features last: one sample, four features; first: one feature, four samples.
        const int sample = warp / 4 * 128 + warp % 4 * 16 + i / 2 * 64 + i % 2 * 8 + g;
        const int offset = FEATURES_LAST ? x_offset(sample, feature) : x_offset(32 * warp + 4 * g, feature + i);
        const float4 v = *reinterpret_cast<const float4*>(x + offset);
        const float four[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) (FEATURES_LAST ? values[e][i] : values[i][e]) = four[e];
    }
    split(head, rest, values);
}

DEVICE void multiply(float (&sum)[2][64], const Fragments& head, const Fragments& rest, u64 heads, bool first) {
    const u64 rests = heads + operand_step(RESTS);
    product_fence();
#pragma unroll
    for (int s = 0; s < INSTRUCTIONS; ++s)
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            multiply(sum[m], head[s][m], heads + operand_step(32) * s, !(first && s == 0));
            multiply(sum[m], head[s][m], rests + operand_step(32) * s, 1);
            multiply(sum[m], rest[s][m], heads + operand_step(32) * s, 1);
        }
    commit_products();
}

// Bias and ReLU.
DEVICE void finish(float (&sum)[2][64], const float* __restrict__ bias, const Problem& p, int feature) {
    feature += threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < 16; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float shift = bias && feature + 8 * j + e < p.features ? bias[feature + 8 * j + e] : 0.0f;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& value = sum[i / 2][4 * j + i % 2 * 2 + e];
                value += shift;
                if (p.relu) value = clamp_below(value, 0.0f);
            }
        }
}

DEVICE void write(float* __restrict__ y, const float (&sum)[2][64], const Problem& p, i64 tile, int feature) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4, g = lane / 4;
    feature += lane % 4 * 2;
#if FEATURES_LAST
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const i64 sample = tile + warp / 4 * 128 + warp % 4 * 16 + i / 2 * 64 + i % 2 * 8 + g;
        const int left = sample < p.samples ? p.features - feature : 0;
        float* const to = y + sample * p.features + feature;
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            const float low = sum[i / 2][4 * j + i % 2 * 2], high = sum[i / 2][4 * j + i % 2 * 2 + 1];
            if constexpr (VEC_Y == 2) {
                if (8 * j < left) *reinterpret_cast<float2*>(to + 8 * j) = make_float2(low, high);
            } else {
                if (8 * j < left) to[8 * j] = low;
                if (8 * j + 1 < left) to[8 * j + 1] = high;
            }
        }
    }
#else
    const i64 sample = tile + 32 * warp + 4 * g;
    const int left = static_cast<int>(p.samples - sample < 4 ? p.samples - sample : 4);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        float* to = y + (feature + e) * p.samples + sample;
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            if (feature + 8 * j + e < p.features) {
                const int c = 4 * j + e;
                const float four[4] = {sum[0][c], sum[0][c + 2], sum[1][c], sum[1][c + 2]};
                if constexpr (VEC_Y == 4) {
                    if (left > 0) store_whole(to, pack<float>(four).pairs);
                } else {
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if (i < left) to[i] = four[i];
                }
            }
            to += 8 * p.samples;
        }
    }
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
csb_tensor_kernel(const unsigned char* __restrict__ tiles, const float* __restrict__ x, const float* __restrict__ bias,
                  float* __restrict__ y, const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) unsigned char stages[];
    const u32 shared = shared_address(stages), full = shared + STAGES * STAGE, empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) barrier_init(full + 8 * i, FETCHERS + 1), barrier_init(empty + 8 * i, 8);
        barrier_init_done();
    }
    await_predecessor();
    __syncthreads();
    Ring<STAGES> ring;
    if (threadIdx.x < FETCHERS) {
        Registers::give();
        for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
            const i64 sample = i64(tile / p.tiles_down) * SAMPLES;
            const unsigned char* from = tiles + i64(tile % p.tiles_down) * p.steps * W_BYTES;
            for (int step = 0; step < p.steps; ++step) {
                const u32 stage = shared + ring.index * STAGE, barrier = full + 8 * ring.index;
                barrier_wait(empty + 8 * ring.index, ring.parity ^ 1);
                if (threadIdx.x == 0) {
                    barrier_expect(barrier, W_BYTES);
                    copy_bulk(stage, from + i64(step) * W_BYTES, W_BYTES, barrier);
                }
                fetch_x(stage + W_BYTES, x, p, sample, step * DEPTH);
                arrive_with_copies(barrier);
                ring.advance();
            }
        }
    } else {
        Registers::take();
        const int lane = threadIdx.x % 32;
        for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
            float sum[2][64];
            Fragments head[2], rest[2];
            int before = -1;
            for (int step = 0; step < p.steps; ++step) {
                barrier_wait(full + 8 * ring.index, ring.parity);
                const unsigned char* const x_tile = stages + ring.index * STAGE + W_BYTES;
                const u64 heads = operand(shared + ring.index * STAGE);
                fragments(head[0], rest[0], x_tile, 0);
                multiply(sum, head[0], rest[0], heads, step == 0);
                await_products<1>();
                if (before >= 0 && lane == 0) barrier_arrive(empty + 8 * before);
                fragments(head[1], rest[1], x_tile, 1);
                multiply(sum, head[1], rest[1], heads + operand_step(HALF_BYTES), false);
                await_products<1>();
                before = ring.index;
                ring.advance();
            }
            await_products<0>();
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + 8 * before);
            settle(sum[0]);
            settle(sum[1]);
            const int feature = tile % p.tiles_down * ROWS;
            if (bias || p.relu) finish(sum, bias, p, feature);
            write(y, sum, p, i64(tile / p.tiles_down) * SAMPLES, feature);
        }
    }
}
