# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Adaptive optimizers over flat float32 arenas. unscale: 1 / the loss scale of grad; record: see minidl.scalars."""

from cython.parallel cimport prange
from libc.stdint cimport int32_t

cdef extern from "_adaptive.h" nogil:
    int CHUNK
    void minidl_adamw(
        float *master, const float *grad, float *first, float *second, const int32_t *segment_of,
        const float *segments, Py_ssize_t chunks, float lr, float unscale, const float *record)
    void minidl_lamb_moments(
        const float *master, const float *grad, float *first, float *second, const int32_t *segment_of,
        const float *segments, Py_ssize_t chunks, float unscale, const float *record, float *squares)
    void minidl_lamb(
        float *master, const float *first, const float *second, const int32_t *segment_of, const float *segments,
        const float *trust, Py_ssize_t chunks, float lr, const float *record)
    void minidl_lars(
        float *master, const float *grad, float *buffer, const int32_t *segment_of, const float *segments,
        const float *trust, Py_ssize_t chunks, float lr, float momentum, float unscale)

cdef Py_ssize_t SPAN = 16384  # elements per task


def adamw(
    float[::1] master, const float[::1] grad, float[::1] first, float[::1] second, const int32_t[::1] segment_of,
    const float[:, ::1] segments, float lr, float unscale, const float[::1] record,
):
    """One step of AdamW."""
    cdef Py_ssize_t n = master.shape[0], tasks = (n + SPAN - 1) // SPAN, i, at
    for i in prange(tasks, nogil=True, schedule="static", use_threads_if=tasks > 1):
        at = i * SPAN
        minidl_adamw(
            &master[at], &grad[at], &first[at], &second[at], &segment_of[at // CHUNK], &segments[0, 0],
            min(SPAN, n - at) // CHUNK, lr, unscale, &record[0]
        )


def lamb_moments(
    const float[::1] master, const float[::1] grad, float[::1] first, float[::1] second,
    const int32_t[::1] segment_of, const float[:, ::1] segments, float unscale, const float[::1] record,
    float[:, ::1] squares,
):
    """Moments in place; squares (chunks, 2) of the weights and of the directions."""
    cdef Py_ssize_t n = master.shape[0], tasks = (n + SPAN - 1) // SPAN, i, at
    for i in prange(tasks, nogil=True, schedule="static", use_threads_if=tasks > 1):
        at = i * SPAN
        minidl_lamb_moments(
            &master[at], &grad[at], &first[at], &second[at], &segment_of[at // CHUNK], &segments[0, 0],
            min(SPAN, n - at) // CHUNK, unscale, &record[0], &squares[at // CHUNK, 0]
        )


def lamb(
    float[::1] master, const float[::1] first, const float[::1] second, const int32_t[::1] segment_of,
    const float[:, ::1] segments, const float[::1] trust, float lr, const float[::1] record,
):
    """The weights of one step of LAMB; trust: a factor per segment."""
    cdef Py_ssize_t n = master.shape[0], tasks = (n + SPAN - 1) // SPAN, i, at
    for i in prange(tasks, nogil=True, schedule="static", use_threads_if=tasks > 1):
        at = i * SPAN
        minidl_lamb(
            &master[at], &first[at], &second[at], &segment_of[at // CHUNK], &segments[0, 0], &trust[0],
            min(SPAN, n - at) // CHUNK, lr, &record[0]
        )


def lars(
    float[::1] master, const float[::1] grad, float[::1] buffer, const int32_t[::1] segment_of,
    const float[:, ::1] segments, const float[::1] trust, float lr, float momentum, float unscale,
):
    """One step of LARS; trust: a factor per segment."""
    cdef Py_ssize_t n = master.shape[0], tasks = (n + SPAN - 1) // SPAN, i, at
    for i in prange(tasks, nogil=True, schedule="static", use_threads_if=tasks > 1):
        at = i * SPAN
        minidl_lars(
            &master[at], &grad[at], &buffer[at], &segment_of[at // CHUNK], &segments[0, 0], &trust[0],
            min(SPAN, n - at) // CHUNK, lr, momentum, unscale
        )
