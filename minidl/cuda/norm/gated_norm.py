"""Squeeze and excitation over a batch norm and its activation, of which only the batch norm's input is read."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from minidl import checks
from minidl.cuda.activation import struct_of
from minidl.cuda.array import as_rows, contiguous, empty, zeros
from minidl.cuda.grid import ints
from minidl.cuda.launch import launch
from minidl.cuda.norm.batch_norm import batch_norm_backward_sums
from minidl.cuda.rows import ROW_LIMIT, dtype_code, rows, vector_width, vectors, walk_samples
from minidl.precision import float32
from minidl.shapes import ceil_div

FORWARD, BACKWARD = 1, 5  # sums that a pass takes
THREADS = 256
TARGET_BLOCKS = 264  # two on each of 132 multiprocessors; part of the cut
# Pixels of a group, and groups on their way to a thread, by the sums and the bytes of an element.
GROUPS = {(FORWARD, 2): (4, 2), (FORWARD, 4): (2, 3), (BACKWARD, 2): (1, 4), (BACKWARD, 4): (1, 4)}
WIDTHS = (32, 64, 128, 256)  # vectors of a block along the channels, at most: wider blocks have fewer lanes to add up
MOST_PER_THREAD = 128  # terms of a float32 sum, before a thread adds it to those that it has left in shared memory
MOST_CHUNKS = 32
# What a block takes besides its pixels, and a second kernel for chunks, in pixels of a thread.
BLOCK_PIXELS, MERGE_PIXELS = 4, 6
GATE = {"unroll": 4, "groups": 4}  # pixels that a thread has in flight under a gate, and how many such groups it takes
NARROW = 4  # values of a vector there: parameters fill the registers of wider ones

_CUT = np.dtype([("pitch", np.int32, 2), *((name, np.int32) for name in
                 ("pixels", "chunk", "chunks", "channels", "samples", "each", "tiles"))])  # fmt: skip


class Cut(NamedTuple):
    """How the pixels of each sample are cut into chunks, channels into tiles, and samples dealt to blocks."""

    grid: int
    block: tuple[int, int]
    chunks: int
    argument: np.ndarray


@functools.lru_cache(maxsize=4096)
def cut_samples(samples: int, pixels: int, channels: int, itemsize: int, vec: int, pitches: tuple[int, int]) -> Cut:
    """Chunks and lanes follow from the sizes alone: neither the device nor an array's alignment changes a bit."""
    assert samples * pixels < ROW_LIMIT, (samples, pixels)
    vectors = ceil_div(channels, 16 // itemsize)

    def lanes_of(widest: int) -> int:
        lanes = min(THREADS // ceil_div(vectors, ceil_div(vectors, widest)), pixels)
        return ceil_div(pixels, ceil_div(pixels, lanes))

    def time(plan: tuple[int, int]) -> int:
        lanes, chunks = plan
        rounds = ceil_div(samples * ceil_div(vectors, THREADS // lanes) * chunks, TARGET_BLOCKS)
        return rounds * (ceil_div(ceil_div(pixels, chunks), lanes) + BLOCK_PIXELS) + MERGE_PIXELS * (chunks > 1)

    plans = []
    for lanes in map(lanes_of, WIDTHS):
        most = min(ceil_div(pixels, lanes * 2 * BLOCK_PIXELS), MOST_CHUNKS)
        plans += [(lanes, chunks) for chunks in range(1, most + 1)]
    lanes, chunks = min(plans, key=time)
    chunk = ceil_div(pixels, chunks)
    chunks = ceil_div(pixels, chunk)
    # Narrower vectors: as many lanes of fewer channels.
    tiles = ceil_div(channels // vec, THREADS // lanes)
    columns = ceil_div(channels // vec, tiles)
    each = ceil_div(samples * tiles * chunks, TARGET_BLOCKS)
    argument = np.array([(pitches, pixels, chunk, chunks, channels, samples, each, tiles)], _CUT)
    argument.setflags(write=False)
    return Cut(tiles * chunks * ceil_div(samples, each), (columns, lanes), chunks, argument)


def batch_norm_means(x: Any, moments: Any, gamma: Any, beta: Any, function: str, slope: float = 0.0) -> Any:
    """As `minidl.cpu.gated_norm.batch_norm_means`."""
    return _sums(FORWARD, x, None, moments, gamma, beta, function, slope)[0]


def batch_norm_gate(x: Any, moments: Any, gamma: Any, beta: Any, gate: Any, function: str, slope: float = 0.0) -> Any:
    """What ``batch_norm_activate`` makes of x (N, ..., C), times a ``gate`` (N, 1, ..., 1, C); rounded once."""
    code, x, gate = _checked("batch_norm_gate", x, moments, gamma, beta, gate)
    z = empty(x.shape, x.dtype)
    if x.size:
        n, channels = x.shape[0], x.shape[-1]
        parameters = moments, gamma, beta, gate
        plan = walk_samples(x, z, samples=n, **GATE, access=NARROW * x.itemsize, parameters=parameters)
        defines = {"DTYPE": code, "VEC": plan.vec, "UNROLL": plan.unroll, "FUNCTION": struct_of(function), "APPLY": 1}
        args = *parameters, z, np.float32(slope), *ints(n, channels), plan.argument
        launch("gated_norm", "gated_norm_apply", plan.grid, plan.block, x, *args, defines=defines)
    return z


def batch_norm_gate_gradient(
    dz: Any, x: Any, moments: Any, gamma: Any, beta: Any, function: str, slope: float = 0.0
) -> tuple[Any, Any]:
    """As `minidl.cpu.gated_norm.batch_norm_gate_gradient`."""
    assert dz.shape == x.shape and dz.dtype == x.dtype, (checks.describe(dz), checks.describe(x))
    return _sums(BACKWARD, x, dz, moments, gamma, beta, function, slope)


def batch_norm_gate_backward_stats(
    sums: Any, gate: Any, dmean: Any, pixels: int, moments: Any, *, dgamma: Any = None, dbeta: Any = None,
    accumulate: bool = False,
) -> Any:  # fmt: skip
    """As `minidl.cpu.gated_norm.batch_norm_gate_backward_stats`."""
    n, four, channels = sums.shape
    assert four == BACKWARD - 1 and gate.size == dmean.size == n * channels, checks.describe(sums)
    parts, gate, dmean = empty((n, 2, channels), float32), contiguous(gate), contiguous(dmean)
    if parts.size:
        defines = {"DTYPE": dtype_code(gate, "batch_norm_gate"), "PARTS": 1, **_NO_VECTORS}
        args = sums, gate, dmean, parts, *ints(n * channels, channels), np.float32(1 / pixels)
        launch("gated_norm", "gated_norm_parts", ceil_div(n * channels, THREADS), THREADS, *args, defines=defines)
    return batch_norm_backward_sums(parts, moments, dgamma=dgamma, dbeta=dbeta, accumulate=accumulate)


def batch_norm_gate_backward_apply(
    dz: Any, gate: Any, dmean: Any, x: Any, moments: Any, gamma: Any, beta: Any, sums: Any, count: Any, function: str,
    slope: float = 0.0,
) -> Any:  # fmt: skip
    """``batch_norm_activate_backward_apply`` of the gradient ``dz*gate + dmean/pixels``, which is never written."""
    assert dz.shape == x.shape and dz.dtype == x.dtype, (checks.describe(dz), checks.describe(x))
    code, x, gate, dmean = _checked("batch_norm_gate", x, moments, gamma, beta, gate, dmean)
    dz, dx = as_rows(dz), empty(x.shape, x.dtype)
    if x.size:
        n, channels = x.shape[0], x.shape[-1]
        parameters = moments, gamma, beta, gate, dmean, sums
        plan = walk_samples(dz, x, dx, samples=n, **GATE, access=NARROW * x.itemsize, parameters=parameters)
        defines = {"DTYPE": code, "VEC": plan.vec, "UNROLL": plan.unroll, "FUNCTION": struct_of(function)}
        args = *parameters, count, dx, np.float32(slope), np.float32(n / rows(x)[0]), *ints(n, channels), plan.argument
        launch(
            "gated_norm", "gated_norm_backward_apply", plan.grid, plan.block, dz, x, *args,
            defines=defines | {"BATCH": int(sums is not None)},
        )  # fmt: skip
    return dx


_NO_VECTORS = {"VEC": 1, "UNROLL": 1, "FUNCTION": "silu"}  # which the small kernels do not look at


def _sums(
    many: int, x: Any, dz: Any, moments: Any, gamma: Any, beta: Any, function: str, slope: float
) -> tuple[Any, Any]:
    """(the first sum over the pixels of each sample, forward over their number, in the type of x; the others)"""
    code, x = _checked("batch_norm_gate", x, moments, gamma, beta)
    n, channels = x.shape[0], x.shape[-1]
    shape, rest = (n, *(1,) * (x.ndim - 2), channels), (n, many - 1, channels)
    if x.size == 0:
        return zeros(shape, x.dtype), zeros(rest, float32)
    dz = None if dz is None else as_rows(dz)
    out, parts = empty(shape, x.dtype), empty(rest, float32) if many > 1 else None
    count, _, pitch = rows(x)
    arrays = (x,) if dz is None else (x, dz)
    vec = vector_width(*arrays, *(one for one in (moments, gamma, beta) if one is not None))
    cut = cut_samples(n, count // n, channels, x.itemsize, vec, (pitch, pitch if dz is None else rows(dz)[2]))
    whole = cut.chunks == 1
    partials = None if whole else empty((many, cut.chunks, n * channels), float32)
    factor = np.float32(1.0 if many > 1 else n / count)
    pixels, ahead = GROUPS[many, x.itemsize]
    defines = {"DTYPE": code, "VEC": vec, "SUMS": many, "PIXELS": pixels, "AHEAD": ahead, "MOST": MOST_PER_THREAD}
    args = x, dz, moments, gamma, beta, partials, out, parts, np.float32(slope), factor, cut.argument
    # Sums of each lane, and what is on its way.
    shared = math.prod(cut.block) * vec * (4 * many + ahead * pixels * len(arrays) * x.itemsize)
    launch(
        "gated_norm", "gated_norm_sums", cut.grid, cut.block, *args, shared=shared,
        defines=defines | {"WHOLE": int(whole), "FUNCTION": struct_of(function)},
    )  # fmt: skip
    if not whole:
        launch(
            "gated_norm", "gated_norm_merge", ceil_div(n * channels, THREADS), THREADS, partials, out, parts,
            *ints(n * channels, channels, cut.chunks), factor, defines={"DTYPE": code, "MERGED": many, **_NO_VECTORS},
        )  # fmt: skip
    return out, parts


def _checked(who: str, x: Any, moments: Any, gamma: Any, beta: Any, *gates: Any) -> tuple[Any, ...]:
    """(code of the type, x as rows, the gates dense): kernels read all but x through bare pointers."""
    code, channels = dtype_code(x, who), x.shape[-1]
    known = vectors(2 * channels, (moments,)) and vectors(channels, (gamma, beta))
    assert known, [checks.describe(one) for one in (moments, gamma, beta) if one is not None]
    for one in gates:
        assert one.size == x.shape[0] * channels and one.dtype == x.dtype, checks.describe(one)
    return code, as_rows(x), *map(contiguous, gates)
