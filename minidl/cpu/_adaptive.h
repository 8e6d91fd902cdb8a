/* Loops of adaptive optimizers over flat float32 arenas. A segment is [lr_scale, decay, momentum_scale, trust applies]; a
 * record [beta1, beta2, eps, step, correction1, correction2, trust coefficient, 0]. */
#ifndef MINIDL_ADAPTIVE_H
#define MINIDL_ADAPTIVE_H

#include <math.h>

#include "_simd.h"

enum { CHUNK = 64 /* elements that belong to one segment */ };

MINIDL_INLINE float minidl_direction(float m, float v, float inverse1, float inverse2, float eps)
{
    return m * inverse1 / (sqrtf(v * inverse2) + eps);
}

/* w -= rate * (decay * w + direction) */
MINIDL_INLINE void minidl_adam_step(
    float *RESTRICT master, const float *RESTRICT first, const float *RESTRICT second, float rate, float decay,
    const float *record)
{
    const float inverse1 = 1.0f / record[4], inverse2 = 1.0f / record[5], eps = record[2];
    for (int i = 0; i < CHUNK; i++)
        master[i] -= rate * (decay * master[i] + minidl_direction(first[i], second[i], inverse1, inverse2, eps));
}

MINIDL_INLINE void minidl_moments(
    const float *RESTRICT grad, float *RESTRICT first, float *RESTRICT second, const float *record, float unscale)
{
    const float b1 = record[0], b2 = record[1];
    for (int i = 0; i < CHUNK; i++) {
        const float g = grad[i] * unscale;
        first[i] = b1 * first[i] + (1.0f - b1) * g;
        second[i] = b2 * second[i] + (1.0f - b2) * g * g;
    }
}

MINIDL_CLONES
static void minidl_adamw(
    float *master, const float *grad, float *first, float *second, const int32_t *segment_of, const float *segments,
    ptrdiff_t chunks, float lr, float unscale, const float *record)
{
    for (ptrdiff_t c = 0; c < chunks; c++) {
        const float *segment = segments + 4 * (ptrdiff_t)segment_of[c];
        const ptrdiff_t i = c * CHUNK;
        minidl_moments(grad + i, first + i, second + i, record, unscale);
        minidl_adam_step(master + i, first + i, second + i, lr * segment[0], segment[1], record);
    }
}

/* squares[2 c] and [2 c + 1]: the sums over chunk c of w^2 and of the squared direction with decay. */
MINIDL_CLONES
static void minidl_lamb_moments(
    const float *master, const float *grad, float *first, float *second, const int32_t *segment_of,
    const float *segments, ptrdiff_t chunks, float unscale, const float *record, float *squares)
{
    const float inverse1 = 1.0f / record[4], inverse2 = 1.0f / record[5], eps = record[2];
    for (ptrdiff_t c = 0; c < chunks; c++) {
        const float decay = segments[4 * (ptrdiff_t)segment_of[c] + 1];
        const ptrdiff_t first_of = c * CHUNK;
        minidl_moments(grad + first_of, first + first_of, second + first_of, record, unscale);
        float w2 = 0.0f, u2 = 0.0f;
        for (ptrdiff_t i = first_of; i < first_of + CHUNK; i++) {
            const float u = decay * master[i] + minidl_direction(first[i], second[i], inverse1, inverse2, eps);
            w2 += master[i] * master[i];
            u2 += u * u;
        }
        squares[2 * c] = w2;
        squares[2 * c + 1] = u2;
    }
}

/* trust: one factor per segment. */
MINIDL_CLONES
static void minidl_lamb(
    float *master, const float *first, const float *second, const int32_t *segment_of, const float *segments,
    const float *trust, ptrdiff_t chunks, float lr, const float *record)
{
    for (ptrdiff_t c = 0; c < chunks; c++) {
        const ptrdiff_t s = segment_of[c], i = c * CHUNK;
        minidl_adam_step(
            master + i, first + i, second + i, lr * segments[4 * s] * trust[s], segments[4 * s + 1], record);
    }
}

MINIDL_CLONES
static void minidl_lars(
    float *master, const float *grad, float *buffer, const int32_t *segment_of, const float *segments,
    const float *trust, ptrdiff_t chunks, float lr, float momentum, float unscale)
{
    for (ptrdiff_t c = 0; c < chunks; c++) {
        const ptrdiff_t s = segment_of[c], first = c * CHUNK;
        const float rate = lr * segments[4 * s], decay = segments[4 * s + 1], keep = momentum * segments[4 * s + 2];
        const float factor = trust[s];
        for (ptrdiff_t i = first; i < first + CHUNK; i++) {
            buffer[i] = keep * buffer[i] + factor * (grad[i] * unscale + decay * master[i]);
            master[i] -= rate * buffer[i];
        }
    }
}

#endif
