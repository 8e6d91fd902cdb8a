// How conv2d_weight_hopper.cu normalises x, in registers; a part of it, which knows its structures.
//
// Products are turned over, channels times filters: a thread has the same two channels of each block for all pixels, and
// keeps what they need. Nothing is read besides, and two values take five instructions (conv2d_input.cuh), six where masked
// at an image's border, in each warpgroup that has their columns: on an H200 5 to 17 % of the time where a warpgroup has
// 256 filters, a third more where it has 128. The sums are turned back at the end. Three warpgroups share tiles of 192
// columns: 1152 columns, 3x3 on 128 channels, are six of these but four and a half of 256 (with a stride of two 113 us
// beside 84 of the kernel that finds its input ready).
// Tried before: three warps that are otherwise idle, in shared memory; 1x1 filters then took up to 70 % longer, 3x3 with a
// stride of two 30 to 80 %. Two blocks of 128x128 on a multiprocessor have no registers for operands beside a product that
// runs, and are slower than one of 128x256.
#pragma once
#include "conv2d_input.cuh"

constexpr int BLOCKS = COLUMNS / 64;  // products along the columns
using Sum = float[BLOCKS][ROWS / 2];

// Which pixels of a stage have their tap in an image, pairs of them: where bit 7 of byte k of even[h] and of odd[h] says
// it of pixels 16 k + 8 h + 2 q and the next, q this lane's place among four.
struct Inside {
    u32 even[2], odd[2];

    // at: pixels 2 * lane and 2 * lane + 1, which are `first` and the next.
    __device__ __forceinline__ void find(const Problem& p, const Pixels (&at)[2], const Columns& columns, int first) {
        u32 found[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            bool inside = first + i < p.pixels;
            if constexpr (!FLAT)
                inside &= u32(at[i].y * p.stride_h + columns.tap_h * p.dilation_h - p.padding_h) < u32(p.height) &&
                          u32(at[i].x * p.stride_w + columns.tap_w * p.dilation_w - p.padding_w) < u32(p.width);
            found[i] = __ballot_sync(0xffffffffu, inside);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const u32 shift = 7 - 4 * h - threadIdx.x % 4;
            even[h] = found[0] << shift, odd[h] = found[1] << shift;
        }
    }

    // Ones for those of a pair that are.
    __device__ __forceinline__ u32 mask(int k, int h) const {
        u32 pair;
        asm("prmt.b32 %0, %1, %2, %3;" : "=r"(pair) : "r"(even[h]), "r"(odd[h]), "r"(0xcc88 + 0x1111 * k));
        return pair;
    }
};

// Products that are started together, and such groups that run while the next one's operands are made, as registers allow.
constexpr int GROUP = SHIFT ? 2 : 1, GROUPS = SPAN / 16 * BLOCKS / GROUP, AHEAD = 1;

// A warpgroup: sums up its part of the tile, from row and column on, turned over: channels, which it normalises, times
// filters. A thread has two channels of each block for all pixels.
DEVICE void accumulate(Sum& sum, const Layout& at, const Problem& p, const Work& work, const Norm& norm, Ring<STAGES>& ring,
                       int row, int column) {
    const u32 thread = thread_again(), lane = thread % 32, warp = thread / 32;
    Affine affine[BLOCKS][2];
    Columns columns[BLOCKS];
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
        columns[i] = Columns(p, work.block + column / 64 + i);
        const int channel = columns[i].channel + warp * 16 + lane / 4;
        affine[i][0] = Affine(norm, channel), affine[i][1] = Affine(norm, channel + 8);
    }
    int pixel = work.first * SPAN + int(lane) * 2;
    Pixels pixels[] = {{p, pixel}, {p, pixel + 1}};
    Inside inside[BLOCKS];
    // A lane's row of the four matrices of 16 pixels: these and the next 8 channels, then both of the next 8 pixels.
    const u32 from = (ROW_BLOCKS + column / 64) * BLOCK_BYTES + (lane / 16 * 8 + lane % 8) * 128 +
                     ((warp * 2 + lane / 8 % 2) ^ lane % 8) * 16;
    u32 before = 0;
    for (int step = work.first; step < work.last; ++step) {
        const u32 stage = at.stage(ring.index);
        const u64 gradients = operand(stage + row / 64 * BLOCK_BYTES, BLOCK_BYTES);
        if constexpr (BORDER) {
#pragma unroll
            for (int i = 0; i < BLOCKS; ++i) inside[i].find(p, pixels, columns[i], pixel);
            if constexpr (!FLAT) pixels[0].advance(p), pixels[1].advance(p);
            pixel += SPAN;
        }
        barrier_wait(at.filled(ring.index), ring.parity);
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
            if (g == AHEAD && lane == 0 && step > work.first) barrier_arrive(before);
#pragma unroll
            for (int n = 0; n < GROUP; ++n) {
                const int k = (g * GROUP + n) / BLOCKS, i = (g * GROUP + n) % BLOCKS;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    words[n][j] = affine[i][j % 2](raw[n][j]);
                    if constexpr (BORDER) words[n][j] &= inside[i].mask(k, j / 2);
                }
            }
            product_fence();
#pragma unroll
            for (int n = 0; n < GROUP; ++n) {
                const int k = (g * GROUP + n) / BLOCKS, i = (g * GROUP + n) % BLOCKS;
                multiply<true>(sum[i], words[n], gradients + operand_step(k * 2048), k ? 1 : step - work.first);
            }
            commit_products();
        }
        before = at.emptied(ring.index);
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
