// Column sums in a fixed order, in two steps: chunks of rows to float32 partials, partials to the result; in one step
// where a single chunk has all rows, whose sums are the result.
//
// channel_sum_kernel     partials[chunk, c] (+)= sum over the rows of the chunk of x[row, c]
//   x          rows * pitch + c                                                       T
//   partials   (chunks, channels) dense                                               float32
//   Block: LANES x 256/LANES threads; a thread owns VEC neighbouring channels and each (256/LANES)-th row of a chunk.
//   Grid: (ceil(channels / (LANES*VEC)), chunks). FLOP: 1 per element. Bytes: x once.
// sum_partials_kernel    out[i] (+)= sum over chunks of partials[chunk, i]
//   partials   (chunks, count) dense;  out (count,)                                   float32
//   Block: WIDTH x SPLIT threads; thread (i, j) adds chunks j, j + SPLIT, ... of VEC neighbours, then a tree.
//   Grid: ceil(count / (WIDTH * VEC)).
//   FLOP: 1 per partial. Bytes: partials once. Also the second step of the weight gradients.
//
// Macros: DTYPE, VEC, LANES (threads side by side along the channels, a power of two), UNROLL (rows that
// a thread has in flight), SPLIT (1 to 128, a power of two).
// Chunks, LANES and SPLIT depend on the sizes alone, so the bits depend neither on the device nor on VEC.
#include "common.cuh"

#ifdef LANES
extern "C" __global__ void __launch_bounds__(256)
channel_sum_kernel(const T* __restrict__ x, float* __restrict__ partials, i64 rows, i64 chunk, int channels,
                   i64 pitch, int accumulate) {
    await_predecessor();
    constexpr int DEEP = 256 / LANES;  // rows that a block reads at a time
    __shared__ float scratch[8][LANES * VEC + 1];
    const int lane = threadIdx.x % LANES, depth = threadIdx.x / LANES;
    const int channel = (blockIdx.x * LANES + lane) * VEC;
    const i64 first = blockIdx.y * chunk;
    const i64 last = first + chunk < rows ? first + chunk : rows;

    float sum[VEC] = {};
    if (channel < channels) {
        const T* column = x + channel;
        for (i64 row = first + depth; row < last; row += UNROLL * DEEP) {
            Raw<T, VEC> raw[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u)
                if (row + u * DEEP < last) raw[u] = load_once<VEC>(column + (row + u * DEEP) * pitch);
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                if (row + u * DEEP >= last) break;
                float value[VEC];
                unpack(raw[u], value);
#pragma unroll
                for (int e = 0; e < VEC; ++e) sum[e] += value[e];
            }
        }
    }
#pragma unroll
    for (int e = 0; e < VEC; ++e) {
#pragma unroll
        for (int offset = LANES; offset < 32; offset *= 2) sum[e] += __shfl_xor_sync(0xffffffffu, sum[e], offset);
        if (threadIdx.x % 32 < LANES) scratch[threadIdx.x / 32][lane * VEC + e] = sum[e];
    }
    __syncthreads();
    for (int c = threadIdx.x; c < LANES * VEC; c += 256) {
        float total = 0.0f;
#pragma unroll
        for (int warp = 0; warp < 8; ++warp) total += scratch[warp][c];
        const int out = blockIdx.x * LANES * VEC + c;
        if (out >= channels) continue;
        float* const to = partials + i64(blockIdx.y) * channels + out;
        *to = accumulate ? *to + total : total;
    }
}
#endif

#ifdef SPLIT
constexpr int WIDTH = VEC == 1 && SPLIT > 32 ? 8 : 256 / SPLIT;
constexpr int DEEP = 8;  // partials that a thread has in flight

DEVICE void add(float (&sum)[VEC], const float (&value)[VEC]) {
#pragma unroll
    for (int e = 0; e < VEC; ++e) sum[e] += value[e];
}

extern "C" __global__ void __launch_bounds__(SPLIT * WIDTH)
sum_partials_kernel(const float* __restrict__ partials, float* __restrict__ out, int chunks, i64 count,
                    int accumulate) {
    await_predecessor();
    const int lane = threadIdx.x % WIDTH, part = threadIdx.x / WIDTH;
    const i64 i = (i64(blockIdx.x) * WIDTH + lane) * VEC;
    float sum[VEC] = {};
    if (i < count)
        for (int first = part; first < chunks; first += DEEP * SPLIT) {
            Raw<float, VEC> raw[DEEP];
#pragma unroll
            for (int u = 0; u < DEEP; ++u)
                if (first + u * SPLIT < chunks) raw[u] = load_once<VEC>(partials + (first + u * SPLIT) * count + i);
#pragma unroll
            for (int u = 0; u < DEEP; ++u)
                if (first + u * SPLIT < chunks) add(sum, raw[u].items);
        }
    if constexpr (SPLIT > 1) {
        __shared__ __align__(16) float scratch[SPLIT][WIDTH][VEC];
#pragma unroll
        for (int e = 0; e < VEC; ++e) scratch[part][lane][e] = sum[e];
        // The last levels of the tree are one thread's: a barrier costs more than its additions.
        constexpr int LAST = SPLIT < 8 ? SPLIT : 8;
#pragma unroll
        for (int half = SPLIT / 2; half >= LAST; half /= 2) {
            __syncthreads();
            if (part < half) {
                add(sum, scratch[part + half][lane]);
#pragma unroll
                for (int e = 0; e < VEC; ++e) scratch[part][lane][e] = sum[e];
            }
        }
        __syncthreads();
        if (part > 0) return;
        float last[LAST][VEC];
#pragma unroll
        for (int j = 0; j < LAST; ++j)
#pragma unroll
            for (int e = 0; e < VEC; ++e) last[j][e] = scratch[j][lane][e];
#pragma unroll
        for (int half = LAST / 2; half > 0; half /= 2)
#pragma unroll
            for (int j = 0; j < half; ++j) add(last[j], last[j + half]);
#pragma unroll
        for (int e = 0; e < VEC; ++e) sum[e] = last[0][e];
    }
    if (i >= count) return;
    Raw<float, VEC> result;
    if (accumulate) {
        result = load_raw<VEC>(out + i);
        add(sum, result.items);
    }
#pragma unroll
    for (int e = 0; e < VEC; ++e) result.items[e] = sum[e];
    store_raw(out + i, result);
}
#endif
