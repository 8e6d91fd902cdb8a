"""Resizing of images, nearest and bilinear, on the GPU; kernels in upsample2d.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from minidl.cuda.array import as_rows, empty
from minidl.cuda.grid import BLOCK, INT_MAX, ints, row_grid, strip_length
from minidl.cuda.launch import launch
from minidl.cuda.rows import ACCESS, dtype_code, rows, vector_width
from minidl.shapes import Pair, ceil_div, resize_axis

FIXED = 8  # largest divisor that is compiled in: resizing by whole numbers up to 4, and by simple fractions
MOST_HELD = 8  # outputs along a row that read one input, up to which all of them are on their way at once
AHEAD = 3  # and those of so many rows
LONGEST = 8  # rows of a strip: each row of the other array is read once for a strip, and twice where strips meet

_AXIS = np.dtype([(name, np.int32) for name in ("a", "b", "d", "size", "out")])


def _axis(size: int, out: int, mode: str, align_corners: bool) -> np.ndarray:
    axis = resize_axis(size, out, mode, align_corners)
    assert 2 * size * (out + 1) <= INT_MAX, (size, out)  # the kernels multiply in 32 bits
    return np.array([axis[:5]], _AXIS)


def _fixed(down: np.ndarray, across: np.ndarray) -> dict[str, int]:
    """The quotients as macros, where they are usual ones: each set is a variant to compile."""
    if max(int(axis["d"][0]) for axis in (down, across)) > FIXED:
        return {"FIXED": 0}
    named = {"DOWN": down, "ACROSS": across}
    return {"FIXED": 1} | {
        f"{name}_{part.upper()}": int(axis[part][0]) for name, axis in named.items() for part in ("a", "b", "d")
    }


def _readers(axis: np.ndarray, bilinear: int) -> int:
    """The most outputs that read one input."""
    a, d, out = (int(axis[part][0]) for part in ("a", "d", "out"))
    return min(out, ceil_div((1 + bilinear) * d, a)) if a else out


def _resize(name: str, x: Any, y: Any, axes: list[np.ndarray], longest: int, held: int = 0, **defines: int) -> None:
    """``longest``: rows of a thread's strip, at most; ``held``: its vectors in shared memory."""
    resident = BLOCK * defines.get("BLOCKS", 4)
    vec = min(vector_width(x, y), ACCESS // x.itemsize)
    n, height, width, channels = y.shape
    items = width * (channels // vec)
    strip = strip_length(n * height * items, height, longest, resident)
    strips = ceil_div(height, strip)
    strip = ceil_div(height, strips)  # alike, as far as they can be
    grid, block = row_grid(n * strips, items)
    sizes = *ints(n * strips, strips, strip, channels), np.int64(rows(x)[2])
    defines |= {"DTYPE": dtype_code(x, name), "VEC": vec, **_fixed(*axes)}
    shared = block[0] * block[1] * held * vec * x.itemsize
    launch("upsample2d", name, grid, block, x, y, *sizes, *axes, defines=defines, shared=shared)


def upsample2d(x: Any, size: Pair, mode: str, align_corners: bool = False) -> Any:
    """As `minidl.cpu.upsample2d.upsample2d`."""
    x = as_rows(x)
    y = empty((x.shape[0], *size, x.shape[3]), x.dtype)
    if y.size:
        axes = [_axis(i, o, mode, align_corners) for i, o in zip(x.shape[1:3], size, strict=True)]
        bilinear = int(mode == "bilinear")
        _resize("upsample2d", x, y, axes, LONGEST if bilinear else 2, FORWARD=1, BILINEAR=bilinear)
    return y


def upsample2d_backward(dy: Any, shape: tuple[int, int, int, int], mode: str, align_corners: bool = False) -> Any:
    """The gradient of the input of ``shape`` (N, H, W, C)."""
    dy = as_rows(dy)
    dx = empty(shape, dy.dtype)
    if dx.size:
        axes = [_axis(i, o, mode, align_corners) for i, o in zip(shape[1:3], dy.shape[1:3], strict=True)]
        bilinear = int(mode == "bilinear")
        readers = _readers(axes[1], bilinear)
        held = readers if readers <= MOST_HELD else 1
        blocks = 4 if readers <= 2 else 3 if readers <= 4 else 2  # of a multiprocessor, as its registers have room
        defines = {"BILINEAR": bilinear, "READERS": readers, "HELD": held, "AHEAD": AHEAD, "BLOCKS": blocks}
        _resize("upsample2d_backward", dy, dx, axes, LONGEST, held * AHEAD, **defines)
    return dx
