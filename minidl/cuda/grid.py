"""The work split of kernels over images and samples: rows of items. The device side is ``place`` in grid.cuh."""

from __future__ import annotations

from typing import Any

import numpy as np

from minidl.cuda.device import current_device
from minidl.shapes import ceil_div

BLOCK = 256  # threads per block, at most
THREADS_PER_MULTIPROCESSOR = 2048
INT_MAX = 2**31 - 1


def row_grid(rows: int, items: int, each: int = 1) -> tuple[int, tuple[int, int]]:
    """Grid and block for ``rows`` rows of ``items`` items: whole rows side by side while they fit into a block.

    A thread takes ``each`` items of a row.
    """
    if rows == 0 or items == 0:
        return 0, (BLOCK, 1)
    assert max(rows, items) <= INT_MAX, (rows, items)
    tiles = ceil_div(items, BLOCK * each)
    width = ceil_div(items, tiles * each)
    height = BLOCK // width
    grid = tiles * ceil_div(rows, height)
    assert grid <= INT_MAX, (rows, items)
    return grid, (width, height)


def strip_length(threads: int, rows: int, longest: int = 4, resident: int = THREADS_PER_MULTIPROCESSOR) -> int:
    """How many of ``rows`` rows one thread works through when ``threads`` threads would take one each.

    Longer strips reuse more of the cache, as long as the threads that the device holds remain, ``resident`` on a
    multiprocessor.
    """
    enough = resident * current_device().multiprocessors
    strip = 1
    while strip < min(longest, rows) and threads // (2 * strip) >= enough:
        strip *= 2
    return strip


def ints(*values: int) -> tuple[Any, ...]:
    """Kernel arguments of type ``int``."""
    return tuple(map(np.int32, values))
