"""Channels padded to whole vectors: what makes convolutions of images with one to three channels fast; see widen.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from minidl.cuda.array import as_rows, empty
from minidl.cuda.launch import launch
from minidl.cuda.rows import ACCESS, dtype_code, rows
from minidl.shapes import ceil_div, round_up

BLOCK = 256
LEAST = 4  # channels: 8 bytes of a 16-bit type, enough for an asynchronous copy


def wide_channels(channels: int, itemsize: int) -> int:
    """The channels that arrays of ``channels`` should have: the same where vectors of four fit already."""
    if channels % LEAST == 0:
        return channels
    return LEAST if channels < LEAST else round_up(channels, ACCESS // itemsize)


def widen(x: Any, channels: int) -> Any:
    """A dense copy of x (..., C) with ``channels`` >= C channels, zeros behind the first C."""
    x = as_rows(x)
    count, few, pitch = rows(x)
    y = empty((*x.shape[:-1], channels), x.dtype)
    vec = min(channels & -channels, ACCESS // x.itemsize)
    sizes = np.int64(count), np.int32(few), np.int32(channels), np.int64(pitch)
    defines = {"DTYPE": dtype_code(x, "conv2d"), "VEC": vec}
    grid = ceil_div(count * (channels // vec), BLOCK)
    launch("widen", "widen_kernel", grid, BLOCK, x, y, *sizes, defines=defines)
    return y


def narrow(x: Any, out: Any, accumulate: bool, groups: int = 1) -> None:
    """``out`` (K, R, S, C) (+)= the first channels of x (K, R, S, W); of several groups as many as W has room for were
    taken together, and each one's filters get its own channels. Both dense, float32.
    """
    few, wide = out.shape[-1], x.shape[-1]
    count, bundle = out.size // few, wide // few if groups > 1 else 1
    sizes = np.int64(count), np.int32(few), np.int32(wide), np.int64(count // groups), np.int32(bundle)
    grid, defines = ceil_div(out.size, BLOCK), {"DTYPE": 0, "VEC": 1}
    launch("widen", "narrow_kernel", grid, BLOCK, x, out, *sizes, np.int32(accumulate), defines=defines)
