"""Whole steps of a network, eager and captured, with and without messages; and the time of each layer within them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from minidl.bench.step import Replay, TrainingStep
from minidl.dist.communicator import Communicator
from minidl.profile.energy import Energy
from minidl.profile.steps import StepProfiler, StepTimes, mark_cost
from minidl.profile.timing import Timing

WARM_UP = 3
FEWEST, MOST = 6, 20  # steps of one kind
SETTLE_S = 0.2  # of replays before those that are timed: a GPU at its limit of power then keeps its clock

Key = tuple[str, str]


@dataclass(frozen=True)
class Message:
    """A gradient message within steps, in milliseconds, medians over the steps.

    Attributes:
        transfer: of the rank that waited for nobody (the smallest time of all ranks).
        wait: what the slowest rank spent longer than that, waiting for others.
        exposed: for how long the computing of the rank that suffers most stood still for it.
    """

    transfer: float
    wait: float
    exposed: float


@dataclass
class Kind:
    """Steps of one kind (eager or captured) on all ranks.

    Attributes:
        plain: a whole step, without spans; the slowest rank's.
        watched: the same with spans; the difference is what their marks cost.
        mark_ms: what one mark of a captured step costs; passes and the rest are without it.
        compute_only: without messages; None with one rank.
        passes: milliseconds of each (layer, pass) in each step, of the rank that is slowest there.
        pass_ranks: of each (layer, pass) on each rank, medians.
        messages: by message name.
        unaccounted: of each step, on the slowest rank.
        accounted: the fraction of the step that its spans make up, on the rank where that is least.
        ranks: a whole step on each rank, milliseconds.
    """

    plain: Timing
    watched: Timing
    compute_only: Timing | None
    passes: dict[Key, Timing]
    pass_ranks: dict[Key, list[float]]
    messages: dict[str, Message]
    unaccounted: Timing
    accounted: float
    mark_ms: float
    ranks: list[float]


@dataclass
class NetworkTimes:
    """What was found of one kind of steps at least. ``spans`` and ``memory`` are of one watched step of each rank.

    ``energy_mj``: millijoules of a step.
    """

    eager: Kind | None
    captured: Kind | None
    spans: list[dict[str, Any]] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    energy_mj: float | None = None

    @property
    def main(self) -> Kind:
        """The captured steps, where there are any."""
        return self.captured or self.eager

    def show(self, comm: Communicator, step: StepTimes) -> None:
        """Keep the spans and the memory of ``step``, all ranks'; a collective."""
        for rank, (spans, memory) in enumerate(comm.share(_portable(step))):
            self.spans += [{"rank": rank, **span} for span in spans]
            self.memory += [{"rank": rank, "t_ms": at, "bytes": used} for at, used in memory]


def measure(
    step: TrainingStep,
    *,
    seconds: float = 3.0,
    capture: bool = True,
    energy: Energy | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> NetworkTimes:
    """Run the step in all its ways; a collective.

    Args:
        seconds: for each way, roughly; never fewer than 6 steps, never more than 20.
        capture: also as a CUDA graph, on a GPU.
        energy: of a captured step; not where ranks are joined, for each would take another number of steps.
        progress: told what is measured next.
    """
    comm = step.comm
    progress("warming up")
    for _ in range(WARM_UP):
        step()
    step.ops.synchronize()
    started = time.perf_counter()
    step()
    step.ops.synchronize()
    taken = max(comm.share(time.perf_counter() - started))
    steps = max(FEWEST, min(MOST, int(seconds / taken)))
    progress(f"{steps} eager steps")
    eager, last = _eager(step, steps)
    times = NetworkTimes(eager, None)
    times.show(comm, last)
    if capture and step.ops.name == "cuda":
        progress(f"{steps} replays of the step as a CUDA graph")
        times.captured = _captured(step, steps, math.ceil(SETTLE_S / taken))
        if energy is not None and comm.size == 1:
            progress("energy of a step")
            replay = step.capture()
            with replay.stream:
                times.energy_mj = energy(replay, 1)
    loss = step().loss
    if not math.isfinite(loss):
        times.warnings.append(f"the loss became {loss}: where values are NaN, passes take other times")
    return times


def _eager(step: TrainingStep, steps: int) -> tuple[Kind, StepTimes]:
    def run(profiler: StepProfiler, count: int = steps, **options: bool) -> list[StepTimes]:
        step.comm.barrier()
        for _ in range(count):
            with profiler.step(**options):
                step()
        return profiler.read()

    plain = run(StepProfiler(step.ops))
    watching = StepProfiler(step.ops)
    step.observe(watching)
    watched = run(watching)
    last = run(watching, 2, memory=True)[-1]
    step.observe()
    silent = None
    if step.comm.size > 1:
        with step.silent():
            silent = run(StepProfiler(step.ops))
    return joined(step.comm, plain, watched, silent), last


def _captured(step: TrainingStep, steps: int, before: int) -> Kind:
    """Replays without marks and with them take turns: clocks drift by more than marks cost."""
    plain, watched = StepProfiler(step.ops), StepProfiler(step.ops)
    replay = step.capture()
    found = [in_turns(step, steps, before, {plain: replay, watched: step.capture(watched, replay)}), None]
    if step.comm.size > 1:
        with step.silent():
            silent = StepProfiler(step.ops)
            found[1] = in_turns(step, steps, before, {silent: step.capture(None, replay)})[0]
    return joined(step.comm, *found[0], found[1])


def in_turns(step: TrainingStep, steps: int, before: int, replays: dict[StepProfiler, Replay]) -> list[list[StepTimes]]:
    """So many steps of each replay in turns, all on one stream, each as its profiler sees it; others before them."""
    stream = next(iter(replays.values())).stream
    with stream:
        for _ in range(before):
            for replay in replays.values():
                replay()
        step.comm.barrier()
        for _ in range(steps):
            for profiler, replay in replays.items():
                with profiler.step():
                    replay()
        return [profiler.read() for profiler in replays]


def _portable(step: StepTimes) -> tuple[list[dict[str, Any]], list[tuple[float, int]]]:
    """As plain values for the other ranks and for files."""
    spans = [
        {"lane": s.lane, "layer": s.layer, "pass": s.pass_name, "start_ms": round(s.start_ms, 5), "ms": round(s.ms, 5)}
        for s in step.spans
    ]
    return spans, step.memory


def _by_pass(steps: Iterable[StepTimes]) -> dict[Key, list[float]]:
    """Milliseconds of each (layer, pass) in each step; its spans within a step are added up."""
    found: dict[Key, list[float]] = {}
    for i, step in enumerate(steps):
        for span in step.spans:
            samples = found.setdefault((span.layer, span.pass_name), [])
            samples += [0.0] * (i + 1 - len(samples))
            samples[i] += span.ms
    return found


def joined(
    comm: Communicator, plain: list[StepTimes], watched: list[StepTimes], silent: list[StepTimes] | None
) -> Kind:
    """The steps of all ranks; of captured ones the parts are without what their marks cost."""
    whole = lambda steps: [s.ms for s in steps] if steps is not None else None  # noqa: E731
    cost = mark_cost(whole(plain), watched) if all(step.captured for step in watched) else 0.0
    parts = [step.less_marks(cost) for step in watched]
    accounted = median(1 - step.unaccounted_ms / step.ms for step in parts)
    mine = (
        whole(plain), whole(watched), whole(silent), _by_pass(parts), [s.unaccounted_ms for s in parts], accounted, cost
    )  # fmt: skip
    plains, watcheds, silents, passes, unaccounted, shares, costs = zip(*comm.share(mine), strict=True)
    messages = [name for name, pass_name in passes[0] if pass_name == "all_reduce"]
    keys = [(n, p) for n, p in passes[0] if p not in ("message", "all_reduce") and not (p == "wait" and n in messages)]
    return Kind(
        plain=_slowest(plains),
        watched=_slowest(watcheds),
        compute_only=_slowest(silents) if silent is not None else None,
        passes={key: _slowest([rank[key] for rank in passes]) for key in keys},
        pass_ranks={key: [median(rank[key]) for rank in passes] for key in keys},
        messages={name: _message(name, passes) for name in messages},
        unaccounted=_slowest(unaccounted),
        accounted=min(shares),
        mark_ms=max(costs),
        ranks=[median(samples) for samples in plains],
    )


def _slowest(ranks: Sequence[Sequence[float]]) -> Timing:
    return Timing(tuple(max(ranks, key=median)))


def _message(name: str, ranks: Sequence[dict[Key, list[float]]]) -> Message:
    transfers = [rank[name, "all_reduce"] for rank in ranks]
    fastest = [min(step) for step in zip(*transfers, strict=True)]
    slowest = [max(step) for step in zip(*transfers, strict=True)]
    return Message(
        transfer=median(fastest),
        wait=median(s - f for s, f in zip(slowest, fastest, strict=True)),
        exposed=max(median(rank[name, "wait"]) for rank in ranks),
    )
