"""Convolution without stride on Hopper: the source pixels of a filter row are loaded once for all of its taps.

The kernel is in conv2d_strip.cu; conv2d_hopper_tiles.py says when it is taken.
"""

from __future__ import annotations

from typing import NamedTuple

from minidl.cuda.conv2d_plan import Convolution, argument, struct
from minidl.cuda.conv2d_walk import (
    DEPTH,
    ITEMSIZE,
    STAGE_ROW,
    Planned,
    blocks,
    columns_of,
    depth_of,
    filter_view,
    walks_of,
)
from minidl.cuda.device import DeviceRecord
from minidl.cuda.hopper import View, Views
from minidl.shapes import Pair, ceil_div

__all__ = ["STRIP_TILES", "StripTile", "plan_strip", "points_of", "strip_applies"]

SLAB = 64  # points, and channels, of an output buffer
SLABS = 2  # output buffers of each of two warpgroups
FURTHER = 8  # points of a strip beyond those of its tile
STORED = 16  # rows of a slab that a warpgroup writes at a time
WARPGROUPS = 2  # that share the points of a tile

# The structure Problem of conv2d_strip.cu.
_PROBLEM = struct(
    "",
    "tiles share group tiles_n rows height width outputs columns depth taps_h taps_w images source_h source_w first_h "
    "first_w offset_h offset_w delta_h delta_w further_h further_w added",
)


class StripTile(NamedTuple):
    """Points x columns of the product that a block computes at a time.

    Attributes:
        rows, columns, strips, stages: the macros TILE_M, TILE_N, STRIPS and STAGES.
        step, rest: as of conv2d_hopper.py's ``HopperTile``; a step is a tap of a chunk of channels.
    """

    rows: int
    columns: int
    strips: int
    stages: int
    step: float
    rest: float

    @property
    def name(self) -> str:
        """Among all tiles."""
        return f"strip{self.rows}x{self.columns}"

    @property
    def fetched(self) -> int:
        """Rows that a step takes: filters, and its share of a strip of three taps."""
        return self.columns + self.rows // 3

    @property
    def shared_bytes(self) -> int:
        rows = self.strips * (self.rows + FURTHER) + self.stages * self.columns + 2 * SLABS * SLAB
        return STAGE_ROW * rows + 1024

    threads = 384
    resident = 1


STRIP_TILES = (
    StripTile(256, 128, 3, 4, 0.6, 2.4),
    StripTile(128, 256, 3, 4, 0.6, 2.4),
    StripTile(128, 128, 4, 5, 0.34, 0.9),
)


def _width(conv: Convolution, backward: bool) -> int:
    """Points of a line: as much padding as on either side of a line of the source is shared by two."""
    ((_, w),) = walks_of(conv, backward)
    before, behind = -w.first, w.first + w.count - 1 + w.farthest - (w.source - 1)
    return max(w.count, w.source + max(before, behind))


def strip_applies(conv: Convolution, backward: bool) -> bool:
    """Whether the kernel can do a convolution of 16 bits that the family takes, where taps share source pixels."""
    reach = (conv.kernel[1] - 1) * conv.dilation[1]
    near = conv.stride == (1, 1) and 0 < reach <= FURTHER and conv.padding[1] <= reach
    return near and points_of(conv, backward) < 2**31 - 1024


def points_of(conv: Convolution, backward: bool) -> int:
    """Rows of the product."""
    ((h, _),) = walks_of(conv, backward)
    return conv.images * h.count * _width(conv, backward)


def plan_strip(
    conv: Convolution,
    code: int,
    backward: bool,
    pitches: Pair,
    added: bool,
    device: DeviceRecord,
    tile: StripTile,
    share: int,
    statistics: bool = False,
    masked: int = 0,
    normalized: bool = False,
) -> Planned:
    """The launch; arguments as of conv2d_hopper.py's ``plan``."""
    ((h, w),) = walks_of(conv, backward)
    columns, depth, width = columns_of(conv, backward), depth_of(conv, backward), _width(conv, backward)
    points, tiles_n = points_of(conv, backward), ceil_div(columns, tile.columns)
    tiles_m, group = ceil_div(points, tile.rows), device.multiprocessors
    problem = argument(
        _PROBLEM,
        tiles=tiles_m * tiles_n,
        share=share,
        group=group,
        tiles_n=tiles_n,
        rows=points,
        height=h.count,
        width=width,
        outputs=w.count,
        columns=columns,
        depth=depth,
        taps_h=h.taps,
        taps_w=w.taps,
        images=conv.images,
        source_h=h.source,
        source_w=w.source,
        first_h=h.first,
        first_w=w.first,
        offset_h=h.offset,
        offset_w=w.offset,
        delta_h=h.delta,
        delta_w=w.delta,
        further_h=STORED // width,
        further_w=STORED % width,
        added=added,
    )

    def image(channels: int, size: Pair, pitch: int, rows: int, first: Pair) -> View:
        """Walked over the points, of which the first is pixel ``first``."""
        pixel = pitch * ITEMSIZE
        apart = pixel, size[1] * pixel, size[0] * size[1] * pixel
        last = first[1] + width - size[1], first[0] + h.count - size[0]
        sizes = channels, size[1], size[0], conv.images
        return View(code, sizes, apart, (DEPTH, rows), ((first[1], first[0]), last))

    output = columns, (h.count, w.count)
    source = [image(depth, (h.source, w.source), pitches[0], rows, (h.first, w.first)) for rows in (tile.rows, FURTHER)]
    views = Views(
        (filter_view(conv, code, backward, tile.columns), 0),
        *((view, 1) for view in source),
        (image(*output, pitches[1] if added else columns, SLAB, (0, 0)), 3),
        *((image(*output, columns, SLAB, (0, 0)), 4 + i) for i in range(masked)),
    )
    assert views.legal, (conv, pitches)
    defines = {"DTYPE": code, "BACKWARD": int(backward), "STATISTICS": int(statistics), "MASKED": masked}
    defines |= {"NORMALIZED": int(normalized), "TILE_M": tile.rows, "TILE_N": tile.columns}
    defines |= {"STRIPS": tile.strips, "STAGES": tile.stages, "SLABS": SLABS}
    grid, patches = blocks(tiles_m * tiles_n, share, group), tiles_m * WARPGROUPS
    return Planned("conv2d_strip", grid, tile.threads, views, problem, defines, tile.shared_bytes, patches)
