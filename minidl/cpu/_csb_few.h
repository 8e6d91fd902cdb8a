/* Products of a block in Compressed Sparse Blocks (_csb.h) with few samples: those of a single vector, or one alone.
 *
 * A block runs as it lies: every nonzero costs a place to take apart, two loads and a store beside its sum. Not bytes
 * hold such products up, but that and sums of one output, which wait for each other.
 */
#ifndef MINIDL_CSB_FEW_H
#define MINIDL_CSB_FEW_H

#include <string.h>

#include "_simd.h"

#define UNROLL _Pragma("GCC unroll 16")

typedef float csb_v4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef float csb_v8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef float csb_v16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int csb_i4 __attribute__((vector_size(16)));
typedef int csb_i8 __attribute__((vector_size(32)));

MINIDL_INLINE ptrdiff_t csb_least(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }

enum { CSB_RUNS = 5 }; /* of a block's rows, side by side */

/* Four nonzeros' places in a word, the first lowest: one load, and less to take each apart. */
MINIDL_INLINE uint64_t csb_four(const uint16_t *items)
{
    return items[0] | (uint64_t)items[1] << 16 | (uint64_t)items[2] << 32 | (uint64_t)items[3] << 48;
}

/* One tile of a single vector, a block as it lies: y[row] += value * x[column], or transposed. Outputs stay in memory:
 * few nonzeros have one in common, and loops over them would end too often to be foreseen. Those that have wait for
 * each other; so, not transposed, five runs of whole rows go side by side (of 8 samples 5 to 10 % faster than four;
 * from six on words are spilled), and what follows in memory, the next block, is asked for ahead: short runs begin anew
 * before the processor has noticed them (4 to 15 % where the matrix exceeds the second-level cache). */
#define DEFINE_CSB_STREAM(lanes, vec)                                                                                  \
    MINIDL_CLONES static void csb_runs_##lanes(                                                                        \
        ptrdiff_t count, const uint16_t *items, const float *values, const float *x, float *y)                         \
    {                                                                                                                  \
        ptrdiff_t at[CSB_RUNS + 1] = {0}, least = count, i = 0;                                                        \
        for (int q = 1; q <= CSB_RUNS; q++) {                                                                          \
            at[q] = count * q / CSB_RUNS;                                                                              \
            while (0 < at[q] && at[q] < count && items[at[q]] >> 8 == items[at[q] - 1] >> 8) at[q]++;                  \
            least = csb_least(least, at[q] - at[q - 1]);                                                               \
        }                                                                                                              \
        for (; i + 4 <= least; i += 4) {                                                                               \
            uint64_t four[CSB_RUNS];                                                                                   \
            UNROLL for (int q = 0; q < CSB_RUNS; q++) four[q] = csb_four(items + at[q] + i);                           \
            UNROLL for (int k = 0; k < 4; k++)                                                                         \
                UNROLL for (int q = 0; q < CSB_RUNS; q++, four[q - 1] >>= 16)                                          \
                    CSB_ADD(lanes, vec, four[q] >> 8 & 255, values[at[q] + i + k], four[q] & 255);                     \
            __builtin_prefetch(items + count + CSB_RUNS * i);                                                          \
            __builtin_prefetch(values + count + CSB_RUNS * i);                                                         \
        }                                                                                                              \
        for (int q = 0; q < CSB_RUNS; q++)                                                                             \
            for (ptrdiff_t n = at[q] + i; n < at[q + 1]; n++)                                                          \
                CSB_ADD(lanes, vec, items[n] >> 8, values[n], items[n] & 255);                                         \
    }                                                                                                                  \
                                                                                                                       \
    MINIDL_CLONES static void csb_scatter_##lanes(                                                                     \
        ptrdiff_t count, const uint16_t *items, const float *values, const float *x, float *y)                         \
    {                                                                                                                  \
        ptrdiff_t i = 0;                                                                                               \
        for (; i + 4 <= count; i += 4) {                                                                               \
            uint64_t four = csb_four(items + i);                                                                       \
            UNROLL for (int k = 0; k < 4; k++, four >>= 16)                                                            \
                CSB_ADD(lanes, vec, four & 255, values[i + k], four >> 8 & 255);                                       \
        }                                                                                                              \
        for (; i < count; i++) CSB_ADD(lanes, vec, items[i] & 255, values[i], items[i] >> 8);                          \
    }
#define CSB_ADD(lanes, vec, to, value, from)                                                                           \
    (*(vec *)(y + (to) * (lanes)) += (value) * *(const vec *)(x + (from) * (lanes)))
DEFINE_CSB_STREAM(1, float)
DEFINE_CSB_STREAM(8, csb_v8)
DEFINE_CSB_STREAM(16, csb_v16)

#ifdef MINIDL_AVX512
#include <immintrin.h>

/* A single sample, a block as it lies: out[row] = in[row] + the sum over the row's nonzeros, for rows that have any.
 * Three runs of one length go side by side, each with the sum of its row in a register. At a row's first nonzero, which
 * a mask says for 32 nonzeros at a time, it is replaced by in[row]; it is stored after every nonzero: no jump depends
 * on where rows end. `in` is not `out`, as to load what was stored just before takes three times as long. A row that a
 * cut divides is begun by the run before the cut and completed at the end; until then its place may hold anything. On
 * Zen 4, by GCC 12, 0.60 to 0.65 ns a nonzero; csb_runs_1 takes 0.80; sums in registers, stored at rows' ends, 0.9 to
 * 1.7 (the jumps are not foreseen); two runs 0.75, four 0.71 (too few registers). */
MINIDL_AVX512
static void csb_vector(
    ptrdiff_t count, const uint16_t *items, const float *values, const float *x, const float *in, float *out)
{
    enum { RUNS = 3 };
    const ptrdiff_t run = (count - 1) / (4 * RUNS) * 4;
    ptrdiff_t at[RUNS];
    __m128 sum[RUNS];
    for (int q = 0; q < RUNS; q++) at[q] = 1 + q * run;
    UNROLL for (int q = 0; q < RUNS; q++) sum[q] = _mm_set_ss(in[items[0] >> 8] + values[0] * x[items[0] & 255]);
    out[items[0] >> 8] = sum[0][0];
    for (ptrdiff_t i = 0; i < run; i += 32) {
        const ptrdiff_t some = csb_least(32, run - i);
        const __mmask32 live = some < 32 ? (1u << some) - 1 : ~0u;
        __mmask32 fresh[RUNS];
        UNROLL for (int q = 0; q < RUNS; q++) {
            const __m512i here = _mm512_maskz_loadu_epi16(live, items + at[q] + i);
            const __m512i before = _mm512_maskz_loadu_epi16(live, items + at[q] + i - 1);
            fresh[q] = _mm512_cmpneq_epi16_mask(_mm512_srli_epi16(here, 8), _mm512_srli_epi16(before, 8));
        }
        for (ptrdiff_t j = i; j < i + some; j += 4) {
            uint64_t four[RUNS];
            __builtin_prefetch(items + count + RUNS * j);
            __builtin_prefetch(values + count + RUNS * j);
            UNROLL for (int q = 0; q < RUNS; q++) four[q] = csb_four(items + at[q] + j);
            UNROLL for (int k = 0; k < 4; k++)
                UNROLL for (int q = 0; q < RUNS; q++) {
                    const ptrdiff_t row = four[q] >> 8 & 255, column = four[q] & 255;
                    sum[q] = _mm_mask_load_ss(sum[q], (__mmask8)fresh[q], in + row);
                    sum[q] = _mm_fmadd_ss(_mm_load_ss(x + column), _mm_load_ss(values + at[q] + j + k), sum[q]);
                    _mm_store_ss(out + row, sum[q]);
                    fresh[q] = _kshiftri_mask32(fresh[q], 1);
                    four[q] >>= 16;
                    __asm__("" : "+r"(four[q])); /* or GCC shifts the whole word each time: two moves more, 7 % */
                }
        }
    }
    float left = sum[0][0];
    for (int q = 1; q <= RUNS; q++) {
        ptrdiff_t n = 1 + q * run, row = items[n - 1] >> 8;
        const ptrdiff_t end = q < RUNS ? n + run : count;
        for (; n < end; n++) {
            if (items[n] >> 8 != row) {
                if (q < RUNS) break;
                out[row] = left;
                row = items[n] >> 8;
                left = in[row];
            }
            left += values[n] * x[items[n] & 255];
        }
        out[row] = left;
        if (q < RUNS && n < end) left = sum[q][0];
    }
}
#endif

#endif
