// What the weight gradients of Hopper share: the ring of a pipeline, and how sums leave the registers.
// Macro: VEC_Y (1, 2), values per access to the output.
#pragma once
#include "hopper.cuh"

// Where in a ring of COUNT stages the pipeline stands.
template <int COUNT>
struct Ring {
    int index = 0;
    u32 parity = 0;

    __device__ __forceinline__ void advance() {
        if (++index == COUNT) index = 0, parity ^= 1;
    }
};

// Neighbouring columns of one row.
DEVICE void put(float* to, float first, float second, bool add) {
    if constexpr (VEC_Y == 2) {
        float2& pair = *reinterpret_cast<float2*>(to);
        if (add) first += pair.x, second += pair.y;
        pair = make_float2(first, second);
    } else {
        to[0] = add ? to[0] + first : first;
        to[1] = add ? to[1] + second : second;
    }
}

// Writes a warp's 16 rows of a block of 64 columns: accumulators FIRST to FIRST + 31 of its warpgroup's product.
// output: row 0 of the block's tap; rows, columns: of the whole gradient; row: the warp's first; channel: the block's first.
template <int FIRST, int N>
DEVICE void write_block(const float (&sum)[N], float* output, int rows, int columns, int row, int channel, int channels,
                        bool add) {
    const int lane = threadIdx.x % 32;
    row += lane / 4;
    channel += lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i, row += 8) {
        if (row >= rows) return;
        float* const to = output + i64(row) * columns;
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if (channel + j * 8 < channels)
                put(to + channel + j * 8, sum[FIRST + j * 4 + i * 2], sum[FIRST + j * 4 + i * 2 + 1], add);
    }
}
