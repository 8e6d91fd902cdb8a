// An image in planes, for the weight gradient in TF32 (conv2d_weight_tf32.cu): pixels come to lie side by side.
//
//   planes[(t*planes_w + u)*C + c, (n*grid_h + i)*grid_w + j] = x[n, i*sh + t - ph, j*sw + u - pw, c], 0 outside of x
//   x       pixels x_pitch apart                                    float32
//   planes  (planes_h * planes_w * C, pitch), `points` of a row     float32
//
// Mapping: a block of 256 threads turns 256 points x 32 channels through shared memory, so that both sides are read and
// written in whole lines; blockIdx.x numbers stretches of points, blockIdx.y tiles of channels, blockIdx.z the pairs t, u.
// Bytes: x and the planes once.
#include "common.cuh"

struct Problem {
    i64 x_pitch, pitch;
    int points;  // with a block's beyond them below 2**31
    int height, width, channels;
    int grid_h, grid_w, planes_w;
    int stride_h, stride_w;
    int padding_h, padding_w;
};

constexpr int THREADS = 256, POINTS = 256, CHANNELS = 32, VECTORS = CHANNELS / 4;

extern "C" __global__ void __launch_bounds__(THREADS)
conv2d_weight_planes_kernel(const float* __restrict__ x, float* __restrict__ planes, const __grid_constant__ Problem p) {
    __shared__ float tile[CHANNELS][POINTS + 1];
    const int t = blockIdx.z / p.planes_w, u = blockIdx.z % p.planes_w;
    const int first_channel = blockIdx.y * CHANNELS, vector = threadIdx.x % VECTORS * 4;
    const int first = blockIdx.x * POINTS;
#pragma unroll 4
    for (int i = threadIdx.x / VECTORS; i < POINTS; i += THREADS / VECTORS) {
        const int point = first + i, line = point / p.grid_w, image = line / p.grid_h;
        const int h = (line - image * p.grid_h) * p.stride_h + t - p.padding_h;
        const int w = (point - line * p.grid_w) * p.stride_w + u - p.padding_w;
        float value[4] = {};
        if (point < p.points && first_channel + vector < p.channels && h >= 0 && h < p.height && w >= 0 && w < p.width)
            load<float, 4>(x + ((i64(image) * p.height + h) * p.width + w) * p.x_pitch + first_channel + vector, value);
#pragma unroll
        for (int e = 0; e < 4; ++e) tile[vector + e][i] = value[e];
    }
    __syncthreads();
    for (int i = threadIdx.x / 32; i < CHANNELS && first_channel + i < p.channels; i += THREADS / 32) {
        float* const row = planes + (i64(blockIdx.z) * p.channels + first_channel + i) * p.pitch + first;
#pragma unroll
        for (int j = threadIdx.x % 32; j < POINTS; j += 32)
            if (first + j < p.points) row[j] = tile[i][j];
    }
}
