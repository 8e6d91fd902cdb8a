/* Philox4x32-10: J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3",
 * SC 2011. A counter of four words and a key of two give four random words, without any state. */
#ifndef MINIDL_DROPOUT_H
#define MINIDL_DROPOUT_H

#include "_simd.h"

enum { LANES = 16 /* counters per vector loop */ };

/* words[4 * lane + i]: word i of counter (first + lane, c1, c2, c3). */
MINIDL_INLINE void philox_lanes(
    uint32_t first, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1, uint32_t *RESTRICT words)
{
    /* Words live in the low halves of 64-bit lanes, where products form without shuffles. */
    uint64_t a[LANES], b[LANES], c[LANES], d[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        a[lane] = (uint32_t)(first + (uint32_t)lane);
        b[lane] = c1;
        c[lane] = c2;
        d[lane] = c3;
    }
    for (int round = 0; round < 10; round++) {
        for (int lane = 0; lane < LANES; lane++) {
            const uint64_t p = (uint64_t)0xD2511F53u * (uint32_t)a[lane], q = (uint64_t)0xCD9E8D57u * (uint32_t)c[lane];
            a[lane] = (q >> 32) ^ b[lane] ^ k0;
            b[lane] = (uint32_t)q;
            c[lane] = (p >> 32) ^ d[lane] ^ k1;
            d[lane] = (uint32_t)p;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    for (int lane = 0; lane < LANES; lane++) {
        words[4 * lane] = (uint32_t)a[lane];
        words[4 * lane + 1] = (uint32_t)b[lane];
        words[4 * lane + 2] = (uint32_t)c[lane];
        words[4 * lane + 3] = (uint32_t)d[lane];
    }
}

/* Elements 4 * counter .. 4 * counter + n of one sample: kept and scaled where their word reaches the threshold (up to
 * 2^32, which no word reaches), else 0. */
MINIDL_CLONES
static void minidl_dropout(
    const float *RESTRICT x, float *RESTRICT y, ptrdiff_t n, uint32_t counter, uint32_t sample, uint32_t step,
    uint32_t stream, uint32_t seed_low, uint32_t seed_high, uint64_t threshold, float scale)
{
    uint32_t words[4 * LANES];
    const uint32_t least = (uint32_t)threshold;
    const uint32_t any = threshold >> 32 ? 0u : ~0u;
    for (ptrdiff_t i = 0; i < n; i += 4 * LANES, counter += LANES) {
        const ptrdiff_t m = n - i < 4 * LANES ? n - i : 4 * LANES;
        philox_lanes(counter, sample, step, stream, seed_low, seed_high, words);
        for (ptrdiff_t e = 0; e < m; e++) {
            union {
                float value;
                uint32_t bits;
            } kept = {x[i + e] * scale};
            kept.bits &= any & -(uint32_t)(words[e] >= least);
            y[i + e] = kept.value;
        }
    }
}

#endif
