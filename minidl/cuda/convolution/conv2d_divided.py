"""Products of few rows with many filters on Hopper, those of fully connected layers: which blocks share their depth.

Their time is that of reading the filters, to which every multiprocessor must contribute; where columns are too few for
that, the blocks of a cluster share the depth of a tile (conv2d_divided_kernel of conv2d_hopper.cu). How many do follows
from the sizes alone, so that the bits of a product do not depend on the device.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from minidl.cuda.convolution.conv2d_family import Choice
from minidl.cuda.convolution.conv2d_hopper_tiles import SMALL, START, TILES, HopperTile, quickest
from minidl.cuda.convolution.conv2d_plan import Convolution
from minidl.cuda.convolution.conv2d_walk import STAGE_ROW, columns_of, depth_of, is_flat, itemsize_of
from minidl.shapes import ceil_div, round_up

PARTS = 1, 2, 4, 8  # blocks of a cluster
MOST_ROWS = 256
# Multiprocessors that clusters of so many blocks reach, as those of a cluster are of one group (seen on an H200).
# Constants, so that sums are cut alike on every device.
_REACHED = {1: 132, 2: 132, 4: 112, 8: 80}
# Microseconds: of a launch; until what a stage fetches begins to come; for a value of a tile that is added up and one
# that is written. Bytes per microsecond that come from memory, that a multiprocessor fetches, and at which filters are
# read by tiles that have all of their depth. How much of a tile's own rest remains here. Fitted to 1700 times of 49
# products of up to 256 rows on an H200 (40 of them in bfloat16): on those that a fit leaves out the choice is 2.2 %
# behind the fastest on average.
_START, _LATENCY, _ADDED, _WRITTEN = 2.6, 0.95, 6.7e-5, 3.0e-4
_READ, _FETCHED, _READ_WHOLE, _REST = 4.9e6, 1.5e5, 3.25e6, 0.45
# Measured on the same products, left out: tiles of 64x64 with twelve stages and of 128x64 with eight, a block to a
# multiprocessor. With them the fastest of all is 0.8 % faster on average (128 rows of 9216-4096: 12 %), but this model
# does not tell where.


class Division(NamedTuple):
    """A tile, and how many blocks share its depth."""

    tile: HopperTile
    parts: int


def divided(choice: Choice | None, conv: Convolution, backward: bool, code: int) -> Division | None:
    """How a convolution that the family takes is divided, as chosen or by the model of time; None: not at all."""
    if choice is None or not choice.tile:
        return _choose(conv, backward, code)
    found = [one for one in _candidates(conv, backward, code) if _choice(one) == choice]
    return found[0] if found else None


def options(conv: Convolution, backward: bool, code: int) -> list[Choice]:
    """What a tuner may try, the fastest by the model of time first."""
    found = sorted(_candidates(conv, backward, code), key=lambda one: _microseconds(conv, backward, code, one))
    return list(map(_choice, found))


def _choice(one: Division) -> Choice:
    return Choice("hopper", one.tile.name, (1, one.parts))


@functools.lru_cache(maxsize=1024)
def _choose(conv: Convolution, backward: bool, code: int) -> Division | None:
    """The fastest by the model of time, unless tiles that have all of their depth should be faster.

    Those of a data gradient of float32 need filters that have been turned: they are not asked.
    """
    found = _candidates(conv, backward, code)
    if not found:
        return None
    times = {one: _microseconds(conv, backward, code, one) for one in found}
    best = min(found, key=times.__getitem__)
    turned = backward and not code
    return best if turned or times[best] <= _whole_microseconds(conv, backward, code) else None


def _whole_microseconds(conv: Convolution, backward: bool, code: int) -> float:
    """Of tiles of conv2d_hopper_kernel: as they are estimated for any convolution, or as filters come from memory."""
    filters = itemsize_of(code) * conv.channels * conv.out_channels
    return max(quickest(conv, backward, code)[1], START + filters / _READ_WHOLE)


def _stages(conv: Convolution, backward: bool, code: int) -> int:
    return ceil_div(depth_of(conv, backward), STAGE_ROW // itemsize_of(code))


def _candidates(conv: Convolution, backward: bool, code: int) -> list[Division]:
    """None but of one pixel for each row, and few of them."""
    if conv.groups > 1 or not is_flat(conv) or conv.height * conv.width > 1 or conv.images > MOST_ROWS:
        return []
    stages = _stages(conv, backward, code)
    return [Division(tile, parts) for tile in (*TILES, SMALL) for parts in PARTS if parts <= stages]


def _microseconds(conv: Convolution, backward: bool, code: int, one: Division) -> float:
    """Of conv2d_divided_kernel.

    A stage takes as long as its bytes, which come to all blocks at the rate of memory and to one at that of its
    multiprocessor, and as its share of the time in which those of a pipeline are on their way.
    """
    tile, parts = one
    columns, rows = columns_of(conv, backward), min(tile.rows, round_up(conv.images, 8))
    down = ceil_div(conv.images, tile.rows)
    blocks = down * ceil_div(columns, tile.columns) * parts
    reached = _REACHED[parts]
    rounds = ceil_div(blocks, reached * tile.resident)
    beside = min(ceil_div(blocks, reached), tile.resident)  # blocks of a multiprocessor, where there are most
    fetched = STAGE_ROW * (rows + min(tile.columns, columns)) * beside / _FETCHED
    read = STAGE_ROW * tile.columns * min(blocks, reached * tile.resident) / down / _READ
    stage = math.hypot(read, fetched, (_LATENCY + fetched) / tile.stages)
    values = tile.columns * (tile.rows * (parts - 1) * _ADDED + min(tile.rows, conv.images) * _WRITTEN) / parts
    steps = ceil_div(_stages(conv, backward, code), parts)
    return _START + rounds * (steps * stage + _REST * tile.rest + beside * values)
