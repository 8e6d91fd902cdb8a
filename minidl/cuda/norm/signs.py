"""Signs of a ReLU's output, a bit for each value: what its backward pass needs of it. Layout in signs.cuh."""

from __future__ import annotations

from typing import Any

import numpy as np

from minidl import checks
from minidl.cuda.array import as_rows, empty
from minidl.cuda.launch import launch
from minidl.cuda.rows import dtype_code, rows, walk_channels
from minidl.shapes import ceil_div, round_up

CHUNK = 16  # bytes that the copy engine moves at least


def signs_pitch(channels: int) -> int:
    """Bytes from row to row: a multiple of 16, so that the copy engine can read them."""
    return round_up(ceil_div(channels, 8), CHUNK)


def signs_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the signs of an array of this shape."""
    return *shape[:-1], signs_pitch(shape[-1])


def are_signs(y: Any) -> bool:
    """Whether an array is the signs of an output, not the output."""
    return y.dtype == np.uint8


def check_signs(signs: Any, of: Any) -> None:
    """That these are signs of an array like ``of``: kernels read them through a bare pointer."""
    if not are_signs(signs) or signs.shape != signs_shape(of.shape) or not signs.flags.c_contiguous:
        raise checks.bad_shape("relu", "signs", f"dense uint8 {signs_shape(of.shape)}", checks.describe(signs))


def mask_by_signs(dy: Any, signs: Any, add: Any = None) -> Any:
    """``dy`` where the output was positive, else 0, plus ``add`` (of one shape and dtype)."""
    check_signs(signs, dy)
    code, dy = dtype_code(dy, "relu", "dy"), as_rows(dy)
    dx = empty(dy.shape, dy.dtype)
    add = None if add is None else as_rows(add)
    arrays = (dy, dx) if add is None else (dy, dx, add)
    plan = walk_channels(*arrays, unroll=2)
    defines = {"DTYPE": code, "VEC": plan.vec, "UNROLL": plan.unroll, "ADD": int(add is not None)}
    launch(
        "mask_by_signs", "mask_by_signs_kernel", plan.grid, plan.block, dy, signs, add, dx, np.int32(rows(dy)[1]),
        plan.argument, defines=defines,
    )  # fmt: skip
    return dx
