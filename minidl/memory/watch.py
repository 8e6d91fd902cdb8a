"""What a dry run of a training step shows: arrays made and dropped, kernels and what they touch, who saves what.

Every array comes from `ops.empty` and every kernel goes through `launch`, so a watcher of the two sees all of it. Views
count as what they are views of.
"""

from __future__ import annotations

import bisect
import dataclasses
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from minidl.cuda.device import active_dry_run
from minidl.cuda.launch import dry_run
from minidl.layer import Layer
from minidl.memory.recording import mapped, parts
from minidl.memory.trace import Tensor
from minidl.store import TensorStore

_PASSES = ("forward", "backward_weight", "backward_data", "update")


@dataclasses.dataclass
class Memory:
    """One allocation of the dry run."""

    nbytes: int
    order: int
    step: int  # at which it was made; -1: before the first
    freed: int | None = None  # order of the event that freed it
    touches: set[int] = dataclasses.field(default_factory=set)
    saved: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # layer, under which name it saved it
    again: bool = False  # running the pass that made it makes it again
    reread: bool = True  # or reads it instead

    @property
    def local(self) -> bool:
        """Whether nothing outside the step that made it ever touches or keeps it."""
        return self.step >= 0 and self.touches <= {self.step} and not self.saved


class Watcher:
    """Notes allocations, frees, kernel arguments and spans of one dry run."""

    def __init__(self) -> None:
        self.all: list[Memory] = []
        self.passes: list[tuple[str, str]] = []
        self.traffic: list[int] = []  # of each pass: bytes of its kernels' arrays
        self.ticks: list[tuple[int, int]] = []
        self.runs: dict[int, tuple[Layer, Any, dict[str, Any], Any]] = {}
        self.parts: dict[int, list[tuple[int, int, Tensor, set[int]]]] = {}  # of arenas: (begin, end, what, touches)
        self._live: dict[int, tuple[weakref.ref, Memory]] = {}
        self._order = 0
        self._open = 0

    # -- what the dry run tells -------------------------------------------------------------------------------------

    def allocated(self, array: np.ndarray) -> None:
        memory = Memory(array.nbytes, self._tick(), self.step)
        self.all.append(memory)
        key = id(array)
        self._live[key] = weakref.ref(array, lambda _: self._freed(key)), memory

    def _freed(self, key: int) -> None:
        _, memory = self._live.pop(key)
        memory.freed = self._tick()

    def launched(self, name: str, arguments: tuple) -> None:
        if not self.passes:
            return  # parameters being made
        for argument in arguments:
            memory = self.find(argument)
            if memory is not None and not self._open:  # messages are rounded between passes
                assert memory.step < 0, f"{name} runs outside every span, so no step would own it"
            elif memory is not None:
                memory.touches.add(len(self.passes) - 1)
                self.traffic[-1] += argument.nbytes
                self._touch_parts(argument)

    def _touch_parts(self, array: np.ndarray) -> None:
        whole = root(array)
        parts = self.parts.get(id(whole))
        if parts is None:
            return
        offset = _address(array) - _address(whole)
        at = max(bisect.bisect_right(parts, offset, key=lambda part: part[0]) - 1, 0)
        while at < len(parts) and parts[at][0] < offset + array.nbytes:
            if offset < parts[at][1]:
                parts[at][3].add(len(self.passes) - 1)
            at += 1

    @contextmanager
    def span(self, layer: str, pass_name: str, stream: Any = None) -> Iterator[None]:
        """The profiler's hook: each pass is a step."""
        if pass_name in _PASSES:
            assert not self._open, f"{layer} {pass_name} opens within another pass"
            self.passes.append((layer, pass_name))
            self.traffic.append(0)
            begin = self._tick()
            self._open += 1
            try:
                yield
            finally:
                self._open -= 1
                self.ticks.append((begin, self._tick()))
        else:
            yield

    # -- what is made of it -----------------------------------------------------------------------------------------

    def find(self, array: Any) -> Memory | None:
        """The allocation that ``array`` is a view of; None for anything else, such as a kernel's plain arguments."""
        if not isinstance(array, np.ndarray):
            return None
        found = self._live.get(id(root(array)))
        return found[1] if found is not None else None

    def seen(self, array: Any) -> Any:
        """``array`` as (allocation, offset, shape, strides, dtype); parameters and what is no array stay themselves."""
        memory = self.find(array)
        if memory is None or self.is_arena(memory):
            return array
        return Seen(memory, _address(array) - _address(root(array)), array.shape, array.strides, array.dtype)

    @property
    def step(self) -> int:
        """The pass that is open; -1 between passes."""
        return len(self.passes) - 1 if self._open else -1

    def divide(self, array: np.ndarray | None, kind: str, segments: list[tuple[str, int, int]]) -> None:
        """Tell the parts of an arena apart: (name, first byte, last byte + 1)."""
        if array is not None and array.nbytes:
            parts = [(a, b, Tensor(f"{name}:{kind}", kind, b - a, (), given=True), set()) for name, a, b in segments]
            self.parts[id(root(array))] = parts

    def _tick(self) -> int:
        self._order += 1
        return self._order

    @property
    def now(self) -> int:
        """The latest tick."""
        return self._order

    def workspaces(self) -> list[int]:
        """For each step the most bytes at once of what lives within it."""
        events: list[list[tuple[int, int]]] = [[] for _ in self.passes]
        for memory in self.all:
            if memory.local:
                end = memory.freed if memory.freed is not None else self._order + 1
                events[memory.step] += [(memory.order, memory.nbytes), (end, -memory.nbytes)]
        peaks = []
        for changes in events:
            now = most = 0
            for _, change in sorted(changes):
                now += change
                most = max(most, now)
            peaks.append(most)
        return peaks

    def arena_tensors(self) -> list[Tensor]:
        """Parameters, gradients and momentum, part by part."""
        parts = [part for arena in self.parts.values() for part in arena]
        return [dataclasses.replace(what, touches=tuple(sorted(touches))) for _, _, what, touches in parts]

    @property
    def arena_bytes(self) -> int:
        return sum(self._live[key][1].nbytes for key in self.parts)

    def is_arena(self, memory: Memory) -> bool:
        return any(self._live[key][1] is memory for key in self.parts)


class Seen(NamedTuple):
    """A `Place` before the tensors of the trace have their numbers."""

    memory: Memory
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype


class NotingStore(TensorStore):
    """Keeps everything and notes who saved what under which name, and what each forward pass takes and gives."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self._watcher = watcher

    def save(self, owner: str, items: Mapping[str, Any]) -> None:
        for name, item in items.items():
            memory = self._watcher.find(item)
            if memory is not None:
                memory.saved.append((owner, name))
        self._items = items
        super().save(owner, items)

    def run(self, layer: Layer, inputs: tuple[Any, ...]) -> Any:
        self._items: Mapping[str, Any] = {}
        given = mapped(inputs, self._watcher.seen)
        result = layer.compute(*inputs)
        saved = mapped(dict(self._items), self._watcher.seen)
        self._watcher.runs[self._watcher.step] = layer, given, saved, mapped(result, self._watcher.seen)
        self._note_remade(layer, inputs, result)
        self._items = {}  # they live as long as in any step
        return result

    def _note_remade(self, layer: Layer, inputs: tuple[Any, ...], result: Any) -> None:
        """Which arrays of the result another run would make anew, instead of handing on what was saved; and what of
        all that this run made the other would read.

        A buffer that later layers go on filling is none: another run would make its first part only. Nor does a pass
        run again that nobody goes back through: nothing was kept for it.
        """
        if getattr(result, "buffer", None) is not None or not layer.keeps:
            return
        aside = _Aside(self._watcher)
        with dry_run(active_dry_run().device, aside):
            once_more = layer.rerun(SimpleNamespace(**self._items), *inputs)
            for array, other in zip(parts(result), parts(once_more), strict=True):
                memory = self._watcher.find(array)
                if memory is not None and aside.find(other) is not None:
                    memory.again = True
        for item in self._items.values():
            memory = self._watcher.find(item)
            if memory is not None and memory.step == self._watcher.step:
                memory.reread = memory.order in aside.read


class _Aside(Watcher):
    """Watches what another watcher shall not count, and which of that one's arrays are read."""

    def __init__(self, other: Watcher) -> None:
        super().__init__()
        self._other = other
        self.read: set[int] = set()  # by order

    def launched(self, name: str, arguments: tuple) -> None:
        self.read |= {memory.order for a in arguments if (memory := self._other.find(a)) is not None}


def root(array: np.ndarray) -> np.ndarray:
    """The array that ``array`` is a view of."""
    return array if array.base is None else array.base


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]
