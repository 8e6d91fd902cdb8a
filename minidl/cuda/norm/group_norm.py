"""Group normalisation and sums over the pixels of each sample, on the GPU; kernels in group_norm.cu."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from minidl import checks
from minidl.cuda.array import as_rows, empty
from minidl.cuda.convolution.channel_sum import check_sum, sum_partials
from minidl.cuda.convolution.conv2d_plan import BLOCKS_WANTED, lanes_along
from minidl.cuda.grid import ints
from minidl.cuda.launch import launch
from minidl.cuda.rows import ACCESS, dtype_code, rows, vector_width, walk_samples
from minidl.precision import float32
from minidl.shapes import ceil_div, round_up

BLOCK, MERGE_BLOCK = 256, 128
UNROLL = 4  # vectors that a thread has in flight
GROUPS = 2, 4  # of pixels that a thread normalises, forward and backward: what it reads of the moments costs little
MOMENTS, GROUP_SUMS, ROW_SUMS, PRODUCT = range(4)  # the macro KIND of group_norm.cu
MOST_OF_A_WARP = 512  # terms of a group's moments that a warp merges
MOST_PER_THREAD = 64  # terms that a thread adds in float32

_CUT = np.dtype(
    [("pitch", np.int64, 2), *((name, np.int32) for name in
     ("pixels", "chunk", "chunks", "channels", "samples", "tiles", "group", "groups"))], align=True,
)  # fmt: skip


class Partials(NamedTuple):
    """What `sample_sums` left: (1 or 2, chunks, samples * channels) float32, and the pixels of a chunk."""

    array: Any
    chunks: int
    chunk: int

    def total(self, which: int, out: Any, accumulate: bool = False) -> None:
        """``out`` (+)= the sum over chunks; ``out`` may be shorter by a factor: samples are then added up, too."""
        parts = self.array[which].reshape(-1, out.size)
        sum_partials(parts, parts.shape[0], out, accumulate)


def sample_sums(kind: int, a: Any, b: Any | None, moments: Any | None, samples: int, groups: int = 1) -> Partials:
    """Sums over chunks of the pixels of each sample, as ``kind`` says; ``a`` and ``b`` (rows, C) pitched.

    Chunks and lanes follow from the sizes alone: neither the device nor an array's alignment changes a bit.
    """
    code = dtype_code(a, "sample_sums", "a")
    count, channels, pitch = rows(a)
    pixels = count // samples
    arrays = (a,) if b is None else (a, b)
    widest = ACCESS // a.itemsize
    vec = min(vector_width(*arrays), widest)
    lanes = lanes_along(channels, widest, a.itemsize)
    step = BLOCK // lanes * UNROLL
    wanted = max(1, BLOCKS_WANTED // (ceil_div(channels, lanes * widest) * samples))
    chunk = round_up(ceil_div(pixels, min(wanted, ceil_div(pixels, step))), step)
    chunk = min(chunk, BLOCK // lanes * MOST_PER_THREAD)
    chunks, tiles = ceil_div(pixels, chunk), ceil_div(channels, lanes * vec)
    other = rows(b)[2] if b is not None else 0
    argument = np.array(
        [((pitch, other), pixels, chunk, chunks, channels, samples, tiles, channels // groups, groups)], _CUT
    )
    partials = empty((1 if kind == PRODUCT else 2, chunks, samples * channels), float32)
    defines = {"DTYPE": code, "VEC": vec, "LANES": lanes, "UNROLL": UNROLL // len(arrays), "KIND": kind}
    grid = tiles * chunks * samples
    launch("group_norm", "sample_sums", grid, BLOCK, a, b, moments, partials, argument, defines=defines)
    return Partials(partials, chunks, chunk)


def group_norm_stats(x: Any, groups: int, *, eps: float) -> Any:
    """Moments (2, N, groups) float32 of ``x`` (N, ..., C): mean and 1 / sqrt(biased variance + eps) of each group."""
    x = as_rows(x)
    n, channels = x.shape[0], x.shape[-1]
    moments = empty((2, n, groups), float32)
    if x.size:
        pixels = rows(x)[0] // n
        partials = sample_sums(MOMENTS, x, None, None, n)
        sizes = ints(n, pixels, partials.chunk, partials.chunks, channels, channels // groups)
        _merge("group_norm_moments", partials, moments, partials.array, moments, *sizes, np.float32(eps))
    return moments


def _merge(name: str, partials: Partials, out: Any, *args: Any) -> None:
    """Launch a kernel that makes ``out`` (2, samples, groups) of partials: a few threads each, a block if many."""
    count = out.size // 2
    terms = partials.array.shape[1] * partials.array.shape[2] // count
    width = max(4, min(32, 1 << (terms - 1).bit_length())) if terms <= MOST_OF_A_WARP else MERGE_BLOCK
    grid = ceil_div(count, MERGE_BLOCK // width)
    launch("group_norm", name, grid, MERGE_BLOCK, *args, defines={"MERGE": 1, "WIDTH": width})


def _check_operands(dy: Any, x: Any, add: Any | None = None) -> None:
    operands = (dy, x) if add is None else (dy, x, add)
    assert all(a.shape == x.shape and a.dtype == x.dtype for a in operands), [checks.describe(a) for a in operands]


def group_norm_apply(x: Any, moments: Any, gamma: Any | None = None, beta: Any | None = None) -> Any:
    """``(x - mean) * rstd * gamma + beta`` with the ``moments`` (2, N, groups) of each sample; gamma, beta (C,)."""
    code = dtype_code(x, "group_norm_apply")
    x = as_rows(x)
    y = empty(x.shape, x.dtype)
    if x.size == 0:
        return y
    n, groups = moments.shape[1:]
    group = x.shape[-1] // groups
    plan = walk_samples(x, y, samples=n, unroll=UNROLL, groups=GROUPS[0])
    defines = {"DTYPE": code, "VEC": plan.vec, "UNROLL": plan.unroll, "SINGLE": int(group % plan.vec == 0), "ADD": 0}
    args = (x, moments, gamma, beta, y, *ints(n, group, groups), plan.argument)
    launch("group_norm", "group_norm_apply", plan.grid, plan.block, *args, defines=defines)
    return y


def group_norm_backward_stats(
    dy: Any, x: Any, moments: Any, gamma: Any | None = None, *, dgamma: Any | None = None, dbeta: Any | None = None,
    accumulate: bool = False,
) -> Any:  # fmt: skip
    """As `minidl.cpu.group_norm.group_norm_backward_stats`."""
    _check_operands(dy, x)
    for out in (dgamma, dbeta):
        if out is not None:
            check_sum("group_norm_backward_stats", out)
    dy, x = as_rows(dy), as_rows(x)
    n, groups = moments.shape[1:]
    channels = x.shape[-1]
    if x.size == 0:
        for out in (dgamma, dbeta):
            if out is not None:
                sum_partials(None, 0, out, accumulate)
        return empty((2, n, groups), float32)
    partials = sample_sums(GROUP_SUMS, dy, x, moments, n, groups)
    for which, out in enumerate((dbeta, dgamma)):
        if out is not None:
            partials.total(which, out, accumulate)
    sums = empty((2, n, groups), float32)
    sizes = ints(n, rows(x)[0] // n, partials.chunks, channels, channels // groups)
    _merge("group_norm_group_sums", partials, sums, partials.array, gamma, sums, *sizes)
    return sums


def group_norm_backward_apply(
    dy: Any, x: Any, moments: Any, gamma: Any | None, sums: Any, *, add: Any | None = None
) -> Any:
    """The gradient of the input, plus ``add``: ``rstd * (dy * gamma - sums[0] - xhat * sums[1])``."""
    code = dtype_code(dy, "group_norm_backward_apply", "dy")
    _check_operands(dy, x, add)
    dy, x = as_rows(dy), as_rows(x)
    dx = empty(x.shape, x.dtype)
    if x.size == 0:
        return dx
    add = None if add is None else as_rows(add)
    n, groups = moments.shape[1:]
    group = x.shape[-1] // groups
    arrays = (dy, x, dx) if add is None else (dy, x, dx, add)
    # Groups of few channels leave each its own moments: wide vectors of those would leave room for few threads.
    wide = group % (ACCESS // x.itemsize) == 0
    unroll, access = (UNROLL // 2, ACCESS) if wide else (UNROLL, ACCESS // 2)
    plan = walk_samples(*arrays, samples=n, unroll=unroll, groups=GROUPS[1], access=access)
    defines = {
        "DTYPE": code, "VEC": plan.vec, "UNROLL": plan.unroll, "SINGLE": int(group % plan.vec == 0),
        "ADD": int(add is not None),
    }  # fmt: skip
    args = (dy, x, moments, gamma, sums, add, dx, *ints(n, group, groups), plan.argument)
    launch("group_norm", "group_norm_backward_apply", plan.grid, plan.block, *args, defines=defines)
    return dx
