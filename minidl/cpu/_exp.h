/* An exponential that compilers vectorise: no branch, no call. */
#ifndef MINIDL_EXP_H
#define MINIDL_EXP_H

#include <string.h>

#include "_simd.h"

/* e^x within 2 units in the last place: 0 below -87, e^88 above 88; NaN stays NaN. e^x = 2^n e^r with |r| <= ln 2 / 2. */
MINIDL_INLINE float minidl_exp(float x)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number, in the lowest bits */
    const float bounded = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    const float shifted = bounded * 1.44269504f + magic, n = shifted - magic;
    const float r = bounded - n * 0.693359375f + n * 2.12194440e-4f; /* ln 2 in two parts, the first exact in n * it */
    float p = 1.0f / 5040.0f;
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits << 23) + 0x3F800000u; /* 2^n: the lowest bits of `shifted` are n */
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return x < -87.0f ? 0.0f : p * scale;
}

#endif
