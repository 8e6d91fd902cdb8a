"""The float32 product with a matrix in Compressed Sparse Blocks by three TF32 products of what is not empty, on tensor
cores of sm_90: csb_tiles.cu gathers, csb_gathered.cu multiplies.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minidl.cuda.array import empty
from minidl.cuda.convolution.conv2d_plan import argument, struct
from minidl.cuda.device import DeviceRecord, current_device
from minidl.cuda.launch import launch
from minidl.cuda.rows import rows, vector_width
from minidl.cuda.sparse import csb_rows
from minidl.cuda.sparse.csb_order import RANGE, UNIT
from minidl.shapes import Pair, ceil_div

PART, EIGHT = 128, 8  # summed features of a stage; of a tile, which has as many output features
TILE_BYTES = EIGHT * (EIGHT * 4 + 1)  # with the numbers of its summed features
CAPACITIES = (16384, 24576, 32768, 40960, 49152)  # bytes of tiles in a stage: few, as each is a variant
TAILS = 1
SLACK = 1.15  # room for more tiles than the mean

_TILES = struct("", "rows columns across features steps")
_PROBLEM = struct("x_pitch samples", "features depth steps tiles_down tiles relu")

applies = csb_rows.applies


def tiles(
    indptr: Any, indices: Any, values: Any, order: Any, shape: Pair, side: int, transposed: bool, wide: int
) -> tuple[Any, Any]:
    """(tiles, fours) of csb_tiles.cu; ``wide``: output features of a thread block."""
    features, depth = shape[::-1] if transposed else shape
    out, steps = ceil_div(features, wide), ceil_div(depth, PART)
    assert order is None or order.size >= out * wide, (order.shape, shape)
    units = out * wide // EIGHT
    made = empty((units, steps, PART // EIGHT * TILE_BYTES), np.uint8)
    fours = empty((units, steps), np.int32)
    problem = argument(
        _TILES, rows=shape[0], columns=shape[1], across=ceil_div(shape[1], side), features=features, steps=steps
    )
    defines = {"SIDE": side, "TRANSPOSED": int(transposed), "OUT": wide, "TAILS": TAILS}
    arrays = indptr, indices, values, order, made, fours
    launch("csb_tiles", "csb_tiles_kernel", out * steps, RANGE, *arrays, problem, defines=defines)
    return made, fours


def tile_of(features: int, depth: int, samples: int, density: float, device: DeviceRecord) -> tuple[int, int]:
    """(warps of 16 output features, 32s of samples) of a thread block: those of csb_rows.cu; it does not change bits."""
    return csb_rows.choose_tile(features, depth, samples, density, True, device)[:2]


def _ring(units: int, vec: int, density: float, device: DeviceRecord) -> tuple[int, int]:
    """(bytes of tiles in a stage, stages)."""
    eights = PART / EIGHT * (1 - (1 - density) ** EIGHT) + 0.5  # of a unit; rows and columns of one scale have most
    fixed = 128 * PART * vec + 8 * (units + 2) + 16
    room = device.shared_per_block - 1024
    fitting = [c for c in CAPACITIES if 2 * (fixed + c) <= room]
    wanted = SLACK * 2 * units * eights * TILE_BYTES
    capacity = next((c for c in fitting if c >= wanted), fitting[-1])
    return capacity, min(4, room // (fixed + capacity))


def matmul(
    indptr: Any, indices: Any, values: Any, x: Any, y: Any, shape: Pair, side: int, transposed: bool,
    features_last: bool, bias: Any, relu: bool, order: Any = None,
) -> None:  # fmt: skip
    """Write the product to ``y``; x at any row pitch, nothing empty. ``order``: as `csb_matmul`."""
    count, length, _ = rows(x)
    features, depth = shape[::-1] if transposed else shape
    samples, density = count if features_last else length, indices.size / (features * depth)
    units, vec = tile_of(features, depth, samples, density, current_device())
    made = tiles(indptr, indices, values, order, shape, side, transposed, units * UNIT)
    multiply(*made, order, x, y, features_last, bias, relu, units, vec, density)


def multiply(
    made: Any, fours: Any, order: Any, x: Any, y: Any, features_last: bool, bias: Any, relu: bool, units: int,
    vec: int, density: float,
) -> None:  # fmt: skip
    """The product of `tiles` made for so many warps of 16 output features; ``vec``: 32 samples of a thread block."""
    count, length, pitch = rows(x)
    samples, depth = (count, length) if features_last else (length, count)
    features, device = y.shape[1 if features_last else 0], current_device()
    down = ceil_div(features, units * UNIT)
    number = down * ceil_div(samples, 32 * vec)
    assert number < 2**31, y.shape
    problem = argument(
        _PROBLEM, x_pitch=pitch, samples=samples, features=features, depth=depth, steps=fours.shape[1],
        tiles_down=down, tiles=number, relu=relu,
    )  # fmt: skip
    capacity, stages = _ring(units, vec, density, device)
    wide = 2 if features_last else 4
    defines = {
        "UNITS": units,
        "VEC": vec,
        "STAGES": stages,
        "CAPACITY": capacity,
        "FEATURES_LAST": int(features_last),
        "TAILS": TAILS,
    }
    defines |= {"VEC_X": min(4, vector_width(x)), "VEC_Y": wide if y.shape[1] % wide == 0 else 1}
    shared = stages * (128 * PART * vec + capacity + 8 * (units + 2) + 16)
    grid = min(number, device.multiprocessors)
    arrays = made, fours, order, x, bias, y
    threads = 32 * units + csb_rows.FETCHERS
    launch("csb_gathered", "csb_gathered_kernel", grid, threads, *arrays, problem, defines=defines, shared=shared)
