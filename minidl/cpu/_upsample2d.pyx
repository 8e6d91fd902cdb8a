# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Resizing of float32 images, nearest and bilinear, with several threads.

Along an axis, output o reads inputs lo and lo + 1 with weights 1 - w and w, where lo + w = max((a o + b) / d, 0): whole
numbers, so that every device finds the same pixels and weights. An axis is [a, b, d, size of the input, size of the
output, 1 if bilinear]; the same in minidl/cuda/upsample2d.cu.
"""

from cython.parallel cimport prange
from libc.stdint cimport int64_t


cdef struct Tap:
    Py_ssize_t low, high
    float weight  # of high


cdef Tap tap(const int64_t[::1] axis, Py_ssize_t o) noexcept nogil:
    cdef Tap found
    cdef int64_t at = max(axis[0] * o + axis[1], <int64_t>0)
    found.low = at // axis[2]
    found.high = min(found.low + axis[5], axis[3] - 1)
    found.weight = <float>(at % axis[2]) / <float>axis[2] if axis[5] else 0.0
    return found


cdef Py_ssize_t reader(const int64_t[::1] axis, Py_ssize_t i) noexcept nogil:
    """The first output whose ``low`` is at least i."""
    if i <= 0:
        return 0
    if i >= axis[3] or axis[0] == 0:
        return axis[4]
    return min((i * axis[2] - axis[1] + axis[0] - 1) // axis[0], axis[4])


def resize(const float[:, :] x, const int64_t[::1] rows, const int64_t[::1] columns, float[:, :, :, ::1] y):
    """y (N, P, Q, C) from the pixels x (N * H * W, C)."""
    cdef Py_ssize_t n = y.shape[0], p = y.shape[1], q = y.shape[2], c = y.shape[3], i
    cdef Py_ssize_t height = rows[3], width = columns[3]
    for i in prange(n * p, nogil=True, schedule="static"):
        resize_row(x, i // p * height * width, rows, columns, i % p, width, q, c, &y[i // p, i % p, 0, 0])


cdef void resize_row(
    const float[:, :] x, Py_ssize_t image, const int64_t[::1] rows, const int64_t[::1] columns, Py_ssize_t o,
    Py_ssize_t width, Py_ssize_t q, Py_ssize_t c, float *y
) noexcept nogil:
    cdef Tap v = tap(rows, o), h
    cdef Py_ssize_t j, k
    cdef const float *a
    cdef const float *b
    cdef const float *d
    cdef const float *e
    for j in range(q):
        h = tap(columns, j)
        a = &x[image + v.low * width + h.low, 0]
        if not rows[5]:
            for k in range(c):
                y[j * c + k] = a[k]
            continue
        b = &x[image + v.low * width + h.high, 0]
        d = &x[image + v.high * width + h.low, 0]
        e = &x[image + v.high * width + h.high, 0]
        for k in range(c):
            y[j * c + k] = (a[k] * (<float>1 - h.weight) + b[k] * h.weight) * (<float>1 - v.weight) + (
                d[k] * (<float>1 - h.weight) + e[k] * h.weight) * v.weight


def resize_backward(const float[:, :] dy, const int64_t[::1] rows, const int64_t[::1] columns, float[:, :, :, ::1] dx):
    """dx (N, H, W, C): every input pixel gathers from the outputs that read it, in their order."""
    cdef Py_ssize_t n = dx.shape[0], height = dx.shape[1], i
    for i in prange(n * height, nogil=True, schedule="static"):
        gather_row(
            dy, i // height * rows[4] * columns[4], rows, columns, i % height, dx.shape[2], dx.shape[3],
            &dx[i // height, i % height, 0, 0]
        )


cdef float share(const int64_t[::1] axis, Py_ssize_t o, Py_ssize_t i) noexcept nogil:
    """With what weight output o reads input i."""
    cdef Tap found = tap(axis, o)
    cdef float total = 0.0
    if found.low == i:
        total += <float>1 - found.weight
    if found.high == i:
        total += found.weight
    return total


cdef void gather_row(
    const float[:, :] dy, Py_ssize_t image, const int64_t[::1] rows, const int64_t[::1] columns, Py_ssize_t h,
    Py_ssize_t width, Py_ssize_t c, float *dx
) noexcept nogil:
    cdef Py_ssize_t first_row = reader(rows, h - rows[5]), last_row = reader(rows, h + 1), w, p, q, k
    cdef Py_ssize_t last_column
    cdef float down, across
    cdef const float *g
    for w in range(width):
        last_column = reader(columns, w + 1)
        for k in range(c):
            dx[w * c + k] = 0.0
        for p in range(first_row, last_row):
            down = share(rows, p, h)
            for q in range(reader(columns, w - columns[5]), last_column):
                across = down * share(columns, q, w)
                g = &dy[image + p * columns[4] + q, 0]
                for k in range(c):
                    dx[w * c + k] += g[k] * across
