// Fragments of conv2d_stem.cu for 16-bit types: words are aligned pairs of values, products take two groups of eight.
#pragma once

// Channel of a tile that is column n of fragment j: thread t of a quad has columns 2t and 2t + 1 of each, of four
// fragments eight neighbouring channels.
DEVICE int channel_of(int j, int n) { return j / 4 * 32 + n / 2 * 8 + j % 4 * 2 + n % 2; }

// What a lane has of the filter of one channel: the pair of a step's first or second half.
DEVICE u32 filter_word(const T* filter, int step, int half, int lane, int lead) {
    const int group = 2 * step + half, row = group / GROUPS_W;
    u32 word = 0;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const int value = group % GROUPS_W * GROUP + lane % 4 * 2 + e - lead;
        if (row < KERNEL_H && value >= 0 && value < WINDOW) word |= u32(filter[row * WINDOW + value].bits) << (16 * e);
    }
    return word;
}

// What of this thread's pair in the first and last group of a window belongs to it.
struct Mask {
    u32 first, last;

    static __device__ __forceinline__ u32 of(int group, int lead) {
        const int value = group * GROUP + threadIdx.x % 4 * 2 - lead;
        const auto inside = [](int v) { return v >= 0 && v < WINDOW; };
        return (inside(value) ? 0xffffu : 0u) | (inside(value + 1) ? 0xffff0000u : 0u);
    }

    __device__ __forceinline__ explicit Mask(int lead) : first(of(0, lead)), last(of(GROUPS_W - 1, lead)) {}

    __device__ __forceinline__ u32 cut(u32 pair, int group) const {
        constexpr bool WHOLE = !APART && !LEAD;
        if (group % GROUPS_W == GROUPS_W - 1 && !(WHOLE && WINDOW % GROUP == 0)) return pair & last;
        if (group % GROUPS_W == 0 && !WHOLE) return pair & first;
        return pair;
    }
};

// What a lane has of a fragment of 16 pixels for one step of the filter. `window`: its word in the first pixel's first
// group, or with `lead` the one that ends with its first value.
DEVICE void gather(u32 (&a)[4], const unsigned char* window, const Mask& mask, int step, u32 lead) {
    const auto pair_at = [&](const unsigned char* at) {
        const u32* words = reinterpret_cast<const u32*>(at);
        if (!SPLIT || APART) return words[0];
        return __byte_perm(words[0], words[1], lead ? 0x5432 : 0x3210);
    };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int group = 2 * step + half;
        const unsigned char* pair = window + group / GROUPS_W * (LENGTH * 2) + group % GROUPS_W * (GROUP * 2);
        a[2 * half] = group < GROUPS ? mask.cut(pair_at(pair), group) : 0;
        a[2 * half + 1] = group < GROUPS ? mask.cut(pair_at(pair + BELOW), group) : 0;
    }
}

#if !WARPGROUP
// A fragment times one step of the filter.
DEVICE void multiply(float (&sum)[COLUMNS][4], const unsigned char* window, const Mask& mask,
                     const u32 (&b)[COLUMNS][2], int step) {
    u32 a[4];
    gather(a, window, mask, step, 0);
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        if (2 * step + 1 < GROUPS)
            multiply_fragments(sum[j], a, b[j]);
        else
            multiply_halves(sum[j], a, b[j]);
    }
}
#endif

// Two neighbouring channels, from fragment j on, as they are stored.
DEVICE void put_pair(u32 (&part)[4], int j, float low, float high) {
    part[j % 4] = Rounding<T>::round_pair(low, high);
}
