/* Row loops of batch normalization over float32 rows of channels, pitch in floats from row to row.
 *
 * Sums run over chunks of rows in float32, eight rows at a time, and over chunks in float64. The statistics of a chunk
 * are taken in two passes (the second one reads from cache), those of chunks are merged pairwise:
 * T. F. Chan, G. H. Golub, R. J. LeVeque, "Algorithms for computing the sample variance", The American Statistician 37
 * (1983) 242-247.
 */
#ifndef MINIDL_BATCH_NORM_H
#define MINIDL_BATCH_NORM_H

#include <math.h>

#include "_simd.h"

enum { BLOCK = 256 /* channels whose running sums live on the stack */ };

/* Merge (count_b, mean_b, m2_b) into (count_a, mean_a, m2_a), n channels. */
static void minidl_merge_moments(
    double *RESTRICT mean_a, double *RESTRICT m2_a, double count_a, const double *mean_b, const double *m2_b,
    double count_b, ptrdiff_t n)
{
    if (count_b == 0.0) return;
    const double weight = count_b / (count_a + count_b);
    for (ptrdiff_t c = 0; c < n; c++) {
        const double delta = mean_b[c] - mean_a[c];
        mean_a[c] += delta * weight;
        m2_a[c] += m2_b[c] + delta * delta * (count_a * weight);
    }
}

/* Mean and sum of squared deviations of one chunk, n <= BLOCK channels. The first pass finds the mean to float32
 * accuracy; the second takes deviations from it, whose own small sum then corrects both results. */
MINIDL_INLINE void chunk_moments(
    const float *RESTRICT x, ptrdiff_t pitch, ptrdiff_t rows, ptrdiff_t n, double *RESTRICT mean, double *RESTRICT m2)
{
    float center[BLOCK], s1[BLOCK], s2[BLOCK];
    ptrdiff_t r = 0;
    for (ptrdiff_t c = 0; c < n; c++) center[c] = s1[c] = s2[c] = 0.0f;
    for (; r + 8 <= rows; r += 8) {
        const float *RESTRICT p = x + r * pitch;
        for (ptrdiff_t c = 0; c < n; c++)
            center[c] += ((p[c] + p[c + pitch]) + (p[c + 2 * pitch] + p[c + 3 * pitch])) +
                         ((p[c + 4 * pitch] + p[c + 5 * pitch]) + (p[c + 6 * pitch] + p[c + 7 * pitch]));
    }
    for (; r < rows; r++)
        for (ptrdiff_t c = 0; c < n; c++) center[c] += x[r * pitch + c];
    for (ptrdiff_t c = 0; c < n; c++) center[c] /= (float)rows;

    for (r = 0; r + 8 <= rows; r += 8) {
        const float *RESTRICT p = x + r * pitch;
        for (ptrdiff_t c = 0; c < n; c++) {
            const float m = center[c];
            const float d0 = p[c] - m, d1 = p[c + pitch] - m, d2 = p[c + 2 * pitch] - m, d3 = p[c + 3 * pitch] - m;
            const float d4 = p[c + 4 * pitch] - m, d5 = p[c + 5 * pitch] - m, d6 = p[c + 6 * pitch] - m,
                        d7 = p[c + 7 * pitch] - m;
            s1[c] += ((d0 + d1) + (d2 + d3)) + ((d4 + d5) + (d6 + d7));
            s2[c] += ((d0 * d0 + d1 * d1) + (d2 * d2 + d3 * d3)) + ((d4 * d4 + d5 * d5) + (d6 * d6 + d7 * d7));
        }
    }
    for (; r < rows; r++)
        for (ptrdiff_t c = 0; c < n; c++) {
            const float d = x[r * pitch + c] - center[c];
            s1[c] += d;
            s2[c] += d * d;
        }
    for (ptrdiff_t c = 0; c < n; c++) {
        const double shift = (double)s1[c] / (double)rows;
        mean[c] = (double)center[c] + shift;
        m2[c] = fmax((double)s2[c] - shift * (double)s1[c], 0.0);
    }
}

/* Statistics of a span of rows >= 1: stats = [count, mean[channels], m2[channels]], its chunks merged in order. */
MINIDL_CLONES
static void minidl_batch_norm_stats(
    const float *x, ptrdiff_t pitch, ptrdiff_t rows, ptrdiff_t channels, ptrdiff_t chunk_rows, double *stats)
{
    double mean[BLOCK], m2[BLOCK];
    stats[0] = (double)rows;
    for (ptrdiff_t c = 0; c < channels; c += BLOCK) {
        const ptrdiff_t n = channels - c < BLOCK ? channels - c : BLOCK;
        double *total_mean = stats + 1 + c, *total_m2 = stats + 1 + channels + c;
        for (ptrdiff_t i = 0; i < n; i++) total_mean[i] = total_m2[i] = 0.0;
        for (ptrdiff_t r = 0; r < rows; r += chunk_rows) {
            const ptrdiff_t count = rows - r < chunk_rows ? rows - r : chunk_rows;
            chunk_moments(x + r * pitch + c, pitch, count, n, mean, m2);
            minidl_merge_moments(total_mean, total_m2, (double)r, mean, m2, (double)count, n);
        }
    }
}

/* Sums of a span of rows: sums = [sum dy, sum dy * (x - mean)], each of channels. */
MINIDL_CLONES
static void minidl_batch_norm_backward_stats(
    const float *dy, ptrdiff_t dy_pitch, const float *x, ptrdiff_t x_pitch, const float *mean, ptrdiff_t rows,
    ptrdiff_t channels, ptrdiff_t chunk_rows, double *RESTRICT sums)
{
    float s1[BLOCK], s2[BLOCK];
    for (ptrdiff_t c = 0; c < 2 * channels; c++) sums[c] = 0.0;
    for (ptrdiff_t block = 0; block < channels; block += BLOCK) {
        const ptrdiff_t n = channels - block < BLOCK ? channels - block : BLOCK;
        const float *RESTRICT m = mean + block;
        for (ptrdiff_t first = 0; first < rows; first += chunk_rows) {
            const ptrdiff_t end = rows - first < chunk_rows ? rows : first + chunk_rows;
            ptrdiff_t r = first;
            for (ptrdiff_t c = 0; c < n; c++) s1[c] = s2[c] = 0.0f;
            for (; r + 4 <= end; r += 4) {
                const float *RESTRICT g = dy + r * dy_pitch + block, *RESTRICT p = x + r * x_pitch + block;
                for (ptrdiff_t c = 0; c < n; c++) {
                    const float g0 = g[c], g1 = g[c + dy_pitch], g2 = g[c + 2 * dy_pitch], g3 = g[c + 3 * dy_pitch];
                    s1[c] += (g0 + g1) + (g2 + g3);
                    s2[c] += (g0 * (p[c] - m[c]) + g1 * (p[c + x_pitch] - m[c])) +
                             (g2 * (p[c + 2 * x_pitch] - m[c]) + g3 * (p[c + 3 * x_pitch] - m[c]));
                }
            }
            for (; r < end; r++)
                for (ptrdiff_t c = 0; c < n; c++) {
                    const float g = dy[r * dy_pitch + block + c];
                    s1[c] += g;
                    s2[c] += g * (x[r * x_pitch + block + c] - m[c]);
                }
            for (ptrdiff_t c = 0; c < n; c++) {
                sums[block + c] += (double)s1[c];
                sums[channels + block + c] += (double)s2[c];
            }
        }
    }
}

MINIDL_INLINE void apply_rows(
    const float *x, ptrdiff_t x_pitch, const float *add, ptrdiff_t add_pitch, float *y, ptrdiff_t rows, ptrdiff_t width,
    const float *RESTRICT center, const float *RESTRICT scale, const float *RESTRICT shift, int has_add, int relu)
{
    for (ptrdiff_t r = 0; r < rows; r++) {
        const float *RESTRICT p = x + r * x_pitch, *RESTRICT a = has_add ? add + r * add_pitch : add;
        float *RESTRICT q = y + r * width;
        for (ptrdiff_t c = 0; c < width; c++) {
            float v = (p[c] - center[c]) * scale[c] + shift[c];
            if (has_add) v += a[c];
            if (relu) v = v < 0.0f ? 0.0f : v; /* NaN stays NaN */
            q[c] = v;
        }
    }
}

/* y = (x - center) * scale + shift (+ add) (relu), y dense; add may be NULL. */
MINIDL_CLONES
static void minidl_batch_norm_apply(
    const float *x, ptrdiff_t x_pitch, const float *add, ptrdiff_t add_pitch, float *y, ptrdiff_t rows, ptrdiff_t width,
    const float *center, const float *scale, const float *shift, int relu)
{
    if (add && relu) apply_rows(x, x_pitch, add, add_pitch, y, rows, width, center, scale, shift, 1, 1);
    else if (add) apply_rows(x, x_pitch, add, add_pitch, y, rows, width, center, scale, shift, 1, 0);
    else if (relu) apply_rows(x, x_pitch, NULL, 0, y, rows, width, center, scale, shift, 0, 1);
    else apply_rows(x, x_pitch, NULL, 0, y, rows, width, center, scale, shift, 0, 0);
}

MINIDL_INLINE void backward_rows(
    const float *dy, ptrdiff_t dy_pitch, const float *x, ptrdiff_t x_pitch, const float *add, ptrdiff_t add_pitch,
    float *dx, ptrdiff_t rows, ptrdiff_t width, const float *RESTRICT center, const float *RESTRICT scale,
    const float *RESTRICT shift, const float *RESTRICT slope, int has_add, int training)
{
    for (ptrdiff_t r = 0; r < rows; r++) {
        const float *RESTRICT g = dy + r * dy_pitch, *RESTRICT p = training ? x + r * x_pitch : x;
        const float *RESTRICT a = has_add ? add + r * add_pitch : add;
        float *RESTRICT q = dx + r * width;
        for (ptrdiff_t c = 0; c < width; c++) {
            float v = g[c];
            if (training) v = (v - shift[c]) - (p[c] - center[c]) * slope[c];
            v *= scale[c];
            q[c] = has_add ? v + a[c] : v;
        }
    }
}

/* dx = scale * (dy - shift - (x - center) * slope) (+ add), dx dense; with x NULL dx = scale * dy (+ add). */
MINIDL_CLONES
static void minidl_batch_norm_backward_apply(
    const float *dy, ptrdiff_t dy_pitch, const float *x, ptrdiff_t x_pitch, const float *add, ptrdiff_t add_pitch,
    float *dx, ptrdiff_t rows, ptrdiff_t width, const float *center, const float *scale, const float *shift,
    const float *slope)
{
#define MINIDL_ROWS(has_add, training)                                                                         \
    backward_rows(dy, dy_pitch, x, x_pitch, add, add_pitch, dx, rows, width, center, scale, shift, slope, has_add, \
                  training)
    if (add && x) MINIDL_ROWS(1, 1);
    else if (add) MINIDL_ROWS(1, 0);
    else if (x) MINIDL_ROWS(0, 1);
    else MINIDL_ROWS(0, 0);
#undef MINIDL_ROWS
}

#endif
