"""How the copy engine walks the pixels of a convolution, forward or data gradient: shared by the kernels for Hopper."""

from __future__ import annotations

import functools
from math import gcd
from typing import NamedTuple

import numpy as np

from minidl.cuda.conv2d_plan import AxisClass, Convolution, parity_classes
from minidl.cuda.hopper import View, Views
from minidl.shapes import Pair

__all__ = [
    "DEPTH",
    "ITEMSIZE",
    "Planned",
    "Walk",
    "blocks",
    "columns_of",
    "depth_of",
    "filter_view",
    "is_flat",
    "walks_of",
]

DEPTH = 64  # channels of a stage
BLOCK = 64  # columns of a box of filters that are read across
ITEMSIZE = 2


class Planned(NamedTuple):
    """A launch of ``<stem>_kernel`` of ``<stem>.cu``.

    ``views``: of filters, source, output, what is added to it, and of a batch norm below its input and its ReLU's
    output. ``patches``: parts of the output that leave two values per channel.
    """

    stem: str
    grid: int
    block: int
    views: Views
    problem: np.ndarray
    defines: dict[str, int]
    shared: int
    patches: int


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
def walks_of(conv: Convolution, backward: bool) -> list[tuple[Walk, Walk]]:
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


def blocks(tiles: int, share: int, group: int) -> int:
    """Blocks of a launch: whole groups whose blocks work on ``share`` tiles in turn, and what the last one needs."""
    whole, rest = divmod(tiles, share * group)
    return whole * group + min(rest, group)


def depth_of(conv: Convolution, backward: bool) -> int:
    """Channels of the source, which are summed over."""
    return conv.out_channels if backward else conv.channels


def columns_of(conv: Convolution, backward: bool) -> int:
    """Channels of the output."""
    return conv.channels if backward else conv.out_channels


def is_flat(conv: Convolution) -> bool:
    """Whether pixels of source and output are the same."""
    return conv.kernel == conv.stride == (1, 1) and conv.padding == (0, 0)


def filter_view(conv: Convolution, code: int, backward: bool, columns: int) -> View:
    """Filters (C, taps, K) in boxes of a stage and so many output channels; of a data gradient, of 64 each."""
    taps, row = conv.kernel[0] * conv.kernel[1], conv.channels * ITEMSIZE
    box = (BLOCK, 1, DEPTH) if backward else (DEPTH, 1, columns)
    return View(code, (conv.channels, taps, conv.out_channels), (row, taps * row), box)
