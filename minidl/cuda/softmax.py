"""Softmax over channels on the GPU; kernels in softmax.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from minidl import checks
from minidl.cuda.array import as_rows, empty
from minidl.cuda.device import current_device
from minidl.cuda.launch import launch
from minidl.cuda.rows import ACCESS, dtype_code, rows, vector_width
from minidl.shapes import ceil_div

__all__ = ["BLOCK", "held_variant", "row_lanes", "row_variant", "softmax", "softmax_backward"]

BLOCK = 256
BLOCK_CHANNELS = 8192  # shortest row that gets a whole block
IN_FLIGHT = 4  # vectors of 16 bytes that a thread loads before it uses the first
FULL = 4  # blocks that a multiprocessor holds: rows are shared out to these before a thread takes several


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


def held_variant(who: str, arrays: tuple[Any, ...], read: int) -> tuple[dict[str, int | str], int]:
    """`row_variant` for kernels whose threads hold their part of PER rows, of ``read`` arrays, in registers.

    Longer rows are read once for each step of the formula. Where there are few, rows are taken one at a time:
    neither changes a bit.
    """
    count, channels, _ = rows(arrays[0])
    defines, grid = row_variant(who, *arrays)
    runs = ceil_div(channels, int(defines["LANES"]) * ACCESS // arrays[0].itemsize)
    most = IN_FLIGHT // read if int(defines["VEC"]) * arrays[0].itemsize == ACCESS else 1  # narrow loads fill registers
    held = runs if runs <= most else 0
    per = most // held if held else 1
    if grid < per * current_device().multiprocessors * FULL:
        per = 1
    return defines | {"HELD": held, "PER": per}, ceil_div(count, BLOCK // int(defines["LANES"]) * per)


def softmax(x: Any) -> Any:
    """``exp(x) / sum of exp(x)`` along the last axis of ``x`` (..., C)."""
    x = as_rows(x)
    y = empty(x.shape, x.dtype)
    if x.size:
        defines, grid = held_variant("softmax", (x, y), 1)
        count, channels, pitch = rows(x)
        sizes = np.int64(count), np.int32(channels), np.int64(pitch)
        defines |= {"FORWARD": 1}
        launch("softmax", "softmax_kernel", grid, BLOCK, x, y, *sizes, defines=defines)
    return y


def softmax_backward(dy: Any, y: Any) -> Any:
    """``y * (dy - sum of dy * y)`` along the last axis, from the output ``y``."""
    assert dy.shape == y.shape and dy.dtype == y.dtype, (checks.describe(dy), checks.describe(y))
    dy, y = as_rows(dy), as_rows(y)
    dx = empty(y.shape, y.dtype)
    if y.size:
        defines, grid = held_variant("softmax_backward", (dy, y, dx), 2)
        count, channels, pitch = rows(dy)
        sizes = np.int64(count), np.int32(channels), np.int64(pitch), np.int64(rows(y)[2])
        launch("softmax", "softmax_backward_kernel", grid, BLOCK, dy, y, dx, *sizes, defines=defines)
    return dx
