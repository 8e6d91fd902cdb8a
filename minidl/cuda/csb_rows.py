"""The float32 product with a matrix in Compressed Sparse Blocks on CUDA cores of sm_90: csb_lists.cu, then csb_rows.cu.

The same sums in the same order as csb.cu, hence the same bits; only faster.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from minidl.cuda.array import empty
from minidl.cuda.conv2d_plan import argument, struct
from minidl.cuda.device import DeviceRecord, current_device
from minidl.cuda.launch import launch
from minidl.cuda.rows import rows, vector_width
from minidl.precision import float32
from minidl.shapes import Pair, ceil_div, round_up

__all__ = ["RowsTile", "applies", "choose_tile", "matmul"]

ARCH = (9, 0)
SIDES = (64, 128, 256)
PART, UNIT = 64, 16  # summed features of a stage; output features of a warp
PAD = 82  # of csb_lists.cu
FETCHERS = 128  # threads that fetch; of bulk copies a warp
UNIT_SLOTS = 4 + UNIT * PART  # of the longest list
CAPACITIES = (1280, 2048, 3072, 4096, 6144, 8192)  # slots of a stage, to choose from: few, as each is a variant
SLACK = 1.15  # room for lists longer than the mean

_LISTS = struct("", "rows columns across parts_across steps scale")
_PROBLEM = struct("x_pitch samples", "features depth units steps tiles_down tiles relu")


class RowsTile(NamedTuple):
    """What a block of csb_rows.cu owns and holds: the macros of the same names."""

    units: int
    vec: int
    capacity: int
    stages: int


def applies(side: int, dtype: Any, device: DeviceRecord) -> bool:
    """Whether these kernels can do a product."""
    return side in SIDES and dtype == float32 and device.arch == ARCH


def stage_bytes(units: int, vec: int, capacity: int, features_last: bool) -> int:
    """Shared memory of a stage: x, lists, notes, barriers."""
    x = 32 * vec * (PART + 1) if features_last else PART * 32 * vec
    return 4 * x + 8 * capacity + 4 * (units + 4) + 16


@functools.lru_cache(maxsize=4096)
def choose_tile(features: int, samples: int, density: float, features_last: bool, device: DeviceRecord) -> RowsTile:
    """The tile for so many output features and samples; it does not change the bits.

    Args:
        density: elements over size of the matrix.
    """
    vec = 1 if samples <= 32 else 2 if samples <= 64 else 4
    units = 4 if features <= 64 else 8 if features <= 128 else 16
    while units > 4 and ceil_div(features, units * UNIT) * ceil_div(samples, 32 * vec) < device.multiprocessors:
        units //= 2
    mean = units * (4 + UNIT * (PART * density + 0.5))
    wanted = max(UNIT_SLOTS, SLACK * mean)
    capacity = next((c for c in CAPACITIES if c >= wanted), CAPACITIES[-1])
    stages = min(6, (device.shared_per_block - 1024) // stage_bytes(units, vec, capacity, features_last))
    return RowsTile(units, vec, capacity, stages)


def _lists(
    indptr: Any, indices: Any, values: Any, shape: Pair, side: int, transposed: bool, scale: int
) -> tuple[Any, Any]:
    """(slots, units) of csb_lists.cu."""
    across, down = ceil_div(shape[1], PART), ceil_div(shape[0], PART)
    out, steps = (across, down) if transposed else (down, across)
    whole = (indptr.size - 1) * (side // PART) ** 2
    slots = empty((indices.size + 2 + whole * PAD, 2), np.uint32)
    assert slots.shape[0] < 2**32, shape
    units = empty((out * (PART // UNIT), steps, 2), np.uint32)
    problem = argument(
        _LISTS, rows=shape[0], columns=shape[1], across=ceil_div(shape[1], side), parts_across=across, steps=steps,
        scale=scale,
    )  # fmt: skip
    defines = {"SIDE": side, "TRANSPOSED": int(transposed)}
    launch("csb_lists", "csb_lists_kernel", across * down, 128, indptr, indices, values, slots, units, problem,
           defines=defines)  # fmt: skip
    return slots, units


def matmul(
    indptr: Any, indices: Any, values: Any, x: Any, y: Any, shape: Pair, side: int, transposed: bool,
    features_last: bool, bias: Any, relu: bool, tile: RowsTile | None = None,
) -> None:  # fmt: skip
    """Write the product to ``y``; x at any row pitch, nothing empty. ``tile``: None chooses."""
    device = current_device()
    count, length, pitch = rows(x)
    samples, depth = (count, length) if features_last else (length, count)
    features = shape[1] if transposed else shape[0]
    tile = tile or choose_tile(features, samples, indices.size / (shape[0] * shape[1]), features_last, device)
    scale = 4 if features_last else 128 * tile.vec
    slots, units = _lists(indptr, indices, values, shape, side, transposed, scale)
    down = ceil_div(features, tile.units * UNIT)
    tiles = down * ceil_div(samples, 32 * tile.vec)
    assert tiles < 2**31, (shape, samples)
    problem = argument(
        _PROBLEM, x_pitch=pitch, samples=samples, features=features, depth=depth, units=units.shape[0],
        steps=units.shape[1], tiles_down=down, tiles=tiles, relu=relu,
    )  # fmt: skip
    vec_x = min(4, vector_width(x)) if features_last else min(tile.vec, vector_width(x))
    vec_x = vec_x if vec_x == 4 or not features_last else 1
    wide = 4 if features_last else tile.vec
    defines = {
        "UNITS": tile.units, "VEC": tile.vec, "CAPACITY": tile.capacity, "STAGES": tile.stages,
        "FEATURES_LAST": int(features_last), "VEC_X": vec_x, "VEC_Y": wide if y.shape[1] % wide == 0 else 1,
    }  # fmt: skip
    bulk = not features_last and vec_x == 4
    threads = 32 * tile.units + (32 if bulk else FETCHERS)
    shared = tile.stages * stage_bytes(tile.units, tile.vec, tile.capacity, features_last) + 32
    grid = min(tiles, device.multiprocessors)
    launch("csb_rows", "csb_rows_kernel", grid, threads, slots, units, x, bias, y, problem, defines=defines,
           shared=round_up(shared, 16))  # fmt: skip
