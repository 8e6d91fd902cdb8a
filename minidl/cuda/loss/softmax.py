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

BLOCK = 256
IN_FLIGHT = 4  # vectors of 16 bytes that a thread loads before it uses the first
ROWS_IN_FLIGHT = 2  # of which it holds parts, at most
FULL = 4  # blocks that a multiprocessor holds: rows are shared out to these before a thread takes several


def row_lanes(channels: int, itemsize: int, most: int = IN_FLIGHT) -> int:
    """Threads that share a row (see row.cuh), where possible with at most ``most`` runs each: by the sizes alone."""
    runs = max(1, ceil_div(channels, ACCESS // itemsize))
    lanes = min(runs, max(32, ceil_div(runs, most)))
    return min(BLOCK, 1 << (lanes - 1).bit_length())


def row_variant(who: str, *arrays: Any, most: int = IN_FLIGHT) -> tuple[dict[str, int | str], int]:
    """Macros and grid of the kernel variant for the rows of ``arrays``, all of one shape and type."""
    count, channels, _ = rows(arrays[0])
    lanes = row_lanes(channels, arrays[0].itemsize, most)
    vec = min(vector_width(*arrays), ACCESS // arrays[0].itemsize)
    return {"DTYPE": dtype_code(arrays[0], who), "VEC": vec, "LANES": lanes}, ceil_div(count, BLOCK // lanes)


def held_variant(
    who: str, arrays: tuple[Any, ...], read: int, shared: int | None = None, in_flight: int = ROWS_IN_FLIGHT
) -> tuple[dict[str, int | str], int]:
    """`row_variant` for kernels whose threads hold their part of PER rows, of ``read`` arrays, in registers.

    Longer rows are read once for each step of the formula. Where there are few, rows are taken one at a time:
    neither changes a bit.

    Args:
        in_flight: rows of which a thread holds parts, at most.
        shared: runs that a thread takes before more than a warp shares a row; default: as many as it holds.
    """
    count, channels, _ = rows(arrays[0])
    most, width = IN_FLIGHT // read, ACCESS // arrays[0].itemsize
    defines, grid = row_variant(who, *arrays, most=shared or most)
    lanes = int(defines["LANES"])
    runs = ceil_div(channels, lanes * width)
    held = runs if runs <= (most if defines["VEC"] == width else 1) else 0  # narrow loads fill more registers
    per = min(most // held, in_flight) if held and defines["VEC"] == width else 1
    if grid < per * current_device().multiprocessors * FULL:
        per = 1
    defines |= {"HELD": held, "PER": per, "WHOLE": int(channels == held * lanes * width)}
    return defines, ceil_div(count, BLOCK // lanes * per)


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
