"""One block of memory for everything a step makes and drops: where each allocation lies, planned from a record.

A training step allocates the same sizes in the same order every time. What one step did is written down as events, in
order: a size is a new allocation (numbered from 0), and ``~number`` the release of an earlier one. `place` gives each
allocation an offset so that no two that live at once overlap. Least total size is NP-hard (dynamic storage allocation,
Garey and Johnson 1979, problem SR2); what `minidl.memory.placement` finds comes within a few per cent of `most_live`,
which no placement can beat. `Lender` hands the same block out to steps that were
not recorded.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from minidl.memory.placement import ALIGN, Piece, most_held, pack
from minidl.shapes import round_up


def _lifetimes(events: Sequence[int]) -> np.ndarray:
    """(allocations, 3) int64: rounded size, event that makes it, event that releases it (or one after the last)."""
    rows: list[list[int]] = []
    for at, event in enumerate(events):
        if event >= 0:
            rows.append([round_up(event, ALIGN), at, len(events)])
        else:
            rows[~event][2] = at
    return np.array(rows, np.int64).reshape(-1, 3)


def most_live(events: Sequence[int]) -> int:
    """The most bytes that live at once, each allocation rounded up to `ALIGN`: the least that any placement takes."""
    sizes, begin, end = _lifetimes(events).T
    return most_held(sizes, begin, end - 1)


def place(events: Sequence[int]) -> tuple[list[int], int]:
    """Offsets of the allocations in bytes, multiples of `ALIGN`, and the size of the whole."""
    return pack([Piece(int(size), int(begin), int(end) - 1) for size, begin, end in _lifetimes(events)])


class Lender:
    """Hands out parts of a block of ``size`` bytes as they are asked for, each into the tightest hole.

    Attributes:
        free: bytes that are not lent.
    """

    def __init__(self, size: int):
        self.free = size
        self._holes = [(0, size)] if size else []  # (offset, size), by offset; no two touch
        self._taken: dict[int, int] = {}

    def take(self, size: int) -> int | None:
        """The offset of ``size`` bytes; None where no hole is large enough."""
        size = max(round_up(size, ALIGN), ALIGN)
        fitting = [(hole, offset) for offset, hole in self._holes if hole >= size]
        if not fitting:
            return None
        hole, offset = min(fitting)
        at = self._holes.index((offset, hole))
        self._holes[at : at + 1] = [(offset + size, hole - size)] if hole > size else []
        self._taken[offset] = size
        self.free -= size
        return offset

    def give_back(self, offset: int) -> None:
        """Release what `take` gave; it joins the holes beside it."""
        size = self._taken.pop(offset)
        self.free += size
        at = bisect.bisect(self._holes, (offset, 0))
        if at < len(self._holes) and self._holes[at][0] == offset + size:
            size += self._holes.pop(at)[1]
        if at and sum(self._holes[at - 1]) == offset:
            at -= 1
            before, extra = self._holes.pop(at)
            offset, size = before, size + extra
        self._holes.insert(at, (offset, size))
