"""The fastest plan: several ways of planning, each against the clock, and memory left over given to transfers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from minidl import checks
from minidl.memory.gaps import LEAST, NO_WINDOW, WINDOW, Problem, problem
from minidl.memory.joint import LARGEST_GROUP, PAIRED_GROUP, Joint
from minidl.memory.pinning import pin
from minidl.memory.plan import Infeasible, Plan, human, on_host
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
    the memory that it leaves free for wider windows. Later limits, which are about the first, try the ways of its
    fastest plans.

    Args:
        rebuild: joint plans too.
        host_bytes: most bytes on the host, as `on_host` counts them; default: any number.
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
        found = self._tried(capacity, self._ways) or self._tried(capacity, self._all_ways(capacity))
        if not found:
            raise self._too_much_to_move(capacity)
        self._ways = self._ways or [way for *_, ways in found[:_TRIED_AGAIN] for way in ways]
        return found[0][:2]

    def least(self) -> list[Plan]:
        """All plans for the smallest feasible limit, the fastest first; each also without wider windows.

        What is known of other limits does not count: these are the same plans every time.
        """
        floor = self.problem.floor
        ways = self._all_ways(floor)
        found = [*self._tried(floor, ways), *self._tried(floor, ways, wider=False)]
        if not found:
            raise self._too_much_to_move(floor)
        return [plan for plan, *_ in sorted(found, key=lambda one: one[1].total_ms)]

    def _all_ways(self, capacity: int) -> list[_Way]:
        """Joint plans where something would have to move."""
        moving: list[_Way] = [(None, r) for r in RESERVES if capacity * (1 - r) >= self.problem.floor]
        joint = self.rebuild and self._plan(capacity, moving[0]).moved_bytes
        return [*moving, *self._joint_ways()] if joint else moving

    def _too_much_to_move(self, capacity: int) -> Infeasible:
        needed = min(self._hosted(self._plan(capacity, way)) for way in self._all_ways(capacity))
        remedy = "take a higher memory limit, or a smaller batch"
        expected = f"at least {human(needed)}"
        return Infeasible(str(checks.bad_value("memory", "host memory", expected, human(self.host_bytes), remedy)))

    def _hosted(self, plan: Plan) -> int:
        return on_host(self.problem.trace, plan)[1]

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

    def _tried(
        self, capacity: int, ways: Sequence[_Way], *, wider: bool = True
    ) -> list[tuple[Plan, Timeline, list[_Way]]]:
        """Each plan within the limits once, with the ways that give it; the fastest first."""
        plans: dict[Plan, list[_Way]] = {}
        for way in ways:
            if way[0] is not None or capacity * (1 - way[1]) >= self.problem.floor:
                plans.setdefault(self._plan(capacity, way), []).append(way)
        found = []
        for plan, equal in plans.items():
            if self.host_bytes is None or self._hosted(plan) <= self.host_bytes:
                plan = dataclasses.replace(plan, capacity=capacity)
                plan = widen(self.problem.trace, plan) if wider else plan
                found.append((plan, timeline(self.problem.trace, plan, self.times_ms, self.link), equal))
        return sorted(found, key=lambda one: one[1].total_ms)


class StepPlanner:
    """Plans for one step: with windows for copies, and without, where memory is too dear for them.

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
        *wide, tight = self._planners
        found, error = [], None
        for planner in (*(p for p in wide if capacity >= p.problem.floor), tight):
            try:
                found.append(planner.best(capacity))
            except Infeasible as other:
                error = other
                continue
            if not found[-1][0].moved_bytes:
                break  # windows are for what moves
        if not found:
            raise error
        return min(found, key=lambda one: one[1].total_ms)

    @property
    def worst(self) -> int:
        """The step that decides on the smallest feasible limit."""
        return int(self._planners[-1].problem.base.argmax())

    def least(self) -> list[Plan]:
        """As `Planner.least`, without windows."""
        return self._planners[-1].least()


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
