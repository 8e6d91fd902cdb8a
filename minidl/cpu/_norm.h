/* Loops of group norm, layer norm and softmax over float32 rows of channels. */
#ifndef MINIDL_NORM_H
#define MINIDL_NORM_H

#include <math.h>

#include "_exp.h"

enum { LANES = 16 /* partial results of a row, so that its sums vectorise; their order is fixed */ };

/* ---- sums over the rows of a chunk, per channel: first[c] and second[c] are overwritten */

/* Sums of x - pivot and of its square; in double, as a pivot may lie far from the other values. */
MINIDL_CLONES
static void minidl_moment_sums(
    const float *RESTRICT x, ptrdiff_t pitch, const float *RESTRICT pivot, ptrdiff_t rows, ptrdiff_t channels,
    double *RESTRICT first, double *RESTRICT second)
{
    for (ptrdiff_t c = 0; c < channels; c++) first[c] = second[c] = 0.0;
    for (ptrdiff_t r = 0; r < rows; r++)
        for (ptrdiff_t c = 0; c < channels; c++) {
            const double d = (double) x[r * pitch + c] - (double)pivot[c];
            first[c] += d;
            second[c] += d * d;
        }
}

/* Sums of dy and of dy * (x - mean[c]). */
MINIDL_CLONES
static void minidl_product_sums(
    const float *RESTRICT dy, ptrdiff_t dy_pitch, const float *RESTRICT x, ptrdiff_t x_pitch,
    const float *RESTRICT mean, ptrdiff_t rows, ptrdiff_t channels, float *RESTRICT first, float *RESTRICT second)
{
    for (ptrdiff_t c = 0; c < channels; c++) first[c] = second[c] = 0.0f;
    for (ptrdiff_t r = 0; r < rows; r++)
        for (ptrdiff_t c = 0; c < channels; c++) {
            const float g = dy[r * dy_pitch + c];
            first[c] += g;
            second[c] += g * (x[r * x_pitch + c] - mean[c]);
        }
}

/* Sums of dy and of dy * (x - mean[r]) * rstd[r]. */
MINIDL_CLONES
static void minidl_row_product_sums(
    const float *RESTRICT dy, ptrdiff_t dy_pitch, const float *RESTRICT x, ptrdiff_t x_pitch,
    const float *RESTRICT mean, const float *RESTRICT rstd, ptrdiff_t rows, ptrdiff_t channels,
    float *RESTRICT first, float *RESTRICT second)
{
    for (ptrdiff_t c = 0; c < channels; c++) first[c] = second[c] = 0.0f;
    for (ptrdiff_t r = 0; r < rows; r++)
        for (ptrdiff_t c = 0; c < channels; c++) {
            const float g = dy[r * dy_pitch + c];
            first[c] += g;
            second[c] += g * ((x[r * x_pitch + c] - mean[r]) * rstd[r]);
        }
}

/* ---- elementwise over rows, with values per channel */

/* y = (x - mean) * scale + shift */
MINIDL_CLONES
static void minidl_affine_rows(
    const float *RESTRICT x, ptrdiff_t pitch, const float *RESTRICT mean, const float *RESTRICT scale,
    const float *RESTRICT shift, ptrdiff_t rows, ptrdiff_t channels, float *RESTRICT y)
{
    for (ptrdiff_t r = 0; r < rows; r++)
        for (ptrdiff_t c = 0; c < channels; c++)
            y[r * channels + c] = (x[r * pitch + c] - mean[c]) * scale[c] + shift[c];
}

/* dx = dy * slope - first - (x - mean) * second (+ add) */
MINIDL_CLONES
static void minidl_norm_backward_rows(
    const float *RESTRICT dy, ptrdiff_t dy_pitch, const float *RESTRICT x, ptrdiff_t x_pitch,
    const float *RESTRICT mean, const float *RESTRICT slope, const float *RESTRICT first,
    const float *RESTRICT second, const float *RESTRICT add, ptrdiff_t add_pitch, ptrdiff_t rows, ptrdiff_t channels,
    float *RESTRICT dx)
{
    for (ptrdiff_t r = 0; r < rows; r++)
        for (ptrdiff_t c = 0; c < channels; c++) {
            const float d =
                dy[r * dy_pitch + c] * slope[c] - first[c] - (x[r * x_pitch + c] - mean[c]) * second[c];
            dx[r * channels + c] = add ? d + add[r * add_pitch + c] : d;
        }
}

/* ---- a row by itself */

/* `total` of an expression in i over a row, in LANES partial sums of double: rows may be long. */
#define MINIDL_ROW_SUM(total, channels, expression)                                   \
    do {                                                                              \
        double part[LANES] = {0.0};                                                    \
        ptrdiff_t i_ = 0;                                                             \
        for (; i_ + LANES <= (channels); i_ += LANES)                                 \
            for (int lane = 0; lane < LANES; lane++) {                                \
                const ptrdiff_t i = i_ + lane;                                        \
                part[lane] += (expression);                                           \
            }                                                                         \
        for (; i_ < (channels); i_++) {                                               \
            const ptrdiff_t i = i_;                                                   \
            part[i_ % LANES] += (expression);                                         \
        }                                                                             \
        for (int lane = 1; lane < LANES; lane++) part[0] += part[lane];                \
        total = (float)part[0];                                                       \
    } while (0)

MINIDL_CLONES
static void minidl_softmax_row(const float *RESTRICT x, float *RESTRICT y, ptrdiff_t channels)
{
    float peak = -INFINITY, total;
    for (ptrdiff_t c = 0; c < channels; c++) peak = x[c] > peak ? x[c] : peak;
    for (ptrdiff_t c = 0; c < channels; c++) y[c] = minidl_exp(x[c] - peak);
    MINIDL_ROW_SUM(total, channels, y[i]);
    const float inverse = 1.0f / total;
    for (ptrdiff_t c = 0; c < channels; c++) y[c] *= inverse;
}

MINIDL_CLONES
static void minidl_softmax_backward_row(
    const float *RESTRICT dy, const float *RESTRICT y, float *RESTRICT dx, ptrdiff_t channels)
{
    float total;
    MINIDL_ROW_SUM(total, channels, dy[i] * y[i]);
    for (ptrdiff_t c = 0; c < channels; c++) dx[c] = y[c] * (dy[c] - total);
}

/* moments[0] = mean, *rstd = 1 / sqrt(variance + eps); gamma and beta may be NULL. */
MINIDL_CLONES
static void minidl_layer_norm_row(
    const float *RESTRICT x, const float *RESTRICT gamma, const float *RESTRICT beta, float eps, float *RESTRICT mean,
    float *RESTRICT rstd, float *RESTRICT y, ptrdiff_t channels)
{
    float total, square;
    const float pivot = x[0];
    MINIDL_ROW_SUM(total, channels, x[i] - pivot);
    const float m = pivot + total / (float)channels;
    MINIDL_ROW_SUM(square, channels, (x[i] - m) * (x[i] - m));
    const float s = 1.0f / sqrtf(square / (float)channels + eps);
    *mean = m;
    *rstd = s;
    for (ptrdiff_t c = 0; c < channels; c++)
        y[c] = (x[c] - m) * s * (gamma ? gamma[c] : 1.0f) + (beta ? beta[c] : 0.0f);
}

MINIDL_CLONES
static void minidl_layer_norm_backward_row(
    const float *RESTRICT dy, const float *RESTRICT x, const float *RESTRICT gamma, float mean, float rstd,
    const float *RESTRICT add, float *RESTRICT dx, ptrdiff_t channels)
{
    float first, second;
    MINIDL_ROW_SUM(first, channels, dy[i] * (gamma ? gamma[i] : 1.0f));
    MINIDL_ROW_SUM(second, channels, dy[i] * (gamma ? gamma[i] : 1.0f) * ((x[i] - mean) * rstd));
    first /= (float)channels;
    second /= (float)channels;
    for (ptrdiff_t c = 0; c < channels; c++) {
        const float d = (dy[c] * (gamma ? gamma[c] : 1.0f) - first - (x[c] - mean) * rstd * second) * rstd;
        dx[c] = add ? d + add[c] : d;
    }
}

#endif
