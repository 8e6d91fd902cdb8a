"""How the copy engine walks the pixels of a convolution, forward or data gradient: shared by the kernels for Hopper."""

from __future__ import annotations

import functools
from math import gcd
from typing import NamedTuple

import numpy as np

from minidl.cuda.convolution.conv2d_plan import AxisClass, Convolution, parity_classes
from minidl.cuda.hopper import TF32, View, Views
from minidl.shapes import Pair, ceil_div, round_up

STAGE_ROW = 128  # bytes: the channels of a pixel, or of a filter, in a stage
PRODUCT = 32  # bytes: of them, what one product takes
LINE, SECTOR = 128, 32  # bytes of the second-level cache
BLOCK = 64  # columns of a box of filters that are read across
PAIRED = 32  # channels of groups of which two share a stage
CLASSES = 4  # parity classes of one launch, at most
ITEMSIZE, DEPTH = 2, 64  # of 16-bit types: bytes of an element, channels of a stage


class Planned(NamedTuple):
    """A launch of ``<stem>_kernel`` of ``<stem>.cu``.

    ``views``: of filters, source, output, what is added to it, and of a batch norm below its input and its ReLU's
    output. ``patches``: parts of the output that leave two values per channel. ``several``: whether blocks work on
    several tiles, whose numbers they take from a counter.
    """

    stem: str
    grid: int
    block: int
    views: Views
    problem: np.ndarray
    defines: dict[str, int]
    shared: int
    patches: int
    several: bool


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
    """Blocks of a launch: whole groups whose blocks leave after ``share`` tiles each, and what the last one needs."""
    whole, rest = divmod(tiles, share * group)
    return whole * group + min(rest, group)


def bundle_of(conv: Convolution) -> int:
    """Groups that a stage has the channels of: two of 32 channels, else one."""
    return 2 if conv.groups % 2 == 0 and conv.channels == conv.out_channels == PAIRED * conv.groups else 1


def depth_of(conv: Convolution, backward: bool) -> int:
    """Channels of the source that are summed over, or lie in a stage: those of a group, or of a bundle."""
    return (conv.out_channels if backward else conv.channels) // conv.groups * bundle_of(conv)


def steps_of(conv: Convolution, backward: bool, code: int) -> int:
    """Products along the depth of a stage, of 32 bytes each: all four but where the whole depth is less."""
    return min(STAGE_ROW // PRODUCT, ceil_div(depth_of(conv, backward) * itemsize_of(code), PRODUCT))


def tail_of(conv: Convolution, backward: bool, code: int) -> int:
    """Products of a depth's last stage that the one before it has done: it begins early, and the engine fetches what
    there is in place of zeros. None where products would be of channels of both.
    """
    depth, channels, product = depth_of(conv, backward), STAGE_ROW // itemsize_of(code), PRODUCT // itemsize_of(code)
    return -depth % channels // product if conv.groups == 1 and depth > channels and depth % product == 0 else 0


def columns_of(conv: Convolution, backward: bool) -> int:
    """Channels of the output."""
    return conv.channels if backward else conv.out_channels


def group_columns_of(conv: Convolution, backward: bool) -> int:
    """Channels of the output that see the same ones of the source, or those of a bundle."""
    return columns_of(conv, backward) // conv.groups * bundle_of(conv)


@functools.lru_cache(maxsize=1024)
def reads(channels: int, itemsize: int) -> tuple[float, bool]:
    """What makes stages of a dense array slow: ends of cache lines within a pixel's stage, on average; and whether
    pixels start within sectors of the cache. Neither, where a pixel's stages are whole.
    """
    pixel = channels * itemsize
    ends = [
        (first + min(STAGE_ROW, pixel - begin) - 1) // LINE - first // LINE
        for begin in range(0, pixel, STAGE_ROW)
        for first in (begin + i * pixel for i in range(LINE // gcd(LINE, pixel)))
    ]
    return sum(ends) / len(ends), pixel % SECTOR != 0


def is_flat(conv: Convolution) -> bool:
    """Whether pixels of source and output are the same."""
    return conv.kernel == conv.stride == (1, 1) and conv.padding == (0, 0)


def is_one_product(conv: Convolution, code: int) -> bool:
    """Whether all pixels are rows of one product of 16-bit numbers, not too many for the copy engine's maps."""
    return code > 0 and is_flat(conv) and conv.groups == 1 and 0 < conv.pixels < 2**30


def itemsize_of(code: int) -> int:
    """Bytes of an element, by the macro DTYPE."""
    return ITEMSIZE if code else 4


def _filter_box(conv: Convolution, code: int, backward: bool, columns: int) -> tuple[int, int, int]:
    """(channels, taps, filters) of a box. Of what is not there no more than a product needs: zeros cost the engine more
    than values would.
    """
    if backward and code:
        return BLOCK, 1, min(DEPTH, round_up(depth_of(conv, backward), PRODUCT // ITEMSIZE))
    return STAGE_ROW // itemsize_of(code), 1, min(columns, round_up(columns_of(conv, backward), 8))


def filter_rows(conv: Convolution, code: int, backward: bool, columns: int) -> int:
    """Rows of 128 bytes that the filters of a stage take, for ``columns`` of a tile."""
    rows = _filter_box(conv, code, backward, columns)[2]
    return ceil_div(min(columns, columns_of(conv, backward)), BLOCK) * rows if backward and code else rows


def filter_view(conv: Convolution, code: int, backward: bool, columns: int) -> View:
    """Filters in boxes of a stage and so many output channels.

    Those of a data gradient are read across, in boxes of 64; in float32 they have been turned. Of bundles taps follow
    each other along the channels, so that boxes are full.
    """
    taps = conv.kernel[0] * conv.kernel[1]
    inner, outer = (conv.out_channels, conv.channels) if backward and not code else (conv.channels, conv.out_channels)
    inner //= conv.groups
    if bundle_of(conv) > 1:
        inner, taps = inner * taps, 1
    row = inner * itemsize_of(code)
    box = _filter_box(conv, code, backward, columns)
    return View(code or TF32, (inner, taps, outer), (row, taps * row), box)
