// A thread's share of the pixels of one sample, whose blocks are those of `walk_samples` (rows.py).
#pragma once
#include "common.cuh"

struct SampleShare : Share {
    int sample;

    __device__ __forceinline__ SampleShare(const Walk& walk, int samples) : Share(walk, UNROLL) {
        const int blocks = gridDim.x / samples;
        sample = blockIdx.x / blocks;
        row -= sample * blocks * UNROLL * blockDim.y;
        stride = blocks * UNROLL * blockDim.y;
    }
    // Where this thread's channels of the sample begin in an array.
    __device__ __forceinline__ i64 base(const Walk& walk, int pitch) const {
        return i64(sample) * walk.rows * pitch + channel;
    }
};
