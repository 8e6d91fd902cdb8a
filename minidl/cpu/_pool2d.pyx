# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Pooling of float32 NHWC arrays, seen as (N*H*W, C) rows of any pitch."""

from cython.parallel cimport prange

import numpy as np

cdef extern from "_pool2d.h" nogil:
    Py_ssize_t BLOCK
    ctypedef struct minidl_axis:
        Py_ssize_t size, out, kernel, stride, padding, dilation
    void minidl_max_pool_row(
        const float *x, Py_ssize_t pitch, Py_ssize_t channels, minidl_axis h, minidl_axis w, Py_ssize_t p, float *y,
        void *index, int wide)
    void minidl_max_pool_backward(
        const float *dy, const void *index, int wide, Py_ssize_t channels, Py_ssize_t first, Py_ssize_t last,
        minidl_axis h, minidl_axis w, const Py_ssize_t *offset, float *dx)
    void minidl_mean_row(
        const float *x, Py_ssize_t pitch, Py_ssize_t channels, Py_ssize_t width, Py_ssize_t top, Py_ssize_t bottom,
        const Py_ssize_t *left, const Py_ssize_t *right, const Py_ssize_t *columns, Py_ssize_t height_divisor,
        Py_ssize_t out, float *y)
    void minidl_mean_backward_row(
        const float *dy, Py_ssize_t channels, Py_ssize_t width, Py_ssize_t i, const Py_ssize_t *top,
        const Py_ssize_t *bottom, const Py_ssize_t *lines, Py_ssize_t out_height, const Py_ssize_t *left,
        const Py_ssize_t *right, const Py_ssize_t *columns, Py_ssize_t out_width, float *dx)

cdef Py_ssize_t THREADS_FROM = 16384  # elements of work below which one thread is as fast


cdef minidl_axis axis_of(tuple fields):
    """(size, out, kernel, stride, padding, dilation)."""
    cdef minidl_axis axis
    axis.size, axis.out, axis.kernel, axis.stride, axis.padding, axis.dilation = fields
    return axis


def max_pool(const float[:, :] x, tuple height, tuple width, float[:, ::1] y, unsigned char[:, ::1] index):
    """y and index (N*P*Q, C) of x (N*H*W, C); index given as bytes: C of them per row, or 2 C for uint16."""
    cdef minidl_axis h = axis_of(height), w = axis_of(width)
    cdef Py_ssize_t channels = x.shape[1], pitch = x.strides[0] // <Py_ssize_t>sizeof(float), task
    cdef Py_ssize_t tasks = y.shape[0] // w.out
    cdef int wide = index.shape[1] != channels
    for task in prange(tasks, nogil=True, schedule="static", use_threads_if=y.shape[0] * channels >= THREADS_FROM):
        minidl_max_pool_row(
            &x[task // h.out * h.size * w.size, 0], pitch, channels, h, w, task % h.out, &y[task * w.out, 0],
            &index[task * w.out, 0], wide
        )


def max_pool_backward(
    const float[:, ::1] dy, const unsigned char[:, ::1] index, tuple height, tuple width, float[:, ::1] dx
):
    """dx (N*H*W, C) of dy (N*P*Q, C) and index as above."""
    cdef minidl_axis h = axis_of(height), w = axis_of(width)
    cdef Py_ssize_t channels = dx.shape[1], k, task, n, first
    cdef Py_ssize_t blocks = (channels + BLOCK - 1) // BLOCK, tasks = dx.shape[0] // (h.size * w.size) * blocks
    cdef int wide = index.shape[1] != channels
    cdef Py_ssize_t[::1] offset = np.empty(h.kernel * w.kernel, np.intp)
    for k in range(h.kernel * w.kernel):
        offset[k] = (k // w.kernel * h.dilation * w.size + k % w.kernel * w.dilation) * channels
    for task in prange(tasks, nogil=True, schedule="static", use_threads_if=dx.shape[0] * channels >= THREADS_FROM):
        n = task // blocks
        first = task % blocks * BLOCK
        minidl_max_pool_backward(
            &dy[n * h.out * w.out, 0], &index[n * h.out * w.out, 0], wide, channels, first,
            min(first + BLOCK, channels), h, w, &offset[0], &dx[n * h.size * w.size, 0]
        )


def mean(
    const float[:, :] x, const Py_ssize_t[:, ::1] bins_h, const Py_ssize_t[:, ::1] bins_w, Py_ssize_t height,
    Py_ssize_t width, float[:, ::1] y,
):
    """y (N*P*Q, C): means of x (N*H*W, C) over windows; bins (3, out) = [start, end, count] for each axis."""
    cdef Py_ssize_t channels = x.shape[1], pitch = x.strides[0] // <Py_ssize_t>sizeof(float), task, p
    cdef Py_ssize_t out_h = bins_h.shape[1], out_w = bins_w.shape[1], tasks = y.shape[0] // out_w
    for task in prange(tasks, nogil=True, schedule="static", use_threads_if=x.shape[0] * channels >= THREADS_FROM):
        p = task % out_h
        minidl_mean_row(
            &x[task // out_h * height * width, 0], pitch, channels, width, bins_h[0, p], bins_h[1, p], &bins_w[0, 0],
            &bins_w[1, 0], &bins_w[2, 0], bins_h[2, p], out_w, &y[task * out_w, 0]
        )


def mean_backward(
    const float[:, ::1] dy, const Py_ssize_t[:, ::1] bins_h, const Py_ssize_t[:, ::1] bins_w, Py_ssize_t height,
    Py_ssize_t width, float[:, ::1] dx,
):
    """dx (N*H*W, C) of dy (N*P*Q, C), bins as above."""
    cdef Py_ssize_t channels = dx.shape[1], out_h = bins_h.shape[1], out_w = bins_w.shape[1]
    cdef Py_ssize_t tasks = dx.shape[0] // width, task
    for task in prange(tasks, nogil=True, schedule="static", use_threads_if=dx.shape[0] * channels >= THREADS_FROM):
        minidl_mean_backward_row(
            &dy[task // height * out_h * out_w, 0], channels, width, task % height, &bins_h[0, 0], &bins_h[1, 0],
            &bins_h[2, 0], out_h, &bins_w[0, 0], &bins_w[1, 0], &bins_w[2, 0], out_w, &dx[task * width, 0]
        )
