"""Chooses a plan by measuring.

What `minidl.fusion.measure` found are terms of a step's time, whose sum is then least (`minidl.fusion.chain`). What is
put together so runs at last as a whole, beside the model's plan and the fixed ones (`minidl.fusion.contest`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from minidl.backend import get_ops
from minidl.fusion.chain import best
from minidl.fusion.clock import Clock, DeviceClock
from minidl.fusion.contest import contestants, record, winner
from minidl.fusion.cost import Machine, heuristic
from minidl.fusion.groups import Group, groups
from minidl.fusion.measure import Measured, compile_ahead, measure
from minidl.fusion.plans import Plan, candidates, fingerprint, modes_on
from minidl.fusion.sites import find_sites
from minidl.graph import Graph
from minidl.precision import Precision


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
