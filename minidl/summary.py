"""What a network consists of: shapes, parameters, work and saved bytes of every layer, as one table."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from minidl import checks
from minidl.profile.tables import plain
from minidl.store import TensorStore, arrays_of, tensor_key


@dataclass(frozen=True)
class LayerSummary:
    """One layer: ``flop`` of a forward pass; ``saved_bytes`` of tensors that no layer before it saves for backward."""

    name: str
    type: str
    output_shape: tuple[int, ...]
    parameters: int
    trained: int
    flop: int
    saved_bytes: int


@dataclass(frozen=True)
class Summary:
    """All layers in execution order; as text, a table with the sums below."""

    batch: int
    layers: tuple[LayerSummary, ...]

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @property
    def trained(self) -> int:
        return sum(layer.trained for layer in self.layers)

    @property
    def flop(self) -> int:
        return sum(layer.flop for layer in self.layers)

    @property
    def saved_bytes(self) -> int:
        return sum(layer.saved_bytes for layer in self.layers)

    def __str__(self) -> str:
        columns = ["layer", "type", "output", "parameters", "MFLOP", "saved kB"]
        rows = [
            [la.name, la.type, " x ".join(map(str, la.output_shape)), f"{la.parameters:,}", f"{la.flop / 1e6:,.2f}",
             f"{la.saved_bytes / 1e3:,.1f}"]
            for la in self.layers
        ]  # fmt: skip
        frozen = self.parameters - self.trained
        total = f"{self.parameters:,} parameters" + (f", {frozen:,} of them frozen" if frozen else "")
        work = f"{self.flop / 1e9:.3f} GFLOP forward, {self.saved_bytes / 1e6:.2f} MB saved for the backward pass"
        return f"{plain(f'batch {self.batch}', columns, rows)}\n{total}; {work}"

    __repr__ = __str__


class SavedBytes(TensorStore):
    """A store that notes how many bytes each layer was the first to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.by_layer: dict[str, int] = {}
        self._begins: list[int] = []  # of the memory that is kept, in pieces that lie apart
        self._ends: list[int] = []

    def save(self, owner: str, items: Mapping[str, Any]) -> None:
        self.by_layer[owner] = sum(map(self._new, arrays_of(items.values())))
        super().save(owner, items)

    def clear(self) -> None:
        super().clear()
        self._begins.clear()
        self._ends.clear()

    def _new(self, array: Any) -> int:
        """Bytes of an array, from its first to its last, that nobody has kept before."""
        begin, shape, strides, _ = tensor_key(array)
        end = begin + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + array.itemsize
        first, last = bisect_left(self._ends, begin), bisect_right(self._begins, end)
        pieces = list(zip(self._begins[first:last], self._ends[first:last], strict=True))
        known = sum(min(e, end) - max(b, begin) for b, e in pieces)
        self._begins[first:last] = [min([begin, *self._begins[first:last]])]
        self._ends[first:last] = [max([end, *self._ends[first:last]])]
        return end - begin - known


def summarize(model: Any, batch: int = 1) -> Summary:
    """The summary of a `minidl.Model`; see `Model.summary`."""
    checks.at_least("summary", "batch", batch, 1)
    saved, found = _saved_bytes(model, (batch, *model.graph.nodes[0].shape)), []
    for node, cost in model.graph.costs(batch, model.precision.storage.itemsize):
        layer = node.layer
        sizes = {spec.name: prod(spec.shape) for spec in layer.specs}
        trained = sum(size for name, size in sizes.items() if layer.params.trainable(name))
        found.append(
            LayerSummary(
                node.name, type(layer).__name__, (batch, *node.shape), sum(sizes.values()), trained, cost.forward.flop,
                saved.get(node.name, 0),
            )
        )  # fmt: skip
    return Summary(batch, tuple(found))


def _saved_bytes(model: Any, shape: tuple[int, ...]) -> dict[str, int]:
    """New bytes that each layer saves in a forward pass, which leaves the model as it was."""
    noting, training = SavedBytes(), model.training
    before = model.store, [(layer, layer.store, layer._kept, layer._checked) for layer in model.layers]
    x = model.ops.zeros(shape, model.precision.storage)
    try:
        model.eval()  # no statistics move
        model.store = noting
        for layer in model.layers:
            layer.store = noting
        model.forward(x, grad=True)
    finally:
        model.store = before[0]
        for layer, store, kept, checked in before[1]:
            layer.store, layer._kept, layer._checked = store, kept, checked
        model.train(training)
    return noting.by_layer
