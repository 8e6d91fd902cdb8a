"""Products of few rows with many filters on Hopper, those of fully connected layers: which blocks share their depth.

Their time is that of reading the filters, to which every multiprocessor must contribute; where columns are too few for
that, the blocks of a cluster share the depth of a tile (conv2d_divided_kernel of conv2d_hopper.cu). How many do follows
from the sizes alone, so that the bits of a product do not depend on the device.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from minidl.cuda.convolution.conv2d_family import Choice
from minidl.cuda.convolution.conv2d_hopper_tiles import TILES, HopperTile
from minidl.cuda.convolution.conv2d_plan import Convolution
from minidl.cuda.convolution.conv2d_walk import STAGE_ROW, columns_of, depth_of, is_flat, itemsize_of
from minidl.shapes import ceil_div

__all__ = ["PARTS", "Division", "divided", "options"]

PARTS = 1, 2, 4, 8  # blocks of a cluster
MOST_ROWS = 256
# Multiprocessors of an H100 or H200: a constant, so that sums are cut alike on every device. Of more blocks than these
# some come second (4096-4096, 64 rows, H200: 11 us with 128 blocks, 17 with 256).
WORKERS = 132
LEAST = 4  # stages of a block: of fewer, adding up takes longer than what it saves
_BY_WIDTH = {tile.columns: tile for tile in TILES[::-1] if tile.rows == 128}  # of two as wide that of more stages


class Division(NamedTuple):
    """A tile, and how many blocks share its depth."""

    tile: HopperTile
    parts: int


def divided(choice: Choice | None, conv: Convolution, backward: bool, code: int) -> Division | None:
    """How a convolution that the family takes is divided, as chosen or by its sizes; None: not at all."""
    if choice is None or not choice.tile:
        return _choose(conv, backward, code)
    found = [one for one in _candidates(conv, backward, code) if _choice(one) == choice]
    return found[0] if found else None


def options(conv: Convolution, backward: bool, code: int) -> list[Choice]:
    """What a tuner may try, first what is taken untuned."""
    chosen, every = _choose(conv, backward, code), _candidates(conv, backward, code)
    return [_choice(one) for one in sorted(every, key=lambda one: one != chosen)]


def _choice(one: Division) -> Choice:
    return Choice("hopper", one.tile.name, (1, one.parts))


@functools.lru_cache(maxsize=1024)
def _choose(conv: Convolution, backward: bool, code: int) -> Division | None:
    """The narrowest tile that leaves no block a second one, and as many parts."""
    if not _candidates(conv, backward, code):
        return None
    counts = {columns: _tiles(conv, backward, tile) for columns, tile in sorted(_BY_WIDTH.items())}
    columns = next((columns for columns, count in counts.items() if count <= WORKERS), max(counts))
    most = min(WORKERS // counts[columns], _stages(conv, backward, code) // LEAST)
    return Division(_BY_WIDTH[columns], max((parts for parts in PARTS if parts <= most), default=1))


def _tiles(conv: Convolution, backward: bool, tile: HopperTile) -> int:
    return ceil_div(conv.images, tile.rows) * ceil_div(columns_of(conv, backward), tile.columns)


def _stages(conv: Convolution, backward: bool, code: int) -> int:
    return ceil_div(depth_of(conv, backward), STAGE_ROW // itemsize_of(code))


def _candidates(conv: Convolution, backward: bool, code: int) -> list[Division]:
    """None but of one pixel for each row, and few of them."""
    if conv.groups > 1 or not is_flat(conv) or conv.height * conv.width > 1 or conv.images > MOST_ROWS:
        return []
    stages = _stages(conv, backward, code)
    return [Division(tile, parts) for tile in TILES for parts in PARTS if parts <= stages]
