"""Weight gradient of a convolution on Hopper's matrix units, for 16-bit types and in TF32, by conv2d_weight_hopper.cu.

Everything here is worked out from sizes and the device record; `plan` says in one place when the kernel applies.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import gcd, prod
from typing import Any, NamedTuple

import numpy as np

from minidl.cuda.array import as_rows, empty
from minidl.cuda.convolution.conv2d_family import Choice
from minidl.cuda.convolution.conv2d_hopper import aligned
from minidl.cuda.convolution.conv2d_plan import Convolution, Launched, argument, struct
from minidl.cuda.convolution.conv2d_walk import is_flat
from minidl.cuda.convolution.conv2d_weight_grid import HALO, ITEMSIZE, ROW_BYTES, SPAN, HaloTile, halo, halo_views
from minidl.cuda.convolution.conv2d_weight_tiles import (
    TILES,
    WORKERS,
    Division,
    WeightTile,
    bundled,
    choose,
    normalizes,
    options,
    overflows,
    rows_first,
    shares,
    span_of,
    taken,
    tiles_of,
)
from minidl.cuda.convolution.widen import narrow
from minidl.cuda.device import HOPPER, DeviceRecord
from minidl.cuda.hopper import TF32, TensorMaps, View, Views
from minidl.cuda.launch import launch
from minidl.cuda.rows import ACCESS, address, rows
from minidl.precision import float32
from minidl.shapes import ceil_div, round_up

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
    "plan",
    "shares",
    "tiles_of",
]


# The structures Problem of conv2d_weight_hopper.cu and of conv2d_weight_halo.cu.
_PROBLEM = struct(
    "",
    "steps lots shared chunks groups rows channels columns spans blocks kernel_w pixels height width out_height "
    "out_width stride_h stride_w padding_h padding_w dilation_h dilation_w further_n further_h further_w tiles_m "
    "tiles_n turn_m turn_n once patch_rows patch_columns mode",
)
_HALO_PROBLEM = struct(
    "",
    "steps chunks groups rows channels images height width grid_h grid_w padding_h padding_w tap_h tap_w ahead held "
    "further_n further_h further_w tiles_m tiles_n patch_rows patch_columns mode",
)
# That of conv2d_weight_sum.cu.
_SUM = struct(
    "",
    "tiles_m tiles_n turn_m turn_n steps lots shared parts tile_rows held_rows held_columns down wide span rows "
    "channels columns spans blocks tile_step block_step accumulate",
)


_MANY = 4e8  # bytes of both arrays
_PATCH = 16, 8  # rows and columns of a partial sum that a warp writes at a time
# Threads and blocks that adding partial sums up keeps any device busy with, and threads that share a sum, at most.
ENOUGH_THREADS, ENOUGH_BLOCKS, MOST_SPLIT = 2**15, 512, 32


class Planned(NamedTuple):
    """A launch of ``<stem>_kernel``.

    Attributes:
        views: of dy and x.
        parts: into how many sums the pixels are divided.
        values: float32 that these take, if there are several; else 0.
        summed: the launch of conv2d_weight_sum.cu that adds them up; None: there is one.
    """

    stem: str
    grid: int
    block: int
    views: Views
    problem: np.ndarray
    defines: dict[str, int]
    shared: int
    parts: int
    values: int
    summed: Launched | None


def backward_weight(
    conv: Convolution,
    code: int,
    dy: Any,
    x: Any,
    out: Any,
    accumulate: bool,
    choice: Choice | None = None,
    norm: Sequence[Any] | None = None,
    tf32: int = 0,
) -> None:
    """Weight gradient into ``out``; ``norm``: moments, gamma and beta where ``x`` is a batch norm's input.

    ``tf32``: products that stand for one of float32, 1 or 3; 0 for 16-bit types. The kernels write 16 bytes at a time:
    a gradient that begins elsewhere is made in a place of its own.
    """
    whole = bundled(conv, tf32)
    if whole.groups < conv.groups or address(out) % ACCESS:
        gradient = empty((*out.shape[:-1], conv.channels // whole.groups), float32)
        backward_weight(whole, code, dy, x, gradient, False, choice, norm, tf32)
        narrow(gradient, out, accumulate, conv.groups)
        return
    dy, x = aligned(as_rows(dy)), aligned(as_rows(x))
    pitches, normalized = (rows(x)[2], rows(dy)[2]), norm is not None
    forced = taken(choice, conv, normalized, tf32)
    planned = plan(conv, code, pitches, accumulate, forced, normalized, tf32)
    partials = empty(planned.values, float32) if planned.summed else None
    launch(
        planned.stem, f"{planned.stem}_kernel", planned.grid, planned.block,
        TensorMaps(planned.views, (dy, x)), out, partials, *(norm or (None,) * 3), planned.problem,
        defines=planned.defines, shared=planned.shared,
    )  # fmt: skip
    if planned.summed:
        planned.summed.start(partials, out)


@functools.lru_cache(maxsize=4096)
def applies(conv: Convolution, code: int, device: DeviceRecord, tf32: int = 0) -> bool:
    """Whether the kernel can do this: on compute capability 9.0, channels and filters of a group in multiples of eight,
    of four in TF32 (``tf32``: 1 or 3), as far as the copy engine can walk the arrays densely (`View.legal`, offsets of
    taps below 255).
    """
    if device.arch != HOPPER or not (code or tf32):
        return False
    unit = conv.groups * (8 if code else 4)
    if conv.channels % unit or conv.out_channels % unit:
        return False
    if max(conv.pixels, conv.images * conv.height * conv.width) >= 2**30:
        return False
    if any((taps - 1) * step > 254 for taps, step in zip(conv.kernel, conv.dilation, strict=True)):
        return False
    return _views(conv, code, (conv.channels, conv.out_channels), tf32).legal


@functools.lru_cache(maxsize=1024)
def plan(
    conv: Convolution,
    code: int,
    pitches: tuple[int, int],
    accumulate: bool,
    forced: tuple[WeightTile | HaloTile, Division] | None = None,
    normalized: bool = False,
    tf32: int = 0,
) -> Planned:
    """The launch, where the kernel `applies`, over arrays whose rows start at multiples of 16 bytes.

    Args:
        pitches: elements per pixel of x and dy.
        accumulate: whether the sum is added to the gradient.
        forced: tile and division, instead of those chosen.
        normalized: whether x is the input of a batch norm with a ReLU over it.
        tf32: products that stand for one of float32, 1 or 3; 0 for 16-bit types.
    """
    tile, division = forced or choose(conv, normalized, tf32)
    grid = halo(conv) if isinstance(tile, HaloTile) else None
    views = halo_views(conv, code, pitches, grid) if grid else _views(conv, code, pitches, tf32)
    assert views.legal, (conv, pitches)
    span, rows, channels = span_of(tf32), conv.out_channels // conv.groups, conv.channels // conv.groups
    height, width = grid.size if grid else (conv.out_height, conv.out_width)
    steps, spans = ceil_div(conv.images * height * width, span), ceil_div(channels, span)
    lines, further_w = divmod(span, width)
    further_n, further_h = divmod(lines, height)
    taps = conv.kernel[0] * conv.kernel[1]
    down, across = tile.size[0], tile.size[1] // (taps if grid else 1)
    tiles = ceil_div(rows, down), ceil_div(taps * spans, across // span) if not grid else spans
    count = prod(tiles) * conv.groups
    division = division.of(steps, count)
    fields = {
        "steps": steps, "chunks": division.chunks, "rows": rows, "channels": channels, "further_n": further_n,
        "further_h": further_h, "further_w": further_w, "mode": int(accumulate),
    }  # fmt: skip
    down = not grid and rows_first(conv, division)
    turns = {"turn_m": 1, "turn_n": tiles[0]} if down else {"turn_m": tiles[1], "turn_n": 1}
    lots = {"lots": count // division.tiles, "shared": division.tiles} | turns
    whole = division.parts == 1 or division.tiles > 1
    held = _Held(*tile.size, span) if whole else _held(tile, rows, channels, span)
    defines = {"DTYPE": code, "CLUSTER": division.cluster, "NORMALIZED": int(normalized)} | tile.defines
    fields |= {"patch_rows": held.rows, "patch_columns": held.span}
    if grid:
        stem, shared = "conv2d_weight_halo", grid.shared_bytes(tile.stages)
        fields |= {"grid_h": height, "grid_w": width, "tap_h": grid.tap[0], "tap_w": grid.tap[1]}
        fields |= {"ahead": grid.ahead, "held": grid.ahead + tile.stages}
    else:
        stem, shared = "conv2d_weight_hopper", tile.shared_bytes
        fields |= {"columns": taps * channels, "spans": spans, "blocks": taps * spans} | lots
        at_once = division.tiles == 1 and count * division.chunks <= tile.resident * WORKERS
        defines |= {"FLAT": int(is_flat(conv)), "TURNS": int(division.tiles > 1)}
        fields["once"] = _passing(conv, code) if at_once else 0
        defines["OVERFLOWS"] = int(overflows(conv))
        defines |= {"TF32": int(tf32)} if tf32 else {"BORDER": int(_reaches_out(conv))} if normalized else {}
    problem = argument(_HALO_PROBLEM if grid else _PROBLEM, conv, tiles_m=tiles[0], tiles_n=tiles[1], **fields)
    sizes = {"rows": rows, "channels": channels, "columns": taps * channels, "spans": spans, "blocks": taps * spans}
    sizes |= {"tiles_m": tiles[0], "tiles_n": tiles[1], "parts": division.parts, "accumulate": accumulate}
    sizes |= {"steps": steps} | lots
    values, summed = _sum(tile, held, code, conv.groups, **sizes) if division.parts > 1 else (0, None)
    blocks = lots["lots"] * division.chunks
    threads = tile.threads + (32 if defines.get("BORDER") and tile.resident > 1 else 0)  # else there are idle warps
    return Planned(stem, blocks, threads, views, problem, defines, shared, division.parts, values, summed)


def _passing(conv: Convolution, code: int) -> int:
    """Which operands leave the L2 cache first, bits of the field `once`, where all blocks run at a time: both; but
    where they are many times what it holds, the larger alone, so that the other is still there for those behind (16
    bits, 1x1).
    """
    dy, x = ITEMSIZE * prod(conv.y_shape), ITEMSIZE * prod(conv.x_shape)
    return 3 if not code or not is_flat(conv) or dy + x < _MANY else 1 if dy > x else 2


class _Held(NamedTuple):
    """What partial sums hold of a tile: whole patches, but of a gradient that is less no more than it has.

    ``span``: columns of each block of them.
    """

    rows: int
    columns: int
    span: int


def _held(tile: WeightTile | HaloTile, rows: int, channels: int, span: int) -> _Held:
    """``rows``, ``channels``: of the gradient, of a group."""
    held = min(span, round_up(channels, 2 * _PATCH[1]))
    return _Held(min(tile.size[0], round_up(rows, _PATCH[0])), tile.size[1] // span * held, held)


def _sum(tile: WeightTile | HaloTile, held: _Held, code: int, groups: int, **sizes: int) -> tuple[int, Launched]:
    """Values of the partial sums, and the launch that adds them up. ``sizes``: fields of its problem."""
    lots, shared, parts = (sizes[name] for name in ("lots", "shared", "parts"))
    halo, span = isinstance(tile, HaloTile), SPAN if code else SPAN // 2
    down, across, wide = held.rows // _PATCH[0], held.columns // (2 * _PATCH[1]), tile.size[1] // span
    fields = {
        "tile_rows": tile.size[0], "held_rows": held.rows, "held_columns": held.columns, "wide": wide,
        "span": across // wide, "tile_step": 1 if halo else wide, "block_step": sizes["spans"] if halo else 1,
    }  # fmt: skip
    cells = lots * shared * down * across
    split = lines = 1
    while 2 * split <= min(parts // shared, MOST_SPLIT) and 32 * split * cells < ENOUGH_THREADS:
        split *= 2
    warps = gcd(max(1, 4 // split), across)
    while lines < 4 and down % (2 * lines) == 0 and cells >= 2 * lines * warps * ENOUGH_BLOCKS:
        lines *= 2
    fields["down"] = down // lines
    grid = across // warps * sizes["tiles_n"], fields["down"] * sizes["tiles_m"], groups
    assert max(grid[1:]) < 2**16, grid
    defines = {"DTYPE": code, "LINES": lines, "WARPS": warps, "SPLIT": split}
    values = lots * (parts + shared - 1) * held.rows * held.columns
    name, problem = "conv2d_weight_sum", argument(_SUM, **fields, **sizes)
    return values, Launched(name, f"{name}_kernel", grid, 32 * warps * split, problem, defines, 0)


def _reaches_out(conv: Convolution) -> bool:
    """Whether a tap may lie outside of an image, or pixels of a stage behind the last."""
    x, y = (conv.height, conv.width), (conv.out_height, conv.out_width)
    axes = zip(x, y, conv.kernel, conv.stride, conv.padding, conv.dilation, strict=True)
    over = (pad or (out - 1) * step + (taps - 1) * apart >= size for size, out, taps, step, pad, apart in axes)
    return conv.pixels % SPAN > 0 or any(over)


def _views(conv: Convolution, code: int, pitches: tuple[int, int], tf32: int = 0) -> Views:
    """Of dy and x. One product: the engine rounds; of three, the kernel needs what rounding leaves."""
    code = TF32 if tf32 == 1 else code
    return Views((_gradient(conv, code, pitches[1]), 0), (_source(conv, code, pitches[0]), 1))


def _box(code: int) -> tuple[int, int]:
    """(bytes of a value, channels or filters, and pixels, of a block of a stage)"""
    itemsize = ITEMSIZE if code in (1, 2) else 4
    return itemsize, ROW_BYTES // itemsize


def _gradient(conv: Convolution, code: int, pitch: int) -> View:
    itemsize, span = _box(code)
    return View(code, (conv.out_channels, conv.pixels), (pitch * itemsize,), (span, span))


def _source(conv: Convolution, code: int, pitch: int) -> View:
    """x as the engine walks it: in steps of the stride from the padding on, as many pixels as dy has."""
    itemsize, span = _box(code)
    pixel = pitch * itemsize
    if is_flat(conv):
        return View(code, (conv.channels, conv.pixels), (pixel,), (span, span))
    first = tuple(-padding for padding in reversed(conv.padding))
    counts, steps = (conv.out_width, conv.out_height), tuple(reversed(conv.stride))
    sizes = (conv.width, conv.height)
    last = tuple(
        at + (count - 1) * step - (size - 1) for at, count, step, size in zip(first, counts, steps, sizes, strict=True)
    )
    pitches = (pixel, conv.width * pixel, conv.height * conv.width * pixel)
    return View(code, (conv.channels, *sizes, conv.images), pitches, (span, span), (first, last), steps)
