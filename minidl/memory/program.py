"""A plan as work for three streams, and the proof that every order it relies on is there.

`program` turns a plan into the list of operations that an executor issues: steps and rebuilding on the compute stream,
copies out and copies in on a stream each, and waits between streams. `validate` builds the happens-before relation of
such a list (order within a stream, and waits) and refuses it when two operations that touch the same memory, or
memory that passed from one tensor to another, are not ordered. Addresses are not known here: whatever is given away
before something else takes memory is assumed to be the same memory. So an order proven here holds for any placement.

No wait that others imply is ever issued; each one that is left out is therefore an error that `validate` finds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from minidl.memory.plan import Decision, Plan
from minidl.memory.trace import Trace
from minidl.memory.visits import last_pass

STREAMS = ("compute", "out", "in")


class Race(ValueError):
    """A program whose operations are not ordered as its plan needs."""


@dataclass(frozen=True)
class Operation:
    """One thing that is issued to a stream.

    Attributes:
        stream: compute, out or in.
        kind: step, rebuild, copy_out, copy_in or wait.
        index: step number for a step, tensor for a rebuilding or copy; for a wait the place in the program of what is
            waited for.
    """

    stream: str
    kind: str
    index: int


@dataclass(frozen=True)
class _Stay:
    """A piece of memory for a while: steps ``first .. last``, and the operations (kind, index) that touch it."""

    name: str
    first: int
    last: int
    users: tuple[tuple[str, int], ...]


def _stays(trace: Trace, plan: Plan) -> list[_Stay]:
    """Every piece of memory that the plan hands out: each tensor once or, if it goes away, twice; workspaces."""
    away = {d.tensor: d for d in plan.decisions if d.choice != "keep"}
    reads = _rebuild_reads(trace, away)
    stays = []
    for i, tensor in enumerate(trace.tensors):
        d = away.get(i)
        if not tensor.touches or (tensor.resident and d is None):
            continue
        if tensor.visit is not None:
            users = (("copy_in", i), *(("step", t) for t in tensor.touches), ("copy_out", i))
            stays.append(_Stay(tensor.name, tensor.first, tensor.last, users))
            continue
        first = -1 if tensor.given else tensor.first
        users = [("step", t) for t in tensor.touches]
        if d is None:
            stays.append(_Stay(tensor.name, first, tensor.last, (*users, *reads[i])))
            continue
        before = [("step", t) for t in tensor.touches if t <= d.leave]
        after = [("step", t) for t in tensor.touches if t >= d.back] + reads[i]
        out = [("copy_out", i)] if d.choice == "offload" else []
        back = ("copy_in" if d.choice == "offload" else "rebuild", i)
        stays.append(_Stay(f"{tensor.name} before it leaves", first, d.gone - 1, (*before, *out)))
        last = len(trace) - 1 if tensor.resident else tensor.last
        stays.append(_Stay(f"{tensor.name} when it is back", d.fetch, last, (back, *after)))
        if d.choice == "recompute":
            stays.append(_Stay(f"workspace for rebuilding {tensor.name}", d.back, d.back, (back,)))
    for t, step in enumerate(trace.steps):
        if step.workspace:
            stays.append(_Stay(f"workspace of {step.title}", t, t, (("step", t),)))
    return stays


def _rebuild_reads(trace: Trace, away: dict[int, Decision]) -> dict[int, list[tuple[str, int]]]:
    """For each tensor the rebuildings that read it."""
    touched = defaultdict(list)
    for i, tensor in enumerate(trace.tensors):
        for t in tensor.touches:
            touched[t].append(i)
    reads: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for i, d in away.items():
        others = {j for r in d.recipe for j in touched[r] if _leaves(trace, r, j)}
        for j in {j for r in d.recipe for j in touched[r]} - others:
            reads[j].append(("rebuild", i))
    return reads


def _leaves(trace: Trace, step: int, i: int) -> bool:
    """Whether running forward step ``step`` once more does without tensor ``i``, which it made the first time."""
    tensor = trace.tensors[i]
    return not tensor.reread and not tensor.given and tensor.touches[0] == step


class _Issuer:
    """Appends operations with just the waits that they need."""

    def __init__(self, trace: Trace, plan: Plan):
        self.trace = trace
        self.operations: list[Operation] = []
        self.place: dict[tuple[str, int], int] = {}  # operation -> where it stands
        self.known = {stream: dict.fromkeys(STREAMS, -1) for stream in STREAMS}  # place up to which each is over
        self.after: dict[int, dict[str, int]] = {}  # what is known to be over when an operation is
        self.stays = _stays(trace, plan)
        self.taken: dict[tuple[str, int], int] = defaultdict(lambda: -1)  # operation -> latest begin of what it touches
        for stay in self.stays:
            for user in stay.users:
                self.taken[user] = max(self.taken[user], stay.first)
        self.ended = sorted(self.stays, key=lambda stay: stay.last)
        self.left_by: list[
            dict[str, int]
        ] = []  # for each step: last place in each stream that touched what ended before

    def issue(self, stream: str, kind: str, index: int, behind: Iterable[tuple[str, int]] = ()) -> None:
        """Append an operation, ``behind`` others and behind all that touched memory given away before it."""
        needed = dict.fromkeys(STREAMS, -1)
        for other in behind:
            self._raise(needed, self.place[other])
        for name, place in self._handed_over(self.taken[kind, index]).items():
            needed[name] = max(needed[name], place)
        self._wait(stream, needed)
        place = self.place[kind, index] = len(self.operations)
        self.operations.append(Operation(stream, kind, index))
        self.known[stream][stream] = place
        self.after[place] = dict(self.known[stream])

    def _raise(self, needed: dict[str, int], place: int) -> None:
        stream = self.operations[place].stream
        needed[stream] = max(needed[stream], place)

    def _handed_over(self, first: int) -> dict[str, int]:
        """The last operation of each stream on memory that is free again before step ``first``."""
        while len(self.left_by) <= first:
            step = len(self.left_by)
            latest = dict(self.left_by[-1]) if self.left_by else dict.fromkeys(STREAMS, -1)
            while self.ended and self.ended[0].last < step:
                for user in self.ended.pop(0).users:
                    self._raise(latest, self.place[user])
            self.left_by.append(latest)
        return self.left_by[first] if first >= 0 else {}

    def _wait(self, stream: str, needed: dict[str, int]) -> None:
        known = self.known[stream]
        missing = [place for name, place in needed.items() if name != stream and place > known[name]]
        for place in missing:
            own = self.operations[place].stream
            others = [self.after[other] for other in missing if other != place]
            if any(after[own] >= place for after in others):
                continue
            self.operations.append(Operation(stream, "wait", place))
            for name, over in self.after[place].items():
                known[name] = max(known[name], over)


def program(trace: Trace, plan: Plan) -> list[Operation]:
    """The operations of one training step under ``plan``, in the order in which a host issues them.

    The plan must have passed `minidl.memory.simulate.check`.
    """
    issuer = _Issuer(trace, plan)
    moved = plan.chosen("offload")
    leaving: dict[int, list[int]] = defaultdict(list)
    needed: dict[int, list[int]] = defaultdict(list)
    coming = [(d.back, d.fetch, d.tensor) for d in moved]
    for d in moved:
        leaving[d.leave].append(d.tensor)
        needed[d.back].append(d.tensor)
    for i in trace.visitors:
        touches = trace.tensors[i].touches
        coming.append((touches[0], trace.tensors[i].first, i))
        leaving[touches[-1]].append(i)
        needed[touches[0]].append(i)
    coming.sort()
    visitors, end = set(trace.visitors), last_pass(trace)
    rebuilt: dict[int, list[Decision]] = defaultdict(list)
    for d in sorted(plan.chosen("recompute"), key=lambda d: trace.tensors[d.tensor].first):
        rebuilt[d.back].append(d)
    fetched = 0
    _copy_out(issuer, -1, leaving[-1])
    for t in range(len(trace)):
        while fetched < len(coming) and coming[fetched][1] <= t:
            i = coming[fetched][2]
            issuer.issue("in", "copy_in", i, [("step", t - 1) if i in visitors else ("copy_out", i)])
            fetched += 1
        arrived = [("copy_in", i) for i in needed[t]]
        for d in rebuilt[t]:
            issuer.issue("compute", "rebuild", d.tensor, arrived)
        if t == end:
            arrived += [("copy_out", i) for i in visitors]
        issuer.issue("compute", "step", t, arrived)
        _copy_out(issuer, t, leaving[t])
    return issuer.operations


def _copy_out(issuer: _Issuer, leave: int, tensors: Sequence[int]) -> None:
    for i in tensors:
        issuer.issue("out", "copy_out", i, [("step", leave)] if leave >= 0 else [])


# -- the proof --------------------------------------------------------------------------------------------------------


def validate(trace: Trace, plan: Plan, operations: Sequence[Operation]) -> None:
    """Prove that ``operations`` carry out ``plan`` whatever the speed of the streams.

    Raises:
        Race: an operation that is missing, twice or in the wrong place; a wait for what is not issued yet; two
            operations on the same memory (or on memory that may have been handed over) that are not ordered.
    """
    prove(trace, plan, *_relation(operations))


def prove(trace: Trace, plan: Plan, place: Mapping[tuple[str, int], int], before: Sequence[int]) -> None:
    """As `validate`, for any account of what happens before what, such as the edges of a captured CUDA graph.

    Args:
        place: number of each operation (kind, index); steps in order.
        before: for each number the set (as bits) of the operations that have ended when this one starts.
    """
    _require_complete(trace, plan, place)

    def ordered(early: tuple[str, int], late: tuple[str, int], why: str) -> None:
        if not before[place[late]] >> place[early] & 1:
            raise Race(f"{_told(trace, late)} may start before {_told(trace, early)} has ended: {why}")

    away = {d.tensor: d for d in plan.decisions if d.choice != "keep"}
    reads = _rebuild_reads(trace, away)
    for i, d in away.items():
        touches, name = trace.tensors[i].touches, trace.tensors[i].name
        back = ("copy_in" if d.choice == "offload" else "rebuild", i)
        if d.choice == "offload":
            ordered(("copy_out", i), back, f"the host has no content of {name} yet")
            for t in (t for t in touches if t <= d.leave):
                ordered(("step", t), ("copy_out", i), f"{name} is still being used")
        for user in [("step", t) for t in touches if t >= d.back] + reads[i]:
            ordered(back, user, f"{name} is not back")
    for i in trace.visitors:
        tensor = trace.tensors[i]
        ordered(("step", tensor.first - 1), ("copy_in", i), "the training step before may still be running")
        for t in tensor.touches:
            ordered(("copy_in", i), ("step", t), f"{tensor.name} is not there")
            ordered(("step", t), ("copy_out", i), f"{tensor.name} is still being used")
        ordered(("copy_out", i), ("step", last_pass(trace)), f"the next step fetches {tensor.name} from the host")
    _require_handover(trace, _stays(trace, plan), place, before)


def _relation(operations: Sequence[Operation]) -> tuple[dict[tuple[str, int], int], list[int]]:
    """Where each operation stands, and for each the set (as bits) of those that must have ended before it starts."""
    place: dict[tuple[str, int], int] = {}
    over = dict.fromkeys(STREAMS, 0)
    before = []
    for p, operation in enumerate(operations):
        before.append(over[operation.stream])
        if operation.kind == "wait":
            if not 0 <= operation.index < p or operations[operation.index].kind == "wait":
                raise Race(f"operation {p} waits for {operation.index}, which is no work issued before it")
            over[operation.stream] |= before[operation.index] | 1 << operation.index
            continue
        if (operation.kind, operation.index) in place:
            raise Race(f"{operation.kind} {operation.index} is issued twice")
        place[operation.kind, operation.index] = p
        over[operation.stream] |= 1 << p
    return place, before


def _require_complete(trace: Trace, plan: Plan, place: Mapping[tuple[str, int], int]) -> None:
    wanted = {("step", t) for t in range(len(trace))} | {("rebuild", d.tensor) for d in plan.chosen("recompute")}
    moved = (*(d.tensor for d in plan.chosen("offload")), *trace.visitors)
    wanted |= {(kind, i) for i in moved for kind in ("copy_out", "copy_in")}
    if wanted != place.keys():
        kind, index = min(wanted ^ place.keys())
        missing = (kind, index) in wanted
        raise Race(f"{_told(trace, (kind, index))} is {'missing' if missing else 'not part of the plan'}")
    if any(place["step", t] > place["step", t + 1] for t in range(len(trace) - 1)):
        raise Race("steps are out of order")


def _require_handover(
    trace: Trace, stays: Sequence[_Stay], place: Mapping[tuple[str, int], int], before: Sequence[int]
) -> None:
    """Whoever takes memory at a step starts after everybody who used memory that was given away before that step."""
    free = 0
    by_last, done = sorted(stays, key=lambda stay: stay.last), 0
    for stay in sorted(stays, key=lambda stay: stay.first):
        while done < len(by_last) and by_last[done].last < stay.first:
            for user in by_last[done].users:
                free |= 1 << place[user]
            done += 1
        for user in stay.users:
            open_ones = free & ~before[place[user]]
            if open_ones:
                at = {p: key for key, p in place.items()}[open_ones.bit_length() - 1]
                why = f"it may still use memory that {stay.name} takes"
                raise Race(f"{_told(trace, user)} may start before {_told(trace, at)} has ended: {why}")


def _told(trace: Trace, operation: tuple[str, int]) -> str:
    kind, index = operation
    if kind == "step":
        return f"step {index} ({trace.steps[index].title})" if 0 <= index < len(trace) else f"step {index}"
    return f"{kind} of {trace.tensors[index].name}"
