# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Pixels of synthetic images, a batch per call and without the global interpreter lock, so that threads share the work.

The noise of a sample is the byte stream of Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011) under the key (seed, sample), as ``numpy.random.Philox`` counts it.
"""

from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.string cimport memcpy

cdef extern from *:
    """
    typedef struct { uint64_t word[4]; } MinidlPhilox;

    static inline uint64_t minidl_mulhi(uint64_t a, uint64_t b) {
        return (uint64_t)(((unsigned __int128)a * b) >> 64);
    }

    static MinidlPhilox minidl_philox(uint64_t counter, uint64_t key0, uint64_t key1) {
        const uint64_t m0 = 0xD2E7470EE14C6C93ull, m1 = 0xCA5A826395121157ull;
        uint64_t c0 = counter, c1 = 0, c2 = 0, c3 = 0;
        int round;
        for (round = 0; round < 10; ++round) {
            const uint64_t high0 = minidl_mulhi(m0, c0), high1 = minidl_mulhi(m1, c2);
            const uint64_t low0 = m0 * c0, low1 = m1 * c2;
            c0 = high1 ^ c1 ^ key0; c1 = low1;
            c2 = high0 ^ c3 ^ key1; c3 = low0;
            key0 += 0x9E3779B97F4A7C15ull; key1 += 0xBB67AE8584CAA73Bull;
        }
        MinidlPhilox out = {{c0, c1, c2, c3}};
        return out;
    }
    """
    ctypedef struct MinidlPhilox:
        uint64_t word[4]
    MinidlPhilox minidl_philox(uint64_t counter, uint64_t key0, uint64_t key1) nogil

cdef uint64_t SEVEN_BITS = 0x7F7F7F7F7F7F7F7F


cdef void add_noise(uint8_t *pixels, int64_t size, uint64_t seed, uint64_t sample) noexcept nogil:
    """Add seven-bit noise to pixels that stay below 256: eight bytes at a time, no carry crosses a byte."""
    cdef int64_t at, end
    cdef uint64_t part
    cdef MinidlPhilox noise
    cdef int i
    for at in range(0, size, 32):
        # NumPy advances the counter before its first use.
        noise = minidl_philox(<uint64_t>(at // 32 + 1), seed, sample)
        for i in range(4):
            noise.word[i] = (noise.word[i] >> 1) & SEVEN_BITS
        if at + 32 <= size:
            for i in range(4):
                memcpy(&part, pixels + at + 8 * i, 8)
                part += noise.word[i]
                memcpy(pixels + at + 8 * i, &part, 8)
        else:
            end = size - at
            for i in range(<int>end):
                pixels[at + i] += (<uint8_t *>&noise)[i]


def classified(
    uint8_t[:, ::1] images, const int64_t[::1] samples, const int64_t[::1] labels, uint64_t seed,
    const uint8_t[:, :, ::1] down, const uint8_t[:, ::1] across,
):
    """Write images (n, H * W * C): waves of their classes, down (classes, H, C) + across (classes, W * C), + noise."""
    cdef int64_t n, h, w, c, label, height = down.shape[1], channels = down.shape[2], row = across.shape[1]
    cdef uint8_t *line
    with nogil:
        for n in range(images.shape[0]):
            label = labels[n]
            for h in range(height):
                line = &images[n, h * row]
                for w in range(row // channels):
                    for c in range(channels):
                        line[w * channels + c] = across[label, w * channels + c] + down[label, h, c]
            add_noise(&images[n, 0], images.shape[1], seed, <uint64_t>samples[n])


def noisy(uint8_t[:, ::1] images, const int64_t[::1] samples, uint64_t seed):
    """Add each sample's noise to images (n, bytes) below 129."""
    cdef int64_t n
    with nogil:
        for n in range(images.shape[0]):
            add_noise(&images[n, 0], images.shape[1], seed, <uint64_t>samples[n])
