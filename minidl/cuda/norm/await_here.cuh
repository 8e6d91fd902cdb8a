// Values that were loaded, and where they are waited for.
#pragma once
#include "common.cuh"

// Nothing that uses the value stands before this. The compiler converts what was loaded to double as soon as it can,
// which waits for memory before all loads further down are asked for: of what a step reads once, and no cache holds, 0.8
// us of the 2.4 that a merge took.
DEVICE void await_here(float& value) { asm volatile("" : "+f"(value)); }
DEVICE void await_here(double& value) { asm volatile("" : "+d"(value)); }
DEVICE void await_here(float2& value) { await_here(value.x), await_here(value.y); }
