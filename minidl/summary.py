"""What a network consists of: shapes, parameters, work and saved bytes of every layer, as one table."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
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


class _Noting(TensorStore):
    """Tells which layer saved how many new bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}
        self._seen: set[Hashable] = set()

    def save(self, owner: str, items: Mapping[str, Any]) -> None:
        new = {tensor_key(array): array.nbytes for array in arrays_of(items.values())}
        self.bytes[owner] = sum(count for key, count in new.items() if key not in self._seen)
        self._seen |= new.keys()
        super().save(owner, items)


def summarize(model: Any, batch: int = 1) -> Summary:
    """The summary of a `minidl.Model`; see `Model.summary`."""
    checks.at_least("summary", "batch", batch, 1)
    nodes = model.graph.nodes
    shapes = model.graph.shapes((batch, *nodes[0].shape))
    saved = _saved_bytes(model, (batch, *nodes[0].shape))
    itemsize, found = model.precision.storage.itemsize, []
    for node in nodes:
        layer = node.layer
        if layer is None:
            continue
        cost = layer.cost(*(shapes[i] for i in node.inputs), itemsize=itemsize)
        sizes = {spec.name: prod(spec.shape) for spec in layer.specs}
        trained = sum(size for name, size in sizes.items() if layer.params.trainable(name))
        found.append(
            LayerSummary(
                node.name, type(layer).__name__, shapes[node.index], sum(sizes.values()), trained, cost.forward.flop,
                saved.get(node.name, 0),
            )
        )  # fmt: skip
    return Summary(batch, tuple(found))


def _saved_bytes(model: Any, shape: tuple[int, ...]) -> dict[str, int]:
    """New bytes that each layer saves in a forward pass, which leaves the model as it was."""
    noting, training = _Noting(), model.training
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
    return noting.bytes
