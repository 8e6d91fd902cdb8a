// Dropout (Srivastava et al., JMLR 2014) with counter-based random numbers: the same bits as on the CPU, and the same
// mask in the backward pass without storing it.
//
//   x: N samples of `size` elements, sample n at x + n * sample_pitch; with -DPITCHED=1 a sample is made of pixels of
//   `channels` elements at `pitch` elements per pixel, else it is one run. y: (N, size) dense.
//   key: u32[4] [seed_low, seed_high, step, first_sample]
//   Element e of sample n has word e % 4 of Philox4x32-10 at counter (e / 4, first_sample + n, step, stream); it is
//   kept, times `scale`, where the word is at least `threshold`.
//
// A thread owns SPANS spans of SPAN neighbouring elements of a sample, blockDim.x spans apart, moved VEC at a time; all
// loads are in flight while words are drawn.
// bytes: x + y once each; four elements take 20 wide multiplies and 20 xors, half of what the memory leaves time for.
#include "common.cuh"
#include "grid.cuh"
#include "philox.cuh"

#define SPAN (VEC > 4 ? VEC : 4)

extern "C" __global__ void __launch_bounds__(256)
dropout(const T* __restrict__ x, T* __restrict__ y, const u32* __restrict__ key, int samples, i64 size, int spans,
        i64 sample_pitch, u32 channels, i64 pitch, u32 stream, u32 threshold, float scale) {
    const Place at = place<SPANS>(samples, spans);
    if (!at.inside) return;
    const T* sample = x + at.row * sample_pitch;
    Raw<T, VEC> raw[SPANS][SPAN / VEC];
#pragma unroll
    for (int s = 0; s < SPANS; ++s)
#pragma unroll
        for (int i = 0; i < SPAN / VEC; ++i) {
            const i64 e = i64(at.item + s * blockDim.x) * SPAN + i * VEC;
            if (e >= size) break;
#if PITCHED
            const u32 pixel = u32(e) / channels;
            raw[s][i] = load_raw<VEC>(sample + pixel * pitch + (u32(e) - pixel * channels));
#else
            raw[s][i] = load_raw<VEC>(sample + e);
#endif
        }
#pragma unroll
    for (int s = 0; s < SPANS; ++s) {
        const i64 first = i64(at.item + s * blockDim.x) * SPAN;
        u32 words[SPAN];
#pragma unroll
        for (int i = 0; i < SPAN / 4; ++i) {
            const PhiloxWords drawn = philox4x32(u32(first / 4) + i, key[3] + at.row, key[2], stream, key[0], key[1]);
#pragma unroll
            for (int j = 0; j < 4; ++j) words[4 * i + j] = drawn.word[j];
        }
#pragma unroll
        for (int i = 0; i < SPAN / VEC; ++i) {
            if (first + i * VEC >= size) break;
            float v[VEC];
            unpack(raw[s][i], v);
#pragma unroll
            for (int e = 0; e < VEC; ++e) v[e] = words[i * VEC + e] >= threshold ? v[e] * scale : 0.0f;
            store(y + at.row * size + first + i * VEC, v);
        }
    }
}
