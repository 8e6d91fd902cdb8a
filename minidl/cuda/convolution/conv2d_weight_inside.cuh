// Which pixels of a stage of conv2d_weight_hopper.cu have their tap in an image, where x is normalised: a part of that
// file, included where its structures are known. One warp finds it for all that multiply; each by itself took 45
// instructions for it of the 194 of a stage. (The warp that copies is too slow for both: of 3x3 with a stride of two on
// 128 channels at 56x56 pixels 122 us on an H200, 99 so.)
#pragma once

// A warp: of each stage, and each of its blocks of columns, a bit for each pixel, in byte q of two words those that
// lanes of place q among four multiply. Bit 8 * q + j is that of pixel j / 2 * 8 + 2 * q + j % 2, and of the one 32
// further.
DEVICE void tell_inside(const Layout& at, const Problem& p, const Work& work, Ring<STAGES>& ring) {
    const int lane = threadIdx.x % 32;
    int pixel = work.first * SPAN + lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2;
    Pixels pixels[] = {{p, pixel}, {p, pixel + SPAN / 2}};
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
                bool inside = pixel + j * (SPAN / 2) < p.pixels;
                if constexpr (!FLAT)
                    inside &= u32(y + offset_h[i]) < u32(p.height) && u32(x + offset_w[i]) < u32(p.width);
                found[i][j] = __ballot_sync(0xffffffffu, inside);
            }
            if constexpr (!FLAT) pixels[j].advance(p);
        }
        pixel += SPAN;
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
