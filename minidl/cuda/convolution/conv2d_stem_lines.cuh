// Rows of the image as lines, which wgmma reads windows from as they lie there; sm_90a, 16-bit types.
//
// A line's pixels have WIDE channels, zeros behind those there are, so that windows of neighbouring output pixels begin
// 16 bytes apart, a group. Eight values of eight such windows are then 128 bytes one after the other, which is what wgmma
// calls a core matrix when nothing is swizzled; the next eight values begin 16 bytes further and the next eight windows
// 128: a matrix of all windows is read from lines that hold each pixel once.
#pragma once
#include "hopper.cuh"
#include "wgmma.cuh"

constexpr int WIDE = GROUP / STRIDE_W;                          // channels of a pixel of a line
constexpr int ACROSS = (KERNEL_W + STRIDE_W - 1) / STRIDE_W;    // groups of a window
static_assert(GROUP % STRIDE_W == 0 && CHANNELS <= WIDE);

constexpr int LENGTH = row_length((ACROSS * STEP + GROUP - 1) / GROUP);
constexpr int LINE = TILE_Q - 1 + ACROSS;                       // groups of a line that are read by its windows
constexpr int ROWS_BYTES = NEW * LENGTH * 2;

// A group of a line, of the values of a row from `from` on; the first PIXELS of it, and zeros behind.
template <int PIXELS = STRIDE_W>
DEVICE uint4 line_group(const u16* from) {
    u32 word[4] = {};
#pragma unroll
    for (int e = 0; e < PIXELS * CHANNELS; ++e) {
        const int value = e / CHANNELS * WIDE + e % CHANNELS;
        word[value / 2] |= u32(from[e]) << (value % 2 * 16);
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}
