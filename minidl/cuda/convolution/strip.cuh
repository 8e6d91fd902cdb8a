// How the kernels of depthwise and of grouped convolutions walk an image: in strips, down the rows, each row of the
// source read once for all the taps that it meets.
//
// Base positions are the pixels of the coarser of the two images. Going forward (BACKWARD = 0) each gives one output
// and moves the source by the stride; going back each gives stride x stride outputs, the parity classes of the data
// gradient, and moves the source by one:
//   forward   output (i, j)                     = sum over r, s of source (i*sh - ph + r, j*sw - pw + s)
//   back      output (i*sh + t - ph, ...)       = sum over a, b of source (i - a, j - b) * tap (a*sh + t, b*sw + u)
// A row of the source comes to meet AGES rows of base positions, the oldest of which it completes.
//
// Macros: KERNEL_H, KERNEL_W, STRIDE_H, STRIDE_W, BACKWARD.
#pragma once

// Rows and columns of the source from one base position to the next, and outputs of one.
constexpr int STEP_H = BACKWARD ? 1 : STRIDE_H, STEP_W = BACKWARD ? 1 : STRIDE_W;
constexpr int SPREAD_H = BACKWARD ? STRIDE_H : 1, SPREAD_W = BACKWARD ? STRIDE_W : 1;
constexpr int AGES = (KERNEL_H + STRIDE_H - 1) / STRIDE_H;
// Columns of the source that a base position sees.
constexpr int SIGHT = BACKWARD ? (KERNEL_W + STRIDE_W - 1) / STRIDE_W : KERNEL_W;

// Where strips lie: base positions, the source's coordinate at the first of them, the output's, and both images' sizes.
struct Strips {
    int base_h, base_w;
    int source_h, source_w;
    int output_h, output_w;
    int height, width;
    int out_height, out_width;
};

// The filter's row for row `in` of a step at outputs of this age, and row `out` of these; KERNEL_H or more: none.
__device__ __forceinline__ constexpr int tap_row(int age, int in, int out) {
    return BACKWARD ? (AGES - 1 - age) * STRIDE_H + out : age * STRIDE_H + in;
}

// The filter's column for the column at `sight` of those seen, and column `out` of the outputs.
__device__ __forceinline__ constexpr int tap_column(int sight, int out) {
    return BACKWARD ? (SIGHT - 1 - sight) * STRIDE_W + out : sight;
}
