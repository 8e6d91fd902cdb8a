# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Batch normalization over (rows, channels) float32 arrays of any row pitch.

Rows are cut into chunks and chunks gathered into spans by rules that know the shape only: a span is one task, spans are
combined in order, so the bits do not depend on the number of threads.
"""

from cython.parallel cimport prange
from libc.math cimport sqrt

import numpy as np

cdef extern from "_batch_norm.h" nogil:
    void minidl_merge_moments(
        double *mean_a, double *m2_a, double count_a, const double *mean_b, const double *m2_b, double count_b,
        Py_ssize_t n)
    void minidl_batch_norm_stats(
        const float *x, Py_ssize_t pitch, Py_ssize_t rows, Py_ssize_t channels, Py_ssize_t chunk_rows, double *stats)
    void minidl_batch_norm_backward_stats(
        const float *dy, Py_ssize_t dy_pitch, const float *x, Py_ssize_t x_pitch, const float *mean, Py_ssize_t rows,
        Py_ssize_t channels, Py_ssize_t chunk_rows, double *sums)
    void minidl_batch_norm_apply(
        const float *x, Py_ssize_t x_pitch, const float *add, Py_ssize_t add_pitch, float *y, Py_ssize_t rows,
        Py_ssize_t width, const float *center, const float *scale, const float *shift, int relu)
    void minidl_batch_norm_backward_apply(
        const float *dy, Py_ssize_t dy_pitch, const float *x, Py_ssize_t x_pitch, const float *add,
        Py_ssize_t add_pitch, float *dx, Py_ssize_t rows, Py_ssize_t width, const float *center, const float *scale,
        const float *shift, const float *slope)

cdef Py_ssize_t CHUNK = 8192   # elements: 32 KiB, what a first-level cache holds between the two passes
cdef Py_ssize_t SPAN = 4       # chunks per task
cdef Py_ssize_t FOLD = 256     # least width of a vector loop


cdef Py_ssize_t chunk_rows_of(Py_ssize_t channels) noexcept nogil:
    return min(max(CHUNK // channels // 8 * 8, 32), 1024)


cdef Py_ssize_t pitch_of(const float[:, :] x) noexcept:
    return x.strides[0] // <Py_ssize_t>sizeof(float)


cdef void merge_rows(const double[:, ::1] stats, double[::1] total) noexcept:
    """total = the rows of stats (R, 1 + 2C) merged in order."""
    cdef Py_ssize_t channels = (stats.shape[1] - 1) // 2, r
    total[:] = 0.0
    for r in range(stats.shape[0]):
        minidl_merge_moments(
            &total[1], &total[1 + channels], total[0], &stats[r, 1], &stats[r, 1 + channels], stats[r, 0], channels
        )
        total[0] += stats[r, 0]


def stats(const float[:, :] x, double[::1] out):
    """out (1 + 2C,) = [count, means, sums of squared deviations] of the rows of x (rows, C)."""
    cdef Py_ssize_t rows = x.shape[0], channels = x.shape[1], pitch = pitch_of(x), i
    cdef Py_ssize_t chunk_rows = chunk_rows_of(channels), span = SPAN * chunk_rows, spans = (rows + span - 1) // span
    cdef double[:, ::1] partial = np.empty((spans, 1 + 2 * channels))
    for i in prange(spans, nogil=True, schedule="static", use_threads_if=spans > 1):
        minidl_batch_norm_stats(
            &x[i * span, 0], pitch, min(span, rows - i * span), channels, chunk_rows, &partial[i, 0]
        )
    merge_rows(partial, out)


def finalize(
    const double[:, ::1] stats, double eps, float[::1] running_mean, float[::1] running_var, double momentum,
    float[:, ::1] moments, double[::1] count,
):
    """Moments (2, C) = [mean, 1 / sqrt(biased variance + eps)] of merged stats; running statistics unless None."""
    cdef Py_ssize_t channels = moments.shape[1], c
    cdef double[::1] total = np.empty(1 + 2 * channels)
    cdef double n, variance
    merge_rows(stats, total)
    n = total[0]
    count[0] = n
    for c in range(channels):
        variance = total[1 + channels + c] / n if n > 0 else 0.0
        moments[0, c] = <float>total[1 + c]
        moments[1, c] = <float>(1.0 / sqrt(variance + eps))
        if running_mean is not None and n > 0:
            running_mean[c] = <float>((1.0 - momentum) * running_mean[c] + momentum * total[1 + c])
        if running_var is not None and n > 0:
            if n > 1:
                variance = total[1 + channels + c] / (n - 1.0)
            running_var[c] = <float>((1.0 - momentum) * running_var[c] + momentum * variance)


def backward_stats(const float[:, :] dy, const float[:, :] x, const float[:, ::1] moments, double[:, ::1] sums):
    """sums (2, C) = [sum dy, sum dy * (x - mean) * rstd]."""
    cdef Py_ssize_t rows = x.shape[0], channels = x.shape[1], i, c
    cdef Py_ssize_t dy_pitch = pitch_of(dy), x_pitch = pitch_of(x)
    cdef Py_ssize_t chunk_rows = chunk_rows_of(channels), span = SPAN * chunk_rows, spans = (rows + span - 1) // span
    cdef double[:, :, ::1] partial = np.empty((spans, 2, channels))
    for i in prange(spans, nogil=True, schedule="static", use_threads_if=spans > 1):
        minidl_batch_norm_backward_stats(
            &dy[i * span, 0], dy_pitch, &x[i * span, 0], x_pitch, &moments[0, 0], min(span, rows - i * span), channels,
            chunk_rows, &partial[i, 0, 0]
        )
    sums[:, :] = 0.0
    for i in range(spans):
        for c in range(channels):
            sums[0, c] += partial[i, 0, c]
            sums[1, c] += partial[i, 1, c] * moments[1, c]


cdef Py_ssize_t fold_of(Py_ssize_t rows, Py_ssize_t channels, bint dense) noexcept:
    """How many rows to treat as one, so that dense arrays of few channels have inner loops worth vectorizing."""
    return max(min(FOLD // channels, rows), 1) if dense else 1


cdef void repeat(float *values, Py_ssize_t channels, Py_ssize_t times) noexcept:
    cdef Py_ssize_t i
    for i in range(channels, channels * times):
        values[i] = values[i - channels]


def apply(
    const float[:, :] x, const float[:, ::1] moments, const float[::1] gamma, const float[::1] beta,
    const float[:, :] add, bint relu, float[:, ::1] y,
):
    """y = (x - mean) * rstd * gamma + beta (+ add) (relu); gamma, beta and add may be None."""
    cdef Py_ssize_t rows = x.shape[0], channels = x.shape[1], x_pitch = pitch_of(x), add_pitch = 0, i, c
    cdef bint has_add = add is not None
    if has_add:
        add_pitch = pitch_of(add)
    cdef Py_ssize_t fold = fold_of(rows, channels, x_pitch == channels and (not has_add or add_pitch == channels))
    cdef float[:, ::1] p = np.empty((3, fold * channels), np.float32)
    for c in range(channels):
        p[0, c] = moments[0, c]
        p[1, c] = moments[1, c] * gamma[c] if gamma is not None else moments[1, c]
        p[2, c] = beta[c] if beta is not None else 0.0
    for i in range(3):
        repeat(&p[i, 0], channels, fold)
    cdef Py_ssize_t span = max(2 * CHUNK // (fold * channels), 1) * fold, spans = (rows + span - 1) // span
    cdef Py_ssize_t first, whole, rest
    for i in prange(spans, nogil=True, schedule="static", use_threads_if=spans > 1):
        first = i * span
        whole = min(span, rows - first) // fold
        rest = min(span, rows - first) - whole * fold
        minidl_batch_norm_apply(
            &x[first, 0], x_pitch * fold, &add[first, 0] if has_add else NULL, add_pitch * fold, &y[first, 0], whole,
            fold * channels, &p[0, 0], &p[1, 0], &p[2, 0], relu
        )
        first = first + whole * fold
        if rest:
            minidl_batch_norm_apply(
                &x[first, 0], x_pitch, &add[first, 0] if has_add else NULL, add_pitch, &y[first, 0], 1,
                rest * channels, &p[0, 0], &p[1, 0], &p[2, 0], relu
            )


def backward_apply(
    const float[:, :] dy, const float[:, :] x, const float[:, ::1] moments, const float[::1] gamma,
    const double[:, ::1] sums, double count, const float[:, :] add, float[:, ::1] dx,
):
    """dx = gamma * rstd * (dy - sums[0] / count - xhat * sums[1] / count) (+ add).

    With sums None it is gamma * rstd * dy (+ add) and x is not read; gamma and add may be None.
    """
    cdef Py_ssize_t rows = dy.shape[0], channels = dy.shape[1], i, c
    cdef Py_ssize_t dy_pitch = pitch_of(dy), x_pitch = pitch_of(x), add_pitch = 0
    cdef bint has_add = add is not None, training = sums is not None
    cdef bint dense = dy_pitch == channels and (not training or x_pitch == channels)
    if has_add:
        add_pitch = pitch_of(add)
        dense = dense and add_pitch == channels
    cdef Py_ssize_t fold = fold_of(rows, channels, dense)
    cdef float[:, ::1] p = np.zeros((4, fold * channels), np.float32)
    for c in range(channels):
        p[0, c] = moments[0, c]
        p[1, c] = moments[1, c] * gamma[c] if gamma is not None else moments[1, c]
        if training and count > 0:
            p[2, c] = <float>(sums[0, c] / count)
            p[3, c] = <float>(moments[1, c] * sums[1, c] / count)
    for i in range(4):
        repeat(&p[i, 0], channels, fold)
    cdef Py_ssize_t span = max(2 * CHUNK // (fold * channels), 1) * fold, spans = (rows + span - 1) // span
    cdef Py_ssize_t first, whole, rest
    for i in prange(spans, nogil=True, schedule="static", use_threads_if=spans > 1):
        first = i * span
        whole = min(span, rows - first) // fold
        rest = min(span, rows - first) - whole * fold
        minidl_batch_norm_backward_apply(
            &dy[first, 0], dy_pitch * fold, &x[first, 0] if training else NULL, x_pitch * fold,
            &add[first, 0] if has_add else NULL, add_pitch * fold, &dx[first, 0], whole, fold * channels,
            &p[0, 0], &p[1, 0], &p[2, 0], &p[3, 0]
        )
        first = first + whole * fold
        if rest:
            minidl_batch_norm_backward_apply(
                &dy[first, 0], dy_pitch, &x[first, 0] if training else NULL, x_pitch,
                &add[first, 0] if has_add else NULL, add_pitch, &dx[first, 0], 1, rest * channels,
                &p[0, 0], &p[1, 0], &p[2, 0], &p[3, 0]
            )
