# cython: language_level=3
"""Where an array lies, asked before every launch: CuPy's arrays, and in a dry run NumPy's."""

cimport numpy as cnp
from libc.stdint cimport uintptr_t

import functools

from minidl import checks, shapes

cnp.import_array()

_pitch = functools.lru_cache(maxsize=4096)(shapes.pixel_pitch)

cdef enum:
    ACCESS = 16  # bytes that one load or store moves at most


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


cpdef bint in_rows(x) except -1:
    """Whether ``x`` is dense or pitched: what `rows` takes."""
    return dense(x) or _pitch(x.shape, x.strides, x.itemsize) is not None


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
    pitch = _pitch(shape, x.strides, x.itemsize)
    if pitch is None:
        raise ValueError(f"{checks.describe(x)} has strides {x.strides}: rows of channels must lie at one pitch")
    return count, channels, pitch


def vector_width(*arrays):
    """The most channels that a thread may move at a time in each of the pitched ``arrays``: 1, 2, 4, 8 or 16.

    At most 16 bytes of the narrowest type; divides every channel count; every row of every array starts aligned for it.
    """
    return spans(arrays)[3]


cpdef tuple spans(tuple arrays, tuple parameters=(), Py_ssize_t itemsize=0, Py_ssize_t scale=1, bint flat=False):
    """How ``arrays``, seen as rows of channels, can be walked together.

    Args:
        parameters: dense arrays of values per channel, or None, that are read in vectors, too.
        itemsize: bytes of an element of the widest vector, which takes 16; 0: of the narrowest type.
        scale: elements of a value, where bytes are counted in place of values.
        flat: all are dense, and it does not matter where a row ends.

    Returns:
        Of the first: number of rows, channels; pitches of all ``arrays``; the most elements per vector: a power of two
        that divides the channels and whose accesses are aligned. Vectors of wider types are split into several accesses.
    """
    cdef Py_ssize_t sizes[16]
    cdef uintptr_t aligned[16]
    cdef Py_ssize_t n = 0, width, least = ACCESS, i
    cdef uintptr_t channels = 0  # every bit that some array's number of channels has
    cdef list pitches = []
    cdef tuple first = None, span
    assert 0 < len(arrays) + len(parameters) <= 16
    for x in arrays:
        span = rows(x)
        sizes[n] = <Py_ssize_t>x.itemsize // scale
        if first is None:
            first = span
        aligned[n] = alignment(x, ACCESS if flat else <uintptr_t>span[2] * scale * sizes[n])
        channels |= 0 if flat else <uintptr_t>span[1] * scale
        pitches.append(span[2] * scale)
        least = min(least, sizes[n])
        n += 1
    for x in parameters:
        if x is not None:
            sizes[n], aligned[n] = x.itemsize, alignment(x)
            least = min(least, sizes[n])
            n += 1
    width = ACCESS // (itemsize or least)
    for i in range(n):
        while width > 1 and (channels & (width - 1) or aligned[i] < <uintptr_t>min(<Py_ssize_t>ACCESS, width * sizes[i])):
            width //= 2
    return first[0], first[1] * scale, tuple(pitches), width
