// Fragments of conv2d_stem.cu for float32, rounded to TF32: words are single values, products take one group of eight.
#pragma once

// Channel of a tile that is column n of fragment j: thread t of a quad has columns 2t and 2t + 1 of each, of two
// fragments four neighbouring channels.
DEVICE int channel_of(int j, int n) { return j / 2 * 16 + n / 2 * 4 + j % 2 * 2 + n % 2; }

// What a lane has of the filter of one channel: a value of a step's first or second half.
DEVICE u32 filter_word(const T* filter, int step, int half, int lane, int) {
    const int value = step % GROUPS_W * GROUP + half * 4 + lane % 4;
    return value < WINDOW ? round_to_tf32(__float_as_uint(filter[step / GROUPS_W * WINDOW + value])) : 0;
}

// Every window starts with a word.
struct Mask {
    __device__ __forceinline__ explicit Mask(int) {}
};

// A fragment of 16 pixels times one step of the filter. `window`: this thread's word in the first pixel's first group.
DEVICE void multiply(float (&sum)[COLUMNS][4], const unsigned char* window, const Mask&, const u32 (&b)[COLUMNS][2],
                     int step) {
    const unsigned char* group = window + step / GROUPS_W * (LENGTH * 4) + step % GROUPS_W * (GROUP * 4);
    u32 a[4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int value = step % GROUPS_W * GROUP + half * 4;  // of the window, the first of four
        // What lies beyond the window is cut off, for it may be infinite.
        if (value < WINDOW && (value + 4 <= WINDOW || value + int(threadIdx.x % 4) < WINDOW)) {
            a[2 * half] = round_to_tf32(*reinterpret_cast<const u32*>(group + half * 16));
            a[2 * half + 1] = round_to_tf32(*reinterpret_cast<const u32*>(group + half * 16 + BELOW));
        }
    }
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        if (step % GROUPS_W * GROUP + 4 < WINDOW)
            multiply_fragments(sum[j], a, b[j]);
        else
            multiply_halves(sum[j], a, b[j]);
    }
}

// Two neighbouring channels, from fragment j on, as they are stored.
DEVICE void put_pair(u32 (&part)[4], int j, float low, float high) {
    part[j % 2 * 2] = __float_as_uint(low), part[j % 2 * 2 + 1] = __float_as_uint(high);
}
