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

/* to = filters of one block of output channels as [block of 16 inputs][tap][input][width], float32 */
static inline void conv2d_pack_filter(
    const Conv2dFilter *f, const char *from, int64_t dtype, int64_t inputs, int64_t count, int64_t width, float *to)
{
    for (int64_t c = 0; c < inputs; c += LANES) {
        const int64_t channels = inputs - c < LANES ? inputs - c : LANES;
        for (int64_t t = 0; t < f->taps; t++)
            for (int64_t i = c; i < c + channels; i++, to += width) {
                const int64_t first = f->positions[t] + i * f->in_stride;
                if (f->out_stride == 1)
                    load_floats(to, from, first, count, dtype);
                else if (dtype == FLOAT32)
                    for (int64_t k = 0; k < count; k++) to[k] = ((const float *)from)[first + k * f->out_stride];
                else
                    for (int64_t k = 0; k < count; k++) load_floats(to + k, from, first + k * f->out_stride, 1, dtype);
                for (int64_t k = count; k < width; k++) to[k] = 0.0f;
            }
    }
}

/* The way back: to (+)= sum over chunks, in their order, of sums[chunk][...]; chunks lie `stride` apart. */
static inline void conv2d_unpack_filter(
    const Conv2dFilter *f, float *sums, int64_t chunks, int64_t stride, int64_t inputs, int64_t count, int64_t width,
    float *to, int accumulate)
{
    const int64_t size = f->taps * inputs * width;
    for (int64_t chunk = 1; chunk < chunks; chunk++) {
        const float *restrict more = sums + chunk * stride;
        for (int64_t i = 0; i < size; i++) sums[i] += more[i];
    }
    for (int64_t c = 0; c < inputs; c += LANES) {
        const int64_t channels = inputs - c < LANES ? inputs - c : LANES;
        for (int64_t t = 0; t < f->taps; t++)
            for (int64_t i = c; i < c + channels; i++, sums += width) {
                float *first = to + f->positions[t] + i * f->in_stride;
                for (int64_t k = 0; k < count; k++)
                    first[k * f->out_stride] = sums[k] + (accumulate ? first[k * f->out_stride] : 0.0f);
            }
    }
}

#endif
