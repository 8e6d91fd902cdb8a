"""The float32 product with a matrix in Compressed Sparse Blocks by three TF32 or bfloat16 products, on tensor cores of
sm_90: csb_spread.cu expands the matrix, csb_tensor.cu multiplies.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minidl.cuda.array import empty
from minidl.cuda.convolution.conv2d_plan import argument, struct
from minidl.cuda.device import HOPPER, DeviceRecord, current_device
from minidl.cuda.launch import launch
from minidl.cuda.rows import rows, vector_width
from minidl.cuda.sparse.csb_rows import LEAST_SIDE
from minidl.precision import float32
from minidl.shapes import Pair, ceil_div, round_up

SPLITS = {"tf32x3": 0, "bf16x3": 1}  # the macro DTYPE
PART, ROWS, SAMPLES, DEPTH = 64, 128, 256, 32
TILE_BYTES = 2 * ROWS * DEPTH * 4, ROWS * DEPTH * 4  # of heads and rests: TF32, bf16
STAGES = 3, 4

_SPREAD = struct("", "rows columns across parts_across steps")
_PROBLEM = struct("x_pitch samples", "features depth steps tiles_down tiles relu")


def applies(side: int, dtype: Any, device: DeviceRecord) -> bool:
    """Whether these kernels can do a product."""
    return side >= LEAST_SIDE and dtype == float32 and device.arch == HOPPER


def spread(indptr: Any, indices: Any, values: Any, shape: Pair, side: int, transposed: bool, split: str) -> Any:
    """The dense tiles; ``split``: one of `SPLITS`."""
    code = SPLITS[split]
    features, depth = shape[::-1] if transposed else shape
    parts = round_up(ceil_div(features, PART), ROWS // PART), ceil_div(depth, PART)
    steps = 2 * parts[1]
    down, across = parts[::-1] if transposed else parts
    tiles = empty((parts[0] // 2, steps, TILE_BYTES[code] // 4), np.uint32)
    problem = argument(
        _SPREAD, rows=shape[0], columns=shape[1], across=ceil_div(shape[1], side), parts_across=across, steps=steps
    )
    defines = {"SIDE": side, "TRANSPOSED": int(transposed), "DTYPE": code}
    launch("csb_spread", "csb_spread_kernel", down * across, 256, indptr, indices, values, tiles, problem,
           defines=defines)  # fmt: skip
    return tiles


def matmul(
    indptr: Any, indices: Any, values: Any, x: Any, y: Any, shape: Pair, side: int, transposed: bool,
    features_last: bool, bias: Any, relu: bool, split: str,
) -> None:  # fmt: skip
    """Write the product to ``y``; x at any row pitch, nothing empty. ``split``: one of `SPLITS`."""
    code = SPLITS[split]
    count, length, pitch = rows(x)
    samples, depth = (count, length) if features_last else (length, count)
    tiles = spread(indptr, indices, values, shape, side, transposed, split)
    number = tiles.shape[0] * ceil_div(samples, SAMPLES)
    problem = argument(
        _PROBLEM, x_pitch=pitch, samples=samples, features=shape[1] if transposed else shape[0], depth=depth,
        steps=tiles.shape[1], tiles_down=tiles.shape[0], tiles=number, relu=relu,
    )  # fmt: skip
    wide = (2 if features_last else 4) if y.shape[1] % (2 if features_last else 4) == 0 else 1
    defines = {"DTYPE": code, "STAGES": STAGES[code], "FEATURES_LAST": int(features_last)}
    defines |= {"VEC_X": min(4, vector_width(x)), "VEC_Y": wide}
    grid = min(number, current_device().multiprocessors)
    launch("csb_tensor", "csb_tensor_kernel", grid, 384, tiles, x, bias, y, problem, defines=defines,
           shared=STAGES[code] * (TILE_BYTES[code] + SAMPLES * DEPTH * 4 + 16))  # fmt: skip
