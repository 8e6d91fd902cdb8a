"""Offsets for everything that takes memory during a step, decided before the step runs.

Finding the smallest arena is NP-hard. Placing the largest pieces first, each into the tightest hole that is free for
all its time, and repairing the order comes within a few per cent of the most bytes ever held at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minidl.memory._loops import best_fit
from minidl.shapes import round_up

ALIGN = 512  # bytes, as CuPy's own pool has it: kernels choose the width of their loads by addresses
_SMALL = 64  # pieces below this part of the largest are placed when all others lie
_ROUNDS = 32


@dataclass(frozen=True)
class Piece:
    """Memory of ``bytes`` from ``begin`` to ``end``, both included, on any common clock."""

    bytes: int
    begin: int
    end: int


def pack(pieces: Sequence[Piece]) -> tuple[list[int], int]:
    """An offset for each piece, multiples of `ALIGN`, such that no two of one time overlap; bytes of the arena.

    Large pieces first, each into the tightest hole. Those that end above the most bytes ever held at once are then
    moved forward in the order, some times over (after the "squeaky wheel" of Joslin and Clements, 1999), and the best
    order is taken; small pieces come last.
    """
    sizes = np.array([round_up(piece.bytes, ALIGN) for piece in pieces], np.int64)
    begin = np.array([piece.begin for piece in pieces], np.int64)
    end = np.array([piece.end for piece in pieces], np.int64)
    large = np.flatnonzero(sizes * _SMALL > sizes.max(initial=0))
    order = large[_best_order(sizes[large], begin[large], end[large])]
    small = np.setdiff1d(np.arange(len(pieces)), large)
    offsets = best_fit(np.concatenate((order, small[np.argsort(-sizes[small], kind="stable")])), sizes, begin, end)
    return offsets.tolist(), int((offsets + sizes).max(initial=0))


def _best_order(sizes: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The order, of all that are tried, whose placement is smallest."""
    least = most_held(sizes, begin, end)
    best, found = None, np.arange(len(sizes))
    for first in (sizes, sizes * (end - begin + 1)):
        order = np.lexsort((begin, -sizes, -first))
        for _ in range(_ROUNDS):
            top = (best_fit(order, sizes, begin, end) + sizes)[order]
            if best is None or top.max(initial=0) < best:
                best, found = top.max(initial=0), order
            if best <= least:
                return found
            place = np.arange(len(order), dtype=np.float64)
            place[top > least] /= 2
            order = order[np.argsort(place, kind="stable")]
    return found


def most_held(sizes: np.ndarray, begin: np.ndarray, end: np.ndarray) -> int:
    """Bytes held at once at the worst moment: no arena is smaller."""
    times = np.concatenate((begin, end + 1))
    changes = np.concatenate((sizes, -sizes))
    order = np.lexsort((changes, times))  # what ends goes before what begins
    return int(changes[order].cumsum().max(initial=0))
