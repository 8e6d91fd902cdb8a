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
from minidl.cuda.convolution.conv2d_hopper_tiles import SMALL, TILES, HopperTile
from minidl.cuda.convolution.conv2d_plan import Convolution
from minidl.cuda.convolution.conv2d_walk import STAGE_ROW, columns_of, depth_of, is_flat, itemsize_of
from minidl.shapes import ceil_div

PARTS = 1, 2, 4, 8  # blocks of a cluster
MOST_ROWS = 256
# Multiprocessors that clusters of so many blocks reach, as those of a cluster are of one group (seen on an H200).
# Constants, so that sums are cut alike on every device.
_REACHED = {1: 132, 2: 132, 4: 112, 8: 80}
# Microseconds: of a stage on its way from memory; bytes of filters that come from there in one; to add up the sums of
# two blocks, for each time that their number doubles. Fitted to 245 times of 22 products on an H200, of which the
# chosen ones are 0.5 % behind the fastest. Without gain in it: what a multiprocessor fetches, and of that from memory
# alone; a block behind another one. A tile of 64x64 with twelve stages is 2 to 4 % faster at 4096-4096 and 25088-4096
# with 64 rows, but in this model it is taken where it is up to a half slower.
_LATENCY, _READ, _COMBINED = 1.6, 3.5e6, 0.85
# Tried in place of this: the narrowest tile whose blocks have a multiprocessor each, in as many parts as fit. On an
# H200 up to 8 % faster with some thousand filters and channels, but 68 us for 59 at 25088-4096 with 64 rows.


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
    found = _candidates(conv, backward, code)
    return min(found, key=lambda one: _microseconds(conv, backward, code, one), default=None)


def _stages(conv: Convolution, backward: bool, code: int) -> int:
    return ceil_div(depth_of(conv, backward), STAGE_ROW // itemsize_of(code))


def _candidates(conv: Convolution, backward: bool, code: int) -> list[Division]:
    """None but of one pixel for each row, and few of them."""
    if conv.groups > 1 or not is_flat(conv) or conv.height * conv.width > 1 or conv.images > MOST_ROWS:
        return []
    stages = _stages(conv, backward, code)
    return [Division(tile, parts) for tile in (*TILES, SMALL) for parts in PARTS if parts <= stages]


def _microseconds(conv: Convolution, backward: bool, code: int, one: Division) -> float:
    tile, down = one.tile, ceil_div(conv.images, one.tile.rows)
    tiles = down * ceil_div(columns_of(conv, backward), tile.columns) * one.parts
    most = _REACHED[one.parts]
    used, rounds = min(tiles, most), ceil_div(tiles, most * tile.resident)
    beside = min(tiles, most * tile.resident) / used  # blocks of a multiprocessor
    read = STAGE_ROW * tile.columns * beside * used / down / _READ
    stage = max(tile.step * beside, _LATENCY / tile.stages, read)
    time = rounds * (ceil_div(_stages(conv, backward, code), one.parts) * stage + tile.rest)
    return time + _COMBINED * math.log2(one.parts)
