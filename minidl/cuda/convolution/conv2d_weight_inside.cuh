// Which pixels of a stage of conv2d_weight_hopper.cu have their tap in an image, where x is normalised: a part of that
// file, included where its structures are known. The warp that fills finds it for all that multiply, of which each
// would take 45 instructions a stage, beside the 160 that it has for its products.
#pragma once

#if BORDER
// The filling warp: of each block of columns a bit for each pixel of a stage, in byte q of two words those that lanes of
// place q among four multiply. Bit 8 * q + j is that of pixel j / 2 * 8 + 2 * q + j % 2, and of the one 32 further.
struct Inside {
    int pixel;
    Pixels pixels[2];
    int offset_h[COLUMN_BLOCKS], offset_w[COLUMN_BLOCKS];
    u32 found[COLUMN_BLOCKS][2];

    __device__ __forceinline__ Inside() {}
    __device__ __forceinline__ Inside(const Problem& p, const Work& work) {
        const int lane = threadIdx.x % 32;
        pixel = work.first * SPAN + lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2;
        pixels[0] = Pixels(p, pixel), pixels[1] = Pixels(p, pixel + SPAN / 2);
#pragma unroll
        for (int i = 0; i < COLUMN_BLOCKS; ++i) {
            const Columns columns(p, work.block + i);
            offset_h[i] = columns.tap_h * p.dilation_h - p.padding_h;
            offset_w[i] = columns.tap_w * p.dilation_w - p.padding_w;
        }
    }

    // Of the next stage.
    __device__ __forceinline__ void find(const Problem& p) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
            for (int i = 0; i < COLUMN_BLOCKS; ++i) {
                bool inside = pixel + j * (SPAN / 2) < p.pixels;
                if constexpr (!FLAT)
                    inside &= u32(pixels[j].y * p.stride_h + offset_h[i]) < u32(p.height) &&
                              u32(pixels[j].x * p.stride_w + offset_w[i]) < u32(p.width);
                found[i][j] = __ballot_sync(0xffffffffu, inside);
            }
            if constexpr (!FLAT) pixels[j].advance(p);
        }
        pixel += SPAN;
    }

    __device__ __forceinline__ void store(const Layout& at, int stage) const {
#pragma unroll
        for (int i = 0; i < COLUMN_BLOCKS; ++i)
            store_shared(at.inside(stage, i), make_uint2(found[i][0], found[i][1]));
    }
};
#else
struct Inside {
    __device__ __forceinline__ Inside() {}
    __device__ __forceinline__ Inside(const Problem&, const Work&) {}
    __device__ __forceinline__ void find(const Problem&) {}
    __device__ __forceinline__ void store(const Layout&, int) const {}
};
#endif
