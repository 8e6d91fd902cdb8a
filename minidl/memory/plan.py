"""A memory plan: for every saved tensor with a gap, whether it stays, travels to the host and back, or is rebuilt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minidl.memory.trace import Trace, dumps, loads
from minidl.shapes import round_up

CHOICES = ("keep", "offload", "recompute")
_NAMED = 6  # tensors that an error lists
_HOST_ALIGN = 4096


class Infeasible(ValueError):
    """No plan of this kind fits the limit.

    Attributes:
        step: index of the step that needs most.
        needed: smallest limit that is enough, in bytes; None where unknown.
    """

    def __init__(self, message: str, step: int | None = None, needed: int | None = None):
        super().__init__(message)
        self.step, self.needed = step, needed


@dataclass(frozen=True)
class Decision:
    """What happens to one tensor between two touches.

    Attributes:
        tensor: index in the trace.
        choice: keep, offload or recompute.
        leave: last step that touches it before the gap.
        gone: first step at which its memory belongs to others: the copy to the host has ended.
        fetch: first step at which it has memory again: the copy back may begin.
        back: step before which it must be there; its first touch behind the gap, or earlier where another tensor is
            rebuilt from it.
        recipe: forward steps to run again for it, in order; empty unless recomputed.
    """

    tensor: int
    choice: str
    leave: int
    gone: int
    fetch: int
    back: int
    recipe: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """A plan for one trace.

    Attributes:
        trace: digest of the trace it was made for.
        policy: who decided.
        capacity: limit in bytes.
        granule: sizes were rounded up to multiples of it.
        proven: no plan of the same model moves fewer bytes, at this granule.
        peak: most bytes on the device at any step.
        decisions: one for each tensor with a gap.
    """

    trace: str
    policy: str
    capacity: int
    granule: int
    proven: bool
    peak: int
    kept_bytes: int
    moved_bytes: int
    rebuilt_bytes: int
    decisions: tuple[Decision, ...]

    def chosen(self, choice: str) -> list[Decision]:
        """The decisions of one kind."""
        return [d for d in self.decisions if d.choice == choice]

    def to_json(self) -> str:
        """One JSON object; `from_json` gives an equal plan back."""
        return dumps("plan", self)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            ValueError: when ``text`` is no plan, or one of another schema.
        """
        content = loads("plan", text)
        content["decisions"] = tuple(
            Decision(**{**record, "recipe": tuple(record["recipe"])}) for record in content["decisions"]
        )
        return cls(**content)


def on_host(trace: Trace, plan: Plan) -> tuple[dict[int, int], int]:
    """Offsets on the host by tensor, and bytes there. While the loss is computed all that moves is away, so none can
    take another's place.

    Visitors, whose home it is, come first: they lie there in every script of a model.
    """
    offsets, total = {}, 0
    for i in (*trace.visitors, *(d.tensor for d in plan.chosen("offload"))):
        offsets[i] = total
        total += round_up(trace.tensors[i].bytes, _HOST_ALIGN)
    return offsets, total


def human(count: float) -> str:
    """``1.5 GiB``: a number of bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def smallest(errors: Sequence[Infeasible]) -> Infeasible:
    """Of errors of several plans the one to tell: of one that lacks something else than the limit, or names the
    smallest.
    """
    return min(errors, key=lambda error: error.needed or 0)


def infeasible(trace: Trace, capacity: int, base: Sequence[int]) -> Infeasible:
    """The error for a limit that one step alone exceeds: the step, what it needs, the smallest feasible limit."""
    at = max(range(len(base)), key=lambda t: base[t])
    return too_small(trace, capacity, at, int(base[at]))


def too_small(trace: Trace, capacity: int, at: int, needed: int, reserve: int = 0) -> Infeasible:
    """The error for a limit below ``needed``, which is due to step ``at``; both with what is reserved for others."""
    step = trace.steps[at]
    held = sorted(((t.bytes, t.name) for t in trace.tensors if at in t.touches and not t.resident), reverse=True)
    parts = [f"{name} {human(size)}" for size, name in held[:_NAMED]]
    if len(held) > _NAMED:
        parts.append(f"{len(held) - _NAMED} smaller")
    if step.workspace:
        parts.append(f"workspace {human(step.workspace)}")
    state = sum(trace.resident_bytes.values())
    listed = ", ".join(parts)
    others = f"; reserved for others: {human(reserve)}" if reserve else ""
    return Infeasible(
        f"memory limit {human(capacity)} is too small: {step.title} alone needs {human(needed)} "
        f"({listed}; always there: {human(state)} of parameters, gradients and momentum; the rest on its way in or "
        f"out{others}); the smallest feasible limit is {needed} bytes; take a smaller batch",
        at,
        needed,
    )
