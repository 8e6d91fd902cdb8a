"""The grid of points that the weight gradient's halo kernel on Hopper, conv2d_weight_halo.cu, lays over both images."""

from __future__ import annotations

import functools
from typing import NamedTuple

from minidl.cuda.convolution.conv2d_plan import Convolution
from minidl.cuda.hopper import View, Views
from minidl.shapes import Pair

SPAN = 64  # channels, filters, and pixels of a block of a stage; of float32 half as many
ROW_BYTES = 128  # of a block
ITEMSIZE = 2
SHARED_BYTES = 227 * 1024  # that a block may have


class HaloTile(NamedTuple):
    """64 filters x 9 taps x 64 channels, by conv2d_weight_halo.cu. ``stages``: the macro STAGES; ``step``: as of
    `WeightTile` (conv2d_weight_tiles.py).
    """

    stages: int
    step: float
    name, threads, resident, size = "halo", 512, 1, (SPAN, 9 * SPAN)

    @property
    def defines(self) -> dict[str, int]:
        return {"STAGES": self.stages}


HALO = HaloTile(5, 0.689)
_HALO_BYTES = SPAN * SPAN * ITEMSIZE  # of a stage of dy or x


class Grid(NamedTuple):
    """The grid of points that both arrays are laid over: points per image along (h, w), points from tap to tap."""

    size: Pair
    tap: Pair

    @property
    def ahead(self) -> int:
        """Stages of x that one of dy reaches beyond its own."""
        return (SPAN - 1 + 2 * sum(self.tap)) // SPAN

    def shared_bytes(self, stages: int) -> int:
        """Stages of both arrays, later reused for the sums."""
        return max((self.ahead + 2 * stages + 1) * _HALO_BYTES, 4 * SPAN * 9 * SPAN) + 1024


@functools.lru_cache(maxsize=1024)
def halo(conv: Convolution) -> Grid | None:
    """The grid; None where there is none: another kernel, a stride, padding beyond it, too wide for shared memory."""
    if conv.kernel != (3, 3) or conv.stride != (1, 1) or conv.dilation[1] > 24:
        return None
    size = tuple(
        max(image + max(padding, outputs - 1 + 2 * step - padding - (image - 1)), outputs)
        for image, outputs, padding, step in zip(
            (conv.height, conv.width), conv.y_shape[1:3], conv.padding, conv.dilation, strict=True
        )
    )
    grid = Grid(size, (conv.dilation[0] * size[1], conv.dilation[1]))
    fits = grid.shared_bytes(HALO.stages) <= SHARED_BYTES and conv.images * size[0] * size[1] < 2**30
    dense = conv.channels, conv.out_channels
    return grid if fits and halo_views(conv, 1, dense, grid).legal else None


def halo_views(conv: Convolution, code: int, pitches: tuple[int, int], grid: Grid) -> Views:
    """Of dy and of x, walked over the grid."""
    source = conv.images, conv.height, conv.width, conv.channels
    return Views(
        (_on_grid(code, conv.y_shape, pitches[1], (0, 0), grid.size), 0),
        (_on_grid(code, source, pitches[0], conv.padding, grid.size), 1),
    )


def _on_grid(code: int, shape: tuple[int, ...], pitch: int, before: Pair, grid: Pair) -> View:
    """An image as one walks it over a grid of points, of which some lie before and some behind it."""
    images, height, width, channels = shape
    pixel = pitch * ITEMSIZE
    first = (-before[1], -before[0])
    last = (grid[1] - before[1] - width, grid[0] - before[0] - height)
    pitches = (pixel, width * pixel, height * width * pixel)
    return View(code, (channels, width, height, images), pitches, (SPAN, SPAN), (first, last))
