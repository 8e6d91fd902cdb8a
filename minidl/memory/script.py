"""A plan down to the byte: where each array of the step lies, in the order in which the step asks for memory."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np

from minidl.cuda.launch import dry_run
from minidl.memory.placement import Piece, pack
from minidl.memory.plan import Decision, Infeasible, Plan, on_host, too_small
from minidl.memory.planner import StepPlanner
from minidl.memory.program import Operation, program
from minidl.memory.recording import Place, Recording, Run, mapped, parts
from minidl.memory.trace import Trace
from minidl.memory.visits import last_pass
from minidl.memory.watch import Watcher, root

_ATTEMPTS = 8
_CLOSE = 64  # a limit less than this part below another is not looked between


@dataclass(frozen=True)
class Request:
    """One array that the step asks for: ``offset`` in the arena, None where the caller keeps it."""

    bytes: int
    step: int
    offset: int | None


@dataclass(frozen=True)
class Script:
    """All that an executor does, decided.

    Attributes:
        operations: see `minidl.memory.program`.
        requests: in order.
        rebuilds: for each rebuilt tensor what its forward passes ask for, in order.
        here: offset of each tensor when it is made; those that the caller keeps are missing.
        back: offset of each moved or rebuilt tensor when it is there again.
        host: offset of each moved tensor in the host's memory.
        beside: bytes on the device that are not in the arena, as `outside` counts them.
    """

    trace: Trace
    plan: Plan
    operations: tuple[Operation, ...]
    requests: tuple[Request, ...]
    rebuilds: Mapping[int, tuple[Request, ...]]
    here: Mapping[int, int]
    back: Mapping[int, int]
    host: Mapping[int, int]
    arena_bytes: int
    host_bytes: int
    beside: int

    @property
    def held(self) -> int:
        """Most bytes on the device."""
        return self.arena_bytes + self.beside

    @cached_property
    def awaited(self) -> frozenset[int]:
        """Places in the program that something waits for."""
        return frozenset(op.index for op in self.operations if op.kind == "wait")

    @cached_property
    def decisions(self) -> dict[int, Decision]:
        """By tensor, of those that go away."""
        return {d.tensor: d for d in self.plan.decisions if d.choice != "keep"}

    @cached_property
    def saved(self) -> dict[str, int]:
        """Tensor by ``<layer>.<name given to save>``, of those that go away."""
        return {saver: i for i in self.decisions for saver in self.trace.tensors[i].savers}

    @cached_property
    def visitors(self) -> dict[str, int]:
        """Tensor by name, of those that visit."""
        return {self.trace.tensors[i].name: i for i in self.trace.visitors}

    @cached_property
    def last(self) -> int:
        """The last step that is no update: updates behind it touch no memory of the arena."""
        return last_pass(self.trace)

    @cached_property
    def following(self) -> list[int]:
        """By step + 1 the next one that is no update; -1 behind the last."""
        return self._next(lambda pass_name: pass_name != "update")

    @cached_property
    def updates(self) -> list[int]:
        """By step + 1 the next update; -1 behind the last."""
        return self._next(lambda pass_name: pass_name == "update")

    def _next(self, wanted: Callable[[str], bool]) -> list[int]:
        found = [-1]
        for t in reversed(range(len(self.trace))):
            found.append(t if wanted(self.trace.steps[t].pass_name) else found[-1])
        return found[::-1]

    @cached_property
    def touched(self) -> dict[int, list[int]]:
        """For each step that is run again the tensors that it touches."""
        steps = {r for d in self.plan.decisions for r in d.recipe}
        found: dict[int, list[int]] = {r: [] for r in steps}
        for i, tensor in enumerate(self.trace.tensors):
            for t in tensor.touches:
                if t in found and i in self.here:
                    found[t].append(i)
        return found


def rebuild(
    recipe: tuple[int, ...],
    runs: Mapping[int, Run],
    locate: Callable[[Place], Any],
    within: Callable[[Any, int, Place], Any],
) -> dict[int, Any]:
    """Run forward passes once more; what they gave, by tensor.

    Args:
        locate: the array at a place of a tensor that is there.
        within: the array at a place of a tensor of which an array is known that begins so many bytes behind it.
    """
    made: dict[int, tuple[Any, int]] = {}

    def find(place: Place) -> Any:
        return within(*made[place.tensor], place) if place.tensor in made else locate(place)

    for r in recipe:
        run = runs[r]
        saved = SimpleNamespace(**mapped(dict(run.saved), find, Place))
        result = run.layer.rerun(saved, *mapped(run.given, find, Place))
        for place, array in zip(parts(run.result), parts(result), strict=True):
            if isinstance(place, Place):
                made.setdefault(place.tensor, (array, place.offset))
    return {tensor: array for tensor, (array, _) in made.items()}


@dataclass(frozen=True)
class _Rehearsed:
    """One array that a rebuilding asks for; ``target``: what it is all for."""

    bytes: int
    begin: int
    end: int
    target: bool


def _rehearse(recording: Recording, decision: Decision) -> list[_Rehearsed]:
    """Walk a rebuilding on shapes alone, with the recording's own layers."""
    watcher = Watcher()
    tensors = recording.trace.tensors
    stand_ins: dict[int, np.ndarray] = {}

    def view(memory: np.ndarray, place: Place) -> np.ndarray:
        return np.ndarray(place.shape, place.dtype, memory, place.offset, place.strides)

    def locate(place: Place) -> np.ndarray:
        if place.tensor not in stand_ins:
            stand_ins[place.tensor] = np.empty(tensors[place.tensor].bytes, np.uint8)
        return view(stand_ins[place.tensor], place)

    with dry_run(recording.device, watcher):
        made = rebuild(decision.recipe, recording.runs, locate, lambda array, _, place: view(root(array), place))
        target = watcher.find(made[decision.tensor])
        end = watcher.now
    found = []
    for memory in watcher.all:
        if memory.nbytes:
            freed = memory.freed if memory.freed is not None else end
            found.append(_Rehearsed(memory.nbytes, memory.order, freed, memory is target))
    assert sum(item.target for item in found) == 1, f"{tensors[decision.tensor].name} is not what its recipe makes"
    return found


class _Layout:
    """Collects pieces of memory on one clock: steps in order, each with its rebuildings before its own work."""

    def __init__(self, recording: Recording, rehearsed: Mapping[int, list[_Rehearsed]], plan: Plan):
        self.pieces: list[Piece] = []
        self.begin: list[int] = []
        self.end: list[int] = []
        self.own: list[int] = []  # of each step: when its own work begins
        self.rebuilt: dict[int, int] = {}
        rebuilds: dict[int, list[int]] = defaultdict(list)
        for d in plan.chosen("recompute"):
            rebuilds[d.back].append(d.tensor)
        clock = 0
        for t, (first, last) in enumerate(recording.ticks):
            self.begin.append(clock)
            for i in rebuilds[t]:
                self.rebuilt[i] = clock
                clock += max(item.end for item in rehearsed[i]) + 1
            self.own.append(clock - first)
            clock += last - first + 1
            self.end.append(clock - 1)

    def stay(self, size: int, first: int, last: int) -> int:
        """A piece from step ``first`` to step ``last``; its number."""
        return self.piece(size, self.begin[first], self.end[last])

    def piece(self, size: int, begin: int, end: int) -> int:
        self.pieces.append(Piece(size, begin, end))
        return len(self.pieces) - 1


def write(recording: Recording, plan: Plan) -> Script:
    """The script of ``plan``, which must be one for the recording's trace and have passed `check`."""
    trace = recording.trace
    away = {d.tensor: d for d in plan.decisions if d.choice != "keep"}
    rehearsed = {i: _rehearse(recording, d) for i, d in away.items() if d.choice == "recompute"}
    layout = _Layout(recording, rehearsed, plan)
    here, back = {}, {}
    handed_out = {a.tensor for a in recording.allocations if a.handed_out and a.tensor is not None}
    for i, tensor in enumerate(trace.tensors):
        if tensor.resident or tensor.given or i in handed_out:
            continue
        d = away.get(i)
        here[i] = layout.stay(tensor.bytes, tensor.first, tensor.last if d is None else d.gone - 1)
        if tensor.visit is not None:
            back[i] = here[i]
        if d is not None:
            back[i] = layout.stay(tensor.bytes, d.fetch, tensor.last)
    spaces = {
        n: layout.piece(a.nbytes, layout.own[a.step] + a.begin, min(layout.own[a.step] + a.end, layout.end[a.step]))
        for n, a in enumerate(recording.allocations)
        if a.tensor is None and not a.handed_out
    }
    remade = {
        i: [
            back[i] if item.target else layout.piece(item.bytes, start + item.begin, start + item.end)
            for item in rehearsed[i]
        ]
        for i, start in layout.rebuilt.items()
    }
    offsets, total = pack(layout.pieces)
    host, host_bytes = on_host(trace, plan)
    requests = []
    for n, a in enumerate(recording.allocations):
        if a.step >= 0 and trace.steps[a.step].pass_name == "update":
            continue
        piece = spaces.get(n, here.get(a.tensor))
        requests.append(Request(a.nbytes, a.step, None if piece is None else offsets[piece]))
    return Script(
        trace, plan, tuple(program(trace, plan)), tuple(requests),
        {
            i: tuple(
                Request(item.bytes, away[i].back, offsets[p]) for item, p in zip(rehearsed[i], pieces, strict=True)
            )
            for i, pieces in remade.items()
        },
        {i: offsets[p] for i, p in here.items()}, {i: offsets[p] for i, p in back.items()}, host, total, host_bytes,
        outside(recording),
    )  # fmt: skip


def outside(recording: Recording) -> int:
    """Bytes on the device that are in no arena of a script: parameters and their company, the batch, results."""
    trace = recording.trace
    handed_out = sum(a.nbytes for a in recording.allocations if a.handed_out)
    given = sum(t.bytes for t in trace.tensors if t.given and not t.resident)
    return sum(trace.resident_bytes.values()) + handed_out + given


def fitted(recording: Recording, capacity: int, planner: StepPlanner, reserve: int = 0) -> Script:
    """The script of a plan whose arena and all beside it stay within ``capacity`` bytes.

    Alignment and holes between pieces take a little more than the plan counts; the limit given to the planner is
    lowered by as much until everything fits, and each time by a larger part: a little less may be the same plan. Then
    limits halfway back to the last that did not fit are tried. What is left where all that fails are the plans for the
    least memory there is, which are the same for every limit: whoever is told the smallest limit can rely on it.

    Args:
        reserve: bytes that an error counts as well: of the limit, but for others.

    Raises:
        Infeasible: when one step alone exceeds what is left, or from the planner.
    """
    target, failed = capacity, None
    for attempt in range(_ATTEMPTS):
        try:
            plan = planner.best(target)[0]
        except Infeasible as error:
            if error.needed is None:
                raise
            break
        script = write(recording, dataclasses.replace(plan, capacity=capacity))
        over = script.held - capacity
        if over <= 0:
            return script if failed is None else _raised(recording, script, target, failed, planner)
        failed = target
        target = min(target, plan.peak) - max(over, capacity * 2**attempt // 1024)
    return _tightest(recording, capacity, planner, reserve)


def _tightest(recording: Recording, capacity: int, planner: StepPlanner, reserve: int) -> Script:
    """The first script that fits of the plans for the least memory."""
    least = []
    for plan in planner.least():
        script = write(recording, dataclasses.replace(plan, capacity=capacity))
        if script.held <= capacity:
            return script
        least.append(script.held)
    raise too_small(recording.trace, capacity + reserve, planner.worst, min(least) + reserve, reserve)


def _raised(recording: Recording, script: Script, target: int, failed: int, planner: StepPlanner) -> Script:
    """The script for the highest target below ``failed`` that is found to fit as well, where much lies between."""
    while (failed - target) * _CLOSE > failed:
        middle = (target + failed) // 2
        try:
            other = write(recording, dataclasses.replace(planner.best(middle)[0], capacity=script.plan.capacity))
        except Infeasible:
            break
        if other.held <= script.plan.capacity:
            script, target = other, middle
        else:
            failed = middle
    return script
