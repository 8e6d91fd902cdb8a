"""Times every way that could be the fastest, on this machine, on arrays of a network's sizes.

For each group of batch norms its piece of the network (`minidl.fusion.piece`) is timed in every way that the model of
`minidl.fusion.cost` does not rule out, forward and backward apart, all ways in turns. Where modes of two groups meet in
one pass of one convolution, that pass is timed with both, too. Equal pieces are timed once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from minidl.backend import get_ops
from minidl.cuda import ahead
from minidl.fusion.chain import Term
from minidl.fusion.clock import Clock
from minidl.fusion.contest import Whole, can_run_alone
from minidl.fusion.groups import Group, Switches, Ways
from minidl.fusion.piece import Cut, Piece, cut
from minidl.fusion.plans import MODES, PLANS, candidates, choose, modes_of, modes_on, needs, switches, way_of
from minidl.fusion.sites import Site, find_sites
from minidl.graph import Graph
from minidl.precision import Precision
from minidl.profile.timing import Timing

PASSES = ("forward", "backward")


class Measured(NamedTuple):
    """What measuring found: the terms of a step's time, and the record of each group."""

    terms: list[Term]
    evidence: list[dict[str, Any]]


def measure(
    graph: Graph,
    batch: int,
    found: Sequence[Group],
    clock: Clock,
    *,
    progress: Callable[[str], None] = lambda text: None,
) -> Measured:
    """Time what is worth it.

    Args:
        graph: of the network, which is only looked at.
        batch: samples of this rank.
        found: its `groups`.
        clock: times pieces; `DeviceClock` does.
        progress: told after each group.
    """
    timed = _Remembering(clock)
    measured = Measured([], [])
    for i, group in enumerate(found):
        term, record = _time_group(graph, group, batch, timed)
        measured.terms.append(term)
        measured.evidence.append(record)
        progress(f"{i + 1} of {len(found)}: {' and '.join(group.names)}")
    for a, b in itertools.permutations(found, 2):
        measured.terms.extend(_time_meetings(graph, a, b, batch, timed))
    return measured


class _Remembering:
    """Times equal pieces once."""

    def __init__(self, clock: Clock):
        self._clock, self._known = clock, {}

    def __call__(self, cut: Cut, which: str, variants: Sequence[Switches]) -> dict[Switches, Timing]:
        place = {member.layer.name: i for i, member in enumerate(cut.members)}
        # Modes of layers outside of the piece change nothing in it.
        inside = {on: frozenset((name, word) for name, word in on if name in place) for on in variants}
        keys = {on: (cut.key, which, frozenset((place[n], word) for n, word in inside[on])) for on in variants}
        new = {keys[on]: inside[on] for on in variants if keys[on] not in self._known}
        for key, timing in zip(new, self._clock(cut, which, list(new.values())) if new else (), strict=True):
            self._known[key] = timing
        return {on: self._known[keys[on]] for on in keys}


def _time_group(graph: Graph, group: Group, batch: int, timed: _Remembering) -> tuple[Term, dict[str, Any]]:
    """(milliseconds of every combination, the record); what was not timed lies as far behind as the model thinks."""
    piece = cut(graph, group.sites, batch)
    took: dict[Ways, list[Timing]] = {}
    if piece is not None:
        variants = {which: {ways: group.on(ways, which) for ways in group.timed} for which in PASSES}
        passes = {which: timed(piece, which, list(dict.fromkeys(on.values()))) for which, on in variants.items()}
        took = {ways: [passes[which][variants[which][ways]] for which in PASSES] for ways in group.timed}
    ms = {ways: sum(timing.ms for timing in timings) + _unseen(group, ways, piece) for ways, timings in took.items()}
    fastest = min(ms, key=ms.__getitem__, default=None)
    for ways in group.ways:
        if ways not in ms:
            behind = group.predicted_ms[ways] - (group.predicted_ms[fastest] if fastest else 0.0)
            base = ms[fastest] + max(behind, 0.0) if fastest else behind
            ms[ways] = ms.get(group.same[ways], base)
    return Term(group.names, ms), _record(group, batch, ms, took)


def _unseen(group: Group, ways: Ways, piece: Cut) -> float:
    """What modes of layers outside the piece save, by the model: statistics joined for a concatenation."""
    inside = {member.layer.name for member in piece.members}
    seen = tuple(
        way_of(mode for mode in modes_of(way) if any(name in inside for name, _ in switches(site, mode)))
        for site, way in zip(group.sites, ways, strict=True)
    )
    return group.predicted_ms[ways] - group.predicted_ms[seen]


def _record(
    group: Group, batch: int, ms: Mapping[Ways, float], took: Mapping[Ways, Sequence[Timing]]
) -> dict[str, Any]:
    """What was found of a group, JSON-able: a row for each way that runs kernels of its own."""
    rows = []
    for ways in dict.fromkeys(group.same.values()):
        row = {"ways": list(ways), "ms": ms[ways], "predicted_ms": group.predicted_ms[ways], "spread": None}
        row |= {f"{which}_ms": None for which in PASSES}
        if ways in took:
            row |= {f"{which}_ms": timing.ms for which, timing in zip(PASSES, took[ways], strict=True)}
            row["spread"] = max(timing.spread for timing in took[ways])
        rows.append(row)
    return {"sites": list(group.names), "shape": [batch, *group.sites[0].shape], "timed": bool(took), "rows": rows}


def _time_meetings(graph: Graph, one: Group, other: Group, batch: int, timed: _Remembering) -> Iterator[Term]:
    """What modes of two neighbours cost in one kernel beyond the sum of what each costs alone."""
    for (a, mine), (b, theirs) in itertools.product(_asked_of_convolutions(one), _asked_of_convolutions(other)):
        if getattr(a, MODES[mine].by) != getattr(b, MODES[theirs].by):
            continue
        piece = cut(graph, (a, b), batch)
        extra = 0.0
        for which in PASSES if piece else ():
            if which in MODES[mine].passes and which in MODES[theirs].passes:
                extra += _extra(piece, which, (a, mine), (b, theirs), timed)
        if extra:
            ways = itertools.product(candidates(a), candidates(b))
            both = {(p, q): extra for p, q in ways if mine in modes_of(p) and theirs in modes_of(q)}
            yield Term((a.name, b.name), both)


def _asked_of_convolutions(group: Group) -> list[tuple[Site, str]]:
    """(batch norm, mode) of what is timed in a group and done by a convolution."""
    pairs = [(s, m) for ways in group.timed for s, way in zip(group.sites, ways, strict=True) for m in modes_of(way)]
    return [(site, mode) for site, mode in dict.fromkeys(pairs) if MODES[mode].by]


def _extra(piece: Cut, which: str, a: tuple[Site, str], b: tuple[Site, str], timed: _Remembering) -> float:
    ways = [[(s, way_of(needs(s, mode))), (s, way_of({mode} | needs(s, mode)))] for s, mode in (a, b)]
    variants = [switches(*p, which) | switches(*q, which) for p, q in itertools.product(*ways)]
    took = timed(piece, which, list(dict.fromkeys(variants)))
    neither, second, first, both = (took[on].ms for on in variants)
    return both - first - second + neither


class _Walking:
    """A clock that runs every piece once, on shapes, so that a dry run sees its kernels."""

    def __init__(self, ops: ModuleType, precision: Precision):
        self._ops, self._precision = ops, precision

    def __call__(self, cut: Cut, which: str, variants: Sequence[Switches]) -> list[Timing]:
        piece = Piece(cut, self._ops, self._precision, cache_bytes=0)
        for on in variants:
            piece.calls(which, on)[0]()
        return [Timing((1.0, 1.0))] * len(variants)


def compile_ahead(graph: Graph, batch: int, precision: Precision, found: Sequence[Group]) -> None:
    """Compile what `measure` will launch on the current GPU, on all cores."""

    def walk() -> None:
        measure(graph, batch, found, _Walking(get_ops("cuda"), precision))
        if can_run_alone(graph):
            network, sites = Whole(graph, batch, get_ops("cuda"), precision), find_sites(graph)
            for how in PLANS:
                network(modes_on(sites, choose(sites, how)))

    ahead.compile_ahead(walk)
