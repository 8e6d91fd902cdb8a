"""Tiles of the weight gradient on Hopper, and which of them should finish first.

Pure functions of sizes: whatever is chosen here cuts the sums, so it must not depend on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from math import gcd, prod
from typing import NamedTuple

from minidl.cuda.convolution.conv2d_family import Choice
from minidl.cuda.convolution.conv2d_plan import Convolution
from minidl.cuda.convolution.conv2d_walk import reads
from minidl.cuda.convolution.conv2d_weight_grid import HALO, ITEMSIZE, ROW_BYTES, SPAN, HaloTile, halo
from minidl.shapes import Pair, ceil_div, round_up

WORKERS = 132  # multiprocessors of an H100 or H200: a constant, so that sums are cut alike on every device


class WeightTile(NamedTuple):
    """Rows x columns of the gradient that a block computes.

    Attributes:
        rows, columns: the macros TILE_M and TILE_N, multiples of 64; each warp of those of float32 has 64 x 64 of them,
            or half or a quarter as many.
        warpgroups: along rows and columns, the macros WARPGROUPS_M and WARPGROUPS_N.
        stages, resident: the macros STAGES and RESIDENT.
        step: microseconds that a stage takes of a multiprocessor, as measured on an H200.
    """

    rows: int
    columns: int
    warpgroups: tuple[int, int]
    stages: int
    resident: int
    step: float

    @property
    def name(self) -> str:
        """Among all tiles: ``128x256x4``, with ``*2`` for two blocks on a multiprocessor."""
        return f"{self.rows}x{self.columns}x{self.stages}" + (f"*{self.resident}" if self.resident > 1 else "")

    @property
    def size(self) -> Pair:
        """Rows and columns."""
        return self.rows, self.columns

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups[0] * self.warpgroups[1] + (128 if self.resident == 1 else 32)

    @property
    def shared_bytes(self) -> int:
        """Stages, later reused for the sums."""
        stages = self.stages * ROW_BYTES * (self.rows + self.columns)
        return max(stages, 4 * self.rows * self.columns) + 1024

    @property
    def normalizing(self) -> WeightTile:
        """The same where x is normalised on the way: products are turned over, channels times filters, and warpgroups
        have columns of their own where they can, so that each value is normalised once.
        """
        if prod(self.warpgroups) != 2:
            return self
        count = next(count for count in (2, 3, 1) if self.columns % (count * SPAN) == 0)
        return self._replace(warpgroups=(1, count) if count > 1 else self.warpgroups)

    @property
    def defines(self) -> dict[str, int]:
        return {
            "TILE_M": self.rows, "TILE_N": self.columns, "WARPGROUPS_M": self.warpgroups[0],
            "WARPGROUPS_N": self.warpgroups[1], "STAGES": self.stages, "RESIDENT": self.resident,
        }  # fmt: skip


TILES = (
    WeightTile(128, 128, (2, 1), 3, 2, 0.374),
    WeightTile(128, 256, (2, 1), 4, 1, 0.689),
    WeightTile(256, 128, (2, 1), 4, 1, 0.638),
    WeightTile(128, 192, (2, 1), 5, 1, 0.437),
    WeightTile(256, 192, (2, 1), 4, 1, 0.903),
    WeightTile(64, 256, (1, 2), 5, 1, 0.313),
    WeightTile(256, 64, (2, 1), 5, 1, 0.358),
    WeightTile(128, 64, (2, 1), 4, 2, 0.195),
    WeightTile(64, 128, (1, 2), 4, 2, 0.234),
    WeightTile(64, 64, (1, 1), 6, 2, 0.092),
)
TF32_TILES = (
    WeightTile(256, 128, (2, 1), 4, 1, 1.0),
    WeightTile(128, 256, (2, 1), 4, 1, 1.0),
    WeightTile(128, 128, (2, 1), 6, 1, 0.68),
    WeightTile(256, 64, (2, 1), 5, 1, 0.56),
    WeightTile(64, 256, (1, 2), 5, 1, 0.72),
    WeightTile(128, 64, (1, 1), 4, 2, 0.287),
    WeightTile(64, 128, (1, 1), 4, 2, 0.36),
    WeightTile(64, 64, (1, 1), 4, 3, 0.196),
)
THREE_TILES = (
    WeightTile(128, 128, (2, 1), 6, 1, 1.9),
    WeightTile(256, 64, (2, 1), 5, 1, 1.9),
    WeightTile(64, 256, (1, 2), 5, 1, 1.9),
    WeightTile(128, 64, (2, 1), 6, 1, 1),
    WeightTile(64, 64, (1, 1), 6, 2, 0.5),
)


def span_of(tf32: int) -> int:
    """Channels, filters and pixels of a block. ``tf32``: products that stand for one of float32; 0: 16-bit types."""
    return SPAN // 2 if tf32 else SPAN


def tiles_of(tf32: int) -> tuple[WeightTile, ...]:
    """The tiles for 16-bit types (0), TF32 (1), or three such products for each of float32 (3)."""
    return {0: TILES, 1: TF32_TILES, 3: THREE_TILES}[tf32]


_SQUARE = TILES[-1]  # what the halo kernel fetches a stage of


class Division(NamedTuple):
    """How the pixels are summed: of ``tiles`` tiles one after another, in ``parts`` partial sums, each by a cluster of
    ``cluster`` blocks. With several tiles a partial sum may end one and begin the next; then there are no clusters.
    """

    parts: int
    cluster: int
    tiles: int = 1

    @property
    def chunks(self) -> int:
        return self.parts * self.cluster

    @property
    def split(self) -> tuple[int, ...]:
        """As a `Choice` has it."""
        return tuple(self) if self.tiles > 1 else (self.parts, self.cluster)

    def of(self, steps: int, count: int) -> Division:
        """The same for ``count`` tiles of so many steps: at least a step for each block, and whole lots of tiles."""
        cluster, tiles = self.cluster, gcd(self.tiles, count)
        if steps * tiles * self.parts >= 2**31:  # 32 bits count
            tiles = 1
        while cluster > steps:
            cluster //= 2
        return Division(min(self.parts, steps * tiles // cluster), cluster, tiles)

    @property
    def left(self) -> float:
        """Partial sums of a tile, on average."""
        return (self.parts + self.tiles - 1) / self.tiles


class _Candidate(NamedTuple):
    """A way to do the work.

    Attributes:
        steps: stages that make up the sum.
        tiles: of the gradient.
        step: microseconds that a multiprocessor is busy with a stage of a tile.
        copied: microseconds that copying a stage takes of the whole device.
        zeros: microseconds that the copy engine of a multiprocessor fills rows of a stage up with zeros.
        held: values of a tile that the gradient has.
    """

    tile: WeightTile | HaloTile
    division: Division
    steps: int
    tiles: int
    step: float
    copied: float
    zeros: float
    held: int


# Fitted to times measured on an H200: all candidates at 137 random shapes and 24 layers of networks, what was chosen
# for all of ResNet-50, VGG-16 and U-Net; the shapes of docs/tuning.md were left out. All in microseconds, or what goes
# through in one: the start of a launch; until the pipeline of a block is filled and when it is empty again; a stage,
# from the request until it has been multiplied (fitted anew to 114 passes, of which 1.15 to 1.28 choose alike); how
# much longer products of a block take without another one beside it to hide its latencies; for each tile more of a
# block.
_START, _FILLED, _LATENCY, _ALONE, _TURNED = 0.68, 1.79, 1.15, 1.39, 1.32
# Bytes of the whole device; of the shorter of memory traffic and work, what the longer does not hide; values that a
# multiprocessor writes of the gradient, and of partial sums.
_MEMORY, _EXPOSED, _WRITTEN = 4.49e6, 0.164, (1.0e4, 1.13e5)
# Adding up the sums of a cluster, and of one of the halo kernel; the kernel that adds partial sums, and values of them.
_MERGED, _SECOND, _SUMMED = (2.4, 3.3), 2.0, 5.6e5
# Bytes in a microsecond that a group of multiprocessors (GPC) fetches; what its blocks copy alike counts once.
_FETCHED = 1.31e6
# What the whole device copies into stages takes for a row of a block: as such, for each line more that it lies in, for
# a row that starts within a sector (see `reads`); more for one with fewer channels than fill it, and more for one that
# there is not, which is filled with zeros.
_ROW, _CROSSING, _ODD, _PARTIAL, _NONE = 7.64e-6, 4.94e-6, 1.19e-5, 8.0e-6, 9.5e-6
# What the copy engine of a multiprocessor takes for a row that it fills up with zeros: all that 1x1 filters between 16,
# 24 or 32 channels do.
_ZEROS = 2.1e-3
_MEMBERS = 16  # multiprocessors in a group
_DEALT = 0, 8, 16, 24, 36, 43, 50, 57  # of 66 clusters of two, those that were seen to go to one group
# How much longer products take whose operand is normalised, by the filters that a warpgroup multiplies it by;
# microseconds to normalise a stage of the halo kernel; bytes of a pass of its own.
_NORMALIZED, _HALO_NORMALIZED, _PASSED = {256: 1.05, 128: 1.35, 64: 1.6}, 0.61, 4.0e6
# Microseconds, but for memory, of picking each group's own out of what was summed up for several together.
_PICKED = 1.3
_KEPT = 4.3e7  # bytes that the L2 cache keeps until a block of several tiles reads them for the next one
_HELD = 6.0e7  # bytes of it
LEAST, SHORT = 4, 16  # steps that make a block worth while; steps that take as long as a block's start
FAR, MOST = 1.6, 16  # of the best estimate, and of candidates, that a tuner tries
CLUSTERS = 1, 2
ROUNDS = 8  # partial sums of a division that is fine


def choose(conv: Convolution, normalized: bool = False, tf32: int = 0) -> tuple[WeightTile | HaloTile, Division]:
    """What should finish first. Depends on sizes alone, so that sums are cut alike on every device."""
    best = min(_candidates(conv, normalized, tf32), key=lambda candidate: _microseconds(conv, candidate, tf32))
    return best.tile, best.division


def microseconds(conv: Convolution, tf32: int = 0) -> float:
    """How long what `choose` says of `bundled` should take, on a chip as fast as an H200."""
    return min(_bundles(conv, tf32).values())


def moved(conv: Convolution, tf32: int = 0) -> int:
    """Bytes of x, as far as taps of one pixel see it, and of dy."""
    read = conv.pixels if conv.kernel == (1, 1) else conv.images * conv.height * conv.width
    return ROW_BYTES // span_of(tf32) * (read * conv.channels + conv.pixels * conv.out_channels)


def bundled(conv: Convolution, tf32: int = 0) -> Convolution:
    """The convolution itself, or with groups taken together, as many as a block of a stage has room for, where that
    should be faster, though their products with each other's channels are not wanted (3x3 1024-1024 in 32 groups, 128
    images of 14x14 pixels, stride 2: 27 us, apart 64, by the kernel for groups of few channels 41).
    """
    bundles = _bundles(conv, tf32)
    return conv._replace(groups=min(bundles, key=lambda groups: bundles[groups]))


@functools.lru_cache(maxsize=1024)
def _bundles(conv: Convolution, tf32: int) -> dict[int, float]:
    """Numbers of groups, and microseconds with so many."""
    found, groups, span = {}, conv.groups, span_of(tf32)
    while groups == conv.groups or max(conv.channels, conv.out_channels) <= groups * span:
        some = conv._replace(groups=groups)
        found[groups] = min(_microseconds(some, one, tf32) for one in _candidates(some, tf32=tf32))
        if groups < conv.groups:
            values = conv.out_channels * prod(conv.kernel) * (conv.channels // groups + conv.channels // conv.groups)
            found[groups] += _PICKED + 4 * values / _MEMORY
        if groups % 2:
            break
        groups //= 2
    return found


@functools.lru_cache(maxsize=1024)
def normalizes(conv: Convolution) -> bool:
    """Whether normalising x on the way should take less time than a pass that reads and writes it before; not in
    groups.
    """
    if conv.groups > 1:
        return False
    apart, together = (min(_microseconds(conv, one) for one in _candidates(conv, n)) for n in (False, True))
    x = ITEMSIZE * conv.images * conv.height * conv.width * conv.channels
    return together < apart + _SECOND + 2 * x / _PASSED


def options(conv: Convolution, tf32: int = 0) -> list[Choice]:
    """What a tuner may try, first what `choose` says: all that the model of time does not put far behind the best."""
    conv = bundled(conv, tf32)
    ranked = sorted((_microseconds(conv, one, tf32), i, one) for i, one in enumerate(_candidates(conv, tf32=tf32)))
    found = [one for time, _, one in ranked if time <= FAR * ranked[0][0]]
    return [Choice("hopper", one.tile.name, one.division.split) for one in found[:MOST]]


@functools.lru_cache(maxsize=1024)
def taken(
    choice: Choice | None, conv: Convolution, normalized: bool = False, tf32: int = 0
) -> tuple[WeightTile | HaloTile, Division] | None:
    """Tile and division of a choice; None where it names none that can do this."""
    if choice is None or len(choice.split) not in (2, 3) or choice.split[1] not in CLUSTERS:
        return None
    shared = len(choice.split) == 3
    if shared and choice.split[1] > 1:
        return None
    every = *tiles_of(tf32), *([HALO] if not tf32 and halo(conv) else [])
    able = (_normalizing(tile) if normalized else tile for tile in every if not shared or shares(tile, tf32))
    tiles = {tile.name: tile for tile in able if tile is not None}
    return (tiles[choice.tile], Division(*choice.split)) if choice.tile in tiles else None


def rows_first(conv: Convolution, division: Division) -> bool:
    """Whether blocks count tiles along rows before those along columns.

    Blocks whose numbers follow each other are served best by what they have in common, and that should be the pixels of
    the side with more channels, which are more bytes (1x1 512-128 at 28x28 pixels and batch 256 in tiles of 64x64: 73
    us, the other way 95; of 64x256 71, or 73 to 82, as far as blocks drift apart). Several taps have x nearly in common
    either way. Clusters are dealt out among groups of multiprocessors: what follows each other is far apart, and it is
    the other way round (2048-512 at 7x7 in 64x256: 51 us, 57). Blocks of several tiles have those of a few rows and
    columns; but of a gradient that `overflows` those that are at work write whole rows.
    """
    if division.tiles > 1:
        return not overflows(conv)
    if conv.kernel != (1, 1):
        return False
    return (conv.channels > conv.out_channels) != (division.cluster > 1)


def overflows(conv: Convolution) -> bool:
    """Whether the gradient has more bytes than the L2 cache holds: writing it then is most of the time."""
    return 4 * conv.out_channels * prod(conv.kernel) * conv.channels // conv.groups > _HELD


def shares(tile: WeightTile | HaloTile, tf32: int) -> bool:
    """Whether blocks may have several tiles in turn; for three products in TF32 there are not the registers."""
    return isinstance(tile, WeightTile) and tf32 < 3


def _normalizing(tile: WeightTile | HaloTile) -> WeightTile | HaloTile | None:
    """As it normalises x; None where registers do not suffice."""
    if isinstance(tile, HaloTile):
        return tile
    return tile.normalizing if tile.rows * tile.columns <= 2**15 // tile.resident**2 else None


def _candidates(conv: Convolution, normalized: bool = False, tf32: int = 0) -> Iterator[_Candidate]:
    """Every tile that leaves little empty, its sum divided so that the blocks fill all multiprocessors once or twice,
    or not at all.
    """
    span, taps = span_of(tf32), prod(conv.kernel)
    rows, channels, steps = conv.out_channels // conv.groups, conv.channels // conv.groups, ceil_div(conv.pixels, span)
    spans, filters = ceil_div(channels, span), ceil_div(rows, span)
    blocks = taps * spans
    least = round_up(rows, SPAN) * round_up(blocks * span, SPAN)  # by the smallest tile
    wide = _block(conv.channels, channels, span), _block(conv.out_channels, rows, span)
    short = tuple(span * _ZEROS * _short(summed, span) for summed in (channels, rows))
    for tile in filter(None, (_normalizing(tile) if normalized else tile for tile in tiles_of(tf32))):
        tiles = ceil_div(rows, tile.rows), ceil_div(blocks, tile.columns // span)
        area, count = tile.rows * tile.columns, conv.groups * tiles[0] * tiles[1]
        if tiles[0] * tiles[1] * area > 1.3 * least:
            continue
        down, across = tile.rows // span, tile.columns // span
        none = down + across - filters / tiles[0] - blocks / tiles[1]  # blocks beyond the last
        copied = across * wide[0] + down * wide[1] + none * span * _NONE
        zeros = across * short[0] + down * short[1]
        own = tile.step * (_NORMALIZED[tile.rows // tile.warpgroups[0]] if normalized else 1)
        held = min(tile.rows, rows) * tile.columns // span * min(span, channels)
        shared = _shared(count, steps, tile.resident) if conv.groups == 1 and shares(tile, tf32) else []
        for division in (*_divisions(count, steps, tile.resident, tf32 > 0), *shared):
            # Where a second kernel is needed anyway, clusters save too little for what they cost.
            if division.cluster == 1 or division.parts == 1:
                fetched = _fetch(tiles, conv.groups, division, tile, span, rows_first(conv, division))
                yield _Candidate(tile, division, steps, count, max(own, fetched), copied, zeros, held)
    grid = None if tf32 else halo(conv)
    if grid is not None:
        steps = ceil_div(conv.images * grid.size[0] * grid.size[1], SPAN)
        count = conv.groups * filters * spans
        held = taps * min(SPAN, rows) * min(SPAN, channels)
        for division in _divisions(count, steps, 1, False):
            fetched = _fetch((filters, spans), conv.groups, division, _SQUARE, SPAN)
            step = max(HALO.step, fetched, normalized * _HALO_NORMALIZED)
            yield _Candidate(HALO, division, steps, count, step, sum(wide), sum(short), held)


def _block(channels: int, summed: int, span: int) -> float:
    """Microseconds that copying a block of a stage takes of the device, of arrays of so many channels, ``summed`` of
    them in a group.
    """
    lines, odd = reads(channels, ROW_BYTES // span)
    return span * (_ROW + _CROSSING * lines + _ODD * odd + _PARTIAL * _short(summed, span))


def _short(summed: int, span: int) -> float:
    """The share of blocks of so many channels that they do not fill."""
    return (summed % span > 0) / ceil_div(summed, span)


def _fetch(tiles: Pair, groups: int, division: Division, tile: WeightTile, span: int, down: bool = False) -> float:
    """Microseconds that fetching its stages occupies a multiprocessor, per block.

    ``tiles``: of a group of channels, along rows and columns; ``down``: as of `rows_first`.
    """
    # The hardware fills one group of multiprocessors after the other with blocks, but deals out clusters among them.
    members, count = range(tile.resident * _MEMBERS), groups * tiles[0] * tiles[1]
    if division.cluster > 1:
        members = [turn * WORKERS // 2 + index for turn in range(tile.resident) for index in _DEALT]
    fetched, height, width = set(), tile.rows // span, tile.columns // span
    lots = count // division.tiles
    for part, index in (divmod(index, lots) for index in members if index < lots * division.parts):
        group, index = divmod(index, prod(tiles))
        m, n = divmod(index, tiles[0])[::-1] if down else divmod(index, tiles[1])
        fetched |= {(part, "dy", group, block) for block in range(m * height, (m + 1) * height)}
        # Another tap of the same channels is another fetch, though of pixels nearby.
        fetched |= {(part, "x", group, block) for block in range(n * width, (n + 1) * width)}
    return ROW_BYTES * span * len(fetched) * division.cluster / tile.resident / _FETCHED


def _divisions(tiles: int, steps: int, resident: int, finely: bool) -> list[Division]:
    """``finely``: also so that what does not fill all multiprocessors once may fill them some times, nearly: for steps
    that take long. In 16 bits partial sums would cost more.
    """
    full = resident * WORKERS // tiles
    counts = {1, full, 2 * full} | (set(range(2, ROUNDS + 1)) if finely and full < 2 else set())
    while full > 1 and steps < SHORT * full:  # short sums: fewer blocks than there is room for may do
        full //= 2
        if resident > 1 or steps < SHORT * full:  # longer ones want all multiprocessors
            counts.add(full)
    divisions = {Division(count, 1) for count in counts} | {Division(count // 2, 2) for count in counts}
    return sorted(one for one in divisions if one.chunks == 1 or 0 < LEAST * one.chunks <= steps)


def _shared(tiles: int, steps: int, resident: int) -> list[Division]:
    """Several tiles for some blocks, so that all multiprocessors have about as much to do: with every one of them, and
    with the most blocks that sum up the same pixels at a time.
    """
    full = resident * WORKERS
    found = []
    for blocks in (full, max(range(full - full // 16, full + 1), key=lambda blocks: (gcd(blocks, tiles), blocks))):
        lots = gcd(blocks, tiles)
        if lots < tiles and LEAST * blocks <= steps * tiles:
            found.append(Division(blocks // lots, 1, tiles // lots))
    return list(dict.fromkeys(found))


def _microseconds(conv: Convolution, candidate: _Candidate, tf32: int = 0) -> float:
    """Roughly the time that it takes."""
    tile, division, steps, tiles, step, copied, zeros, held = candidate
    several = division.parts > 1
    own, more = ceil_div(steps * division.tiles, division.chunks), ceil_div(division.tiles - 1, division.parts)

    def wave(blocks: int) -> float:
        """Of so many blocks at a time."""
        beside = ceil_div(blocks, WORKERS)
        together = max(beside, _ALONE if tile.resident > 1 else 1.0) * step
        each = max(together, beside * zeros, blocks * copied, _LATENCY / tile.stages)
        written = beside * (1 + more) * held / _WRITTEN[several]
        return own * each + _FILLED + more * _TURNED + written

    room = tile.resident * WORKERS
    waves, left = divmod(tiles // division.tiles * division.chunks, room)
    busy = waves * wave(room) + (wave(left) if left else 0)
    if division.cluster > 1:
        busy += _MERGED[isinstance(tile, HaloTile)]
    memory = moved(conv, tf32)
    memory *= (1 + (division.tiles - 1) * max(0.0, 1 - _KEPT / memory)) / _MEMORY
    time = _START + max(busy, memory) + _EXPOSED * min(busy, memory)
    if several:
        gradient = conv.out_channels * prod(conv.kernel) * conv.channels // conv.groups
        time += _SECOND + division.left * gradient / _SUMMED
    return time
