# cython: language_level=3
"""Where an array lies, asked before every launch: CuPy's arrays, and in a dry run NumPy's."""

cimport numpy as cnp
from libc.stdint cimport uintptr_t

import functools

from minidl import checks, shapes
from minidl.precision import float32 as _float32

cnp.import_array()

cdef object float32 = _float32
_pitch = functools.lru_cache(maxsize=4096)(shapes.pixel_pitch)

cdef enum:
    ACCESS = 16  # bytes that one load or store moves at most
    MOST = 16  # arrays that are walked together


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


cdef int _lie(x, Py_ssize_t *count, Py_ssize_t *channels, Py_ssize_t *pitch) except -1:
    """Number of rows, channels and pitch in elements; a pitch of -1 where ``x`` does not lie in rows."""
    cdef tuple shape = x.shape
    cdef Py_ssize_t i, last = len(shape) - 1
    count[0] = 1
    for i in range(last):
        count[0] *= <Py_ssize_t>shape[i]
    channels[0] = pitch[0] = shape[last] if shape else 1
    if not dense(x):
        found = _pitch(shape, x.strides, x.itemsize)
        pitch[0] = -1 if found is None else found
    return 0


cpdef tuple rows(x):
    """``x`` as (number of rows, channels, pitch in elements).

    Raises:
        ValueError: when ``x`` is neither dense nor pitched; ``as_rows`` makes it so.
    """
    cdef Py_ssize_t count, channels, pitch
    _lie(x, &count, &channels, &pitch)
    if pitch < 0:
        raise _no_rows(x)
    return count, channels, pitch


def _no_rows(x):
    return ValueError(f"{checks.describe(x)} has strides {x.strides}: rows of channels must lie at one pitch")


cdef Py_ssize_t _widest(
    int n, Py_ssize_t *sizes, uintptr_t *aligned, uintptr_t channels, Py_ssize_t itemsize
) except -1:
    """The most elements per vector: a power of two that divides ``channels`` and whose accesses are aligned.

    At most 16 bytes of ``itemsize``, by default the smallest: vectors of wider types are split into several accesses.
    """
    cdef Py_ssize_t width, access
    cdef int i
    if itemsize == 0:
        itemsize = ACCESS
        for i in range(n):
            itemsize = min(itemsize, sizes[i])
    width = ACCESS // itemsize
    for i in range(n):
        while width > 1:
            access = min(width * sizes[i], <Py_ssize_t>ACCESS)
            if not channels & <uintptr_t>(width - 1) and aligned[i] >= <uintptr_t>access:
                break
            width //= 2
    return width


def vector_width(*arrays):
    """The most channels that a thread may move at a time in each of the pitched ``arrays``: 1, 2, 4, 8 or 16.

    At most 16 bytes of the narrowest type; divides every channel count; every row of every array starts aligned for it.
    """
    return spans(arrays)[3]


cpdef tuple spans(tuple arrays, tuple parameters=(), Py_ssize_t itemsize=0, Py_ssize_t scale=1):
    """How ``arrays``, seen as rows of channels, are walked together.

    Args:
        parameters: dense arrays of values per channel, or None, that are read in vectors, too.
        itemsize: bytes of the values of which a vector takes 16; 0: of the narrowest.
        scale: elements of a value, where bytes are counted in place of values.

    Returns:
        Of the first: number of rows, channels; pitches of all ``arrays``; the most elements per vector.
    """
    cdef Py_ssize_t sizes[MOST]
    cdef uintptr_t aligned[MOST]
    cdef Py_ssize_t count = 0, channels = 0, first_count = 0, first_channels = 0, pitch
    cdef uintptr_t bits = 0  # every bit that some array's number of channels has
    cdef list pitches = []
    cdef int n = 0
    if not 0 < len(arrays) + len(parameters) <= MOST:
        raise ValueError(f"1 to {MOST} arrays are walked together, got {len(arrays) + len(parameters)}")
    for x in arrays:
        _lie(x, &count, &channels, &pitch)
        if pitch < 0:
            raise _no_rows(x)
        if n == 0:
            first_count, first_channels = count, channels * scale
        sizes[n] = <Py_ssize_t>x.itemsize // scale
        aligned[n] = alignment(x, <uintptr_t>(pitch * scale * sizes[n]))
        bits |= <uintptr_t>(channels * scale)
        pitches.append(pitch * scale)
        n += 1
    for x in parameters:
        if x is not None:
            sizes[n], aligned[n] = x.itemsize, alignment(x)
            n += 1
    return first_count, first_channels, tuple(pitches), _widest(n, sizes, aligned, bits, itemsize)


cpdef Py_ssize_t flat_width(tuple arrays, Py_ssize_t scale=1) except -1:
    """The most elements per vector of dense arrays, of whose widest type a vector takes 16 bytes, wherever rows end;
    0 where one of them is not dense. ``scale``: as of `spans`.
    """
    cdef Py_ssize_t sizes[MOST]
    cdef uintptr_t aligned[MOST]
    cdef Py_ssize_t widest = 1
    cdef int n = 0
    if not 0 < len(arrays) <= MOST:
        raise ValueError(f"1 to {MOST} arrays are walked together, got {len(arrays)}")
    for x in arrays:
        if not dense(x):
            return 0
        sizes[n], aligned[n] = <Py_ssize_t>x.itemsize // scale, alignment(x)
        widest = max(widest, sizes[n])
        n += 1
    return _widest(n, sizes, aligned, 0, widest)


cpdef bint vectors(Py_ssize_t size, tuple arrays) except -1:
    """Whether each of ``arrays`` that is not None is dense float32 of ``size`` elements."""
    for x in arrays:
        if x is None:
            continue
        dtype = x.dtype
        if (dtype is not float32 and dtype != float32) or <Py_ssize_t>x.size != size or not dense(x):
            return False
    return True
