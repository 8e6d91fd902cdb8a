"""Softmax over channels on the GPU; kernels in softmax.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from minidl import checks
from minidl.cuda.array import as_rows, empty
from minidl.cuda.launch import launch
from minidl.cuda.rows import ACCESS, dtype_code, rows, vector_width
from minidl.shapes import ceil_div

__all__ = ["BLOCK", "held", "row_lanes", "row_variant", "softmax", "softmax_backward"]

BLOCK = 256
BLOCK_CHANNELS = 8192  # shortest row that gets a whole block


def row_lanes(channels: int, itemsize: int) -> int:
    """Threads that share a row (see row.cuh): a function of the sizes alone."""
    if channels >= BLOCK_CHANNELS:
        return BLOCK
    runs = ceil_div(channels, ACCESS // itemsize)
    return min(32, 1 << max(runs - 1, 0).bit_length())


def row_variant(who: str, *arrays: Any) -> tuple[dict[str, int | str], int]:
    """Macros and grid of the kernel variant for the rows of ``arrays``, all of one shape and type."""
    count, channels, _ = rows(arrays[0])
    lanes = row_lanes(channels, arrays[0].itemsize)
    vec = min(vector_width(*arrays), ACCESS // arrays[0].itemsize)
    return {"DTYPE": dtype_code(arrays[0], who), "VEC": vec, "LANES": lanes}, ceil_div(count, BLOCK // lanes)


def held(channels: int, itemsize: int) -> int:
    """The macro ONCE: whether no thread has more than one run of a row of so many channels."""
    return int(channels <= row_lanes(channels, itemsize) * (ACCESS // itemsize))


def softmax(x: Any) -> Any:
    """``exp(x) / sum of exp(x)`` along the last axis of ``x`` (..., C)."""
    x = as_rows(x)
    y = empty(x.shape, x.dtype)
    if x.size:
        defines, grid = row_variant("softmax", x, y)
        count, channels, pitch = rows(x)
        sizes = np.int64(count), np.int32(channels), np.int64(pitch)
        defines |= {"FORWARD": 1, "ONCE": held(channels, x.itemsize)}
        launch("softmax", "softmax_kernel", grid, BLOCK, x, y, *sizes, defines=defines)
    return y


def softmax_backward(dy: Any, y: Any) -> Any:
    """``y * (dy - sum of dy * y)`` along the last axis, from the output ``y``."""
    assert dy.shape == y.shape and dy.dtype == y.dtype, (checks.describe(dy), checks.describe(y))
    dy, y = as_rows(dy), as_rows(y)
    dx = empty(y.shape, y.dtype)
    if y.size:
        defines, grid = row_variant("softmax_backward", dy, y, dx)
        count, channels, pitch = rows(dy)
        sizes = np.int64(count), np.int32(channels), np.int64(pitch), np.int64(rows(y)[2])
        launch("softmax", "softmax_backward_kernel", grid, BLOCK, dy, y, dx, *sizes, defines=defines)
    return dx
