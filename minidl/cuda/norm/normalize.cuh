// What a batch norm makes of x, (x - mean)*rstd*gamma + beta, and which outputs of a ReLU over it were positive: one
// formula for every kernel that makes it, so that whoever makes a value or a mask again finds the same bits.
//
// scale = rstd*gamma. Of float32 (x - mean)*scale + beta, of 16-bit types x*scale + shift with shift = beta -
// mean*scale, also in float32 and an instruction less, which is by at most 2^-24 |shift| farther from the truth. That
// is most far from zero, where x itself is coarse: between neighbours among the x the output moves by 2^12 times as
// much or more.
#pragma once
#include "common.cuh"

constexpr bool FOLDED = sizeof(T) == 2;  // whether the mean is in the shift

DEVICE float shift_of(float mean, float scale, float beta) { return FOLDED ? fmaf(-mean, scale, beta) : beta; }

DEVICE float normalize(float x, float mean, float scale, float shift) {
    return fmaf(FOLDED ? x : x - mean, scale, shift);
}

// 1/count, for a count from 1 on: forty bits of it, rounded. A division's branch for odd operands would hold up the
// loads behind it.
DEVICE float inverse_of(double count) {
    double inverse;
    asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(inverse) : "d"(count));
    return float(fma(fma(-count, inverse, 1.0), inverse, inverse));
}

// The forward pass rounds to T: half of the smallest number of T rounds to zero, what is larger does not.
template <class S> struct RoundsToZero;
template <> struct RoundsToZero<float> { static constexpr float most = 0.0f; };
template <> struct RoundsToZero<bf16> { static constexpr float most = 0x1p-134f; };
template <> struct RoundsToZero<f16> { static constexpr float most = 0x1p-25f; };

DEVICE bool was_positive(float x, float mean, float scale, float shift) {
    return normalize(x, mean, scale, shift) > RoundsToZero<T>::most;
}
