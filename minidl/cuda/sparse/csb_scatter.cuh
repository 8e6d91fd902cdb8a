// Elements of a block of side 64 on their way from memory, through registers, to a dense tile in shared memory.
//
//   indices   (nnz) row in block << 8 | column in block      u16;  values (nnz)      T
// Words of four elements are read whole, so both arrays begin at multiples of 8 bytes.
#pragma once
#include "common.cuh"

// Place::of(pair): the bytes from a tile's begin to where two elements go, packed like their indices.
template <class Place, int ROUNDS>
struct Elements {
    static constexpr int CHUNK = 32 * 4 * ROUNDS;  // elements that a warp holds
    uint2 indices[ROUNDS], values[ROUNDS];

    __device__ __forceinline__ void fetch(const u16* __restrict__ from, const T* __restrict__ values_from, int first,
                                          int end) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const int e = first + 4 * (32 * r + lane);
            if (e < end) {
                indices[r] = __ldg(reinterpret_cast<const uint2*>(from + e));
                values[r] = __ldg(reinterpret_cast<const uint2*>(values_from + e));
            }
        }
    }

    static __device__ __forceinline__ void put(u32 address, u32 value) {
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<u16>(value)) : "memory");
    }

    __device__ __forceinline__ void scatter(u32 tile, int first, int begin, int end) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const int e = first + 4 * (32 * r + lane);
            const u32 low = Place::of(indices[r].x), high = Place::of(indices[r].y);
            if (e >= begin && e < end) put(tile + (low & 0xffff), values[r].x);
            if (e + 1 >= begin && e + 1 < end) put(tile + (low >> 16), values[r].x >> 16);
            if (e + 2 >= begin && e + 2 < end) put(tile + (high & 0xffff), values[r].y);
            if (e + 3 >= begin && e + 3 < end) put(tile + (high >> 16), values[r].y >> 16);
        }
    }
};
