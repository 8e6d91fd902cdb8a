// How conv2d_weight_hopper.cu normalises x, in registers: a part of that file, included where its structures are known.
//
// Products are turned over, channels times filters: a thread has the same two channels of each block for all pixels,
// and keeps what they need. Nothing is read besides, and two values take five instructions (conv2d_input.cuh), six
// where some may be outside of an image, in each warpgroup that has their columns: on an H200 up to 10 % of the time
// where a warpgroup has 256 filters, 17 to 22 % where it has 128 (3x3 with a stride of two on 128 channels at 56x56
// pixels, 99 us beside 85 of the kernel that finds its input ready; as long where nothing is masked; 112 where each
// warp found what is outside by itself, and masked the results). The sums are turned back at the end. Three warpgroups
// share tiles of 192 columns: 1152 columns, 3x3 on 128 channels, are six of these but four and a half of 256.
#pragma once
#include "conv2d_input.cuh"

#if BORDER
// Which pixels of a stage have their tap in an image: one warp finds it for all that multiply; each by itself took 45
// instructions for it of the 194 of a stage. (The warp that copies is too slow for both: of 3x3 with a stride of two on
// 128 channels at 56x56 pixels 122 us on an H200, 99 so.)
//
// A warp: of each stage, and each of its blocks of columns, a bit for each pixel, in byte q of two words those that
// lanes of place q among four multiply. Bit 8 * q + j is that of pixel j / 2 * 8 + 2 * q + j % 2, and of the one 32
// further.
DEVICE void tell_inside(const Layout& at, const Problem& p, const Work& work, Ring<STAGES>& ring) {
    const int lane = threadIdx.x % 32;
    const int height = p.out_height, width = p.out_width;
    int first = work.first * SPAN + lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2;
    Pixel pixels[] = {{first, height, width}, {first + SPAN / 2, height, width}};
    int offset_h[COLUMN_BLOCKS], offset_w[COLUMN_BLOCKS];
#pragma unroll
    for (int i = 0; i < COLUMN_BLOCKS; ++i) {
        const Columns columns(p, work.block + i);
        offset_h[i] = columns.tap_h * p.dilation_h - p.padding_h;
        offset_w[i] = columns.tap_w * p.dilation_w - p.padding_w;
    }
    for (int step = work.first; step < work.last; ++step) {
        u32 found[COLUMN_BLOCKS][2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int y = pixels[j].y * p.stride_h, x = pixels[j].x * p.stride_w;
#pragma unroll
            for (int i = 0; i < COLUMN_BLOCKS; ++i) {
                bool inside = first + j * (SPAN / 2) < p.pixels;
                if constexpr (!FLAT)
                    inside &= u32(y + offset_h[i]) < u32(p.height) && u32(x + offset_w[i]) < u32(p.width);
                found[i][j] = __ballot_sync(0xffffffffu, inside);
            }
            if constexpr (!FLAT) pixels[j].advance(p, height, width);
        }
        first += SPAN;
        barrier_wait(at.emptied(ring.index), ring.parity ^ 1);
        if (lane == 0) {
#pragma unroll
            for (int i = 0; i < COLUMN_BLOCKS; ++i)
                store_shared(at.inside(ring.index, i), make_uint2(found[i][0], found[i][1]));
            barrier_arrive(at.filled(ring.index));
        }
        ring.advance();
    }
}
#endif

constexpr int BLOCKS = COLUMNS / 64;  // products along the columns
using Sum = float[BLOCKS][ROWS / 2];

// Products that are started together, and such groups that run while the next one's operands are made, as registers
// allow.
constexpr int GROUP = SHIFT ? 2 : 1, GROUPS = SPAN / 16 * BLOCKS / GROUP, AHEAD = 1;

// A warpgroup: sums up its part of the tile, from row and column on, turned over: channels, which it normalises, times
// filters. A thread has two channels of each block for all pixels.
DEVICE void accumulate(Sum& sum, Layout at, const Problem& p, const Work& work, const Norm& norm,
                       Ring<STAGES>& ring, int row, int column) {
    const u32 thread = thread_again(), lane = thread % 32, warp = thread / 32;
    Affine affine[BLOCKS][2];
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
        const int channel = Columns(p, work.block + column / 64 + i).channel + warp * 16 + lane / 4;
        affine[i][0] = Affine(norm, channel), affine[i][1] = Affine(norm, channel + 8);
    }
    // A lane's row of the four matrices of 16 pixels: these and the next 8 channels, then both of the next 8 pixels.
    const u32 from = (ROW_BLOCKS + column / 64) * BLOCK_BYTES + (lane / 16 * 8 + lane % 8) * 128 +
                     ((warp * 2 + lane / 8 % 2) ^ lane % 8) * 16;
    asm volatile("" : "+r"(at.base));
    u32 before = 0;
    int keep = 0;
    for (int steps = work.last - work.first; steps > 0; --steps) {
        const u32 stage = at.stage(ring.index);
        const u64 gradients = operand(stage + row / 64 * BLOCK_BYTES, BLOCK_BYTES);
        barrier_wait(at.filled(ring.index), ring.parity);
        // Of pixels 8 * j + 2 * (lane % 4) and the next, bits 2 * j and 2 * j + 1.
        u32 inside[BLOCKS];
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) {
            inside[i] = ~0u;
            if constexpr (BORDER) {
                const uint2 found = load_shared_pair(at.inside(ring.index, column / 64 + i));
                inside[i] = __byte_perm(found.x, found.y, 0x40 + 0x11 * (lane % 4));
            }
        }
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            u32 raw[GROUP][4], words[GROUP][4];
#pragma unroll
            for (int n = 0; n < GROUP; ++n) {
                const int k = (g * GROUP + n) / BLOCKS, i = (g * GROUP + n) % BLOCKS;
                load_matrices<true>(raw[n], stage + from + i * BLOCK_BYTES + k * 2048);
            }
            // Registers of those that ran longest are free again.
            await_products<AHEAD>();
            if (g == AHEAD && lane == 0 && keep) barrier_arrive(before);
#pragma unroll
            for (int n = 0; n < GROUP; ++n) {
                const int k = (g * GROUP + n) / BLOCKS, i = (g * GROUP + n) % BLOCKS;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const u32 bit = 1u << (4 * k + j / 2 * 2);
                    words[n][j] = affine[i][j % 2](raw[n][j], inside[i] & bit, inside[i] & bit << 1);
                }
            }
            product_fence();
#pragma unroll
            for (int n = 0; n < GROUP; ++n) {
                const int k = (g * GROUP + n) / BLOCKS, i = (g * GROUP + n) % BLOCKS;
                multiply<true>(sum[i], words[n], gradients + operand_step(k * 2048), k ? 1 : keep);
            }
            commit_products();
        }
        before = at.emptied(ring.index), keep = 1;
        ring.advance();
    }
    await_products<0>();
    if (TURNS && lane == 0) barrier_arrive(before);
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) settle(sum[i]);
}

// Of a thread's accumulators, once they are turned over: see below.
constexpr int ACROSS = 16, DOWN = 8, PER = 2;

DEVICE int thread_row() { return thread_again() % 32 / 4; }

// A warp's part of the warpgroup's, from row and column on.
DEVICE void find_part(int& row, int& column) { column += thread_again() / 32 * 16; }

// Of two blocks of 8 columns 16 rows each.
using Turned = float[ROWS / 16][8 * BLOCKS];

DEVICE void turn(Turned& turned, const Sum& sum) {
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
        for (int j = 0; j < ROWS / 8; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float *const to = turned[j / 2] + 8 * i + 4 * half + j % 2 * 2;
                to[0] = sum[i][4 * j + 2 * half], to[1] = sum[i][4 * j + 2 * half + 1];
                turn_over(to[0], to[1]);
            }
}
