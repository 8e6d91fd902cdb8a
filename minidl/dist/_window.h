/* Memory that the ranks of one host share: flags that order them, and sums over their slots in rank order.
 *
 * Layout of a channel, for `size` ranks and chunks of `chunk` bytes, all multiples of a page:
 *   flags    size x minidl_flag
 *   slots    size x 2 x chunk    what a rank gives, by parity of the phase
 *   results  2 x chunk           sums, by parity of the phase
 */
#ifndef MINIDL_WINDOW_H
#define MINIDL_WINDOW_H

#include <sched.h>
#include <string.h>
#include <time.h>

#include "_simd.h"

enum { NAME_BYTES = 104, YIELDS = 512, NAPS = 100, NAP_NANOSECONDS = 50000, BLOCK = 2048 };

typedef struct {
    uint64_t code;         /* kind, dtype, root and size of a call */
    uint64_t place;        /* of an array in a region that all share, 0 elsewhere */
    uint64_t number;       /* of the call, counted by its rank over all channels */
    char name[NAME_BYTES]; /* of the message, for people */
} minidl_call;

typedef struct {
    uint64_t arrived; /* phases that the owner has finished; alone in its cache lines */
    char padding[120];
    minidl_call call[2]; /* what the owner is at, by parity of the phase */
    char rest[4096 - 128 - 2 * sizeof(minidl_call)];
} minidl_flag;

MINIDL_INLINE void minidl_arrive(minidl_flag *mine, uint64_t phase)
{
    __atomic_store_n(&mine->arrived, phase, __ATOMIC_RELEASE);
}

MINIDL_INLINE void minidl_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* Waits until all ranks have arrived: spins, then yields the core, then sleeps. Returns 0, or 1 when some milliseconds
 * have passed, so that the caller can look for signals before it waits on (with `spins` 0).
 */
static int minidl_await(const minidl_flag *flags, int size, uint64_t phase, int spins)
{
    const struct timespec nap = {0, NAP_NANOSECONDS};
    int tries = 0;
    for (int rank = 0; rank < size; rank++) {
        while (__atomic_load_n(&flags[rank].arrived, __ATOMIC_ACQUIRE) < phase) {
            if (tries < spins) minidl_pause();
            else if (tries < spins + YIELDS) sched_yield();
            else if (tries < spins + YIELDS + NAPS) nanosleep(&nap, NULL);
            else return 1;
            tries++;
        }
    }
    return 0;
}

/* Whether all ranks are at the same call in this phase, judged by its code and its name. */
MINIDL_INLINE int minidl_same_call(const minidl_flag *flags, int size, int parity)
{
    for (int rank = 1; rank < size; rank++) {
        const minidl_call *a = &flags[0].call[parity], *b = &flags[rank].call[parity];
        if (a->code != b->code || memcmp(a->name, b->name, NAME_BYTES)) return 0;
    }
    return 1;
}

/* Whether their arrays lie at the same place of the ranks' regions, or none in one. */
MINIDL_INLINE int minidl_same_place(const minidl_flag *flags, int size, int parity)
{
    for (int rank = 1; rank < size; rank++)
        if (flags[0].call[parity].place != flags[rank].call[parity].place) return 0;
    return 1;
}

/* out[i] = ((in[0][i] + in[1][i]) + in[2][i]) + ...; out overlaps none of them. */
#define MINIDL_SUM(type, label)                                                                                       \
    MINIDL_CLONES                                                                                                     \
    static void minidl_sum_##label(void *result, const void *const *in, int size, ptrdiff_t n)                        \
    {                                                                                                                 \
        for (ptrdiff_t first = 0; first < n; first += BLOCK) {                                                        \
            const ptrdiff_t m = n - first < BLOCK ? n - first : BLOCK;                                                \
            type *RESTRICT out = (type *)result + first;                                                              \
            const type *RESTRICT a = (const type *)in[0] + first, *RESTRICT b = (const type *)in[1] + first;          \
            for (ptrdiff_t i = 0; i < m; i++) out[i] = a[i] + b[i];                                                   \
            for (int rank = 2; rank < size; rank++) {                                                                 \
                const type *RESTRICT c = (const type *)in[rank] + first;                                              \
                for (ptrdiff_t i = 0; i < m; i++) out[i] += c[i];                                                     \
            }                                                                                                         \
        }                                                                                                             \
    }

MINIDL_SUM(float, float32)
MINIDL_SUM(double, float64)
MINIDL_SUM(uint32_t, int32) /* wraps like NumPy's, where signed overflow is undefined in C */
MINIDL_SUM(uint64_t, int64)

MINIDL_INLINE float minidl_widen(uint16_t half)
{
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* To nearest, ties to even; a NaN stays one. */
MINIDL_INLINE uint16_t minidl_round(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : rounded);
}

/* bfloat16, added in float32 in rank order and rounded once. */
MINIDL_CLONES
static void minidl_sum_bfloat16(void *result, const void *const *in, int size, ptrdiff_t n)
{
    float sum[BLOCK];
    for (ptrdiff_t first = 0; first < n; first += BLOCK) {
        const ptrdiff_t m = n - first < BLOCK ? n - first : BLOCK;
        uint16_t *RESTRICT out = (uint16_t *)result + first;
        const uint16_t *RESTRICT a = (const uint16_t *)in[0] + first, *RESTRICT b = (const uint16_t *)in[1] + first;
        for (ptrdiff_t i = 0; i < m; i++) sum[i] = minidl_widen(a[i]) + minidl_widen(b[i]);
        for (int rank = 2; rank < size; rank++) {
            const uint16_t *RESTRICT c = (const uint16_t *)in[rank] + first;
            for (ptrdiff_t i = 0; i < m; i++) sum[i] += minidl_widen(c[i]);
        }
        for (ptrdiff_t i = 0; i < m; i++) out[i] = minidl_round(sum[i]);
    }
}

typedef void (*minidl_sum)(void *result, const void *const *in, int size, ptrdiff_t n);

#endif
