"""Training steps within a limit of GPU memory: record, plan, place, carry out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from minidl import checks
from minidl.cuda.copies import CopyEngine
from minidl.fusion import fuse
from minidl.memory.execute import ScriptedStore
from minidl.memory.gaps import LEAST, problem
from minidl.memory.limit import host_budget, parse_limit
from minidl.memory.plan import Infeasible, Plan, human, smallest
from minidl.memory.planner import StepPlanner
from minidl.memory.record import record_model
from minidl.memory.recording import Recording
from minidl.memory.script import Script, fitted, outside, write
from minidl.memory.simulate import Link, Timeline, check, timeline
from minidl.memory.times import CEILINGS, link_of, modelled
from minidl.memory.trace import Trace
from minidl.memory.visits import candidates, visiting
from minidl.model import Model
from minidl.optim import SGD, Visit
from minidl.store import TensorStore

FUSIONS = ("auto", "elementwise", "none")
"""Plans of batch-norm fusion that commands choose among within a limit, where they are not told which."""

_RATES = CEILINGS["H200"]


class LimitedMemory:
    """What `limit_memory` returns: the plan, and a context for each training step.

    Attributes:
        limit: bytes.
        need: bytes that a step takes without a limit.
        unlimited_ms: that such a step is predicted to take.
        script: of the largest batch: plan, offsets, bytes of the arena and on the host.
        predicted: the simulator's step.
    """

    def __init__(self, model: Model, batch: int, limit: str | float, **options: Any):
        self._model, self._batch, self._options = model, batch, options
        self._recording = self._recorded(batch)
        self.need = problem(self._recording.trace, least=options["least"]).peak
        self.limit = parse_limit(limit, self.need)
        self.unlimited_ms = float(sum(self._times(self._recording.trace)))

    def plan(self) -> LimitedMemory:
        """Find the plan; nothing of the model changes."""
        self.script = self._fastest(self._recording)
        self._require_host()
        times = self._times(self.script.trace)
        self.predicted: Timeline = timeline(self.script.trace, self.script.plan, times, self._link)
        return self

    def allocate(self) -> LimitedMemory:
        """Take the memory, and run the model's steps in it from now on."""
        _release(self._model)  # another limit's memory
        make = self._options["engine"] or CopyEngine
        # The plan of a slightly smaller batch may move slightly more, or a tensor more.
        tensors, moved = self.script.trace.tensors, self.script.plan.chosen("offload")
        host_bytes, budget = self.script.host_bytes, self._host_budget()
        more = max([host_bytes // 8, *(tensors[one.tensor].bytes for one in moved)])
        host_bytes += more if budget is None else max(0, min(more, budget - host_bytes))
        self.store = ScriptedStore(make(self.script.arena_bytes, host_bytes), self._script_for)
        self._scripts = {self._batch: self.script}
        _attach(self._model, self.store)
        self._move_momentum()
        return self

    def step(self, samples: int | None = None) -> AbstractContextManager[None]:
        """A context around forward, loss and backward of one training step; the `Trainer` opens it by itself.

        Args:
            samples: of this step; default and at most: those of the plan. A smaller number gets a plan of its own, in
                the same memory, when it comes for the first time.

        Raises:
            ValueError: for more samples than were planned for.
            RuntimeError: after `release`, or another limit for the model.
        """
        return self.store.step(self._batch if samples is None else samples)

    def _script_for(self, samples: int) -> Script:
        if samples == 0:
            return self.script
        if samples not in self._scripts:
            if not 1 <= samples <= self._batch:
                remedy = "limit_memory with the largest batch"
                raise checks.bad_value("memory", "samples", f"in 0..{self._batch}", samples, remedy)
            self._scripts[samples] = self._smaller(samples)
        return self._scripts[samples]

    def release(self) -> None:
        """Give the memory back: the model keeps everything again, as without a limit. Another limit has done so."""
        if self._model.store is self.store:
            _release(self._model)
        self._scripts.clear()

    # -- planning ---------------------------------------------------------------------------------------------------

    def _recorded(self, batch: int) -> Recording:
        return record_model(self._model, batch, self._options["momentum"])

    def _fastest(self, recording: Recording) -> Script:
        """Of scripts with and without visitors the one that is predicted to be fastest; a plan made before decides."""
        variants, ready = self._variants(recording), self._options["plan"]
        if ready is not None:
            variants = [v for v in variants if v.trace.digest == ready.trace]
            if not variants:
                expected = "one for this model, batch and GPU"
                raise checks.bad_value("memory", "plan", expected, "one for another step", "leave plan= out")
        script, budget = self._fastest_of(variants, self.limit), self._host_budget()
        if ready is None and budget is not None and script.host_bytes > budget:
            return self._fastest_of(variants, self.limit, budget)
        return script

    def _fastest_of(self, variants: Sequence[Recording], limit: int, host_bytes: int | None = None) -> Script:
        found, errors = [], []
        for variant in variants:
            try:
                found.append(self._script(variant, limit, host_bytes))
            except Infeasible as error:
                errors.append(error)
        if not found:
            raise smallest(errors)
        return min(found, key=lambda s: timeline(s.trace, s.plan, self._times(s.trace), self._link).total_ms)

    def _variants(self, recording: Recording) -> list[Recording]:
        """The step as it is; with the momentum of large layers on the host, copied in a hurry or in time to hide."""
        if self._options["optimizer"] is None:
            return [recording]
        trace, numbers = recording.trace, candidates(recording.trace)
        traces = [visiting(trace, numbers), visiting(trace, numbers, self._times(trace), self._link)]
        return [recording, *(dataclasses.replace(recording, trace=t) for t in (traces if numbers else ()))]

    def _move_momentum(self) -> None:
        """The optimizer's momentum to where the script has it."""
        optimizer, trace, visits = self._options["optimizer"], self.script.trace, []
        messages = {f"{message.name}:momentum": message for message in self._model.arena.messages}
        for i in trace.visitors:
            message, place = messages[trace.tensors[i].name], self.script.host[i]
            here = partial(self.store.visitor, trace.tensors[i].name)
            host = partial(self.store.engine.host, place, message.end - message.begin)
            visits.append(Visit(message.begin, message.end, here, host))
        if visits:
            optimizer.host_momentum(sorted(visits, key=lambda visit: visit.begin))
            self.store.settle = partial(optimizer.host_momentum, ())

    def _script(self, recording: Recording, limit: int, host_bytes: int | None) -> Script:
        """Within a limit that counts what is reserved for others."""
        trace, times = recording.trace, self._times(recording.trace)
        ready, reserve = self._options["plan"], self._options["reserve"]
        if ready is not None and ready.trace == trace.digest:
            return self._ready(recording, dataclasses.replace(ready, capacity=limit - reserve))

        # What may leave of the largest batch may leave of a smaller one.
        least = self._options["least"] * trace.facts["batch"] // self._batch
        options = {"least": least, "rebuild": self._options["rebuild"], "host_bytes": host_bytes}
        planner = StepPlanner(trace, times, self._link, **options)
        script = fitted(recording, limit - reserve, planner, reserve)
        check(trace, script.plan)
        return script

    def _ready(self, recording: Recording, plan: Plan) -> Script:
        """The script of a plan that somebody made before."""
        check(recording.trace, plan)
        script = write(recording, plan)
        if script.held > plan.capacity:
            remedy = "plan for a lower limit, or leave plan= out"
            raise checks.bad_value("memory", "plan", f"within {human(plan.capacity)}", human(script.held), remedy)
        return script

    def _smaller(self, samples: int) -> Script:
        """A script for a smaller batch, which fits into the arenas that are there: captured steps know their places."""
        recording, engine = self._recorded(samples), self.store.engine
        variants = [recording]
        if self.script.trace.visitors:  # the momentum stays where it is
            variants = [variant for variant in self._variants(recording) if variant.trace.visitors]
        limit = engine.arena_bytes + outside(variants[0]) + self._options["reserve"]
        try:
            return self._fastest_of(variants, limit, engine.host_bytes)
        except Infeasible as error:
            remedy = "drop the last batch, or make batches of one size"
            expected = "a batch that fits into the memory planned for the largest"
            raise checks.bad_value("memory", "samples", expected, samples, remedy) from error

    def _times(self, trace: Trace) -> list[float]:
        times = self._options["times"]
        return times(trace) if times is not None else modelled(trace, _RATES)

    @property
    def _link(self) -> Link:
        return self._options["link"] or link_of(_RATES)

    def _host_budget(self) -> int | None:
        budget = self._options["host_limit"]
        if budget is None and (whole := host_budget()) is not None:
            budget = whole // self._model.comm.local_size
        return budget

    def _require_host(self) -> None:
        needed, budget = self.script.host_bytes, self._host_budget()
        if budget is not None and needed > budget:
            remedy = "take a higher memory limit, or a smaller batch"
            raise checks.bad_value("memory", "host memory", f"at least {human(needed)}", human(budget), remedy)

    def describe(self) -> str:
        """One line: the limit, what is kept, moved and made again, and what that should cost."""
        plan, run = self.script.plan, self.predicted
        slower = run.total_ms / run.compute_ms if run.compute_ms else 1.0
        away = sum(self.script.trace.tensors[i].bytes for i in self.script.trace.visitors)
        momentum = f"momentum on the host {human(away)}, " if away else ""
        return (
            f"{human(self.script.held)} of {human(self.need)} (limit {human(self.limit)}): "
            f"kept {human(plan.kept_bytes)}, {momentum}moved {human(plan.moved_bytes)}, "
            f"made again {human(plan.rebuilt_bytes)}; predicted step {slower:.2f} times the one without a limit"
        )


def limit_memory(
    model: Model,
    batch: int,
    limit: str | float,
    *,
    momentum: float = 0.9,
    rebuild: bool = True,
    host_limit: int | None = None,
    times: Callable[[Trace], list[float]] | None = None,
    link: Link | None = None,
    least: int = LEAST,
    plan: Plan | None = None,
    optimizer: SGD | None = None,
    fusions: Sequence[str] = (),
    reserve: int = 0,
    engine: Callable[[int, int], CopyEngine] | None = None,
) -> LimitedMemory:
    """Train ``model`` within a limit of GPU memory: saved tensors stay, go to the host and back, or are made again::

        memory = limit_memory(model, batch=256, limit="25%")
        with memory.step(len(x)):
            totals = loss.forward(model.forward(x), labels)
            model.backward(loss.backward(optimizer.loss_scale))
        optimizer.step()

    The loss is `SoftmaxCrossEntropy`. Every plan gives the bits of a step without a limit. All memory is allocated
    here: the arena of the steps on the device, what travels on the host. The limit is for training steps, parameters,
    gradients, momentum and the batch included; the CUDA context and loaded kernels come on top, and so do the
    activations of evaluation between steps.

    Args:
        batch: most samples of a step.
        limit: ``"8GB"``, ``"7.5GiB"``, bytes; ``"25%"`` or 0.25 of what a step needs without a limit.
        momentum: 0 if the optimizer keeps no state; that of ``optimizer``, if it is given.
        rebuild: False only moves tensors.
        host_limit: bytes that may lie on the host; default: what the system leaves, shared by the host's ranks.
        times: milliseconds of each step of a trace; default: FLOP and bytes at a share of an H200's roofline.
        link: to the host; default: an H200's.
        least: bytes; smaller tensors stay.
        plan: made before for this model, batch and limit (``memory.script.plan``): planning large networks takes
            seconds.
        optimizer: of the model, after `update_in_backward`; its momentum may then lie on the host but around the
            update of its layer, where that makes a step faster within the limit (`minidl.memory.visits`).
        fusions: plans of batch-norm fusion to choose among (`minidl.fusion.fuse`), such as `FUSIONS`: the model runs by
            that with which a step within the limit is predicted fastest, on all ranks by that of rank 0. A ``limit``
            that is a part is one of what the first needs. Fused kernels may need tensors earlier or longer, so the
            fastest plan without a limit need not be it. Default: the model's fusion stays.
        reserve: bytes of the limit that are for others: what else the process holds on the GPU, such as rests of pieces
            that a pool cannot give back.
        engine: makes memory and streams of so many bytes on device and host; default: the GPU's.

    Raises:
        Infeasible: one pass alone needs more than the limit: which, its tensors, the smallest limit that is enough.
        ValueError: a limit that is none, more host memory than there is, a model that is not on a GPU.
    """
    checks.instance("memory", "model", model, Model, "a Model", "memory.record takes a graph")
    if model.ops.name != "cuda":
        raise checks.bad_value("memory", "model", "on a GPU", f"one on the {model.ops.name}", "use device='cuda'")
    batch = checks.at_least("memory", "batch", batch, 1)
    if optimizer is not None and (optimizer.model is not model or not model.arena.slots):
        expected = "the model's, after update_in_backward()"
        raise checks.bad_value("memory", "optimizer", expected, "another", "leave optimizer= out")
    if optimizer is not None and optimizer.velocity is None:
        momentum = 0.0
    options = {
        "momentum": momentum, "rebuild": rebuild, "host_limit": host_limit, "times": times, "link": link,
        "least": least, "plan": plan, "optimizer": optimizer, "engine": engine,
        "reserve": checks.at_least("memory", "reserve", reserve, 0),
    }  # fmt: skip
    model.arena.sum_all()  # the plan is that of one rank
    if fusions:
        return _fused(model, batch, limit, fusions, options).allocate()
    return LimitedMemory(model, batch, limit, **options).plan().allocate()


def _fused(
    model: Model, batch: int, limit: str | float, fusions: Sequence[str], options: Mapping[str, Any]
) -> LimitedMemory:
    """The plan of the fusion with which a step within the limit is predicted fastest, by which the model then runs."""
    before = model.fusion
    try:
        return _fastest_fused(model, batch, limit, fusions, options)
    except ValueError:
        fuse(model, before if before is not None else "none")
        raise


def _fastest_fused(
    model: Model, batch: int, limit: str | float, fusions: Sequence[str], options: Mapping[str, Any]
) -> LimitedMemory:
    found, tried, errors = {}, [], []
    for how in fusions:
        fused = fuse(model, how)
        if fused in tried:
            continue  # alike where there is little to fuse
        tried.append(fused)
        memory = LimitedMemory(model, batch, limit, **options)
        limit = memory.limit
        if found and memory.unlimited_ms >= min(other.predicted.total_ms for other in found.values()):
            continue  # no plan is faster than the step without a limit
        try:
            found[how] = memory.plan()
        except Infeasible as error:
            errors.append(error)
    fastest = min(found, key=lambda how: found[how].predicted.total_ms) if found else None
    fastest = model.comm.share(fastest)[0]
    if fastest not in found:
        other = Infeasible("memory limit: rank 0 found no plan, or one for a fusion that does not fit here")
        raise smallest(errors) if errors else other
    fuse(model, fastest)
    return found[fastest]


def _attach(model: Model, store: TensorStore) -> None:
    model.store = store
    for layer in model.layers:
        layer.store = store
    model.observe(model.observer)


def _release(model: Model) -> None:
    if isinstance(model.store, ScriptedStore):
        model.store.close()
        _attach(model, TensorStore())
