"""Weight gradient of a convolution on Hopper's matrix units, for 16-bit types; the kernel is conv2d_weight_hopper.cu.

Everything here is worked out from sizes and the device record; `plan` says in one place when the kernel applies.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from minidl.cuda.array import as_rows, empty
from minidl.cuda.channel_sum import sum_partials
from minidl.cuda.conv2d_family import Choice
from minidl.cuda.conv2d_hopper import aligned
from minidl.cuda.conv2d_plan import Convolution, argument, struct
from minidl.cuda.conv2d_weight_tiles import (
    HALO,
    ITEMSIZE,
    SPAN,
    TILES,
    Division,
    HaloTile,
    WeightTile,
    choose,
    halo,
    halo_views,
    normalizes,
    options,
    taken,
)
from minidl.cuda.device import DeviceRecord
from minidl.cuda.hopper import TensorMaps, View, Views
from minidl.cuda.launch import launch
from minidl.cuda.rows import address, rows
from minidl.precision import float32
from minidl.shapes import ceil_div

__all__ = [
    "HALO",
    "TILES",
    "Division",
    "HaloTile",
    "Planned",
    "WeightTile",
    "applies",
    "backward_weight",
    "choose",
    "halo",
    "normalizes",
    "options",
    "pays",
    "plan",
]

ARCH = (9, 0)

# The structure Problem of conv2d_weight_hopper.cu.
_PROBLEM = struct(
    "",
    "steps chunks rows channels columns spans blocks kernel_w pixels height width out_height out_width stride_h "
    "stride_w padding_h padding_w dilation_h dilation_w further_n further_h further_w tiles_m tiles_n accumulate",
)


class Planned(NamedTuple):
    """A launch of ``<stem>_kernel``. ``views``: of dy and x; ``parts``: partial sums that it leaves."""

    stem: str
    grid: int
    block: int
    views: Views
    problem: np.ndarray
    defines: dict[str, int]
    shared: int
    parts: int


def backward_weight(
    conv: Convolution,
    code: int,
    dy: Any,
    x: Any,
    out: Any,
    accumulate: bool,
    choice: Choice | None = None,
    norm: Sequence[Any] | None = None,
) -> None:
    """Weight gradient into ``out``; ``norm``: moments, gamma and beta where ``x`` is a batch norm's input."""
    dy, x = aligned(as_rows(dy)), aligned(as_rows(x))
    vec_y = gcd(address(out) // out.itemsize, 2)
    pitches, normalized = (rows(x)[2], rows(dy)[2]), norm is not None
    planned = plan(conv, code, pitches, vec_y, accumulate, taken(choice, conv, normalized), normalized)
    partials = out if planned.parts == 1 else empty((planned.parts, out.size), float32)
    launch(
        planned.stem, f"{planned.stem}_kernel", planned.grid, planned.block,
        TensorMaps(planned.views, (dy, x)), partials, *(norm or (None,) * 3), planned.problem,
        defines=planned.defines, shared=planned.shared,
    )  # fmt: skip
    if planned.parts > 1:
        sum_partials(partials, planned.parts, out, accumulate)


@functools.lru_cache(maxsize=4096)
def applies(conv: Convolution, code: int, device: DeviceRecord) -> bool:
    """Whether the kernel can do this: on compute capability 9.0, one group of 16-bit arrays whose channels and filters
    are multiples of eight, as far as the copy engine can walk them densely (`View.legal`, offsets of taps below 255).
    """
    if device.arch != ARCH or code not in (1, 2) or conv.groups != 1:
        return False
    if conv.channels % 8 or conv.out_channels % 8 or max(conv.pixels, conv.images * conv.height * conv.width) >= 2**30:
        return False
    if any((taps - 1) * step > 254 for taps, step in zip(conv.kernel, conv.dilation, strict=True)):
        return False
    return _views(conv, code, (conv.channels, conv.out_channels)).legal


def pays(conv: Convolution) -> bool:
    """Whether it should beat the generic kernel, which packs the taps of few channels side by side.

    Here each tap fills whole blocks of 64 channels: that is made up for by speed up to some 2.5 times the columns, by
    the rates measured at 64 channels and more.
    """
    taps = conv.kernel[0] * conv.kernel[1]
    return taps * ceil_div(conv.channels, SPAN) <= 2.5 * ceil_div(taps * conv.channels, SPAN)


@functools.lru_cache(maxsize=1024)
def plan(
    conv: Convolution,
    code: int,
    pitches: tuple[int, int],
    vec_y: int,
    accumulate: bool,
    forced: tuple[WeightTile | HaloTile, Division] | None = None,
    normalized: bool = False,
) -> Planned:
    """The launch, where the kernel `applies`, over arrays whose rows start at multiples of 16 bytes.

    Args:
        pitches: elements per pixel of x and dy.
        vec_y: values of the gradient that may be written at a time, as far as its address goes.
        accumulate: whether a single partial sum is added to the gradient.
        forced: tile and division, instead of those chosen.
        normalized: whether x is the input of a batch norm with a ReLU over it.
    """
    tile, division = forced or choose(conv, normalized)
    if isinstance(tile, HaloTile):
        return _plan_halo(conv, code, pitches, vec_y, accumulate, tile, division, normalized)
    views = _views(conv, code, pitches)
    assert views.legal, (conv, pitches)
    taps, spans = conv.kernel[0] * conv.kernel[1], ceil_div(conv.channels, SPAN)
    steps = ceil_div(conv.pixels, SPAN)
    division = division.of(steps)
    tiles_m, tiles_n = ceil_div(conv.out_channels, tile.rows), ceil_div(taps * spans, tile.columns // SPAN)
    lines, further_w = divmod(SPAN, conv.out_width)
    further_n, further_h = divmod(lines, conv.out_height)
    problem = argument(
        _PROBLEM,
        conv,
        steps=steps,
        chunks=division.chunks,
        rows=conv.out_channels,
        columns=taps * conv.channels,
        spans=spans,
        blocks=taps * spans,
        further_n=further_n,
        further_h=further_h,
        further_w=further_w,
        tiles_m=tiles_m,
        tiles_n=tiles_n,
        accumulate=accumulate and division.parts == 1,
    )
    defines = {"DTYPE": code, "FLAT": int(_flat(conv)), "VEC_Y": vec_y if division.parts == 1 else 2} | tile.defines
    defines |= {"CLUSTER": division.cluster, "NORMALIZED": int(normalized)}
    stem = "conv2d_weight_hopper"
    return Planned(
        stem,
        tiles_m * tiles_n * division.chunks,
        tile.threads,
        views,
        problem,
        defines,
        tile.shared_bytes,
        division.parts,
    )


_HALO_PROBLEM = struct(
    "",
    "steps chunks rows channels images height width grid_h grid_w padding_h padding_w tap_h tap_w ahead held further_n "
    "further_h further_w tiles_m tiles_n accumulate",
)


def _plan_halo(
    conv: Convolution,
    code: int,
    pitches: tuple[int, int],
    vec_y: int,
    accumulate: bool,
    tile: HaloTile,
    division: Division,
    normalized: bool,
) -> Planned:
    grid = halo(conv)
    height, width = grid.size
    views = halo_views(conv, code, pitches, grid)
    assert views.legal, (conv, pitches)
    steps = ceil_div(conv.images * height * width, SPAN)
    division = division.of(steps)
    lines, further_w = divmod(SPAN, width)
    further_n, further_h = divmod(lines, height)
    tiles_m, tiles_n = ceil_div(conv.out_channels, SPAN), ceil_div(conv.channels, SPAN)
    problem = argument(
        _HALO_PROBLEM,
        conv,
        steps=steps,
        chunks=division.chunks,
        rows=conv.out_channels,
        grid_h=height,
        grid_w=width,
        tap_h=grid.tap[0],
        tap_w=grid.tap[1],
        ahead=grid.ahead,
        held=grid.ahead + tile.stages,
        further_n=further_n,
        further_h=further_h,
        further_w=further_w,
        tiles_m=tiles_m,
        tiles_n=tiles_n,
        accumulate=accumulate and division.parts == 1,
    )
    defines = {"DTYPE": code, "STAGES": tile.stages, "VEC_Y": vec_y if division.parts == 1 else 2}
    defines |= {"CLUSTER": division.cluster, "NORMALIZED": int(normalized)}
    shared = grid.shared_bytes(tile.stages)
    blocks = tiles_m * tiles_n * division.chunks
    return Planned("conv2d_weight_halo", blocks, 512, views, problem, defines, shared, division.parts)


def _flat(conv: Convolution) -> bool:
    """Pixels of x and dy are the same."""
    return conv.kernel == conv.stride == (1, 1) and conv.padding == (0, 0)


def _views(conv: Convolution, code: int, pitches: tuple[int, int]) -> Views:
    return Views((_gradient(conv, code, pitches[1]), 0), (_source(conv, code, pitches[0]), 1))


def _gradient(conv: Convolution, code: int, pitch: int) -> View:
    return View(code, (conv.out_channels, conv.pixels), (pitch * ITEMSIZE,), (SPAN, SPAN))


def _source(conv: Convolution, code: int, pitch: int) -> View:
    """x as the engine walks it: in steps of the stride from the padding on, as many pixels as dy has."""
    pixel = pitch * ITEMSIZE
    if _flat(conv):
        return View(code, (conv.channels, conv.pixels), (pixel,), (SPAN, SPAN))
    first = tuple(-padding for padding in reversed(conv.padding))
    counts, steps = (conv.out_width, conv.out_height), tuple(reversed(conv.stride))
    sizes = (conv.width, conv.height)
    last = tuple(
        at + (count - 1) * step - (size - 1) for at, count, step, size in zip(first, counts, steps, sizes, strict=True)
    )
    pitches = (pixel, conv.width * pixel, conv.height * conv.width * pixel)
    return View(code, (conv.channels, *sizes, conv.images), pitches, (SPAN, SPAN), (first, last), steps)
