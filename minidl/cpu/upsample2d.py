"""Resizing of images, nearest and bilinear."""

from __future__ import annotations

import numpy as np

from minidl.cpu import _upsample2d
from minidl.cpu.array import Array, empty, rows_float32, stored
from minidl.precision import float32
from minidl.shapes import Pair, resize_axis


def upsample2d(x: Array, size: Pair, mode: str, align_corners: bool = False) -> Array:
    """``x`` (N, H, W, C) resized to ``size`` (height, width).

    Args:
        mode: "nearest": output o reads input floor(o * in / out); or "bilinear".
        align_corners: of "bilinear": the centres of the corner pixels stay, instead of the image's edges.
    """
    n, _, _, channels = x.shape
    y = empty((n, *size, channels), float32)
    if y.size:
        _upsample2d.resize(rows_float32(x), *_axes(x.shape[1:3], size, mode, align_corners), y)
    return stored(y, y.shape, x.dtype)


def upsample2d_backward(dy: Array, shape: tuple[int, int, int, int], mode: str, align_corners: bool = False) -> Array:
    """The gradient of the input of ``shape`` (N, H, W, C)."""
    dx = empty(shape, float32)
    if dx.size:
        _upsample2d.resize_backward(rows_float32(dy), *_axes(shape[1:3], dy.shape[1:3], mode, align_corners), dx)
    return stored(dx, shape, dy.dtype)


def _axes(sizes: Pair, out: Pair, mode: str, align_corners: bool) -> tuple[Array, Array]:
    rows, columns = (
        np.array(resize_axis(i, o, mode, align_corners), np.int64) for i, o in zip(sizes, out, strict=True)
    )
    return rows, columns
