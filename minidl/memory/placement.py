"""Offsets for everything that takes memory during a step, decided before the step runs.

Finding the smallest arena is NP-hard. Placing pieces one after the other, each as low as there is room for all its
time, in the best of some orders that are repaired, comes within a few per cent of the most bytes ever held at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minidl.memory._loops import first_fit
from minidl.shapes import round_up

ALIGN = 512  # bytes, as CuPy's own pool has it: kernels choose the width of their loads by addresses
_SMALL = 64  # pieces below this part of the largest are placed when all others lie
_ROUNDS = 16  # of repairs
_REPAIRED = 0.3  # of what a placement has too much


@dataclass(frozen=True)
class Piece:
    """Memory of ``bytes`` from ``begin`` to ``end``, both included, on any common clock."""

    bytes: int
    begin: int
    end: int


def pack(pieces: Sequence[Piece]) -> tuple[list[int], int]:
    """An offset for each piece, multiples of `ALIGN`, such that no two of one time overlap; bytes of the arena.

    Orders: the largest first, those of most bytes times time, in between, and those that are held last, as saved
    tensors lie upon each other. Pieces that end too high are then moved forward in the order, some times over (after
    the "squeaky wheel" of Joslin and Clements, 1999), and the best order is taken; small pieces come last.

    Steps of nine networks at one to six batch sizes, with branches, fused and not, come within 3.6 % of the most bytes
    held at once on average and 10.3 % at worst. Tightest holes in place of the lowest, by size and by bytes times
    time: 4.8 and 11 %, of ResNet-152 without a plan 8.4 for 3.8. A thousand random repairs: 3.1 %.
    """
    sizes = np.array([round_up(piece.bytes, ALIGN) for piece in pieces], np.int64)
    begin = np.array([piece.begin for piece in pieces], np.int64)
    end = np.array([piece.end for piece in pieces], np.int64)
    large = np.flatnonzero(sizes * _SMALL > sizes.max(initial=0))
    order = large[_best_order(sizes[large], begin[large], end[large])]
    small = np.setdiff1d(np.arange(len(pieces)), large)
    offsets = first_fit(np.concatenate((order, small[np.argsort(-sizes[small], kind="stable")])), sizes, begin, end)
    return offsets.tolist(), int((offsets + sizes).max(initial=0))


def _best_order(sizes: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The order, of all that are tried, whose placement is smallest."""
    least = most_held(sizes, begin, end)
    best, found = None, np.arange(len(sizes))
    lasting = end - begin + 1
    for first in (sizes, sizes * lasting, sizes * np.sqrt(lasting), end):
        order = np.lexsort((begin, -sizes, -first))
        for _ in range(_ROUNDS):
            top = (first_fit(order, sizes, begin, end) + sizes)[order]
            highest = top.max(initial=0)
            if best is None or highest < best:
                best, found = highest, order
            if best <= least:
                return found
            place = np.arange(len(order), dtype=np.float64)
            place[top > least + _REPAIRED * (highest - least)] /= 2
            order = order[np.argsort(place, kind="stable")]
    return found


def most_held(sizes: np.ndarray, begin: np.ndarray, end: np.ndarray) -> int:
    """Bytes held at once at the worst moment: no arena is smaller."""
    times = np.concatenate((begin, end + 1))
    changes = np.concatenate((sizes, -sizes))
    order = np.lexsort((changes, times))  # what ends goes before what begins
    return int(changes[order].cumsum().max(initial=0))
