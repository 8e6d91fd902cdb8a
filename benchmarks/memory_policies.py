"""Other ways to decide, for comparison: they see the same trace and the same candidates as the dynamic programme.

* `static`: level 0, the model of Jhu (National Taiwan University, 2018) and GeePS (Cui et al., EuroSys 2016): a tensor
  is pinned for the whole step or not at all, and a buffer is set aside for the unpinned ones, ``beta`` times the
  largest set that one step touches (2: one half is filled while the other is used). Here the best such set, by
  dynamic programming for each size of the buffer.
* `geeps`: the same model, filled greedily as the source of GeePS does it. All that a step touches goes through its
  buffer, what lives for two steps only as well.
* `vdnn`: offload the inputs of convolutions, or everything (vDNN, Rhu et al., MICRO 2016), whatever the limit.
* `cheap`: rebuild what comes out of element-wise layers (batch norm, ReLU, joins), keep the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from minidl.memory.gaps import Problem
from minidl.memory.joint import KEEP, REBUILD, Joint
from minidl.memory.pinning import granule_of
from minidl.memory.plan import Infeasible, Plan, human

BETA = 2
_MOST_OPEN = 12

_Flags = tuple[tuple[int, bool], ...]


@dataclass(frozen=True)
class _Accesses:
    """Level 0: what each step touches of the candidates, and what it needs beside."""

    sizes: tuple[int, ...]
    sets: tuple[tuple[int, ...], ...]  # candidates touched, for each distinct step
    other: tuple[int, ...]  # most bytes beside them of the steps that touch these

    def reserve(self, pinned: Iterable[int], beta: int) -> int:
        """Bytes to set aside when ``pinned`` stay."""
        pinned = set(pinned)
        return max(
            o + beta * sum(self.sizes[i] for i in s if i not in pinned)
            for s, o in zip(self.sets, self.other, strict=True)
        )


def _accesses(problem: Problem, short_lived: int = 1) -> _Accesses:
    """``short_lived``: how many times what is touched and no candidate counts."""
    trace = problem.trace
    touched: list[list[int]] = [[] for _ in trace.steps]
    other = np.array([step.workspace for step in trace.steps], np.int64)
    of = {gap.tensor: i for i, gap in enumerate(problem.gaps)}
    for i, tensor in enumerate(trace.tensors):
        if i in of:
            for t in tensor.touches:
                touched[t].append(of[i])
        elif tensor.resident:
            other += tensor.bytes
        else:
            other[tensor.first : tensor.last + 1] += tensor.bytes
            other[list(tensor.touches)] += (short_lived - 1) * tensor.bytes
    largest: dict[tuple[int, ...], int] = {}
    for some, beside in zip(touched, other.tolist(), strict=True):
        key = tuple(sorted(some))
        largest[key] = max(largest.get(key, 0), beside)
    return _Accesses(tuple(gap.bytes for gap in problem.gaps), tuple(largest), tuple(largest.values()))


def _too_small(policy: str, capacity: int) -> Infeasible:
    return Infeasible(f"{policy}: its buffer for what is not pinned does not fit in {human(capacity)}")


def geeps(problem: Problem, capacity: int, beta: int = BETA) -> Plan:
    """GeePS: pin one of the step with the largest set while the smaller buffer pays, else whatever fits; repeat.

    Raises:
        Infeasible: when the buffer does not fit before anything is pinned.
    """
    access = _accesses(problem, short_lived=beta)
    pinned: list[int] = []
    spent = 0
    if access.reserve((), beta) > capacity:
        raise _too_small("geeps", capacity)
    while True:
        fits = [
            i
            for i in _of_peak(access, pinned, beta)
            if i not in pinned and spent + access.sizes[i] + access.reserve([*pinned, i], beta) <= capacity
        ][:1]
        if not fits:
            room = capacity - access.reserve(pinned, beta) - spent
            for i, size in enumerate(access.sizes):
                if i not in pinned and size <= room:
                    fits.append(i)
                    room -= size
        if not fits:
            return problem.plan("geeps", capacity, pinned)
        pinned += fits
        spent += sum(access.sizes[i] for i in fits)


def _of_peak(access: _Accesses, pinned: Sequence[int], beta: int) -> tuple[int, ...]:
    """The candidates of the step that decides the size of the buffer."""
    held = set(pinned)
    loads = [
        o + beta * sum(access.sizes[i] for i in s if i not in held)
        for s, o in zip(access.sets, access.other, strict=True)
    ]
    return access.sets[int(np.argmax(loads))]


def static(problem: Problem, capacity: int, beta: int = BETA) -> Plan:
    """The best static pinning: for each size of the buffer that can occur, a knapsack over the candidates.

    With a buffer of theta bytes every step must find ``beta`` times its unpinned set (and what it needs beside) within
    theta, and the pinned ones share what is left. Candidates are decided in order; those of steps not yet complete
    are remembered one by one, the sums of all others as bits of one integer.

    Raises:
        Infeasible: when no buffer is small enough.
        ValueError: when too many candidates are touched by steps that overlap.
    """
    access = _accesses(problem)
    granule = granule_of(access.sizes)
    least = max(access.other)
    found: tuple[int, list[int]] | None = None
    thetas = sorted({theta for theta in _thetas(access, beta) if least <= theta <= capacity})
    for theta in thetas:
        room = (capacity - theta) // granule
        if found is not None and room * granule <= found[0]:
            break  # an even larger buffer leaves less than is pinned already
        kept = _Fill(access, beta, theta, room, granule).solve()
        if kept is not None:
            size = sum(access.sizes[i] for i in kept)
            if found is None or size > found[0]:
                found = size, kept
    if found is None:
        raise _too_small("static", capacity)
    return problem.plan("static", capacity, found[1], granule=granule)


def _thetas(access: _Accesses, beta: int) -> Iterable[int]:
    """Every size that the buffer of some step can have."""
    for some, beside in zip(access.sets, access.other, strict=True):
        sums = {0}
        for i in some:
            sums |= {s + access.sizes[i] for s in sums}
        yield from (beside + beta * s for s in sums)


class _Fill:
    """The knapsack of level 0 for one size of the buffer.

    A state is what is known of the candidates that steps still to be completed touch: (number, pinned) pairs. Its
    value is the set of sums of all candidates pinned so far, in units, as bits of one integer.
    """

    def __init__(self, access: _Accesses, beta: int, theta: int, room: int, granule: int):
        self.access, self.beta, self.theta = access, beta, theta
        self.mask = (1 << (room + 1)) - 1
        self.units = [-(-size // granule) for size in access.sizes]
        self.complete: dict[int, list[int]] = {}  # candidate -> the sets that are known in full once it is decided
        self.ends: dict[int, int] = {}  # candidate -> the last one of all sets that it is in
        for s, some in enumerate(access.sets):
            if some:
                self.complete.setdefault(max(some), []).append(s)
            for i in some:
                self.ends[i] = max(self.ends.get(i, -1), max(some))

    def solve(self) -> list[int] | None:
        """The candidates to pin: as many bytes as there is room for; None when the buffer cannot be so small."""
        states: dict[_Flags, int] = {(): 1}
        history = []
        for i, units in enumerate(self.units):
            new: dict[_Flags, int] = {}
            for flags, sums in states.items():
                for pin, reach in ((False, sums), (True, sums << units & self.mask)):
                    key = self._step(flags, i, pin)
                    if reach and key is not None:
                        new[key] = new.get(key, 0) | reach
            if len(new) > 1 << _MOST_OPEN:
                raise ValueError("static pinning: too many tensors are touched by overlapping steps")
            history.append(states)
            states = new
        if not states:
            return None
        flags, total = max(((f, sums.bit_length() - 1) for f, sums in states.items()), key=lambda item: item[1])
        return self._trace_back(history, flags, total)

    def _step(self, flags: _Flags, i: int, pin: bool) -> _Flags | None:
        """The state behind candidate ``i``; None when a step that is now known in full exceeds the buffer."""
        known = {**dict(flags), i: pin}
        for s in self.complete.get(i, ()):
            unpinned = sum(self.access.sizes[j] for j in self.access.sets[s] if not known[j])
            if self.access.other[s] + self.beta * unpinned > self.theta:
                return None
        return tuple((j, p) for j, p in sorted(known.items()) if self.ends.get(j, -1) > i)

    def _trace_back(self, history: Sequence[dict[_Flags, int]], flags: _Flags, total: int) -> list[int]:
        """Backwards from the last state: which state before and which choice lead to it."""
        pinned = []
        for i in reversed(range(len(self.units))):
            flags, pin = next(
                (before, pin)
                for before, sums in history[i].items()
                for pin in (True, False)
                if self._step(before, i, pin) == flags and _has(sums, total - pin * self.units[i])
            )
            if pin:
                pinned.append(i)
                total -= self.units[i]
        return pinned[::-1]


def _has(sums: int, total: int) -> bool:
    return total >= 0 and bool(sums >> total & 1)


def vdnn(problem: Problem, capacity: int, which: str = "all") -> Plan:
    """Offload everything ("all") or what convolutions save ("conv"), whatever the limit.

    Raises:
        Infeasible: when that does not fit.
    """
    trace = problem.trace
    kept = []
    for i, gap in enumerate(problem.gaps):
        readers = [trace.steps[t] for t in trace.tensors[gap.tensor].touches]
        by_conv = any(r.pass_name == "backward_weight" and r.layer.startswith("Conv") and r.matrix for r in readers)
        reads = any(
            r.pass_name == "forward" and r.layer.startswith("Conv") and trace.tensors[gap.tensor].first != t
            for t, r in zip(trace.tensors[gap.tensor].touches, readers, strict=True)
        )
        if which == "conv" and not (by_conv and reads):
            kept.append(i)
    plan = problem.plan(f"vdnn-{which}", capacity, kept)
    if plan.peak > capacity:
        raise Infeasible(f"vdnn-{which} needs {human(plan.peak)}, more than {human(capacity)}", needed=plan.peak)
    return plan


def cheap(problem: Problem, capacity: int, joint: Joint) -> Plan:
    """Rebuild what element-wise layers give, keep the rest, whatever the limit.

    Raises:
        Infeasible: when that does not fit.
    """
    codes, kept = [], set(joint.apart)
    for run in joint.runs:
        own = [r if r is not None and r.elementwise else None for r in joint.usable(run)]
        choices = [KEEP if r is None or set(r.sources) - {*run, *kept} else REBUILD for r in own]
        kept |= {i for i, choice in zip(run, choices, strict=True) if choice == KEEP}
        codes.append(sum(choice * 3**p for p, choice in enumerate(choices)))
    plan = joint.finish(problem.peak * 2, set(joint.apart), codes, "cheap")
    if plan.peak > capacity:
        raise Infeasible(f"rebuilding cheap layers needs {human(plan.peak)}, more than {human(capacity)}")
    return plan
