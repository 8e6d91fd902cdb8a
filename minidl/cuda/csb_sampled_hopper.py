"""The sampled product in 16-bit types on sm_90: csb_sampled_hopper.cu."""

from __future__ import annotations

from typing import Any

from minidl.cuda.array import empty
from minidl.cuda.channel_sum import sum_partials
from minidl.cuda.conv2d_hopper import aligned
from minidl.cuda.conv2d_plan import argument, struct
from minidl.cuda.csb_rows import LEAST_SIDE
from minidl.cuda.device import DeviceRecord
from minidl.cuda.hopper import TensorMaps, View, Views
from minidl.cuda.launch import launch
from minidl.cuda.rows import DTYPE, rows
from minidl.precision import float32
from minidl.shapes import Pair, ceil_div

__all__ = ["applies", "sampled"]

ARCH = (9, 0)
DEPTH, TILE_M, TILE_N, STAGES = 64, 128, 256, 4
SHARED_BYTES = STAGES * DEPTH * 2 * (TILE_M + TILE_N) + 1024
BLOCKS_WANTED = 132  # a constant, so that sums are cut alike on every device
LEAST_STEPS = 8  # stages of a chunk: below that filling the pipeline and the partial sums cost more than they save
_PROBLEM = struct("nnz", "rows columns across tiles_m tiles_n steps chunks accumulate")


def applies(side: int, dtype: Any, shape: Pair, samples: int, features_last: bool, device: DeviceRecord) -> bool:
    """Whether this kernel can do a product: 16-bit types, rows in whole vectors of eight."""
    row_lengths = shape if features_last else (samples,)
    return (
        side >= LEAST_SIDE and dtype.itemsize == 2 and device.arch == ARCH and samples < 2**31 - DEPTH
        and all(length % 8 == 0 for length in row_lengths)
    )  # fmt: skip


def chunks_of(shape: Pair, samples: int) -> int:
    """Partial sums of a product: enough to fill a GPU, few enough to keep them small; of the sizes alone."""
    tiles = ceil_div(shape[0], TILE_M) * ceil_div(shape[1], TILE_N)
    return max(1, min(BLOCKS_WANTED // tiles, ceil_div(samples, DEPTH) // LEAST_STEPS))


def sampled(
    indptr: Any, indices: Any, dy: Any, x: Any, shape: Pair, side: int, features_last: bool, out: Any, accumulate: bool
) -> None:
    """As `minidl.cuda.csb.csb_sampled`, nothing empty."""
    dy, x = aligned(dy), aligned(x)
    count, length, _ = rows(x)
    samples = count if features_last else length
    views = Views(*((_view(array), i) for i, array in enumerate((dy, x))))
    assert views.legal, (shape, samples)
    chunks = chunks_of(shape, samples)
    tiles = ceil_div(shape[0], TILE_M), ceil_div(shape[1], TILE_N)
    problem = argument(
        _PROBLEM, nnz=out.size, rows=shape[0], columns=shape[1], across=ceil_div(shape[1], side), tiles_m=tiles[0],
        tiles_n=tiles[1], steps=ceil_div(samples, DEPTH), chunks=chunks, accumulate=accumulate and chunks == 1,
    )  # fmt: skip
    defines = {"DTYPE": DTYPE[x.dtype], "SIDE": side, "FEATURES_LAST": int(features_last), "STAGES": STAGES}
    partials = out if chunks == 1 else empty((chunks, out.size), float32)
    launch(
        "csb_sampled_hopper", "csb_sampled_hopper_kernel", tiles[0] * tiles[1] * chunks, 384, indptr, indices,
        TensorMaps(views, (dy, x)), partials, problem, defines=defines, shared=SHARED_BYTES,
    )  # fmt: skip
    if chunks > 1:
        sum_partials(partials, chunks, out, accumulate)


def _view(array: Any) -> View:
    """64 x 64 elements of rows at a pitch."""
    count, length, pitch = rows(array)
    return View(DTYPE[array.dtype], (length, count), (array.itemsize * pitch,), (DEPTH, DEPTH))
