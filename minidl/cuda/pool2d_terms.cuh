// What the windows of a max pooling have for the pixels they cover (pool2d.cu, the backward pass).
#pragma once

// A window's gradient, and where its maximum was.
struct Window {
    Raw<T, VEC> dy;
    Raw<index_t, VEC> place;

    __device__ __forceinline__ Window() {
#pragma unroll
        for (int i = 0; i < (VEC * INDEX_BITS + 31) / 32; ++i) place.pairs[i] = 0;
        const float zeros[VEC] = {};
        dy = pack<T>(zeros);
    }

    // The tap that was largest in channel i: a permutation of bytes, for what compilers make of masks and of 64-bit
    // words costs twice the comparisons.
    __device__ __forceinline__ u32 tap(int i) const {
        constexpr int EACH = 32 / INDEX_BITS;
        return __byte_perm(place.pairs[i / EACH], 0, INDEX_BITS == 8 ? 0x4440 + i % EACH : 0x4410 + i % EACH * 0x22);
    }
    // Those of channels 2j and 2j + 1 as halves of a word, of bytes.
    __device__ __forceinline__ u32 places(int j) const {
        return __byte_perm(place.pairs[j / 2], 0, j % 2 ? 0x4342 : 0x4140);
    }
};

// A pixel's sum of what four windows at most have for it, two channels at a time: packed terms, zero where the pixel
// was not the largest. Of two, packed, as rounded as their float32 sum would be.
constexpr bool PACKED = PER_WORD == 2 && INDEX_BITS == 8 && VEC > 1 && COVER_H * COVER_W <= 4;

template <bool, class A, class B> struct Either { typedef A type; };
template <class A, class B> struct Either<false, A, B> { typedef B type; };

struct Terms {
    u32 words[COVER_H * COVER_W + 1][WORDS];
    int count = 0;  // known when compiled: every loop around is unrolled

    __device__ __forceinline__ void take(const Window& window, int tap) {
#pragma unroll
        for (int j = 0; j < WORDS; ++j)
            words[count][j] = window.dy.pairs[j] & halves_equal(window.places(j), tap * ONE_PER_LANE);
        ++count;
    }
    __device__ __forceinline__ void plus(const Lanes& other) {
#pragma unroll
        for (int j = 0; j < WORDS; ++j) words[count][j] = other.pairs[j];
        ++count;
    }
    __device__ __forceinline__ Lanes rounded() const {
        Lanes all;
        if (count > 2) {
            float sum[VEC] = {};
#pragma unroll
            for (int i = 0; i < COVER_H * COVER_W + 1; ++i) {
                if (i >= count) break;
                Lanes one;
                float value[VEC];
#pragma unroll
                for (int j = 0; j < WORDS; ++j) one.pairs[j] = words[i][j];
                unpack(one, value);
#pragma unroll
                for (int e = 0; e < VEC; ++e) sum[e] += value[e];
            }
            return pack<T>(sum);
        }
#pragma unroll
        for (int j = 0; j < WORDS; ++j)
            all.pairs[j] = count == 0 ? 0 : count == 1 ? words[0][j] : lane_add(words[0][j], words[1][j]);
        return all;
    }
};
