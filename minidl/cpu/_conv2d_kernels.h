/* Convolution kernels for one instruction set, by implicit matrix products. Included once per instruction set.
 *
 * A task copies the source pixels it needs once, as float32 with the padding written out, into
 *     packed[block of 16 channels][image][row][phase][pixel][16],
 * where the phases are the residues of the column modulo the stride. Whatever stride, dilation and dtype, neighbouring
 * outputs of a tap then read pixels 64 bytes apart, and a tap is one offset. A source of a few channels would leave most
 * of the 16 empty: it is folded, which makes a row of the filter one tap and its pixels' channels those of one pixel,
 * packed anew for every output. The inner loops hold a tile of outputs in
 * registers, broadcast one number of the source and multiply it by one or two vectors: there is no im2col matrix.
 * Sums run in an order given by the shapes alone. Blocking after Georganas et al., "Anatomy of High-Performance Deep
 * Learning Convolutions on SIMD Architectures", SC 2018.
 *
 * Expects ISA (suffix of all names), VECTOR (floats per vector), TILES1 and TILES2 (lists of tile sizes with one and
 * with two vectors, as many as the registers hold) and TARGET (function attribute); undefines them at the end.
 */
#define JOIN_(name, isa) name##_##isa
#define JOIN(name, isa) JOIN_(name, isa)
#define FN(name) JOIN(name, ISA)
#define INLINE static inline __attribute__((always_inline)) TARGET
#define WIDTH (2 * VECTOR)
#define vec FN(vec)
#define UNROLL _Pragma("GCC unroll 32")

typedef float vec __attribute__((vector_size(4 * VECTOR), aligned(4), may_alias));

INLINE vec FN(load)(const float *from) { return *(const vec *)from; }
INLINE void FN(store)(float *to, vec value) { *(vec *)to = value; }

INLINE int64_t FN(least)(int64_t a, int64_t b) { return a < b ? a : b; }

/* One line of one block and phase: to[i] = `count` channels of the pixels of column first + i*step, zero outside. */
INLINE void FN(pack_line)(
    const Conv2dWindow *w, float *to, int64_t channel, int64_t count, int64_t line, int64_t first, int inside)
{
    const int64_t step = w->step_x, end = w->width - first;
    const int64_t stop = inside && end > 0 ? FN(least)((end + step - 1) / step, w->phase) : 0;
    const int64_t start = first < 0 ? FN(least)((-first + step - 1) / step, stop) : 0;
    const int64_t from = line + first * w->source.pixel + channel, pitch = step * w->source.pixel;
    memset(to, 0, start * LANES * sizeof(float));
    if (count == LANES && w->source.dtype == FLOAT32) {
        const float *data = (const float *)w->source.data + from;
        for (int64_t i = start; i < stop; i++)
            UNROLL for (int c = 0; c < LANES; c += VECTOR)
                FN(store)(to + i * LANES + c, FN(load)(data + i * pitch + c));
    } else if (count == LANES)
        for (int64_t i = start; i < stop; i++)
            load_floats(to + i * LANES, w->source.data, from + i * pitch, LANES, w->source.dtype);
    else
        for (int64_t i = start; i < stop; i++) {
            memset(to + i * LANES, 0, LANES * sizeof(float));
            load_floats(to + i * LANES, w->source.data, from + i * pitch, count, w->source.dtype);
        }
    memset(to + stop * LANES, 0, (w->phase - stop) * LANES * sizeof(float));
}

/* One line of a folded source, all blocks of it: to[pixel q] = the pixels left + q*fold_step + (0..fold), one after
 * another. `whole` gets the line with its padding written out.
 */
INLINE void FN(pack_folded)(const Conv2dWindow *w, float *to, int64_t plane, int64_t line, int inside, float *whole)
{
    const int64_t channels = w->channels / w->fold, wide = (w->phase - 1) * w->fold_step + w->fold;
    const int64_t start = w->left < 0 ? FN(least)(-w->left, wide) : 0;
    const int64_t stop = inside && w->width - w->left > start ? FN(least)(w->width - w->left, wide) : start;
    const int64_t from = line + (w->left + start) * w->source.pixel, pixel = w->source.pixel;
    memset(whole, 0, start * channels * sizeof(float));
    if (pixel == channels)
        load_floats(whole + start * channels, w->source.data, from, (stop - start) * channels, w->source.dtype);
    else
        for (int64_t i = start; i < stop; i++)
            load_floats(whole + i * channels, w->source.data, from + (i - start) * pixel, channels, w->source.dtype);
    memset(whole + stop * channels, 0, ((wide - stop) * channels + LANES) * sizeof(float));
    for (int64_t c = 0; c < w->channels; c += LANES, to += plane)
        for (int64_t q = 0; q < w->phase; q++)
            UNROLL for (int k = 0; k < LANES; k += VECTOR)
                FN(store)(to + q * LANES + k, FN(load)(whole + q * w->fold_step * channels + c + k));
}

/* Copies what `rows` output rows of `images` images read, for `groups` groups from `group`. Returns the plane size. */
TARGET static int64_t FN(pack)(
    const Conv2dWindow *w, float *to, int64_t group, int64_t groups, int64_t image, int64_t images, int64_t row,
    int64_t rows, float *whole)
{
    const int64_t tall = (rows - 1) * w->step_y + w->span_y + 1, wide = w->step_x * w->phase;
    const int64_t plane = images * tall * wide * LANES;
    for (int64_t line = 0; line < images * tall; line++) {
        const int64_t y = w->top + row * w->step_y + line % tall;
        const int64_t from = (image + line / tall) * w->source.image + y * w->source.row;
        const int inside = y >= 0 && y < w->height;
        float *block = to + line * wide * LANES;
        if (w->fold) {
            FN(pack_folded)(w, block, plane, from, inside, whole);
            continue;
        }
        for (int64_t g = group; g < group + groups; g++)
            for (int64_t c = 0; c < w->channels; c += LANES, block += plane) {
                const int64_t channel = g * w->channels + c;
                const int64_t count = FN(least)(FN(least)(LANES, w->channels - c), w->total - channel);
                for (int64_t f = 0; f < w->step_x; f++)
                    FN(pack_line)(w, block + f * w->phase * LANES, channel, count, from, w->left + f, inside);
            }
    }
    return plane;
}

/* The pixels of a packed source block, and the gradients of a block, that meet in one tap. */
typedef struct {
    const float *x, *grad;
    int64_t x_image, x_row, grad_image, grad_row, images, rows, cols;
} FN(Pixels);

/* What the outputs of one row sum up: taps [begin, end) of `taps`, of `channels` source channels, whose blocks of 16
 * lie `plane` apart; weights[block of 16 channels][tap][channel][width].
 */
typedef struct {
    const int64_t *offsets;
    int64_t begin, end, taps, channels, plane;
} FN(Sum);

/* sums[m][k] (+)= sum over taps and channels of x[m][tap][c] * weights[tap][c][k], for m pixels and v vectors of k */
#define DEFINE_TILE(m, v)                                                                                             \
    TARGET static void FN(tile_##v##_##m)(                                                                            \
        const FN(Sum) *p, const float *x, const float *weights, float *sums, int first)                               \
    {                                                                                                                 \
        vec sum[m][v] = {{{0}}};                                                                                      \
        for (int64_t left = p->channels; left > 0; left -= LANES, x += p->plane) {                                    \
            const int64_t channels = FN(least)(LANES, left);                                                          \
            const float *from = weights + p->begin * channels * v * VECTOR;                                           \
            for (int64_t t = p->begin; t < p->end; t++) {                                                             \
                const float *tap = x + p->offsets[t];                                                                 \
                for (int64_t c = 0; c < channels; c++, from += v * VECTOR) {                                          \
                    vec weight[v];                                                                                    \
                    UNROLL for (int i = 0; i < v; i++) weight[i] = FN(load)(from + i * VECTOR);                       \
                    UNROLL for (int j = 0; j < m; j++)                                                                \
                        UNROLL for (int i = 0; i < v; i++) sum[j][i] += tap[j * LANES + c] * weight[i];               \
                }                                                                                                     \
            }                                                                                                         \
            weights += p->taps * channels * v * VECTOR;                                                               \
        }                                                                                                             \
        UNROLL for (int j = 0; j < m; j++)                                                                            \
            UNROLL for (int i = 0; i < v; i++) {                                                                      \
                float *to = sums + (j * v + i) * VECTOR;                                                              \
                if (!first) sum[j][i] += FN(load)(to);                                                                \
                FN(store)(to, sum[j][i]);                                                                             \
            }                                                                                                         \
    }

/* The same where channel k of the output reads channel k of the source: weights[tap][k] */
#define DEFINE_DEPTHWISE(m, v)                                                                                        \
    TARGET static void FN(depthwise_##m)(const FN(Sum) *p, const float *x, const float *weights, float *sums)         \
    {                                                                                                                 \
        for (int64_t c = 0; c < LANES; c += VECTOR) {                                                                 \
            vec sum[m] = {{0}};                                                                                       \
            for (int64_t t = p->begin; t < p->end; t++) {                                                             \
                const float *tap = x + p->offsets[t] + c;                                                             \
                const vec weight = FN(load)(weights + t * LANES + c);                                                 \
                UNROLL for (int j = 0; j < m; j++) sum[j] += FN(load)(tap + j * LANES) * weight;                      \
            }                                                                                                         \
            UNROLL for (int j = 0; j < m; j++) FN(store)(sums + j * LANES + c, sum[j]);                               \
        }                                                                                                             \
    }

/* sums[c][k] += sum over pixels of x[pixel][c] * grad[pixel][k], for m channels and v vectors of k */
#define DEFINE_OUTER(m, v)                                                                                            \
    TARGET static void FN(outer_##v##_##m)(const FN(Pixels) *p, int64_t channel, float *sums)                         \
    {                                                                                                                 \
        vec sum[m][v] = {{{0}}};                                                                                      \
        for (int64_t b = 0; b < p->images; b++)                                                                       \
            for (int64_t u = 0; u < p->rows; u++) {                                                                   \
                const float *pixel = p->x + b * p->x_image + u * p->x_row + channel;                                  \
                const float *grad = p->grad + b * p->grad_image + u * p->grad_row;                                    \
                for (int64_t q = 0; q < p->cols; q++, pixel += LANES, grad += v * VECTOR) {                           \
                    vec g[v];                                                                                         \
                    UNROLL for (int i = 0; i < v; i++) g[i] = FN(load)(grad + i * VECTOR);                            \
                    UNROLL for (int j = 0; j < m; j++)                                                                \
                        UNROLL for (int i = 0; i < v; i++) sum[j][i] += pixel[j] * g[i];                              \
                }                                                                                                     \
            }                                                                                                         \
        UNROLL for (int j = 0; j < m; j++)                                                                            \
            UNROLL for (int i = 0; i < v; i++) {                                                                      \
                float *to = sums + (j * v + i) * VECTOR;                                                              \
                FN(store)(to, FN(load)(to) + sum[j][i]);                                                              \
            }                                                                                                         \
    }

TILES1(DEFINE_TILE, 1)
TILES2(DEFINE_TILE, 2)
TILES1(DEFINE_OUTER, 1)
TILES2(DEFINE_OUTER, 2)
TILES1(DEFINE_DEPTHWISE, 1)

typedef void (*FN(Tile))(const FN(Sum) *, const float *, const float *, float *, int);
typedef void (*FN(Outer))(const FN(Pixels) *, int64_t, float *);
typedef void (*FN(Depthwise))(const FN(Sum) *, const float *, const float *, float *);
#define NAME_TILE(m, v) FN(tile_##v##_##m),
#define NAME_OUTER(m, v) FN(outer_##v##_##m),
#define NAME_DEPTHWISE(m, v) FN(depthwise_##m),
static const FN(Tile) FN(tiles1)[] = {TILES1(NAME_TILE, 1)}, FN(tiles2)[] = {TILES2(NAME_TILE, 2)};
static const FN(Outer) FN(outers1)[] = {TILES1(NAME_OUTER, 1)}, FN(outers2)[] = {TILES2(NAME_OUTER, 2)};
static const FN(Depthwise) FN(depthwises)[] = {TILES1(NAME_DEPTHWISE, 1)};
enum { FN(MOST1) = sizeof FN(tiles1) / sizeof *FN(tiles1), FN(MOST2) = sizeof FN(tiles2) / sizeof *FN(tiles2) };

/* Size of the next tile when `left` items are cut into as few and as equal tiles of at most `most` as possible. */
INLINE int64_t FN(cut)(int64_t left, int64_t most)
{
    const int64_t tiles = (left + most - 1) / most;
    return (left + tiles - 1) / tiles;
}

/* Row `row` of the outputs of one block: sums[cols][width] (+)= the products with `channels` source channels. */
INLINE void FN(row)(
    const Conv2dApply *p, const Conv2dClass *class, int64_t row, const float *x, int64_t plane, int64_t channels,
    const float *weights, int64_t width, float *sums, int first)
{
    const int64_t most = width == WIDTH && !p->depthwise ? FN(MOST2) : FN(MOST1);
    const int64_t y = row * p->window.step_y;
    FN(Sum) sum = {class->offsets, 0, class->taps, class->taps, channels, plane};
    /* Taps are sorted by source row: those in the padding above and below come first and last. */
    while (sum.begin < sum.end && y + class->tap_rows[sum.begin] < 0) sum.begin++;
    while (sum.begin < sum.end && y + class->tap_rows[sum.end - 1] >= p->window.height) sum.end--;
    for (int64_t done = 0; done < class->cols;) {
        const int64_t m = FN(cut)(class->cols - done, most);
        const float *from = x + done * LANES;
        float *to = sums + done * width;
        if (p->depthwise)
            FN(depthwises)[m - 1](&sum, from, weights, to);
        else
            (width == WIDTH ? FN(tiles2) : FN(tiles1))[m - 1](&sum, from, weights, to, first);
        done += m;
    }
}

/* Adds bias and `add` to `count` (at most VECTOR) finished sums, rounds, stores. */
INLINE void FN(finish)(
    const float *sums, int64_t count, const float *bias, const char *add, int64_t from, char *out, int64_t to,
    int64_t dtype)
{
    float term[VECTOR];
    vec sum = FN(load)(sums);
    if (bias) sum += FN(load)(bias);
    if (add) {
        load_floats(term, add, from, count, dtype);
        sum += FN(load)(term);
    }
    if (dtype == FLOAT32 && count == VECTOR) {
        FN(store)((float *)out + to, sum);
        return;
    }
    FN(store)(term, sum);
    store_floats(out, to, term, count, dtype);
}

/* The same for a row of outputs of one block; constant dtype and count let conversions become single instructions. */
INLINE void FN(finish_row)(
    const Conv2dApply *p, int64_t cols, const float *sums, int64_t width, int64_t channel, int64_t count, int64_t to,
    int64_t from, int64_t dtype)
{
    const int64_t out_step = p->out_step_x * p->out.pixel, add_step = p->out_step_x * p->add.pixel;
    const float *bias = p->bias ? p->bias + channel : NULL;
    const char *add = p->add.data;
    char *out = p->out.data;
    for (int64_t v = 0; v < cols; v++, sums += width, to += out_step, from += add_step) {
        int64_t k = 0;
        for (; k + VECTOR <= count; k += VECTOR)
            FN(finish)(sums + k, VECTOR, bias ? bias + k : NULL, add, from + k, out, to + k, dtype);
        if (k < count) FN(finish)(sums + k, count - k, bias ? bias + k : NULL, add, from + k, out, to + k, dtype);
    }
}

/* One block of output channels of one class, for all images and rows of a task. */
TARGET static void FN(apply_block)(
    const Conv2dApply *p, const Conv2dClass *class, int64_t block, const float *packed, int64_t plane, int64_t image,
    int64_t images, int64_t row, int64_t task_rows, float *sums)
{
    const Conv2dWindow *w = &p->window;
    const int64_t rows = FN(least)(task_rows, class->rows - row);
    const int64_t tall = (task_rows - 1) * w->step_y + w->span_y + 1, wide = w->step_x * w->phase;
    const int64_t most = p->depthwise ? LANES : WIDTH, inputs = p->depthwise ? 1 : w->channels;
    const int64_t inside = block % p->out_blocks * most, channel = block / p->out_blocks * p->out_channels + inside;
    const int64_t count = FN(least)(FN(least)(most, p->out_channels - inside), p->out_total - channel);
    const int64_t width = p->depthwise || count > VECTOR ? most : VECTOR;
    const float *weights = class->weights + block * class->taps * inputs * most;
    const int64_t fit = class->taps ? TERMS_AT_ONCE / (class->taps * LANES) * LANES : inputs;
    const int64_t step = fit < LANES ? LANES : fit;  /* source channels at a time */
    for (int64_t c = 0; c < inputs; c += step, packed += step / LANES * plane) {
        const int64_t channels = FN(least)(step, inputs - c);
        for (int64_t line = 0; line < images * rows; line++) {
            const int64_t b = line / rows, u = line % rows;
            /* With all source channels at a time a row is finished at once and its sums stay in the L1 cache. */
            float *to = sums + (inputs > step ? line * class->cols * width : 0);
            const float *x = packed + (b * tall + u * w->step_y) * wide * LANES;
            FN(row)(p, class, row + u, x, plane, channels, weights, width, to, c == 0);
            if (c + step < inputs) continue;
            const int64_t y = class->row + (row + u) * p->out_step_y;
            const int64_t out = (image + b) * p->out.image + y * p->out.row + class->col * p->out.pixel + channel;
            const int64_t add = (image + b) * p->add.image + y * p->add.row + class->col * p->add.pixel + channel;
            if (p->out.dtype == FLOAT32)
                FN(finish_row)(p, class->cols, to, width, channel, count, out, add, FLOAT32);
            else if (p->out.dtype == BFLOAT16)
                FN(finish_row)(p, class->cols, to, width, channel, count, out, add, BFLOAT16);
            else
                FN(finish_row)(p, class->cols, to, width, channel, count, out, add, FLOAT16);
        }
        weights += class->taps * channels * width;
    }
}

/* Task: (images_per_task images, rows_per_task output rows, one split of the output blocks). */
TARGET static void FN(apply)(const Conv2dApply *p, int64_t task, float *scratch)
{
    const int64_t split = task % p->splits, place = task / p->splits;
    const int64_t row = place % p->row_blocks * p->rows_per_task;
    const int64_t image = place / p->row_blocks * p->images_per_task;
    const int64_t rows = FN(least)(p->rows_per_task, p->rows - row);
    const int64_t images = FN(least)(p->images_per_task, p->images - image);
    const int64_t begin = split * p->all_blocks / p->splits, end = (split + 1) * p->all_blocks / p->splits;
    const int64_t group = begin / p->out_blocks, groups = (end - 1) / p->out_blocks + 1 - group;
    float *whole = scratch;
    scratch += p->window.line;
    const int64_t plane = FN(pack)(&p->window, scratch, group, groups, image, images, row, rows, whole);
    float *sums = scratch + groups * p->window.blocks * plane;
    for (int64_t block = begin; block < end; block++) {
        const float *packed = scratch + (block / p->out_blocks - group) * p->window.blocks * plane;
        for (int64_t i = 0; i < p->class_count; i++)
            if (p->classes[i].rows > row)
                FN(apply_block)(p, p->classes + i, block, packed, plane, image, images, row, rows, sums);
    }
}

/* Copies the gradients of one block of output channels: to[image][row][col][width], lanes beyond `count` zero. */
INLINE void FN(pack_grad)(
    const Conv2dReduce *p, float *to, int64_t channel, int64_t count, int64_t width, int64_t image, int64_t images,
    int64_t row, int64_t rows)
{
    for (int64_t line = 0; line < images * rows; line++) {
        const int64_t from = (image + line / rows) * p->grad.image + (row + line % rows) * p->grad.row + channel;
        for (int64_t v = 0; v < p->cols; v++, to += width)
            for (int64_t k = 0; k < width; k += VECTOR) {
                const int64_t index = from + v * p->grad.pixel + k;
                if (k + VECTOR <= count && p->grad.dtype == FLOAT32) {
                    FN(store)(to + k, FN(load)((const float *)p->grad.data + index));
                    continue;
                }
                if (k + VECTOR <= count) {
                    load_floats(to + k, p->grad.data, index, VECTOR, p->grad.dtype);
                    continue;
                }
                memset(to + k, 0, VECTOR * sizeof(float));
                if (k < count) load_floats(to + k, p->grad.data, index, count - k, p->grad.dtype);
            }
    }
}

/* sums[k] += sum over pixels of x[pixel][k] * grad[pixel][k] */
TARGET static void FN(outer_depthwise)(const FN(Pixels) *p, float *sums)
{
    for (int64_t c = 0; c < LANES; c += VECTOR) {
        vec even = {0}, odd = {0};
        for (int64_t b = 0; b < p->images; b++)
            for (int64_t u = 0; u < p->rows; u++) {
                const float *x = p->x + b * p->x_image + u * p->x_row + c;
                const float *grad = p->grad + b * p->grad_image + u * p->grad_row + c;
                int64_t q = 0;
                for (; q + 1 < p->cols; q += 2) {
                    even += FN(load)(x + q * LANES) * FN(load)(grad + q * LANES);
                    odd += FN(load)(x + (q + 1) * LANES) * FN(load)(grad + (q + 1) * LANES);
                }
                if (q < p->cols) even += FN(load)(x + q * LANES) * FN(load)(grad + q * LANES);
            }
        FN(store)(sums + c, FN(load)(sums + c) + (even + odd));
    }
}

/* Outputs [*begin, *end) of `count` from `first` on for which position * step + offset lies inside `size`. */
INLINE void FN(clip)(
    int64_t first, int64_t count, int64_t step, int64_t offset, int64_t size, int64_t *begin, int64_t *end)
{
    *begin = offset < 0 ? (-offset + step - 1) / step - first : 0;
    *begin = *begin < 0 ? 0 : FN(least)(*begin, count);
    *end = offset < size ? (size - 1 - offset) / step + 1 - first : 0;
    *end = FN(least)(*end, count) < *begin ? *begin : FN(least)(*end, count);
}

/* All taps of one block of source channels; sums[tap][channel][width] */
INLINE void FN(reduce_block)(
    const Conv2dReduce *p, const float *packed, int64_t channels, int64_t width, const float *grad, int64_t images,
    int64_t row, int64_t rows, float *sums)
{
    const Conv2dWindow *w = &p->window;
    const int64_t wide = w->step_x * w->phase, most = width == WIDTH ? FN(MOST2) : FN(MOST1);
    const FN(Outer) *outers = width == WIDTH ? FN(outers2) : FN(outers1);
    FN(Pixels) pixels = {.images = images, .x_row = w->step_y * wide * LANES, .grad_row = p->cols * width};
    pixels.x_image = ((rows - 1) * w->step_y + w->span_y + 1) * wide * LANES;
    pixels.grad_image = rows * pixels.grad_row;
    for (int64_t t = 0; t < p->taps; t++) {
        int64_t u, q = 0, u_end, q_end = p->cols;
        FN(clip)(row, rows, w->step_y, p->tap_rows[t], w->height, &u, &u_end);
        if (!w->fold) FN(clip)(0, p->cols, w->step_x, p->tap_cols[t], w->width, &q, &q_end);
        pixels.x = packed + p->offsets[t] + u * pixels.x_row + q * LANES;
        pixels.grad = grad + u * pixels.grad_row + q * width;
        pixels.rows = u_end - u, pixels.cols = q_end - q;
        if (p->depthwise) {
            FN(outer_depthwise)(&pixels, sums + t * LANES);
            continue;
        }
        for (int64_t c = 0; c < channels;) {
            const int64_t m = FN(cut)(channels - c, most);
            outers[m - 1](&pixels, c, sums + (t * channels + c) * width);
            c += m;
        }
    }
}

/* One unit of one block of output channels: sums[block of 16 inputs][tap][input][width] */
INLINE void FN(reduce_unit)(
    const Conv2dReduce *p, int64_t block, const float *packed, int64_t plane, int64_t image, int64_t images, int64_t row,
    int64_t rows, float *sums)
{
    const Conv2dWindow *w = &p->window;
    const int64_t most = p->depthwise ? LANES : WIDTH, inputs = p->depthwise ? 1 : w->channels;
    const int64_t inside = block % p->out_blocks * most, channel = block / p->out_blocks * p->out_channels + inside;
    const int64_t count = FN(least)(FN(least)(most, p->out_channels - inside), p->out_total - channel);
    const int64_t width = p->depthwise || count > VECTOR ? most : VECTOR;
    float *grad = (float *)packed + w->blocks * plane;
    FN(pack_grad)(p, grad, channel, count, width, image, images, row, rows);
    for (int64_t c = 0; c < inputs; c += LANES, packed += plane) {
        const int64_t channels = FN(least)(LANES, inputs - c);
        FN(reduce_block)(p, packed, channels, width, grad, images, row, rows, sums);
        sums += p->taps * channels * width;
    }
}

/* Task: (chunk of units, one split of the output blocks); a unit is images_per_unit images by rows_per_unit rows. */
TARGET static void FN(reduce)(const Conv2dReduce *p, int64_t task, float *scratch)
{
    const Conv2dWindow *w = &p->window;
    const int64_t split = task % p->splits, chunk = task / p->splits;
    const int64_t begin = split * p->all_blocks / p->splits, end = (split + 1) * p->all_blocks / p->splits;
    const int64_t size = p->taps * (p->depthwise ? LANES : w->channels * WIDTH);
    float *sums = p->partial + chunk * p->all_blocks * size, *packed = scratch + w->line;
    memset(sums + begin * size, 0, (end - begin) * size * sizeof(float));
    for (int64_t unit = chunk * p->units / p->chunks; unit < (chunk + 1) * p->units / p->chunks; unit++) {
        const int64_t row = unit % p->row_blocks * p->rows_per_unit;
        const int64_t image = unit / p->row_blocks * p->images_per_unit;
        const int64_t rows = FN(least)(p->rows_per_unit, p->rows - row);
        const int64_t images = FN(least)(p->images_per_unit, p->images - image);
        int64_t plane = 0;
        for (int64_t block = begin; block < end; block++) {
            if (block == begin || block % p->out_blocks == 0)
                plane = FN(pack)(w, packed, block / p->out_blocks, 1, image, images, row, rows, scratch);
            FN(reduce_unit)(p, block, packed, plane, image, images, row, rows, sums + block * size);
        }
    }
}

/* to[c] += sum over rows of from[row][c], in single precision for no more than 16 rows at a time */
TARGET static void FN(channel_sum)(
    const char *from, int64_t dtype, int64_t pitch, int64_t rows, int64_t channels, double *to)
{
    for (int64_t c = 0; c < channels; c += LANES) {
        const int64_t count = FN(least)(LANES, channels - c);
        float sum[LANES] = {0}, term[LANES] = {0};
        for (int64_t row = 0; row < rows; row++) {
            if (count == LANES)
                load_floats(term, from, row * pitch + c, LANES, dtype);
            else
                load_floats(term, from, row * pitch + c, count, dtype);
            for (int k = 0; k < LANES; k += VECTOR) FN(store)(sum + k, FN(load)(sum + k) + FN(load)(term + k));
            if (row % 16 < 15 && row + 1 < rows) continue;
            for (int64_t k = 0; k < count; k++) to[c + k] += sum[k];
            memset(sum, 0, sizeof sum);
        }
    }
}

#define TEXT_(name) #name
#define TEXT(name) TEXT_(name)
static const Conv2dKernels FN(conv2d) = {TEXT(ISA), WIDTH, FN(apply), FN(reduce), FN(channel_sum)};

#undef TEXT
#undef TEXT_
#undef NAME_TILE
#undef NAME_OUTER
#undef NAME_DEPTHWISE
#undef DEFINE_TILE
#undef DEFINE_OUTER
#undef DEFINE_DEPTHWISE
#undef JOIN_
#undef JOIN
#undef FN
#undef INLINE
#undef WIDTH
#undef vec
#undef UNROLL
#undef ISA
#undef VECTOR
#undef TILES1
#undef TILES2
#undef TARGET
