"""The float32 product with a matrix in Compressed Sparse Blocks on CUDA cores of sm_90: csb_lists.cu, then csb_rows.cu.

The same sums in the same order as csb.cu, hence the same bits; only faster. Convolutions gather the pixels that a tap
meets where a product copies rows.
"""

from __future__ import annotations

import functools
from math import prod
from typing import Any, NamedTuple

import numpy as np

from minidl.cuda.array import empty
from minidl.cuda.convolution.conv2d_plan import argument, struct
from minidl.cuda.device import HOPPER, DeviceRecord, current_device
from minidl.cuda.hopper import TensorMaps, View, Views
from minidl.cuda.launch import launch
from minidl.cuda.rows import rows, vector_width
from minidl.cuda.sparse.csb_order import RANGE, UNIT
from minidl.precision import float32
from minidl.shapes import Pair, ceil_div, round_up

LEAST_SIDE = 16  # smaller blocks are too many to walk
HEADER = 10  # slots of a list before its values
FETCHERS = 128  # threads that fetch, but for the copy engine's 32
PIECES = 4 * 4096  # bytes of x that they turn at a time, features last: 32 samples of 32 features each warp
CAPACITIES = (1280, 2048, 3072, 4096, 6144, 8192)  # slots of a stage, to choose from: few, as each is a variant
SLACK = 1.15  # room for lists longer than the mean
CLEARLY = 0.95  # of a tile's expected time: less is worth more loads of items
DEEP_BELOW = 0.12  # density up to which a stage is 128 summed features deep: rows of a list are short otherwise

PHASES = {"all": 0, "loads": 1, "multiply-adds": 2}  # the macro PHASE

# The structures Axis and Window of csb_window.cuh.
AXIS = np.dtype([(name, np.int32) for name in ("size", "grid", "taps", "multiply", "start", "step", "divide")])
WINDOW = np.dtype([("down", AXIS), ("across", AXIS), ("channels", np.int32), ("room", np.int32)])

_LISTS = struct("", "rows columns across features steps parts room")
_FIELDS = "x_pitch samples", "features depth units steps tiles_down tiles relu"
_PROBLEM, _CONVOLUTION = struct(*_FIELDS), struct(_FIELDS[0], f"{_FIELDS[1]} parts", ("window", WINDOW))


class RowsTile(NamedTuple):
    """What a block of csb_rows.cu owns and holds: the macros of the same names."""

    units: int
    vec: int
    part: int
    capacity: int
    stages: int

    @property
    def unit_slots(self) -> int:
        """Of the longest list."""
        return HEADER + UNIT * (self.part * 3 // 4)

    @property
    def x_bytes(self) -> int:
        """Of a stage."""
        return 128 * self.part * self.vec

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage: x, lists, notes, barriers."""
        return self.x_bytes + 8 * self.capacity + 4 * (self.units + 4) + 16

    @property
    def pieces(self) -> int:
        """Of a fetching warp and a stage, features last."""
        return ceil_div(self.x_bytes, PIECES)

    def shared_bytes(self, ahead: int) -> int:
        """With so many pieces of each fetching warp under way."""
        return self.stages * self.stage_bytes + ahead * PIECES + 32 + 128 * self.vec

    def ahead(self, features_last: bool, device: DeviceRecord) -> int:
        """Pieces under way: all of a stage, or a part of them for which there is room."""
        if not features_last:
            return 0
        shares = (n for n in range(self.pieces, 1, -1) if self.pieces % n == 0)
        return next((n for n in shares if self.shared_bytes(n) <= device.shared_per_block), 1)


def applies(side: int, dtype: Any, device: DeviceRecord) -> bool:
    """Whether these kernels can do a product."""
    return side >= LEAST_SIDE and dtype == float32 and device.arch == HOPPER


@functools.lru_cache(maxsize=4096)
def choose_tile(
    features: int, depth: int, samples: int, density: float, features_last: bool, device: DeviceRecord
) -> RowsTile:
    """The tile for so many output features, summed features and samples; it does not change the bits.

    Args:
        density: elements over size of the matrix.

    As many output features as x should be read for at a time, and the samples with which rounds of thread blocks are
    expected to take the least time; then fewer features, while even so no multiprocessor gets a second tile.
    """
    units = 4 if features <= 64 else 8 if features <= 128 else 16

    def tiles(units: int, vec: int) -> int:
        return ceil_div(features, units * UNIT) * ceil_div(samples, 32 * vec)

    def cost(vec: int) -> float:
        return ceil_div(tiles(units, vec), device.multiprocessors) * _tile_time(units, vec, depth, density)

    vec, *narrower = (v for v in (4, 3, 2, 1) if 32 * (v - 1) < samples)
    for fewer in narrower:
        if cost(fewer) < CLEARLY * cost(vec):
            vec = fewer
    while units > 4 and 2 * tiles(units, vec) <= device.multiprocessors:
        units //= 2
    part = 128 if density < DEEP_BELOW else 64
    tile = RowsTile(units, vec, part, 0, 0)
    items = part * density  # of a feature: half a slot each, and one behind each four
    slots = 0.5 * items + max(0.25 * (items - 1.5), 0) + 0.3
    wanted = max(tile.unit_slots, SLACK * units * (HEADER + UNIT * slots))
    tile = tile._replace(capacity=next((c for c in CAPACITIES if c >= wanted), CAPACITIES[-1]))
    room = device.shared_per_block - 1024 - features_last * tile.pieces * PIECES
    return tile._replace(stages=max(2, min(6, room // tile.stage_bytes)))


def _tile_time(units: int, vec: int, depth: int, density: float) -> float:
    """Microseconds of a thread block on an H200: loads of x, multiply-adds with loads of items, beginning and end.

    Fitted to (units, vec) = (16, 4), (16, 3), (16, 2) and (8, 4) at a depth of 2048, 98 % zeros, features last: 52.5,
    43.6, 35.0 and 40.8 before x was turned on its way. Features first take 43.1, 39.5, 32.0 and 31.0.
    """
    return depth / 2048 * (4.85 * vec + 12.2 * units * density * (vec + 2)) + 9.7


def lists(
    indptr: Any, indices: Any, values: Any, order: Any, shape: Pair, side: int, transposed: bool, features: int,
    tile: RowsTile, taps: int = 1,
) -> tuple[Any, Any]:  # fmt: skip
    """(slots, units) of csb_lists.cu."""
    room, wide = shape[1] // taps, tile.units * UNIT
    out, parts = ceil_div(features, wide), ceil_div(shape[0] if transposed else room, tile.part)
    steps = taps * parts
    assert order is None or order.size >= out * wide, (order.shape, shape)
    # Values and what lies behind fours of them take a slot each at most; each unit may have a header and pads.
    shared = ceil_div(side, tile.part)
    cells = taps * round_up(parts, shared) * ceil_div(features, RANGE)
    count = shared * indices.size + cells * (RANGE // UNIT) * (HEADER + 2)
    assert count < 2**32 and out * steps < 2**31, shape
    slots = empty((count, 2), np.uint32)
    units = empty((out * tile.units, steps, 2), np.uint32)
    problem = argument(
        _LISTS, rows=shape[0], columns=shape[1], across=ceil_div(shape[1], side), features=features, steps=steps,
        parts=parts, room=room,
    )  # fmt: skip
    defines = {"SIDE": side, "TRANSPOSED": int(transposed), "OUT": wide, "PART": tile.part}
    arrays = indptr, indices, values, order, slots, units
    launch("csb_lists", "csb_lists_kernel", out * steps, RANGE, *arrays, problem, defines=defines)
    return slots, units


def matmul(
    indptr: Any, indices: Any, values: Any, x: Any, y: Any, shape: Pair, side: int, transposed: bool,
    features_last: bool, bias: Any, relu: bool, order: Any = None, tile: RowsTile | None = None,
) -> None:  # fmt: skip
    """Write the product to ``y``; x at any row pitch, nothing empty. ``order``: as `csb_matmul`."""
    count, length, _ = rows(x)
    features, depth = shape[::-1] if transposed else shape
    samples, density = count if features_last else length, indices.size / (features * depth)
    tile = tile or choose_tile(features, depth, samples, density, features_last, current_device())
    made = lists(indptr, indices, values, order, shape, side, transposed, features, tile)
    multiply(tile, *made, order, x, y, features_last, bias, relu)


def convolve(
    indptr: Any, indices: Any, values: Any, source: Any, y: Any, shape: Pair, side: int, transposed: bool,
    axes: tuple[tuple[int, ...], ...], bias: Any, order: Any = None, tile: RowsTile | None = None,
) -> None:  # fmt: skip
    """Write a convolution to ``y`` (N, P, Q, features), whose pixels are the grid of ``axes``.

    Args:
        source: (N, H, W, C), what is gathered; any pitch.
        axes: `minidl.shapes.tap_axes`.
    """
    taps, features, depth = axes[0][2] * axes[1][2], y.shape[3], source.shape[3]
    density = indices.size / (taps * depth * features)
    tile = tile or choose_tile(features, taps * depth, prod(y.shape[:3]), density, True, current_device())
    made = lists(indptr, indices, values, order, shape, side, transposed, features, tile, taps)
    parts = made[1].shape[1] // taps
    multiply(tile, *made, order, source, y, True, bias, False, parts=parts, window=(*axes, depth, parts))


@functools.lru_cache(maxsize=256)
def _views(part: int, features: int, samples: int, pitch: int) -> Views:
    return Views((View(0, (samples, features), (4 * pitch,), (32, part), swizzled=False), 0))


def multiply(
    tile: RowsTile, slots: Any, units: Any, order: Any, x: Any, y: Any, features_last: bool, bias: Any, relu: bool,
    phase: str = "all", **convolution: Any,
) -> None:  # fmt: skip
    """The product of `lists` made for this tile; ``phase``: one of `PHASES`, to take times apart."""
    count, length, pitch = rows(x)
    features = y.shape[-1] if features_last else y.shape[0]
    samples = prod(y.shape[:-1]) if features_last else y.shape[1]
    down = ceil_div(features, tile.units * UNIT)
    tiles = down * ceil_div(samples, 32 * tile.vec)
    assert tiles < 2**31, y.shape
    problem = argument(
        _CONVOLUTION if convolution else _PROBLEM, x_pitch=pitch, samples=samples, features=features,
        depth=length if features_last else count, units=units.shape[0], steps=units.shape[1], tiles_down=down,
        tiles=tiles, relu=relu, **convolution,
    )  # fmt: skip
    vec_x, ahead = min(4, vector_width(x)), tile.ahead(features_last, current_device())
    views = _views(tile.part, count, length, pitch)
    engine = not features_last and vec_x == 4 and views.legal and max(count, length) < 2**31
    wide = 4 if features_last else 1 if tile.vec == 3 else tile.vec
    defines = {
        "UNITS": tile.units, "VEC": tile.vec, "PART": tile.part, "CAPACITY": tile.capacity, "STAGES": tile.stages,
        "FEATURES_LAST": int(features_last), "AHEAD": ahead, "CONV": int(bool(convolution)), "ENGINE": int(engine),
        "VEC_X": vec_x, "VEC_Y": wide if y.shape[-1] % wide == 0 else 1, "PHASE": PHASES[phase],
    }  # fmt: skip
    shared = tile.shared_bytes(ahead)
    grid = min(tiles, current_device().multiprocessors)
    arrays = slots, units, order, TensorMaps(views, (x,)) if engine else x, bias, y
    threads = 32 * tile.units + (32 if engine else FETCHERS)
    launch("csb_rows", "csb_rows_kernel", grid, threads, *arrays, problem, defines=defines, shared=shared)
