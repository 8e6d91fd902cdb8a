"""Batch normalisation on the GPU, split where a reduction over ranks can fall; formulas in batch_norm.cu."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from minidl import checks, shapes
from minidl.cuda.activation import struct_of
from minidl.cuda.array import as_rows, empty
from minidl.cuda.grid import ints
from minidl.cuda.launch import launch
from minidl.cuda.norm.merge_lanes import merge_lanes
from minidl.cuda.norm.signs import are_signs, check_signs, signs_shape
from minidl.cuda.norm.statistics import Joined, Parts, beside
from minidl.cuda.rows import ROW_LIMIT, dense, dtype_code, rows, spans, vector_width, vectors, walk_channels
from minidl.precision import float32

THREADS = 256
# Three blocks, what the registers of a multiprocessor hold, on each of 132: with a few more, those would run alone.
# Part of the cut, hence of the result's bits.
TARGET_BLOCKS = 396
PAIR_BLOCKS = 264  # of kernels of which two fit: of two batch norms at once
LEAST_CHUNK_ROWS = 128  # keeps partial results below five per cent of the bytes read
MOST_ROWS_PER_THREAD = 64  # how many terms a float32 sum may have before it is merged in float64
UNROLL = 8  # rows that a thread has in flight
AHEAD = 4  # and of two arrays, through shared memory
UNROLL_MASKED = {2: 2, 3: 3}  # and where the output, or its signs, are read besides and a gradient is written
TABLE_BYTES = 20  # of a channel
SHARED_LANES = 8  # from so many on the lanes of a block share what they know of their channels: of four each is faster


class Chunks(NamedTuple):
    """A cut of (rows, channels) into chunks of rows, as ``Chunks`` of batch_norm.cu expects it."""

    grid: tuple[int, int]
    block: tuple[int, int]
    shared: int  # bytes: two values per lane and channel of a tile, and one more per channel
    chunks: int
    chunk_rows: int
    argument: np.ndarray


_ARGUMENT = np.dtype(
    [(name, np.int32) for name in ("rows", "x_pitch", "dy_pitch", "y_pitch", "channels", "chunk_rows")]
)


@functools.lru_cache(maxsize=4096)
def cut_rows(
    count: int, channels: int, itemsize: int, vec: int, x_pitch: int, dy_pitch: int = 0, y_pitch: int = 0,
    blocks: int = TARGET_BLOCKS, pixels: int = 1,
) -> Chunks:  # fmt: skip
    """The cut for ``count`` rows of ``channels``; so many ``blocks`` of the kernel fill the device.

    A row may stand for several ``pixels``, of which a thread has as many in flight.

    Which rows a chunk has and which lane sums them depends on the shape and the type alone: neither the device nor the
    pitch nor the vector width changes a bit of the result.
    """
    assert count < ROW_LIMIT, count
    ideal = shapes.ceil_div(channels, 16 // itemsize)
    lanes = 32 if ideal <= 8 else 16 if ideal <= 16 else 8
    columns = THREADS // lanes
    # As many chunks as fill the device once, or as many whole times as bound the rows of a thread.
    ideal_tiles, per_thread, rounds = shapes.ceil_div(ideal, columns), MOST_ROWS_PER_THREAD + 1, 0
    while per_thread > MOST_ROWS_PER_THREAD:
        rounds += 1
        wanted = max(1, rounds * blocks // ideal_tiles)
        per_thread = shapes.round_up(shapes.ceil_div(count, wanted * lanes), 4)
    # Where that leaves multiprocessors without a block, half as many are worth their partial results.
    least = (
        LEAST_CHUNK_ROWS
        if ideal_tiles * count * pixels > TARGET_BLOCKS // 3 * LEAST_CHUNK_ROWS
        else LEAST_CHUNK_ROWS // 2
    )
    chunk_rows = lanes * max(per_thread, 8 // pixels, least // pixels // lanes)
    chunks = shapes.ceil_div(count, chunk_rows)

    vectors = channels // vec
    tiles = shapes.ceil_div(vectors, columns)
    argument = np.array([(count, x_pitch, dy_pitch, y_pitch, channels, chunk_rows)], _ARGUMENT)
    argument.setflags(write=False)
    threads = shapes.ceil_div(vectors, tiles)
    shared = (2 * lanes + 1) * threads * vec * 4
    return Chunks((chunks, tiles), (threads, lanes), shared, chunks, chunk_rows, argument)


def batch_norm_stats(x: Any, *, finish: bool = True) -> Any:
    """Count, means and sums of squared deviations of each channel of ``x`` (..., C): (1 + 2C,) float64.

    Without ``finish`` as they come, for ``batch_norm_finalize`` or ``batch_norm_merge``.
    """
    code = dtype_code(x, "batch_norm_stats")
    x = as_rows(x)
    count, channels, pitch = rows(x)
    vec = vector_width(x)
    cut = cut_rows(count, channels, x.itemsize, vec, pitch)
    mean = empty((cut.chunks, channels), np.float64)
    squares = empty((cut.chunks, channels), float32)
    defines = {"STATS": 1, "DTYPE": code, "VEC": vec, "UNROLL": UNROLL}
    launch(
        "batch_norm", "batch_norm_stats_kernel", cut.grid, cut.block,
        x, mean, squares, cut.argument, defines=defines, shared=cut.shared,
    )  # fmt: skip
    parts = Parts(mean, count, squares, cut.chunk_rows)
    return parts.merged() if finish else parts


def batch_norm_finalize(
    stats: Any, eps: float, *, running_mean: Any = None, running_var: Any = None, momentum: float = 0.1
) -> tuple[Any, Any]:
    """As `minidl.cpu.batch_norm.batch_norm_finalize`; statistics left unfinished are taken, too."""
    if isinstance(stats, Parts | Joined):
        _check_parameters(stats.channels, running_mean=running_mean, running_var=running_var)
        found = stats.finalize(eps, running_mean, running_var, momentum)
        if found is not None:
            return found
        stats = stats.merged()
    assert stats.dtype == np.float64 and dense(stats), checks.describe(stats)
    channels = (stats.shape[-1] - 1) // 2
    parts = 1 if stats.ndim == 1 else stats.shape[0]
    _check_parameters(channels, running_mean=running_mean, running_var=running_var)
    moments = empty((2, channels), float32)
    count = empty(1, np.float64)
    launch(
        "batch_norm_moments", "batch_norm_finalize_kernel", shapes.ceil_div(channels, 128), 128,
        stats, moments, count, running_mean, running_var, np.float64(eps), np.float64(momentum),
        *ints(parts, channels),
    )  # fmt: skip
    return moments, count


def batch_norm_merge(stats: Any) -> Any:
    """Statistics that were left unfinished as ``batch_norm_stats`` has them; finished ones as they are."""
    return stats.merged() if isinstance(stats, Parts | Joined) else stats


def batch_norm_concat(parts: Sequence[Any]) -> Any:
    """`batch_norm_stats` of arrays side by side along channels, from those of each, (1 + 2 C_i,) float64.

    They are left unfinished where those of the last array are.
    """
    stats = parts[0]
    for part in parts[1:]:
        stats = batch_norm_merge(stats)
        if isinstance(part, Parts):
            stats = Joined(stats, part)
        else:
            stats = beside(stats, batch_norm_merge(part))
    return stats


def batch_norm_eval_moments(running_mean: Any, running_var: Any, eps: float) -> Any:
    """Moments (2, C) float32 from running statistics: mean and ``1/sqrt(variance + eps)``."""
    channels = running_mean.shape[0]
    _check_parameters(channels, running_mean=running_mean, running_var=running_var)
    moments = empty((2, channels), float32)
    launch(
        "batch_norm_moments", "batch_norm_eval_moments_kernel", shapes.ceil_div(channels, 128), 128,
        running_mean, running_var, moments, np.float64(eps), np.int32(channels),
    )  # fmt: skip
    return moments


def batch_norm_apply(
    x: Any, moments: Any, gamma: Any = None, beta: Any = None, *, add: Any = None, add_moments: Any = None,
    add_gamma: Any = None, add_beta: Any = None, relu: bool = False, out: Any = None,
) -> Any:  # fmt: skip
    """As `minidl.cpu.batch_norm.batch_norm_apply`."""
    a = np.float32(0.0 if relu else -np.inf)
    return _apply({}, a, x, moments, gamma, beta, add, add_moments, add_gamma, add_beta, out)[0]


def batch_norm_join(
    x: Any, moments: Any, gamma: Any, beta: Any, add: Any, *, add_moments: Any = None, add_gamma: Any = None,
    add_beta: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """`batch_norm_apply` with ``add`` and ReLU, and the signs of its result, which the backward pass reads instead.

    Returns:
        y; and where it is positive, a bit for each value (..., S) uint8, see signs.cuh: of 16-bit types with channels
        in multiples of eight, else None.
    """
    other = add, add_moments, add_gamma, add_beta
    return _apply({}, np.float32(0.0), x, moments, gamma, beta, *other, signed=True)


def batch_norm_activate(x: Any, moments: Any, gamma: Any, beta: Any, function: str, slope: float = 0.0) -> Any:
    """`activate` of what `batch_norm_apply` makes of ``x``, in one pass, rounded once."""
    return _apply({"FUNCTION": struct_of(function)}, np.float32(slope), x, moments, gamma, beta)[0]


def _apply(
    defines: dict[str, Any], a: np.float32, x: Any, moments: Any, gamma: Any, beta: Any, add: Any = None,
    add_moments: Any = None, add_gamma: Any = None, add_beta: Any = None, out: Any = None, signed: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """(the output, its signs if they are asked for and vectors have eight values)

    ``defines`` names the kernel's FUNCTION, where it is one, whose parameter is ``a``.
    """
    code = dtype_code(x, "batch_norm_apply")
    x, add = as_rows(x), _same(x, add)
    channels = x.shape[-1]
    _check_parameters(2 * channels, moments=moments)
    _check_parameters(2 * channels, add_moments=add_moments)
    _check_parameters(channels, gamma=gamma, beta=beta, add_gamma=add_gamma, add_beta=add_beta)
    assert out is None or (out.shape == x.shape and out.dtype == x.dtype), checks.describe(out)
    y = empty(x.shape, x.dtype) if out is None else out
    arrays = (x, y) if add is None else (x, y, add)
    parameters = (moments, gamma, beta, add_moments, add_gamma, add_beta)
    two = add_moments is not None
    plan = walk_channels(*arrays, unroll=2 if two else 4, lasting=two, parameters=parameters)
    kind = 0 if add is None else 1 if add_moments is None else 2
    signs = empty(signs_shape(x.shape), np.uint8) if signed and plan.vec == 8 else None
    defines |= {"APPLY": 1, "DTYPE": code, "VEC": plan.vec, "UNROLL": plan.unroll, "ADD": kind}
    defines |= {"SIGNS": int(signs is not None)}
    launch(
        "batch_norm", "batch_norm_apply_kernel", plan.grid, plan.block,
        x, moments, gamma, beta, add, add_moments, add_gamma, add_beta, y, signs, a, np.int32(channels), plan.argument,
        defines=defines,
    )  # fmt: skip
    return y, signs


def batch_norm_backward_stats(
    dy: Any, x: Any, moments: Any, *, dgamma: Any = None, dbeta: Any = None, accumulate: bool = False
) -> Any:
    """As `minidl.cpu.batch_norm.batch_norm_backward_stats`; before anyone reduces the sums over ranks."""
    return _backward_stats(0, dy, x, moments, dgamma=dgamma, dbeta=dbeta, accumulate=accumulate)


def batch_norm_activate_backward_stats(
    dy: Any, x: Any, moments: Any, gamma: Any, beta: Any, function: str = "relu", slope: float = 0.0, *,
    dgamma: Any = None, dbeta: Any = None, accumulate: bool = False,
) -> Any:  # fmt: skip
    """As `minidl.cpu.batch_norm.batch_norm_activate_backward_stats`."""
    given = {"gamma": gamma, "beta": beta, "function": function, "slope": slope}
    return _backward_stats(1, dy, x, moments, **given, dgamma=dgamma, dbeta=dbeta, accumulate=accumulate)


def batch_norm_join_backward_stats(
    dy: Any, y: Any, x: Any, moments: Any, *, dgamma: Any = None, dbeta: Any = None, accumulate: bool = False
) -> tuple[Any, Any]:
    """As `minidl.cpu.batch_norm.batch_norm_join_backward_stats`; in one pass; ``y`` may be its signs."""
    masked = empty(dy.shape, dy.dtype)
    if signed := are_signs(y):
        check_signs(y, x)
    mask, out = 3 if signed else 2, {"y": y if signed else _same(x, y), "masked": masked}
    return _backward_stats(mask, dy, x, moments, **out, dgamma=dgamma, dbeta=dbeta, accumulate=accumulate), masked


def _backward_stats(
    mask: int, dy: Any, x: Any, moments: Any, *, gamma: Any = None, beta: Any = None, function: str = "relu",
    slope: float = 0.0, y: Any = None, masked: Any = None, dgamma: Any, dbeta: Any, accumulate: bool,
) -> Any:  # fmt: skip
    """The statistics of the backward pass; ``mask`` is the kernel's macro MASK."""
    code = dtype_code(x, "batch_norm_backward_stats")
    x, dy = as_rows(x), _same(x, dy)
    count, channels, x_pitch = rows(x)
    _check_parameters(2 * channels, moments=moments)
    _check_parameters(channels, gamma=gamma, beta=beta, dgamma=dgamma, dbeta=dbeta)
    output = y if mask == 2 else None  # of signs a thread takes the byte, or the part of one, that is of its vector
    vec = vector_width(*(array for array in (x, dy, moments, gamma, beta, output, masked) if array is not None))
    pitches = x_pitch, rows(dy)[2], 0 if output is None else rows(y)[2]
    cut = cut_rows(count, channels, x.itemsize, vec, *pitches)
    partial = empty((cut.chunks, 2, channels), float32)
    defines = {"BACKWARD_STATS": 1, "DTYPE": code, "VEC": vec, "MASK": mask}
    defines |= {"UNROLL": UNROLL_MASKED[mask]} if mask > 1 else {"UNROLL": 1, "AHEAD": AHEAD, **_masking(function)}
    ahead = 0 if mask > 1 else 2 * AHEAD * math.prod(cut.block) * vec * x.itemsize
    launch(
        "batch_norm", "batch_norm_backward_stats_kernel", cut.grid, cut.block,
        dy, x, moments, gamma, beta, y, masked, partial, np.float32(slope), cut.argument,
        defines=defines, shared=max(ahead, cut.shared),
    )  # fmt: skip
    return batch_norm_backward_sums(partial, moments, dgamma=dgamma, dbeta=dbeta, accumulate=accumulate)


def batch_norm_backward_sums(
    parts: Any, moments: Any, *, dgamma: Any = None, dbeta: Any = None, accumulate: bool = False
) -> Any:
    """What `batch_norm_backward_stats` returns and writes, from the parts that ``conv2d_backward_data_masked`` left.

    Args:
        parts: (R, 2, C) float32: sums of ``dy`` and of ``dy*(x - mean)``.
    """
    chunks, _, channels = parts.shape
    _check_parameters(channels, dgamma=dgamma, dbeta=dbeta)
    sums = empty((2, channels), np.float64)
    args = parts, moments, sums, dgamma, dbeta, np.int32(accumulate)
    merge_lanes("batch_norm_merge", "batch_norm_backward_merge_kernel", chunks, channels, *args, SUMS=1)
    return sums


def batch_norm_backward_apply(
    dy: Any, x: Any, moments: Any, gamma: Any, sums: Any, count: Any, *, add: Any = None
) -> Any:
    """As `minidl.cpu.batch_norm.batch_norm_backward_apply`."""
    return _backward_apply(0, dy, x, moments, gamma, None, "relu", 0.0, sums, count, add)


def batch_norm_backward_apply_stats(
    dy: Any, x: Any, moments: Any, gamma: Any, sums: Any, count: Any, other: Any, other_moments: Any
) -> tuple[Any, Any]:
    """As `minidl.cpu.batch_norm.batch_norm_backward_apply_stats`; in one pass over ``dy``; the sums come as parts."""
    code = dtype_code(dy, "batch_norm_backward_apply_stats", "dy")
    dy, x, other = as_rows(dy), _same(dy, x), _same(dy, other)
    count_rows, channels, dy_pitch = rows(dy)
    _check_parameters(2 * channels, moments=moments, other_moments=other_moments)
    _check_parameters(channels, gamma=gamma)
    dx = empty(dy.shape, dy.dtype)
    vec = spans((dy, x, other, dx), (moments, gamma, other_moments, sums))[3]
    pitches = rows(x)[2], dy_pitch, rows(other)[2]
    cut = cut_rows(count_rows, channels, dy.itemsize, vec, *pitches, PAIR_BLOCKS)
    parts = empty((cut.chunks, 2, channels), float32)
    launch(
        "batch_norm", "batch_norm_backward_apply_stats_kernel", cut.grid, cut.block,
        dy, x, moments, gamma, sums, count, other, other_moments, dx, parts, cut.argument,
        defines={"BACKWARD_APPLY_STATS": 1, "DTYPE": code, "VEC": vec, "UNROLL": 2}, shared=cut.shared,
    )  # fmt: skip
    return dx, parts


def batch_norm_activate_backward_apply(
    dy: Any, x: Any, moments: Any, gamma: Any, beta: Any, sums: Any, count: Any, function: str = "relu",
    slope: float = 0.0, *, add: Any = None,
) -> Any:  # fmt: skip
    """`batch_norm_backward_apply` behind `batch_norm_activate`, of gradient ``dy``."""
    return _backward_apply(1, dy, x, moments, gamma, beta, function, slope, sums, count, add)


def _masking(function: str) -> dict[str, str]:
    """The kernel's FUNCTION in a backward pass; a ReLU's mask is that of the kernel itself."""
    return {} if function == "relu" else {"FUNCTION": struct_of(function)}


def _backward_apply(
    mask: int, dy: Any, x: Any, moments: Any, gamma: Any, beta: Any, function: str, slope: float, sums: Any, count: Any,
    add: Any,
) -> Any:  # fmt: skip
    """The gradient of the input; ``mask`` is the kernel's macro MASK."""
    code = dtype_code(dy, "batch_norm_backward_apply", "dy")
    batch = sums is not None
    dy, add = as_rows(dy), _same(dy, add)
    x = _same(dy, x) if batch or mask else None
    channels = dy.shape[-1]
    _check_parameters(2 * channels, moments=moments)
    _check_parameters(channels, gamma=gamma, beta=beta)
    dx = empty(dy.shape, dy.dtype)
    # The kernel knows its arrays by place: dy, dx, x, add; an absent x lends its place to dy.
    arrays = (dy, dx, dy if x is None else x, *(() if add is None else (add,)))
    parameters = (moments, gamma, beta, sums)
    plan = walk_channels(*arrays, unroll=2, lasting=True, parameters=parameters)
    defines = {
        "BACKWARD_APPLY": 1, "DTYPE": code, "VEC": plan.vec, "UNROLL": plan.unroll,
        "ADD": int(add is not None), "BATCH": int(batch), "MASK": mask, "TABLE": int(plan.block[1] >= SHARED_LANES),
    } | _masking(function)  # fmt: skip
    launch(
        "batch_norm", "batch_norm_backward_apply_kernel", plan.grid, plan.block,
        dy, x, moments, gamma, beta, sums, count, add, dx, np.float32(slope), np.int32(channels), plan.argument,
        defines=defines, shared=TABLE_BYTES * plan.block[0] * plan.vec if defines["TABLE"] else 0,
    )  # fmt: skip
    return dx


def _same(x: Any, other: Any) -> Any:
    """``other`` as rows, of the shape and type of ``x``; None stays None."""
    if other is None:
        return None
    assert other.shape == x.shape and other.dtype == x.dtype, (checks.describe(x), checks.describe(other))
    return as_rows(other)


def _check_parameters(size: int, **arrays: Any) -> None:
    """Each array that is given is dense float32 of ``size`` elements: kernels read it through a bare pointer."""
    if not vectors(size, tuple(arrays.values())):
        name, x = next((name, x) for name, x in arrays.items() if not vectors(size, (x,)))
        raise checks.bad_dtype("batch_norm", name, f"a dense float32 array of {size} elements", checks.describe(x))
