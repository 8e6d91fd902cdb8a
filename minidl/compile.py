"""The training step as CUDA graphs in planned memory: what users and the `Trainer` run on a GPU.

The first step runs as it is written and loads kernels; the second is recorded: what it allocates and releases, in
order. From that record every array gets its place in one block (`minidl.memory.arena`), the same Python code is
captured into it, and each step after is: copy the batch in, write the random key, launch. Forward, loss, backward,
all-reduces and update are all inside, short gradients of weights and updates in a branch (`minidl.cuda.beside`);
learning rate, loss scale and random key lie in device memory. The bits are those of eager steps, so it makes no
difference when one is taken in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from minidl import checks
from minidl.cuda import capture as engine
from minidl.cuda.beside import branching, new_stream
from minidl.dist.communicator import capturable, follow
from minidl.fusion import fuse_by_default
from minidl.loss import Loss, Totals
from minidl.memory.arena import Lender, most_live, place
from minidl.model import Model
from minidl.optim import SGD
from minidl.profile.spans import NULL_PROFILER, GraphProfiler, Profiler
from minidl.step import EagerStep, require_parts
from minidl.store import TensorStore

_SLAB = 64  # steps whose totals are allocated at once


class NotCapturable(RuntimeError):
    """The step does something that no CUDA graph can hold. Nothing was changed by trying."""


def obstacle(model: Model, optimizer: SGD) -> str | None:
    """Why steps of this model cannot be compiled, in a few words; None if nothing is known to be in the way."""
    if model.ops.name != "cuda":
        return f"CUDA graphs need a GPU, and the model is on the {model.ops.name}"
    if not model.store.capturable:
        return f"{type(model.store).__name__} moves saved tensors from the host, not from within a graph"
    if not capturable(model.comm):
        return f"with the {model.comm.name} engine the host waits for each sum; NCCL would not need it"
    if not _graphs_suit(model.observer):
        return f"a {type(model.observer).__name__} watches each pass of each layer"
    if type(optimizer).update is not SGD.update:
        return f"{type(optimizer).__name__} has an update of its own, which may decide on the host"
    return None


class CompiledStep:
    """Takes training steps as `EagerStep` does, with the same bits, by replaying a CUDA graph.

    Called with batches of the size of the first one it compiles them, in the second and third call; another size runs
    eagerly, in the same memory. A change of mode (``model.eval()``, a layer's ``training``, a fusion plan) is noticed
    and compiled anew; going back takes up the graph from before. Where no fusion plan was set, it is ``"auto"``.

    Args:
        model, optimizer, loss, accumulate: as for `EagerStep`; with ``accumulate`` each micro-batch is one graph.

    Attributes:
        batch: samples of a compiled step on this rank; None before the first.
        memory_bytes: what the compiled steps have allocated for all they make and drop.
        least_bytes: the most that lives at once in one of them: no plan could do with less.

    With several ranks all of them call it alike: the size of a rank's own part must not decide, so say ``eager=True``
    on all ranks for a batch that is smaller on some.

    Raises:
        TypeError, ValueError: as `EagerStep`; ValueError where `obstacle` knows a reason.
    """

    def __init__(self, model: Model, optimizer: SGD, loss: Loss, *, accumulate: int = 1):
        require_parts("CompiledStep", model, optimizer, loss, accumulate)
        reason = obstacle(model, optimizer)
        if reason is not None:
            raise checks.impossible("CompiledStep", reason, "use EagerStep")
        fuse_by_default(model)
        self.eager = EagerStep(model, optimizer, loss, accumulate=accumulate)
        self.model = model
        self.batch: int | None = None
        self._programs: dict[Any, _Program] = {}
        self._block: Any = None

    @property
    def memory_bytes(self) -> int:
        return sum(program.bytes for program in self._programs.values())

    @property
    def least_bytes(self) -> int:
        return max((program.least for program in self._programs.values()), default=0)

    def __call__(self, images: Any, labels: Any, first_sample: int = 0, *, eager: bool = False) -> Totals:
        """Take one step.

        Args:
            images, labels, first_sample: as for `EagerStep`. What they hold is copied.
            eager: run this one as it is written.

        Raises:
            NotCapturable: on all ranks, in place of the step that would have been the first replay.
        """
        if self.batch is None and not eager:
            self.batch = len(images)
            begin, end = self.eager.parts(self.batch)[-1]  # of micro-batches the last one sends
            self.model.expect(end - begin)
        if eager or len(images) != self.batch or not _graphs_suit(self.model.observer):
            return self._lent(lambda: (self.eager(images, labels, first_sample), None))[0]
        key = *(_form(array) for array in (images, labels)), self.model.modes()
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = _Program(self.eager, images, labels)
        totals = program(images, labels, first_sample)
        self._block = program.block or self._block
        return totals

    def observe(self, profiler: Profiler) -> None:
        """As `EagerStep.observe`. A `GraphProfiler` sees the marks of a graph that has them; any other, eager steps."""
        self.eager.observe(profiler)

    def evaluate(self, images: Any, labels: Any) -> tuple[Totals, Any]:
        """As `EagerStep.evaluate`, in the memory of the steps."""
        return self._lent(lambda: self.eager.evaluate(images, labels))

    def _lent(self, work: Callable[[], tuple[Totals, Any]]) -> tuple[Totals, Any]:
        """What ``work`` gives, copied: its arrays lie where the steps have theirs, and none of them may outlive it."""
        if self._block is None:
            return work()
        lending = engine.Lending(Lender(self._block.mem.size), self._block.ptr, engine.pooled)
        with engine.lent(lending):
            totals, logits = work()
        totals = Totals(totals.ops, self._copied(totals.array), totals.num_classes, totals.of)
        return totals, None if logits is None else self._copied(logits)

    def _copied(self, array: Any) -> Any:
        kept = self.model.ops.empty(array.shape, array.dtype)
        self.model.ops.copy_into(kept, array)
        return kept


def _graphs_suit(observer: Profiler) -> bool:
    return observer is NULL_PROFILER or isinstance(observer, GraphProfiler)


def _form(array: Any) -> tuple[Any, ...]:
    """What a batch of another kind, which the door of the first, eager step refuses, differs in."""
    return type(array), array.shape, str(array.dtype)


class _Unit:
    """One micro-batch of a program: its inputs at fixed places, its record, its graph, which may have branches."""

    def __init__(self, images: Any, labels: Any, ops: Any, branches: bool):
        self._branches = branches
        self.images, self.labels = ops.empty(images.shape, images.dtype), ops.empty(labels.shape, labels.dtype)
        self.events: tuple[int, ...] = ()
        self.offsets: list[int] = []
        self.graph: Any = None
        self.totals: Any = None

    def record(self, work: Callable[[], Totals]) -> Totals:
        """Run ``work`` and note what it allocates."""
        recording = engine.Recording(engine.pooled)
        with engine.steady(), self._allocating(recording):
            result = work()
            self.events = tuple(recording.events)
        return result

    def capture(self, work: Callable[[], Any], block: Any, *, one_line: bool = False) -> tuple[Any, Any]:
        """(graph of ``work`` in the planned places of the block, what it returned); ``one_line``: without branches."""
        replaying = engine.Replaying(self.events, self.offsets, block.ptr, block.mem.size)
        stream = new_stream() if self._branches and not one_line else None
        with engine.steady(), engine.lent(replaying), self._allocating(replaying, stream):
            captured = engine.capture(work)
            replaying.finish()
        return captured

    def _allocating(self, allocator: engine.Allocator, stream: Any = None) -> AbstractContextManager[None]:
        return branching(allocator, stream) if self._branches else engine.allocating(allocator)


class _Program:
    """The steps of one form of batch in one set of modes."""

    def __init__(self, step: EagerStep, images: Any, labels: Any):
        self.step, self.model, self.ops = step, step.model, step.model.ops
        self.parts = step.parts(len(images))
        self.block: Any = None
        self.bytes = self.least = 0
        self._recorded = False
        self._warm: Totals | None = None  # of the first step, which tells what totals look like
        self._slab, self._free = None, 0
        self._units: dict[tuple[bool, bool, int], _Unit] = {}
        self._watched: dict[int, tuple[Any, Any]] = {}  # of each micro-batch: its graph with marks, and the marks
        self._count: Any = None  # of the whole batch, where there are micro-batches: at one place, which graphs read
        # A store that moves tensors counts on when memory is free.
        self._branches = self.model.arena.read_at_the_end and type(self.model.store) is TensorStore

    def __call__(self, images: Any, labels: Any, first_sample: int) -> Totals:
        if self._warm is None:
            self._warm = self.step(images, labels, first_sample)
            return self._warm
        if self._recorded and self.block is None:
            self._plan()
        if not self._units:
            engine.release()
        if len(self.parts) > 1:
            self._count_whole(labels)
        rows = self._totals()
        for i, (begin, end) in enumerate(self.parts):
            unit = self._unit(i, images[begin:end], labels[begin:end])
            self.ops.copy_into(unit.images, images[begin:end])
            self.ops.copy_into(unit.labels, labels[begin:end])
            if self.model.training:
                self.model.random.advance(first_sample + begin, new_step=i == 0)
            self.ops.copy_into(rows[i], self._run(i, unit))
        self._recorded = True
        self.step.optimizer.after_step()
        return Totals(self.ops, rows, self._warm.num_classes, self._warm.of)

    def _count_whole(self, labels: Any) -> None:
        count = self.step.loss.count(labels, self.step.num_classes)
        if self._count is None:
            self._count = self.ops.empty(count.shape, np.float64)
        self.ops.copy_into(self._count, count)

    def _totals(self) -> Any:
        """Where a step's totals go, one row for each micro-batch; reading may come late."""
        if self._free == 0:
            shape = _SLAB, len(self.parts), self._warm.array.shape[-1]
            self._slab, self._free = self.ops.empty(shape, np.float64), _SLAB
        self._free -= 1
        return self._slab[self._free]

    def _role(self, i: int) -> tuple[bool, bool, int]:
        begin, end = self.parts[i]
        return i == 0, i == len(self.parts) - 1, end - begin

    def _unit(self, i: int, images: Any, labels: Any) -> _Unit:
        unit = self._units.get(self._role(i))
        if unit is None:
            unit = self._units[self._role(i)] = _Unit(images, labels, self.ops, self._branches)
        return unit

    def _run(self, i: int, unit: _Unit) -> Any:
        """Record the unit or replay it; its totals, good until the next."""
        if unit.graph is not None:
            self.model.random.write()
            graph = unit.graph if self.model.observer is NULL_PROFILER else self._marked(i, unit)
            graph.launch()
            follow(self.model.comm, "compiled step")
            return unit.totals
        with self.model.random.hold(), self._early(rehearse=True):
            return unit.record(self._work(unit, i)).array

    def _marked(self, i: int, unit: _Unit) -> Any:
        """The graph of a micro-batch with a profiler's marks, which is told; in the same places, with the same bits."""
        profiler = self.model.observer
        if i not in self._watched:

            def work() -> tuple[Any, Totals]:
                with profiler.capturing() as marks:
                    return marks, self._work(unit, i)()

            try:
                with self.model.random.hold(), self._early(rehearse=True):
                    graph, (marks, _) = unit.capture(work, self.block, one_line=True)
            except BaseException:
                self.model.abandon()
                raise
            self._watched[i] = graph, marks
        graph, marks = self._watched[i]
        profiler.launching(marks)
        return graph

    def _work(self, unit: _Unit, i: int) -> Callable[[], Totals]:
        first, last, _ = self._role(i)
        return lambda: self.step.part(unit.images, unit.labels, 0, self._count, first=first, last=last)

    def _plan(self) -> None:
        """Place what was recorded, allocate the block and capture all units; a collective."""
        for unit in self._units.values():
            unit.offsets, size = place(unit.events)
            self.bytes = max(self.bytes, size)
            self.least = max(self.least, most_live(unit.events))
        failure = None
        try:
            engine.release()
            block = engine.pooled(max(self.bytes, 1))
            self._capture(block)
        except Exception as error:  # whatever an operation raises that cannot be captured
            failure = f"{type(error).__name__}: {error}"
        except BaseException:  # an interrupt: no graph may outlive the block that it was captured into
            self._forget()
            raise
        failures = [text for text in self.model.comm.share(failure) if text is not None]
        if failures:
            self._forget()
            raise NotCapturable(f"the step does not fit a CUDA graph: {failures[0]}")
        self.block = block

    def _capture(self, block: Any) -> None:
        with self._unwatched(), self.model.random.hold(), self._early():
            for i in range(len(self.parts)):
                unit = self._units[self._role(i)]
                if unit.graph is None:
                    unit.graph, totals = unit.capture(self._work(unit, i), block)
                    unit.totals = totals.array

    def _early(self, **how: bool) -> AbstractContextManager[None]:
        return self.step.optimizer.early(**how) if self._branches else nullcontext()

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        observer = self.model.observer
        self.step.observe(NULL_PROFILER)
        try:
            yield
        finally:
            self.step.observe(observer)

    def _forget(self) -> None:
        """Python ran half a step that no device will run."""
        self.model.abandon()
        for unit in self._units.values():
            unit.graph = unit.totals = None
