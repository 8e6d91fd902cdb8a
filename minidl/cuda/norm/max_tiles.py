"""A batch norm under a ReLU whose output is read whole and pooled in tiles, too; formulas in max_tiles.cu.

Shapes: x (N, H, W, C), y and add alike, dense or pitched; pooled and dy (N, P, Q, C). Windows of ``kernel`` pixels lie
side by side from the first pixel on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minidl import checks
from minidl.cuda.array import as_rows, empty
from minidl.cuda.launch import launch
from minidl.cuda.norm.batch_norm import TARGET_BLOCKS, Chunks, batch_norm_backward_sums, cut_rows
from minidl.cuda.rows import ACCESS, dtype_code, rows, vector_width, vectors
from minidl.precision import float32
from minidl.shapes import Pair, ceil_div, pool_output_size

FORWARD_BLOCKS = 528  # four on each of 132 multiprocessors, what the registers of a kernel without sums leave room for
BYTES = 8  # of a vector, backward: a thread has a tile of two arrays in flight, beside parameters and sums

_SIZES = ("down", "across", "height", "width", "out_h", "out_w", "dy_pitch")
_TILING = np.dtype([(name, np.int32) for name in _SIZES])


def batch_norm_max_tiles(
    x: Any, moments: Any, gamma: Any, beta: Any, *, kernel: Pair, ceil_mode: bool, out: Any = None
) -> tuple[Any, Any]:
    """``relu(batch_norm_apply(x, moments, gamma, beta))``, in ``out`` if given; and the largest of each window."""
    x = as_rows(x)
    n, *image, channels = x.shape
    assert out is None or (out.shape == x.shape and out.dtype == x.dtype), checks.describe(out)
    y = empty(x.shape, x.dtype) if out is None else out
    sizes = (pool_output_size(size, k, k, 0, 1, ceil_mode) for size, k in zip(image, kernel, strict=True))
    pooled = empty((n, *sizes, channels), x.dtype)
    norm = moments, gamma, beta
    vec = _vector_width(x, y, pooled, *norm)
    cut, tiling = _plan(x, pooled, kernel, vec, rows(y)[2], ACCESS, FORWARD_BLOCKS)
    _start("", x, (x, *norm, y, pooled), vec, kernel, cut, tiling, FORWARD=1)
    return y, pooled


def batch_norm_max_tiles_backward_stats(
    dy: Any, add: Any, x: Any, moments: Any, gamma: Any, beta: Any, *, kernel: Pair, dgamma: Any = None,
    dbeta: Any = None, accumulate: bool = False,
) -> Any:  # fmt: skip
    """As `minidl.cpu.pool2d.batch_norm_max_tiles_backward_stats`."""
    dy, x, add = as_rows(dy), as_rows(x), add if add is None else as_rows(add)
    norm = moments, gamma, beta
    vec = min(_vector_width(dy, x, add, *norm), BYTES // x.itemsize)
    cut, tiling = _plan(x, dy, kernel, vec, 0 if add is None else rows(add)[2])
    parts = empty((cut.chunks, 2, x.shape[-1]), float32)
    args = dy, add, x, *norm, parts
    _start("_backward_stats", x, args, vec, kernel, cut, tiling, STATS=1, ADD=int(add is not None))
    return batch_norm_backward_sums(parts, moments, dgamma=dgamma, dbeta=dbeta, accumulate=accumulate)


def batch_norm_max_tiles_backward_apply(
    dy: Any, add: Any, x: Any, moments: Any, gamma: Any, beta: Any, sums: Any, count: Any, *, kernel: Pair
) -> Any:
    """``batch_norm_activate_backward_apply``, of gradients as `batch_norm_max_tiles_backward_stats` has them."""
    dy, x, add = as_rows(dy), as_rows(x), add if add is None else as_rows(add)
    dx = empty(x.shape, x.dtype)
    norm = moments, gamma, beta
    vec = min(_vector_width(dy, x, add, dx, *norm, sums), BYTES // x.itemsize)
    cut, tiling = _plan(x, dy, kernel, vec, 0 if add is None else rows(add)[2])
    defines = {"APPLY": 1, "ADD": int(add is not None), "BATCH": int(sums is not None)}
    _start("_backward_apply", x, (dy, add, x, *norm, sums, count, dx), vec, kernel, cut, tiling, **defines)
    return dx


def _vector_width(first: Any, *arrays: Any) -> int:
    given = [array for array in (first, *arrays) if array is not None]
    channels, images = first.shape[-1], [array for array in given if array.ndim == 4]
    assert all(array.dtype == first.dtype and array.shape[-1] == channels for array in images), images
    for array in given:
        if array.ndim < 4 and array.dtype == float32:
            size = channels * (2 if array.ndim == 2 else 1)
            assert vectors(size, (array,)), checks.describe(array)
    return vector_width(*given)


def _plan(
    x: Any, pooled: Any, kernel: Pair, vec: int, pitch: int, access: int = BYTES, blocks: int = TARGET_BLOCKS
) -> tuple[Chunks, np.ndarray]:
    """Tiles in chunks, and how they lie; ``pitch``: of the second array like x."""
    n, height, width, channels = x.shape
    assert pooled.shape[0] == n and pooled.shape[-1] == channels, (pooled.shape, x.shape)
    down, across = ceil_div(height, kernel[0]), ceil_div(width, kernel[1])
    sizes = down, across, height, width, *pooled.shape[1:3], rows(pooled)[2]
    itemsize = x.itemsize * ACCESS // access  # of channels of which one access has as many as a vector here
    pixels = kernel[0] * kernel[1]
    cut = cut_rows(n * down * across, channels, itemsize, vec, rows(x)[2], pitch, blocks=blocks, pixels=pixels)
    return cut, np.array([sizes], _TILING)


def _start(
    name: str, x: Any, args: tuple[Any, ...], vec: int, kernel: Pair, cut: Chunks, tiling: np.ndarray, **defines: int
) -> None:
    defines |= {"DTYPE": dtype_code(x, "batch_norm_max_tiles"), "VEC": vec}
    ragged = x.shape[1:3] != (tiling["out_h"][0] * kernel[0], tiling["out_w"][0] * kernel[1])
    defines |= {"KERNEL_H": kernel[0], "KERNEL_W": kernel[1], "RAGGED": int(ragged)}
    launch(
        "max_tiles", f"batch_norm_max_tiles{name}_kernel", cut.grid, cut.block, *args, tiling, cut.argument,
        defines=defines, shared=cut.shared,
    )  # fmt: skip
