# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Optimizer updates over flat float32 arenas, in one pass."""

from cython.parallel cimport prange
from libc.stdint cimport int32_t

cdef extern from "_optim.h" nogil:
    int CHUNK
    void minidl_sgd(
        float *master, const float *grad, float *buffer, float *working, const int32_t *segment_of,
        const float *segments, Py_ssize_t chunks, float lr, float momentum, float inverse_scale, int nesterov)
    void minidl_sgd_begin(
        const float *master, float *buffer, const int32_t *segment_of, const float *segments, Py_ssize_t chunks,
        float momentum)
    int minidl_any_nonfinite(const float *x, Py_ssize_t n)

cdef Py_ssize_t SPAN = 16384  # elements per task


def sgd(
    float[::1] master, const float[::1] grad, float[::1] momentum, float[::1] working, const int32_t[::1] segment_of,
    const float[:, ::1] segments, float lr, float momentum_factor, float unscale, bint nesterov,
):
    """One step; grad, momentum and working may be None. unscale: 1 / the loss scale of grad."""
    cdef Py_ssize_t n = master.shape[0], tasks = (n + SPAN - 1) // SPAN, i
    cdef bint has_grad = grad is not None, has_momentum = momentum is not None, has_working = working is not None
    for i in prange(tasks, nogil=True, schedule="static", use_threads_if=tasks > 1):
        minidl_sgd(
            &master[i * SPAN], &grad[i * SPAN] if has_grad else NULL, &momentum[i * SPAN] if has_momentum else NULL,
            &working[i * SPAN] if has_working else NULL, &segment_of[i * SPAN // CHUNK], &segments[0, 0],
            min(SPAN, n - i * SPAN) // CHUNK, lr, momentum_factor, unscale, nesterov
        )


def sgd_begin(
    const float[::1] master, float[::1] momentum, const int32_t[::1] segment_of, const float[:, ::1] segments,
    float momentum_factor,
):
    """momentum = momentum factor * momentum + weight decay * master."""
    cdef Py_ssize_t n = master.shape[0], tasks = (n + SPAN - 1) // SPAN, i
    for i in prange(tasks, nogil=True, schedule="static", use_threads_if=tasks > 1):
        minidl_sgd_begin(
            &master[i * SPAN], &momentum[i * SPAN], &segment_of[i * SPAN // CHUNK], &segments[0, 0],
            min(SPAN, n - i * SPAN) // CHUNK, momentum_factor
        )


def any_nonfinite(const float[::1] x):
    """Whether an element of x is infinite or not a number."""
    cdef Py_ssize_t n = x.shape[0], tasks = (n + SPAN - 1) // SPAN, i
    cdef int found = 0
    for i in prange(tasks, nogil=True, schedule="static", use_threads_if=tasks > 1):
        found |= minidl_any_nonfinite(&x[i * SPAN], min(SPAN, n - i * SPAN))
    return found != 0
