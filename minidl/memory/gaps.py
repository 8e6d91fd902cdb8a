"""The planners' problem: which tensors have a gap around the loss, and what each step holds whatever is decided.

A gap is the time between the last touch of a saved tensor before the loss and its first touch behind it. Its *core*,
``leave + 1 + out .. back - 1 - in``, is when an evicted tensor takes no memory: ``out`` steps are for the copy to the
host to drain, ``in`` steps for the copy back. Tensors whose core does not contain the loss step stay, and so does what
is smaller than ``least`` bytes.

``base[t]`` is everything on the device at step t whatever is decided: parameters and their company, what lives without
a gap, workspace, and tensors with a gap outside their core. It does not depend on decisions, and that makes dynamic
programming exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from minidl import checks
from minidl.memory.plan import Decision, Plan, infeasible
from minidl.memory.trace import Trace

WINDOW = (1, 1)
NO_WINDOW = (0, 0)
LEAST = 1 << 20


@dataclass(frozen=True)
class Gap:
    """One candidate: ``start .. stop`` is its core, both included."""

    tensor: int
    bytes: int
    leave: int
    back: int
    start: int
    stop: int


@dataclass(frozen=True)
class Problem:
    """A trace seen by planners.

    Attributes:
        gaps: the candidates, in the order of their tensors.
        base: (steps,) int64: bytes on the device whatever is decided.
        window: steps for (copy out, copy in).
    """

    trace: Trace
    gaps: tuple[Gap, ...]
    base: np.ndarray
    window: tuple[int, int]

    @cached_property
    def floor(self) -> int:
        """Smallest feasible limit: everything evicted."""
        return int(self.base.max())

    @cached_property
    def usage(self) -> np.ndarray:
        """(steps,) bytes on the device when nothing is evicted."""
        return self.base + occupied(self.gaps, len(self.base))

    @cached_property
    def peak(self) -> int:
        """Most bytes at any step when nothing is evicted."""
        return int(self.usage.max())

    def require(self, capacity: int) -> None:
        """Raise `Infeasible` when one step alone exceeds ``capacity`` bytes, ValueError when that is no number."""
        checks.number("memory", "capacity", capacity, "of bytes", lambda v: v < float("inf"))
        if capacity < self.floor:
            raise infeasible(self.trace, capacity, self.base.tolist())

    def plan(self, policy: str, capacity: int, kept: Iterable[int], *, granule: int = 1, proven: bool = False) -> Plan:
        """The plan that keeps the gaps numbered in ``kept`` and offloads the others."""
        kept = set(kept)
        decisions, inside = [], []
        for i, gap in enumerate(self.gaps):
            choice = "keep" if i in kept else "offload"
            decisions.append(Decision(gap.tensor, choice, gap.leave, gap.start, gap.stop + 1, gap.back))
            if i in kept:
                inside.append(gap)
        kept_bytes = sum(gap.bytes for gap in inside)
        peak = int((self.base + occupied(inside, len(self.base))).max())
        moved = sum(gap.bytes for gap in self.gaps) - kept_bytes
        return Plan(self.trace.digest, policy, capacity, granule, proven, peak, kept_bytes, moved, 0, tuple(decisions))


def occupied(gaps: Iterable[Gap], steps: int) -> np.ndarray:
    """(steps,) bytes of ``gaps`` inside their cores."""
    change = np.zeros(steps + 1, np.int64)
    for gap in gaps:
        change[gap.start] += gap.bytes
        change[gap.stop + 1] -= gap.bytes
    return change[:-1].cumsum()


def problem(trace: Trace, window: tuple[int, int] = WINDOW, least: int = LEAST, *, state: bool = False) -> Problem:
    """The candidates of ``trace`` and the base load of each step.

    Args:
        window: steps before its memory is given away in which a tensor may still be copied out, and steps before it is
            needed in which it may already be copied in.
        least: smaller tensors stay: a copy of them costs more than it frees.
        state: parameters, gradients and momentum may be away as well, each from its last touch before the loss (or from
            the start of the step) to its first one behind it.
    """
    out, into = (checks.at_least("memory planner", "window", w, 0) for w in window)
    least = checks.at_least("memory planner", "least", least, 0)
    change = np.zeros(len(trace) + 1, np.int64)
    gaps = []
    for i, tensor in enumerate(trace.tensors):
        if tensor.resident:
            change[0] += tensor.bytes
        else:
            change[tensor.first] += tensor.bytes
            change[tensor.last + 1] -= tensor.bytes
        before = [t for t in tensor.touches if t <= trace.loss]
        after = [t for t in tensor.touches if t > trace.loss]
        # The batch is the caller's: its memory cannot be given to others.
        movable = (tensor.saved and not tensor.given) or (state and tensor.resident)
        if not movable or not after or not (before or tensor.given) or tensor.bytes < max(least, 1):
            continue
        leave, back = (before[-1] if before else -1), after[0]
        start, stop = leave + 1 + out, back - 1 - into
        if start <= trace.loss <= stop:
            gaps.append(Gap(i, tensor.bytes, leave, back, start, stop))
            change[start] -= tensor.bytes
            change[stop + 1] += tensor.bytes
    base = change[:-1].cumsum() + np.array([step.workspace for step in trace.steps], np.int64)
    return Problem(trace, tuple(gaps), base, (out, into))


def blocks(gaps: Sequence[Gap]) -> list[list[int]]:
    """The finest split of ``gaps`` into runs such that every core of a run lies inside those of the runs before.

    In a chain each gap is its own block: the earlier a tensor is made, the later it is needed. Around a residual join
    the order of leaving and that of coming back differ within the block of layers, and nowhere else.
    """
    leaving = sorted(range(len(gaps)), key=lambda i: (gaps[i].start, -gaps[i].stop, i))
    coming = sorted(range(len(gaps)), key=lambda i: (-gaps[i].stop, gaps[i].start, i))
    place = {i: p for p, i in enumerate(coming)}
    runs, begin, furthest = [], 0, -1
    for p, i in enumerate(leaving):
        furthest = max(furthest, place[i])
        if furthest == p:
            runs.append(leaving[begin : p + 1])
            begin = p + 1
    return runs
