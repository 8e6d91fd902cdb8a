// Channels padded with zeros to whole vectors, and the way back; for convolutions of images with one to three channels.
// The way back also picks each group's own out of gradients of groups that were taken together, `stretch` rows each.
//
// widen_kernel     output[row, c] = input[row, c], or 0 for c >= channels
//   input    row * pitch + c                                   T
//   output   (rows, wide) dense, wide a multiple of VEC        T
//   One thread per vector of the output, in its order. Bytes: input and output once.
// narrow_kernel    output[row, c] (+)= input[row, row / stretch % bundle * channels + c] for c < channels
//   input    (rows, wide) dense                                float32
//   output   (rows, channels) dense                            float32
//   One thread per value of the output. Bytes: input and output once.
//
// Macros: DTYPE, VEC (of widen_kernel). Block: 256 threads.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
widen_kernel(const T* __restrict__ input, T* __restrict__ output, i64 rows, int channels, int wide, i64 pitch) {
    await_predecessor();
    const i64 index = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    const int vectors = wide / VEC;
    const i64 row = vectors == 1 ? index : index / vectors;
    if (row >= rows) return;
    const int first = int(index - row * vectors) * VEC;
    const T* from = input + row * pitch + first;
    Raw<T, VEC> raw;
#pragma unroll
    for (int e = 0; e < VEC; ++e) raw.items[e] = first + e < channels ? from[e] : from_float<T>(0.0f);
    store_raw(output + row * wide + first, raw);
}

extern "C" __global__ void __launch_bounds__(256)
narrow_kernel(const float* __restrict__ input, float* __restrict__ output, i64 rows, int channels, int wide,
              i64 stretch, int bundle, int accumulate) {
    await_predecessor();
    const i64 index = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    const i64 row = index / channels;
    if (row >= rows) return;
    const int own = bundle > 1 ? row / stretch % bundle * channels : 0;
    const float value = input[row * wide + own + (index - row * channels)];
    output[index] = accumulate ? output[index] + value : value;
}
