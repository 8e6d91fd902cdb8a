/* The convolution kernels for every instruction set of the target, and the choice between them at run time.
 *
 * Wheels are built for the oldest processor, so that -march cannot help; and a vector kernel is not one source for all
 * widths (target_clones), because the number of registers decides the tile. So the kernels are included several times.
 */
#ifndef MINIDL_CONV2D_H
#define MINIDL_CONV2D_H

#ifdef _OPENMP
#include <omp.h>
static inline int conv2d_max_threads(void) { return omp_get_max_threads(); }
#else
static inline int conv2d_max_threads(void) { return 1; }
#endif

#include "_conv2d_types.h"

#define UP_TO_6(X, v) X(1, v) X(2, v) X(3, v) X(4, v) X(5, v) X(6, v)
#define UP_TO_12(X, v) UP_TO_6(X, v) X(7, v) X(8, v) X(9, v) X(10, v) X(11, v) X(12, v)
#define UP_TO_14(X, v) UP_TO_12(X, v) X(13, v) X(14, v)
#define UP_TO_16(X, v) UP_TO_14(X, v) X(15, v) X(16, v)

/* Sixteen registers of four floats: SSE2, NEON (which has more), or whatever the compiler makes of them. */
#define ISA baseline
#define VECTOR 4
#define TILES1 UP_TO_12
#define TILES2 UP_TO_6
#define TARGET
#include "_conv2d_kernels.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MINIDL_CONV2D_X86

#define ISA avx2
#define VECTOR 8
#define TILES1 UP_TO_12
#define TILES2 UP_TO_6
#define TARGET __attribute__((target("avx2,fma")))
#include "_conv2d_kernels.h"

#define ISA avx512
#define VECTOR 16
#define TILES1 UP_TO_16
#define TILES2 UP_TO_14
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#include "_conv2d_kernels.h"
#endif

/* The i-th best set of kernels that this processor can run, NULL beyond the last. */
static inline const Conv2dKernels *conv2d_kernels(int i)
{
    const Conv2dKernels *usable[3] = {0};
    int count = 0;
#ifdef MINIDL_CONV2D_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")
        && __builtin_cpu_supports("avx512vl"))
        usable[count++] = &conv2d_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) usable[count++] = &conv2d_avx2;
#endif
    usable[count++] = &conv2d_baseline;
    return i < count ? usable[i] : NULL;
}

enum { MOST_WIDTH = 32 };  /* of a block of output channels, over all instruction sets */

typedef float Conv2dQuad __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t Conv2dIndices __attribute__((vector_size(16)));
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Conv2dIndices){__VA_ARGS__})
#endif

/* to[c][r] = from[r][c], four by four: number by number takes four times as long */
static inline void conv2d_transpose(
    const float *from, int64_t from_pitch, int64_t rows, int64_t cols, float *to, int64_t to_pitch)
{
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4, from += 4 * from_pitch, to += 4) {
        int64_t c = 0;
        for (; c + 4 <= cols; c += 4) {
            const float *source = from + c;
            float *target = to + c * to_pitch;
            const Conv2dQuad r0 = *(const Conv2dQuad *)source, r1 = *(const Conv2dQuad *)(source + from_pitch);
            const Conv2dQuad r2 = *(const Conv2dQuad *)(source + 2 * from_pitch);
            const Conv2dQuad r3 = *(const Conv2dQuad *)(source + 3 * from_pitch);
            const Conv2dQuad low01 = SHUFFLE(r0, r1, 0, 4, 1, 5), high01 = SHUFFLE(r0, r1, 2, 6, 3, 7);
            const Conv2dQuad low23 = SHUFFLE(r2, r3, 0, 4, 1, 5), high23 = SHUFFLE(r2, r3, 2, 6, 3, 7);
            *(Conv2dQuad *)target = SHUFFLE(low01, low23, 0, 1, 4, 5);
            *(Conv2dQuad *)(target + to_pitch) = SHUFFLE(low01, low23, 2, 3, 6, 7);
            *(Conv2dQuad *)(target + 2 * to_pitch) = SHUFFLE(high01, high23, 0, 1, 4, 5);
            *(Conv2dQuad *)(target + 3 * to_pitch) = SHUFFLE(high01, high23, 2, 3, 6, 7);
        }
        for (; c < cols; c++)
            for (int64_t i = 0; i < 4; i++) to[c * to_pitch + i] = from[i * from_pitch + c];
    }
    for (; r < rows; r++, from += from_pitch, to++)
        for (int64_t c = 0; c < cols; c++) to[c * to_pitch] = from[c];
}

/* to = filters of one block of output channels as [block of 16 inputs][tap][input][width], float32
 *
 * One of the two axes is dense in the filters (of a depthwise convolution, which has one input, none need be).
 */
static inline void conv2d_pack_filter(
    const Conv2dFilter *f, const char *from, int64_t dtype, int64_t inputs, int64_t count, int64_t width, float *to)
{
    float lines[MOST_WIDTH * LANES];
    for (int64_t c = 0; c < inputs; c += LANES) {
        const int64_t channels = inputs - c < LANES ? inputs - c : LANES;
        for (int64_t t = 0; t < f->taps; t++, to += channels * width) {
            const int64_t first = f->positions[t] + c * f->in_stride;
            if (count < width) memset(to, 0, channels * width * sizeof(float));
            if (f->out_stride == 1) {
                for (int64_t i = 0; i < channels; i++)
                    load_floats(to + i * width, from, first + i * f->in_stride, count, dtype);
            } else if (dtype == FLOAT32) {
                conv2d_transpose((const float *)from + first, f->out_stride, count, channels, to, width);
            } else {
                for (int64_t k = 0; k < count; k++)
                    load_floats(lines + k * LANES, from, first + k * f->out_stride, channels, dtype);
                conv2d_transpose(lines, LANES, count, channels, to, width);
            }
        }
    }
}

/* The way back: to (+)= sum over chunks, in their order, of sums[chunk][...]; chunks lie `stride` apart. */
static inline void conv2d_unpack_filter(
    const Conv2dFilter *f, float *sums, int64_t chunks, int64_t stride, int64_t inputs, int64_t count, int64_t width,
    float *to, int accumulate)
{
    const int64_t size = f->taps * inputs * width;
    float lines[MOST_WIDTH * LANES];
    for (int64_t chunk = 1; chunk < chunks; chunk++) {
        const float *restrict more = sums + chunk * stride;
        for (int64_t i = 0; i < size; i++) sums[i] += more[i];
    }
    for (int64_t c = 0; c < inputs; c += LANES) {
        const int64_t channels = inputs - c < LANES ? inputs - c : LANES;
        for (int64_t t = 0; t < f->taps; t++, sums += channels * width) {
            float *first = to + f->positions[t] + c * f->in_stride;
            if (!accumulate) {
                conv2d_transpose(sums, width, channels, count, first, f->out_stride);
                continue;
            }
            conv2d_transpose(sums, width, channels, count, lines, LANES);
            for (int64_t k = 0; k < count; k++)
                for (int64_t i = 0; i < channels; i++) first[k * f->out_stride + i] += lines[k * LANES + i];
        }
    }
}

#endif
