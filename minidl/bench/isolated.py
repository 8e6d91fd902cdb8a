"""The passes of one layer, each alone: operands that stand in for the network's, and the calls to be timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from types import ModuleType
from typing import Any

from minidl.graph import Graph
from minidl.layer import Layer
from minidl.profile.cost import PASSES, PassCost, gradient_sum
from minidl.profile.inputs import noise
from minidl.profile.timing import Timer, input_sets
from minidl.store import LastPass, Saved

_MOST_SETS = 64
Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A layer where it stands: what it is given, and which gradients are asked of it.

    Attributes:
        index: position in the network.
        shapes: of its inputs, batch first.
        adds: for each input whether it has further readers, to whose gradients this layer's is added.
        needs_input_grad: something below it is trained.
    """

    index: int
    layer: Layer
    shapes: tuple[tuple[int, ...], ...]
    adds: tuple[bool, ...] = ()
    needs_input_grad: bool = True

    @property
    def key(self) -> tuple:
        """Equal for layers that do the same work."""
        layer = self.layer
        return type(layer).__name__, layer.describe(), self.shapes, self.adds, self.needs_input_grad

    @property
    def asked(self) -> tuple[str, ...]:
        """The passes that training asks of it."""
        return PASSES if self.needs_input_grad else tuple(name for name in PASSES if name != "backward_data")

    @property
    def facts(self) -> dict[str, Any]:
        """What rows of a result file tell of the layer."""
        return {
            "index": self.index,
            "type": type(self.layer).__name__,
            "input_shapes": [list(shape) for shape in self.shapes],
            "output_shape": list(self.layer.output_shape(*self.shapes)),
            "parameters": sum(prod(spec.shape) for spec in self.layer.specs),
        }

    def cost(self, pass_name: str, itemsize: int) -> PassCost:
        """Least work of a pass here, the addition of the gradient so far included."""
        cost: PassCost = getattr(self.layer.cost(*self.shapes, itemsize=itemsize), pass_name)
        if pass_name == "backward_data":
            own = cost if len(self.shapes) == 1 else PassCost()  # a join's gradients are added one by one
            for shape, adds in zip(self.shapes, self.adds, strict=False):
                if adds:
                    cost += gradient_sum(own, prod(shape), itemsize) - own
        return cost


def cases(graph: Graph, batch: int) -> list[Case]:
    """Every layer of a network on images of the graph's own size.

    Raises:
        ValueError: for a batch that a layer cannot take.
    """
    shapes = graph.shapes((batch, *graph.nodes[0].shape))
    readers = graph.consumers()
    trained: list[bool] = []
    found = []
    for node in graph.nodes:
        below = any(trained[i] for i in node.inputs)
        trained.append(below or (node.layer is not None and bool(node.layer.specs)))
        if node.layer is not None:
            adds = tuple(trained[i] and max(readers[i]) > node.index for i in node.inputs)
            inputs = tuple(shapes[i] for i in node.inputs)
            found.append(Case(node.index, node.layer, inputs, adds, below))
    return found


class Passes:
    """The operands of a case on a device, in as many sets as exceed the cache, and calls over them.

    The layer must not belong to a model; it is moved to the device.
    """

    def __init__(self, case: Case, ops: ModuleType, precision: Any, timer: Timer, memory: int):
        self.case, self.ops, self.layer = case, ops, case.layer
        self.layer.to(ops.name, precision)
        self.layer.store = LastPass()
        storage = self.layer.precision.storage
        out = self.layer.output_shape(*case.shapes)
        sizes = [prod(shape) for shape in (*case.shapes, out, out)]
        one_set = sum(sizes) * storage.itemsize
        fitting = max(1, memory // (3 * max(one_set, 1)))  # outputs and what is saved come on top
        sets = min(input_sets(one_set, timer.cache_bytes), _MOST_SETS, fitting) if ops.name == "cuda" else 1
        self.x = [tuple(noise(ops, s, storage, seed=i + k) for k, s in enumerate(case.shapes)) for i in range(sets)]
        self.frames, self.dy = [], []
        for i, x in enumerate(self.x):
            y = self._forward(x)
            self.frames.append(self.layer.store.take(self.layer.name))
            self.dy.append(noise(ops, y.shape, y.dtype, seed=100 + i))
        padded = (*case.adds, *[False] * len(case.shapes))
        self.adds = [noise(ops, s, storage, seed=200) if a else None for s, a in zip(case.shapes, padded, strict=False)]

    def _forward(self, x: tuple[Any, ...]) -> Any:
        return self.layer.compute(*x)

    def _backward_weight(self, frame: Saved, dy: Any) -> None:
        self.layer.recall(frame)
        if self.layer.specs:
            self.layer.params.restart()
        self.layer.backward_weight(dy)

    def _backward_data(self, frame: Saved, dy: Any) -> Any:
        self.layer.recall(frame)
        if len(self.adds) == 1 and self.adds[0] is not None and self.layer.accepts_add:
            return self.layer.backward_data(dy, add=self.adds[0])
        dx = self.layer.backward_data(dy)
        parts = dx if isinstance(dx, tuple) else (dx,)
        return [p if a is None else self.ops.add(p, a) for p, a in zip(parts, self.adds, strict=True)]

    def calls(self) -> dict[str, list[Call]]:
        """Calls of each pass that does work, one for each set of operands."""
        itemsize = self.layer.precision.storage.itemsize
        found: dict[str, list[Call]] = {}
        nothing = PassCost()
        if self.case.cost("forward", itemsize) != nothing:
            found["forward"] = [partial(self._forward, x) for x in self.x]
        pairs = list(zip(self.frames, self.dy, strict=True))
        if self.layer.has_backward_weight:
            found["backward_weight"] = [partial(self._backward_weight, *pair) for pair in pairs]
            for call in found["backward_weight"]:
                call()  # a batch norm's data gradient takes the sums that this leaves behind
        if self.case.needs_input_grad and self.case.cost("backward_data", itemsize) != nothing:
            found["backward_data"] = [partial(self._backward_data, *pair) for pair in pairs]
        return found
