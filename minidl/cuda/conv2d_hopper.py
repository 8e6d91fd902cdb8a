"""Convolution and its data gradient on Hopper's matrix units, for 16-bit types; the kernel is in conv2d_hopper.cu.

Everything here is worked out from sizes and the device record; `plan` says in one place when the kernel applies.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from minidl.cuda.conv2d_plan import AxisClass, Convolution, argument, parity_classes, struct
from minidl.cuda.device import DeviceRecord
from minidl.cuda.hopper import View, Views
from minidl.shapes import Pair, ceil_div

__all__ = ["TILES", "HopperTile", "Planned", "plan"]

ARCH = (9, 0)
CLASSES = 4  # of conv2d_hopper.cu
DEPTH = 64  # channels of a stage
SLAB = 64  # rows and columns of an output buffer
ITEMSIZE = 2

# The structures Class and Problem of conv2d_hopper.cu.
_CLASS = struct("", "tiles rows height width first_h first_w taps_h taps_w offset_h offset_w tap")
_PROBLEM = struct(
    "",
    "tiles share tiles_n columns depth step_h step_w delta_h delta_w tap_step_h tap_step_w added",
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
    HopperTile(128, 128, 3, 1, 2),
    HopperTile(128, 256, 4, 1, 1),
    HopperTile(256, 128, 4, 1, 1),
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


class _Axis(NamedTuple):
    """One axis of a class, as the engine walks it: source pixels ``first + i * step``, moved by ``offset + j * delta``
    for tap j, which is the filter's ``tap + j * tap_step``.
    """

    source: int
    count: int
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


def _forward_axis(source: int, count: int, kernel: int, stride: int, padding: int, dilation: int) -> _Axis:
    return _Axis(source, count, -padding, stride, kernel, 0, dilation, 0, 1)


def _backward_axis(source: int, part: AxisClass, stride: int, dilation: int) -> _Axis:
    common = np.gcd(stride, dilation)
    delta, last = int(dilation // common), max(part.taps - 1, 0)
    # The engine moves pixels forward only: the walk starts where the last tap reads.
    first = part.offset - last * delta
    return _Axis(source, part.count, first, 1, part.taps, last * delta, -delta, part.first, int(stride // common))


def _classes(conv: Convolution, backward: bool) -> list[tuple[_Axis, _Axis]]:
    """(height, width) of each class of output pixels: one, or of a strided data gradient several."""
    if not backward:
        axes = zip(
            (conv.height, conv.width), conv.y_shape[1:3], conv.kernel, conv.stride, conv.padding, conv.dilation,
            strict=True,
        )  # fmt: skip
        return [tuple(_forward_axis(*axis) for axis in axes)]
    rest = tuple(zip(conv.y_shape[1:3], conv.stride, conv.dilation, strict=True))
    return [
        tuple(_backward_axis(size, part, *other) for part, (size, *other) in zip(pair, rest, strict=True))
        for pair in parity_classes(conv)
    ]


def choose(conv, backward, classes, columns, depth, device):
    return TILES[0], 1


@functools.lru_cache(maxsize=1024)
def plan(
    conv: Convolution,
    code: int,
    backward: bool,
    pitches: tuple[int, int],
    vectors: tuple[int, ...],
    added: bool,
    device: DeviceRecord,
    forced: tuple[HopperTile, int] | None = None,
) -> Planned | None:
    """The launch, or None where this kernel does not apply and the generic one has to do.

    It applies on compute capability 9.0 to one group of 16-bit arrays whose rows are all aligned to 16 bytes (so that
    channels and filters are multiples of eight), as far as the copy engine can walk them (`View.legal`, offsets of
    taps below 255, fewer than 2**31 pixels), and to data gradients of strides up to 2.

    Args:
        pitches: elements per pixel of the source and of the array to be added.
        vectors: widest legal vectors of source, filters and output (with what is added).
    """
    if device.arch != ARCH or code not in (1, 2) or conv.groups != 1 or min(vectors) * ITEMSIZE < 16:
        return None
    classes = _classes(conv, backward)
    if len(classes) > CLASSES:
        return None
    columns, depth = (conv.channels, conv.out_channels) if backward else (conv.out_channels, conv.channels)
    tile, share = forced or choose(conv, backward, classes, columns, depth, device)
    if conv.images * max(conv.height * conv.width, conv.out_height * conv.out_width) + tile.rows >= 2**31:
        return None
    if any(max(axis.offset, (axis.taps - 1) * axis.delta) > 254 for pair in classes for axis in pair):
        return None
    spread = len(classes) > 1
    flat = conv.kernel == conv.stride == (1, 1) and conv.padding == (0, 0)
    views = Views(
        (_filter(conv, code, backward, tile), 0),
        *_each((_source(conv, code, pair, flat, depth, pitches[0], tile) for pair in classes), spread, 1),
        *_each((_output(conv, code, backward, part, columns, columns) for part in _parts(conv, backward)), spread, 2),
        *_each((_output(conv, code, backward, part, columns, pitches[1] or columns)
                for part in _parts(conv, backward)), spread, 3),
    )  # fmt: skip
    if not views.legal:
        return None
    tiles_n = ceil_div(columns, tile.columns)
    table = np.zeros(CLASSES, _CLASS)
    for i, (h, w) in enumerate(classes):
        rows = conv.images * h.count * w.count
        tap = h.tap * conv.kernel[1] + w.tap
        table[i] = (
            ceil_div(rows, tile.rows), rows, h.count, w.count, h.first, w.first, h.taps, w.taps, h.offset, w.offset, tap
        )  # fmt: skip
    h, w = classes[0]
    tiles = int(table["tiles"].sum()) * tiles_n
    problem = argument(
        _PROBLEM,
        tiles=tiles,
        share=share,
        tiles_n=tiles_n,
        columns=columns,
        depth=depth,
        step_h=h.step,
        step_w=w.step,
        delta_h=h.delta,
        delta_w=w.delta,
        tap_step_h=h.tap_step * conv.kernel[1],
        tap_step_w=w.tap_step,
        added=added,
        classes=table,
    )
    defines = {"DTYPE": code, "BACKWARD": int(backward), "FLAT": int(flat), "SPREAD": int(spread)} | tile.defines
    return Planned(ceil_div(tiles, share), tile.threads, views, problem, defines, tile.shared_bytes)


def _each(views, spread: bool, index: int):
    """As many views as the kernel has places for; classes that are not there repeat the first."""
    views = list(views)
    return [(view, index) for view in (*views, *[views[0]] * (CLASSES - len(views) if spread else 0))]


def _filter(conv: Convolution, code: int, backward: bool, tile: HopperTile) -> View:
    taps = conv.kernel[0] * conv.kernel[1]
    row = conv.channels * ITEMSIZE
    box = (SLAB, 1, DEPTH) if backward else (DEPTH, 1, tile.columns)
    return View(code, (conv.channels, taps, conv.out_channels), (row, taps * row), box)


def _source(
    conv: Convolution, code: int, pair: tuple[_Axis, _Axis], flat: bool, depth: int, pitch: int, tile: HopperTile
) -> View:
    h, w = pair
    pixel = pitch * ITEMSIZE
    if flat:
        return View(code, (depth, conv.images * h.source * w.source), (pixel,), (DEPTH, tile.rows))
    corners = tuple(zip(w.corners, h.corners, strict=True))
    pitches = (pixel, w.source * pixel, h.source * w.source * pixel)
    sizes = (depth, w.source, h.source, conv.images)
    return View(code, sizes, pitches, (DEPTH, tile.rows), corners, (w.step, h.step))


def _parts(conv: Convolution, backward: bool) -> list[tuple[AxisClass, AxisClass]]:
    return parity_classes(conv) if backward else [None]


def _output(
    conv: Convolution,
    code: int,
    backward: bool,
    part: tuple[AxisClass, AxisClass] | None,
    columns: int,
    pitch: int,
) -> View:
    height, width = (conv.height, conv.width) if backward else (conv.out_height, conv.out_width)
    pixel = pitch * ITEMSIZE
    if part is None or conv.stride == (1, 1):
        return View(code, (columns, conv.images * height * width), (pixel,), (SLAB, SLAB))
    h, w = part
    pitches = (conv.stride[1] * pixel, conv.stride[0] * width * pixel, height * width * pixel)
    offset = (h.start * width + w.start) * pixel
    return View(
        code, (columns, w.count, h.count, conv.images), pitches, (SLAB, SLAB), ((0, 0), (0, 0)), (1, 1), offset
    )
