"""`minidl.cuda.sparse.csb_skinny` on sm_90: csb_skinny_hopper.cu."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from minidl.cuda.array import empty
from minidl.cuda.convolution.conv2d_hopper import aligned
from minidl.cuda.convolution.conv2d_plan import argument, struct
from minidl.cuda.hopper import TensorMaps, View, Views
from minidl.cuda.launch import launch
from minidl.cuda.rows import DTYPE, address, rows
from minidl.precision import float32
from minidl.shapes import Pair, ceil_div, round_up

SIDE, FEATURES = 64, 256  # of a block of A, output features of a unit
STAGES = 4
THREADS = 128 + 32 * 4 * STAGES
SHARED = STAGES * (5 * SIDE * 128 + 16)  # bytes: of each stage four tiles, x and barriers
MOST_BLOCKS = 132  # thread blocks; a constant, so that sums are cut alike on every device
LEAST_UNITS = 2  # of a thread block
_PROBLEM = struct("", "samples features rows steps units across box relu")


def blocks_of(features: int, depth: int) -> int:
    """Thread blocks among which the units are shared: all that there are, or a few less if each then sums for one group
    of output features only.
    """
    groups, steps = ceil_div(features, FEATURES), ceil_div(depth, SIDE)
    most = max(1, min(MOST_BLOCKS, groups * steps // LEAST_UNITS))
    even = most // groups * groups
    return even if even > 0.93 * most else most


@functools.lru_cache(maxsize=64)
def _views(code: int, depth: int, samples: int, pitch: int) -> Views:
    box = SIDE, round_up(samples, 8)
    views = Views((View(code, (depth, samples), (2 * pitch,), box), 0))
    assert views.legal, (depth, samples, pitch)
    return views


def matmul(
    indptr: Any, indices: Any, values: Any, x: Any, y: Any, shape: Pair, transposed: bool, bias: Any, relu: bool,
    blocks: int | None = None,
) -> None:  # fmt: skip
    """Write the product to ``y`` (samples, features); x (samples, depth) at any row pitch, nothing empty."""
    x = aligned(x)
    samples, depth, pitch = rows(x)
    features, code = y.shape[1], DTYPE[y.dtype]
    blocks = blocks or blocks_of(features, depth)
    # Elements are read four at a time: the array's last word may reach behind its end, never out of its allocation.
    assert address(values) % 8 == address(indices) % 8 == 0, "values and indices start at a multiple of 8 bytes"
    groups, steps = ceil_div(features, FEATURES), ceil_div(depth, SIDE)
    problem = argument(
        _PROBLEM, samples=samples, features=features, rows=ceil_div(features, SIDE), steps=steps, units=groups * steps,
        across=ceil_div(shape[1], SIDE), box=round_up(samples, 8) * 128, relu=relu,
    )  # fmt: skip
    defines = {"DTYPE": code, "TRANSPOSED": int(transposed)}
    partials = empty((blocks + groups, samples, FEATURES), float32)
    arrays = indptr, indices, values, TensorMaps(_views(code, depth, samples, pitch), (x,)), partials
    launch("csb_skinny_hopper", "csb_skinny_hopper_kernel", blocks, THREADS, *arrays, problem, defines=defines,
           shared=SHARED)  # fmt: skip
    grid = ceil_div(samples * ceil_div(features, 4), 256)
    arrays = partials, bias, y, np.int32(blocks), problem
    launch("csb_skinny_hopper", "csb_skinny_hopper_fold_kernel", grid, 256, *arrays, defines=defines)
