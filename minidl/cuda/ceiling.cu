// What a device can do at most beside its memory: kernels that do one thing only, for the ceilings of reports.
//
// fma_kernel      output[i] = sum over CHAINS chains of x, after `steps` times x = x * factor + term in each
//   output        (grid * block,) float32
//   Mapping: one thread per output. Chain c of thread t begins at t % 32 + c.
//   FLOP: 2 * CHAINS * steps per thread, on registers. `steps` is a multiple of UNROLL: eight chains of 32 steps make
//   256 instructions between two branches, so that all but one in a hundred is a multiply-add.
// l2_copy_kernel  output = input, `repeats` times
//   input, output (count,) of 16 bytes each, count a multiple of BATCH * grid * block
//   Mapping: thread t takes items t, t + threads, ...; BATCH loads are under way before the first store.
//   Bytes: 32 * count * repeats through the second-level cache, where input and output fit into it: loads keep out of
//   the first-level cache, stores go through it.

#include "common.cuh"

constexpr int CHAINS = 8, UNROLL = 32, BATCH = 4;

extern "C" __global__ void __launch_bounds__(256)
fma_kernel(float* __restrict__ output, float factor, float term, int steps) {
    await_predecessor();
    float x[CHAINS];
#pragma unroll
    for (int c = 0; c < CHAINS; ++c) x[c] = float(threadIdx.x % 32 + c);
#pragma unroll 1
    for (int step = 0; step < steps; step += UNROLL) {
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
#pragma unroll
            for (int c = 0; c < CHAINS; ++c) x[c] = fmaf(x[c], factor, term);
    }
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < CHAINS; ++c) sum += x[c];
    output[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// volatile: a repeat moves its bytes although it stores what is there already.
DEVICE uint4 load_from_l2(const uint4* p) {
    uint4 y;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(y.x), "=r"(y.y), "=r"(y.z), "=r"(y.w) : "l"(p));
    return y;
}

DEVICE void store_to_l2(uint4* p, uint4 x) {
    asm volatile("st.global.cg.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"l"(p), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

extern "C" __global__ void __launch_bounds__(512, 2)
l2_copy_kernel(const uint4* __restrict__ input, uint4* __restrict__ output, i64 count, int repeats) {
    await_predecessor();
    const i64 threads = i64(gridDim.x) * blockDim.x;
    for (int repeat = 0; repeat < repeats; ++repeat) {
        for (i64 first = i64(blockIdx.x) * blockDim.x + threadIdx.x; first < count; first += BATCH * threads) {
            uint4 items[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; ++b) items[b] = load_from_l2(input + first + b * threads);
#pragma unroll
            for (int b = 0; b < BATCH; ++b) store_to_l2(output + first + b * threads, items[b]);
        }
    }
}
