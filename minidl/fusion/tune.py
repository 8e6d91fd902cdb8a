"""Chooses a plan by measuring: every way that could be the fastest runs on this machine, on arrays of these sizes.

Batch norms that share a kernel whatever the plan, the two below a residual sum, are one group. For each group its piece
of the network (`minidl.fusion.piece`) is timed in every way that the model of `minidl.fusion.cost` does not rule out,
forward and backward apart, all ways in turns. Where modes of two groups meet in one pass of one convolution, that pass
is timed with both, too. The sum of these terms is then least (`minidl.fusion.chain`). Equal pieces are timed once. What
is put together so runs at last as a whole, beside the fixed plans, and the fastest is taken (`minidl.fusion.contest`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from minidl.backend import get_ops
from minidl.cuda import capture, nvrtc
from minidl.cuda.device import current_device
from minidl.cuda.launch import dry_run
from minidl.fusion.chain import Term, best
from minidl.fusion.contest import Whole, can_run_alone, contestants, record, winner
from minidl.fusion.cost import Machine, heuristic, predict, runs_as, site_cost
from minidl.fusion.piece import Cut, Piece, cut
from minidl.fusion.plans import (
    MODES,
    PLANS,
    Plan,
    candidates,
    choose,
    fingerprint,
    modes_of,
    modes_on,
    needs,
    switches,
    way_of,
)
from minidl.fusion.sites import Site, find_sites
from minidl.graph import Graph
from minidl.precision import Precision
from minidl.profile.timing import Budget, Timing, timer

__all__ = [
    "Clock",
    "DeviceClock",
    "Group",
    "Measured",
    "compile_ahead",
    "fastest",
    "groups",
    "measure",
    "told",
    "tune",
]

PASSES = ("forward", "backward")
BUDGET = Budget(samples=7, seconds=float("inf"), sample_ms=1.0)
# Of whole networks: samples so long that it shows what power slows them down, so many that they tell one in forty.
WHOLE = Budget(samples=12, seconds=float("inf"), sample_ms=100.0)

Switches = frozenset[tuple[str, str]]
Ways = tuple[str, ...]


class Clock(Protocol):
    """Whoever times pieces."""

    def __call__(self, cut: Cut, which: str, variants: Sequence[Switches]) -> list[Timing]:
        """A pass of a piece with each of these sets of modes on, in turns."""

    def whole(self, graph: Graph, batch: int, variants: Sequence[Switches]) -> list[Timing] | None:
        """Both passes of a network with each of these sets of modes on, in turns; None where it cannot be run."""


class DeviceClock:
    """Times pieces on the device of an operation table, and whole networks by a budget of their own."""

    def __init__(self, ops: ModuleType, precision: Precision, budget: Budget = BUDGET, whole: Budget = WHOLE):
        self._ops, self._precision, self._budget, self._whole = ops, precision, budget, whole
        self._timer = timer(ops)
        self._piece: Piece | None = None

    def __call__(self, cut: Cut, which: str, variants: Sequence[Switches]) -> list[Timing]:
        if self._piece is None or self._piece.cut is not cut:
            self.release()
            self._piece = Piece(cut, self._ops, self._precision, self._timer.cache_bytes)
        return self._timer.in_turns([self._piece.calls(which, on) for on in variants], self._budget)

    def whole(self, graph: Graph, batch: int, variants: Sequence[Switches]) -> list[Timing] | None:
        self.release()
        if not can_run_alone(graph):
            return None
        try:
            network = Whole(graph, batch, self._ops, self._precision)
            with network.held():
                return self._timer.in_turns([[partial(network, on)] for on in variants], self._whole)
        except MemoryError:  # as where activations are to travel in training
            return None
        finally:
            self.release()

    def release(self) -> None:
        """Let go of the piece and of the memory that its timing took."""
        self._piece = None
        if self._ops.name == "cuda":
            capture.release()


@dataclass(frozen=True)
class Group:
    """Batch norms that are timed together, and every way of running them.

    Attributes:
        ways: the combinations, one way for each site.
        same: for each combination the one whose kernels it runs, see `minidl.fusion.cost.runs_as`.
        predicted_ms: by the model, forward and backward.
        timed: the combinations that are worth a measurement.
    """

    sites: tuple[Site, ...]
    ways: tuple[Ways, ...]
    same: Mapping[Ways, Ways]
    predicted_ms: Mapping[Ways, float]
    timed: tuple[Ways, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(site.name for site in self.sites)

    def runs(self, plan: Plan) -> Ways:
        """The ways whose kernels these sites run by a plan."""
        return self.same[tuple(plan.sites[name] for name in self.names)]

    def on(self, ways: Ways, which: str) -> Switches:
        """The modes of a combination that a pass notices."""
        return frozenset().union(*(switches(s, w, which) for s, w in zip(self.sites, ways, strict=True)))


def groups(
    graph: Graph, batch: int, precision: Precision, machine: Machine, *, everything: bool = False
) -> list[Group]:
    """The groups of a network; with ``everything`` also ways that others dominate are to be timed."""
    sites = {site.name: site for site in find_sites(graph)}
    found, seen = [], set()
    for site in sites.values():
        if site.name not in seen:
            members = (site,) if site.partner is None else (site, sites[site.partner])
            seen |= {member.name for member in members}
            found.append(_group(graph, members, batch, precision, machine, everything))
    return found


def _group(
    graph: Graph, sites: tuple[Site, ...], batch: int, precision: Precision, machine: Machine, everything: bool
) -> Group:
    same, times, moved = {}, {}, {}
    for ways in itertools.product(*map(candidates, sites)):
        pairs = list(zip(sites, ways, strict=True))
        same[ways] = tuple(runs_as(graph, site, way, precision, machine) for site, way in pairs)
        times[ways] = sum(predict(graph, site, way, batch, precision, machine).ms for site, way in pairs)
        moved[ways] = sum(site_cost(site, way, batch, 1).bytes for site, way in pairs)
    distinct = list(dict.fromkeys(same.values()))
    timed = distinct if everything else _worth_timing(distinct, moved)
    return Group(sites, tuple(same), same, times, tuple(timed))


def _worth_timing(ways: Sequence[Ways], moved: Mapping[Ways, int]) -> list[Ways]:
    """Without those that move more bytes than another which asks no more of convolutions."""
    asked = {w: {(i, m) for i, way in enumerate(w) for m in modes_of(way) if MODES[m].by} for w in ways}
    return [w for w in ways if not any(asked[v] <= asked[w] and moved[v] < moved[w] for v in ways)]


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


def compile_ahead(graph: Graph, batch: int, precision: Precision, found: Sequence[Group]) -> int:
    """Compile what `measure` will launch on the current GPU, on all cores; how many kernels were not there yet."""
    device = current_device()
    with dry_run(device) as log:
        measure(graph, batch, found, _Walking(get_ops("cuda"), precision))
        if can_run_alone(graph):
            network, sites = Whole(graph, batch, get_ops("cuda"), precision), find_sites(graph)
            for how in PLANS:
                network(modes_on(sites, choose(sites, how)))
    arch = nvrtc.target(device.arch)
    missing = [kernel for kernel in log.variants if not nvrtc.is_built(kernel[0], arch, dict(kernel[1]))]
    nvrtc.compile_all(missing, arch)
    return len(missing)


def tune(
    graph: Graph,
    batch: int,
    precision: Precision,
    machine: Machine,
    clock: Clock | None = None,
    *,
    everything: bool = False,
    setting: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Plan:
    """The plan that measures fastest.

    Args:
        graph: of the network; it may belong to a model, nothing of which changes.
        batch: samples of this rank.
        machine: for the model of time.
        clock: default: the one of the current GPU, for which kernels are compiled first.
        everything: time ways that others dominate, too.
        setting: what the measurements hold for, kept in the plan.
    """
    found = groups(graph, batch, precision, machine, everything=everything)
    if clock is None:
        compile_ahead(graph, batch, precision, found)
        clock = DeviceClock(get_ops("cuda"), precision)
    measured = measure(graph, batch, found, clock, progress=progress)
    if isinstance(clock, DeviceClock):
        clock.release()
    plan = fastest(graph, batch, precision, machine, found, measured, clock)
    progress(told(plan))
    return replace(plan, setting=dict(setting) if setting else None)


def fastest(
    graph: Graph,
    batch: int,
    precision: Precision,
    machine: Machine,
    found: Sequence[Group],
    measured: Measured,
    clock: Clock,
) -> Plan:
    """The model's plan; or that put together of what was measured, or a fixed one, where it is faster as a whole.

    Args:
        found: the network's `groups`.
        measured: what `measure` found of them.
        clock: runs the network; where it cannot, the composed plan is taken unseen.
    """
    sites = find_sites(graph)
    ways = best({site.name: candidates(site) for site in sites}, measured.terms)
    composed = Plan(ways, fingerprint(sites), evidence=measured.evidence)
    auto = heuristic(graph, sites, precision, machine)
    runs = lambda plan: tuple(group.runs(plan) for group in found)  # noqa: E731
    plans = contestants(sites, auto, composed, measured.terms, runs)
    timings = clock.whole(graph, batch, [modes_on(sites, plan) for plan in plans.values()])
    if timings is None:
        return composed
    named = dict(zip(plans, timings, strict=True))
    return replace(composed, sites=plans[winner(named)].sites, contest=record(named))


def told(plan: Plan) -> str:
    """How the contest of a tuned plan went, in words."""
    rows = sorted(plan.contest, key=lambda row: row["ms"])
    if not rows:
        return "put together of the fastest ways; the network was not run as a whole"
    return "as a whole: " + ", ".join(f"{row['plan']} {row['ms']:.3f} ms" for row in rows)
