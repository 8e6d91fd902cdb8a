// How conv2d_hopper.cu normalises its source, in registers; a part of it, which knows its structures.
//
// What the channels of a chunk need lies beside the stage where it begins, and is read from there by every warp, 4 KB each,
// of 1x1 filters with every stage. Of 512-2048 channels at 7x7 pixels, in tiles of 128x256 on an H200: operands through
// registers cost 2 % of the time, the arithmetic 5 % more, these reads 6 % (15 % where they come all at once, before the
// stage's rows). The arithmetic is hidden where 256 columns are multiplied (2 % of 3x3 filters), of 128 columns it is not
// (18 to 28 %; packed, 5). Tried without gain: reads of a quarter of the bytes, scale and shift in three parts of eight
// bits each, which the matrix units add up and spread over the lanes; warpgroups that multiply in turns; warps that
// normalise stages where they lie, which read and write as much shared memory.
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
    bool inside[2 * BLOCKS];
    bool whole = true;  // all rows of the warp

    __device__ __forceinline__ Border(const Problem& p, int row) {
        const Class& c = p.classes[0];
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; ++i) {
            pixel[i] = Pixel(c, row + i / 2 * 64 + i % 2 * 8);
            pixel[i].y = c.first_h + c.offset_h + pixel[i].y * p.step_h;
            pixel[i].x = c.first_w + c.offset_w + pixel[i].x * p.step_w;
        }
    }

    // For the tap that is `down` and `across` from the first.
    __device__ __forceinline__ void find(const Problem& p, int down, int across) {
        bool all = true;
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; ++i) {
            inside[i] = u32(pixel[i].y + down) < u32(p.source_h) && u32(pixel[i].x + across) < u32(p.source_w);
            all &= inside[i];
        }
        whole = __all_sync(0xffffffffu, all);
    }

    __device__ __forceinline__ void cut(u32 (&words)[BLOCKS][4]) const {
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) words[i][j] = inside[2 * i + j % 2] ? words[i][j] : 0;
    }
};

// Products of 16 channels that are started together, and such groups that run while the next one's operands are made. (Two
// groups that run ahead, groups of one product or of a whole stage are up to 5 % slower, warpgroups that take turns 2 to
// 10 %.)
constexpr int GROUP = 2 / BLOCKS, GROUPS = 4 / GROUP;
constexpr int AHEAD = 1;
// What a group needs is read while the one before is at work, of the next stage too: before that one is normalised, where
// there are registers for both.
constexpr int READS = TILE_N < 256 ? 2 : 1;
static_assert(READS == 1 || GROUPS % 2 == 0, "the next stage begins with the first of them");

// A warpgroup: sums up its rows of one tile, which it normalises.
DEVICE void accumulate(Sum& sum, const Layout& at, const Problem& p, const Tile& tile, Ring<STAGES>& ring, int steps,
                       int warpgroup) {
    const Class& c = p.classes[0];
    const u32 thread = thread_again(), lane = thread % 32, row = thread / 32 * 16 + lane % 16;
    const u32 mine = lane % 4 * sizeof(Affine);
    u32 rows = at.stage(ring.index) + (warpgroup * ROWS + row) * 128 + (lane / 16 ^ row % 8) * 16;
    const u64 origin = operand(at.stage(0) + A_BYTES);
    Border border(p, tile.row + warpgroup * ROWS + thread / 32 * 16 + lane / 4);
    int tap_h = 0, tap_w = 0, down = 0, across = 0;  // of the stage that is read
    Affine affine[8];                                // of a chunk, over its taps
    u32 raw[READS][GROUP][BLOCKS][4];
    // A group's rows and, with the first tap, what its channels need: all of that at once would keep the rows waiting.
    const auto load = [&](int g) {
#pragma unroll
        for (int k = 0; k < GROUP; ++k) {
            const int pair = 2 * (g * GROUP + k);
#pragma unroll
            for (int i = 0; i < BLOCKS; ++i) load_matrices(raw[g % READS][k][i], (rows ^ pair * 16) + i * 64 * 128);
            if (SINGLE || tap_h + tap_w == 0)
#pragma unroll
                for (int j = pair; j < pair + 2; ++j)
                    affine[j].load(at.affine(ring.index) + mine + j * 4 * sizeof(Affine));
        }
    };
    // Group g of a stage, or the next one's first.
    const auto read = [&](int step, int g) {
        if (g < GROUPS) {
            load(g);
            return;
        }
        ring.advance();
        rows += ring.index ? STAGE_BYTES : STAGE_BYTES - STAGES * STAGE_BYTES;
        if constexpr (!SINGLE) {
            ++tap_w, across += p.delta_w;
            if (tap_w == c.taps_w) tap_w = across = 0, ++tap_h, down += p.delta_h;
            if (tap_h == c.taps_h) tap_h = down = 0;
        }
        if (step + 1 == steps) return;
        barrier_wait(at.filled(ring.index), ring.parity);
        load(0);
    };
    barrier_wait(at.filled(ring.index), ring.parity);
    load(0);
    int before = 0;  // the stage whose products run
    for (int step = 0; step < steps; ++step) {
        const u64 filters = origin + u64(ring.index * (STAGE_BYTES >> 4));
        const int stage = ring.index;
        if constexpr (!SINGLE) border.find(p, down, across);
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            if (READS > 1) read(step, g + 1);
            u32 words[GROUP][BLOCKS][4];
#pragma unroll
            for (int k = 0; k < GROUP; ++k)
#pragma unroll
                for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        words[k][i][j] = affine[2 * (g * GROUP + k) + j / 2](raw[g % READS][k][i][j]);
            if (!SINGLE && !border.whole)
#pragma unroll
                for (int k = 0; k < GROUP; ++k) border.cut(words[k]);
            if (READS == 1) read(step, g + 1);
            product_fence();
#pragma unroll
            for (int k = 0; k < GROUP; ++k)
#pragma unroll
                for (int i = 0; i < BLOCKS; ++i)
                    multiply(sum[i], words[k][i], filters + operand_step((g * GROUP + k) * 32), g * GROUP + k ? 1 : step);
            commit_products();
            // Registers of those that ran longest are free again.
            await_products<AHEAD>();
            if (g + 1 == AHEAD && lane == 0 && step > 0) barrier_arrive(at.emptied(before));
        }
        before = stage;
    }
    await_products<0>();
    if (lane == 0) barrier_arrive(at.emptied(before));
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) settle(sum[i]);
}
