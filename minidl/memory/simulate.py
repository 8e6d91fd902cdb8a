"""An independent look at a plan: memory step by step, and the time that its transfers add.

Nothing here uses the planners' code: `check` walks the trace with a ledger of what lies on the device, and refuses a
plan that exceeds its limit, touches what is away, or moves other than it says. `timeline` runs the plan against the
clock with one queue for each direction of the link beside the compute stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from minidl import checks
from minidl.memory.plan import CHOICES, Decision, Plan, human
from minidl.memory.trace import Trace


class Violation(ValueError):
    """A plan that does not do what it says; ``step`` where, None for totals."""

    def __init__(self, message: str, step: int | None = None):
        super().__init__(message)
        self.step = step


@dataclass(frozen=True)
class Usage:
    """What a plan uses: bytes on the device at each step, most bytes on the host, bytes moved out and in."""

    device: tuple[int, ...]
    host_peak: int
    moved_out: int
    moved_in: int

    @property
    def peak(self) -> int:
        """Most bytes on the device."""
        return max(self.device)


class _Ledger:
    """What lies on the device and on the host while a step is walked."""

    def __init__(self, trace: Trace):
        self.trace = trace
        self.here: dict[int, bool] = {}  # tensor on the device -> whether its content is valid
        self.device = self.host = self.host_peak = self.out = self.into = 0
        self.born: dict[int, list[int]] = defaultdict(list)
        self.touched: dict[int, list[int]] = defaultdict(list)
        self.dying: dict[int, list[int]] = defaultdict(list)
        for i, tensor in enumerate(trace.tensors):
            if tensor.resident or tensor.given:
                self.put(i, True)
            else:
                self.born[tensor.first].append(i)
            for t in tensor.touches:
                self.touched[t].append(i)
            if not tensor.resident:
                self.dying[tensor.last].append(i)

    def put(self, i: int, valid: bool) -> None:
        self.here[i] = valid
        self.device += self.trace.tensors[i].bytes

    def drop(self, i: int) -> None:
        del self.here[i]
        self.device -= self.trace.tensors[i].bytes


def check(trace: Trace, plan: Plan) -> Usage:
    """Walk ``trace`` under ``plan``.

    Raises:
        Violation: naming the step and tensor: more than the limit on the device, a touch of what is away, a rebuilding
            whose sources are not there, a plan for another trace, totals that differ from what the plan claims.
    """
    if plan.trace != trace.digest:
        raise Violation(f"plan for trace {plan.trace}, but this is trace {trace.digest}: plan again")
    usage = measure(trace, plan.decisions, plan.capacity)
    _check_totals(trace, plan, usage)
    return usage


def measure(trace: Trace, decisions: Sequence[Decision], capacity: int) -> Usage:
    """What ``decisions`` use, step by step.

    Raises:
        Violation: as `check`, but for totals.
    """
    ledger = _Ledger(trace)
    at: dict[str, dict[int, list[Decision]]] = {name: defaultdict(list) for name in ("gone", "fetch", "back")}
    for d in decisions:
        _check_decision(trace, d)
        if d.choice != "keep":
            for name, steps in at.items():
                steps[getattr(d, name)].append(d)
    device = []
    for t in range(len(trace)):
        for d in at["gone"][t]:
            _send_away(ledger, d)
        for d in at["fetch"][t]:
            ledger.put(d.tensor, False)
        extra = _arrive(ledger, at["back"][t], t)
        for i in ledger.born[t]:
            ledger.put(i, True)
        for i in ledger.touched[t]:
            if not ledger.here.get(i, False):
                raise Violation(f"step {t} ({trace.steps[t].title}) touches {trace.tensors[i].name}, which is away", t)
        now = ledger.device + trace.steps[t].workspace + extra
        if now > capacity:
            over = f"{human(now)} on the device, over the limit of {human(capacity)}"
            raise Violation(f"step {t} ({trace.steps[t].title}): {over} by {now - capacity} bytes", t)
        device.append(now)
        for i in ledger.dying[t]:
            ledger.drop(i)
    return Usage(tuple(device), ledger.host_peak, ledger.out, ledger.into)


def _check_decision(trace: Trace, d: Decision) -> None:
    tensor = trace.tensors[d.tensor]
    ways = [t for t in (-1, *tensor.touches) if t > d.leave]
    ordered = d.leave < d.gone <= d.fetch <= d.back <= (ways[0] if ways else -1)
    known = d.leave in tensor.touches or (d.leave == -1 and tensor.given)
    if d.choice not in CHOICES or not ordered or not known or (d.choice == "recompute") != bool(d.recipe):
        raise Violation(f"{tensor.name}: {d} does not describe a gap between two of its touches {tensor.touches}")


def _send_away(ledger: _Ledger, d: Decision) -> None:
    ledger.drop(d.tensor)
    if d.choice == "offload":
        ledger.out += ledger.trace.tensors[d.tensor].bytes
        ledger.host += ledger.trace.tensors[d.tensor].bytes
        ledger.host_peak = max(ledger.host_peak, ledger.host)


def _arrive(ledger: _Ledger, decisions: Sequence[Decision], t: int) -> int:
    """Contents that are valid from step ``t`` on; the bytes that rebuilding them takes beside."""
    extra = 0
    for d in sorted(decisions, key=lambda d: (d.choice != "offload", ledger.trace.tensors[d.tensor].first)):
        size = ledger.trace.tensors[d.tensor].bytes
        if d.choice == "offload":
            ledger.into += size
            ledger.host -= size
        else:
            extra = max(extra, _rebuild(ledger, d, t))
        ledger.here[d.tensor] = True
    return extra


def _rebuild(ledger: _Ledger, d: Decision, t: int) -> int:
    """Bytes beside the result that running the recipe takes; its operands must be there."""
    trace, made, most = ledger.trace, {}, 0
    for r in d.recipe:
        for i in ledger.touched[r]:
            if i in ledger.born[r] and trace.tensors[i].again:
                made[i] = trace.tensors[i].bytes if i != d.tensor else 0
            elif i in ledger.born[r] and not trace.tensors[i].reread:
                continue
            elif i not in made and not ledger.here.get(i, False):
                what = f"{trace.tensors[d.tensor].name} is rebuilt from {trace.tensors[i].name}, which is away"
                raise Violation(f"step {t} ({trace.steps[t].title}): {what}", t)
        most = max(most, sum(made.values()) + trace.steps[r].workspace)
    if d.tensor not in made:
        raise Violation(f"the recipe of {trace.tensors[d.tensor].name} does not make it", t)
    return most


def _check_totals(trace: Trace, plan: Plan, usage: Usage) -> None:
    def total(choice: str) -> int:
        return sum(trace.tensors[d.tensor].bytes for d in plan.chosen(choice))

    found = {
        "kept_bytes": total("keep"), "moved_bytes": total("offload"), "rebuilt_bytes": total("recompute"),
        "peak": usage.peak,
    }  # fmt: skip
    for name, value in found.items():
        if getattr(plan, name) != value:
            raise Violation(f"plan says {name} {getattr(plan, name)}, walking it gives {value}")
    if (usage.moved_out, usage.moved_in) != (plan.moved_bytes, plan.moved_bytes):
        raise Violation(f"{usage.moved_out} bytes went out and {usage.moved_in} came in, not {plan.moved_bytes}")


# -- time -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """The link between GPU and host, both directions at once: 10^9 bytes/s each, and what a copy takes beside."""

    out_gb_per_s: float = 50.0
    in_gb_per_s: float = 50.0
    latency_ms: float = 0.01

    def __post_init__(self) -> None:
        for name in ("out_gb_per_s", "in_gb_per_s"):
            checks.number("link", name, getattr(self, name), "above 0", lambda v: v > 0)
        checks.number("link", "latency_ms", self.latency_ms, "of at least 0", lambda v: v >= 0)

    def out_ms(self, count: int) -> float:
        """Milliseconds to copy ``count`` bytes to the host."""
        return self.latency_ms + count / (self.out_gb_per_s * 1e6)

    def in_ms(self, count: int) -> float:
        """Milliseconds to copy ``count`` bytes from the host."""
        return self.latency_ms + count / (self.in_gb_per_s * 1e6)


@dataclass(frozen=True)
class Entry:
    """One piece of work: queue compute, out or in."""

    queue: str
    name: str
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Timeline:
    """A step against the clock.

    Attributes:
        total_ms: from the first kernel to the last piece of work.
        compute_ms: the step without any plan.
        rebuild_ms: forward passes run again.
        exposed_ms: what waiting for transfers adds.
        bound_ms: no plan with these bytes and this rebuilding can be faster: max(forward, out) + max(backward, in).
    """

    total_ms: float
    compute_ms: float
    rebuild_ms: float
    exposed_ms: float
    bound_ms: float
    entries: tuple[Entry, ...]


def timeline(trace: Trace, plan: Plan, times_ms: Sequence[float], link: Link | None = None) -> Timeline:
    """Run ``plan`` against the clock.

    A step waits for the copies out of all tensors whose memory was given away, and for what it needs to be back. A copy
    out starts after the last step that touches its tensor; a copy in when the steps before its ``fetch`` are done,
    in the order of need.

    Args:
        times_ms: of each step of the trace.
        link: rates; default `Link`.

    Raises:
        ValueError: when the times are not one for each step.
    """
    if len(times_ms) != len(trace):
        raise checks.bad_value("timeline", "times_ms", f"{len(trace)} numbers, one for each step", len(times_ms))
    return _Clock(trace, plan, times_ms, link or Link()).run()


def _visit(trace: Trace, i: int) -> Decision:
    """A visitor as what moves: it leaves behind its last touch and is needed at its first."""
    tensor = trace.tensors[i]
    return Decision(i, "offload", tensor.touches[-1], tensor.last + 1, tensor.first, tensor.touches[0])


class _Clock:
    """The three queues of one step."""

    def __init__(self, trace: Trace, plan: Plan, times_ms: Sequence[float], link: Link):
        self.trace, self.times, self.link = trace, times_ms, link
        moved = [*plan.chosen("offload"), *(_visit(trace, i) for i in trace.visitors)]
        self.out: dict[int, list[Decision]] = defaultdict(list)
        self.needed: dict[int, list[Decision]] = defaultdict(list)
        for d in moved:
            self.out[d.leave].append(d)
            self.needed[d.back].append(d)
        self.gone = sorted(moved, key=lambda d: d.gone)
        self.into = sorted(moved, key=lambda d: (d.back, d.fetch))
        self.rebuilt: dict[int, list[Decision]] = defaultdict(list)
        for d in plan.chosen("recompute"):
            self.rebuilt[d.back].append(d)
        self.out_done: dict[int, float] = {}
        self.in_done: dict[int, float] = {}
        self.entries: list[Entry] = []
        self.rebuild_ms = 0.0
        self.visitors = set(trace.visitors)
        self.moved = sum(trace.tensors[d.tensor].bytes for d in moved)

    def run(self) -> Timeline:
        out_free = self._copies_out(-1, 0.0, 0.0)
        now, in_free, sent, waiting = 0.0, 0.0, 0, 0
        for t in range(len(self.trace)):
            while sent < len(self.gone) and self.gone[sent].gone <= t:  # memory of others: what leaves it has to be out
                now = max(now, self.out_done[self.gone[sent].tensor])
                sent += 1
            while waiting < len(self.into) and self.into[waiting].fetch <= t:
                in_free = self._copy_in(self.into[waiting], max(now, in_free))
                waiting += 1
            now = max([now, *(self.in_done[d.tensor] for d in self.needed[t])])
            now = self._rebuild(t, now)
            start, now = now, now + self.times[t]
            self.entries.append(Entry("compute", self.trace.steps[t].title, start, now))
            out_free = self._copies_out(t, now, out_free)
        total = max([now, *self.out_done.values()])
        compute = float(sum(self.times))
        return Timeline(
            total, compute, self.rebuild_ms, total - compute - self.rebuild_ms, self._bound(), tuple(self.entries)
        )

    def _copies_out(self, t: int, now: float, free: float) -> float:
        for d in self.out[t]:
            tensor = self.trace.tensors[d.tensor]
            start = max(now, free)
            free = start + self.link.out_ms(tensor.bytes)
            self.out_done[d.tensor] = free
            self.entries.append(Entry("out", tensor.name, start, free))
        return free

    def _copy_in(self, d: Decision, start: float) -> float:
        tensor = self.trace.tensors[d.tensor]
        if d.tensor not in self.visitors:  # whose content was there when the step began
            start = max(start, self.out_done[d.tensor])
        end = start + self.link.in_ms(tensor.bytes)
        self.in_done[d.tensor] = end
        self.entries.append(Entry("in", tensor.name, start, end))
        return end

    def _rebuild(self, t: int, now: float) -> float:
        for d in sorted(self.rebuilt[t], key=lambda d: self.trace.tensors[d.tensor].first):
            ms = sum(self.times[r] for r in d.recipe)
            self.rebuild_ms += ms
            self.entries.append(Entry("compute", f"{self.trace.tensors[d.tensor].name} again", now, now + ms))
            now += ms
        return now

    def _bound(self) -> float:
        forward = sum(self.times[: self.trace.loss])
        behind = sum(self.times[self.trace.loss :]) + self.rebuild_ms
        out = self.moved / (self.link.out_gb_per_s * 1e6)
        into = self.moved / (self.link.in_gb_per_s * 1e6)
        return max(forward, out) + max(behind, into)
