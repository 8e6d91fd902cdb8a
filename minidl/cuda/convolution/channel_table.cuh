// What threads that make values in shared memory need of their channels, in a table beside them.
#pragma once
#include "hopper.cuh"

// Some numbers of each of ALL channels. They lie in vectors of four, of each eight channels the first, then of each the
// second, so that lanes of neighbouring eights read neighbouring vectors.
template <int ALL>
struct ChannelTable {
    u32 base;

    __device__ __forceinline__ u32 place(int which, int channel) const {
        const int half = channel / 4 % 2 * (ALL / 2);
        return base + 4 * (which * ALL + half + channel / 8 * 4 + channel % 4);
    }

    __device__ __forceinline__ void store(int which, int channel, float value) const {
        store_shared(place(which, channel), value);
    }

    // Of eight channels, from a multiple of eight on.
    __device__ __forceinline__ void load(float (&v)[8], int which, int channel) const {
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            const uint4 four = load_shared(place(which, channel + i));
            v[i] = __uint_as_float(four.x), v[i + 1] = __uint_as_float(four.y);
            v[i + 2] = __uint_as_float(four.z), v[i + 3] = __uint_as_float(four.w);
        }
    }
};
