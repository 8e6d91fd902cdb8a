/* Products with a matrix A in Compressed Sparse Blocks (A. Buluç et al., "Parallel sparse matrix-vector and matrix-
 * transpose-vector multiplication using compressed sparse blocks", SPAA 2009): indptr (block rows * block columns + 1) in
 * block-row-major order; of each nonzero (row in block << 8 | column in block) and its value, row-major in a block.
 *
 * The dense operand is packed first, so that everything behind the packing is the same whichever way it lies in memory:
 *     packed[tile of LANES samples][feature][LANES]          zeros behind the last sample
 * A product runs a block at a time: its nonzeros grouped by output row (they lie so; for the transposed product a
 * counting sort by column brings them there), and for each tile of samples a row of outputs stays in registers while its
 * nonzeros pass. Every output is the sum over its nonzeros in the order of the summed index: the bits depend neither on
 * threads, nor on how the samples are cut, nor on the side of a block.
 */
#ifndef MINIDL_CSB_H
#define MINIDL_CSB_H

#include "_csb_few.h"

enum {
    CSB_MOST_SIDE = 256,
    CSB_DEPTH = 256,  /* samples of a sampled product's tile, at most */
    CSB_STREAM = 16,  /* samples up to which a block runs as it lies, its dense operand packed */
    CSB_STRETCH = 64, /* features of a sample that are turned together: whole lines of few rows at a time */
};

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

/* ---- packing ---- */

/* to[8 columns][lanes] = 8 columns of 8 rows, from column `at` on, transposed in registers. */
MINIDL_INLINE void csb_turn_rows(const float *const *from, ptrdiff_t at, float *to, ptrdiff_t lanes)
{
    const csb_i8 low = {0, 8, 1, 9, 4, 12, 5, 13}, high = {2, 10, 3, 11, 6, 14, 7, 15};
    const csb_i8 left = {0, 1, 8, 9, 4, 5, 12, 13}, right = {2, 3, 10, 11, 6, 7, 14, 15};
    const csb_i8 front = {0, 1, 2, 3, 8, 9, 10, 11}, back = {4, 5, 6, 7, 12, 13, 14, 15};
    csb_v8 a[8], b[8];
    UNROLL for (int i = 0; i < 8; i++) a[i] = *(const csb_v8 *)(from[i] + at);
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

/* The same of rows at a pitch. */
MINIDL_INLINE void csb_turn(const float *from, ptrdiff_t pitch, float *to, ptrdiff_t lanes)
{
    const float *rows[8];
    UNROLL for (int i = 0; i < 8; i++) rows[i] = from + i * pitch;
    csb_turn_rows(rows, 0, to, lanes);
}

/* Features first .. last of `samples` samples, tile after tile, `tile` floats apart. x points to the first sample and to
 * feature 0: feature f of sample s is x[f * pitch + s], or x[s * pitch + f] when the features are last. */
MINIDL_CLONES
static void minidl_csb_pack(
    const float *x, ptrdiff_t pitch, int features_last, ptrdiff_t samples, ptrdiff_t lanes, ptrdiff_t first,
    ptrdiff_t last, ptrdiff_t tile, float *to)
{
    if (!features_last) {
        for (ptrdiff_t f = first; f < last; f++) /* long reads: a tile at a time would touch as many pages each time */
            for (ptrdiff_t s = 0; s < samples; s += lanes) {
                float *row = to + s / lanes * tile + f * lanes;
                const ptrdiff_t some = csb_least(lanes, samples - s);
                memcpy(row, x + f * pitch + s, some * sizeof(float));
                memset(row + some, 0, (lanes - some) * sizeof(float));
            }
        return;
    }
    for (; samples > 0; samples -= lanes, x += lanes * pitch, to += tile) {
        const ptrdiff_t some = csb_least(lanes, samples);
        const ptrdiff_t wide = some == lanes && lanes % 8 == 0 ? first + (last - first) / 8 * 8 : first;
        for (ptrdiff_t g = first; g < wide; g += CSB_STRETCH)
            for (ptrdiff_t s = 0; s < lanes; s += 8)
                for (ptrdiff_t f = g; f < csb_least(g + CSB_STRETCH, wide); f += 8)
                    csb_turn(x + s * pitch + f, pitch, to + f * lanes + s, lanes);
        for (ptrdiff_t f = wide; f < last; f++) {
            for (ptrdiff_t s = 0; s < some; s++) to[f * lanes + s] = x[s * pitch + f];
            memset(to + f * lanes + some, 0, (lanes - some) * sizeof(float));
        }
    }
}

/* The pixels of an image that the taps of a convolution meet. Samples are the places of a grid, image after image, row
 * after row; at place a of an axis tap r meets pixel (a * multiply + start + r * step) / divide, if that is a whole
 * number and in the image, else zeros. */
typedef struct {
    ptrdiff_t size, grid, taps, multiply, start, step, divide;
} CsbAxis;

typedef struct {
    CsbAxis down, across;
    ptrdiff_t pitch;          /* floats from pixel to pixel; images are dense in pixels */
    ptrdiff_t channels, room; /* features of a pixel, and of a tap when packed: the rest is never read */
    const float *zeros;       /* as many as channels */
} CsbWindow;

/* The pixel of an axis, or -1. */
MINIDL_INLINE ptrdiff_t csb_pixel(const CsbAxis *axis, ptrdiff_t place, ptrdiff_t tap)
{
    const ptrdiff_t at = place * axis->multiply + axis->start + tap * axis->step, pixel = at / axis->divide;
    return at >= 0 && pixel < axis->size && pixel * axis->divide == at ? pixel : -1;
}

/* One tile: samples sample .. sample + lanes of `samples`, all taps, as [tap][room][lanes]. */
MINIDL_CLONES
static void minidl_csb_gather(
    const float *x, const CsbWindow *w, ptrdiff_t sample, ptrdiff_t samples, ptrdiff_t lanes, float *to)
{
    const float *from[CSB_DEPTH];
    for (ptrdiff_t tap = 0; tap < w->down.taps * w->across.taps; tap++, to += w->room * lanes) {
        for (ptrdiff_t s = 0; s < lanes; s++) {
            const ptrdiff_t row = (sample + s) / w->across.grid, column = (sample + s) % w->across.grid;
            const ptrdiff_t h = csb_pixel(&w->down, row % w->down.grid, tap / w->across.taps);
            const ptrdiff_t v = csb_pixel(&w->across, column, tap % w->across.taps);
            const ptrdiff_t pixel = (row / w->down.grid * w->down.size + h) * w->across.size + v;
            from[s] = sample + s < samples && h >= 0 && v >= 0 ? x + pixel * w->pitch : w->zeros;
        }
        ptrdiff_t c = 0;
        if (lanes % 8 == 0)
            for (; c + 8 <= w->channels; c += 8)
                for (ptrdiff_t s = 0; s < lanes; s += 8) csb_turn_rows(from + s, c, to + c * lanes + s, lanes);
        for (; c < w->channels; c++)
            for (ptrdiff_t s = 0; s < lanes; s++) to[c * lanes + s] = from[s][c];
    }
}

/* ---- products ---- */

/* first[r]: where the nonzeros of row r of the block begin. */
MINIDL_INLINE void csb_row_starts(const uint16_t *indices, ptrdiff_t count, ptrdiff_t rows, int32_t *first)
{
    memset(first, 0, (rows + 1) * sizeof(int32_t));
    for (ptrdiff_t i = 0; i < count; i++) first[(indices[i] >> 8) + 1] = (int32_t)i + 1; /* the last of a row stays */
    for (ptrdiff_t r = 0; r < rows; r++) first[r + 1] = first[r + 1] > first[r] ? first[r + 1] : first[r];
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

/* Where the dense operand of a tile is: feature f of its samples at x + f * step. */
typedef struct {
    const float *x;
    ptrdiff_t step;
} CsbTile;

/* One tile of several vectors: y[r] += sum over the nonzeros of row r of value * x[item], in registers; rows lie
 * `apart` floats from each other, and are set where they are `fresh`. */
#define DEFINE_CSB_KERNELS(lanes, vec, parts)                                                                          \
    MINIDL_INLINE void csb_rows_##lanes(                                                                               \
        const int32_t *first, ptrdiff_t rows, const uint16_t *items, const float *values, CsbTile tile, float *y,      \
        ptrdiff_t apart, int fresh)                                                                                    \
    {                                                                                                                  \
        const ptrdiff_t width = sizeof(vec) / sizeof(float);                                                           \
        for (ptrdiff_t r = 0; r < rows; r++, y += apart) {                                                             \
            const ptrdiff_t end = first[r + 1];                                                                        \
            if (first[r] == end && !fresh) continue;                                                                   \
            vec sum[parts];                                                                                            \
            UNROLL for (int p = 0; p < (parts); p++) sum[p] = fresh ? (vec){0} : *(const vec *)(y + p * width);        \
            for (ptrdiff_t i = first[r]; i < end; i++) {                                                               \
                const float *x = tile.x + (items[i] & 255) * tile.step;                                                \
                UNROLL for (int p = 0; p < (parts); p++) sum[p] += values[i] * *(const vec *)(x + p * width);          \
            }                                                                                                          \
            UNROLL for (int p = 0; p < (parts); p++) *(vec *)(y + p * width) = sum[p];                                 \
        }                                                                                                              \
    }
DEFINE_CSB_KERNELS(32, csb_v16, 2)
DEFINE_CSB_KERNELS(64, csb_v16, 4)

typedef struct {
    CsbMatrix a;
    int transposed, features_last, relu, avx512;
    ptrdiff_t features, taps; /* of the output; 1 but for convolutions, whose taps have as many block columns each */
    ptrdiff_t lanes;
    const float *bias; /* per output feature, or NULL */
    float *y;          /* feature f of sample s at y[f * pitch + s], or at y[s * pitch + f] */
    ptrdiff_t pitch;
} CsbProduct;

/* Bias and ReLU on one row of outputs. */
MINIDL_INLINE void csb_finish(const CsbProduct *p, float *row, ptrdiff_t feature)
{
    const float bias = p->bias ? p->bias[feature] : 0.0f;
    if (!p->bias && !p->relu) return;
    for (ptrdiff_t s = 0; s < p->lanes; s++) {
        const float value = row[s] + bias;
        row[s] = p->relu && value < 0.0f ? 0.0f : value; /* NaN stays NaN */
    }
}

/* Outputs of a block, (tiles, side, lanes), to memory: features feature .. + rows of samples sample .. end, if any. */
MINIDL_INLINE void csb_store(
    const CsbProduct *p, float *outputs, ptrdiff_t feature, ptrdiff_t rows, ptrdiff_t sample, ptrdiff_t end)
{
    const ptrdiff_t lanes = p->lanes, tile = p->a.side * lanes;
    const int alike = !p->features_last && p->pitch == lanes; /* memory is one such tile */
    for (ptrdiff_t f = 0; f < rows; f++)
        for (ptrdiff_t s = sample; s < end; s += lanes) {
            float *row = outputs + (s - sample) / lanes * tile + f * lanes;
            csb_finish(p, row, feature + f);
            if (!p->features_last && !alike)
                memcpy(p->y + (feature + f) * p->pitch + s, row, csb_least(lanes, end - s) * sizeof(float));
        }
    if (alike && sample < end) memcpy(p->y + feature * lanes, outputs, rows * lanes * sizeof(float));
    if (!p->features_last) return;
    for (; sample < end; sample += lanes, outputs += tile) {
        float *y = p->y + sample * p->pitch + feature;
        const ptrdiff_t some = csb_least(lanes, end - sample);
        const ptrdiff_t whole = some / 8 * 8, wide = whole ? rows / 8 * 8 : 0;
        for (ptrdiff_t g = 0; g < wide; g += CSB_STRETCH)
            for (ptrdiff_t s = 0; s < whole; s += 8)
                for (ptrdiff_t f = g; f < csb_least(g + CSB_STRETCH, wide); f += 8)
                    csb_turn(outputs + f * lanes + s, lanes, y + s * p->pitch + f, p->pitch);
        for (ptrdiff_t s = 0; s < some; s++)
            for (ptrdiff_t f = s < whole ? wide : 0; f < rows; f++) y[s * p->pitch + f] = outputs[f * lanes + s];
    }
}

#ifdef MINIDL_AVX512
/* Output block `block` of a single sample; `sums` has room for two blocks. */
MINIDL_INLINE void csb_vector_row(const CsbProduct *p, const float *x, ptrdiff_t block, float *sums)
{
    const CsbMatrix *a = &p->a;
    const ptrdiff_t side = a->side, rows = csb_least(side, p->features - block * side);
    const int32_t *indptr = a->indptr + block * a->block_columns;
    float *in = sums, *out = sums + 4 * side;
    memset(in, 0, rows * sizeof(float));
    for (ptrdiff_t b = 0; b < a->block_columns; b++, x += side) {
        if (indptr[b] == indptr[b + 1]) continue;
        memcpy(out, in, rows * sizeof(float));
        csb_vector(indptr[b + 1] - indptr[b], a->indices + indptr[b], a->values + indptr[b], x, in, out);
        float *const last = in;
        in = out;
        out = last;
    }
    csb_store(p, in, block * side, rows, 0, 1);
}
#endif

/* Output block `block` for tiles first .. last. Tile t lies at x + t * tile, its features `step` apart; its samples are
 * those from sample + t * lanes of `total`. */
MINIDL_CLONES
static void minidl_csb_product(
    const CsbProduct *p, const float *x, ptrdiff_t step, ptrdiff_t tile, ptrdiff_t block, ptrdiff_t first,
    ptrdiff_t last, ptrdiff_t sample, ptrdiff_t total, CsbScratch *scratch)
{
    const CsbMatrix *a = &p->a;
    const ptrdiff_t side = a->side, lanes = p->lanes;
    const ptrdiff_t blocks = p->transposed ? p->taps * a->block_rows : a->block_columns;
    const ptrdiff_t rows = csb_least(side, p->features - block * side);
    const int stream = lanes <= CSB_STREAM;
    /* Sums of a single block need no scratch: features first, whole tiles go where they belong. */
    const ptrdiff_t there = csb_least(total, sample + last * lanes), ready = blocks == 1 && !p->features_last && !stream
        ? csb_least(last, (total - sample) / lanes) : first;
    int fresh = !stream; /* nothing has been summed yet */
#ifdef MINIDL_AVX512
    if (lanes == 1 && !p->transposed && p->avx512) {
        csb_vector_row(p, x, block, scratch->outputs);
        return;
    }
#endif
    if (stream) memset(scratch->outputs, 0, (last - first) * side * lanes * sizeof(float));
    for (ptrdiff_t b = 0; b < blocks; b++) {
        /* Transposed: down the tap's block column. */
        const ptrdiff_t tap = p->transposed ? b / a->block_rows : 0, row = b - tap * a->block_rows;
        const ptrdiff_t at = p->transposed ? row * a->block_columns + tap * (a->block_columns / p->taps) + block
                                           : block * a->block_columns + b;
        const ptrdiff_t feature = tap * a->rows + row * side;
        const ptrdiff_t begin = a->indptr[at], count = a->indptr[at + 1] - begin;
        if (count == 0 && ready == first) continue;
        const uint16_t *items = a->indices + begin;
        const float *values = a->values + begin;
        if (!p->transposed && !stream)
            csb_row_starts(items, count, rows, scratch->first);
        else if (!stream) {
            csb_by_column(items, values, count, side, scratch);
            items = scratch->items;
            values = scratch->values;
        }
        /* Where tiles lie side by side in memory a row of outputs runs through all of them: long reads, few pages. */
        const ptrdiff_t strip = tile == lanes && !stream ? 1 : rows;
        for (ptrdiff_t r = 0; r < rows; r += strip)
        for (ptrdiff_t t = first; t < last; t++) {
            const CsbTile from = {x + t * tile + feature * step, step};
            const int placed = t < ready;
            const ptrdiff_t apart = placed ? p->pitch : lanes;
            float *y = placed ? p->y + (block * side + r) * p->pitch + sample + t * lanes
                              : scratch->outputs + ((t - first) * side + r) * lanes;
#define CSB_ROWS(lanes)                                                                                                \
    csb_rows_##lanes(scratch->first + r, strip, items, values, from, y, apart, fresh)
#define CSB_RUN(lanes) (p->transposed ? csb_scatter_##lanes : csb_runs_##lanes)(count, items, values, from.x, y)
            if (lanes == 64)
                CSB_ROWS(64);
            else if (lanes == 32)
                CSB_ROWS(32);
            else if (lanes == 16)
                CSB_RUN(16);
            else if (lanes == 8)
                CSB_RUN(8);
            else
                CSB_RUN(1);
#undef CSB_ROWS
#undef CSB_RUN
            for (ptrdiff_t i = 0; i < strip && placed; i++) csb_finish(p, y + i * apart, block * side + r + i);
        }
        fresh = 0;
    }
    if (fresh) memset(scratch->outputs, 0, (last - first) * side * lanes * sizeof(float));
    csb_store(p, scratch->outputs + (ready - first) * side * lanes, block * side, rows, sample + ready * lanes, there);
}

/* ---- the sampled product ---- */

/* The sums of the elements of four vectors, each as a tree. */
MINIDL_INLINE csb_v4 csb_totals(const csb_v16 *v)
{
    const csb_i4 low = {0, 4, 1, 5}, high = {2, 6, 3, 7}, front = {0, 1, 4, 5}, back = {2, 3, 6, 7};
    csb_v4 sum[4];
    UNROLL for (int q = 0; q < 4; q++) {
        csb_v4 part[4];
        memcpy(part, v + q, sizeof part);
        sum[q] = (part[0] + part[2]) + (part[1] + part[3]);
    }
    const csb_v4 a = __builtin_shuffle(sum[0], sum[1], low) + __builtin_shuffle(sum[0], sum[1], high);
    const csb_v4 b = __builtin_shuffle(sum[2], sum[3], low) + __builtin_shuffle(sum[2], sum[3], high);
    return __builtin_shuffle(a, b, front) + __builtin_shuffle(a, b, back);
}

/* out[i] (+)= sum over the samples of `tiles` tiles of dy[row of i] * x[column of i], for the nonzeros i of a block.
 * dy and x are packed in tiles of `depth` samples, a multiple of 16. `first`: overwrite. */
MINIDL_CLONES
static void minidl_csb_sampled(
    const CsbMatrix *a, const float *dy, const float *x, ptrdiff_t depth, ptrdiff_t tiles, ptrdiff_t at, int first,
    float *out)
{
    const ptrdiff_t begin = a->indptr[at], count = a->indptr[at + 1] - begin;
    const ptrdiff_t row = at / a->block_columns * a->side, column = at % a->block_columns * a->side;
    const ptrdiff_t rows = csb_least(a->side, a->rows - row);
    const uint16_t *items = a->indices + begin;
    int32_t starts[CSB_MOST_SIDE + 1];
    if (count == 0) return;
    csb_row_starts(items, count, rows, starts);
    out += begin;
    if (first) memset(out, 0, count * sizeof(float));
    for (ptrdiff_t t = 0; t < tiles; t++) {
        const float *left = dy + (t * a->rows + row) * depth, *right = x + (t * a->columns + column) * depth;
        for (ptrdiff_t r = 0; r < rows; r++, left += depth) {
            ptrdiff_t i = starts[r];
            const ptrdiff_t end = starts[r + 1];
            for (; i < end; i += 4) {
                const ptrdiff_t some = csb_least(4, end - i);
                const float *from[4]; /* those past the end repeat the last, and are dropped */
                UNROLL for (int q = 0; q < 4; q++)
                    from[q] = right + (items[q < some ? i + q : end - 1] & 255) * depth;
                csb_v16 sum[4] = {{0}};
                for (ptrdiff_t d = 0; d < depth; d += 16) {
                    const csb_v16 value = *(const csb_v16 *)(left + d);
                    UNROLL for (int q = 0; q < 4; q++) sum[q] += value * *(const csb_v16 *)(from[q] + d);
                }
                const csb_v4 totals = csb_totals(sum);
                for (ptrdiff_t q = 0; q < some; q++) out[i + q] += totals[q];
            }
        }
    }
}

#undef UNROLL
#endif
