// What is added to every second pixel of every second line in conv2d_hopper.cu; a part of that file. Those pixels of a
// slab's 64 rows follow each other in memory: one box brings them to the beginning of the slab's buffer, from where
// threads add them to their sums before results take its place.
#pragma once

// Such pixels before one of a class.
DEVICE int spaced_before(const Class& c, const Pixel& at) {
    return (at.image * ((c.height + 1) / 2) + (at.y + 1) / 2) * ((c.width + 1) / 2) + (at.y % 2 ? 0 : (at.x + 1) / 2);
}

// Adds to the sums of 64 columns of a block of rows, from sum[from] on, what the slab's buffer has of `row` and the 63
// below; the others get zeros.
template <int N>
DEVICE void add_spaced(float (&sum)[N], int from, const Class& c, int row, u32 slab, u32 zeros) {
    const u32 thread = thread_again(), lane = thread % 32;
    const Pixel pixel(c, row + thread / 32 * 16 + lane % 16);
    const u32 at = spaced_before(c, pixel) - spaced_before(c, Pixel(c, row));
    const bool there = (pixel.y | pixel.x) % 2 == 0;
#pragma unroll
    for (int j = 0; j < 64; j += 16) {
        u32 words[4];
        load_matrices(words, there ? slab + at * 128 + ((j / 8 + lane / 16) ^ at % 8) * 16 : zeros);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float other[2];
            unpack_word(words[i], other);
            sum[from + j / 2 + 2 * i] += other[0], sum[from + j / 2 + 2 * i + 1] += other[1];
        }
    }
}
