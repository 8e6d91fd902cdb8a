// Where a convolution with a filter in Compressed Sparse Blocks finds its operand, in any of its passes.
#pragma once
#include "common.cuh"

// The pixels of an image that the taps of a convolution meet. Samples are the places of a grid, image after image, row
// after row; at place a of an axis tap r meets pixel (a * multiply + start + r * step) / divide, if that is a whole
// number and in the image, else zeros.
struct Axis {
    int size, grid, taps, multiply, start, step, divide;

    // -1: none.
    __device__ __forceinline__ int pixel(int place, int tap) const {
        const int at = place * multiply + start + tap * step, found = at / divide;
        return at >= 0 && found < size && found * divide == at ? found : -1;
    }
};

struct Window {
    Axis down, across;
    int channels;  // of a pixel
    int room;      // block columns of a tap, or summed features of one

    // The pixel, counted over all images; -1: none.
    __device__ __forceinline__ i64 pixel(u32 sample, int tap) const {
        const u32 line = sample / across.grid, image = line / down.grid;
        const int h = down.pixel(line - image * down.grid, tap / across.taps);
        const int w = across.pixel(sample - line * across.grid, tap % across.taps);
        return h < 0 || w < 0 ? -1 : (i64(image) * down.size + h) * across.size + w;
    }
};
