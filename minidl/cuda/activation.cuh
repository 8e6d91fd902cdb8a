// Activation functions as types, for every kernel that applies one: of its own (activation.cu) or behind a batch norm.
#pragma once
#include "common.cuh"
#include "exponential.cuh"

// Near zero by its series, where 1 - 2 / (e^2x + 1) would cancel.
DEVICE float hyperbolic(float x) {
    const float z = x * x;
    const float series =
        x * fmaf(z, fmaf(z, fmaf(z, fmaf(z, 62.0f / 2835.0f, -17.0f / 315.0f), 2.0f / 15.0f), -1.0f / 3.0f), 1.0f);
    return fabsf(x) < 0.3f ? series : 1.0f - 2.0f * reciprocal(exponential(2.0f * x) + 1.0f);
}

// Distribution and density of the normal law. The tail is e^(-x^2/2) times a polynomial in t = 1 / (1 + 0.31 |x|),
// fitted to 2e-7 relative; the same on CPUs (_activation.h).
struct Normal {
    float below, density;

    __device__ __forceinline__ explicit Normal(float x) {
        const float a = fabsf(x), t = reciprocal(fmaf(0.31f, a, 1.0f)), peak = exponential(-0.5f * a * a);
        float q = 0.07177965342998505f;
        q = fmaf(q, t, -0.28363126516342163f);
        q = fmaf(q, t, 0.3109051287174225f);
        q = fmaf(q, t, -0.030559580773115158f);
        q = fmaf(q, t, 0.22064556181430817f);
        q = fmaf(q, t, 0.21540401875972748f);
        q = fmaf(q, t, 0.2481444776058197f);
        q = fmaf(q, t, 0.24731215834617615f);
        const float tail = 0.5f * q * t * peak;
        below = x < 0.0f ? tail : 1.0f - tail;
        density = 0.3989422804014327f * peak;
    }
};

// The logistic function of x, and the slope of its product with x. Without what it lacks of one the slope errs by |x|
// 2^-23, which 16-bit types do not see, and takes three instructions less.
struct Swish {
    float of, slope;

    __device__ __forceinline__ explicit Swish(float x) {
        if constexpr (sizeof(T) == 2) {
            of = logistic(x);
            slope = fmaf(of, fmaf(-x, of, x), of);
        } else {
            const Logistic at(x);
            of = at.of;
            slope = at.of * fmaf(x, at.rest, 1.0f);
        }
    }
};

// Each: value(x, a), and gradient(dy, kept, a), a being the slope of leaky_relu; kept is the output where KEEPS_OUTPUT,
// else the input. What a ReLU cuts off is dropped, not multiplied.
struct relu {
    static constexpr bool KEEPS_OUTPUT = true;
    DEVICE float value(float x, float) { return clamp_below(x, 0.0f); }
    DEVICE float gradient(float dy, float y, float) { return y > 0.0f ? dy : 0.0f; }
};
struct relu6 {
    static constexpr bool KEEPS_OUTPUT = true;
    DEVICE float value(float x, float) { return clamp_above(clamp_below(x, 0.0f), 6.0f); }
    DEVICE float gradient(float dy, float y, float) { return y > 0.0f && y < 6.0f ? dy : 0.0f; }
};
struct leaky_relu {
    static constexpr bool KEEPS_OUTPUT = true;
    DEVICE float value(float x, float a) { return x > 0.0f ? x : a * x; }
    DEVICE float gradient(float dy, float y, float a) { return y > 0.0f ? dy : a * dy; }
};
struct sigmoid {
    static constexpr bool KEEPS_OUTPUT = true;
    DEVICE float value(float x, float) { return logistic(x); }
    DEVICE float gradient(float dy, float y, float) { return dy * y * (1.0f - y); }
};
struct tanh_ {
    static constexpr bool KEEPS_OUTPUT = true;
    DEVICE float value(float x, float) { return hyperbolic(x); }
    DEVICE float gradient(float dy, float y, float) { return dy * fmaf(-y, y, 1.0f); }
};
struct silu {
    static constexpr bool KEEPS_OUTPUT = false;
    DEVICE float value(float x, float) { return x * logistic(x); }
    DEVICE float gradient(float dy, float x, float) { return dy * Swish(x).slope; }
};
struct gelu {
    static constexpr bool KEEPS_OUTPUT = false;
    DEVICE float value(float x, float) { return x * Normal(x).below; }
    DEVICE float gradient(float dy, float x, float) {
        const Normal at(x);
        return dy * fmaf(x, at.density, at.below);
    }
};
struct gelu_tanh {  // (1 + tanh u) / 2 is the logistic function of 2u, which does not cancel
    static constexpr bool KEEPS_OUTPUT = false;
    static constexpr float scale = 1.5957691216057308f, cubic = 0.044715f;
    DEVICE float value(float x, float) { return x * logistic(scale * fmaf(cubic * x * x, x, x)); }
    DEVICE float gradient(float dy, float x, float) {
        const float u = scale * fmaf(cubic * x * x, x, x), inner = scale * fmaf(3.0f * cubic * x, x, 1.0f);
        const Logistic at(u);
        return dy * at.of * fmaf(x * inner, at.rest, 1.0f);
    }
};
struct hardswish {
    static constexpr bool KEEPS_OUTPUT = false;
    DEVICE float value(float x, float) { return x * clamp_above(clamp_below(x + 3.0f, 0.0f), 6.0f) * (1.0f / 6.0f); }
    DEVICE float gradient(float dy, float x, float) {
        return x >= 3.0f ? dy : x > -3.0f ? dy * fmaf(x, 1.0f / 3.0f, 0.5f) : 0.0f;
    }
};
