// Image rows of few channels as wgmma reads them: lines, in which windows lie one over the other. For conv2d_stem_lines.cu and
// conv2d_stem_weight.cu, on sm_90a.
//
// A line has pixels of WIDE channels, zeros behind those there are, so that windows of neighbouring output pixels begin 16
// bytes apart. Eight values of eight such windows are then 128 bytes one after the other, which is what wgmma calls a core
// matrix when nothing is swizzled; the next eight values begin 16 bytes further and the next eight windows 128. A matrix of
// all windows is so read from lines that hold each pixel once.
//
// Macros besides those of stem.cuh: the includer's NEW, rows of the image that a step adds to a ring of RING lines; AGAIN: 1
// when all are wanted a second time, behind the ring, and CUT: 1 when there without the last pixels of each group that a
// window whose last group it is does not see.
#pragma once
#include "hopper.cuh"

constexpr int WIDE = GROUP / STRIDE_W;                        // channels of a pixel of a line
constexpr int ACROSS = (KERNEL_W + STRIDE_W - 1) / STRIDE_W;  // groups of a window
constexpr int SEEN = KERNEL_W % STRIDE_W;                     // pixels of its last group, or 0: all
static_assert(GROUP % STRIDE_W == 0 && CHANNELS <= WIDE);

constexpr int LENGTH = row_length((ACROSS * STEP + GROUP - 1) / GROUP);
constexpr int LINE = TILE_Q - 1 + ACROSS;  // groups of a line that are read by its windows
constexpr int ROWS_BYTES = NEW * LENGTH * 2;
constexpr int ROW_BYTES = (WINDOWS - 1 + ACROSS) * 16;  // of a line of which WINDOWS are read
constexpr int RING_BYTES = RING * ROW_BYTES;

// Rewrites NEW rows of LENGTH values, whose first window begins at `shift`, as lines, from row `slot` of the ring on.
DEVICE void rewrite(unsigned char* ring, const unsigned char* rows, int slot, int shift) {
    constexpr int EACH = (NEW * LINE + THREADS - 1) / THREADS;
#pragma unroll
    for (int u = 0; u < EACH; ++u) {
        const int i = threadIdx.x + u * THREADS;
        if (i >= NEW * LINE) break;
        const int row = i / LINE, group = i % LINE, place = slot + row < RING ? slot + row : slot + row - RING;
        const u16* const from = reinterpret_cast<const u16*>(rows) + row * LENGTH + shift + group * STEP;
        u32 word[4] = {};
#pragma unroll
        for (int e = 0; e < STEP; ++e) {
            const int value = e / CHANNELS * WIDE + e % CHANNELS;
            word[value / 2] |= u32(from[e]) << (value % 2 * 16);
        }
        uint4* const to = reinterpret_cast<uint4*>(ring + place * ROW_BYTES + group * 16);
        *to = make_uint4(word[0], word[1], word[2], word[3]);
        if (AGAIN) {
#pragma unroll
            for (int k = 0; k < 4; ++k)
                if (CUT && k * 2 >= SEEN * WIDE) word[k] = 0;
            to[RING_BYTES / 16] = make_uint4(word[0], word[1], word[2], word[3]);
        }
    }
    fence_for_engine();
}
