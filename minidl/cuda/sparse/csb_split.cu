// A float32 array as two bfloat16 ones, heads and what they leave: operands of csb_sampled_hopper.cu, a workspace.
//
//   x         row * x_pitch + column                                    float32
//   halves    (heads or rests, rows, pitch); columns from `columns` on are not written              bf16
//
// Grid: 256 threads, VEC neighbouring columns each. Bytes: 4 read and 4 written for each element.
//
// Macro: VEC (4 or 1).
#include "common.cuh"

constexpr int THREADS = 256;

struct Problem {
    i64 x_pitch, rows;
    int columns, pitch;
    int vectors;  // of a row
};

extern "C" __global__ void __launch_bounds__(THREADS)
csb_split_kernel(const float* __restrict__ x, bf16* __restrict__ halves, const __grid_constant__ Problem p) {
    await_predecessor();
    const i64 i = i64(blockIdx.x) * THREADS + threadIdx.x, row = i / p.vectors;
    if (row >= p.rows) return;
    const int column = static_cast<int>(i - row * p.vectors) * VEC;
    float value[VEC], head[VEC], rest[VEC];
    load<float, VEC>(x + row * p.x_pitch + column, value);
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
        head[v] = to_float(Rounding<bf16>::round(value[v]));
        rest[v] = value[v] - head[v];
    }
    bf16* const to = halves + row * p.pitch + column;
    store<bf16, VEC>(to, head);
    store<bf16, VEC>(to + p.rows * p.pitch, rest);
}
