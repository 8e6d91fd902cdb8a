"""A training step walked on shapes alone: which arrays it makes, which kernels touch them, what layers save.

The model runs in a dry run of the CUDA table: the same Python code as on a GPU, with arrays nobody touches. Every array
comes from `ops.empty` and every kernel goes through `launch`, so a watcher of the two sees all of it: views count as
what they are views of, and whatever a later fusion saves or no longer saves shows up by itself.
"""

from __future__ import annotations

import bisect
import dataclasses
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from minidl import checks
from minidl.cuda.device import DeviceRecord, active_dry_run
from minidl.cuda.launch import dry_run
from minidl.dist.communicator import SOLO
from minidl.dist.simulated import ImaginedCommunicator
from minidl.graph import Graph
from minidl.layer import Layer
from minidl.loss import SoftmaxCrossEntropy
from minidl.memory.nested import mapped, parts
from minidl.memory.recording import Allocation, Place, Recording, Run
from minidl.memory.trace import Step, Tensor, Trace
from minidl.model import Model
from minidl.optim import SGD
from minidl.precision import Precision
from minidl.profile import PassCost
from minidl.store import Slot, TensorStore

__all__ = ["Watcher", "blank", "record", "record_step", "root"]

_PASSES = ("forward", "backward_weight", "backward_data", "update")


@dataclasses.dataclass
class _Memory:
    """One allocation of the dry run."""

    nbytes: int
    order: int
    step: int  # at which it was made; -1: before the first
    freed: int | None = None  # order of the event that freed it
    touches: set[int] = dataclasses.field(default_factory=set)
    saved: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # layer, under which name it saved it
    again: bool = False  # running the pass that made it makes it again


class Watcher:
    """Notes allocations, frees, kernel arguments and spans of one dry run."""

    def __init__(self) -> None:
        self.all: list[_Memory] = []
        self.passes: list[tuple[str, str]] = []
        self.traffic: list[int] = []  # of each pass: bytes of its kernels' arrays
        self.ticks: list[tuple[int, int]] = []
        self.runs: dict[int, tuple[Layer, Any, dict[str, Any], Any]] = {}
        self.parts: dict[int, list[tuple[int, int, Tensor, set[int]]]] = {}  # of arenas: (begin, end, what, touches)
        self._live: dict[int, tuple[weakref.ref, _Memory]] = {}
        self._order = 0
        self._open = 0

    # -- what the dry run tells -------------------------------------------------------------------------------------

    def allocated(self, array: np.ndarray) -> None:
        memory = _Memory(array.nbytes, self._tick(), self.step)
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

    def find(self, array: Any) -> _Memory | None:
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
        return _Seen(memory, _address(array) - _address(root(array)), array.shape, array.strides, array.dtype)

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
            if _is_local(memory):
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

    def is_arena(self, memory: _Memory) -> bool:
        return any(self._live[key][1] is memory for key in self.parts)


class _Seen(NamedTuple):
    """A `Place` before the tensors of the trace have their numbers."""

    memory: _Memory
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype


class _NotingStore(TensorStore):
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
        """Which arrays of the result another run would make anew, instead of handing on what was saved.

        A buffer that later layers go on filling is none: another run would make its first part only.
        """
        if getattr(result, "buffer", None) is not None:
            return
        aside = Watcher()
        with dry_run(active_dry_run().device, aside):
            once_more = layer.rerun(SimpleNamespace(**self._items), *inputs)
            for array, other in zip(parts(result), parts(once_more), strict=True):
                memory = self._watcher.find(array)
                if memory is not None and aside.find(other) is not None:
                    memory.again = True

    def hold(self, array: Any) -> Slot:
        return Slot(array)


def record(
    graph: Graph,
    batch: int,
    *,
    precision: str | Precision = "fp32",
    momentum: float = 0.9,
    gradients: str = "keep",
    device: DeviceRecord | None = None,
    **facts: Any,
) -> Trace:
    """The trace of one training step: forward, cross entropy, backward, SGD.

    No GPU and no CuPy are needed; no array is touched, so a batch may be far larger than this machine's memory.

    Args:
        graph: a network built for this call: its layers belong to the walked model afterwards.
        batch: samples.
        precision: as `minidl.Model`.
        momentum: 0 leaves the optimizer without state.
        gradients: ``"keep"`` all of them; ``"ring"``, a few messages' (`minidl.SGD.update_in_backward`);
            ``"momentum"``, none (`minidl.SGD.gradients_in_momentum`).
        device: the imagined GPU, which decides workspaces; default an H200.
        facts: kept in the trace, JSON-able (the model's name, image size, ...).

    Raises:
        ValueError: for a batch below one or an unknown precision.
        RuntimeError: when the graph's layers belong to a model already.
    """
    modes = {"keep": {}, "ring": {"slots": 1}, "momentum": {"in_momentum": True}}
    if gradients not in modes:
        raise checks.unknown("gradients", gradients, modes)
    options = {"precision": precision, "momentum": momentum, "device": device, "facts": facts, **modes[gradients]}
    return record_step(graph, batch, **options).trace


def record_step(
    graph: Graph,
    batch: int,
    *,
    precision: str | Precision = "fp32",
    momentum: float = 0.9,
    device: DeviceRecord | None = None,
    facts: Mapping[str, Any] | None = None,
    ranks: int = 1,
    slots: int = 0,
    in_momentum: bool = False,
    **options: Any,
) -> Recording:
    """As `record`, with all that an executor needs beside the trace.

    Args:
        ranks: that train together, each with ``batch`` samples.
        slots: of a ring of gradients (`minidl.SGD.update_in_backward`); 0: all are kept.
        in_momentum: gradients are added to the momentum (`minidl.SGD.gradients_in_momentum`).
        options: those of `minidl.Model`.
    """
    batch = checks.at_least("record", "batch", batch, 1)
    blank(graph)
    watcher = Watcher()
    with dry_run(device, watcher) as log:
        store = _NotingStore(watcher)
        comm = ImaginedCommunicator(ranks) if ranks > 1 else SOLO
        services = {"comm": comm, "store": store, "profiler": watcher}
        model = Model(graph, device="cuda", precision=precision, **services, **options)
        optimizer = SGD(model, 0.1, momentum)
        if slots:
            optimizer.update_in_backward(slots)
        if in_momentum:
            optimizer.gradients_in_momentum()
        loss = SoftmaxCrossEntropy(comm=comm)
        loss.profiler = watcher
        ops, storage = model.ops, model.precision.storage
        x = ops.empty((batch, *graph.nodes[0].shape), storage)
        labels = ops.empty((batch, *graph.output_node.shape[:-1]), np.int32)
        _name_arenas(watcher, model, optimizer)
        before = len(watcher.all)
        logits = model.forward(x)
        totals = loss.forward(logits, labels)
        model.backward(loss.backward(optimizer.loss_scale))
        optimizer.step()
        steps = _steps(watcher, model, loss, optimizer, batch)
        tensors, numbers = _tensors(watcher, watcher.find(x))
        allocations = _allocations(watcher, watcher.all[before:], numbers)
        del logits, totals
    first_gradient = watcher.passes.index(("loss", "backward_data"))
    known = {"batch": batch, "precision": model.precision.name, "device": log.device.name, **(facts or {})}
    trace = Trace(tuple(steps), tuple(tensors), first_gradient, known)
    return Recording(trace, allocations, tuple(watcher.ticks), _runs(watcher, numbers), log.device)


def _allocations(watcher: Watcher, made: list[_Memory], numbers: Mapping[int, int]) -> tuple[Allocation, ...]:
    """What the step makes; nobody asks for memory for empty arrays."""
    found = []
    for memory in made:
        end = memory.freed if memory.freed is not None else watcher.now
        stays = memory.freed is None or memory.step < 0
        number = numbers.get(id(memory))
        if memory.nbytes:
            found.append(Allocation(memory.nbytes, memory.step, number, memory.order, end, stays))
    return tuple(found)


def _runs(watcher: Watcher, numbers: Mapping[int, int]) -> dict[int, Run]:
    """The forward passes, with the numbers of the tensors; what lives within one pass only has none."""

    def place(item: Any) -> Any:
        if not isinstance(item, _Seen):
            return item
        memory, *rest = item
        return Place(numbers[id(memory)], *rest) if id(memory) in numbers else None

    def told(what: Any) -> Any:
        return mapped(what, place, _Seen)

    return {
        t: Run(layer, told(given), told(saved), told(result))
        for t, (layer, given, saved, result) in watcher.runs.items()
    }


def blank(graph: Graph) -> Graph:
    """The same graph, with starting weights of zero: for walks, where drawing them would take seconds."""
    for layer in graph.layers:
        layer.specs = [dataclasses.replace(spec, init=_nothing) for spec in layer.specs]
    return graph


def _nothing(rng: Any, shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(np.float32(0), shape)


def root(array: np.ndarray) -> np.ndarray:
    """The array that ``array`` is a view of."""
    return array if array.base is None else array.base


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def _is_local(memory: _Memory) -> bool:
    """Whether nothing outside the step that made it ever touches or keeps it."""
    return memory.step >= 0 and memory.touches <= {memory.step} and not memory.saved


def _name_arenas(watcher: Watcher, model: Model, optimizer: SGD) -> None:
    arena = model.arena
    own = [(s.full_name, s) for s in arena.segments]

    def parts(itemsize: int, trained: bool) -> list[tuple[str, int, int]]:
        return [(n, s.offset * itemsize, s.stop * itemsize) for n, s in own if s.trainable or not trained]

    watcher.divide(arena.master, "weight", parts(4, False))
    if arena.working is not arena.master:
        watcher.divide(arena.working, "working", parts(arena.working.itemsize, False))
    if not arena.adds:
        watcher.divide(arena.grad, "gradient", [("ring", 0, arena.grad.nbytes)] if arena.slots else parts(4, True))
    messages = [(message.name, message.begin * 4, message.end * 4) for message in arena.messages]
    watcher.divide(optimizer.velocity, "momentum", messages)


def _tensors(watcher: Watcher, batch: _Memory) -> tuple[list[Tensor], dict[int, int]]:
    """Everything that lives beyond one step, and the numbers of those that the step makes.

    What is made before the first step and never moves comes last.
    """
    tensors, numbers, company = [], {}, 0
    made = Counter()
    for memory in watcher.all:
        if watcher.is_arena(memory) or _is_local(memory):
            continue
        if memory.freed is not None and memory.freed < watcher.ticks[0][0]:
            continue  # gone before the step
        if memory.step < 0 and memory is not batch and not memory.saved:
            company += memory.nbytes
            continue
        if not memory.touches:
            continue  # nobody reads it on the device
        given = memory.step < 0
        touches = tuple(sorted(memory.touches if given else memory.touches | {memory.step}))
        owner = "input" if given else watcher.passes[memory.step][0]
        what = _what(memory, owner, given, watcher)
        name = f"{owner}:{what}"
        made[name] += 1
        if made[name] > 1:
            name = f"{name}.{made[name]}"
        kind = "input" if given else _kind(watcher.passes[memory.step][1])
        savers = tuple(f"{layer}.{item}" for layer, item in memory.saved)
        numbers[id(memory)] = len(tensors)
        tensors.append(Tensor(name, kind, memory.nbytes, touches, bool(savers), given, savers, memory.again))
    tensors += watcher.arena_tensors()
    rest = watcher.arena_bytes - sum(t.bytes for t in tensors if t.resident)
    return [*tensors, Tensor("model:buffers and tables", "buffer", company + rest, (), given=True)], numbers


def _what(memory: _Memory, owner: str, given: bool, watcher: Watcher) -> str:
    if given:
        return "x"
    if watcher.passes[memory.step][1] != "forward":
        return "dx"
    own = dict(memory.saved).get(owner)
    return own if own not in (None, "x") else "y"


def _kind(pass_name: str) -> str:
    return "activation" if pass_name == "forward" else "gradient_of_activation"


def _steps(watcher: Watcher, model: Model, loss: SoftmaxCrossEntropy, optimizer: SGD, batch: int) -> list[Step]:
    """The passes with their workspaces and model work; a second span of one pass gets what its operands weigh."""
    itemsize = model.precision.storage.itemsize
    shapes = model.graph.shapes((batch, *model.graph.nodes[0].shape))
    costs: dict[tuple[str, str], PassCost] = {}
    kinds: dict[str, tuple[str, bool]] = {}
    for node in model.graph.nodes:
        if node.layer is not None:
            cost = node.layer.cost(*(shapes[i] for i in node.inputs), itemsize=itemsize)
            kinds[node.name] = type(node.layer).__name__, any(spec.product for spec in node.layer.specs)
            for pass_name in ("forward", "backward_weight", "backward_data"):
                costs[node.name, pass_name] = getattr(cost, pass_name)
    cost = loss.cost(shapes[model.output_node.index], itemsize)
    costs |= {("loss", "forward"): cost.forward, ("loss", "backward_data"): cost.backward_data}
    costs["optimizer", "update"] = optimizer.cost()
    shared = {  # by as many spans: updates, gradients of weights in tiles
        key: count for key, count in Counter(watcher.passes).items() if key[1] in ("update", "backward_weight")
    }
    for key, count in shared.items():
        costs[key] = PassCost(costs[key].flop // count, costs[key].bytes // count)
    read = [0] * len(watcher.passes)
    for memory in watcher.all:
        for t in memory.touches:
            read[t] += memory.nbytes
    steps, seen = [], set()
    for t, (key, workspace) in enumerate(zip(watcher.passes, watcher.workspaces(), strict=True)):
        cost = costs[key]
        if key in seen and key not in shared:
            cost = PassCost(0, read[t])
        seen.add(key)
        kind, matrix = kinds.get(key[0], ("", False))
        steps.append(Step(*key, workspace, cost.flop, cost.bytes, watcher.traffic[t], matrix, kind))
    return steps
