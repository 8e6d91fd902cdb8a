# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Operations that are one pass over memory, with several threads on large arrays."""

from cython.parallel cimport prange

cdef extern from "_elementwise.h" nogil:
    void minidl_add(const float *a, const float *b, float *y, Py_ssize_t n)
    void minidl_mul(const float *a, const float *b, float *y, Py_ssize_t n)
    void minidl_copy_rows(
        const char *x, Py_ssize_t x_pitch, char *y, Py_ssize_t y_pitch, Py_ssize_t rows, Py_ssize_t width)

cdef Py_ssize_t SPAN = 16384  # elements per task: 64 KiB of each operand


def add(const float[::1] a, const float[::1] b, float[::1] y):
    """y = a + b."""
    cdef Py_ssize_t n = y.shape[0], tasks = (n + SPAN - 1) // SPAN, i
    for i in prange(tasks, nogil=True, schedule="static", use_threads_if=tasks > 1):
        minidl_add(&a[i * SPAN], &b[i * SPAN], &y[i * SPAN], min(SPAN, n - i * SPAN))


def mul(const float[::1] a, const float[::1] b, float[::1] y):
    """y = a * b."""
    cdef Py_ssize_t n = y.shape[0], tasks = (n + SPAN - 1) // SPAN, i
    for i in prange(tasks, nogil=True, schedule="static", use_threads_if=tasks > 1):
        minidl_mul(&a[i * SPAN], &b[i * SPAN], &y[i * SPAN], min(SPAN, n - i * SPAN))


def copy_rows(const unsigned char[:, :] x, unsigned char[:, :] y):
    """y = x, rows of bytes of any pitch."""
    cdef Py_ssize_t rows = x.shape[0], width = x.shape[1], i
    cdef Py_ssize_t x_pitch = x.strides[0], y_pitch = y.strides[0]
    cdef Py_ssize_t span = max(4 * SPAN // width, 1), tasks = (rows + span - 1) // span
    for i in prange(tasks, nogil=True, schedule="static", use_threads_if=tasks > 1):
        minidl_copy_rows(
            <const char *>&x[i * span, 0], x_pitch, <char *>&y[i * span, 0], y_pitch, min(span, rows - i * span), width
        )
