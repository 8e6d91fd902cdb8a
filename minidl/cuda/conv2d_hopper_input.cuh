// How conv2d_hopper.cu normalises its source, in shared memory or in registers; a part of it, which knows its structures.
#pragma once
#include "conv2d_input.cuh"

// A warp: normalises its part of stage after stage.
DEVICE void normalize_all(const Layout& at, const Problem& p, const Norm& norm, int first, int last, int warp) {
    Chunk chunk;
    Ring<STAGES> ring;
    for (int i = first; i < last; i += p.group)
        for (int channel = 0; channel < p.depth; channel += DEPTH, ring.advance()) {
            chunk.load(norm, channel);
            barrier_wait(at.filled(ring.index), ring.parity);
            normalize_rows<WARPS>(chunk, at.stage(ring.index), warp, TILE_M / UNIT, [](int) { return ~0u; });
            if (threadIdx.x % 32 == 0) barrier_arrive(at.ready(ring.index));
        }
}

// Source pixels under the rows that a thread has of each product, g and g + 8 of its warp's 16, and whether a tap of
// them lies in the image.
struct Border {
    Pixel pixel[2 * BLOCKS];

    __device__ __forceinline__ Border(const Problem& p, int row) {
        const Class& c = p.classes[0];
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; ++i) {
            pixel[i] = Pixel(c, row + i / 2 * 64 + i % 2 * 8);
            pixel[i].y = c.first_h + c.offset_h + pixel[i].y * p.step_h;
            pixel[i].x = c.first_w + c.offset_w + pixel[i].x * p.step_w;
        }
    }

    // All ones where tap (a, b) of a row is in the image, else zeros.
    __device__ __forceinline__ void find(const Problem& p, int a, int b, u32 (&inside)[2 * BLOCKS]) const {
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; ++i)
            inside[i] = u32(pixel[i].y + a * p.delta_h) < u32(p.source_h) &&
                                u32(pixel[i].x + b * p.delta_w) < u32(p.source_w)
                            ? ~0u
                            : 0u;
    }
};

// Parameters of the channels of a chunk stay in registers over its taps, where there is room.
constexpr bool HELD = BLOCKS == 1 || TILE_N == 64;
constexpr int AHEAD = 3;  // products of 16 channels that run while the next one's operand is made

// A warpgroup: sums up its rows of one tile, which it normalises.
DEVICE void accumulate(Sum& sum, const Layout& at, const Problem& p, const Tile& tile, Ring<STAGES>& ring,
                       const Norm& norm, int warpgroup) {
    const Class& c = p.classes[0];
    const u32 thread = threadIdx.x % 128, lane = thread % 32, row = thread / 32 * 16 + lane % 16;
    const u32 from = (warpgroup * ROWS + row) * 128, swizzle = row % 8, column = lane % 4 * 2;
    const Border border(p, tile.row + warpgroup * ROWS + thread / 32 * 16 + lane / 4);
    u32 before = 0;
    for (int channel = 0; channel < p.depth; channel += DEPTH) {
        Affine held[HELD ? 8 : 1];
        if constexpr (HELD)
#pragma unroll
            for (int k = 0; k < 8; ++k) held[k] = Affine(norm, channel + k * 8, channel + k * 8 + column);
        for (int a = 0; a < c.taps_h; ++a)
            for (int b = 0; b < c.taps_w; ++b) {
                const u32 stage = at.stage(ring.index);
                const u64 filters = operand(stage + A_BYTES);
                u32 inside[2 * BLOCKS];
                border.find(p, a, b, inside);
                barrier_wait(at.filled(ring.index), ring.parity);
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    u32 words[BLOCKS][4];
#pragma unroll
                    for (int i = 0; i < BLOCKS; ++i)
                        load_matrices(words[i], stage + from + i * 64 * 128 + ((2 * k + lane / 16) ^ swizzle) * 16);
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const int of = channel + k * 16 + j * 8;
                        const Affine affine = HELD ? held[2 * k + j] : Affine(norm, of, of + column);
#pragma unroll
                        for (int i = 0; i < 2 * BLOCKS; ++i) {
                            u32& word = words[i / 2][2 * j + i % 2];
                            word = affine(word) & inside[i];
                        }
                    }
                    await_products<AHEAD>();
                    if (k == AHEAD && lane == 0 && channel + a + b > 0) barrier_arrive(before);
                    product_fence();
#pragma unroll
                    for (int i = 0; i < BLOCKS; ++i)
                        multiply(sum[i], words[i], filters + operand_step(k * 32), channel + a + b + k);
                    commit_products();
                }
                before = at.emptied(ring.index);
                ring.advance();
            }
    }
    await_products<0>();
    if (threadIdx.x % 32 == 0) barrier_arrive(before);
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) settle(sum[i]);
}
