// Elementary functions that take a few instructions and err by a few units in the last place of float32.
#pragma once

// e^x, 0 below -87.3.
DEVICE float exponential(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
    return y;
}

DEVICE float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float logistic(float x) { return reciprocal(1.0f + exponential(-x)); }
