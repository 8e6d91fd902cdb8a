"""1x1 convolutions between many channels and few; kernels in conv2d_thin.cu and conv2d_thin_weight.cu.

The last layer of a network that labels pixels, and its gradients: memory bounds them, and tiles of 64 or more columns
would multiply, or fetch, mostly nothing.
"""

from __future__ import annotations

import functools
from math import gcd
from typing import Any, NamedTuple

from minidl.cuda.array import as_rows, empty
from minidl.cuda.convolution.channel_sum import sum_partials
from minidl.cuda.convolution.conv2d_plan import Convolution, Launched, argument, struct
from minidl.cuda.convolution.conv2d_walk import SECTOR, STAGE_ROW, itemsize_of
from minidl.cuda.rows import ACCESS, address, rows, vector_width
from minidl.precision import float32
from minidl.shapes import ceil_div, round_up

FEW, FEW_HALVES = 16, 32  # channels on one side, at most; of 16-bit types
MORE = 48  # of an output or data gradient, multiples of eight of 16-bit types
# Channels of which no other kernel is faster, as seen on an H200: of a weight gradient in float32 by three products in
# TF32 and by one; of an output or data gradient, but for an output of few channels.
WEIGHT, ROUNDED, GATHERED = 8, 4, 24
FULL = 72  # blocks with which passes from more than that are faster (40-240, 32-192: 98 are, 49 and 25 are not)
# Few times many channels that these may have beside Hopper's kernels with FULL blocks, and by which power of them fewer
# with fewer: what a block multiplies comes to take longer than what it moves; and how many times as many where rows of
# the many begin within a sector, which makes theirs slower (theirs and these, in us, 6144 pixels: 8-192 3.6 and 3.3,
# 16-192 3.5 and 3.6, 16-1408 8.1 and 16.8; 16848: 24-440 13.1 and 9.9; 98304: 24-384 27 and 26, 16-768 45 and 49).
CROWDED, FEWER, WITHIN = 9600, 1.25, 1.3
# Of an output of few channels in 16 bits, from as many as fill a stage of Hopper's kernels: how many stages leave FEW
# so that memory bounds these, and how many so few as BOUND. From less than a stage, which Hopper's fill up with zeros,
# these are faster (theirs and these, in us: 32-32 60.7 and 51.4, 32-24 21.5 and 15.4, 64-32 55.3 and 70.9, 144-24 14.0
# and 16.1, 136-8 23.9 and 19.2, 152-16 41.9 and 44.6, 192-8 13.3 and 13.6, 384-8 22.2 and 25.3, 704-16 39.0 and 47.6).
STAGES, BOUND, MOST_STAGES = 2, 8, 3
# Of a weight gradient in 16 bits: microseconds to start and end; bytes, and values of the narrow side, in one.
STARTED, MOVED, MULTIPLIED = 8.5, 3.45e6, 2.2e6
THREADS = 256
ROWS = 256  # that a block takes at a time; half of them going wide from more than so few in 16 bits
LEAN = 4
SHARED = 96 * 1024  # bytes of filters, at most
LABELS = 8  # filters beside which there are registers for a batch norm
AFFINE = 8  # bytes of what a channel that is normalised needs
# Blocks that keep a GPU busy; beyond these each takes several times as many rows, as long as it moves no more bytes:
# what is short is over before its filters are there, what is long leaves others behind (16-96 channels: a tenth).
ENOUGH, MOVES = 6 * 132, 96 * 1024
SPAN_BYTES, STEP = 128, 128  # of a weight gradient: of a row, that a block takes; rows of its chunks, a multiple
PLACES, LEAST = 8 * 132, 512  # blocks wanted there, the same everywhere, so that sums are cut alike; rows of a chunk

Norm = tuple[Any, Any, Any]  # moments, gamma, beta of a batch norm
NOTHING: Norm = (None, None, None)

_PRODUCT = struct("rows source_pitch add_pitch", "wide few_step wide_step share")
_WEIGHT = struct("rows chunk few_pitch wide_pitch", "wide few_step wide_step")


class _Sides(NamedTuple):
    """Channels on both sides, and what lies between filters of neighbouring ones."""

    few: int
    wide: int
    few_step: int
    wide_step: int

    def shared_bytes(self, itemsize: int, batch: int = 2) -> int:
        """The filters as conv2d_thin.cu keeps them, for each four accesses of a wide row, so many of which it reads
        together.
        """
        slots = round_up(self.few, 8) if itemsize == 2 else self.few
        return round_up(ceil_div(self.wide * itemsize, 4 * ACCESS), batch) * slots * 4 * ACCESS


def _sides(conv: Convolution) -> _Sides:
    if conv.out_channels <= conv.channels:
        return _Sides(conv.out_channels, conv.channels, conv.channels, 1)
    return _Sides(conv.channels, conv.out_channels, 1, conv.channels)


def _widens(conv: Convolution, backward: bool) -> bool:
    """Whether an output or data gradient is of the many channels."""
    return (conv.out_channels <= conv.channels) == backward


@functools.lru_cache(maxsize=1024)
def applies(conv: Convolution, code: int, which: str) -> bool:
    """Whether the kernels can do a pass: 1x1, no stride, padding or groups, at most 16 channels on one side, of 16-bit
    types 32, or 48 of an output or data gradient.
    """
    if conv.kernel != (1, 1) or conv.stride != (1, 1) or conv.padding != (0, 0) or conv.groups > 1:
        return False
    sides = _sides(conv)
    most = (MORE if which != "backward_weight" and sides.few % 8 == 0 else FEW_HALVES) if code else FEW
    return sides.few <= most and sides.shared_bytes(itemsize_of(code)) <= SHARED


def pays(conv: Convolution, code: int, tf32: int, which: str, hopper: bool, others: float) -> bool:
    """Whether they should be faster than kernels that multiply tiles: there are pixels for some multiprocessors, rows
    have something for most of the four threads that share one, and Hopper's kernels cannot do it or are slower.

    Args:
        which: forward, backward_data or backward_weight.
        hopper: they can.
        others: microseconds of the fastest other kernel for a weight gradient; 0, where there are none of Hopper's.
    """
    (few, wide), weight = _sides(conv)[:2], which == "backward_weight"
    widens = not weight and _widens(conv, which == "backward_data")
    least = 2 * 132
    if code and not weight:
        least = 16 if few <= GATHERED else FULL
    if conv.pixels < least * ROWS or 2 * wide * itemsize_of(code) < 4 * ACCESS:
        return False
    if weight and others and code:
        return few <= FEW and STARTED + conv.pixels * (2 * (few + wide) / MOVED + few / MULTIPLIED) < others
    if weight and (hopper or tf32 == 1):
        return few <= (ROUNDED if tf32 == 1 else WEIGHT)
    if not hopper or weight:
        return few <= FEW
    if not (code or widens):  # 12-96 in TF32, data gradient of 64 images of 56x56 pixels: 50 us, Hopper's 27
        return few <= ROUNDED
    if which == "forward" and not widens:
        stages = wide * itemsize_of(code) / STAGE_ROW
        most = FEW_HALVES if stages < 1 else FEW if stages < STAGES else BOUND
        return few <= most and stages <= MOST_STAGES
    crowded = CROWDED * min(conv.pixels / (FULL * ROWS), 1) ** FEWER
    if few * wide > crowded * (WITHIN if wide * itemsize_of(code) % SECTOR else 1):
        return False
    if few <= FEW:
        return True
    # Beside more than 24 there are no registers to write whole sectors of rows that begin within one; that the rows of
    # filters, read across, begin within one makes Hopper's kernels slow.
    if widens:
        return few <= GATHERED or wide * itemsize_of(code) % SECTOR == 0
    return few <= GATHERED or few * itemsize_of(code) % SECTOR > 0


def gather(
    conv: Convolution,
    code: int,
    tf32: int,
    backward: bool,
    source: Any,
    w: Any,
    bias: Any,
    add: Any,
    output: Any,
    relu: bool = False,
    norm: Norm = NOTHING,
) -> None:
    """Forward pass or data gradient into ``output``; ``source`` and ``add`` are rows, ``w`` and ``bias`` dense.

    With ``relu``, the output of a ReLU over that. ``norm``: of the batch norm, with a ReLU over it, whose input
    ``source`` is; where `normalizes`.
    """
    pitches = rows(source)[2], 0 if add is None else rows(add)[2]
    flat = gcd(address(output) // output.itemsize, ACCESS // output.itemsize)
    vectors = vector_width(source), flat, ACCESS if add is None else vector_width(add)
    how = relu, norm is not NOTHING
    planned = _plan_gather(conv, code, tf32, backward, pitches, vectors, *how)
    planned.start(source, w, bias, add, output, *(norm if planned.defines["NARROW"] else ()))


def normalizes(conv: Convolution, code: int) -> bool:
    """Whether forward pass and weight gradient normalise what they read: of a 16-bit type, of many channels, to few."""
    return code > 0 and conv.out_channels <= min(LABELS, conv.channels)


def backward_weight(
    conv: Convolution, code: int, tf32: int, dy: Any, x: Any, out: Any, accumulate: bool, norm: Norm = NOTHING
) -> None:
    """Weight gradient into ``out``; ``norm`` as of `gather`."""
    dy, x = as_rows(dy), as_rows(x)
    few, wide = (dy, x) if conv.out_channels <= conv.channels else (x, dy)
    pitches, vectors = (rows(few)[2], rows(wide)[2]), (vector_width(few), vector_width(wide))
    planned = _plan_weight(conv, code, tf32, pitches, vectors, norm is not NOTHING)
    partials = empty((planned.grid[1], out.size), float32)
    planned.start(few, wide, partials, *norm)
    sum_partials(partials, planned.grid[1], out, accumulate)


@functools.lru_cache(maxsize=1024)
def _plan_gather(
    conv: Convolution,
    code: int,
    tf32: int,
    backward: bool,
    pitches: tuple[int, int],
    vectors: tuple[int, int, int],
    relu: bool = False,
    normalized: bool = False,
) -> Launched:
    """The launch of conv2d_thin.cu.

    Args:
        pitches: elements per pixel of the source and of the array to be added.
        vectors: widest legal vectors of the source, of the output as one row, and of that array.
    """
    sides, itemsize = _sides(conv), itemsize_of(code)
    most = ACCESS // itemsize
    narrow = not _widens(conv, backward)
    run = 2 * ceil_div(sides.few, 8) if code else 2  # of the few, of a thread
    wide_x, flat, wide_add = (min(vector, most) for vector in vectors)
    few_x, few_add = gcd(wide_x, run), gcd(wide_add, run)
    defines = {"DTYPE": code, "TF32": int(tf32 == 1), "FEW": sides.few, "RELU": int(relu), "NARROW": int(narrow)}
    defines["NORMALIZED"] = int(normalized)
    # Beside the sums of more than 24 there are no registers for two.
    batch = 2 if narrow and code and sides.few <= 24 and wide_x == most and sides.wide * itemsize > 4 * ACCESS else 1
    if narrow:
        defines |= {"VEC_X": wide_x, "VEC_Y": flat, "VEC_ADD": few_add, "BATCH": batch}
    else:
        wide_y = gcd(flat, sides.wide)
        defines |= {"VEC_X": few_x if code else wide_x, "VEC_Y": wide_y, "VEC_ADD": wide_add}
        # Of float32, and beside more than 24, there are no registers to hold them.
        defines["SEAMS"] = int(code > 0 and sides.few <= 24 and wide_y == most and sides.wide % (2 * most) > 0)
    at_once = ROWS // 2 if code and not narrow and sides.few > LEAN else ROWS
    count = ceil_div(conv.pixels, at_once)
    share = max(1, min(count * at_once // (ENOUGH * ROWS), MOVES // (at_once * itemsize * (sides.few + sides.wide))))
    problem = argument(
        _PRODUCT, rows=conv.pixels, source_pitch=pitches[0], add_pitch=pitches[1], wide=sides.wide,
        few_step=sides.few_step, wide_step=sides.wide_step, share=share,
    )  # fmt: skip
    name = "narrow" if narrow else "widen"
    shared = sides.shared_bytes(itemsize, batch) + narrow * ROWS * sides.few * itemsize
    shared += normalized * round_up(sides.wide, batch * 4 * most) * AFFINE
    grid = ceil_div(count, share)
    return Launched("conv2d_thin", f"conv2d_thin_{name}_kernel", grid, THREADS, problem, defines, shared)


@functools.lru_cache(maxsize=1024)
def _plan_weight(
    conv: Convolution,
    code: int,
    tf32: int,
    pitches: tuple[int, int],
    vectors: tuple[int, int],
    normalized: bool = False,
) -> Launched:
    """The launch of conv2d_thin_weight.cu; pitches and widest vectors of the few and of the wide."""
    sides, itemsize = _sides(conv), itemsize_of(code)
    spans = ceil_div(sides.wide * itemsize, SPAN_BYTES)
    # Partial sums are to be some hundredths of what is read.
    least = max(LEAST, 32 * sides.few * sides.wide // (sides.few + sides.wide))
    chunk = round_up(max(least, ceil_div(conv.pixels, max(1, PLACES // spans))), STEP)
    vec_few, vec_x = (min(vector, ACCESS // itemsize) for vector in vectors)
    defines = {"DTYPE": code, "TF32": int(tf32 == 1), "FEW": sides.few, "VEC_X": vec_x, "NORMALIZED": int(normalized)}
    each = 4 if sides.few > 16 else 2 if sides.few > 8 else 1  # of the few, of a thread
    defines["VEC_FEW"] = gcd(each, vec_few) if code else vec_few
    problem = argument(
        _WEIGHT, rows=conv.pixels, chunk=chunk, few_pitch=pitches[0], wide_pitch=pitches[1], wide=sides.wide,
        few_step=sides.few_step, wide_step=sides.wide_step,
    )  # fmt: skip
    grid = spans, ceil_div(conv.pixels, chunk)
    return Launched("conv2d_thin_weight", "conv2d_thin_weight_kernel", grid, THREADS, problem, defines, 0)
