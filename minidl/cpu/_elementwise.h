/* Loops of add, mul and concat. */
#ifndef MINIDL_ELEMENTWISE_H
#define MINIDL_ELEMENTWISE_H

#include <string.h>

#include "_simd.h"

MINIDL_CLONES
static void minidl_add(const float *RESTRICT a, const float *RESTRICT b, float *RESTRICT y, ptrdiff_t n)
{
    for (ptrdiff_t i = 0; i < n; i++) y[i] = a[i] + b[i];
}

MINIDL_CLONES
static void minidl_mul(const float *RESTRICT a, const float *RESTRICT b, float *RESTRICT y, ptrdiff_t n)
{
    for (ptrdiff_t i = 0; i < n; i++) y[i] = a[i] * b[i];
}

/* Rows of `width` bytes from one pitch (in bytes) to another. */
static void minidl_copy_rows(
    const char *x, ptrdiff_t x_pitch, char *y, ptrdiff_t y_pitch, ptrdiff_t rows, ptrdiff_t width)
{
    for (ptrdiff_t r = 0; r < rows; r++) memcpy(y + r * y_pitch, x + r * x_pitch, (size_t)width);
}

#endif
