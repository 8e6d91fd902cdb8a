// Copies between dense and pitched arrays, with or without a change of type.
//
// x  (rows, channels) at x_pitch elements per row, type SOURCE
// y  (rows, channels) at y_pitch elements per row, type TARGET
//
// copy_kernel moves bytes: its channels, pitches and VEC count bytes, whatever the type. convert_kernel goes through
// float and rounds once to nearest even; uint8 sources become 0..255.
//
// assign_kernel writes up to four 32-bit words that come as arguments: one thread, in stream order.
//
// Mapping: Share (common.cuh). Cost: no FLOP; bytes = size * (sizeof source + sizeof target), each once; floor on an
// H200 at 4.2 TB/s: bf16 to bf16 0.95 us per million elements, float32 to bf16 1.43 us.

#include "common.cuh"

#ifdef ASSIGN

extern "C" __global__ void assign_kernel(u32* out, int count, u32 a, u32 b, u32 c, u32 d) {
    await_predecessor();
    const u32 words[4] = {a, b, c, d};
    for (int i = 0; i < count; ++i) out[i] = words[i];
}

#elif defined(COPY)

extern "C" __global__ void __launch_bounds__(256, 4)
copy_kernel(const u8* __restrict__ x, u8* __restrict__ y, Walk walk) {
    await_predecessor();
    const Share at(walk, UNROLL);
    Raw<u8, VEC> raw[UNROLL];
    for_rows<UNROLL>(
        at, [&](int u, int row) { raw[u] = load_raw<VEC>(x + row_offset(row, walk.pitch[0]) + at.channel); },
        [&](int u, int row) { store_raw(y + row_offset(row, walk.pitch[1]) + at.channel, raw[u]); });
    const i64 i = tail_element(walk);
    if (i >= 0) y[i] = x[i];
}

#else

DEVICE float to_float(u8 x) { return float(x); }

template <int N>
DEVICE void unpack(const Raw<u8, N>& raw, float (&v)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = float(raw.items[i]);
}

extern "C" __global__ void __launch_bounds__(256, 4)
convert_kernel(const SOURCE* __restrict__ x, TARGET* __restrict__ y, Walk walk) {
    await_predecessor();
    const Share at(walk, UNROLL);
    Raw<SOURCE, VEC> raw[UNROLL];
    for_rows<UNROLL>(
        at, [&](int u, int row) { raw[u] = load_raw<VEC>(x + row_offset(row, walk.pitch[0]) + at.channel); },
        [&](int u, int row) {
            float v[VEC];
            unpack(raw[u], v);
            store(y + row_offset(row, walk.pitch[1]) + at.channel, v);
        });
    const i64 i = tail_element(walk);
    if (i >= 0) y[i] = from_float<TARGET>(to_float(x[i]));
}

#endif
