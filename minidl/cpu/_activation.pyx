# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Activation functions and their gradients, with several threads on large arrays."""

from cython.parallel cimport prange

cdef extern from "_activation.h" nogil:
    void minidl_activate(int function, const float *x, float *y, Py_ssize_t n, float a)
    void minidl_activate_backward(
        int function, const float *dy, const float *kept, const float *add, float *dx, Py_ssize_t n, float a)

FUNCTIONS = ("relu", "relu6", "leaky_relu", "sigmoid", "tanh", "silu", "gelu", "gelu_tanh", "hardswish")

cdef Py_ssize_t SPAN = 16384  # elements per task: 64 KiB of each operand


def activate(int function, const float[::1] x, float[::1] y, float a):
    """y = FUNCTIONS[function](x); a is the slope of leaky_relu."""
    cdef Py_ssize_t n = y.shape[0], tasks = (n + SPAN - 1) // SPAN, i
    for i in prange(tasks, nogil=True, schedule="static", use_threads_if=tasks > 1):
        minidl_activate(function, &x[i * SPAN], &y[i * SPAN], min(SPAN, n - i * SPAN), a)


def activate_backward(
    int function, const float[::1] dy, const float[::1] kept, const float[::1] add, float[::1] dx, float a
):
    """dx = dy times the slope at what was kept; plus ``add`` unless it is None."""
    cdef Py_ssize_t n = dx.shape[0], tasks = (n + SPAN - 1) // SPAN, i
    cdef bint has_add = add is not None
    for i in prange(tasks, nogil=True, schedule="static", use_threads_if=tasks > 1):
        minidl_activate_backward(
            function, &dy[i * SPAN], &kept[i * SPAN], &add[i * SPAN] if has_add else NULL, &dx[i * SPAN],
            min(SPAN, n - i * SPAN), a
        )
