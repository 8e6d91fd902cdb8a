/* Activation functions and their gradients on flat float32 arrays: branch-free, so that compilers vectorise them. */
#ifndef MINIDL_ACTIVATION_H
#define MINIDL_ACTIVATION_H

#include <math.h>

#include "_exp.h"

MINIDL_INLINE float minidl_logistic(float x) { return 1.0f / (1.0f + minidl_exp(-x)); }

/* Near zero by its series, where 1 - 2 / (e^2x + 1) would cancel. */
MINIDL_INLINE float minidl_hyperbolic(float x)
{
    const float z = x * x;
    const float series =
        x * (1.0f + z * (-1.0f / 3.0f + z * (2.0f / 15.0f + z * (-17.0f / 315.0f + z * (62.0f / 2835.0f)))));
    const float far = 1.0f - 2.0f / (minidl_exp(2.0f * x) + 1.0f);
    return z < 0.09f ? series : far;
}

/* The normal law's probability below x, and its density times sqrt(2 pi). The tail is e^(-x^2/2) times a polynomial in
 * t = 1 / (1 + 0.31 |x|), fitted to 2e-7 relative; the same on GPUs (activation.cuh). */
MINIDL_INLINE float minidl_normal_below(float x, float *peak)
{
    const float a = fabsf(x), t = 1.0f / (1.0f + 0.31f * a), e = minidl_exp(-0.5f * a * a);
    float q = 0.07177965342998505f;
    q = q * t - 0.28363126516342163f;
    q = q * t + 0.3109051287174225f;
    q = q * t - 0.030559580773115158f;
    q = q * t + 0.22064556181430817f;
    q = q * t + 0.21540401875972748f;
    q = q * t + 0.2481444776058197f;
    q = q * t + 0.24731215834617615f;
    const float tail = 0.5f * q * t * e;
    *peak = e;
    return x < 0.0f ? tail : 1.0f - tail;
}

MINIDL_INLINE float minidl_gelu(float x)
{
    float peak;
    return x * minidl_normal_below(x, &peak);
}

MINIDL_INLINE float minidl_gelu_slope(float x)
{
    float peak;
    const float below = minidl_normal_below(x, &peak);
    return below + x * (0.3989422804014327f * peak);
}

/* (1 + tanh u) / 2 of the approximation is the logistic function of 2u, which does not cancel: this is 2u. */
MINIDL_INLINE float minidl_gelu_inner(float x) { return 1.5957691216057308f * (x + 0.044715f * x * x * x); }

MINIDL_INLINE float minidl_gelu_tanh_slope(float x)
{
    const float u = minidl_gelu_inner(x), inner = 1.5957691216057308f * (1.0f + 3.0f * 0.044715f * x * x);
    return minidl_logistic(u) * (1.0f + x * inner * minidl_logistic(-u));
}

MINIDL_INLINE float minidl_silu_slope(float x) { return minidl_logistic(x) * (1.0f + x * minidl_logistic(-x)); }

MINIDL_INLINE float minidl_clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

/* NAME(x -> VALUE), (g, k -> GRADIENT): v is an element of the input; g one of dy, k of what was kept. Both sides of a
 * choice are loaded before it, so that it becomes a select and not a branch. Comparisons keep NaN. */
#define MINIDL_ACTIVATION(NAME, VALUE, GRADIENT)                                                                \
    MINIDL_CLONES static void minidl_map_##NAME(const float *RESTRICT x, float *RESTRICT y, ptrdiff_t n, float a)   \
    {                                                                                                           \
        (void)a;                                                                                                \
        for (ptrdiff_t i = 0; i < n; i++) {                                                                     \
            const float v = x[i];                                                                               \
            y[i] = VALUE;                                                                                       \
        }                                                                                                       \
    }                                                                                                           \
    MINIDL_CLONES static void minidl_map_##NAME##_backward(                                                       \
        const float *RESTRICT dy, const float *RESTRICT kept, const float *RESTRICT add, float *RESTRICT dx,    \
        ptrdiff_t n, float a)                                                                                   \
    {                                                                                                           \
        (void)a;                                                                                                \
        if (add)                                                                                                \
            for (ptrdiff_t i = 0; i < n; i++) {                                                                 \
                const float g = dy[i], k = kept[i];                                                             \
                dx[i] = (GRADIENT) + add[i];                                                                    \
            }                                                                                                   \
        else                                                                                                    \
            for (ptrdiff_t i = 0; i < n; i++) {                                                                 \
                const float g = dy[i], k = kept[i];                                                             \
                dx[i] = GRADIENT;                                                                               \
            }                                                                                                   \
    }

MINIDL_ACTIVATION(relu, v < 0.0f ? 0.0f : v, k > 0.0f ? g : 0.0f)
MINIDL_ACTIVATION(relu6, minidl_clamp(v, 0.0f, 6.0f), (k > 0.0f) & (k < 6.0f) ? g : 0.0f)
MINIDL_ACTIVATION(leaky_relu, v > 0.0f ? v : a * v, k > 0.0f ? g : a * g)
MINIDL_ACTIVATION(sigmoid, minidl_logistic(v), g * k * (1.0f - k))
MINIDL_ACTIVATION(tanh, minidl_hyperbolic(v), g * (1.0f - k * k))
MINIDL_ACTIVATION(silu, v * minidl_logistic(v), g * minidl_silu_slope(k))
MINIDL_ACTIVATION(gelu, minidl_gelu(v), g * minidl_gelu_slope(k))
MINIDL_ACTIVATION(gelu_tanh, v * minidl_logistic(minidl_gelu_inner(v)), g * minidl_gelu_tanh_slope(k))
MINIDL_ACTIVATION(hardswish, v * minidl_clamp(v + 3.0f, 0.0f, 6.0f) * (1.0f / 6.0f),
                  k >= 3.0f ? g : k > -3.0f ? g * (k * (1.0f / 3.0f) + 0.5f) : 0.0f)

/* In the order of FUNCTIONS in _activation.pyx. */
#define MINIDL_ACTIVATIONS(CALL) \
    CALL(0, relu) CALL(1, relu6) CALL(2, leaky_relu) CALL(3, sigmoid) CALL(4, tanh) CALL(5, silu) CALL(6, gelu) \
    CALL(7, gelu_tanh) CALL(8, hardswish)

static void minidl_activate(int function, const float *x, float *y, ptrdiff_t n, float a)
{
#define CALL(index, name) case index: minidl_map_##name(x, y, n, a); break;
    switch (function) { MINIDL_ACTIVATIONS(CALL) }
#undef CALL
}

static void minidl_activate_backward(
    int function, const float *dy, const float *kept, const float *add, float *dx, ptrdiff_t n, float a)
{
#define CALL(index, name) case index: minidl_map_##name##_backward(dy, kept, add, dx, n, a); break;
    switch (function) { MINIDL_ACTIVATIONS(CALL) }
#undef CALL
}

#endif
