"""Padding and cropping of the two spatial axes; the kernel is in pad2d.cu."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minidl.cuda.array import as_rows, empty
from minidl.cuda.grid import ints, row_grid
from minidl.cuda.launch import launch
from minidl.cuda.rows import dtype_code, rows, vector_width
from minidl.shapes import ceil_div

STRIP = 4  # rows per thread, as in pad2d.cu


def pad2d(x: Any, padding: tuple[int, int, int, int], value: float = 0.0) -> Any:
    """As `minidl.cpu.pad2d.pad2d`."""
    x = as_rows(x)
    left, right, top, bottom = padding
    n, height, width, channels = x.shape
    y = empty((n, height + top + bottom, width + left + right, channels), x.dtype)
    wide_x, wide_y = x, y
    if x.flags.c_contiguous and x.size and y.size:
        # Neighbouring pixels that stay together move as one with more channels: images of 3 channels get whole vectors.
        run = math.gcd(width, left, right)
        wide_x = x.reshape(n, height, width // run, channels * run)
        wide_y = y.reshape(n, y.shape[1], y.shape[2] // run, channels * run)
        width, left, channels = width // run, left // run, channels * run
    _, out_h, out_w, _ = wide_y.shape
    vec = vector_width(wide_x, wide_y)
    strips = ceil_div(out_h, STRIP)
    grid, block = row_grid(n * strips, out_w * (channels // vec))
    launch(
        "pad2d", "pad2d", grid, block, x, y, *ints(n * strips, strips, height, width, channels),
        np.int64(rows(wide_x)[2]), *ints(out_h, out_w, top, left), np.float32(value),
        defines={"DTYPE": dtype_code(x, "pad2d"), "VEC": vec},
    )  # fmt: skip
    return y
