// Dropout (Srivastava et al., JMLR 2014) with counter-based random numbers: the same bits as on the CPU, and the same
// mask in the backward pass without storing it.
//
//   x: N samples of `size` elements, sample n at x + n * sample_pitch; with -DPITCHED=1 a sample is made of pixels of
//   `channels` elements at `pitch` elements per pixel, else it is one run. y: (N, size) dense.
//   key: u32[4] [seed_low, seed_high, step, first_sample]
//   Element e of sample n has word e % 4 of Philox4x32-10 at counter (e / 4, first_sample + n, step, stream); it is
//   kept, times `scale`, where the word is at least `threshold`. With -DWHOLE=1 word 0 of counter (0, first_sample + n,
//   step, stream) decides for the whole sample (stochastic depth, Huang et al., ECCV 2016).
//
// A thread owns SPANS spans of SPAN neighbouring elements of a sample, blockDim.x spans apart, moved VEC at a time; all
// loads are in flight while words are drawn.
// bytes: x + y once each; four elements take 20 wide multiplies and 20 xors, half of what the memory leaves time for.
// The rest, addresses and the round keys, is shared by the spans of a thread; 32 registers let all threads of a
// multiprocessor draw at once, which is worth more than a fourth span.
#include "common.cuh"
#include "grid.cuh"
#include "philox.cuh"

#define SPAN (VEC > 4 ? VEC : 4)

extern "C" __global__ void __launch_bounds__(256, sizeof(T) * VEC == 16 ? 8 : 5)
dropout(const T* __restrict__ x, T* __restrict__ y, const u32* __restrict__ key, int samples, i64 size, int spans,
        i64 sample_pitch, u32 channels, i64 pitch, u32 stream, u32 threshold, float scale) {
    await_predecessor();
    const Place at = place<SPANS>(samples, spans);
    if (!at.inside) return;
    const T* sample = x + at.row * sample_pitch;
    Raw<T, VEC> raw[SPANS][SPAN / VEC];
    // A span in front of the last is whole, and so is the last where vectors are as long as spans.
    const auto inside = [&](int span, int i) {
        return span < spans && (VEC == SPAN || i64(span) * SPAN + i * VEC < size);
    };
#pragma unroll
    for (int s = 0; s < SPANS; ++s)
#pragma unroll
        for (int i = 0; i < SPAN / VEC; ++i) {
            const int span = at.item + s * blockDim.x;
            if (!inside(span, i)) break;
            const i64 e = i64(span) * SPAN + i * VEC;
#if PITCHED
            const u32 pixel = u32(e) / channels;
            raw[s][i] = load_raw<VEC>(sample + pixel * pitch + (u32(e) - pixel * channels));
#else
            raw[s][i] = load_raw<VEC>(sample + e);
#endif
        }
    T* out = y + at.row * size;
#if WHOLE
    const u32 word = philox4x32(0, key[3] + at.row, key[2], stream, key[0], key[1]).word[0];
#endif
#pragma unroll
    for (int s = 0; s < SPANS; ++s) {
        const int span = at.item + s * blockDim.x;
        if (span >= spans) break;
        u32 words[SPAN];
#if WHOLE
#pragma unroll
        for (int i = 0; i < SPAN; ++i) words[i] = word;
#else
#pragma unroll
        for (int i = 0; i < SPAN / 4; ++i) {
            const u32 counter = u32(span) * (SPAN / 4) + i;
            const PhiloxWords drawn = philox4x32(counter, key[3] + at.row, key[2], stream, key[0], key[1]);
#pragma unroll
            for (int j = 0; j < 4; ++j) words[4 * i + j] = drawn.word[j];
        }
#endif
#pragma unroll
        for (int i = 0; i < SPAN / VEC; ++i) {
            if (!inside(span, i)) break;
            float v[VEC];
            unpack(raw[s][i], v);
#pragma unroll
            for (int e = 0; e < VEC; ++e) v[e] = words[i * VEC + e] >= threshold ? v[e] * scale : 0.0f;
            store(out + i64(span) * SPAN + i * VEC, v);
        }
    }
}
