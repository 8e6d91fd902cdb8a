"""The float32 product of a very sparse matrix in Compressed Sparse Blocks and many samples on CUDA cores of sm_90:
csb_streams.cu, then csb_lanes.cu.

The same sums in the same order as csb.cu, hence the same bits; only faster.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from minidl.cuda.array import empty
from minidl.cuda.convolution.conv2d_plan import argument, struct
from minidl.cuda.device import DeviceRecord, current_device
from minidl.cuda.launch import launch
from minidl.cuda.rows import rows, vector_width
from minidl.cuda.sparse import csb_rows
from minidl.shapes import Pair, ceil_div

__all__ = ["PART", "SAMPLES", "TILES", "LanesTile", "applies", "choose_tile", "fills", "matmul", "multiply", "streams"]

SAMPLES, PART, STAGES = 32, 512, 2  # of a thread block; summed features of a stage
BAND, COUNTERS = 64, 256  # output features, threads of a block of csb_streams.cu
WARPS, FETCHERS = 16, 128  # warps that multiply, threads that fetch
RING_BYTES = 4096  # of a warp's items on their way
TOGETHER = 8  # lanes that read shared memory together

PHASES = csb_rows.PHASES
_STREAMS = struct("", "rows columns across tiles parts")
_PROBLEM = struct("x_pitch samples", "features depth parts tiles_down tiles relu")


class LanesTile(NamedTuple):
    """The macros of the same names of csb_lanes.cu."""

    sets: int
    halves: int

    @property
    def groups(self) -> int:
        """Of warps that share their sets."""
        return WARPS // self.halves

    @property
    def features(self) -> int:
        """Output features of a thread block."""
        return 32 * self.groups * self.sets


TILES = LanesTile(2, 1), LanesTile(2, 2), LanesTile(1, 2)  # the largest first

applies = csb_rows.applies


def shared_bytes() -> int:
    """Of a thread block: stages and their barriers, items of each warp."""
    return STAGES * (128 * PART + 16) + WARPS * RING_BYTES


def fills(features: int, samples: int, device: DeviceRecord) -> bool:
    """Whether there is a tile for each multiprocessor."""
    least = TILES[-1]
    return ceil_div(features, least.features) * ceil_div(samples, SAMPLES) >= device.multiprocessors


@functools.lru_cache(maxsize=4096)
def choose_tile(features: int, samples: int, device: DeviceRecord) -> LanesTile:
    """The tile for so many output features and samples; it does not change the bits.

    As many output features as x should be read for at a time, unless multiprocessors would be left without a tile.
    """
    across = ceil_div(samples, SAMPLES)
    for tile in TILES[:-1]:
        if 2 * features > tile.features and ceil_div(features, tile.features) * across >= device.multiprocessors:
            return tile
    return TILES[-1]


def streams(
    indptr: Any, indices: Any, values: Any, shape: Pair, side: int, transposed: bool, tile: LanesTile
) -> tuple[Any, Any, Any]:
    """(items, heads, order) of csb_streams.cu."""
    features, summed = shape[::-1] if transposed else shape
    tiles, parts = ceil_div(features, tile.features), ceil_div(summed, PART)
    padded, bands = tiles * tile.features, tile.features // BAND
    assert padded * parts < 2**31, shape
    counts, order = empty((parts, padded), np.uint16), empty(padded, np.int32)
    heads, items = empty((tiles, parts, tile.features, 2), np.uint32), empty((indices.size, 2), np.uint32)
    problem = argument(
        _STREAMS, rows=shape[0], columns=shape[1], across=ceil_div(shape[1], side), tiles=tiles, parts=parts
    )
    defines = {"SIDE": side, "TRANSPOSED": int(transposed), "WARPS": tile.groups, "SETS": tile.sets, "PART": PART}
    grid = tiles * parts * bands
    launch("csb_streams", "csb_count_kernel", grid, COUNTERS, indptr, indices, counts, problem, defines=defines)
    arrays = indptr, indices, values, counts, order, heads, items
    threads = max(512, tile.features)
    launch("csb_streams", "csb_place_kernel", grid, threads, *arrays, problem, defines=defines)
    return items, heads, order


def matmul(
    indptr: Any, indices: Any, values: Any, x: Any, y: Any, shape: Pair, side: int, transposed: bool,
    features_last: bool, bias: Any, relu: bool, tile: LanesTile | None = None,
) -> None:  # fmt: skip
    """Write the product to ``y``; x at any row pitch, nothing empty. ``tile``: None chooses."""
    features, samples = y.shape[::-1] if features_last else y.shape
    tile = tile or choose_tile(features, samples, current_device())
    made = streams(indptr, indices, values, shape, side, transposed, tile)
    multiply(tile, *made, x, y, features_last, bias, relu)


def multiply(
    tile: LanesTile, items: Any, heads: Any, order: Any, x: Any, y: Any, features_last: bool, bias: Any, relu: bool,
    phase: str = "all",
) -> None:  # fmt: skip
    """The product of `streams` made for this tile; ``phase``: one of `PHASES`, to take times apart."""
    count, length, pitch = rows(x)
    features, samples = y.shape[::-1] if features_last else y.shape
    down, parts = heads.shape[:2]
    tiles = down * ceil_div(samples, SAMPLES)
    assert tiles < 2**31, y.shape
    problem = argument(
        _PROBLEM, x_pitch=pitch, samples=samples, features=features, depth=length if features_last else count,
        parts=parts, tiles_down=down, tiles=tiles, relu=relu,
    )  # fmt: skip
    defines = {"WARPS": WARPS, "SETS": tile.sets, "HALVES": tile.halves, "PART": PART, "STAGES": STAGES}
    defines |= {"FEATURES_LAST": int(features_last), "VEC_X": 4 if vector_width(x) >= 4 else 1}
    defines |= {"VEC_Y": 4 if y.shape[-1] % 4 == 0 else 1, "PHASE": PHASES[phase]}
    grid, threads = min(tiles, current_device().multiprocessors), 32 * WARPS + FETCHERS
    arrays = items, heads, order, x, bias, y
    launch("csb_lanes", "csb_lanes_kernel", grid, threads, *arrays, problem, defines=defines, shared=shared_bytes())
