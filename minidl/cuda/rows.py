"""How memory-bound kernels walk their arrays: rows of channels at a pitch, cut into vectors.

The device side is ``Share`` in common.cuh.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from minidl import checks, shapes
from minidl.cuda._rows import address, aligned_rows, alignment, dense, rows
from minidl.cuda.device import current_device
from minidl.precision import bfloat16, float16, float32

__all__ = [
    "DTYPE",
    "Walk",
    "address",
    "aligned_rows",
    "alignment",
    "dense",
    "dtype_code",
    "rows",
    "vector_width",
    "walk",
    "walk_channels",
    "walk_samples",
]

THREADS = 256
ACCESS = 16  # bytes that one load or store moves at most
ROW_LIMIT = 2**30  # kernels count rows in an int
LASTING = 8  # groups of rows of a thread that stays
BLOCKS = (3, 24)  # then on a multiprocessor: what runs at a time, and enough to even out their speeds
DTYPE = {float32: 0, bfloat16: 1, float16: 2}  # the macro DTYPE of common.cuh


def dtype_code(x: Any, who: str, argument: str = "x") -> int:
    """The value of the macro DTYPE for ``x``; TypeError when its dtype is no storage type."""
    code = DTYPE.get(x.dtype)
    if code is None:
        raise checks.bad_dtype(who, argument, "float32, bfloat16 or float16", x.dtype)
    return code


@functools.lru_cache(maxsize=4096)
def _widest(itemsizes: tuple[int, ...], alignments: tuple[int, ...], channels: int = 0, itemsize: int = 0) -> int:
    """The most elements per vector: a power of two that divides ``channels`` and whose accesses are aligned.

    At most 16 bytes of ``itemsize``, by default the smallest: vectors of wider types are split into several accesses.
    """
    width = ACCESS // (itemsize or min(itemsizes))
    while width > 1 and (
        channels % width or any(a % min(ACCESS, width * s) for a, s in zip(alignments, itemsizes, strict=True))
    ):
        width //= 2
    return width


def vector_width(*arrays: Any) -> int:
    """The most channels that a thread may move at a time in each of the pitched ``arrays``: 1, 2, 4, 8 or 16.

    At most 16 bytes of the narrowest type; divides every channel count; every row of every array starts aligned for it.
    """
    _, channels, _, alignments = zip(*map(aligned_rows, arrays), strict=True)
    return _widest(tuple([x.itemsize for x in arrays]), alignments, math.gcd(*channels))


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
    itemsizes = tuple([x.itemsize // scale for x in arrays])
    if all(map(dense, arrays)):
        return _dense(arrays[0].size * scale, itemsizes, tuple(map(alignment, arrays)), unroll)
    counts, channels, pitches, alignments = zip(*map(aligned_rows, arrays), strict=True)
    vec = _widest(itemsizes, alignments, channels[0] * scale, max(itemsizes))
    return _pitched(counts[0], channels[0] * scale, tuple([pitch * scale for pitch in pitches]), vec, unroll)


def walk_samples(*arrays: Any, samples: int, unroll: int, groups: int, access: int = ACCESS) -> Walk:
    """A pass as `walk_channels`, in which each block keeps to the rows of one of ``samples`` equal parts.

    The argument speaks of one sample; blocks are numbered along a sample first.

    Args:
        groups: that a thread takes of the rows of a sample: what it reads for all of them should cost little.
        access: bytes that a thread moves at a time, at most.
    """
    counts, channels, pitches, alignments = zip(*map(aligned_rows, arrays), strict=True)
    itemsizes = tuple([x.itemsize for x in arrays])
    vec = min(_widest(itemsizes, alignments, channels[0]), access // itemsizes[0])
    return _sampled(counts[0] // samples, samples, channels[0], pitches, vec, unroll, groups)


def walk_channels(*arrays: Any, unroll: int, lasting: bool = False, parameters: tuple[Any, ...] = ()) -> Walk:
    """The pass over arrays of one shape in which each thread keeps to its channels.

    Args:
        unroll: rows in a group.
        lasting: for kernels whose parameters cost as much as some rows: threads take several groups, `LASTING` of
            them where that leaves blocks enough. Else one each, as in `walk`.
        parameters: dense arrays of values per channel (or None) that the threads read in vectors, too.
    """
    counts, channels, pitches, alignments = zip(*map(aligned_rows, arrays), strict=True)
    present = [x for x in parameters if x is not None]
    itemsizes = tuple([x.itemsize for x in (*arrays, *present)])
    vec = _widest(itemsizes, (*alignments, *map(alignment, present)), channels[0])
    return _pitched(counts[0], channels[0], pitches, vec, unroll, current_device().multiprocessors if lasting else 0)


@functools.lru_cache(maxsize=4096)
def _dense(size: int, itemsizes: tuple[int, ...], alignments: tuple[int, ...], unroll: int) -> Walk:
    vec = _widest(itemsizes, alignments, itemsize=max(itemsizes))
    count, last = divmod(size // vec, THREADS)
    grid = shapes.ceil_div(size, THREADS * vec * unroll)
    pitches = (THREADS * vec,) * len(itemsizes)
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
