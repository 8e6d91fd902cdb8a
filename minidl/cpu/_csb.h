/* Products with a matrix A in Compressed Sparse Blocks (A. Buluç et al., "Parallel sparse matrix-vector and matrix-
 * transpose-vector multiplication using compressed sparse blocks", SPAA 2009): indptr (block rows * block columns + 1) in
 * block-row-major order; of each nonzero (row in block << 8 | column in block) and its value, row-major in a block.
 *
 * The dense operand is packed first, so that everything behind the packing is the same whichever way it lies in memory:
 *     packed[tile of LANES samples][feature][LANES]          zeros behind the last sample
 * A product runs a block at a time: its nonzeros grouped by output row (they lie so; for the transposed product a
 * counting sort by column brings them there), and for each tile of samples a row of outputs stays in registers while its
 * nonzeros pass. Every output is the sum of its nonzeros in the order of the summed index, even ones and odd ones of a
 * block apart: the bits depend neither on threads nor on how the samples are cut.
 */
#ifndef MINIDL_CSB_H
#define MINIDL_CSB_H

#include <string.h>

#include "_simd.h"

#define UNROLL _Pragma("GCC unroll 16")

typedef float csb_v8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef float csb_v16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int csb_i8 __attribute__((vector_size(32)));

enum { CSB_MOST_LANES = 32, CSB_MOST_SIDE = 256, CSB_DEPTH = 128 /* samples of a sampled product's tile */ };

typedef struct {
    const int32_t *indptr;
    const uint16_t *indices;
    const float *values;                  /* NULL for the sampled product */
    ptrdiff_t rows, columns, side;        /* of A; the side of a block, a power of two */
    ptrdiff_t block_rows, block_columns;
} CsbMatrix;

/* Nonzeros of a block grouped by output row: those of row r are first[r] .. first[r + 1]; the summed index is the low
 * byte of an item. `items` and `values` have room for the fullest block and serve the transposed product only. */
typedef struct {
    int32_t first[CSB_MOST_SIDE + 1];
    uint16_t *items;
    float *values;
    float *outputs; /* (tiles, side, lanes) */
} CsbScratch;

MINIDL_INLINE ptrdiff_t csb_least(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }

/* ---- packing ---- */

/* to[8 columns][lanes] = from[8 rows][pitch] transposed, 8 by 8 in registers. */
MINIDL_INLINE void csb_turn(const float *from, ptrdiff_t pitch, float *to, ptrdiff_t lanes)
{
    const csb_i8 low = {0, 8, 1, 9, 4, 12, 5, 13}, high = {2, 10, 3, 11, 6, 14, 7, 15};
    const csb_i8 left = {0, 1, 8, 9, 4, 5, 12, 13}, right = {2, 3, 10, 11, 6, 7, 14, 15};
    const csb_i8 front = {0, 1, 2, 3, 8, 9, 10, 11}, back = {4, 5, 6, 7, 12, 13, 14, 15};
    csb_v8 a[8], b[8];
    UNROLL for (int i = 0; i < 8; i++) a[i] = *(const csb_v8 *)(from + i * pitch);
    UNROLL for (int i = 0; i < 8; i += 2) {
        b[i] = __builtin_shuffle(a[i], a[i + 1], low);
        b[i + 1] = __builtin_shuffle(a[i], a[i + 1], high);
    }
    UNROLL for (int i = 0; i < 8; i += 4)
        UNROLL for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = __builtin_shuffle(b[i + j], b[i + 2 + j], left);
            a[i + 2 * j + 1] = __builtin_shuffle(b[i + j], b[i + 2 + j], right);
        }
    UNROLL for (int i = 0; i < 4; i++) {
        *(csb_v8 *)(to + i * lanes) = __builtin_shuffle(a[i], a[i + 4], front);
        *(csb_v8 *)(to + (i + 4) * lanes) = __builtin_shuffle(a[i], a[i + 4], back);
    }
}

/* One tile of `samples` <= lanes samples and features first .. last. x points to the tile's first sample and to feature
 * 0: feature f of sample s is x[f * pitch + s], or x[s * pitch + f] when the features are last. */
MINIDL_CLONES
static void minidl_csb_pack(
    const float *x, ptrdiff_t pitch, int features_last, ptrdiff_t samples, ptrdiff_t lanes, ptrdiff_t first,
    ptrdiff_t last, float *to)
{
    ptrdiff_t f = first;
    if (!features_last) {
        for (; f < last; f++) {
            memcpy(to + f * lanes, x + f * pitch, samples * sizeof(float));
            memset(to + f * lanes + samples, 0, (lanes - samples) * sizeof(float));
        }
        return;
    }
    if (samples == lanes)
        for (; f + 8 <= last; f += 8)
            for (ptrdiff_t s = 0; s < lanes; s += 8)
                csb_turn(x + s * pitch + f, pitch, to + f * lanes + s, lanes);
    for (; f < last; f++) {
        for (ptrdiff_t s = 0; s < samples; s++) to[f * lanes + s] = x[s * pitch + f];
        memset(to + f * lanes + samples, 0, (lanes - samples) * sizeof(float));
    }
}

/* ---- products ---- */

/* first[r]: where the nonzeros of row r of the block begin. */
MINIDL_INLINE void csb_row_starts(const uint16_t *indices, ptrdiff_t count, ptrdiff_t side, int32_t *first)
{
    memset(first, 0, (side + 1) * sizeof(int32_t));
    for (ptrdiff_t i = 0; i < count; i++) first[(indices[i] >> 8) + 1] = (int32_t)i + 1; /* the last of a row stays */
    for (ptrdiff_t r = 0; r < side; r++) first[r + 1] = first[r + 1] > first[r] ? first[r + 1] : first[r];
}

/* The nonzeros of a block in the order of their columns, by a stable counting sort. */
MINIDL_INLINE void csb_by_column(
    const uint16_t *indices, const float *values, ptrdiff_t count, ptrdiff_t side, CsbScratch *scratch)
{
    int32_t next[CSB_MOST_SIDE];
    int32_t *first = scratch->first;
    memset(next, 0, side * sizeof(int32_t));
    for (ptrdiff_t i = 0; i < count; i++) next[indices[i] & 255]++;
    first[0] = 0;
    for (ptrdiff_t c = 0; c < side; c++) {
        first[c + 1] = first[c] + next[c];
        next[c] = first[c];
    }
    for (ptrdiff_t i = 0; i < count; i++) {
        const int32_t at = next[indices[i] & 255]++;
        scratch->items[at] = indices[i] >> 8;
        scratch->values[at] = values[i];
    }
}

/* y[r] += sum over the nonzeros of row r of value * x[item], all of them rows of `parts` vectors. */
#define DEFINE_CSB_ROWS(name, vec, parts)                                                                              \
    MINIDL_INLINE void name(                                                                                           \
        const int32_t *first, ptrdiff_t rows, const uint16_t *items, const float *values, const float *x, float *y)    \
    {                                                                                                                  \
        const ptrdiff_t width = sizeof(vec) / sizeof(float), lanes = (parts)*width;                                    \
        for (ptrdiff_t r = 0; r < rows; r++, y += lanes) {                                                             \
            ptrdiff_t i = first[r];                                                                                    \
            const ptrdiff_t end = first[r + 1];                                                                        \
            if (i == end) continue;                                                                                    \
            vec even[parts], odd[parts];                                                                               \
            UNROLL for (int p = 0; p < (parts); p++) {                                                                 \
                even[p] = *(const vec *)(y + p * width);                                                               \
                odd[p] = (vec){0};                                                                                     \
            }                                                                                                          \
            for (; i + 1 < end; i += 2) {                                                                              \
                const float *a = x + (items[i] & 255) * lanes, *b = x + (items[i + 1] & 255) * lanes;                  \
                UNROLL for (int p = 0; p < (parts); p++) {                                                             \
                    even[p] += values[i] * *(const vec *)(a + p * width);                                              \
                    odd[p] += values[i + 1] * *(const vec *)(b + p * width);                                           \
                }                                                                                                      \
            }                                                                                                          \
            if (i < end) {                                                                                             \
                const float *a = x + (items[i] & 255) * lanes;                                                         \
                UNROLL for (int p = 0; p < (parts); p++) even[p] += values[i] * *(const vec *)(a + p * width);         \
            }                                                                                                          \
            UNROLL for (int p = 0; p < (parts); p++) *(vec *)(y + p * width) = even[p] + odd[p];                       \
        }                                                                                                              \
    }
DEFINE_CSB_ROWS(csb_rows_8, csb_v8, 1)
DEFINE_CSB_ROWS(csb_rows_16, csb_v16, 1)
DEFINE_CSB_ROWS(csb_rows_32, csb_v16, 2)

typedef struct {
    CsbMatrix a;
    int transposed, features_last, relu;
    ptrdiff_t lanes;
    const float *bias; /* per output feature, or NULL */
    float *y;          /* feature f of sample s at y[f * pitch + s], or at y[s * pitch + f] */
    ptrdiff_t pitch;
} CsbProduct;

/* Outputs of one tile to memory, with bias and ReLU. */
MINIDL_INLINE void csb_store(
    const CsbProduct *p, float *outputs, ptrdiff_t feature, ptrdiff_t features, ptrdiff_t sample, ptrdiff_t samples)
{
    const ptrdiff_t lanes = p->lanes;
    if (p->bias || p->relu)
        for (ptrdiff_t f = 0; f < features; f++) {
            const float bias = p->bias ? p->bias[feature + f] : 0.0f;
            for (ptrdiff_t s = 0; s < lanes; s++) {
                const float value = outputs[f * lanes + s] + bias;
                outputs[f * lanes + s] = p->relu && value < 0.0f ? 0.0f : value; /* NaN stays NaN */
            }
        }
    if (!p->features_last) {
        for (ptrdiff_t f = 0; f < features; f++)
            memcpy(p->y + (feature + f) * p->pitch + sample, outputs + f * lanes, samples * sizeof(float));
        return;
    }
    float *y = p->y + sample * p->pitch + feature;
    ptrdiff_t s = 0;
    for (; s + 8 <= samples && features >= 8; s += 8) {
        ptrdiff_t f = 0;
        for (; f + 8 <= features; f += 8) csb_turn(outputs + f * lanes + s, lanes, y + s * p->pitch + f, p->pitch);
        for (; f < features; f++)
            for (ptrdiff_t i = s; i < s + 8; i++) y[i * p->pitch + f] = outputs[f * lanes + i];
    }
    for (; s < samples; s++)
        for (ptrdiff_t f = 0; f < features; f++) y[s * p->pitch + f] = outputs[f * lanes + s];
}

/* Output block `block` for tiles first .. last of `packed`, whose tile 0 starts at `sample` of `total` samples. */
MINIDL_CLONES
static void minidl_csb_product(
    const CsbProduct *p, const float *packed, ptrdiff_t block, ptrdiff_t first, ptrdiff_t last, ptrdiff_t sample,
    ptrdiff_t total, CsbScratch *scratch)
{
    const CsbMatrix *a = &p->a;
    const ptrdiff_t side = a->side, lanes = p->lanes, tile = side * lanes;
    const ptrdiff_t depth = p->transposed ? a->rows : a->columns, features = p->transposed ? a->columns : a->rows;
    const ptrdiff_t steps = p->transposed ? a->block_rows : a->block_columns;
    const ptrdiff_t rows = csb_least(side, features - block * side);
    memset(scratch->outputs, 0, (last - first) * tile * sizeof(float));
    for (ptrdiff_t step = 0; step < steps; step++) {
        const ptrdiff_t at = p->transposed ? step * a->block_columns + block : block * a->block_columns + step;
        const ptrdiff_t begin = a->indptr[at], count = a->indptr[at + 1] - begin;
        if (count == 0) continue;
        const uint16_t *items = a->indices + begin;
        const float *values = a->values + begin;
        if (p->transposed) {
            csb_by_column(items, values, count, side, scratch);
            items = scratch->items;
            values = scratch->values;
        } else
            csb_row_starts(items, count, side, scratch->first);
        for (ptrdiff_t t = first; t < last; t++) {
            const float *x = packed + (t * depth + step * side) * lanes;
            float *y = scratch->outputs + (t - first) * tile;
            if (lanes == 32)
                csb_rows_32(scratch->first, rows, items, values, x, y);
            else if (lanes == 16)
                csb_rows_16(scratch->first, rows, items, values, x, y);
            else
                csb_rows_8(scratch->first, rows, items, values, x, y);
        }
    }
    for (ptrdiff_t t = first; t < last; t++) {
        const ptrdiff_t s = sample + t * lanes;
        csb_store(p, scratch->outputs + (t - first) * tile, block * side, rows, s, csb_least(lanes, total - s));
    }
}

/* ---- the sampled product ---- */

MINIDL_INLINE float csb_total(const csb_v16 *v)
{
    float part[16];
    memcpy(part, v, sizeof part);
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
}

/* out[i] (+)= sum over the samples of `tiles` tiles of dy[row of i] * x[column of i], for the nonzeros i of a block.
 * dy and x are packed in tiles of CSB_DEPTH samples. `first`: overwrite. */
MINIDL_CLONES
static void minidl_csb_sampled(
    const CsbMatrix *a, const float *dy, const float *x, ptrdiff_t tiles, ptrdiff_t at, int first, float *out)
{
    const ptrdiff_t begin = a->indptr[at], count = a->indptr[at + 1] - begin;
    const ptrdiff_t row = at / a->block_columns * a->side, column = at % a->block_columns * a->side;
    const uint16_t *items = a->indices + begin;
    int32_t starts[CSB_MOST_SIDE + 1];
    if (count == 0) return;
    csb_row_starts(items, count, a->side, starts);
    out += begin;
    if (first) memset(out, 0, count * sizeof(float));
    for (ptrdiff_t t = 0; t < tiles; t++) {
        const float *left = dy + (t * a->rows + row) * CSB_DEPTH, *right = x + (t * a->columns + column) * CSB_DEPTH;
        for (ptrdiff_t r = 0; r < a->side; r++, left += CSB_DEPTH) {
            ptrdiff_t i = starts[r];
            const ptrdiff_t end = starts[r + 1];
            for (; i + 4 <= end; i += 4) {
                csb_v16 sum[4] = {{0}};
                for (int d = 0; d < CSB_DEPTH; d += 16) {
                    const csb_v16 value = *(const csb_v16 *)(left + d);
                    UNROLL for (int q = 0; q < 4; q++)
                        sum[q] += value * *(const csb_v16 *)(right + (items[i + q] & 255) * CSB_DEPTH + d);
                }
                UNROLL for (int q = 0; q < 4; q++) out[i + q] += csb_total(&sum[q]);
            }
            for (; i < end; i++) {
                csb_v16 sum = {0};
                for (int d = 0; d < CSB_DEPTH; d += 16)
                    sum += *(const csb_v16 *)(left + d) * *(const csb_v16 *)(right + (items[i] & 255) * CSB_DEPTH + d);
                out[i] += csb_total(&sum);
            }
        }
    }
}

#undef UNROLL
#endif
