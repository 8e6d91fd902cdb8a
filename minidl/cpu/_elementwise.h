/* Loops of relu, its backward pass, add and concat. */
#ifndef MINIDL_ELEMENTWISE_H
#define MINIDL_ELEMENTWISE_H

#include <string.h>

#include "_simd.h"

MINIDL_CLONES
static void minidl_relu(const float *RESTRICT x, float *RESTRICT y, ptrdiff_t n)
{
    /* Written so that NaN stays NaN. */
    for (ptrdiff_t i = 0; i < n; i++) y[i] = x[i] < 0.0f ? 0.0f : x[i];
}

MINIDL_CLONES
static void minidl_relu_backward(
    const float *RESTRICT dy, const float *RESTRICT y, const float *RESTRICT add, float *RESTRICT dx, ptrdiff_t n)
{
    /* Both sides of the choice are loaded before it, so that it becomes a select and not a branch. */
    if (add)
        for (ptrdiff_t i = 0; i < n; i++) {
            const float g = dy[i];
            dx[i] = (y[i] > 0.0f ? g : 0.0f) + add[i];
        }
    else
        for (ptrdiff_t i = 0; i < n; i++) {
            const float g = dy[i];
            dx[i] = y[i] > 0.0f ? g : 0.0f;
        }
}

MINIDL_CLONES
static void minidl_add(const float *RESTRICT a, const float *RESTRICT b, float *RESTRICT y, ptrdiff_t n)
{
    for (ptrdiff_t i = 0; i < n; i++) y[i] = a[i] + b[i];
}

/* Rows of `width` bytes from one pitch (in bytes) to another. */
static void minidl_copy_rows(
    const char *x, ptrdiff_t x_pitch, char *y, ptrdiff_t y_pitch, ptrdiff_t rows, ptrdiff_t width)
{
    for (ptrdiff_t r = 0; r < rows; r++) memcpy(y + r * y_pitch, x + r * x_pitch, (size_t)width);
}

#endif
