"""What counts as a sample beside all-reduces: only one that they outlast, on every rank."""

from __future__ import annotations

import pytest

from benchmarks.beside import MOST, TRIES, outlasted


class Ranks:
    """Two ranks; the other one's outcomes are planted."""

    def __init__(self, others):
        self.others = iter(others)

    def share(self, value, name=""):
        return [value, next(self.others)]


def test_the_slowest_rank_counts():
    others, own = (
        Ranks([(2.0, True), (9.0, True), (1.0, True), (7.0, True)]),
        [(lambda _: (3.0, True), 5), (lambda _: (8.0, True), 0)],
    )
    first, second = outlasted(others, own, 2)
    assert first.samples_ms == (3.0, 3.0) and second.samples_ms == (9.0, 8.0), "in turns"


def test_samples_that_a_rank_saw_end_early_do_not_count_and_the_next_ones_have_more_traffic():
    counts = []

    def sample(count):
        counts.append(count)
        return 1.0, len(counts) != 2

    (timing,) = outlasted(Ranks([(1.0, False), (9.0, True), (2.0, True), (3.0, True)]), [(sample, 4)], 2)
    assert timing.samples_ms == (2.0, 3.0) and counts == [4, 6, 9, 9]


def test_traffic_that_never_lasts_is_an_error():
    counts = []

    def sample(count):
        counts.append(count)
        return 1.0, False

    with pytest.raises(RuntimeError, match=f"{MOST} all-reduces end before the work beside them; make messages larger"):
        outlasted(Ranks([(1.0, True)] * TRIES), [(sample, MOST - 1)], 2)
    assert len(counts) == TRIES and max(counts) == MOST
