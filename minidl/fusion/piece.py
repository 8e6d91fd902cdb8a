"""A piece of a network, cut out to be timed: batch norms with the layers around them, on operands of their own.

A piece of some batch norms holds the convolutions that write for them, the sums, ReLUs and poolings that read them, and
the convolutions that take their gradient. It runs as `minidl.model.Model` would run these layers, whatever modes they
are in: copies of the layers, of the same sizes, with other numbers. The gradients of the convolutions at its lower end
are left out where no mode changes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from types import ModuleType
from typing import Any

from minidl.fusion.plans import set_modes
from minidl.fusion.sites import Site
from minidl.graph import Graph, Node
from minidl.layer import Layer
from minidl.layers import (
    GELU,
    AdaptiveAvgPool2d,
    Add,
    BatchNorm2d,
    Conv2d,
    ConvTranspose2d,
    Hardswish,
    LeakyReLU,
    MaxPool2d,
    Mul,
    ReLU,
    ReLU6,
    Sigmoid,
    SiLU,
    Tanh,
)
from minidl.precision import Precision
from minidl.profile.inputs import noise
from minidl.profile.timing import input_sets
from minidl.store import LastPass, TensorStore
from minidl.value import Value, addend, finished, materialize

# And no kinds of these, which may talk to other ranks.
_MEASURED = (
    Conv2d, ConvTranspose2d, BatchNorm2d, ReLU, ReLU6, LeakyReLU, Sigmoid, Tanh, SiLU, GELU, Hardswish, Add, MaxPool2d,
    AdaptiveAvgPool2d, Mul,
)  # fmt: skip
_MOST_SETS = 8


@dataclass(frozen=True)
class Member:
    """One layer of a piece.

    Attributes:
        layer: of the network; never run itself.
        inputs: for each the place of the member that gives it, or -1 - i for the piece's i-th operand.
        shape: of its output, batch first.
        outside: whether its output is read outside the piece too, so that a gradient comes from there.
        back: whether its gradients are part of the piece.
        first: whether it reads the network's input, whose gradient nobody needs.
    """

    layer: Layer
    inputs: tuple[int, ...]
    shape: tuple[int, ...]
    outside: bool
    back: bool
    first: bool


@dataclass(frozen=True)
class Cut:
    """What a piece consists of: layers in order, and the shapes of the operands they read from outside."""

    members: tuple[Member, ...]
    operands: tuple[tuple[int, ...], ...]

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for pieces that do the same work."""
        facts = (
            (type(m.layer).__name__, m.layer.describe(), m.inputs, m.shape, m.outside, m.back, m.first)
            for m in self.members
        )
        return (*facts, self.operands)


def cut(graph: Graph, sites: Sequence[Site], batch: int) -> Cut | None:
    """The piece of a network around some batch norms; None where a layer is of a kind that is not timed alone."""
    names: set[str | None] = set()
    readers = graph.consumers()
    for site in sites:
        names |= {site.name, site.producer, *site.readers, site.taker}
        for read in filter(None, (site.pooled, site.gated)):
            names |= {graph.nodes[i].name for i in readers[graph[read].index]}
    nodes = [node for node in graph.nodes if node.name in names]
    if any(type(node.layer) not in _MEASURED for node in nodes):
        return None
    below = {site.producer for site in sites if site.lazy is None} - {site.taker for site in sites}
    place = {node.index: i for i, node in enumerate(nodes)}
    members, operands = [], []
    for node in nodes:
        inputs = []
        for i in node.inputs:
            if i not in place:
                operands.append((batch, *graph.nodes[i].shape))
            inputs.append(place.get(i, -len(operands)))
        outside = _read_outside(graph, node, readers, place)
        facts = outside, node.name not in below, not any(graph.nodes[i].inputs for i in node.inputs)
        members.append(Member(node.layer, tuple(inputs), (batch, *node.shape), *facts))
    return Cut(tuple(members), tuple(operands))


def _read_outside(graph: Graph, node: Node, readers: list[list[int]], place: Mapping[int, int]) -> bool:
    return node is graph.output_node or any(i not in place for i in readers[node.index])


class Piece:
    """A cut on a device, with as many sets of operands as exceed the cache.

    Attributes:
        sets: how many.
    """

    def __init__(self, cut: Cut, ops: ModuleType, precision: Precision, cache_bytes: int):
        self.cut, self.ops = cut, ops
        self.layers = [twin(member.layer) for member in cut.members]
        for layer, member in zip(self.layers, cut.members, strict=True):
            layer.to(ops.name, precision.name)
            layer.needs_input_grad = not member.first
        self._use(LastPass())
        storage = precision.storage
        moved = storage.itemsize * sum(map(prod, (*cut.operands, *(m.shape for m in cut.members))))
        self.sets = min(input_sets(moved, cache_bytes), _MOST_SETS) if ops.name == "cuda" else 1
        self._operands = self._copies([noise(ops, shape, storage, seed=k) for k, shape in enumerate(cut.operands)])
        self._gradients = self._copies([noise(ops, m.shape, storage, 100) if m.outside else None for m in cut.members])

    def _copies(self, arrays: Sequence[Any]) -> list[list[Any]]:
        """The arrays and copies of them, one list for each set; random numbers come from the host, which is slow."""
        sets = [list(arrays)]
        for _ in range(self.sets - 1):
            copies = [None if array is None else self.ops.empty(array.shape, array.dtype) for array in arrays]
            for to, array in zip(copies, arrays, strict=True):
                if array is not None:
                    self.ops.copy_into(to, array)
            sets.append(copies)
        return sets

    def calls(self, which: str, on: Set[tuple[str, str]]) -> list[Callable[[], Any]]:
        """Calls of a pass, "forward" or "backward", one for each set of operands.

        Args:
            on: (name of a layer, its attribute) for each mode that is on (`minidl.fusion.plans.switches`).
        """
        if which == "forward":
            return [partial(self._in, on, partial(self.forward, i)) for i in range(self.sets)]
        calls = []
        for i in range(self.sets):
            store = self._use(LastPass())
            self._in(on, partial(self.forward, i))
            calls.append(partial(self._in, on, partial(self.backward, i, store)))
        return calls

    def _use(self, store: TensorStore) -> TensorStore:
        """Let all layers save into this store, and take from it."""
        for layer in self.layers:
            layer.store = store
        return store

    def saved_bytes(self, on: Set[tuple[str, str]]) -> int:
        """Bytes of the distinct tensors that the layers keep for the backward pass."""
        store = self._use(LastPass())
        self._in(on, partial(self.forward, 0))
        return store.saved_bytes

    def _in(self, on: Set[tuple[str, str]], work: Callable[[], Any]) -> Any:
        """``work`` with exactly these modes."""
        set_modes(self.layers, on)
        return work()

    def forward(self, i: int) -> list[Any]:
        """Run the layers on the i-th operands; what is read outside."""
        values: list[Value] = []
        for member, layer in zip(self.cut.members, self.layers, strict=True):
            inputs = [values[k] if k >= 0 else Value(self._operands[i][-1 - k]) for k in member.inputs]
            if not layer.accepts_unfinished:
                inputs = [materialize(self.ops, value).array for value in inputs]
            y = layer.forward(*inputs)
            y = y if isinstance(y, Value) else Value(y)
            if y.given is not None:
                if member.inputs[0] >= 0:
                    values[member.inputs[0]] = y.given
                y = replace(y, given=None)
            values.append(y)
        return [
            materialize(self.ops, value).array
            for value, member in zip(values, self.cut.members, strict=True)
            if member.outside
        ]

    def backward(self, i: int, store: TensorStore) -> list[Any]:
        """Back through the forward pass on the i-th operands that saved into ``store``; what the convolutions at the
        lower end are given."""
        self._use(store)
        grads = list(self._gradients[i])
        for at in reversed(range(len(self.layers))):
            member, layer = self.cut.members[at], self.layers[at]
            if not member.back:
                continue
            dy, grads[at] = grads[at], None
            if not layer.accepts_masked:
                dy = finished(self.ops, dy)
            single = member.inputs[0] if len(member.inputs) == 1 and member.inputs[0] >= 0 else None
            dx = layer.backward(dy, add=addend(self.ops, layer, grads[single]) if single is not None else None)
            for k, part in zip(member.inputs, dx if isinstance(dx, tuple) else (dx,), strict=True):
                if k >= 0:
                    together = k == single or grads[k] is None
                    grads[k] = (
                        part if together else self.ops.add(finished(self.ops, grads[k]), finished(self.ops, part))
                    )
        return [finished(self.ops, gradient) for gradient in grads if gradient is not None]


def twin(layer: Layer) -> Layer:
    """`Layer.unbound`, which talks to nobody in its passes either."""
    other = layer.unbound()
    if isinstance(other, BatchNorm2d):
        other.sync = False
    return other
