// Values that were loaded, and where they are waited for.
#pragma once
#include "common.cuh"

// Nothing that uses the value stands before this. The compiler converts what was loaded to double as soon as it can,
// and so waits for memory before it asks for all that is loaded further down: running statistics, of which no cache
// knows any more what the step before wrote, before the parts of the new ones.
DEVICE void await_here(float& value) { asm volatile("" : "+f"(value)); }
DEVICE void await_here(double& value) { asm volatile("" : "+d"(value)); }
DEVICE void await_here(float2& value) { await_here(value.x), await_here(value.y); }
