"""The float32 product with a matrix of few elements in Compressed Sparse Blocks, on sm_90: csb_quads.cu, csb_lines.cu.

The same sums in the same order as csb_rows.cu and csb.cu, hence the same bits; only faster, where there are samples
enough for every multiprocessor.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from minidl.cuda.array import empty, zeros
from minidl.cuda.convolution.conv2d_plan import argument, struct
from minidl.cuda.device import DeviceRecord, current_device
from minidl.cuda.launch import launch
from minidl.cuda.rows import rows, vector_width
from minidl.cuda.sparse.csb_rows import applies
from minidl.precision import float32
from minidl.shapes import Pair, ceil_div, round_up

__all__ = ["LinesTile", "applies", "choose_tile", "lists", "matmul", "multiply"]

SAMPLES, LINE = 32, 128  # of a line, and its bytes
BAND, QUADS = 64, 16  # output features that are sorted together, in quads
GRAIN = 128  # summed features that a chunk is a multiple of: few, as each is a variant
WARPS, FETCHERS = 16, 128  # warps that multiply, threads that fetch
OUTGOING = 4 * BAND * LINE  # bytes of bands on their way out, features last
CONTROL = 256  # bytes: barriers and counters
FEW_FEATURES = 1024  # with so few, what ends a chunk weighs more than sums on their way through L2

_LISTS = struct("", "rows columns across chunks")
_PROBLEM = struct("x_pitch samples", "features depth bands chunks tiles relu")


class LinesTile(NamedTuple):
    """What a block of csb_lines.cu holds of x: the macros of the same names."""

    chunk: int
    buffers: int
    warps: int = WARPS

    def shared_bytes(self, features_last: bool) -> int:
        return self.buffers * LINE * (self.chunk + 1) + (OUTGOING if features_last else 0) + CONTROL


@functools.lru_cache(maxsize=4096)
def choose_tile(features: int, depth: int, features_last: bool, device: DeviceRecord) -> LinesTile:
    """The tile for so many output and summed features; it does not change the bits.

    As few chunks as fit, one at a time; with two buffers where that makes no more of them, or where features are few.
    """
    room = device.shared_per_block - CONTROL - (OUTGOING if features_last else 0)

    def chunks(buffers: int) -> int:
        return ceil_div(depth, (room // (buffers * LINE) - 1) // GRAIN * GRAIN)

    buffers = 2 if chunks(2) == chunks(1) or features < FEW_FEATURES else 1
    return LinesTile(round_up(ceil_div(depth, chunks(buffers)), GRAIN), buffers)


def lists(
    indptr: Any, indices: Any, values: Any, shape: Pair, side: int, transposed: bool, tile: LinesTile
) -> tuple[Any, Any, Any]:
    """(items, quads, order) of csb_quads.cu."""
    features, depth = shape[::-1] if transposed else shape
    bands, chunks = ceil_div(features, BAND), ceil_div(depth, tile.chunk)
    # A list is as long as its first feature's, and no longer than the last one's of the list before, but for the first.
    most = 4 * min(indices.size, bands * chunks * tile.chunk) + indices.size + 4 * QUADS * bands * chunks
    items = empty((most, 2), np.uint32)
    assert most < 2**32 and bands * chunks < 2**31, shape
    quads, order = empty((chunks, bands * QUADS, 2), np.uint32), empty((chunks, bands * BAND), np.int32)
    problem = argument(_LISTS, rows=shape[0], columns=shape[1], across=ceil_div(shape[1], side), chunks=chunks)
    defines = {"SIDE": side, "TRANSPOSED": int(transposed), "CHUNK": tile.chunk}
    arrays = indptr, indices, values, items, quads, order, zeros(1, np.uint32)
    launch("csb_quads", "csb_quads_kernel", bands * chunks, 1024, *arrays, problem, defines=defines)
    return items, quads, order


def matmul(
    indptr: Any, indices: Any, values: Any, x: Any, y: Any, shape: Pair, side: int, transposed: bool,
    features_last: bool, bias: Any, relu: bool, tile: LinesTile | None = None,
) -> None:  # fmt: skip
    """Write the product to ``y``; x at any row pitch, nothing empty. ``tile``: None chooses."""
    tile = tile or choose_tile(*(shape[::-1] if transposed else shape), features_last, current_device())
    made = lists(indptr, indices, values, shape, side, transposed, tile)
    multiply(tile, *made, x, y, features_last, bias, relu)


def multiply(
    tile: LinesTile, items: Any, quads: Any, order: Any, x: Any, y: Any, features_last: bool, bias: Any, relu: bool
) -> None:
    """The product of `lists` made for this tile."""
    count, length, pitch = rows(x)
    (samples, features), depth = (y.shape, length) if features_last else (y.shape[::-1], count)
    chunks, bands = quads.shape[0], quads.shape[1] // QUADS
    tiles = ceil_div(samples, SAMPLES)
    assert tiles < 2**30, y.shape
    grid = min(tiles, current_device().multiprocessors)
    partials = empty((grid * tile.buffers, bands * BAND, SAMPLES), float32) if chunks > 1 else None
    problem = argument(
        _PROBLEM, x_pitch=pitch, samples=samples, features=features, depth=depth, bands=bands, chunks=chunks,
        tiles=tiles, relu=relu,
    )  # fmt: skip
    defines = {
        "CHUNK": tile.chunk, "BUFFERS": tile.buffers, "WARPS": tile.warps, "FEATURES_LAST": int(features_last),
        "VEC_X": 4 if vector_width(x) == 4 else 1, "VEC_Y": 4 if y.shape[-1] % 4 == 0 else 1,
    }  # fmt: skip
    arrays = items, quads, order, x, bias, y, partials
    launch("csb_lines", "csb_lines_kernel", grid, 32 * tile.warps + FETCHERS, *arrays, problem, defines=defines,
           shared=tile.shared_bytes(features_last))  # fmt: skip
