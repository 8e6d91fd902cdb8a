/* Records shared by the convolution kernels, and loads and stores that convert storage types.
 *
 * Everything a kernel needs is in one of two records: Conv2dApply (forward and data gradient) or Conv2dReduce (weight
 * gradient). Both look at their source through a Conv2dWindow. Sizes count elements unless they say otherwise.
 */
#ifndef MINIDL_CONV2D_TYPES_H
#define MINIDL_CONV2D_TYPES_H

#include <stdint.h>
#include <string.h>

#if defined(__GNUC__)
#define CONVERT static inline __attribute__((always_inline))  /* into callers of any instruction set */
#else
#define CONVERT static inline
#endif

enum { LANES = 16 };  /* channels of a source block: 64 bytes, so that pixels lie at constant displacements */
/* Products that an output sums up in a register where a block of 16 channels has fewer: short sums round less, and their
 * filters stay in the L1 cache from one row to the next. Part of the order of summation.
 */
enum { TERMS_AT_ONCE = 128 };
enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

/* An activation with unit channel stride; strides in elements. */
typedef struct {
    char *data;
    int64_t dtype, image, row, pixel;
} Conv2dTensor;

/* How outputs see the source: output (u, v), tap (i, j) reads source pixel (top + u*step_y + i, left + v*step_x + j).
 *
 * A depthwise convolution is written as one with groups of 16 channels, of which the last may be incomplete.
 */
typedef struct {
    Conv2dTensor source;
    int64_t height, width;              /* of the source */
    int64_t top, left;                  /* may be negative: padding is zeros in the packed copy */
    int64_t step_y, step_x;
    int64_t span_y;                     /* largest i of all taps */
    int64_t phase;                      /* packed pixels per phase; a packed row has step_x phases */
    int64_t total, channels, blocks;    /* channels in all; channels and blocks of 16 channels per group */
    int64_t fold, fold_step;            /* pixels that count as one, 0 or step_x = 1; columns from one to the next */
    int64_t line;                       /* work space for a line of a folded source, a multiple of 16 */
} Conv2dWindow;

/* Outputs that share one list of taps: all of a forward pass, one residue class of a strided data gradient. */
typedef struct {
    int64_t row, col, rows, cols;       /* first output in the destination, and how many there are */
    int64_t taps;
    const int64_t *offsets;             /* (taps,) position of each tap in the packed source */
    const int64_t *tap_rows;            /* (taps,) ascending: tap t of output (u, v) reads row u*step_y + tap_rows[t] */
    const float *weights;               /* (output blocks, source channels * taps * width) */
} Conv2dClass;

/* out = sum over taps and channels of source * weights (+ bias) (+ add) */
typedef struct {
    Conv2dWindow window;
    Conv2dTensor out, add;              /* add.data may be NULL */
    const float *bias;                  /* NULL, or one per output channel and a block of zeros */
    int64_t depthwise;                  /* an output channel reads the source channel of its own number only */
    int64_t out_step_y, out_step_x;     /* destination rows and columns from one output of a class to the next */
    int64_t out_total, out_channels, out_blocks, all_blocks;  /* in all; per group; blocks per group; blocks in all */
    int64_t images, images_per_task, rows, rows_per_task, row_blocks, splits;
    int64_t class_count;
    const Conv2dClass *classes;
} Conv2dApply;

/* partial[chunk] = sum over the chunk's outputs of grad (x) source, for every tap */
typedef struct {
    Conv2dWindow window;
    Conv2dTensor grad;
    int64_t depthwise;
    int64_t out_total, out_channels, out_blocks, all_blocks;
    int64_t images, images_per_unit, rows, cols, rows_per_unit, row_blocks, units, chunks, splits;
    int64_t taps;
    const int64_t *offsets, *tap_rows, *tap_cols;  /* (taps,) as above; and the columns */
    float *partial;                     /* (chunks, output blocks, source channels * taps * width) */
} Conv2dReduce;

/* Where the filter of (output channel, input channel, tap) lies; a data gradient sees KRSC with K and C exchanged. */
typedef struct {
    int64_t out_stride, in_stride, group_stride;
    int64_t taps;
    const int64_t *positions;           /* (taps,) element offset of each tap */
} Conv2dFilter;

/* The kernels of one instruction set. */
typedef struct {
    const char *name;
    int64_t width;                      /* output channels of a block: two vectors */
    void (*apply)(const Conv2dApply *, int64_t task, float *scratch);
    void (*reduce)(const Conv2dReduce *, int64_t task, float *scratch);
    void (*channel_sum)(const char *from, int64_t dtype, int64_t pitch, int64_t rows, int64_t channels, double *to);
} Conv2dKernels;

CONVERT uint32_t float_bits(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }
CONVERT float bits_float(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }

CONVERT float bfloat16_to_float(uint16_t half) { return bits_float((uint32_t)half << 16); }

CONVERT uint16_t float_to_bfloat16(float value)
{
    const uint32_t bits = float_bits(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? (uint16_t)((bits >> 16) | 0x40u) : (uint16_t)rounded;
}

CONVERT float float16_to_float(uint16_t half)
{
    const uint32_t magnitude = (half & 0x7fffu) << 13;
    const uint32_t normal = magnitude + (112u << 23);
    /* A subnormal is its mantissa in units of 2^-24: put it behind a one and take that one away again. */
    const uint32_t subnormal = float_bits(bits_float(magnitude + (113u << 23)) - bits_float(113u << 23));
    const uint32_t bits = magnitude >= (31u << 23)   ? magnitude | 0x7f800000u
                          : magnitude < (1u << 23) ? subnormal
                                                   : normal;
    return bits_float(bits | (uint32_t)(half & 0x8000u) << 16);
}

CONVERT uint16_t float_to_float16(float value)
{
    const uint32_t bits = float_bits(value), magnitude = bits & 0x7fffffffu;
    const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
    /* Adding one half makes the unit in the last place 2^-24, that of a subnormal: the hardware rounds for us. */
    const uint32_t subnormal = float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f);
    const uint32_t half = magnitude > 0x7f800000u    ? 0x7e00u
                          : magnitude >= 0x477ff000u ? 0x7c00u
                          : magnitude < 0x38800000u  ? subnormal
                                                     : normal;
    return (uint16_t)(half | (bits >> 16 & 0x8000u));
}

CONVERT int64_t dtype_bytes(int64_t dtype) { return dtype == FLOAT32 ? 4 : 2; }

/* to[0..count) = from[index..index+count) as float32 */
CONVERT void load_floats(float *restrict to, const char *from, int64_t index, int64_t count, int64_t dtype)
{
    if (dtype == FLOAT32) {
        const float *restrict source = (const float *)from + index;
        for (int64_t i = 0; i < count; i++) to[i] = source[i];
        return;
    }
    const uint16_t *restrict source = (const uint16_t *)from + index;
    if (dtype == BFLOAT16)
        for (int64_t i = 0; i < count; i++) to[i] = bfloat16_to_float(source[i]);
    else
        for (int64_t i = 0; i < count; i++) to[i] = float16_to_float(source[i]);
}

/* to[index..index+count) = from[0..count), rounded to nearest even */
CONVERT void store_floats(char *to, int64_t index, const float *restrict from, int64_t count, int64_t dtype)
{
    if (dtype == FLOAT32) {
        float *restrict target = (float *)to + index;
        for (int64_t i = 0; i < count; i++) target[i] = from[i];
        return;
    }
    uint16_t *restrict target = (uint16_t *)to + index;
    if (dtype == BFLOAT16)
        for (int64_t i = 0; i < count; i++) target[i] = float_to_bfloat16(from[i]);
    else
        for (int64_t i = 0; i < count; i++) target[i] = float_to_float16(from[i]);
}

#endif
