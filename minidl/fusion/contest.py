"""Whole passes of a network, forward and backward, by several plans in turns: they have the last word in tuning.

A plan put together of the fastest way of each batch norm is the fastest if a network takes the sum of what its pieces
take. It does not quite: a kernel finds in the cache what the one before left there, and at its limit of power a GPU
slows down for the sake of all. So the composed plan and the fixed ones challenge the model's. Who wins is decided turn
by turn, for from turn to turn a GPU's clock changes by more than plans differ: a challenger that is faster in nearly
all turns takes the place of the model's plan (a sign test, which asks nothing of how times are distributed).
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from math import comb, prod, sqrt
from types import ModuleType
from typing import Any

import numpy as np

from minidl.dist.communicator import SOLO, Communicator
from minidl.fusion.chain import Term, total
from minidl.fusion.piece import twin
from minidl.fusion.plans import PLANS, Plan, choose, set_modes
from minidl.fusion.sites import Site
from minidl.graph import Graph
from minidl.layers import BatchNorm2d
from minidl.model import Model
from minidl.precision import Precision
from minidl.profile.inputs import noise
from minidl.profile.timing import Timing

COMPOSED, DEFAULT = "composed", "auto"
WITHIN = 1.05  # of the least predicted time: plans that stay behind by more are not worth a run
CHANCE = 0.025  # of a plan no faster than the default to take its place


def contestants(
    sites: Sequence[Site], default: Plan, composed: Plan, terms: Sequence[Term], runs: Callable[[Plan], Any]
) -> dict[str, Plan]:
    """The plans that are worth a run: the default, and by the sum of what was measured all within a twentieth.

    Args:
        terms: what was measured.
        runs: what a plan comes to; of those that come to the same the first is taken, the default before all.
    """
    plans = {DEFAULT: default, COMPOSED: composed, **{how: choose(sites, how) for how in reversed(PLANS)}}
    limit = WITHIN * total(composed.sites, terms)
    distinct: dict[Any, str] = {}
    for name, plan in plans.items():
        if name == DEFAULT or total(plan.sites, terms) <= limit:
            distinct.setdefault(runs(plan), name)
    return {name: plans[name] for name in distinct.values()}


def record(timings: Mapping[str, Timing]) -> list[dict[str, Any]]:
    """A row for each plan: its time, and in how many of the turns it was faster than the default."""
    turns = len(timings[DEFAULT].samples_ms)
    return [
        {"plan": name, "ms": timing.ms, "spread": timing.spread, "ahead": _ahead(timing, timings), "turns": turns}
        for name, timing in timings.items()
    ]


def winner(timings: Mapping[str, Timing]) -> str:
    """The default, unless others are faster in so many turns that chance explains it in one case of forty at most;
    of these the one that gains most, in the median turn."""
    challengers = [name for name, timing in timings.items() if _surely(timing, timings)]
    return min(challengers, key=lambda name: _behind(timings[name], timings), default=DEFAULT)


def _ahead(timing: Timing, among: Mapping[str, Timing]) -> int:
    return sum(mine < theirs for mine, theirs in zip(timing.samples_ms, among[DEFAULT].samples_ms, strict=True))


def _surely(timing: Timing, among: Mapping[str, Timing]) -> bool:
    turns = len(timing.samples_ms)
    return sum(comb(turns, k) for k in range(_ahead(timing, among), turns + 1)) <= CHANCE * 2**turns


def _behind(timing: Timing, among: Mapping[str, Timing]) -> float:
    pairs = zip(timing.samples_ms, among[DEFAULT].samples_ms, strict=True)
    return statistics.median(mine / theirs for mine, theirs in pairs)


def can_run_alone(graph: Graph) -> bool:
    """Whether every layer is one of minidl's, and none has ranks of its own to talk to."""
    return all(
        type(layer).__module__.startswith("minidl.layers.")
        and not any(isinstance(value, Communicator) and value.size > 1 for value in vars(twin(layer)).values())
        for layer in graph.layers
    )


class Whole:
    """A model of the same layers as a network, with weights of its own, on one batch of noise.

    Raises:
        MemoryError: when the device has no room for it.
    """

    def __init__(self, graph: Graph, batch: int, ops: ModuleType, precision: Precision):
        self._model = Model(_copy(graph), device=ops.name, precision=precision, comm=SOLO)
        self._x = noise(ops, (batch, *graph.nodes[0].shape), precision.storage)
        self._dy = noise(ops, (batch, *graph.output_node.shape), precision.storage, seed=1)

    def __call__(self, on: frozenset[tuple[str, str]]) -> None:
        """Forward and backward with exactly these modes."""
        set_modes(self._model.layers, on)
        self._model.forward(self._x)
        self._model.backward(self._dy)
        for _ in self._model.arena.finished():
            pass  # no update takes the gradients

    def held(self) -> AbstractContextManager[None]:
        """Within, all passes draw the same random numbers, so they may be captured."""
        return self._model.random.hold()


def _copy(graph: Graph) -> Graph:
    """The same network, unbound, with weights that are quickly drawn."""
    copy = graph.unbound()
    for layer in copy.layers:
        layer.specs = [dataclasses.replace(s, init=_sketched) if s.product else s for s in layer.specs]
        if isinstance(layer, BatchNorm2d):
            layer.sync = False
    return copy


def _sketched(rng: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Weights that keep the size of what passes through them; they repeat, as to draw all would take seconds."""
    scale = np.float32(sqrt(2 / max(prod(shape[1:]), 1)))
    return np.resize(scale * rng.standard_normal(1 << 14, np.float32), shape)
