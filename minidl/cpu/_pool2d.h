/* Loops of pooling. Arrays are float32 NHWC, dense but for x, whose pixels lie `pitch` floats apart.
 *
 * Each function makes a part of its result that no other call touches, in a fixed order: one row of an output or of the
 * gradient of a mean, or some channels of one sample of the gradient of a maximum.
 */
#ifndef MINIDL_POOL2D_H
#define MINIDL_POOL2D_H

#include <math.h>

#include "_simd.h"

enum { BLOCK = 64 /* channels whose running maximum or sum lives on the stack */ };

/* One axis of a max-pooling window. */
typedef struct {
    ptrdiff_t size, out, kernel, stride, padding, dilation;
} minidl_axis;

/* Output row p of one sample x. index is the row-major position in the window of the first maximum (of the last NaN, if
 * there is one), uint8, or uint16 if wide. A window that lies wholly in the padding gives -inf and index 0. */
MINIDL_CLONES
static void minidl_max_pool_row(
    const float *x, ptrdiff_t pitch, ptrdiff_t channels, minidl_axis h, minidl_axis w, ptrdiff_t p, float *RESTRICT y,
    void *index, int wide)
{
    float best[BLOCK];
    int32_t where[BLOCK];
    for (ptrdiff_t q = 0; q < w.out; q++)
        for (ptrdiff_t block = 0; block < channels; block += BLOCK) {
            const ptrdiff_t n = channels - block < BLOCK ? channels - block : BLOCK;
            int empty = 1;
            for (ptrdiff_t c = 0; c < n; c++) {
                best[c] = -INFINITY;
                where[c] = 0;
            }
            for (ptrdiff_t r = 0; r < h.kernel; r++) {
                const ptrdiff_t i = p * h.stride - h.padding + r * h.dilation;
                if (i < 0 || i >= h.size) continue;
                for (ptrdiff_t s = 0; s < w.kernel; s++) {
                    const ptrdiff_t j = q * w.stride - w.padding + s * w.dilation;
                    if (j < 0 || j >= w.size) continue;
                    const float *RESTRICT pixel = x + (i * w.size + j) * pitch + block;
                    const int32_t position = (int32_t)(r * w.kernel + s);
                    if (empty)
                        for (ptrdiff_t c = 0; c < n; c++) {
                            best[c] = pixel[c];
                            where[c] = position;
                        }
                    else
                        for (ptrdiff_t c = 0; c < n; c++) {
                            const float v = pixel[c], old = best[c];
                            const int32_t was = where[c];
                            const int larger = (v > old) | (v != v);
                            best[c] = larger ? v : old;
                            where[c] = larger ? position : was;
                        }
                    empty = 0;
                }
            }
            const ptrdiff_t at = q * channels + block;
            for (ptrdiff_t c = 0; c < n; c++) y[at + c] = best[c];
            if (wide)
                for (ptrdiff_t c = 0; c < n; c++) ((uint16_t *)index)[at + c] = (uint16_t)where[c];
            else
                for (ptrdiff_t c = 0; c < n; c++) ((uint8_t *)index)[at + c] = (uint8_t)where[c];
        }
}

MINIDL_INLINE ptrdiff_t position_at(const void *index, ptrdiff_t at, int wide)
{
    return wide ? ((const uint16_t *)index)[at] : ((const uint8_t *)index)[at];
}

/* Whether the whole window at output position p lies within the input. */
MINIDL_INLINE int is_inside(minidl_axis a, ptrdiff_t p)
{
    const ptrdiff_t first = p * a.stride - a.padding;
    return first >= 0 && first + (a.kernel - 1) * a.dilation < a.size;
}

MINIDL_INLINE void scatter_sample(
    const float *RESTRICT dy, const void *index, int wide, ptrdiff_t channels, ptrdiff_t first, ptrdiff_t last,
    minidl_axis h, minidl_axis w, const ptrdiff_t *RESTRICT offset, float *RESTRICT dx)
{
    for (ptrdiff_t i = 0; i < h.size * w.size; i++)
        for (ptrdiff_t c = first; c < last; c++) dx[i * channels + c] = 0.0f;
    for (ptrdiff_t p = 0; p < h.out; p++)
        for (ptrdiff_t q = 0; q < w.out; q++) {
            const ptrdiff_t at = (p * w.out + q) * channels;
            const ptrdiff_t i = p * h.stride - h.padding, j = q * w.stride - w.padding;
            const ptrdiff_t corner = (i * w.size + j) * channels;
            if (is_inside(h, p) && is_inside(w, q)) {
                for (ptrdiff_t c = first; c < last; c++)
                    dx[corner + offset[position_at(index, at + c, wide)] + c] += dy[at + c];
                continue;
            }
            for (ptrdiff_t c = first; c < last; c++) {
                const ptrdiff_t position = position_at(index, at + c, wide);
                const ptrdiff_t row = i + position / w.kernel * h.dilation;
                const ptrdiff_t column = j + position % w.kernel * w.dilation;
                if (row >= 0 && row < h.size && column >= 0 && column < w.size)
                    dx[corner + offset[position] + c] += dy[at + c];
            }
        }
}

/* Channels first .. last of one sample: each dy is added to dx where its maximum was, windows in row order. offset[k]
 * is the distance in dx from the corner of a window to its position k. */
static void minidl_max_pool_backward(
    const float *dy, const void *index, int wide, ptrdiff_t channels, ptrdiff_t first, ptrdiff_t last, minidl_axis h,
    minidl_axis w, const ptrdiff_t *offset, float *dx)
{
    if (wide) scatter_sample(dy, index, 1, channels, first, last, h, w, offset, dx);
    else scatter_sample(dy, index, 0, channels, first, last, h, w, offset, dx);
}

/* Means over the windows rows [top, bottom), columns [left[q], right[q]) of one sample x;
 * height_divisor * columns[q] divides the sum. */
MINIDL_CLONES
static void minidl_mean_row(
    const float *x, ptrdiff_t pitch, ptrdiff_t channels, ptrdiff_t width, ptrdiff_t top, ptrdiff_t bottom,
    const ptrdiff_t *left, const ptrdiff_t *right, const ptrdiff_t *columns, ptrdiff_t height_divisor, ptrdiff_t out,
    float *RESTRICT y)
{
    float total[BLOCK], line[BLOCK];
    for (ptrdiff_t q = 0; q < out; q++) {
        const float divisor = (float)(height_divisor * columns[q]);
        for (ptrdiff_t block = 0; block < channels; block += BLOCK) {
            const ptrdiff_t n = channels - block < BLOCK ? channels - block : BLOCK;
            for (ptrdiff_t c = 0; c < n; c++) total[c] = 0.0f;
            for (ptrdiff_t i = top; i < bottom; i++) {
                /* Line by line, so that rounding errors of large windows grow slowly. */
                for (ptrdiff_t c = 0; c < n; c++) line[c] = 0.0f;
                for (ptrdiff_t j = left[q]; j < right[q]; j++) {
                    const float *RESTRICT pixel = x + (i * width + j) * pitch + block;
                    for (ptrdiff_t c = 0; c < n; c++) line[c] += pixel[c];
                }
                for (ptrdiff_t c = 0; c < n; c++) total[c] += line[c];
            }
            for (ptrdiff_t c = 0; c < n; c++) y[q * channels + block + c] = total[c] / divisor;
        }
    }
}

/* Input row dx (W, C): the shares of all windows whose rows [top[p], bottom[p]) hold row i; dy (P, Q, C). */
MINIDL_CLONES
static void minidl_mean_backward_row(
    const float *dy, ptrdiff_t channels, ptrdiff_t width, ptrdiff_t i, const ptrdiff_t *top, const ptrdiff_t *bottom,
    const ptrdiff_t *lines, ptrdiff_t out_height, const ptrdiff_t *left, const ptrdiff_t *right,
    const ptrdiff_t *columns, ptrdiff_t out_width, float *dx)
{
    for (ptrdiff_t c = 0; c < width * channels; c++) dx[c] = 0.0f;
    for (ptrdiff_t p = 0; p < out_height; p++) {
        if (i < top[p] || i >= bottom[p]) continue;
        for (ptrdiff_t q = 0; q < out_width; q++) {
            const float *RESTRICT g = dy + (p * out_width + q) * channels;
            const float divisor = (float)(lines[p] * columns[q]);
            for (ptrdiff_t j = left[q]; j < right[q]; j++) {
                float *RESTRICT pixel = dx + j * channels;
                for (ptrdiff_t c = 0; c < channels; c++) pixel[c] += g[c] / divisor;
            }
        }
    }
}

#endif
