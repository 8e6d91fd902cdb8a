"""How memory-bound kernels walk their arrays: rows of channels at a pitch, cut into vectors.

The device side is ``Share`` in common.cuh.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from minidl import checks, shapes
from minidl.cuda.device import current_device
from minidl.precision import bfloat16, float16, float32

THREADS = 256
ACCESS = 16  # bytes that one load or store moves at most
ROW_LIMIT = 2**30  # kernels count rows in an int
LASTING = 8  # groups of rows of a thread that stays
BLOCKS = (3, 24)  # then on a multiprocessor: what runs at a time, and enough to even out their speeds
DTYPE = {float32: 0, bfloat16: 1, float16: 2}  # the macro DTYPE of common.cuh


def address(x: Any) -> int:
    """The device address of an array; of a dry run's NumPy array, its host address."""
    return x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr


def dense(x: Any) -> bool:
    """Whether ``x`` lies in C order without gaps."""
    return x.flags.c_contiguous


def alignment(x: Any, pitch: int = ACCESS) -> int:
    """The largest power of two, at most 16, that the address and ``pitch`` bytes are multiples of."""
    bits = address(x) | pitch | ACCESS
    return bits & -bits


def in_rows(x: Any) -> bool:
    """Whether ``x`` is dense or pitched: what `rows` takes."""
    return dense(x) or shapes.pixel_pitch(x.shape, x.strides, x.itemsize) is not None


def rows(x: Any) -> tuple[int, int, int]:
    """``x`` as (number of rows, channels, pitch in elements).

    Raises:
        ValueError: when ``x`` is neither dense nor pitched; ``as_rows`` makes it so.
    """
    channels = pitch = x.shape[-1] if x.shape else 1
    if not dense(x):
        pitch = shapes.pixel_pitch(x.shape, x.strides, x.itemsize)
        if pitch is None:
            raise ValueError(f"{checks.describe(x)} has strides {x.strides}: rows of channels must lie at one pitch")
    return math.prod(x.shape[:-1]), channels, pitch


def _widest(sizes: Sequence[int], aligned: Sequence[int], channels: int, itemsize: int) -> int:
    """The most elements per vector: a power of two that divides ``channels`` and whose accesses are aligned.

    At most 16 bytes of ``itemsize``: vectors of wider types are split into several accesses.
    """
    width = ACCESS // itemsize
    while width > 1 and (
        channels % width or any(at < min(width * size, ACCESS) for size, at in zip(sizes, aligned, strict=True))
    ):
        width //= 2
    return width


def vector_width(*arrays: Any) -> int:
    """The most channels that a thread may move at a time in each of the pitched ``arrays``: 1, 2, 4, 8 or 16.

    At most 16 bytes of the narrowest type; divides every channel count; every row of every array starts aligned for it.
    """
    return spans(arrays)[3]


def spans(
    arrays: Sequence[Any], parameters: Sequence[Any] = (), itemsize: int = 0, scale: int = 1
) -> tuple[int, int, tuple[int, ...], int]:
    """How ``arrays``, seen as rows of channels, are walked together.

    Args:
        parameters: dense arrays of values per channel, or None, that are read in vectors, too.
        itemsize: bytes of the values of which a vector takes 16; 0: of the narrowest.
        scale: elements of a value, where bytes are counted in place of values.

    Returns:
        Of the first: number of rows, channels; pitches of all ``arrays``; the most elements per vector.
    """
    found = [rows(x) for x in arrays]
    sizes = [x.itemsize // scale for x in arrays]
    pitches = [pitch * scale for *_, pitch in found]
    aligned = [alignment(x, pitch * size) for x, pitch, size in zip(arrays, pitches, sizes, strict=True)]
    for x in parameters:
        if x is not None:
            sizes.append(x.itemsize)
            aligned.append(alignment(x))
    channels = math.gcd(*[one * scale for _, one, _ in found])
    return found[0][0], found[0][1] * scale, tuple(pitches), _widest(sizes, aligned, channels, itemsize or min(sizes))


def flat_width(arrays: Sequence[Any], scale: int = 1) -> int:
    """The most elements per vector of dense arrays, of whose widest type a vector takes 16 bytes, wherever rows end;
    0 where one of them is not dense. ``scale``: as of `spans`.
    """
    if not all(dense(x) for x in arrays):
        return 0
    sizes = [x.itemsize // scale for x in arrays]
    return _widest(sizes, [alignment(x) for x in arrays], 0, max(sizes))


def vectors(size: int, arrays: Sequence[Any]) -> bool:
    """Whether each of ``arrays`` that is not None is dense float32 of ``size`` elements."""
    return all(x is None or (x.dtype == float32 and x.size == size and dense(x)) for x in arrays)


def dtype_code(x: Any, who: str, argument: str = "x") -> int:
    """The value of the macro DTYPE for ``x``; TypeError when its dtype is no storage type."""
    code = DTYPE.get(x.dtype)
    if code is None:
        raise checks.bad_dtype(who, argument, "float32, bfloat16 or float16", x.dtype)
    return code


class Walk(NamedTuple):
    """A pass over arrays of one shape.

    Attributes:
        vec, unroll: elements per vector, rows that a thread has in flight: the macros VEC and UNROLL.
        grid, block: launch sizes; the grid is empty for empty arrays.
        argument: the ``Walk`` of common.cuh, passed to the kernel by value.
    """

    vec: int
    unroll: int
    grid: tuple[int, int]
    block: tuple[int, int]
    argument: np.ndarray


_ARGUMENT = np.dtype(
    [("size", np.int64), ("rows", np.int32), ("columns", np.int32), ("last", np.int32), ("pitch", np.int32, 4)],
    align=True,
)


def _argument(size: int, rows: int, columns: int, last: int, pitches: tuple[int, ...]) -> np.ndarray:
    assert rows < ROW_LIMIT and max(pitches) < 2**31, (rows, pitches)
    padded = (*pitches, *[0] * (4 - len(pitches)))
    argument = np.array([(size, rows, columns, last, padded)], _ARGUMENT)
    argument.setflags(write=False)
    return argument


def walk(*arrays: Any, unroll: int, in_bytes: bool = False) -> Walk:
    """The pass over arrays of one shape when it does not matter which channel a thread sees.

    Dense arrays are cut into rows of any length; pitched ones are walked like by `walk_channels`. A thread takes one
    group of rows: with nothing to keep from group to group, more blocks are faster than longer ones.

    Args:
        unroll: rows in a group.
        in_bytes: count bytes instead of elements (the arrays have one type, and the kernel does not care which).
    """
    scale = arrays[0].itemsize if in_bytes else 1
    vec = flat_width(arrays, scale)
    if vec:
        return _dense(arrays[0].size * scale, len(arrays), vec, unroll)
    widest = max([x.itemsize for x in arrays]) // scale
    return _pitched(*spans(arrays, (), widest, scale), unroll)


def walk_samples(
    *arrays: Any, samples: int, unroll: int, groups: int, access: int = ACCESS, parameters: tuple[Any, ...] = ()
) -> Walk:
    """A pass as `walk_channels`, in which each block keeps to the rows of one of ``samples`` equal parts.

    The argument speaks of one sample; blocks are numbered along a sample first.

    Args:
        groups: that a thread takes of the rows of a sample: what it reads for all of them should cost little.
        access: bytes that a thread moves at a time, at most.
        parameters: as of `walk_channels`.
    """
    count, channels, pitches, vec = spans(arrays, parameters)
    vec = min(vec, access // arrays[0].itemsize)
    return _sampled(count // samples, samples, channels, pitches, vec, unroll, groups)


def walk_channels(*arrays: Any, unroll: int, lasting: bool = False, parameters: tuple[Any, ...] = ()) -> Walk:
    """The pass over arrays of one shape in which each thread keeps to its channels.

    Args:
        unroll: rows in a group.
        lasting: for kernels whose parameters cost as much as some rows: threads take several groups, `LASTING` of
            them where that leaves blocks enough. Else one each, as in `walk`.
        parameters: dense arrays of values per channel (or None) that the threads read in vectors, too.
    """
    count, channels, pitches, vec = spans(arrays, parameters)
    return _pitched(count, channels, pitches, vec, unroll, current_device().multiprocessors if lasting else 0)


@functools.lru_cache(maxsize=4096)
def _dense(size: int, arrays: int, vec: int, unroll: int) -> Walk:
    count, last = divmod(size // vec, THREADS)
    grid = shapes.ceil_div(size, THREADS * vec * unroll)
    pitches = (THREADS * vec,) * arrays
    return Walk(vec, unroll, (grid, 1), (THREADS, 1), _argument(size, count, THREADS, last, pitches))


@functools.lru_cache(maxsize=4096)
def _pitched(
    count: int, channels: int, pitches: tuple[int, ...], vec: int, unroll: int, multiprocessors: int = 0
) -> Walk:
    columns = channels // vec
    if count * columns == 0:
        return Walk(vec, unroll, (0, 1), (THREADS, 1), _argument(0, 0, columns, 0, pitches))
    tiles = shapes.ceil_div(columns, THREADS)
    threads = shapes.ceil_div(columns, tiles)
    lanes = THREADS // threads
    grid = shapes.ceil_div(count, lanes * unroll)
    if multiprocessors:
        fewest, most = (max(1, blocks * multiprocessors // tiles) for blocks in BLOCKS)
        grid = min(grid, most, max(fewest, shapes.ceil_div(grid, LASTING)))
    return Walk(vec, unroll, (grid, tiles), (threads, lanes), _argument(count * channels, count, columns, 0, pitches))


@functools.lru_cache(maxsize=4096)
def _sampled(
    count: int, samples: int, channels: int, pitches: tuple[int, ...], vec: int, unroll: int, groups: int
) -> Walk:
    one = _pitched(count, channels, pitches, vec, unroll)
    threads, lanes = one.block[0], min(one.block[1], count)
    blocks = shapes.ceil_div(count, lanes * unroll * groups)
    return Walk(vec, unroll, (blocks * samples, one.grid[1]), (threads, lanes), one.argument)
