"""A store that carries out a script: arrays at planned places, copies beside the kernels, tensors made again.

The model's own Python code runs as ever. Each array that it asks for lies where the script says; each pass that it
opens is the cue for the copies and waits that the script has before it. All decisions are made: the host only issues
work, waits for nothing and allocates nothing, so a step can be captured in a CUDA graph as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from minidl import checks
from minidl.cuda.copies import CopyEngine
from minidl.memory.plan import human
from minidl.memory.program import Operation
from minidl.memory.recording import Place, Run, mapped
from minidl.memory.script import Request, Script, rebuild
from minidl.profile import Profiler
from minidl.store import Saved, TensorStore, nothing_saved

_PASSES = ("forward", "backward_weight", "backward_data")


class ScriptedStore(TensorStore):
    """Runs the steps of a model by scripts, each within `step`; outside it keeps everything, as any store.

    Args:
        engine: memory and streams, large enough for every script.
        script_for: the script of a step of so many samples; of none, that of any: where visitors are at home.

    Attributes:
        at: the step that runs, or ran last; -1 before the first.
        rebuilding: the tensor that is being made again; None else.
        settle: brings back to the device what lies in the host's memory between steps; called when the store goes.
    """

    def __init__(self, engine: CopyEngine, script_for: Callable[[int], Script]):
        super().__init__()
        self.engine, self.script_for = engine, script_for
        self.settle: Callable[[], None] = lambda: None
        self._script: Script | None = None
        self._reset()

    def close(self) -> None:
        """Give the memory back, whoever still holds this store: there are no steps in it from now on."""
        if self._script is not None:
            raise checks.order("memory", "given back within a step", "leave memory.step() first")
        self.settle()
        self.engine.drain()
        self.engine = None

    def _reset(self) -> None:
        self._script = None
        self.at = -1
        self.rebuilding: int | None = None
        self._open = False  # whether its work is still being issued
        self._watched = False  # by the profiler; an unwatched loss is known by what it asks for
        self._cursor = 0  # in the program
        self._requests: Iterator[Request] = iter(())
        self._outside = False  # an update runs: its arrays are not the script's business
        self._again: Iterator[Request] = iter(())
        self._frames: dict[str, dict[str, Any]] = {}
        self._runs: dict[int, Run] = {}
        self._without: Script | None = None  # within a step without samples: where visitors are at home
        self._guests: list[int] = []  # visitors that are here in such a step

    # -- a step -----------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self, samples: int) -> Iterator[None]:
        """Around forward, loss and backward of one training step; the update may be within or behind it.

        Without samples, on a rank that got none of a last batch, nothing is planned: visitors come and go at their
        updates, which the host waits for. An error within leaves the store ready for the next step. So does a step
        without a backward pass, after waiting for the device.

        Raises:
            RuntimeError: when the step asks for other arrays, or runs other passes, than the one that was planned for;
                in memory that was given back.
        """
        if self.engine is None:
            text = "a step in memory that was given back"
            raise checks.order("memory", text, "plan again: limit_memory(...)")
        if self._script is not None:
            raise checks.order("memory", "a step within a step", "leave the first one")
        if samples == 0:
            self._without = self.script_for(0)
            try:
                yield
            finally:
                self._reset()
            return
        script = self.script_for(samples)
        self.clear()
        self._script = script
        self._requests = iter(script.requests)
        done = False
        try:
            with self.engine.allocating(self._place):
                yield
                done = self.at >= script.last
                if done:
                    self._leave()
        finally:
            if not done:
                self.engine.drain()
            self._reset()
            self.clear()

    def watch(self, profiler: Profiler) -> Profiler:
        return _Cues(self, profiler)

    def cue(self, layer: str, pass_name: str, span: AbstractContextManager[None]) -> AbstractContextManager[None]:
        """A context around one pass of a layer, as the profiler sees it."""
        if self._without is not None and pass_name == "update":
            return self._update_without(span)
        if self._script is None or not (pass_name == "update" or pass_name in _PASSES):
            return span
        return self._update(span) if pass_name == "update" else self._pass(f"{layer} {pass_name}", span)

    @contextmanager
    def _update(self, span: AbstractContextManager[None]) -> Iterator[None]:
        visited = bool(self._script.trace.visitors)  # else no update touches the arena, wherever it stands
        if visited:
            self._enter(self._script.updates[self.at + 1])
        self._outside = True
        try:
            with span:
                yield
        finally:
            self._outside = False
        if visited:
            self._leave()

    @contextmanager
    def _update_without(self, span: AbstractContextManager[None]) -> Iterator[None]:
        with span:
            yield
        for i in self._guests:
            self._carry(self.engine.copy_out, self._without, i)
        self._guests.clear()

    def _carry(self, copy: Callable[[int, int, int], None], script: Script, i: int) -> None:
        """Copy a visitor one way while nothing else runs."""
        self.engine.drain()
        copy(script.here[i], script.host[i], script.trace.tensors[i].bytes)
        self.engine.drain()

    @contextmanager
    def _pass(self, title: str, span: AbstractContextManager[None]) -> Iterator[None]:
        self._enter(self._script.following[self.at + 1])
        if self._title != title:
            raise self._other(f"runs {title} where {self._title} was planned")
        self._watched = True
        with span:
            yield
        self._watched = False
        self._leave()

    @property
    def _title(self) -> str:
        return self._script.trace.steps[self.at].title

    def _other(self, text: str) -> Exception:
        return checks.order("memory", f"the step {text}", "plan again: limit_memory(...) with this model and batch")

    def _enter(self, t: int) -> None:
        """Issue what comes before step ``t``, which begins."""
        if self._open:
            self._leave()
        script = self._script
        if t < 0:
            raise self._other("goes on where the planned one ends")
        while (op := script.operations[self._cursor]) != Operation("compute", "step", t):
            if op.kind == "step":  # an update that touches nothing of the arena, or runs when the store has left
                self._done("compute")
            else:
                self._issue(op.stream, op.kind, op.index)
        self.at, self._open = t, True

    def _leave(self) -> None:
        """The step's work is issued: so may be what waits for it on other streams."""
        if not self._open:
            return
        self._open = False
        script = self._script
        self._done("compute")
        while self._cursor < len(script.operations) and (op := script.operations[self._cursor]).stream != "compute":
            self._issue(op.stream, op.kind, op.index)

    def _issue(self, stream: str, kind: str, index: int) -> None:
        script = self._script
        if kind == "wait":
            self.engine.wait(stream, index)
            self._cursor += 1
            return
        if kind == "copy_out":
            self.engine.copy_out(script.here[index], script.host[index], script.trace.tensors[index].bytes)
        elif kind == "copy_in":
            self.engine.copy_in(script.back[index], script.host[index], script.trace.tensors[index].bytes)
        else:
            self._rebuild(index)
        self._done(stream)

    def _done(self, stream: str) -> None:
        if self._cursor in self._script.awaited:
            self.engine.record(stream, self._cursor)
        self._cursor += 1

    # -- memory -----------------------------------------------------------------------------------------------------

    def _place(self, count: int) -> int | None:
        """Where the next array lies."""
        if count == 0 or self._outside or self.at < 0:
            return None  # the batch, say, if it is made within the step
        requests = self._requests if self.rebuilding is None else self._again
        for request in requests:
            if request.bytes == count:
                break
            if request.offset is not None:
                raise self._other(f"asks for {human(count)} in {self._title}, planned were {human(request.bytes)}")
        else:
            raise self._other(f"asks for {human(count)} more than planned in {self._title}")
        if self.rebuilding is None and request.step >= 0:
            if request.step == self._script.following[self.at + 1] and not self._watched:
                self._enter(request.step)
            elif request.step != self.at:
                raise self._other(
                    f"asks in {self._title} for what {self._script.trace.steps[request.step].title} makes"
                )
        return request.offset

    def run(self, layer: Any, inputs: tuple[Any, ...]) -> Any:
        script = self._script
        if script is None or self.at not in script.touched or self.rebuilding is not None:
            return layer.compute(*inputs)
        here = sorted((script.here[i], i) for i in script.touched[self.at])

        def seen(item: Any) -> Any:
            return mapped(item, lambda array: self._seen(array, here))

        given = seen(inputs)
        result = layer.compute(*inputs)
        self._runs[self.at] = Run(layer, given, seen(self._frames.get(layer.name, {})), seen(result))
        return result

    def _seen(self, array: Any, here: list[tuple[int, int]]) -> Any:
        """``array`` by its tensor, among those that the present step touches; any other as it is.

        Others are the caller's, and values that a layer is handed but does not read: those may be dead, and lie where
        a tensor of the step lies now.
        """
        offset = self.engine.offset(array)
        if offset is None or not array.size:
            return array
        extent = sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)) + array.itemsize
        for begin, i in here:
            if begin <= offset and offset + extent <= begin + self._script.trace.tensors[i].bytes:
                return Place(i, offset - begin, array.shape, array.strides, array.dtype)
        return array

    def _rebuild(self, tensor: int) -> None:
        script = self._script
        view, offset = self.engine.view, self.engine.offset

        def locate(place: Place) -> Any:
            begin = script.back.get(place.tensor, script.here[place.tensor])
            return view(begin + place.offset, place.shape, place.strides, place.dtype)

        def within(array: Any, behind: int, place: Place) -> Any:
            begin = offset(array) - behind
            return view(begin + place.offset, place.shape, place.strides, place.dtype)

        self.rebuilding, self._again = tensor, iter(script.rebuilds[tensor])
        try:
            rebuild(script.decisions[tensor].recipe, self._runs, locate, within)
        finally:
            self.rebuilding = None

    def visitor(self, name: str) -> Any:
        """The visiting tensor of that name, float32, where it lies while it is here."""
        script = self._script or self._without
        if script is None:
            raise checks.order("memory", "outside a planned step momentum is on the host", "open memory.step()")
        tensor = script.visitors[name]
        if script is self._without and tensor not in self._guests:
            self._carry(self.engine.copy_in, script, tensor)
            self._guests.append(tensor)
        return self.engine.view(script.here[tensor], (script.trace.tensors[tensor].bytes // 4,), (4,), np.dtype("f4"))

    # -- what layers see --------------------------------------------------------------------------------------------

    def save(self, owner: str, items: Mapping[str, Any]) -> None:
        if self._script is None:
            super().save(owner, items)
        else:
            self._frames[owner] = dict(items)

    def take(self, owner: str) -> Saved:
        if self._script is None:
            return super().take(owner)
        self.require(owner)
        items = self._frames.pop(owner)
        return Saved(**{name: self._back(f"{owner}.{name}", item) for name, item in items.items()})

    def require(self, owner: str) -> None:
        if self._script is None:
            super().require(owner)
        elif owner not in self._frames:
            raise nothing_saved(owner)

    def _back(self, saver: str, item: Any) -> Any:
        """A saved array where it is when it has come back."""
        script = self._script
        tensor = script.saved.get(saver)
        if tensor is None:
            return item
        shift = script.back[tensor] - script.here[tensor]
        return self.engine.view(self.engine.offset(item) + shift, item.shape, item.strides, item.dtype)


class _Cues:
    """A profiler that tells the store of each pass, and ``inner`` of all it is told."""

    def __init__(self, store: ScriptedStore, inner: Profiler):
        self._store, self._inner = store, inner

    def span(self, layer: str, pass_name: str, stream: Any = None) -> AbstractContextManager[None]:
        return self._store.cue(layer, pass_name, self._inner.span(layer, pass_name, stream))
