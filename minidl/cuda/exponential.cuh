// Elementary functions that take a few instructions and err by a few units in the last place of float32.
#pragma once

DEVICE float two_to_the(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// e^x, 0 below -87.3.
DEVICE float exponential(float x) { return two_to_the(x * 1.4426950408889634f); }

// Exponentials around a centre, an instruction less for each: 2^(x log2(e) - centre log2(e)), in which the second
// product is rounded once for all; `slip` is what that left out.
struct Around {
    float scaled, slip;

    __device__ __forceinline__ explicit Around(float centre) {
        scaled = centre * 1.4426950408889634f;
        slip = fmaf(centre, 1.4426950408889634f, -scaled);
    }
    // (x - centre) log2(e) + slip
    __device__ __forceinline__ float power(float x) const { return fmaf(x, 1.4426950408889634f, -scaled); }
    // e^(x - centre) * 2^slip
    __device__ __forceinline__ float exponential(float x) const { return two_to_the(power(x)); }
    // The sum of w (centre - x), from the sum of w power(x) and that of w.
    __device__ __forceinline__ float below(float powers, float weights) const {
        return 0.6931471805599453f * fmaf(weights, slip, -powers);
    }
    // The logarithm of a sum of e^(x - centre), from the sum of those.
    __device__ __forceinline__ float log_sum(float sum) const { return fmaf(slip, -0.6931471805599453f, logf(sum)); }
};

DEVICE float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float logistic(float x) { return reciprocal(1.0f + exponential(-x)); }

// Smaller of a and a bound; NaN stays NaN.
DEVICE float clamp_above(float a, float bound) {
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(bound));
    return y;
}

// The logistic function of x, and what it lacks of one, which is that of -x and would cancel. Where e^-x would overflow
// it is as large as its reciprocal can be, so that their product is one.
struct Logistic {
    float of, rest;

    __device__ __forceinline__ explicit Logistic(float x) {
        const float t = two_to_the(clamp_above(x * -1.4426950408889634f, 126.0f));
        of = reciprocal(1.0f + t);
        rest = t * of;
    }
};
