"""Pieces of memory on one clock: never two in the same bytes at a time, and hardly more bytes than live at once."""

from __future__ import annotations

import numpy as np
import pytest

from minidl.memory.placement import Piece, pack
from tests.memory_engine import require_apart


def test_placements_never_overlap(rng):
    tight = []
    for _ in range(60):
        count = int(rng.integers(1, 60))
        begin = rng.integers(0, 40, count)
        end = begin + rng.integers(0, 20, count)
        sizes = rng.integers(0, 5000, count)
        pieces = [Piece(int(s), int(b), int(e)) for s, b, e in zip(sizes, begin, end, strict=True)]
        offsets, total = pack(pieces)
        require_apart(pieces, offsets, total)
        held = [sum(-(-p.bytes // 512) * 512 for p in pieces if p.begin <= t <= p.end) for t in range(60)]
        assert total >= max(held)
        tight.append(total / max(max(held), 1))
    assert np.median(tight) < 1.1


def test_a_planted_overlap_is_found():
    pieces = [Piece(1000, 0, 3), Piece(1000, 2, 5)]
    with pytest.raises(ValueError, match="same bytes at the same time"):
        require_apart(pieces, [0, 512], 2048)
    with pytest.raises(ValueError, match="of an arena of 1536"):
        require_apart(pieces, [0, 1024], 1536)
    require_apart([Piece(1000, 0, 1), Piece(1000, 2, 5)], [0, 0], 1024)
