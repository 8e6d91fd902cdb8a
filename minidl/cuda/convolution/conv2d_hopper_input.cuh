// How conv2d_hopper.cu normalises its source, in registers; a part of it, which knows its structures.
//
// What the channels of a chunk need lies beside the stage where it begins, and is read from there by every warp, 4 KB
// each, of 1x1 filters with every stage. Of 512-2048 channels at 7x7 pixels, in tiles of 128x256 on an H200: operands
// through registers cost 2 % of the time, the arithmetic 5 % more, these reads 6 % (15 % where they come all at once,
// before the stage's rows). The arithmetic is hidden where 256 columns are multiplied (2 % of 3x3 filters), of 128
// columns it is not (11 to 21 %; packed, 4 to 7).
#pragma once
#include "conv2d_input.cuh"

// A warp: puts what the channels of a stage need beside it, two channels a lane, where a chunk of channels begins.
DEVICE void fill_affine(const Layout& at, const Problem& p, const Norm& norm) {
    static_assert(sizeof(Affine) * DEPTH / 2 <= AFFINE_BYTES);
    const int lane = threadIdx.x % 32, taps = p.classes[0].taps_h * p.classes[0].taps_w;
    Ring<STAGES> ring, before;
    const Stretch stretch(p);
    bool open = false;  // whether a tile has begun with the stage before
    for (;;)
        for (int channel = stretch.begin; channel < stretch.end; channel += DEPTH) {
            const Affine affine(norm, channel + lane / 4 * 8, channel + lane * 2);
            for (int tap = 0; tap < taps; ++tap, ring.advance()) {
                if (open) {
                    barrier_wait(at.filled(before.index), before.parity);
                    if (read_ticket(at.ticket(before.index)).first < 0) return;
                }
                barrier_wait(at.emptied(ring.index), ring.parity ^ 1);
                if (tap == 0) affine.store(at.affine(ring.index) + lane * sizeof(Affine));
                __syncwarp();
                if (lane == 0) barrier_arrive(at.filled(ring.index));
                open = channel == stretch.begin && tap == 0, before = ring;
            }
        }
}

// Source pixels under the rows that a thread has of each product, g and g + 8 of its warp's 16, and whether a tap of
// them lies in the image.
struct Border {
    Pixel pixel[2 * BLOCKS];
    int across[2 * BLOCKS];  // where in a line they are, which is far outside of lines that are outside themselves

    __device__ __forceinline__ Border(const Problem& p, int row) {
        const Class& c = p.classes[0];
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; ++i) {
            pixel[i] = Pixel(c, row + i / 2 * 64 + i % 2 * 8);
            pixel[i].y = c.first_h + c.offset_h + pixel[i].y * p.step_h;
            pixel[i].x = c.first_w + c.offset_w + pixel[i].x * p.step_w;
        }
    }

    // Begins with line a of taps.
    __device__ __forceinline__ void begin(const Problem& p, int a) {
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; ++i)
            across[i] = u32(pixel[i].y + a * p.delta_h) < u32(p.source_h) ? pixel[i].x : -(1 << 30);
    }

    // Whether tap b of the line is in the image, of product i the upper rows or the lower.
    __device__ __forceinline__ bool inside(const Problem& p, int b, int i) const {
        return SINGLE || u32(across[i] + b * p.delta_w) < u32(p.source_w);
    }
};

// Products of 16 channels that are started together, and such groups that run while the next one's operands are made.
constexpr int GROUP = 2 / BLOCKS, GROUPS = 4 / GROUP;
constexpr int AHEAD = 1;

// A warpgroup: sums up its rows of one tile, which it normalises.
//
// What that costs is the instructions that are issued, not what they wait for. 3x3 filters with a stride of two on 128
// channels at 56x56 pixels, in tiles of 192x128 on an H200: 96 us without, 110 by these 131 instructions of a warp a
// stage, of which the arithmetic is 80. (Where the operands' descriptions follow from the stage's address, in fewer
// instructions, each is made in the registers that the product before still reads: 1x1 filters took 3 to 10 % longer.)
DEVICE void accumulate(Sum& sum, const Layout& at, const Problem& p, const Tile& tile, Ring<STAGES>& ring,
                       int warpgroup) {
    const Class& c = p.classes[0];
    const u32 thread = thread_again(), lane = thread % 32, row = thread / 32 * 16 + lane % 16;
    u32 from[4];  // of a stage, this lane's row of each group of 16 channels
#pragma unroll
    for (int k = 0; k < 4; ++k) from[k] = (warpgroup * ROWS + row) * 128 + ((2 * k + lane / 16) ^ row % 8) * 16;
    Border border(p, tile.row + warpgroup * ROWS + thread / 32 * 16 + lane / 4);
    const u64 origin = operand(at.stage(0) + A_BYTES);
    u32 before = 0;
    int keep = 0;
    for (int channel = tile.begin; channel < tile.end; channel += DEPTH) {
        Affine affine[8];  // of a chunk, over its taps
        const auto load_affine = [&](int j) {
            affine[j].load(at.affine(ring.index) + (j * 4 + lane % 4) * sizeof(Affine));
        };
        if (!SINGLE) {
            barrier_wait(at.filled(ring.index), ring.parity);
#pragma unroll
            for (int j = 0; j < 8; ++j) load_affine(j);
        }
        for (int a = 0; a < (SINGLE ? 1 : c.taps_h); ++a) {
            border.begin(p, a);
            for (int b = 0; b < (SINGLE ? 1 : c.taps_w); ++b) {
                const u32 stage = at.stage(ring.index);
                const u64 filters = origin + u64(ring.index * (STAGE_BYTES >> 4));
                bool inside[2 * BLOCKS];
#pragma unroll
                for (int i = 0; i < 2 * BLOCKS; ++i) inside[i] = border.inside(p, b, i);
                u32 raw[GROUP][BLOCKS][4];
                // A group's rows and, where there are no other taps, what its channels need: all of that at once would
                // keep the rows waiting.
                const auto load = [&](int g) {
#pragma unroll
                    for (int k = 0; k < GROUP; ++k) {
                        const int chunk = g * GROUP + k;
                        if (SINGLE) load_affine(2 * chunk), load_affine(2 * chunk + 1);
#pragma unroll
                        for (int i = 0; i < BLOCKS; ++i)
                            load_matrices(raw[k][i], stage + from[chunk] + i * 64 * 128);
                    }
                };
                barrier_wait(at.filled(ring.index), ring.parity);
                load(0);
#pragma unroll
                for (int g = 0; g < GROUPS; ++g) {
                    u32 words[GROUP][BLOCKS][4];
                    // Registers of those that ran longest are free again.
                    await_products<AHEAD>();
                    if (g == AHEAD && lane == 0 && keep) barrier_arrive(before);
#pragma unroll
                    for (int k = 0; k < GROUP; ++k)
#pragma unroll
                        for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
                            for (int j = 0; j < 4; ++j)
                                words[k][i][j] =
                                    affine[2 * (g * GROUP + k) + j / 2](raw[k][i][j], inside[2 * i + j % 2]);
                    if (g + 1 < GROUPS) load(g + 1);
                    product_fence();
#pragma unroll
                    for (int k = 0; k < GROUP; ++k)
#pragma unroll
                        for (int i = 0; i < BLOCKS; ++i)
                            multiply(sum[i], words[k][i], filters + operand_step((g * GROUP + k) * 32),
                                     g * GROUP + k ? 1 : keep);
                    commit_products();
                }
                before = at.emptied(ring.index), keep = 1;
                ring.advance();
            }
        }
    }
    await_products<0>();
    if (lane == 0) barrier_arrive(before);
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) settle(sum[i]);
}
