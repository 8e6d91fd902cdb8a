"""Tiles of conv2d_hopper.cu and conv2d_halo.cu: what they take of a multiprocessor, and which should finish first."""

from __future__ import annotations

import functools
import heapq
import math
from typing import NamedTuple

import numpy as np

from minidl.cuda.convolution.conv2d_family import Choice
from minidl.cuda.convolution.conv2d_halo import HALO_TILES, HaloTile, halo_applies, windows_of
from minidl.cuda.convolution.conv2d_plan import Convolution
from minidl.cuda.convolution.conv2d_walk import (
    CLASSES,
    DEPTH,
    STAGE_ROW,
    columns_of,
    depth_of,
    filter_rows,
    group_columns_of,
    itemsize_of,
    reads,
    tail_of,
    walks_of,
)
from minidl.cuda.device import BUILT_IN, DeviceRecord
from minidl.shapes import ceil_div

SLAB = 64  # columns of an output buffer of 16-bit values, and rows unless swapped
BARRIERS, AFFINE, ATOM = 256, 512, 1024  # bytes: of barriers, of what a stage's channels need to be normalised


class HopperTile(NamedTuple):
    """Rows x columns of the product that a block computes at a time.

    Attributes:
        rows, columns, stages, slabs, resident: the macros TILE_M, TILE_N, STAGES, SLABS and RESIDENT.
        step, rest: microseconds that one stage takes of a multiprocessor, and what a tile costs beside its stages; as
            measured on an H200 over the layers of ResNet-50, VGG-16 and U-Net and over 50 other shapes in bfloat16.
        sums: what of these it takes besides to take sums of what it writes.
        parts: the macro CUT, blocks that share the depth of a tile.
        swapped: the macro SWAPPED, whether columns come first in the product.
    """

    rows: int
    columns: int
    stages: int
    slabs: int
    resident: int
    step: float
    rest: float
    sums: float
    parts: int = 1
    swapped: int = 0

    @property
    def name(self) -> str:
        """Among all tiles: ``128x256x4``, with ``*2`` for two blocks on a multiprocessor, ``/2`` for two parts, ``T``
        for a swapped one."""
        beside, parts = f"*{self.resident}" * (self.resident > 1), f"/{self.parts}" * (self.parts > 1)
        return f"{self.rows}x{self.columns}x{self.stages}{beside}{parts}{'T' * self.swapped}"

    @property
    def own(self) -> int:
        """Columns that a block finishes."""
        return self.columns // self.parts

    @property
    def fetched(self) -> int:
        """Rows of both operands that a stage takes."""
        return self.rows + self.columns

    @property
    def warpgroups(self) -> int:
        """That share the rows, or the columns of a swapped tile."""
        return self.columns // SLAB if self.swapped else {64: 1, 192: 3}.get(self.rows, 2)

    @property
    def patches(self) -> int:
        """Of its rows, those whose sums are taken apart."""
        return 1 if self.swapped else self.warpgroups

    @property
    def slab(self) -> int:
        """Rows of an output buffer, of 128 bytes."""
        return self.rows if self.swapped else SLAB

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups + (128 if self.resident == 1 and self.warpgroups > 1 else 32)

    @property
    def takes_pairs(self) -> bool:
        """Whether there are stages for what the sums of two batch norms read of a tile, beside that of signs, which is
        kept until the last slab (conv2d_hopper_below.cuh)."""
        slabs = 1 if self.swapped else self.rows // self.warpgroups // SLAB * (self.own // SLAB)
        together = 2 if slabs > 1 and 2 * self.warpgroups * self.slab <= self.fetched else 1
        return 2 * ceil_div(slabs, together) < self.stages

    def shared_bytes(self, normalized: bool = False) -> int:
        """Of stages, slabs and barriers; beside the stages of a normalised input lies what its channels need."""
        beside = BARRIERS + AFFINE * self.stages if normalized else ATOM
        sent = (self.parts - 1) * self.rows * self.own * 4
        return STAGE_ROW * (self.stages * self.fetched + self.warpgroups * self.slabs * self.slab) + sent + beside

    @property
    def defines(self) -> dict[str, int]:
        return {
            "TILE_M": self.rows, "TILE_N": self.columns, "STAGES": self.stages, "SLABS": self.slabs,
            "RESIDENT": self.resident, "CUT": self.parts, "SWAPPED": self.swapped,
        }  # fmt: skip


TILES = (
    HopperTile(128, 256, 4, 2, 1, 0.64, 2.4, 0.5),
    HopperTile(256, 128, 4, 2, 1, 0.64, 2.4, 0.5),
    HopperTile(128, 192, 4, 3, 1, 0.54, 1.3, 0.8),
    HopperTile(192, 128, 4, 2, 1, 0.5, 0.9, 0.5),
    HopperTile(256, 64, 4, 2, 1, 0.42, 1.0, 0.5),
    HopperTile(128, 128, 5, 4, 1, 0.38, 0.9, 0.5),
    HopperTile(128, 128, 3, 1, 2, 0.37, 0.55, 0.2),
    HopperTile(128, 64, 4, 1, 2, 0.25, 0.33, 0.1),
)
# For what fills no more than one round of such blocks: more multiprocessors fetch. Of 64 images at 7x7 pixels 1152-192
# takes an H200 7.9 us for 9.2, 320-1280, data gradient, 8.7 for 10.1. Tried, each slower: 128x64 and 64x128 of eight
# stages, 64x64 of twelve; blocks of a cluster with neighbouring columns that fetch a share of their pixels each, for
# all of them (1152-192 two 9.3 us, four 9.2). Beside it 64x192 of six was 4 % faster on 7x7 pixels (960-160 of 128
# images 8.3 us for 9.7), but taken by the model where it is slower, too: 1432-464, 1x1 with a stride of two, at 93x92
# pixels by 44 %.
SMALL = HopperTile(64, 64, 6, 1, 2, 0.17, 0.0, 0.1)
# For what fills no more than one round of such blocks, each alone on its multiprocessor: products of 64 columns by any
# multiple of 16 rows, so that as many rows can be taken as leave few multiprocessors without a tile and none with two.
# Steps and rest after 84 layers of networks and random shapes. Others were timed there as well, of 96, 128 and 144 rows
# by 64 columns and of 80 by 128: without them the fastest is 0.2 % slower.
SWAPPED = (
    HopperTile(80, 64, 8, 1, 1, 0.23, 0.7, 0.3, swapped=1),
    HopperTile(112, 64, 8, 1, 1, 0.28, 0.7, 0.3, swapped=1),
    HopperTile(160, 64, 7, 1, 1, 0.35, 0.7, 0.3, swapped=1),
    HopperTile(96, 128, 7, 1, 1, 0.35, 0.9, 0.3, swapped=1),
    HopperTile(112, 128, 6, 1, 1, 0.375, 0.9, 0.3, swapped=1),
)
# The one whose depth a cluster of two shares, for what is deep and fills no more than one round of such blocks: where
# many multiprocessors have none, a stage comes sooner.
PAIRED = HopperTile(128, 128, 5, 2, 1, 0.31, 0.9, 0.5, 2)
# For a normalised input and few stages to a tile: all slabs leave at once, and what comes next has longer for it.
ROOMY = HopperTile(128, 256, 3, 4, 1, 0.65, 1.0, 1.5)

# Of the same measurements: bytes per microsecond read and written; a block without another one beside it to hide its
# latencies, against two; a launch.
READ, WRITTEN = 4.9e6, 3.5e6
ALONE, START = 1.3, 3.0
# Arithmetic and memory traffic take together the root of the sum of their powers: the higher the power, the more of the
# shorter one is hidden. It falls with the rows of pixels that a multiprocessor has under way, which come from memory
# where filters come from the L2 cache: 1 + BESIDE / rows, 3.3 for tiles of 128 rows and 2.2 for 256 (1x1 1024-256 at
# 14x14 pixels in TF32: 128x256 84 us, 256x128 89). OF_WINDOWS: that of windows. EXPOSED: of fetching rows that lie in
# two lines, what memory traffic does not hide. WIDE: how much longer than of a 16-bit type the rest of a tile of
# float32 takes, which writes twice the bytes. These four were fitted to 711 passes, 440 of them in TF32: a fifth of the
# shapes, left out in turn, is chosen for as well.
BESIDE, OF_WINDOWS, EXPOSED, WIDE = 300.0, 3.2, 0.1, 1.45
# What the whole device takes to fetch a row of a stage; more for each cache line more that it is in (see `reads`), for
# one that is filled up with zeros, by the root of its share of them, and for one of these where rows start within
# sectors, of pixels and of filters. Times of all tiles at passes that fetching bounds (1x5 and 3x1 filters), taken for
# sums over their rows, give a row of pixels 9.5e-6, in two lines 1.9e-5, and of filters as much; one of 16 channels
# 1.2e-5 and 2.0e-5, of 24 channels 2.4e-5 and 7.9e-5. Fitted to 307 passes; a fifth of the shapes, left out in turn, is
# chosen for nearly as well.
ROW, CROSSING, SHORT, ODD = 1.0e-5, 6.8e-6, 2.2e-5, (1.5e-5, 4.9e-5)
# What a tile takes longer to leave its block's one output buffer where rows of the output start within sectors.
PATCHY = 0.39
# Until the first windows have come, of which a block has one at a time: nothing is multiplied before.
FIRST = 1.5
# What a window's stage is spared of products where the depth is less.
SHALLOW = 0.8
# How much longer a window's stage takes of float32 where other output channels fetch the window, too.
AGAIN = 1.07
# How much longer a stage takes whose rows are normalised, by rows and columns of the tile; a window's; which share of
# that packed arithmetic takes; microseconds to load what a chunk of channels needs, by the macro NORMALIZED.
_NORMALIZED = {(128, 256): 1.03, (256, 128): 1.17, (128, 192): 1.0, (192, 128): 1.22, (256, 64): 1.45, (128, 128): 1.15}
_WINDOW, _PACKED, _LOADED = 1.09, 0.3, (0.0, 0.08, 0.03)
# Parts of the depth; multiprocessors that have a block each, of every device, so that sums are cut alike; microseconds
# that an exchange counts. It takes 0.9; with more, short depths are left to tiles of 128x64, which where they have a
# multiprocessor to themselves are quicker than estimated. This and the step of such a tile are fitted to the 711
# passes, too, and choose better at 80 others.
PARTS = 1, 2
_WORKERS, _EXCHANGED = 132, 3.4
_STARTED, _PASSED = 1.6, 4.0e6  # of a pass of its own: microseconds to start it, bytes in one
LONGEST = 150.0  # microseconds that a block should last: what comes beside it waits for a multiprocessor no longer


def candidates(
    conv: Convolution, backward: bool, device: DeviceRecord, normalized: bool = False, parts: int = 1, code: int = 1
) -> list[HopperTile | HaloTile]:
    """Every tile that can do a convolution that the family takes, with its depth in so many parts.

    One that normalises its input needs the registers of a multiprocessor for itself, swapped ones are for 16-bit types.
    All tiles of as many parts add up alike, to the bit.
    """
    tiles = TILES
    if work(conv, backward, SMALL)[0] <= SMALL.resident * _WORKERS:
        tiles = *TILES, SMALL
    if normalized:
        tiles = *(tile for tile in TILES if tile.resident == 1), *([ROOMY] if conv.kernel == (1, 1) else [])
    if parts > 1:
        deep = conv.groups == 1 and depth_of(conv, backward) > DEPTH
        return [PAIRED] if deep and parts * work(conv, backward, PAIRED)[0] <= _WORKERS else []
    if conv.groups > 1:
        group = group_columns_of(conv, backward)
        return [tile for tile in tiles if group % tile.columns == 0]
    if code and not normalized:
        tiles = *tiles, *(tile for tile in SWAPPED if work(conv, backward, tile)[0] <= _WORKERS)
    return [*tiles, *(tile for tile in HALO_TILES if halo_applies(conv, backward, tile, device))]


def work(conv: Convolution, backward: bool, tile: HopperTile | HaloTile, code: int = 1) -> tuple[int, int]:
    """(tiles, stages of all tiles together)"""
    columns = ceil_div(columns_of(conv, backward), tile.columns)
    chunks, tiles, stages = ceil_div(depth_of(conv, backward), STAGE_ROW // itemsize_of(code)), 0, 0
    for h, w in walks_of(conv, backward):
        if isinstance(tile, HaloTile):
            count = ceil_div(windows_of(conv, backward, tile)[0], tile.windows) * columns
        else:
            count = ceil_div(conv.images * h.count * w.count, tile.rows) * columns
        tiles += count
        stages += count * h.taps * w.taps * chunks
    return tiles, stages


def microseconds(
    conv: Convolution,
    backward: bool,
    tile: HopperTile | HaloTile,
    device: DeviceRecord,
    code: int = 1,
    normalized: int = 0,
    sums: bool = False,
) -> tuple[float, float]:
    """Estimates in microseconds: (arithmetic with its operands alone, all), for a chip as fast as an H200.

    A stage of float32 has half the channels of one of a 16-bit type, multiplied at half the rate. ``normalized``: the
    input on the way, as the macro says; ``sums``: and those of a batch norm, of the output.
    """
    tiles, stages = work(conv, backward, tile, code)
    share = ceil_div(tiles, device.multiprocessors)
    rounds = share + (ALONE - 1 if share % tile.resident else 0)
    depth, channels = depth_of(conv, backward), STAGE_ROW // itemsize_of(code)
    multiplied = stages / tiles if len(walks_of(conv, backward)) == 1 else _most(conv, tile, device, code) / share
    multiplied = math.ceil(multiplied / tile.parts)
    if isinstance(tile, HaloTile):  # others of less depth than a stage wait for what they fetch
        multiplied *= 1 - SHALLOW * (1 - min(depth / channels, 1))
        multiplied *= 1 if code or columns_of(conv, backward) <= tile.columns else AGAIN
    busy = _busy(conv, tile, multiplied, normalized, code) + sums * tile.sums
    busy += PATCHY * (tile.resident > 1 and reads(columns_of(conv, backward), itemsize_of(code))[1])
    least, more = _fetched(conv, backward, tile, code)
    arithmetic = max(rounds * busy, stages * (least + more)) + FIRST * isinstance(tile, HaloTile)
    memory = _memory(conv, backward, code)
    power = OF_WINDOWS if isinstance(tile, HaloTile) else 1 + BESIDE / (tile.rows * tile.resident)
    together = (arithmetic**power + memory**power) ** (1 / power)
    return arithmetic, START + together + EXPOSED * min(stages * more, memory)


def _most(conv: Convolution, tile: HopperTile | HaloTile, device: DeviceRecord, code: int) -> int:
    """Stages of the multiprocessor that has most, of a strided data gradient: tiles of some classes of pixels have
    several times as many as others, and where there are few tiles whoever has one more of the long ones is waited for.
    """
    walks, columns = walks_of(conv, True), ceil_div(columns_of(conv, True), tile.columns)
    chunks, most = ceil_div(depth_of(conv, True), STAGE_ROW // itemsize_of(code)), 0
    group = device.multiprocessors * tile.resident
    for launch in (walks[i : i + CLASSES] for i in range(0, len(walks), CLASSES)):
        stages = np.array([h.taps * w.taps * chunks for h, w in launch])
        left = np.array([ceil_div(conv.images * h.count * w.count, tile.rows) * columns for h, w in launch])
        order = np.argsort(stages == 0, kind="stable")  # those with taps first
        stages, left = stages[order], left[order]
        if left.sum() <= group:  # a tile for each block
            rest = np.repeat(stages, left)
            rest = np.pad(rest, (0, group - len(rest))).reshape(tile.resident, -1)
            most += int(rest.sum(0).max())
            continue
        # Blocks take tiles when they come to them: while they keep pace, rounds of all through the classes that have
        # taps, then what is left. Who begins first is not known, nor whether the blocks of a multiprocessor do.
        reached = stages > 0
        cycles = int(left[reached].min()) // group if reached.any() else 0
        left -= cycles * group * reached
        held = [0] * group
        for count in np.repeat(stages, left).tolist():
            heapq.heapreplace(held, held[0] + count)
        most += tile.resident * (cycles * int(stages.sum()) + max(held))
    return most


def _fetched(conv: Convolution, backward: bool, tile: HopperTile | HaloTile, code: int) -> tuple[float, float]:
    """Microseconds that fetching a stage takes of the whole device: if rows were whole lines, and what they take more.

    Windows are fetched once for all taps, which is little.
    """
    itemsize, depth, columns = itemsize_of(code), depth_of(conv, backward), columns_of(conv, backward)
    pixels = 0 if isinstance(tile, HaloTile) else tile.rows
    filters = filter_rows(conv, code, backward, tile.columns)
    full = tail_of(conv, backward, code) > 0  # the last stage of a depth begins early
    of_pixels = _more(depth, itemsize, full, ODD[0])
    of_filters = _more(columns, itemsize, False, ODD[1]) if backward and code else _more(depth, itemsize, full, ODD[1])
    return (pixels + filters) * ROW, pixels * of_pixels + filters * of_filters


def _more(channels: int, itemsize: int, full: bool, odd: float) -> float:
    """Microseconds by which a row of a stage takes longer than a whole line: on average over those of ``channels``.

    ``full``: the last one has as many as the others; ``odd``: of `ODD`.
    """
    (lines, within), stage = reads(channels, itemsize), STAGE_ROW // itemsize
    missing = 0.0 if full else -channels % stage / stage
    return CROSSING * lines + missing**0.5 / ceil_div(channels, stage) * (SHORT + odd * within)


def _memory(conv: Convolution, backward: bool, code: int) -> float:
    """Microseconds that reading the source once and writing the output take."""
    x, y = (itemsize_of(code) * math.prod(shape) for shape in (conv.x_shape, conv.y_shape))
    return y / READ + x / WRITTEN if backward else x / READ + y / WRITTEN


def _busy(conv: Convolution, tile: HopperTile | HaloTile, stages: float, normalized: int, code: int) -> float:
    """Microseconds that a multiprocessor is busy with a tile of so many stages."""
    longer, loaded = 0.0, 0.0
    if normalized:
        halo = isinstance(tile, HaloTile)
        longer = (_WINDOW if halo else _NORMALIZED[tile.rows, tile.columns]) - 1
        longer *= _PACKED if normalized > 1 else 1
        loaded = 0 if halo else stages / math.prod(conv.kernel) * _LOADED[normalized]
    rest = tile.rest * (1 if code else WIDE)
    rest = rest if tile.parts == 1 else rest / tile.parts + _EXCHANGED
    return stages * tile.step * (1 + longer) + loaded + rest


@functools.lru_cache(maxsize=1024)
def choose(
    conv: Convolution,
    backward: bool,
    device: DeviceRecord,
    code: int = 1,
    normalized: int = 0,
    sums: bool = False,
    parts: int | None = None,
) -> tuple[HopperTile | HaloTile, int]:
    """The tile that should finish first, and after how many of them a block leaves; arguments as of `microseconds`.

    ``parts``: those of the depth; None: as many as `parts_of` says.
    """
    parts = parts_of(conv, backward, code) if parts is None else parts
    among = candidates(conv, backward, device, normalized > 0, parts, code)
    tile = min(among, key=lambda tile: microseconds(conv, backward, tile, device, code, normalized, sums)[1])
    return tile, _share(conv, backward, tile, device, code)


@functools.lru_cache(maxsize=1024)
def parts_of(conv: Convolution, backward: bool, code: int) -> int:
    """Into how many parts the depth of a convolution is cut, whatever is fused into it and on every device."""
    return quickest(conv, backward, code)[0].parts


@functools.lru_cache(maxsize=1024)
def quickest(conv: Convolution, backward: bool, code: int) -> tuple[HopperTile | HaloTile, float]:
    """The tile that should finish first on an H200, and its microseconds: on what follows from sizes alone."""
    device = BUILT_IN["H200"]
    among = _all(conv, backward, device, code)
    times = {tile: microseconds(conv, backward, tile, device, code)[1] for tile in among}
    tile = min(among, key=times.__getitem__)
    return tile, times[tile]


@functools.lru_cache(maxsize=1024)
def normalizing_pays(conv: Convolution, device: DeviceRecord, code: int, sums: bool = False, how: int = 1) -> bool:
    """Whether normalising the input on the way, as the macro NORMALIZED says ``how``, should take less time than a pass
    that reads and writes it before."""
    apart, together = (
        microseconds(conv, False, choose(conv, False, device, code, *how)[0], device, code, *how)[1]
        for how in ((0, sums), (how, sums))
    )
    return together < apart + _STARTED + 2 * itemsize_of(code) * math.prod(conv.x_shape) / _PASSED


def _share(conv: Convolution, backward: bool, tile: HopperTile | HaloTile, device: DeviceRecord, code: int) -> int:
    """Tiles after which a block has lasted as long as it should, where all keep pace."""
    rounds = ceil_div(work(conv, backward, tile, code)[0], device.multiprocessors * tile.resident)
    arithmetic = microseconds(conv, backward, tile, device, code)[0]
    return ceil_div(rounds, max(1, round(arithmetic / LONGEST)))


def options(conv: Convolution, backward: bool, device: DeviceRecord, code: int = 1) -> list[Choice]:
    """What a tuner may try: each tile, first what `choose` says."""
    tiles = choose(conv, backward, device, code)[0], *_all(conv, backward, device, code)
    return [Choice("hopper", tile.name, (_share(conv, backward, tile, device, code),)) for tile in dict.fromkeys(tiles)]


@functools.lru_cache(maxsize=1024)
def taken(
    choice: Choice | None,
    conv: Convolution,
    backward: bool,
    device: DeviceRecord,
    code: int,
    normalized: int = 0,
    sums: bool = False,
) -> tuple[HopperTile | HaloTile, int] | None:
    """Tile and share of a choice, of one that cannot do what is fused those that `choose` says of as many parts; None
    where it names none."""
    if choice is None or len(choice.split) != 1:
        return None
    able, known = (
        {tile.name: tile for tile in _all(conv, backward, device, code, how)} for how in (normalized > 0, False)
    )
    if choice.tile in able:
        return able[choice.tile], choice.split[0]
    if choice.tile not in known:
        return None
    return choose(conv, backward, device, code, normalized, sums, known[choice.tile].parts)


def _all(
    conv: Convolution, backward: bool, device: DeviceRecord, code: int, normalized: bool = False
) -> list[HopperTile | HaloTile]:
    return [tile for parts in PARTS for tile in candidates(conv, backward, device, normalized, parts, code)]
