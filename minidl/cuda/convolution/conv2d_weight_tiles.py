"""Tiles of the weight gradient on Hopper, and which of them should finish first.

Pure functions of sizes: whatever is chosen here cuts the sums, so it must not depend on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from math import gcd, inf, prod
from typing import NamedTuple

from minidl.cuda.convolution.conv2d_family import Choice
from minidl.cuda.convolution.conv2d_plan import Convolution
from minidl.cuda.convolution.conv2d_walk import reads
from minidl.cuda.convolution.conv2d_weight_grid import HALO, ITEMSIZE, ROW_BYTES, SPAN, HaloTile, halo
from minidl.shapes import Pair, ceil_div, round_up

__all__ = [
    "TF32_TILES",
    "THREE_TILES",
    "TILES",
    "WORKERS",
    "Division",
    "WeightTile",
    "choose",
    "normalizes",
    "options",
    "rows_first",
    "shares",
    "span_of",
    "taken",
    "tiles_of",
]

WORKERS = 132  # multiprocessors of an H100 or H200: a constant, so that sums are cut alike on every device


class WeightTile(NamedTuple):
    """Rows x columns of the gradient that a block computes.

    Attributes:
        rows, columns: the macros TILE_M and TILE_N, multiples of 64; each warp of those of float32 has 64 x 64 of them,
            or half or a quarter as many.
        warpgroups: along rows and columns, the macros WARPGROUPS_M and WARPGROUPS_N.
        stages, resident: the macros STAGES and RESIDENT.
    """

    rows: int
    columns: int
    warpgroups: tuple[int, int]
    stages: int
    resident: int

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
    def traffic(self) -> int:
        """Bytes of 16-bit values that go through shared memory for a stage: copied once, and read by every product of a
        warpgroup.
        """
        down, across = self.rows // self.warpgroups[0] // SPAN, self.columns // self.warpgroups[1]
        products = self.warpgroups[0] * self.warpgroups[1] * down
        return ROW_BYTES * (self.rows + self.columns + products * (SPAN + across))

    @property
    def normalizing(self) -> WeightTile:
        """The same where x is normalised on the way: products are turned over, channels times filters, and warpgroups
        have columns of their own where they can, so that each value is normalised once.
        """
        split = prod(self.warpgroups) == 2 and self.columns % (2 * SPAN) == 0
        return self._replace(warpgroups=(1, 2)) if split else self

    @property
    def turned(self) -> WeightTile:
        """Columns x rows."""
        return self._replace(rows=self.columns, columns=self.rows, warpgroups=self.warpgroups[::-1])

    @property
    def defines(self) -> dict[str, int]:
        return {
            "TILE_M": self.rows, "TILE_N": self.columns, "WARPGROUPS_M": self.warpgroups[0],
            "WARPGROUPS_N": self.warpgroups[1], "STAGES": self.stages, "RESIDENT": self.resident,
        }  # fmt: skip


TILES = (
    WeightTile(128, 128, (2, 1), 3, 2),
    WeightTile(128, 256, (2, 1), 4, 1),
    WeightTile(256, 128, (2, 1), 4, 1),
    WeightTile(128, 192, (2, 1), 5, 1),
    WeightTile(256, 192, (2, 1), 4, 1),
    WeightTile(64, 256, (1, 2), 5, 1),
    WeightTile(256, 64, (2, 1), 5, 1),
    WeightTile(128, 64, (2, 1), 4, 2),
    WeightTile(64, 128, (1, 2), 4, 2),
    WeightTile(64, 64, (1, 1), 6, 2),
)
TF32_TILES = (
    WeightTile(256, 128, (2, 1), 4, 1),
    WeightTile(128, 256, (2, 1), 4, 1),
    WeightTile(128, 128, (2, 1), 6, 1),
    WeightTile(256, 64, (2, 1), 5, 1),
    WeightTile(64, 256, (1, 2), 5, 1),
    WeightTile(128, 64, (1, 1), 4, 2),
    WeightTile(64, 128, (1, 1), 4, 2),
    WeightTile(64, 64, (1, 1), 4, 3),
)
THREE_TILES = (
    WeightTile(128, 128, (2, 1), 6, 1),
    WeightTile(256, 64, (2, 1), 5, 1),
    WeightTile(64, 256, (1, 2), 5, 1),
    WeightTile(128, 64, (2, 1), 6, 1),
    WeightTile(64, 64, (1, 1), 6, 2),
)


def span_of(tf32: int) -> int:
    """Channels, filters and pixels of a block. ``tf32``: products that stand for one of float32; 0: 16-bit types."""
    return SPAN // 2 if tf32 else SPAN


def tiles_of(tf32: int) -> tuple[WeightTile, ...]:
    """The tiles for 16-bit types (0), TF32 (1), or three such products for each of float32 (3)."""
    return {0: TILES, 1: TF32_TILES, 3: THREE_TILES}[tf32]


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
        itemsize: bytes of a value of x.
        copied: bytes of a stage.
        step: microseconds that a multiprocessor is busy with a stage of a tile.
    """

    tile: WeightTile | HaloTile
    division: Division
    steps: int
    tiles: int
    itemsize: int
    copied: int
    step: float


class _Rates(NamedTuple):
    """Microseconds, and what goes through in one.

    Attributes:
        copied: bytes that a multiprocessor copies into stages.
        fetched: bytes that a group of multiprocessors (GPC) fetches; what its blocks copy alike counts once.
        shared: bytes that a multiprocessor's shared memory takes and gives, with one block on it and with several.
        memory: bytes of the whole device.
        missed: of bytes copied, the share that the L2 cache did not keep.
        exposed: of the shorter of memory traffic and work, what the longer does not hide.
        alone: a block without another one beside it to hide its latencies, against two.
        start: until the pipeline of a block is filled.
        written: values of the gradient that a block writes.
        merged: adding up the sums of a cluster of the halo kernel.
        second: the kernel that adds partial sums; ``summed``: values of them that it adds.
    """

    copied: float
    fetched: float
    shared: tuple[float, float]
    memory: float
    missed: float
    exposed: float
    alone: float
    start: float
    written: float
    merged: float
    second: float
    summed: float


# Fitted to times measured on an H200 (ResNet-50, VGG-16, U-Net, and 47 shapes of other widths and sizes).
_SIXTEEN = _Rates(1.14e5, 1.01e6, (2.7e5, 2.48e5), 3.3e6, 0.0, 0.193, 1.17, 1.7, 4.3e3, 3.6, 1.28, 5.1e5)
_FLOAT = _Rates(1.15e5, 9.0e5, (inf, inf), 4.26e6, 0.009, 0.12, 1.45, 0.9, 8.0e3, 0.0, 1.6, 4.9e5)
_PRODUCTS = 3.5e6  # multiply-adds of a multiprocessor in a microsecond, of 16-bit types
# In TF32, and in three such products for each, by rows x columns of a warp.
_TF32_PRODUCTS = {64 * 64: 0.98e6, 64 * 32: 0.84e6, 32 * 32: 0.72e6}
_THREE_PRODUCTS = {64 * 32: 0.28e6, 32 * 32: 0.26e6}
_CROSSING, _ODD = 3.4, 0.45  # how much slower stages are for each line more of a pixel, for odd pixels (see `reads`)
_MEMBERS = 16  # multiprocessors in a group
_DEALT = 0, 8, 16, 24, 36, 43, 50, 57  # of 66 clusters of two, those that were seen to go to one group
# How much longer products take whose operand is normalised, by the filters that a warpgroup multiplies it by;
# microseconds to normalise a stage of the halo kernel; bytes of a pass of its own.
_NORMALIZED, _HALO_NORMALIZED, _PASSED = {256: 1.05, 128: 1.35, 64: 1.6}, 0.61, 4.0e6
_KEPT = 8e7  # bytes that blocks of several tiles read once for all of them, thanks to the L2 cache
LEAST, SHORT = 4, 16  # steps that make a block worth while; steps that take as long as a block's start
FAR, MOST = 1.6, 16  # of the best estimate, and of candidates, that a tuner tries
CLUSTERS = 1, 2
ROUNDS = 8  # partial sums of a division that is fine


def choose(conv: Convolution, normalized: bool = False, tf32: int = 0) -> tuple[WeightTile | HaloTile, Division]:
    """What should finish first. Depends on sizes alone, so that sums are cut alike on every device."""
    best = min(_candidates(conv, normalized, tf32), key=lambda candidate: _microseconds(conv, candidate))
    return best.tile, best.division


@functools.lru_cache(maxsize=1024)
def normalizes(conv: Convolution) -> bool:
    """Whether normalising x on the way should take less time than a pass that reads and writes it before; not in
    groups.
    """
    if conv.groups > 1:
        return False
    apart, together = (min(_microseconds(conv, one) for one in _candidates(conv, n)) for n in (False, True))
    x = ITEMSIZE * conv.images * conv.height * conv.width * conv.channels
    return together < apart + _SIXTEEN.second + 2 * x / _PASSED


def options(conv: Convolution, tf32: int = 0) -> list[Choice]:
    """What a tuner may try, first what `choose` says: all that the model of time does not put far behind the best."""
    ranked = sorted((_microseconds(conv, one), i, one) for i, one in enumerate(_candidates(conv, tf32=tf32)))
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
    columns.
    """
    if division.tiles > 1 or conv.kernel != (1, 1):
        return division.tiles > 1
    return (conv.channels > conv.out_channels) != (division.cluster > 1)


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
    span, rates = span_of(tf32), _FLOAT if tf32 else _SIXTEEN
    itemsize = ROW_BYTES // span
    rows, channels, steps = conv.out_channels // conv.groups, conv.channels // conv.groups, ceil_div(conv.pixels, span)
    blocks = conv.kernel[0] * conv.kernel[1] * ceil_div(channels, span)
    least = round_up(rows, SPAN) * round_up(blocks * span, SPAN)  # by the smallest tile
    lines, odd = reads(conv.channels, itemsize)
    slower = 1 + _CROSSING * lines + _ODD * odd
    for tile in filter(None, (_normalizing(tile) if normalized else tile for tile in tiles_of(tf32))):
        tiles = ceil_div(rows, tile.rows), ceil_div(blocks, tile.columns // span)
        area, count = tile.rows * tile.columns, conv.groups * tiles[0] * tiles[1]
        if tiles[0] * tiles[1] * area > 1.3 * least:
            continue
        traffic = (tile.turned if normalized else tile).traffic
        product = max(span * area / _rate(tile, tf32), traffic / rates.shared[tile.resident > 1])
        product *= _NORMALIZED[tile.rows // tile.warpgroups[0]] if normalized else 1
        shared = _shared(count, steps, tile.resident) if shares(tile, tf32) else []
        for division in (*_divisions(count, steps, tile.resident, tf32 > 0), *shared):
            # Where a second kernel is needed anyway, clusters save too little for what they cost.
            if division.cluster == 1 or division.parts == 1:
                down = rows_first(conv, division)
                copied, copy = _copy(tiles, conv.groups, division, tile, span, rates, down)
                step = max(product, copy * slower)
                yield _Candidate(tile, division, steps, count, itemsize, copied, step)
    grid = None if tf32 else halo(conv)
    if grid is not None:
        steps, area = ceil_div(conv.images * grid.size[0] * grid.size[1], SPAN), 9 * SPAN * SPAN
        tiles = ceil_div(rows, SPAN), ceil_div(channels, SPAN)
        count = conv.groups * tiles[0] * tiles[1]
        product = max(SPAN * area / _PRODUCTS, HALO.traffic / rates.shared[0])
        for division in _divisions(count, steps, 1, False):
            copied, copy = _copy(tiles, conv.groups, division, WeightTile(SPAN, SPAN, (1, 1), 1, 1), SPAN, rates)
            step = max(product, copy, normalized * _HALO_NORMALIZED)
            yield _Candidate(HALO, division, steps, count, itemsize, copied, step)


def _rate(tile: WeightTile, tf32: int) -> float:
    """Multiply-adds of a multiprocessor in a microsecond."""
    if not tf32:
        return _PRODUCTS
    rates = _TF32_PRODUCTS if tf32 == 1 else _THREE_PRODUCTS
    return rates[tile.rows * tile.columns // prod(tile.warpgroups) // 4]


def _copy(
    tiles: Pair, groups: int, division: Division, tile: WeightTile, span: int, rates: _Rates, down: bool = False
) -> tuple[int, float]:
    """Bytes that a block copies for a stage, and microseconds per block that copying them occupies a multiprocessor.

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
    copied = ROW_BYTES * (tile.rows + tile.columns)
    fetches = ROW_BYTES * span * len(fetched) * division.cluster / tile.resident
    return copied, max(copied / rates.copied, fetches / rates.fetched)


def _divisions(tiles: int, steps: int, resident: int, finely: bool) -> list[Division]:
    """``finely``: also so that what does not fill all multiprocessors once may fill them some times, nearly: for steps
    that take long. In 16 bits partial sums would cost more.
    """
    full = resident * WORKERS // tiles
    counts = {1, full, 2 * full} | (set(range(2, ROUNDS + 1)) if finely and full < 2 else set())
    while full > 1 and steps < SHORT * full:  # short sums: fewer blocks than there is room for may do
        full //= 2
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


def _microseconds(conv: Convolution, candidate: _Candidate) -> float:
    """Roughly the time that it takes."""
    tile, division, steps, tiles, itemsize, copied, step = candidate
    rates = _SIXTEEN if itemsize == ITEMSIZE else _FLOAT
    share = ceil_div(tiles // division.tiles * division.chunks, WORKERS)
    rounds = share + (rates.alone - 1 if share % tile.resident else 0)
    gradient = conv.out_channels * conv.kernel[0] * conv.kernel[1] * conv.channels // conv.groups
    merged = rates.merged if division.cluster > 1 and isinstance(tile, HaloTile) else 0
    written = gradient / tiles * division.left * division.tiles / division.parts
    around = rates.start + written / rates.written + merged
    busy = rounds * ceil_div(steps * division.tiles, division.chunks) * step + ceil_div(share, tile.resident) * around
    read = conv.pixels if conv.kernel == (1, 1) else conv.images * conv.height * conv.width
    memory = itemsize * (read * conv.channels + conv.pixels * conv.out_channels)
    if memory > _KEPT:
        memory *= division.tiles
    waited = (memory + rates.missed * tiles * steps * copied) / rates.memory + rates.start
    time = max(busy, waited) + rates.exposed * min(busy, waited)
    if division.parts > 1:
        time += rates.second + division.left * gradient / rates.summed
    return time
