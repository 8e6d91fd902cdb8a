// Where something lies in shared memory, as PTX names it.
#pragma once
#include "common.cuh"

DEVICE u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }
