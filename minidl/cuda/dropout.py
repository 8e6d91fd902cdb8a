"""Dropout with counter-based random numbers; the kernel is in dropout.cu, the generator in philox.cuh."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minidl.cuda.array import as_rows, empty, zeros
from minidl.cuda.grid import row_grid
from minidl.cuda.launch import launch
from minidl.cuda.rows import dtype_code, rows, vector_width
from minidl.shapes import ceil_div

SPANS = 3  # per thread


def dropout(x: Any, p: float, key: Any, stream: int, *, whole: bool = False) -> Any:
    """As `minidl.cpu.dropout.dropout`."""
    x = as_rows(x)
    threshold = math.ceil(p * 2.0**32)
    if threshold >= 2**32:  # no word is that large: nothing is kept
        return zeros(x.shape, x.dtype)
    assert key.dtype == np.uint32 and key.shape == (4,), (key.dtype, key.shape)
    y = empty(x.shape, x.dtype)
    n, size = x.shape[0], math.prod(x.shape[1:])
    _, channels, pitch = rows(x)
    pixels = size // channels if channels else 0
    if x.flags.c_contiguous:
        vec, pitched, sample_pitch = vector_width(x.reshape(n, size), y.reshape(n, size)), 0, size
    else:
        vec, pitched, sample_pitch = vector_width(x, y), int(pixels > 1), pixels * pitch
    assert not pitched or size <= 2**32, "a pitched sample is numbered in 32 bits"
    spans = ceil_div(size, max(vec, 4))
    grid, block = row_grid(n, spans, SPANS)
    defines = {"DTYPE": dtype_code(x, "dropout"), "VEC": vec, "PITCHED": pitched, "SPANS": SPANS, "WHOLE": int(whole)}
    launch(
        "dropout", "dropout", grid, block, x, y, key, np.int32(n), np.int64(size), np.int32(spans),
        np.int64(sample_pitch), np.uint32(channels), np.int64(pitch), np.uint32(stream), np.uint32(threshold),
        np.float32(1.0 / (1.0 - p)), defines=defines,
    )  # fmt: skip
    return y
