/* Loops of the optimizer over flat float32 arenas. */
#ifndef MINIDL_OPTIM_H
#define MINIDL_OPTIM_H

#include <string.h>

#include "_simd.h"

enum { CHUNK = 64 /* elements that belong to one segment */ };

/* The buffer before the gradient comes: one expression, so that it rounds alike wherever it is computed. */
MINIDL_INLINE float decayed(float w, float buffer, float decay, float keep)
{
    return keep * buffer + decay * w;
}

MINIDL_INLINE void sgd_chunks(
    float *RESTRICT master, const float *RESTRICT grad, float *RESTRICT buffer, float *RESTRICT working,
    const int32_t *segment_of, const float *segments, ptrdiff_t chunks, float lr, float momentum, float inverse_scale,
    int nesterov, int has_grad, int has_buffer, int has_working)
{
    for (ptrdiff_t chunk = 0; chunk < chunks; chunk++) {
        const float *segment = segments + 4 * (ptrdiff_t)segment_of[chunk];
        const float rate = lr * segment[0], decay = segment[1], keep = momentum * segment[2];
        const ptrdiff_t first = chunk * CHUNK;
        for (ptrdiff_t i = first; i < first + CHUNK; i++) {
            float b = 0, d = 0;
            if (has_buffer && has_grad)
                buffer[i] = b = decayed(master[i], buffer[i], decay, keep) + grad[i] * inverse_scale;
            else if (has_buffer)
                b = buffer[i];
            if (nesterov || !has_buffer) d = grad[i] * inverse_scale + decay * master[i];
            if (has_buffer) d = nesterov ? d + keep * b : b;
            const float w = master[i] - rate * d;
            master[i] = w;
            if (has_working) working[i] = w;
        }
    }
}

/* Stochastic gradient descent; buffer and working may be NULL, grad if it is in the buffer. A segment is [lr_scale, decay, momentum_scale, 0]. */
MINIDL_CLONES
static void minidl_sgd(
    float *master, const float *grad, float *buffer, float *working, const int32_t *segment_of, const float *segments,
    ptrdiff_t chunks, float lr, float momentum, float inverse_scale, int nesterov)
{
#define MINIDL_SGD(nesterov, has_grad, has_buffer, has_working)                                                      \
    sgd_chunks(master, grad, buffer, working, segment_of, segments, chunks, lr, momentum, inverse_scale, nesterov, \
               has_grad, has_buffer, has_working)
    if (!buffer && working) MINIDL_SGD(0, 1, 0, 1);
    else if (!buffer) MINIDL_SGD(0, 1, 0, 0);
    else if (!grad && working) MINIDL_SGD(0, 0, 1, 1);
    else if (!grad) MINIDL_SGD(0, 0, 1, 0);
    else if (nesterov && working) MINIDL_SGD(1, 1, 1, 1);
    else if (nesterov) MINIDL_SGD(1, 1, 1, 0);
    else if (working) MINIDL_SGD(0, 1, 1, 1);
    else MINIDL_SGD(0, 1, 1, 0);
#undef MINIDL_SGD
}

/* buffer = momentum * buffer + decay * master. */
MINIDL_CLONES
static void minidl_sgd_begin(
    const float *master, float *buffer, const int32_t *segment_of, const float *segments, ptrdiff_t chunks,
    float momentum)
{
    for (ptrdiff_t chunk = 0; chunk < chunks; chunk++) {
        const float *segment = segments + 4 * (ptrdiff_t)segment_of[chunk];
        const float decay = segment[1], keep = momentum * segment[2];
        const ptrdiff_t first = chunk * CHUNK;
        for (ptrdiff_t i = first; i < first + CHUNK; i++)
            buffer[i] = decayed(master[i], buffer[i], decay, keep);
    }
}

/* 1 when an element is infinite or not a number: all bits of its exponent are set. */
MINIDL_CLONES
static int minidl_any_nonfinite(const float *x, ptrdiff_t n)
{
    int found = 0;
    for (ptrdiff_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        found |= (bits & 0x7F800000u) == 0x7F800000u;
    }
    return found;
}

#endif
