"""The fastest plan: several ways of planning, each against the clock, and memory left over given to transfers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from minidl.memory.gaps import LEAST, NO_WINDOW, WINDOW, Problem, problem
from minidl.memory.joint import LARGEST_GROUP, PAIRED_GROUP, Joint
from minidl.memory.pinning import pin
from minidl.memory.plan import Infeasible, Plan, human
from minidl.memory.simulate import Link, Timeline, check, timeline
from minidl.memory.trace import Trace

RESERVES = (0.0, 0.03, 0.07, 0.15)
PRICES = (0.0, 0.25, 0.5, 1.0, 2.0, 8.0)  # milliseconds for each millisecond on the link, both ways together
_DEAR = 1e6  # moves only what can be had in no other way
_TRIED_AGAIN = 3
_Way = tuple[int | None, float]  # (number of a joint problem, price), or (None, reserve)


class Planner:
    """Plans for one problem at one limit or several: the fastest by the simulator of what all ways of planning give.

    A way is moving alone with a reserve (memory left for early copies back), or a joint plan at a price; each plan gets
    the memory that it leaves free for wider windows. Later limits, which are about the first, try its fastest ways.

    Args:
        rebuild: joint plans too.
        host_bytes: most bytes that may be moved; default: any number.
    """

    def __init__(
        self,
        problem: Problem,
        times_ms: Sequence[float],
        link: Link | None = None,
        *,
        rebuild: bool = True,
        host_bytes: int | None = None,
    ):
        self.problem, self.times_ms, self.link = problem, times_ms, link or Link()
        self.rebuild, self.host_bytes = rebuild, host_bytes
        self._joints: list[Joint] = []
        self._ways: list[_Way] = []

    def best(self, capacity: int) -> tuple[Plan, Timeline]:
        """The fastest plan, and how it runs.

        Raises:
            Infeasible: when one step alone exceeds ``capacity``, or every plan found moves more than ``host_bytes``.
        """
        self.problem.require(capacity)
        found = self._tried(capacity, self._ways[:_TRIED_AGAIN])
        if not found:
            moving: list[_Way] = [(None, r) for r in RESERVES if capacity * (1 - r) >= self.problem.floor]
            found = self._tried(capacity, moving)
            if self.rebuild and self._plan(capacity, moving[0]).moved_bytes:
                found += self._tried(capacity, self._joint_ways())
        if not found:
            raise Infeasible(f"every plan found moves more than {human(self.host_bytes or 0)} to the host")
        found.sort(key=lambda one: one[1].total_ms)
        self._ways = self._ways or list(dict.fromkeys(way for *_, way in found))
        return found[0][:2]

    def _joint_ways(self) -> list[_Way]:
        if not self._joints:
            self._joints = [Joint(self.problem, self.times_ms, largest=n) for n in (LARGEST_GROUP, PAIRED_GROUP)]
        prices = PRICES if self.host_bytes is None else (*PRICES, _DEAR)
        return [(k, price) for k in range(len(self._joints)) for price in prices]

    def _plan(self, capacity: int, way: _Way) -> Plan:
        which, number = way
        if which is None:
            return pin(self.problem, int(capacity * (1 - number)))
        both_ms = (1 / self.link.out_gb_per_s + 1 / self.link.in_gb_per_s) / 2e6
        return self._joints[which].solve(capacity, number * both_ms)

    def _tried(self, capacity: int, ways: Sequence[_Way]) -> list[tuple[Plan, Timeline, _Way]]:
        """Each plan within the limits once, with the first way that gives it."""
        plans: dict[Plan, _Way] = {}
        for way in ways:
            if way[0] is not None or capacity * (1 - way[1]) >= self.problem.floor:
                plans.setdefault(self._plan(capacity, way), way)
        found = []
        for plan, way in plans.items():
            if self.host_bytes is None or plan.moved_bytes <= self.host_bytes:
                plan = widen(self.problem.trace, dataclasses.replace(plan, capacity=capacity))
                found.append((plan, timeline(self.problem.trace, plan, self.times_ms, self.link), way))
        return found


class StepPlanner:
    """Plans for one step: with windows for copies where the limit has room for them, without where it has not.

    Args:
        least, state: as for `minidl.memory.gaps.problem`.
        options: of `Planner`.
    """

    def __init__(
        self,
        trace: Trace,
        times_ms: Sequence[float],
        link: Link | None = None,
        *,
        least: int = LEAST,
        state: bool = False,
        **options: Any,
    ):
        problems = (problem(trace, window, least, state=state) for window in (WINDOW, NO_WINDOW))
        self._planners = [Planner(p, times_ms, link, **options) for p in problems]

    def best(self, capacity: int) -> tuple[Plan, Timeline]:
        """As `Planner.best`."""
        fitting = (planner for planner in self._planners if capacity >= planner.problem.floor)
        return next(fitting, self._planners[-1]).best(capacity)


def best(
    problem: Problem, capacity: int, times_ms: Sequence[float], link: Link | None = None, *, rebuild: bool = True
) -> tuple[Plan, Timeline]:
    """The plan that the simulator finds fastest, and how it runs: see `Planner`, for one limit."""
    return Planner(problem, times_ms, link, rebuild=rebuild).best(capacity)


def widen(trace: Trace, plan: Plan) -> Plan:
    """The same choices with wider windows, within the plan's limit.

    Each copy in may start as early as the planned memory of the steps before allows, those needed first coming first;
    then each copy out gets as much longer, the first to leave coming first.
    """
    device = np.array(check(trace, plan).device, np.int64)
    decisions = list(plan.decisions)
    moved = [i for i, d in enumerate(decisions) if d.choice == "offload"]
    for i in sorted(moved, key=lambda i: decisions[i].back):
        d = decisions[i]
        size = trace.tensors[d.tensor].bytes
        full = np.flatnonzero(device[d.gone + 1 : d.fetch] + size > plan.capacity)
        fetch = d.gone + 2 + int(full[-1]) if len(full) else min(d.gone + 1, d.fetch)
        device[fetch : d.fetch] += size
        decisions[i] = dataclasses.replace(d, fetch=fetch)
    for i in sorted(moved, key=lambda i: decisions[i].leave):
        d = decisions[i]
        size = trace.tensors[d.tensor].bytes
        full = np.flatnonzero(device[d.gone : d.fetch - 1] + size > plan.capacity)
        gone = d.gone + int(full[0]) if len(full) else max(d.fetch - 1, d.gone)
        device[d.gone : gone] += size
        decisions[i] = dataclasses.replace(d, gone=gone)
    return dataclasses.replace(plan, decisions=tuple(decisions), peak=int(device.max()))
