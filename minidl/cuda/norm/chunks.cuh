// Rows cut into chunks, each summed by one block: what a batch norm's kernels leave for batch_norm_merge.cu.
#pragma once
#include "common.cuh"

// A cut of the rows into chunks (planned by batch_norm.py).
struct Chunks {
    int rows;      // below 2^30
    int pitch[3];  // of x, dy, y
    int channels;
    int chunk_rows;
};

// What the lanes of a block found, for its first threads to add up; sized by the launcher.
extern __shared__ __align__(16) float lanes[];

// This thread's rows of its chunk.
DEVICE Share chunk_share(const Chunks& cut, int unroll) {
    Share at;
    const int begin = blockIdx.x * cut.chunk_rows, end = begin + cut.chunk_rows;
    at.channel = (blockIdx.y * blockDim.x + threadIdx.x) * VEC;
    at.row = begin + threadIdx.y;
    at.step = blockDim.y;
    at.stride = unroll * blockDim.y;
    at.rows = at.channel < cut.channels ? min(end, cut.rows) : 0;
    return at;
}

// Which of the lanes a thread of a chunk kernel merges: STRETCH neighbours, a number that the launcher knows, of one
// channel. Every thread of the block takes part when its vectors have STRETCH elements.
#define STRETCH 8

struct Stretch {
    int index, column, lane;  // stretch * width + column; channel of the tile; first lane
    bool inside;

    __device__ __forceinline__ explicit Stretch(int width) {
        index = threadIdx.y * blockDim.x + threadIdx.x;
        lane = index / width * STRETCH;
        column = index % width;
        inside = lane < blockDim.y;
    }
};

// What this thread has summed, added up over the lanes and left as its chunk's: partial (chunks, 2, C).
DEVICE void leave_sums(const float (&sum)[VEC], const float (&product)[VEC], float* __restrict__ partial,
                       const Chunks& cut) {
    const int width = blockDim.x * VEC, slot = threadIdx.y * width + threadIdx.x * VEC;
    float* lane_sum = lanes;  // [lane][channel of the tile]
    float* lane_product = lane_sum + blockDim.y * width;
    store(lane_sum + slot, sum);
    store(lane_product + slot, product);
    __syncthreads();
    const Stretch part(width);
    float s = 0.0f, p = 0.0f;
    if (part.inside)
#pragma unroll
        for (int lane = 0; lane < STRETCH; ++lane) {
            s += lane_sum[(part.lane + lane) * width + part.column];
            p += lane_product[(part.lane + lane) * width + part.column];
        }
    __syncthreads();
    if (part.inside) {
        lane_sum[part.index] = s;
        lane_product[part.index] = p;
    }
    __syncthreads();
    const int channel = blockIdx.y * width + part.column;
    if (part.lane > 0 || channel >= cut.channels) return;
    for (int i = part.index + width; i < int(blockDim.y) / STRETCH * width; i += width) {
        s += lane_sum[i];
        p += lane_product[i];
    }
    float* to = partial + i64(blockIdx.x) * 2 * cut.channels + channel;
    to[0] = s;
    to[cut.channels] = p;
}
