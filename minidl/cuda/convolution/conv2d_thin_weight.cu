// Weight gradient of thin convolutions (conv2d_thin.cu): chunks of rows to float32 partials, which sum_partials_kernel
// of channel_sum.cu adds up.
//
//   partials[chunk, f * few_step + j * wide_step] = sum over the rows r of the chunk of few[r, f] * wide[r, j]
//
// Layout: few, wide  rows * pitch + channel. A warp takes 16 rows at a time of 128 bytes of `wide`: lane 4g + t the
// vector g of rows 4t to 4t + 3. For mma.sync these are, two rows interleaved, fragments of `wide` turned: its row g or
// g + 8 is channel 8g + 2q or 8g + 2q + 1 of product q, its depth the rows. The few come likewise: lane 4g + t has the
// EACH from EACH * g on of its four rows, which are column g of as many products. Float32 is multiplied as it is, and
// the four threads of a vector add up their rows at the end; then the warps, in order.
//
// NORMALIZED, of 16-bit types: `wide` is the input of a batch norm with a ReLU over it, whose output is multiplied.
//
// Macros: DTYPE, TF32, FEW, NORMALIZED; VEC_X, VEC_FEW, elements per access of wide and few, of 16-bit types a divisor
// of EACH.
// Block: 8 warps. Grid: (blocks of 128 bytes of channels, chunks). A chunk is a multiple of 128 rows.
// FLOP: 2 * rows * wide * FEW. Bytes: rows * (wide + FEW); the few are read once for each block of channels.
#include "conv2d_thin.cuh"

constexpr int WARPS = 8, SPAN = 8 * WIDTH, STEP = 16;  // channels of a block, rows of a warp at a time
constexpr int EACH = UNITS ? (FEW > 16 ? 4 : FEW > 8 ? 2 : 1) : 1;
constexpr int SLOTS = UNITS ? 8 : FEW;  // sums of a channel that a warp leaves at a time, EACH times

struct Problem {
    i64 rows, chunk, few_pitch, wide_pitch;
    int wide, few_step, wide_step;
};

struct Sum {
#if DTYPE
    float parts[4][EACH][4] = {};

    __device__ __forceinline__ void add(const Vector (&x)[4], const T* __restrict__ few, const Problem& p, i64 row,
                                        i64 end) {
        const int first = threadIdx.x % 32 / 4 * EACH;
        T y[4][EACH];
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < EACH; j += VEC_FEW) {
                Raw<T, VEC_FEW> part;
#pragma unroll
                for (int e = 0; e < VEC_FEW; ++e) part.items[e] = from_float<T>(0.0f);
                if (first + j < FEW && row + i < end)
                    part = load_raw<VEC_FEW>(few + (row + i) * p.few_pitch + first + j);
#pragma unroll
                for (int e = 0; e < VEC_FEW; ++e) y[i][j + e] = part.items[e];
            }
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            Raw<T, 4> column;
#pragma unroll
            for (int i = 0; i < 4; ++i) column.items[i] = y[i][j];
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                const u32 w[4] = {x[0].pairs[q], x[1].pairs[q], x[2].pairs[q], x[3].pairs[q]};
                const u32 a[4] = {__byte_perm(w[0], w[1], 0x5410), __byte_perm(w[0], w[1], 0x7632),
                                  __byte_perm(w[2], w[3], 0x5410), __byte_perm(w[2], w[3], 0x7632)};
                multiply_fragments(parts[q][j], a, {column.pairs[0], column.pairs[1]});
            }
        }
    }

    // sums[channel][slot] of this warp, slot i for the few EACH * i + which
    __device__ __forceinline__ void leave(float (*sums)[SLOTS], int which) const {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int q = 0; q < 4; ++q)
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[8 * g + 2 * q + e / 2][2 * t + e % 2] = parts[q][which][e];
    }
#else
    float parts[FEW][WIDTH] = {};

    __device__ __forceinline__ void add(const Vector (&x)[4], const T* __restrict__ few, const Problem& p, i64 row,
                                        i64 end) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (row + i >= end) break;
            float y[FEW], v[WIDTH];
            fetch_few<VEC_FEW>(few + (row + i) * p.few_pitch, y);
#pragma unroll
            for (int e = 0; e < WIDTH; ++e) v[e] = operand(x[i].items[e]);
#pragma unroll
            for (int f = 0; f < FEW; ++f)
#pragma unroll
                for (int e = 0; e < WIDTH; ++e) parts[f][e] = fmaf(operand(y[f]), v[e], parts[f][e]);
        }
    }

    __device__ __forceinline__ void leave(float (*sums)[SLOTS], int) const {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int f = 0; f < FEW; ++f)
#pragma unroll
            for (int e = 0; e < WIDTH; ++e) {
                float sum = parts[f][e];
                sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                if (t == 0) sums[WIDTH * g + e][f] = sum;
            }
    }
#endif
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, UNITS && EACH < 4 ? 3 : 2)
conv2d_thin_weight_kernel(const T* __restrict__ few, const T* __restrict__ wide, float* __restrict__ partials,
                          const float* __restrict__ moments, const float* __restrict__ gamma,
                          const float* __restrict__ beta, const Problem p) {
    await_predecessor();
    __shared__ float sums[WARPS][SPAN][SLOTS];
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int channel = blockIdx.x * SPAN + g * WIDTH;
    const i64 begin = blockIdx.y * p.chunk, end = begin + p.chunk < p.rows ? begin + p.chunk : p.rows;
    float2 affine[NORMALIZED ? WIDTH : 1];
#pragma unroll
    for (int e = 0; NORMALIZED && e < WIDTH; ++e) affine[e] = affine_of(moments, gamma, beta, channel + e, p.wide);
    Sum sum;
#pragma unroll 2
    for (i64 row = begin + warp * STEP + 4 * t; row - 4 * t < end; row += WARPS * STEP) {
        Vector x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            clear(x[i]);
            if (row + i < end) x[i] = fetch<VEC_X>(wide + (row + i) * p.wide_pitch, channel, p.wide);
        }
#if NORMALIZED
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (row + i < end) normalize(x[i], affine);  // what is not there stays zero
#endif
        sum.add(x, few, p, row, end);
    }
#pragma unroll
    for (int which = 0; which < EACH; ++which) {
        if (which > 0) __syncthreads();
        sum.leave(sums[warp], which);
        __syncthreads();
        for (int i = threadIdx.x; i < SPAN * SLOTS; i += 32 * WARPS) {
            const int f = i / SPAN * EACH + which, j = i % SPAN, at = blockIdx.x * SPAN + j;
            float total = 0.0f;
#pragma unroll
            for (int k = 0; k < WARPS; ++k) total += sums[k][j][i / SPAN];
            if (f < FEW && at < p.wide)
                partials[i64(blockIdx.y) * FEW * p.wide + i64(f) * p.few_step + i64(at) * p.wide_step] = total;
        }
    }
}
