"""Convolution without stride on Hopper, for wide images: windows with a halo, loaded once for all taps.

The kernel is in conv2d_halo.cu; conv2d_hopper.py says when it is taken.
"""

from __future__ import annotations

from typing import NamedTuple

from minidl.cuda.convolution.conv2d_plan import Convolution, argument, struct
from minidl.cuda.convolution.conv2d_walk import (
    STAGE_ROW,
    Planned,
    Walk,
    blocks,
    columns_of,
    depth_of,
    filter_rows,
    filter_view,
    itemsize_of,
    steps_of,
    walks_of,
)
from minidl.cuda.device import DeviceRecord
from minidl.cuda.hopper import BYTES, TF32, View, Views
from minidl.cuda.norm.signs import CHUNK, signs_pitch
from minidl.shapes import Pair, ceil_div, round_up

WIDTH = 8  # pixels of a window: one group of rows of an operand
MOST_STAGES, FEWEST_STAGES = 9, 3
WINDOWS = 2  # of a tile, one for each warpgroup
PATCHES = 2 * WINDOWS
ATOM = 1024  # bytes: alignment of a patch

# The structure Problem of conv2d_halo.cu.
_PROBLEM = struct(
    "",
    "tiles share group tiles_n windows down across height width columns depth taps_h taps_w source_h source_w "
    "first_h first_w offset_h offset_w delta_h delta_w line patch added stage_bytes",
)


class HaloTile(NamedTuple):
    """What a block computes at a time: 64 output channels of a pair of windows.

    Attributes:
        window: the macro WINDOW, lines of a window.
        step, rest, sums: as of ``HopperTile``.
    """

    window: int
    step: float
    rest: float
    sums: float

    @property
    def name(self) -> str:
        """Among all tiles."""
        return f"halo{self.window}"

    columns = 64
    windows = WINDOWS
    threads = 384
    resident = 1
    parts = 1


HALO_TILES = (HaloTile(28, 0.55, 0.9, 0.3), HaloTile(32, 0.62, 0.9, 0.3))


def _patch(tile: HaloTile, walk: tuple[Walk, Walk]) -> Pair:
    """(lines, pixels of a line) of a window with its halo."""
    h, w = ((axis.taps - 1) * abs(axis.delta) for axis in walk)
    return tile.window + h, WIDTH + w


def _shared(tile: HaloTile, walk: tuple[Walk, Walk], stages: int) -> int:
    lines, line = _patch(tile, walk)
    return PATCHES * round_up(lines * line * STAGE_ROW, ATOM) + stages * tile.columns * STAGE_ROW + ATOM


def _stages(tile: HaloTile, walk: tuple[Walk, Walk], device: DeviceRecord) -> int:
    """Stages of filters that shared memory has room for beside the patches."""
    fits = (n for n in range(MOST_STAGES, 0, -1) if _shared(tile, walk, n) <= device.shared_per_block)
    return next(fits, 0)


def halo_applies(conv: Convolution, backward: bool, tile: HaloTile, device: DeviceRecord) -> bool:
    """Whether a tile can do a convolution that the family takes."""
    walks = walks_of(conv, backward)
    if len(walks) > 1 or conv.groups > 1 or conv.stride != (1, 1) or conv.kernel == (1, 1):
        return False
    return max(_patch(tile, walks[0])) <= 256 and _stages(tile, walks[0], device) >= FEWEST_STAGES


def windows_of(conv: Convolution, backward: bool, tile: HaloTile) -> tuple[int, int, int]:
    """Windows of all images, down one and across."""
    ((h, w),) = walks_of(conv, backward)
    down, across = ceil_div(h.count, tile.window), ceil_div(w.count, WIDTH)
    return conv.images * down * across, down, across


def plan_halo(
    conv: Convolution,
    code: int,
    backward: bool,
    pitches: tuple[int, ...],
    added: bool,
    device: DeviceRecord,
    tile: HaloTile,
    share: int,
    statistics: bool = False,
    masked: int = 0,
    normalized: int = 0,
    relu: bool = False,
    written: int = 0,
    signed: bool = False,
) -> Planned:
    """The launch; arguments as of conv2d_hopper.py's ``plan``. ``signed``: the last array read below is of signs."""
    ((h, w),) = walks_of(conv, backward)
    columns, stages = columns_of(conv, backward), _stages(tile, (h, w), device)
    (lines, line), (windows, down, across) = _patch(tile, (h, w)), windows_of(conv, backward, tile)
    tiles_n = ceil_div(columns, tile.columns)
    tiles, group = ceil_div(windows, tile.windows) * tiles_n, device.multiprocessors
    problem = argument(
        _PROBLEM,
        tiles=tiles,
        share=share,
        group=group,
        tiles_n=tiles_n,
        windows=windows,
        down=down,
        across=across,
        height=h.count,
        width=w.count,
        columns=columns,
        depth=depth_of(conv, backward),
        taps_h=h.taps,
        taps_w=w.taps,
        source_h=h.source,
        source_w=w.source,
        first_h=h.first,
        first_w=w.first,
        offset_h=h.offset,
        offset_w=w.offset,
        delta_h=h.delta,
        delta_w=w.delta,
        line=line,
        patch=round_up(lines * line * STAGE_ROW, ATOM),
        added=added,
        stage_bytes=STAGE_ROW * filter_rows(conv, code, backward, tile.columns),
    )

    itemsize = itemsize_of(code)
    patch = STAGE_ROW // itemsize, line, lines

    def image(kind: int, channels: int, height: int, width: int, pitch: int, box: tuple[int, ...]) -> View:
        pixel = pitch * (1 if kind == BYTES else itemsize)
        apart = pixel, width * pixel, height * width * pixel
        return View(kind, (channels, width, height, conv.images), apart, (*box, 1))

    def output(pitch: int) -> View:
        return image(code, columns, h.count, w.count, pitch, (STAGE_ROW // itemsize, WIDTH, tile.window))

    below = [output(pitch) for pitch in pitches[2:]]
    if signed:
        row = signs_pitch(columns)
        below[-1] = image(BYTES, row, h.count, w.count, row, (CHUNK, WIDTH, tile.window))
    views = Views(
        (filter_view(conv, code, backward, tile.columns), 0),
        (image(code or TF32, depth_of(conv, backward), h.source, w.source, pitches[0], patch), 1),
        (output(written or columns), 2),
        (output(pitches[1] if added else columns), 3),
        *((view, 4 + i) for i, view in enumerate(below)),
    )
    assert views.legal, (conv, pitches)
    defines = {"DTYPE": code, "BACKWARD": int(backward), "WINDOW": tile.window, "STAGES": stages}
    defines |= {"PATCHES": PATCHES, "STEPS": steps_of(conv, backward, code)}
    defines |= {"STATISTICS": int(statistics), "MASKED": masked}
    defines |= {"NORMALIZED": int(normalized), "RELU": int(relu)}
    grid, shared = blocks(tiles, share, group), _shared(tile, (h, w), stages)
    return Planned("conv2d_halo", grid, tile.threads, views, problem, defines, shared, windows, grid < tiles)
