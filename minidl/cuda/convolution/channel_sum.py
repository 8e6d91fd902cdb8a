"""Sums over rows and over chunks, in a fixed order; the kernels are in channel_sum.cu."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from minidl import checks
from minidl.cuda.array import as_rows, empty
from minidl.cuda.convolution.conv2d_plan import BLOCKS_WANTED, lanes_along
from minidl.cuda.launch import launch
from minidl.cuda.rows import ACCESS, alignment, dense, dtype_code, rows, vector_width
from minidl.precision import float32
from minidl.shapes import ceil_div, round_up

BLOCK = 256
DEEPEST = 128  # chunks that a block of sum_partials_kernel adds side by side, at most
NARROWEST = 8  # results of such a block, at least: a memory sector
ENOUGH_THREADS = 2**17  # that adding fills any device with
QUAD = 4  # results of a thread
UNROLL = 4  # rows that a thread has in flight; below that a block does little but its final reduction


def check_sum(who: str, out: Any) -> None:
    """TypeError or ValueError unless ``out`` is a dense float32 array, as the summing kernels assume."""
    if out.dtype != float32:
        raise checks.bad_dtype(who, "out", "float32", out.dtype)
    if not dense(out):
        raise checks.bad_value(who, "out", "dense", f"strides {out.strides}")


def channel_sum(dy: Any, *, out: Any, accumulate: bool = False) -> None:
    """The gradient of a bias: ``out`` (C,) float32 = the sum of dy (..., C) over its rows; overwritten, or added to."""
    check_sum("channel_sum", out)
    if out.shape != dy.shape[-1:]:
        raise checks.bad_shape("channel_sum", "out", str(dy.shape[-1:]), out.shape)
    code = dtype_code(dy, "channel_sum", "dy")
    if dy.size == 0:
        sum_partials(None, 0, out, accumulate)
        return
    dy = as_rows(dy)
    count, channels, pitch = rows(dy)
    widest = ACCESS // dy.itemsize
    vec = min(vector_width(dy), widest)
    # What shapes the sum follows from the sizes alone: a misaligned array costs narrower vectors, not other bits.
    lanes = lanes_along(channels, widest, dy.itemsize)
    most = ceil_div(count, BLOCK // lanes * UNROLL)
    chunk = ceil_div(count, min(most, max(1, BLOCKS_WANTED // ceil_div(channels, lanes * widest))))
    chunk = round_up(chunk, BLOCK // lanes * UNROLL)
    chunks = ceil_div(count, chunk)
    partials = empty((chunks, channels), float32) if chunks > 1 else out
    sizes = np.int64(count), np.int64(chunk), np.int32(channels), np.int64(pitch), np.int32(accumulate and chunks == 1)
    defines = {"DTYPE": code, "VEC": vec, "LANES": lanes, "UNROLL": UNROLL}
    grid = ceil_div(channels, lanes * vec), chunks
    launch("channel_sum", "channel_sum_kernel", grid, BLOCK, dy, partials, *sizes, defines=defines)
    if chunks > 1:
        sum_partials(partials, chunks, out, accumulate)


def sum_partials(partials: Any | None, chunks: int, out: Any, accumulate: bool) -> None:
    """``out`` (+)= the sum over ``partials``, (chunks, out.size) float32, in the order of the chunks."""
    # Narrower accesses leave the order of the sums as it is.
    vec = (
        QUAD if out.size % QUAD == 0 and all([alignment(x) == ACCESS for x in (partials, out) if x is not None]) else 1
    )
    grid, block, defines = _sum_plan(chunks, out.size, vec)
    sizes = np.int32(chunks), np.int64(out.size), np.int32(accumulate)
    launch("channel_sum", "sum_partials_kernel", grid, block, partials, out, *sizes, defines=defines)


@functools.lru_cache(maxsize=4096)
def _sum_plan(chunks: int, size: int, vec: int) -> tuple[int, int, dict[str, int]]:
    """Grid, block and macros of sum_partials_kernel."""
    split = 1
    while split < DEEPEST and 2 * split <= chunks and split * size < ENOUGH_THREADS * QUAD:
        split *= 2
    width = max(NARROWEST // vec, BLOCK // split)
    return ceil_div(size, width * vec), split * width, {"SPLIT": split, "VEC": vec}
