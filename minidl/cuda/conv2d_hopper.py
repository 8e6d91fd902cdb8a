"""Convolution and its data gradient on Hopper's matrix units, for 16-bit types; the kernel is in conv2d_hopper.cu.

Everything here is worked out from sizes and the device record: `applies` says in one place which convolutions the
family takes, `plan` what is launched for them.
"""

from __future__ import annotations

import functools
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from minidl.cuda.array import copy_into, empty
from minidl.cuda.conv2d_plan import AxisClass, Convolution, argument, parity_classes, struct
from minidl.cuda.device import DeviceRecord
from minidl.cuda.hopper import View, Views
from minidl.cuda.rows import ACCESS, address, rows
from minidl.shapes import Pair, ceil_div

__all__ = ["TILES", "HopperTile", "Planned", "aligned", "applies", "choose", "images_at_once", "plan"]

ARCH = (9, 0)
CLASSES = 4  # parity classes of one launch, at most
DEPTH = 64  # channels of a stage
SLAB = 64  # rows and columns of an output buffer
ITEMSIZE = 2
VECTOR = ACCESS // ITEMSIZE
OFFSETS = range(255)  # pixels from the first tap to any other, along one axis
ROW_LIMIT = 2**31 - 1024  # pixels of one launch: with what the last tile hangs over they are counted in 32 bits
REACH = 2**40  # bytes of an image, as far as the engine counts

# The structures Class and Problem of conv2d_hopper.cu.
_CLASS = struct("", "tiles rows height width first_h first_w taps_h taps_w offset_h offset_w tap")
_PROBLEM = struct(
    "",
    "tiles share group tiles_n columns depth step_h step_w delta_h delta_w tap_step_h tap_step_w added",
    ("classes", _CLASS, CLASSES),
)


class HopperTile(NamedTuple):
    """Rows x columns of the product that a block computes at a time.

    Attributes:
        rows, columns, stages, slabs, resident: the macros TILE_M, TILE_N, STAGES, SLABS and RESIDENT.
    """

    rows: int
    columns: int
    stages: int
    slabs: int
    resident: int

    @property
    def threads(self) -> int:
        return 384 if self.resident == 1 else 288

    @property
    def shared_bytes(self) -> int:
        return self.stages * 2 * DEPTH * (self.rows + self.columns) + 2 * self.slabs * 2 * SLAB * SLAB + 1024

    @property
    def defines(self) -> dict[str, int]:
        return {
            "TILE_M": self.rows, "TILE_N": self.columns, "STAGES": self.stages, "SLABS": self.slabs,
            "RESIDENT": self.resident,
        }  # fmt: skip


TILES = (
    HopperTile(128, 256, 3, 4, 1),
    HopperTile(256, 128, 3, 4, 1),
    HopperTile(128, 128, 3, 1, 2),
    HopperTile(128, 64, 4, 1, 2),
)


class Planned(NamedTuple):
    """A launch of conv2d_hopper_kernel. ``views``: of the filters, the source, the output and what is added to it."""

    grid: int
    block: int
    views: Views
    problem: np.ndarray
    defines: dict[str, int]
    shared: int


class Walk(NamedTuple):
    """One axis of a class of output pixels, and how the engine walks the source for it.

    Output pixel i is ``start + i * spread``; its tap j reads the source at ``first + i * step + offset + j * delta``
    and is the filter's ``tap + j * tap_step``.
    """

    start: int
    count: int
    spread: int
    source: int
    first: int
    step: int
    taps: int
    offset: int
    delta: int
    tap: int
    tap_step: int

    @property
    def corners(self) -> Pair:
        """Of the pixels walked: the first, and the last counted from the last of the source."""
        return self.first, self.first + (self.count - 1) * self.step - (self.source - 1)

    @property
    def farthest(self) -> int:
        return max(self.offset, self.offset + (self.taps - 1) * self.delta)


def _forward_walk(source: int, count: int, kernel: int, stride: int, padding: int, dilation: int) -> Walk:
    return Walk(0, count, 1, source, -padding, stride, kernel, 0, dilation, 0, 1)


def _backward_walk(source: int, part: AxisClass, stride: int, dilation: int) -> Walk:
    common = gcd(stride, dilation)
    delta, last = dilation // common, max(part.taps - 1, 0)
    # The engine moves pixels forward only: the walk starts where the last tap reads.
    first, offset = part.offset - last * delta, last * delta
    filters = part.first, stride // common
    return Walk(part.start, part.count, stride, source, first, 1, part.taps, offset, -delta, *filters)


@functools.lru_cache(maxsize=1024)
def _walks(conv: Convolution, backward: bool) -> list[tuple[Walk, Walk]]:
    """(height, width) of each class of output pixels: one, or of a strided data gradient several."""
    if not backward:
        sources, outputs = (conv.height, conv.width), (conv.out_height, conv.out_width)
        axes = zip(sources, outputs, conv.kernel, conv.stride, conv.padding, conv.dilation, strict=True)
        return [tuple(_forward_walk(*axis) for axis in axes)]
    rest = tuple(zip((conv.out_height, conv.out_width), conv.stride, conv.dilation, strict=True))
    return [
        tuple(_backward_walk(size, part, *other) for part, (size, *other) in zip(pair, rest, strict=True))
        for pair in parity_classes(conv)
    ]


@functools.lru_cache(maxsize=1024)
def applies(conv: Convolution, code: int, backward: bool, device: DeviceRecord) -> bool:
    """Whether the family takes a convolution, wherever its arrays lie.

    It does on compute capability 9.0, for one group of a 16-bit type with channels and filters in multiples of eight,
    as far as the copy engine can walk the pixels: paddings up to 128, strides up to 8, taps up to 254 pixels apart.
    """
    if device.arch != ARCH or code not in (1, 2) or conv.groups != 1 or conv.images == 0:
        return False
    if conv.channels % VECTOR or conv.out_channels % VECTOR:
        return False
    walks = _walks(conv, backward)
    if any(axis.farthest not in OFFSETS for pair in walks for axis in pair):
        return False
    pitches = _depth(conv, backward), _columns(conv, backward)
    return all(_views(conv, code, backward, walks[i : i + CLASSES], pitches, TILES[0]).legal for i in _firsts(walks))


def aligned(x: Any) -> Any:
    """``x`` itself where the engine can walk it, else a dense copy: rows start at multiples of 16 bytes."""
    pitch = rows(x)[2]
    image = x.shape[-3] * x.shape[-2] if x.ndim == 4 else 1
    if address(x) % ACCESS == 0 and pitch % VECTOR == 0 and image * pitch * ITEMSIZE < REACH:
        return x
    out = empty(x.shape, x.dtype)
    copy_into(out, x)
    return out


def images_at_once(conv: Convolution) -> int:
    """Images that one launch can take."""
    return max(1, ROW_LIMIT // max(conv.height * conv.width, conv.out_height * conv.out_width))


@functools.lru_cache(maxsize=1024)
def choose(conv: Convolution, backward: bool, device: DeviceRecord) -> tuple[HopperTile, int]:
    """The tile that should finish first, and how many of them a block works on."""
    counts = [conv.images * h.count * w.count for h, w in _walks(conv, backward)]
    columns = _columns(conv, backward)

    def time(tile: HopperTile) -> tuple[float, int]:
        tiles = sum(ceil_div(count, tile.rows) for count in counts) * ceil_div(columns, tile.columns)
        rounds = ceil_div(tiles, device.multiprocessors * tile.resident) * tile.resident
        return rounds * tile.rows * tile.columns, -tile.rows * tile.columns

    tile = min(TILES, key=time)
    return tile, 1


@functools.lru_cache(maxsize=1024)
def plan(
    conv: Convolution,
    code: int,
    backward: bool,
    pitches: Pair,
    added: bool,
    device: DeviceRecord,
    chosen: tuple[HopperTile, int] | None = None,
) -> list[Planned]:
    """The launches for a convolution that the family takes: one, or several when there are more than four classes.

    Args:
        pitches: elements per pixel of the source and of the array to be added, of `aligned` arrays.
        added: whether there is one.
        chosen: the tile and the tiles per block; what `choose` says unless given.
    """
    tile, share = chosen or choose(conv, backward, device)
    walks = _walks(conv, backward)
    spread = len(walks) > 1
    launches = []
    for i in _firsts(walks):
        part = walks[i : i + CLASSES]
        views = _views(conv, code, backward, part, pitches if added else (pitches[0], _columns(conv, backward)), tile)
        assert views.legal, (conv, pitches)
        problem = _problem(conv, backward, part, tile, share, device.multiprocessors * tile.resident, added)
        defines = {"DTYPE": code, "BACKWARD": int(backward), "FLAT": int(_flat(conv)), "SPREAD": int(spread)}
        group, tiles = device.multiprocessors * tile.resident, int(problem["tiles"][0])
        grid = tiles // (group * share) * group + min(tiles % (group * share), group)
        launches.append(Planned(grid, tile.threads, views, problem, defines | tile.defines, tile.shared_bytes))
    return launches


def _firsts(walks: list[tuple[Walk, Walk]]) -> range:
    return range(0, len(walks), CLASSES)


def _depth(conv: Convolution, backward: bool) -> int:
    return conv.out_channels if backward else conv.channels


def _columns(conv: Convolution, backward: bool) -> int:
    return conv.channels if backward else conv.out_channels


def _flat(conv: Convolution) -> bool:
    """Whether pixels of source and output are the same."""
    return conv.kernel == conv.stride == (1, 1) and conv.padding == (0, 0)


def _problem(
    conv: Convolution,
    backward: bool,
    walks: list[tuple[Walk, Walk]],
    tile: HopperTile,
    share: int,
    group: int,
    added: bool,
) -> np.ndarray:
    columns, row = _columns(conv, backward), conv.kernel[1]
    table = np.zeros(CLASSES, _CLASS)
    for i, (h, w) in enumerate(walks):
        count = conv.images * h.count * w.count
        walk = h.first, w.first, h.taps, w.taps, h.offset, w.offset, h.tap * row + w.tap
        table[i] = (ceil_div(count, tile.rows), count, h.count, w.count, *walk)
    h, w = walks[0]
    tiles_n = ceil_div(columns, tile.columns)
    return argument(
        _PROBLEM,
        tiles=int(table["tiles"].sum()) * tiles_n,
        share=share,
        group=group,
        tiles_n=tiles_n,
        columns=columns,
        depth=_depth(conv, backward),
        step_h=h.step,
        step_w=w.step,
        delta_h=h.delta,
        delta_w=w.delta,
        tap_step_h=h.tap_step * row,
        tap_step_w=w.tap_step,
        added=added,
        classes=table,
    )


def _views(
    conv: Convolution,
    code: int,
    backward: bool,
    walks: list[tuple[Walk, Walk]],
    pitches: Pair,
    tile: HopperTile,
) -> Views:
    """The structure Maps: filter, then source, output and addend of each class; unused places repeat the first."""
    spread = max(walks[0][0].spread, walks[0][1].spread) > 1
    walks = [*walks, *[walks[0]] * (CLASSES - len(walks) if spread else 0)]
    columns = _columns(conv, backward)

    def source(h: Walk, w: Walk) -> View:
        depth, pixel = _depth(conv, backward), pitches[0] * ITEMSIZE
        if _flat(conv):
            return View(code, (depth, conv.images * h.source * w.source), (pixel,), (DEPTH, tile.rows))
        corners = tuple(zip(w.corners, h.corners, strict=True))
        apart = pixel, w.source * pixel, h.source * w.source * pixel
        sizes = depth, w.source, h.source, conv.images
        return View(code, sizes, apart, (DEPTH, tile.rows), corners, (w.step, h.step))

    def output(h: Walk, w: Walk, pitch: int) -> View:
        height, width = (conv.height, conv.width) if backward else (conv.out_height, conv.out_width)
        pixel = pitch * ITEMSIZE
        if not spread:
            return View(code, (columns, conv.images * height * width), (pixel,), (SLAB, SLAB))
        apart = w.spread * pixel, h.spread * width * pixel, height * width * pixel
        offset = (h.start * width + w.start) * pixel
        sizes, none = (columns, w.count, h.count, conv.images), (0, 0)
        return View(code, sizes, apart, (SLAB, SLAB), (none, none), (1, 1), offset)

    return Views(
        (_filter(conv, code, backward, tile), 0),
        *((source(*pair), 1) for pair in walks),
        *((output(*pair, columns), 2) for pair in walks),
        *((output(*pair, pitches[1]), 3) for pair in walks),
    )


def _filter(conv: Convolution, code: int, backward: bool, tile: HopperTile) -> View:
    taps, row = conv.kernel[0] * conv.kernel[1], conv.channels * ITEMSIZE
    box = (SLAB, 1, DEPTH) if backward else (DEPTH, 1, tile.columns)
    return View(code, (conv.channels, taps, conv.out_channels), (row, taps * row), box)
