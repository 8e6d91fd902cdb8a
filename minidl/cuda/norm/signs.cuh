// Where a ReLU's output was positive, a bit for each value: what its backward pass needs of it, in an eighth of a byte.
//
// signs (rows, S) bytes: bit c % 8 of byte c / 8 for channel c; S is C / 8 rounded up to a multiple of 16, so that the
// copy engine can read rows.
#pragma once
#include "normalize.cuh"

DEVICE i64 signs_at(int row, int channels, int channel) {
    return i64(row) * ((channels + 127) / 128 * 16) + channel / 8;
}

// Of eight values from `channel` on, a multiple of eight.
DEVICE void store_signs(u8* signs, int row, int channels, int channel, const float (&v)[8]) {
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) bits |= v[i] > RoundsToZero<T>::most ? 1u << i : 0u;
    signs[signs_at(row, channels, channel)] = u8(bits);
}

// The bits from `channel` on, to the end of their byte.
DEVICE u32 load_signs(const u8* signs, int row, int channels, int channel) {
    return signs[signs_at(row, channels, channel)] >> channel % 8;
}
