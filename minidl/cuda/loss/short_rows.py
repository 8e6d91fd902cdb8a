"""How threads take whole rows of few classes, with their labels (short_rows.cuh): tiles, blocks, shared memory."""

from __future__ import annotations

from typing import Any, NamedTuple

from minidl.cuda.array import contiguous, copy_into, empty
from minidl.cuda.rows import ACCESS, address, rows
from minidl.shapes import ceil_div

BLOCK = 128
LONGEST = 64  # elements of a row that one thread holds in registers
THREAD_BYTES, MOST_RUNS = 48, 4  # of rows that a thread takes at a time, up to
STAGED_BYTES = 64 * 1024  # of a block's shared memory, up to which there is room for the tile to come
SHARED, RESERVED = 227 * 1024, 1024  # bytes of a multiprocessor, and what a block takes of them unasked
MULTIPROCESSORS = 128  # to be kept busy; what a block sums follows from the sizes, so this is no one device's number


class ShortRows(NamedTuple):
    """A variant: macros, shared memory in bytes, groups of rows that a block takes one after the other, blocks."""

    defines: dict[str, int | str]
    shared: int
    passes: int
    blocks: int


def _tiles(x: Any, vectors: bool) -> tuple[int, int, int] | None:
    """Runs of a thread, rows of a block, blocks; None for rows that are long, or not dense on 16-byte boundaries."""
    count, classes, pitch = rows(x)
    whole = classes % (ACCESS // x.itemsize) == 0
    if classes > LONGEST or pitch != classes or address(x) % ACCESS or (whole and not vectors):
        return None
    run = 2 if x.itemsize == 2 and classes % 2 else 1  # RUN of short_rows.cuh
    wanted = max(1, THREAD_BYTES // (run * classes * x.itemsize))
    runs = min(MOST_RUNS, 1 << wanted.bit_length() - 1)
    return runs, BLOCK * run * runs, ceil_div(count, BLOCK * run * runs)


def rewritten_rows(x: Any) -> ShortRows | None:
    """Of a kernel that makes other rows of the rows of ``x``; None where several threads share one.

    Those are long rows, rows at a pitch, and rows of whole 16-byte vectors.
    """
    tiles = _tiles(x, vectors=False)
    if tiles is None:
        return None
    runs, block_rows, blocks = tiles
    defines = {"CLASSES": x.shape[-1], "RUNS": runs, "STAGES": 1}
    return ShortRows(defines, block_rows * x.shape[-1] * x.itemsize, 1, blocks)


def labelled_rows(x: Any, labels: Any, resident: int, beside: int = 0, vectors: bool = False) -> ShortRows | None:
    """Of a kernel that sums over rows and labels: as many blocks as a GPU holds, each with a run of tiles.

    Args:
        resident: blocks of a multiprocessor that the registers allow.
        beside: bytes of a block's shared memory in front of the tiles.
        vectors: also for rows of whole 16-byte vectors.
    """
    tiles = _tiles(x, vectors)
    if tiles is None:
        return None
    runs, block_rows, groups = tiles
    stage = block_rows * (x.shape[-1] * x.itemsize + labels.itemsize)
    stages = 2 if 2 * stage <= STAGED_BYTES else 1
    shared = stages * stage + beside
    resident = min(resident, SHARED // (shared + RESERVED))
    passes = ceil_div(groups, MULTIPROCESSORS * resident)
    defines = {"CLASSES": x.shape[-1], "RUNS": runs, "STAGES": stages, "RESIDENT": resident}
    return ShortRows(defines, shared, passes, ceil_div(groups, passes))


def aligned(labels: Any) -> Any:
    """``labels``, dense and on a 16-byte boundary: copied where they are not."""
    labels = contiguous(labels)
    if address(labels) % ACCESS == 0:
        return labels
    out = empty(labels.shape, labels.dtype)
    copy_into(out, labels)
    return out
