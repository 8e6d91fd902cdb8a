# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Softmax cross entropy over float32 logits (rows, K) of any row pitch."""

from cython.parallel cimport prange
from libc.math cimport INFINITY, expf, log
from libc.stdint cimport int32_t, int64_t, uint8_t

import numpy as np

ctypedef fused label_t:
    int32_t
    int64_t
    uint8_t

cdef Py_ssize_t CHUNK = 4096  # logits per task; totals of chunks are added in order


cdef Py_ssize_t chunk_rows_of(Py_ssize_t classes) noexcept nogil:
    return max(CHUNK // classes, 1)


cdef void row_forward(
    const float *x, Py_ssize_t classes, int64_t label, int64_t ignore_index, double *totals, float *lse
) noexcept nogil:
    cdef Py_ssize_t k, largest = 0
    cdef float peak = -INFINITY
    cdef double total = 0.0
    for k in range(classes):
        if x[k] > peak:
            peak = x[k]
            largest = k
    for k in range(classes):
        total += expf(x[k] - peak)
    total = log(total)
    lse[0] = <float>(peak + total)
    if label == ignore_index:
        return
    if label < 0 or label >= classes:
        totals[3] += 1.0
        return
    totals[0] += total - (<double>x[label] - <double>peak)
    totals[1] += 1.0
    totals[2] += label == largest


cdef void row_backward(
    const float *x, Py_ssize_t classes, int64_t label, int64_t ignore_index, float lse, float scale, float *dx
) noexcept nogil:
    cdef Py_ssize_t k
    if label == ignore_index or label < 0 or label >= classes or scale == 0.0:
        for k in range(classes):
            dx[k] = 0.0
        return
    for k in range(classes):
        dx[k] = expf(x[k] - lse) * scale
    dx[label] = (expf(x[label] - lse) - 1.0) * scale


def forward(const float[:, :] x, const label_t[::1] labels, int64_t ignore_index, double[::1] totals, float[::1] lse):
    """totals (4,) = [sum of -log p, valid, correct, out of range]; lse (rows,) = log of the sum of exponentials."""
    cdef Py_ssize_t rows = x.shape[0], classes = x.shape[1], span = chunk_rows_of(classes), i, j, r
    cdef Py_ssize_t spans = (rows + span - 1) // span
    cdef double[:, ::1] partial = np.zeros((spans, 4))
    for i in prange(spans, nogil=True, schedule="static", use_threads_if=spans > 1):
        for r in range(i * span, min((i + 1) * span, rows)):
            row_forward(&x[r, 0], classes, labels[r], ignore_index, &partial[i, 0], &lse[r])
    totals[:] = 0.0
    for i in range(spans):
        for j in range(4):
            totals[j] += partial[i, j]


def backward(
    const float[:, :] x, const label_t[::1] labels, int64_t ignore_index, const float[::1] lse, float scale,
    float[:, ::1] dx,
):
    """dx = (softmax - onehot) * scale; 0 in rows whose label does not count."""
    cdef Py_ssize_t rows = x.shape[0], classes = x.shape[1], span = chunk_rows_of(classes), i, r
    cdef Py_ssize_t spans = (rows + span - 1) // span
    for i in prange(spans, nogil=True, schedule="static", use_threads_if=spans > 1):
        for r in range(i * span, min((i + 1) * span, rows)):
            row_backward(&x[r, 0], classes, labels[r], ignore_index, lse[r], scale, &dx[r, 0])
