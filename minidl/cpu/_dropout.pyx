# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Dropout of dense float32 samples (N, E) by Philox words that depend on the global sample and element only."""

from cython.parallel cimport prange
from libc.stdint cimport uint32_t, uint64_t

cdef extern from "_dropout.h" nogil:
    void minidl_dropout(
        const float *x, float *y, Py_ssize_t n, uint32_t counter, uint32_t sample, uint32_t step, uint32_t stream,
        uint32_t seed_low, uint32_t seed_high, uint64_t threshold, float scale)

cdef Py_ssize_t SPAN = 8192  # elements per task, a multiple of the four words of a counter


def dropout(
    const float[:, ::1] x, uint64_t threshold, float scale, const uint32_t[::1] key, uint32_t stream, float[:, ::1] y
):
    """y = x * scale where the word of an element is at least ``threshold``, else 0.

    key is [seed_low, seed_high, step, first_sample].
    """
    cdef Py_ssize_t size = x.shape[1], spans = (size + SPAN - 1) // SPAN, tasks = x.shape[0] * spans, task, n, first
    for task in prange(tasks, nogil=True, schedule="static", use_threads_if=x.shape[0] * size > SPAN):
        n = task // spans
        first = task % spans * SPAN
        minidl_dropout(
            &x[n, first], &y[n, first], min(SPAN, size - first), <uint32_t>(first // 4), key[3] + <uint32_t>n, key[2],
            stream, key[0], key[1], threshold, scale
        )
