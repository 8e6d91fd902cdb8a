"""Pooling over windows and over adaptive bins (NHWC); the kernels are in pool2d.cu.

Shapes: x, dx (N, H, W, C), dense or pitched where read; y, dy (N, P, Q, C). Sums are float32 in a fixed order, rounded
once.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minidl.cuda.array import as_rows, empty
from minidl.cuda.grid import BLOCK, ints, row_grid, strip_length
from minidl.cuda.launch import launch
from minidl.cuda.rows import dtype_code, rows, vector_width
from minidl.shapes import Pair, ceil_div, pair, pool_output_size

__all__ = [
    "adaptive_avg_pool2d",
    "adaptive_avg_pool2d_backward",
    "avg_pool2d",
    "avg_pool2d_backward",
    "max_pool2d",
    "max_pool2d_backward",
]

ACCUMULATORS = 32  # float registers that a gathering thread may spend on its pixels
FULL_DEVICE = 2**18  # threads that keep any current GPU busy; a constant, so that sums are cut alike on all of them
PIXELS_PER_THREAD = 4


def _defines(x: Any, who: str, vec: int, kernel: Pair, stride: Pair, dilation: Pair) -> dict[str, int]:
    return {
        "DTYPE": dtype_code(x, who),
        "VEC": vec,
        "KERNEL_H": kernel[0],
        "KERNEL_W": kernel[1],
        "STRIDE_H": stride[0],
        "STRIDE_W": stride[1],
        "DILATION_H": dilation[0],
        "DILATION_W": dilation[1],
    }


def _out_shape(
    shape: tuple[int, ...], kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, ceil_mode: bool
) -> tuple[int, int, int, int]:
    n, height, width, channels = shape
    p = pool_output_size(height, kernel[0], stride[0], padding[0], dilation[0], ceil_mode)
    q = pool_output_size(width, kernel[1], stride[1], padding[1], dilation[1], ceil_mode)
    return n, p, q, channels


def _gather_width(dy: Any, dx: Any, stride: Pair) -> int:
    """Channels per thread of a gathering kernel, whose threads keep a float for each channel of stride[1] pixels."""
    vec = vector_width(dy, dx)
    while vec > 1 and vec * stride[1] > ACCUMULATORS:
        vec //= 2
    return vec


def max_pool2d(
    x: Any, *, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, ceil_mode: bool
) -> tuple[Any, Any]:
    """Maximum over each window and where it is: the first of equal ones; a NaN wins, of several the last.

    Returns:
        y (N, P, Q, C) in the dtype of x; index (N, P, Q, C), the position r * S + s in the window: uint8, or uint16
        when R * S > 256.
    """
    x = as_rows(x)
    n, height, width, channels = x.shape
    shape = _out_shape(x.shape, kernel, stride, padding, dilation, ceil_mode)
    _, out_h, out_w, _ = shape
    assert math.prod(kernel) <= 2**16, kernel
    y = empty(shape, x.dtype)
    index = empty(shape, np.uint8 if math.prod(kernel) <= 256 else np.uint16)
    vec = vector_width(x, y)
    items = out_w * (channels // vec)
    strip = strip_length(n * out_h * items, out_h)
    strips = ceil_div(out_h, strip)
    grid, block = row_grid(n * strips, items)
    defines = _defines(x, "max_pool2d", vec, kernel, stride, dilation) | {"INDEX_BITS": 8 * index.itemsize}
    launch(
        "pool2d", "max_pool2d", grid, block, x, y, index, *ints(n * strips, strips, strip, height, width, channels),
        np.int64(rows(x)[2]), *ints(out_h, out_w, *padding), defines=defines,
    )  # fmt: skip
    return y, index


def max_pool2d_backward(
    dy: Any, index: Any, x_shape: tuple[int, ...], *, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> Any:
    """dx (N, H, W, C): each pixel gathers the gradients of the windows whose maximum it was."""
    dy = as_rows(dy)
    n, height, width, channels = x_shape
    _, out_h, out_w, _ = dy.shape
    assert index.shape == dy.shape and index.flags.c_contiguous, (index.shape, dy.shape)
    assert index.dtype == (np.uint8 if math.prod(kernel) <= 256 else np.uint16), index.dtype
    dx = empty(x_shape, dy.dtype)
    vec = min(_gather_width(dy, dx, stride), vector_width(index))
    grid, block = row_grid(n * height, ceil_div(width + padding[1], stride[1]) * (channels // vec))
    defines = _defines(dy, "max_pool2d_backward", vec, kernel, stride, dilation) | {"INDEX_BITS": 8 * index.itemsize}
    launch(
        "pool2d", "max_pool2d_backward", grid, block, dy, index, dx, *ints(n * height, height, width, channels),
        np.int64(rows(dy)[2]), *ints(out_h, out_w, *padding), defines=defines,
    )  # fmt: skip
    return dx


def avg_pool2d(x: Any, *, kernel: Pair, stride: Pair, padding: Pair, ceil_mode: bool, count_include_pad: bool) -> Any:
    """Mean over each window, (N, P, Q, C).

    The divisor is the number of the window's pixels inside the image or, with ``count_include_pad``, inside the padded
    image: a window that ``ceil_mode`` lets stick out of that is clipped.
    """
    x = as_rows(x)
    n, height, width, channels = x.shape
    shape = _out_shape(x.shape, kernel, stride, padding, (1, 1), ceil_mode)
    _, out_h, out_w, _ = shape
    y = empty(shape, x.dtype)
    vec = vector_width(x, y)
    items = out_w * (channels // vec)
    strip = strip_length(n * out_h * items, out_h)
    strips = ceil_div(out_h, strip)
    grid, block = row_grid(n * strips, items)
    launch(
        "pool2d", "avg_pool2d", grid, block, x, y, *ints(n * strips, strips, strip, height, width, channels),
        np.int64(rows(x)[2]), *ints(out_h, out_w, *padding, count_include_pad),
        defines=_defines(x, "avg_pool2d", vec, kernel, stride, (1, 1)),
    )  # fmt: skip
    return y


def avg_pool2d_backward(
    dy: Any,
    x_shape: tuple[int, ...],
    *,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    ceil_mode: bool,
    count_include_pad: bool,
) -> Any:
    """dx (N, H, W, C): each pixel gathers its share of the windows that cover it."""
    dy = as_rows(dy)
    n, height, width, channels = x_shape
    assert dy.shape == _out_shape(x_shape, kernel, stride, padding, (1, 1), ceil_mode), (dy.shape, x_shape)
    _, out_h, out_w, _ = dy.shape
    dx = empty(x_shape, dy.dtype)
    vec = _gather_width(dy, dx, stride)
    grid, block = row_grid(n * height, ceil_div(width + padding[1], stride[1]) * (channels // vec))
    launch(
        "pool2d", "avg_pool2d_backward", grid, block, dy, dx, *ints(n * height, height, width, channels),
        np.int64(rows(dy)[2]), *ints(out_h, out_w, *padding, count_include_pad),
        defines=_defines(dy, "avg_pool2d_backward", vec, kernel, stride, (1, 1)),
    )  # fmt: skip
    return dx


def _adaptive_defines(x: Any, who: str, vec: int, size: Pair, output_size: Pair) -> dict[str, int]:
    return {
        "DTYPE": dtype_code(x, who),
        "VEC": vec,
        "IN_H": size[0],
        "IN_W": size[1],
        "OUT_H": output_size[0],
        "OUT_W": output_size[1],
    }


def _adaptive_split(items: int, pixels: int) -> tuple[int, int]:
    """(thread groups in a block, blocks) that share the pixels of a cell: powers of two, from the shape alone."""
    groups = splits = 1
    while groups < 32 and items * groups < FULL_DEVICE and pixels > PIXELS_PER_THREAD * groups:
        groups *= 2
    while items * groups * splits < FULL_DEVICE // 2 and pixels > 4 * PIXELS_PER_THREAD * groups * splits:
        splits *= 2
    return groups, splits


def adaptive_avg_pool2d(x: Any, output_size: Pair) -> Any:
    """Mean over adaptive bins, (N, P, Q, C): cell p averages rows floor(p*H/P) .. ceil((p+1)*H/P), columns likewise."""
    x = as_rows(x)
    n, height, width, channels = x.shape
    out_h, out_w = pair(output_size)
    y = empty((n, out_h, out_w, channels), x.dtype)
    vec = vector_width(x, y)
    items = y.size // vec
    groups, splits = _adaptive_split(items, ceil_div(height, out_h) * ceil_div(width, out_w))
    lanes = BLOCK // groups
    partial = empty((splits, y.size), np.float32) if splits > 1 else None
    defines = _adaptive_defines(x, "adaptive_avg_pool2d", vec, (height, width), (out_h, out_w))
    launch(
        "pool2d", "adaptive_avg_pool2d", (ceil_div(items, lanes), splits), (lanes, groups), x, y, partial,
        *ints(items, channels), np.int64(rows(x)[2]), defines=defines,
    )  # fmt: skip
    if splits > 1:
        args = (partial, y, *ints(items, channels, splits))
        launch("pool2d", "adaptive_avg_pool2d_merge", ceil_div(items, BLOCK), BLOCK, *args, defines=defines)
    return y


def adaptive_avg_pool2d_backward(dy: Any, x_shape: tuple[int, ...]) -> Any:
    """dx (N, H, W, C): each pixel gathers its share of the cells whose bins hold it."""
    dy = as_rows(dy)
    n, height, width, channels = x_shape
    _, out_h, out_w, _ = dy.shape
    dx = empty(x_shape, dy.dtype)
    vec = vector_width(dy, dx)
    items = width * (channels // vec)
    strip = strip_length(n * height * items, height, longest=8)
    strips = ceil_div(height, strip)
    grid, block = row_grid(n * strips, items)
    launch(
        "pool2d", "adaptive_avg_pool2d_backward", grid, block, dy, dx, *ints(n * strips, strips, strip, channels),
        np.int64(rows(dy)[2]),
        defines=_adaptive_defines(dy, "adaptive_avg_pool2d_backward", vec, (height, width), (out_h, out_w)),
    )  # fmt: skip
    return dx
