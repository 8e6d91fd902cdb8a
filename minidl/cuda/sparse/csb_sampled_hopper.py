"""The sampled product in 16-bit types on sm_90, or of float32 operands split in two: csb_sampled_hopper.cu."""

from __future__ import annotations

from typing import Any

from minidl.cuda.array import empty
from minidl.cuda.convolution.channel_sum import sum_partials
from minidl.cuda.convolution.conv2d_hopper import aligned
from minidl.cuda.convolution.conv2d_plan import argument, struct
from minidl.cuda.device import HOPPER, DeviceRecord
from minidl.cuda.hopper import TensorMaps, View, Views
from minidl.cuda.launch import launch
from minidl.cuda.rows import DTYPE, rows, vector_width
from minidl.cuda.sparse.csb_rows import LEAST_SIDE
from minidl.precision import bfloat16, float32
from minidl.shapes import Pair, ceil_div, round_up

DEPTH, TILE_M = 64, 128
STAGES = {64: 8, 128: 6, 256: 4}  # by columns of a tile
BLOCKS_WANTED = 132  # a constant, so that sums are cut alike on every device
LEAST_STEPS = 8  # stages of a chunk: below that filling the pipeline and the partial sums cost more than they save
SPLIT_FROM = {True: 0.01, False: 0.03}  # by features last, density from which split products beat csb_dots.cu
PRODUCTS = 3  # of a split one
_PROBLEM = struct("nnz", "rows columns across tiles_m tiles_n steps chunks accumulate")
_SPLIT = struct("x_pitch rows", "columns pitch vectors")


def applies(side: int, dtype: Any, shape: Pair, samples: int, features_last: bool, device: DeviceRecord) -> bool:
    """Whether this kernel can do a product: 16-bit types, rows in whole vectors of eight."""
    row_lengths = shape if features_last else (samples,)
    return (
        side >= LEAST_SIDE and dtype.itemsize == 2 and device.arch == HOPPER and samples < 2**31 - DEPTH
        and all(length % 8 == 0 for length in row_lengths)
    )  # fmt: skip


def splits(
    split: str | None, side: int, shape: Pair, nnz: int, samples: int, features_last: bool, device: DeviceRecord
) -> bool:
    """Whether a float32 product is taken as three of bfloat16, where ``split`` permits it."""
    fits = split == "bf16x3" and side >= LEAST_SIDE and device.arch == HOPPER and samples < 2**31 - DEPTH
    return fits and nnz >= SPLIT_FROM[features_last] * shape[0] * shape[1]


def tile_columns(shape: Pair) -> int:
    """Columns of a tile: those of a narrow matrix, so that no products are of columns that are not there."""
    return next((n for n in STAGES if n >= shape[1]), max(STAGES))


def chunks_of(shape: Pair, steps: int) -> int:
    """Partial sums of a product: enough to fill a GPU, few enough to keep them small; of the sizes alone."""
    tiles = ceil_div(shape[0], TILE_M) * ceil_div(shape[1], tile_columns(shape))
    return max(1, min(BLOCKS_WANTED // tiles, steps // LEAST_STEPS))


def sampled(
    indptr: Any, indices: Any, dy: Any, x: Any, shape: Pair, side: int, features_last: bool, out: Any, accumulate: bool
) -> None:
    """As `minidl.cuda.sparse.csb.csb_sampled`, nothing empty; float32 operands are split."""
    samples = dy.shape[0 if features_last else 1]
    split = dy.dtype == float32
    dy, x = (_halves(array) if split else aligned(array) for array in (dy, x))
    lengths = shape if features_last else (samples, samples)
    views = Views(*((_view(array, length), i) for i, (array, length) in enumerate(zip((dy, x), lengths, strict=True))))
    assert views.legal, (shape, samples)
    steps = ceil_div(samples, DEPTH) * (PRODUCTS if split else 1)
    chunks = chunks_of(shape, steps)
    across = tile_columns(shape)
    tiles = ceil_div(shape[0], TILE_M), ceil_div(shape[1], across)
    problem = argument(
        _PROBLEM, nnz=out.size, rows=shape[0], columns=shape[1], across=ceil_div(shape[1], side), tiles_m=tiles[0],
        tiles_n=tiles[1], steps=steps, chunks=chunks, accumulate=accumulate and chunks == 1,
    )  # fmt: skip
    defines = {"DTYPE": DTYPE[x.dtype], "SPLIT": int(split), "SIDE": side, "FEATURES_LAST": int(features_last)}
    defines |= {"TILE_N": across, "STAGES": STAGES[across]}
    shared = STAGES[across] * DEPTH * 2 * (TILE_M + across) + 1024
    partials = out if chunks == 1 else empty((chunks, out.size), float32)
    launch(
        "csb_sampled_hopper", "csb_sampled_hopper_kernel", tiles[0] * tiles[1] * chunks, 384, indptr, indices,
        TensorMaps(views, (dy, x)), partials, problem, defines=defines, shared=shared,
    )  # fmt: skip
    if chunks > 1:
        sum_partials(partials, chunks, out, accumulate)


def _halves(x: Any) -> Any:
    """(heads or rests, rows, columns) in bfloat16 of a float32 array; rows are padded to whole vectors of eight."""
    count, length, pitch = rows(x)
    halves = empty((PRODUCTS - 1, count, round_up(length, 8)), bfloat16)
    vec = 4 if length % 4 == 0 and vector_width(x) >= 4 else 1
    vectors = length // vec
    problem = argument(_SPLIT, x_pitch=pitch, rows=count, columns=length, pitch=halves.shape[2], vectors=vectors)
    grid = ceil_div(count * vectors, 256)
    assert grid < 2**31, x.shape
    launch("csb_split", "csb_split_kernel", grid, 256, x, halves, problem, defines={"VEC": vec})
    return halves


def _view(array: Any, length: int) -> View:
    """64 x 64 elements of rows at a pitch, ``length`` of each; of halves one after the other."""
    if array.ndim == 2:
        count, _, pitch = rows(array)
        return View(DTYPE[array.dtype], (length, count), (array.itemsize * pitch,), (DEPTH, DEPTH))
    halves, count, pitch = array.shape
    pitches = array.itemsize * pitch, array.itemsize * pitch * count
    return View(DTYPE[array.dtype], (length, count, halves), pitches, (DEPTH, DEPTH, 1))
