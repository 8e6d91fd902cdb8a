// The pixels of each sample in chunks, channels in tiles (planned by `cut_pixels` of group_norm.py): blocks of LANES x
// 256/LANES threads, each with VEC neighbouring channels and each (256/LANES)-th pixel of a chunk.
#pragma once
#include "common.cuh"

struct Cut {
    i64 pitch[2];
    int pixels, chunk, chunks, channels, samples, tiles, group, groups;
};

constexpr int DEEP = 256 / LANES;  // pixels that a block reads at a time
constexpr int WIDTH = LANES * VEC;
constexpr int WARPS = 256 / 32;
