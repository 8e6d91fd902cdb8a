"""Products of few rows with many filters on Hopper, such as those of fully connected layers, divided along the depth.

Their time is that of reading the filters, to which every multiprocessor must contribute. Each part of the depth leaves
its sums (conv2d_hopper.cu), and a second kernel adds them up in order (conv2d_parts.cu). Whether and how a product is
divided follows from its sizes alone, so that its bits do not depend on the device.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from minidl.cuda.convolution.conv2d_family import Choice
from minidl.cuda.convolution.conv2d_hopper_tiles import ROW, TILES, HopperTile
from minidl.cuda.convolution.conv2d_plan import Convolution
from minidl.cuda.convolution.conv2d_walk import STAGE_ROW, columns_of, depth_of, is_flat, itemsize_of
from minidl.cuda.launch import launch
from minidl.cuda.rows import DTYPE, rows, vector_width
from minidl.shapes import ceil_div

__all__ = ["Division", "add_parts", "divided", "options"]

BLOCK, QUAD = 128, 4  # of conv2d_parts.cu: threads, and values of one at most
WORKERS = 132  # multiprocessors of an H100 or H200: a constant, so that sums are cut alike on every device
MOST_ROWS = 1024
LEAST = 2  # stages of a part
GAIN = 0.9  # of the time in one part: what is not faster than that stays whole
# Microseconds, and bytes in one: a stage on its way from memory; filters that all multiprocessors fetch; a block's
# start; a second kernel; partial sums written and read.
_LATENCY, _FETCHED, _START, _SECOND, _SUMMED = 1.9, 4.1e6, 1.5, 2.5, 3.0e6


class Division(NamedTuple):
    """A tile, and how many parts the depth is cut into."""

    tile: HopperTile
    parts: int

    def share(self, conv: Convolution, backward: bool, multiprocessors: int) -> int:
        """Tiles of a block when all blocks run at a time."""
        return ceil_div(_tiles(conv, backward, self), multiprocessors * self.tile.resident)


def divided(choice: Choice | None, conv: Convolution, backward: bool, code: int) -> Division | None:
    """How a convolution that the family takes is divided, as chosen or by the model of time; None: not at all."""
    if choice is None or not choice.tile:
        return _choose(conv, backward, code)
    tiles = {tile.name: tile for tile in TILES}
    if len(choice.split) != 2 or choice.tile not in tiles or not _able(conv):
        return None
    parts = _even(conv, backward, code, choice.split[1])
    return Division(tiles[choice.tile], parts) if parts > 1 else None


def options(conv: Convolution, backward: bool, code: int) -> list[Choice]:
    """What a tuner may try, the fastest by the model of time first."""
    if not _able(conv):
        return []
    found = sorted(_candidates(conv, backward, code), key=lambda one: _microseconds(conv, backward, code, one))
    return [Choice("hopper", one.tile.name, (1, one.parts)) for one in found if one.parts > 1][:12]


def add_parts(partial: Any, bias: Any, add: Any, output: Any, relu: bool) -> None:
    """``output`` from sums ``partial`` (parts, rows, columns) float32, a bias and what else is added, if anything."""
    parts, _, columns = partial.shape
    vec = min(QUAD, vector_width(output) if add is None else vector_width(output, add))
    size = output.size
    sizes = np.int64(size), np.int32(columns), np.int32(parts), np.int64(0 if add is None else rows(add)[2])
    defines = {"DTYPE": DTYPE[output.dtype], "VEC": vec, "RELU": int(relu)}
    grid = ceil_div(size, BLOCK * vec)
    launch("conv2d_parts", "conv2d_parts_kernel", grid, BLOCK, partial, bias, add, output, *sizes, defines=defines)


def _able(conv: Convolution) -> bool:
    """One pixel for each row, and few of them."""
    return is_flat(conv) and conv.height == conv.width == 1 and conv.images <= MOST_ROWS


@functools.lru_cache(maxsize=1024)
def _choose(conv: Convolution, backward: bool, code: int) -> Division | None:
    if not _able(conv):
        return None
    found = list(_candidates(conv, backward, code))
    times = [_microseconds(conv, backward, code, one) for one in found]
    whole = min(time for time, one in zip(times, found, strict=True) if one.parts == 1)
    best = min(times)
    return found[times.index(best)] if best < GAIN * whole else None


def _stages(conv: Convolution, backward: bool, code: int) -> int:
    return ceil_div(depth_of(conv, backward), STAGE_ROW // itemsize_of(code))


def _even(conv: Convolution, backward: bool, code: int, parts: int) -> int:
    """Parts of whole stages, none of them empty: at most so many."""
    stages = _stages(conv, backward, code)
    return ceil_div(stages, ceil_div(stages, min(parts, stages)))


def _candidates(conv: Convolution, backward: bool, code: int) -> list[Division]:
    stages = _stages(conv, backward, code)
    counts = sorted({_even(conv, backward, code, parts) for parts in range(1, max(stages // LEAST, 1) + 1)})
    return [Division(tile, parts) for tile in TILES for parts in counts]


def _tiles(conv: Convolution, backward: bool, one: Division) -> int:
    return ceil_div(conv.images, one.tile.rows) * ceil_div(columns_of(conv, backward), one.tile.columns) * one.parts


def _microseconds(conv: Convolution, backward: bool, code: int, one: Division) -> float:
    tile, tiles = one.tile, _tiles(conv, backward, one)
    rounds = ceil_div(tiles, WORKERS * tile.resident)
    running = min(tiles, WORKERS * tile.resident)
    fetched = STAGE_ROW * tile.columns * running / ceil_div(conv.images, tile.rows) / _FETCHED
    beside = ceil_div(running, WORKERS)  # blocks of a multiprocessor
    stage = max(tile.step * beside, _LATENCY / tile.stages, fetched, running * tile.fetched * ROW)
    time = rounds * (ceil_div(_stages(conv, backward, code), one.parts) * stage + tile.rest) + _START
    if one.parts > 1:
        time += _SECOND + 4 * one.parts * conv.images * columns_of(conv, backward) / _SUMMED
    return time
