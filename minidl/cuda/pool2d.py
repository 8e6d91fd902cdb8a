"""Pooling over windows and over adaptive bins (NHWC); the kernels are in pool2d.cu and adaptive_pool2d.cu.

Shapes: x, dx (N, H, W, C), dense or pitched where read; y, dy (N, P, Q, C). Sums are float32 in a fixed order, rounded
once.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from minidl.cuda.array import as_rows, contiguous, empty
from minidl.cuda.grid import BLOCK, ints, row_grid, strip_length
from minidl.cuda.launch import launch
from minidl.cuda.rows import ACCESS, dense, dtype_code, rows, vector_width
from minidl.shapes import Pair, ceil_div, pool_output_size

ACCUMULATORS = 32  # float registers that a gathering thread may spend on its pixels
FULL_DEVICE = 2**17  # threads that keep any current GPU busy; a constant, so that sums are cut alike on all of them
PIXELS_PER_THREAD = 4
NORMALIZED_AHEAD = 3  # windows below each other of which a thread that normalises has asked for what each adds
NORMALIZED_STRIP = 8  # rows of a thread that normalises: what it knows of its channels, and a row, serve more of them


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


_SIZES = ("rows", "strips", "strip", "height", "width", "channels", "out_h", "out_w", "pad_h", "pad_w")
_GEOMETRY = np.dtype([(name, np.int32) for name in _SIZES])


class _Gather(NamedTuple):
    """How the pixels of dx are dealt to the threads of a gathering kernel; ``geometry`` is its argument."""

    vec: int
    tile_h: int
    grid: int
    block: tuple[int, int]
    geometry: np.ndarray


def _gather(dy: Any, dx: Any, stride: Pair, padding: Pair, widest: int, longest: int = 4) -> _Gather:
    """Tiles of stride[0] by stride[1] pixels while a thread has the registers for their sums, else of one row.

    ``widest``: the most channels per thread that other arrays allow; ``longest``: the most tiles.
    """
    n, height, width, channels = dx.shape
    vec = min(vector_width(dy, dx), widest)
    while vec > 1 and vec * stride[1] > ACCUMULATORS:
        vec //= 2
    tile_h = stride[0] if vec * math.prod(stride) <= ACCUMULATORS else 1
    lines = height if tile_h == 1 else ceil_div(height + padding[0], tile_h)
    items = ceil_div(width + padding[1], stride[1]) * (channels // vec)
    strip = strip_length(n * lines * items, lines, longest)
    strips = ceil_div(lines, strip)
    sizes = n * strips, strips, strip, height, width, channels, *dy.shape[1:3], *padding
    return _Gather(vec, tile_h, *row_grid(n * strips, items), np.array([sizes], _GEOMETRY))


def max_pool2d(
    x: Any, *, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, ceil_mode: bool
) -> tuple[Any, Any]:
    """As `minidl.cpu.pool2d.max_pool2d`."""
    window = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation, "ceil_mode": ceil_mode}
    return _max_pool2d("max_pool2d", x, (None, None, None), **window)[:2]


def batch_norm_max_pool2d(
    x: Any, moments: Any, gamma: Any, beta: Any, *, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair,
    ceil_mode: bool,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """As `minidl.cpu.pool2d.batch_norm_max_pool2d`; but for the index of a NaN."""
    window = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation, "ceil_mode": ceil_mode}
    return _max_pool2d("batch_norm_max_pool2d", x, (moments, gamma, beta), **window)


def _max_pool2d(
    who: str, x: Any, norm: tuple[Any, Any, Any], *, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair,
    ceil_mode: bool,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """(y, index, largest), the last None without a batch norm."""
    x = as_rows(x)
    n, height, width, channels = x.shape
    shape = _out_shape(x.shape, kernel, stride, padding, dilation, ceil_mode)
    _, out_h, out_w, _ = shape
    assert math.prod(kernel) <= 2**16, kernel
    y = empty(shape, x.dtype)
    normalized = norm[0] is not None
    largest = empty(shape, x.dtype) if normalized else None
    index = empty(shape, np.uint8 if math.prod(kernel) <= 256 else np.uint16)
    vec = vector_width(*(array for array in (x, y, *norm) if array is not None))
    items = out_w * (channels // vec)
    strip = strip_length(n * out_h * items, out_h, *((NORMALIZED_STRIP,) if normalized else ()))
    strips = ceil_div(out_h, strip)
    grid, block = row_grid(n * strips, items)
    defines = _defines(x, who, vec, kernel, stride, dilation)
    defines |= {"INDEX_BITS": 8 * index.itemsize, "NORMALIZED": int(normalized)}
    shared = 0
    if normalized:
        defines["AHEAD"] = NORMALIZED_AHEAD
        if kernel[0] > stride[0] and kernel[1] <= 5 and math.prod(kernel) <= 9 and dilation == (1, 1):
            shared = NORMALIZED_AHEAD * stride[0] * kernel[1] * math.prod(block) * vec * x.itemsize
    launch(
        "pool2d", "max_pool2d", grid, block, x, y, index, largest, *norm,
        *ints(n * strips, strips, strip, height, width, channels),
        np.int64(rows(x)[2]), *ints(out_h, out_w, *padding), defines=defines, shared=shared,
    )  # fmt: skip
    return y, index, largest


def max_pool2d_backward(
    dy: Any, index: Any, x_shape: tuple[int, ...], *, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair,
    add: Any = None,
) -> Any:  # fmt: skip
    """dx (N, H, W, C): each pixel gathers the gradients of the windows whose maximum it was (+ ``add``)."""
    dy = as_rows(dy)
    assert index.shape == dy.shape and dense(index), (index.shape, dy.shape)
    assert index.dtype == (np.uint8 if math.prod(kernel) <= 256 else np.uint16), index.dtype
    dx = empty(x_shape, dy.dtype)
    add = add if add is None else as_rows(add)
    assert add is None or (add.shape == dx.shape and add.dtype == dx.dtype), (add.shape, add.dtype)
    plan = _gather(dy, dx, stride, padding, vector_width(index, *(() if add is None else (add,))))
    defines = _defines(dy, "max_pool2d_backward", plan.vec, kernel, stride, dilation)
    defines |= {"TILE_H": plan.tile_h, "INDEX_BITS": 8 * index.itemsize, "NORMALIZED": 0, "ADD": int(add is not None)}
    pitches = np.int64(rows(dy)[2]), np.int64(0 if add is None else rows(add)[2])
    args = (dy, index, add, dx, plan.geometry, *pitches)
    launch("pool2d", "max_pool2d_backward", plan.grid, plan.block, *args, defines=defines)
    return dx


def batch_norm_max_pool2d_backward(
    dy: Any, index: Any, x: Any, moments: Any, gamma: Any, sums: Any, count: Any, *, kernel: Pair, stride: Pair,
    padding: Pair, dilation: Pair,
) -> Any:  # fmt: skip
    """As `minidl.cpu.pool2d.batch_norm_max_pool2d_backward`."""
    dy, x = as_rows(dy), contiguous(x)
    assert index.shape == dy.shape and dense(index), (index.shape, dy.shape)
    assert index.dtype == (np.uint8 if math.prod(kernel) <= 256 else np.uint16), index.dtype
    dx, batch = empty(x.shape, x.dtype), sums is not None
    widest = vector_width(index, *(array for array in (x, moments, gamma, sums) if array is not None))
    plan = _gather(dy, dx, stride, padding, widest, NORMALIZED_STRIP)
    defines = _defines(dy, "batch_norm_max_pool2d_backward", plan.vec, kernel, stride, dilation)
    defines |= {"TILE_H": plan.tile_h, "INDEX_BITS": 8 * index.itemsize, "NORMALIZED": 1, "BATCH": int(batch)}
    args = dy, index, x, moments, gamma, sums, count, dx, plan.geometry, np.int64(rows(dy)[2])
    launch("pool2d", "batch_norm_max_pool2d_backward", plan.grid, plan.block, *args, defines=defines)
    return dx


def avg_pool2d(x: Any, *, kernel: Pair, stride: Pair, padding: Pair, ceil_mode: bool, count_include_pad: bool) -> Any:
    """As `minidl.cpu.pool2d.avg_pool2d`."""
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
    dy: Any, x_shape: tuple[int, ...], *, kernel: Pair, stride: Pair, padding: Pair, ceil_mode: bool,
    count_include_pad: bool,
) -> Any:  # fmt: skip
    """dx (N, H, W, C): each pixel gathers its share of the windows that cover it."""
    dy = as_rows(dy)
    assert dy.shape == _out_shape(x_shape, kernel, stride, padding, (1, 1), ceil_mode), (dy.shape, x_shape)
    dx = empty(x_shape, dy.dtype)
    plan = _gather(dy, dx, stride, padding, ACCESS)
    defines = _defines(dy, "avg_pool2d_backward", plan.vec, kernel, stride, (1, 1)) | {"TILE_H": plan.tile_h}
    args = (dy, dx, plan.geometry, np.int64(rows(dy)[2]), np.int32(count_include_pad))
    launch("pool2d", "avg_pool2d_backward", plan.grid, plan.block, *args, defines=defines)
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
    out_h, out_w = output_size
    y = empty((n, out_h, out_w, channels), x.dtype)
    vec = vector_width(x, y)
    items = y.size // vec
    # Cut as for whole vectors: a misaligned array costs narrower ones, not other bits.
    wide_items, pixels = ceil_div(y.size * x.itemsize, ACCESS), ceil_div(height, out_h) * ceil_div(width, out_w)
    groups, splits = _adaptive_split(wide_items, pixels)
    lanes = BLOCK // groups
    partial = empty((splits, y.size), np.float32) if splits > 1 else None
    defines = _adaptive_defines(x, "adaptive_avg_pool2d", vec, (height, width), (out_h, out_w))
    launch(
        "adaptive_pool2d", "adaptive_avg_pool2d", (ceil_div(items, lanes), splits), (lanes, groups), x, y, partial,
        *ints(items, channels), np.int64(rows(x)[2]), defines=defines,
    )  # fmt: skip
    if splits > 1:
        args = (partial, y, *ints(items, channels, splits))
        launch("adaptive_pool2d", "adaptive_avg_pool2d_merge", ceil_div(items, BLOCK), BLOCK, *args, defines=defines)
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
        "adaptive_pool2d", "adaptive_avg_pool2d_backward", grid, block, dy, dx,
        *ints(n * strips, strips, strip, channels), np.int64(rows(dy)[2]),
        defines=_adaptive_defines(dy, "adaptive_avg_pool2d_backward", vec, (height, width), (out_h, out_w)),
    )  # fmt: skip
    return dx
