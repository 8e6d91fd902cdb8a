# cython: language_level=3
"""Where an array lies, asked before every launch: CuPy's arrays, and in a dry run NumPy's."""

cimport numpy as cnp
from libc.stdint cimport uintptr_t

from minidl import checks, shapes

cnp.import_array()

cdef uintptr_t ACCESS = 16  # bytes that one load or store moves at most


cpdef uintptr_t address(x) except? 0:
    """The device address of an array; of a dry run's NumPy array, its host address."""
    if cnp.PyArray_Check(x):
        return <uintptr_t>cnp.PyArray_DATA(<cnp.ndarray>x)
    return x.data.ptr


cpdef bint dense(x) except -1:
    """Whether ``x`` lies in C order without gaps."""
    if cnp.PyArray_Check(x):
        return cnp.PyArray_IS_C_CONTIGUOUS(<cnp.ndarray>x)
    return x._c_contiguous  # `flags` would make an object first, ten times as long


cpdef uintptr_t alignment(x, uintptr_t pitch=ACCESS) except? 0:
    """The largest power of two, at most 16, that the address and ``pitch`` bytes are multiples of."""
    cdef uintptr_t bits = address(x) | pitch | ACCESS
    return bits & (~bits + 1)


cpdef tuple rows(x):
    """``x`` as (number of rows, channels, pitch in elements).

    Raises:
        ValueError: when ``x`` is neither dense nor pitched; ``as_rows`` makes it so.
    """
    cdef tuple shape = x.shape
    cdef Py_ssize_t count = 1, i
    channels = shape[-1] if shape else 1
    for i in range(len(shape) - 1):
        count *= <Py_ssize_t>shape[i]
    if dense(x):
        return count, channels, channels
    pitch = shapes.pixel_pitch(shape, x.strides, x.itemsize)
    if pitch is None:
        raise ValueError(f"{checks.describe(x)} has strides {x.strides}: rows of channels must lie at one pitch")
    return count, channels, pitch


cpdef tuple aligned_rows(x):
    """`rows`, and the largest power of two, at most 16, that every row's address is a multiple of."""
    count, channels, pitch = rows(x)
    return count, channels, pitch, alignment(x, pitch * x.itemsize)
