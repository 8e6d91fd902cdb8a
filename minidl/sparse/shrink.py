"""From masks to a smaller dense network: channels that do nothing are cut out, and residual branches that are zero.

    graph, cut = shrink(build(), model.state_dict())          # fewer channels, perhaps fewer layers, the same outputs
    small = Model(graph)
    small.load_state_dict(cut.state(model.state_dict()))
    tuned = SGD(small, 0.01, 0.9)
    tuned.load_state_dict(without_masks(cut.state(optimizer.state_dict())))

What may go follows from the values of the parameters and the graph, whatever pruned them: a channel that is zero, or
multiplied by zeros only, at every layer that reads it across channels. With all its zeros gone a sum has the same terms
in the same order, but kernels cut it at other places: the outputs are those of the network before to float32 rounding,
and to the bit where every partial sum is exact. In training as in evaluation, if the batch norms of removed channels
have weight and bias zero, as pruning of filters leaves them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from minidl import checks
from minidl.graph import Graph, Node
from minidl.layer import Layer
from minidl.layers import Add, BatchNorm2d, Conv2d, ConvTranspose2d, Linear
from minidl.sparse.channels import Channels, by_channels, depthwise, mixes, zero_channels


@dataclass(frozen=True)
class ShrinkRecord:
    """What of every parameter and buffer is left, by name.

    Attributes:
        kept: for each parameter and buffer, the indices that stay on each axis (None: all).
        dropped: names of the layers that are gone.
        shapes: of all parameters and buffers of the network before.
    """

    kept: Mapping[str, tuple[np.ndarray | None, ...]]
    dropped: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]

    def state(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A state of the network before as one of the network after: of a model, of its optimizer (momentum, moments,
        masks), or all tensors of a checkpoint, whose names have parts in front. What belongs to no parameter stays.

        Raises:
            ValueError: an array of another shape than its parameter had.
        """
        found = {}
        for name, value in state.items():
            parameter = self._parameter(name)
            if parameter is None:
                found[name] = value
            elif value.shape != self.shapes[parameter]:
                raise checks.bad_shape("ShrinkRecord", name, str(self.shapes[parameter]), value.shape)
            elif parameter in self.kept:
                found[name] = _part(value, self.kept[parameter])
        return found

    def _parameter(self, name: str) -> str | None:
        """``optimizer.momentum.conv1.weight`` -> ``conv1.weight``."""
        while name not in self.shapes:
            _, dot, name = name.partition(".")
            if not dot:
                return None
        return name


def _part(value: np.ndarray, kept: tuple[np.ndarray | None, ...]) -> np.ndarray:
    for axis, indices in enumerate(kept):
        if indices is not None:
            value = value.take(indices, axis)
    return np.ascontiguousarray(value)


def shrink(graph: Graph, state: Mapping[str, np.ndarray]) -> tuple[Graph, ShrinkRecord]:
    """The network without what does nothing in it.

    Args:
        graph: built like the one that was pruned, without a model yet; stays as it is.
        state: the pruned model's `state_dict`. Parameters must be finite.

    Returns:
        A new graph with the same names, and what takes states along. Every layer keeps at least one channel. Channels
        at grouped convolutions, group and layer norms, sparse layers and layers of your own stay.

    Raises:
        ValueError: a state of another network.
        RuntimeError: the graph belongs to a model.
    """
    _check(graph, state)
    zero = zero_channels(graph, state)
    source, live = _bypass(graph, {index: bool(silent.all()) for index, silent in enumerate(zero)})
    channels = Channels(graph, source, live)
    keep = _kept_labels(channels, zero, state)
    stays = {index: keep[labels] for index, labels in channels.labels.items()}
    smaller = _rebuild(graph, source, live, lambda node, into: int(stays[node.index].sum()))
    return smaller, _cut(graph, channels, stays)


def resized(graph: Graph, state: Mapping[str, np.ndarray]) -> Graph:
    """The network that a shrunk state belongs to: channels as its arrays have them, without the layers it lacks.

        model = Model(resized(build(), state))
        model.load_state_dict(state)

    Args:
        graph: built like the one that was shrunk, without a model yet; stays as it is.
        state: parameters and buffers, such as a file of `minidl.checkpoint` or `load_compressed` gives them.

    Raises:
        ValueError: a state that is not of a network cut out of this one.
        RuntimeError: the graph belongs to a model.
    """
    _refuse_bound("resized", graph)
    gone: set[int] = set()
    for node in graph.nodes[1:]:
        lacks = any(f"{node.name}.{spec.name}" not in state for spec in node.layer.specs)
        left = [i for i in node.inputs if i not in gone]
        if lacks or not left or (len(left) < len(node.inputs) and not isinstance(node.layer, Add)):
            gone.add(node.index)
    if graph.output_node.index in gone:
        lacking = next(f"{layer.name}.{s.name}" for layer in graph.layers for s in layer.specs
                       if f"{layer.name}.{s.name}" not in state)  # fmt: skip
        raise checks.bad_value("resized", "state", "of a network cut out of this one", f"one that lacks {lacking}")
    source, live = _bypass(graph, {index: index in gone for index in range(len(graph.nodes))})

    def out(node: Node, into: int) -> int:
        if not (mixes(node.layer) or depthwise(node.layer)):
            return into
        return state[f"{node.name}.weight"].shape[-1 if type(node.layer) is ConvTranspose2d else 0]

    return _rebuild(graph, source, live, out)


def _refuse_bound(who: str, graph: Graph) -> None:
    if any(layer.bound for layer in graph.layers):
        raise checks.order(who, "the graph belongs to a model", "build the graph again")


def _check(graph: Graph, state: Mapping[str, np.ndarray]) -> None:
    _refuse_bound("shrink", graph)
    for layer in graph.layers:
        for spec in layer.specs:
            name = f"{layer.name}.{spec.name}"
            if name not in state:
                raise checks.bad_value("shrink", "state", f"one that holds {name}", "one without it")
            if state[name].shape != spec.shape:
                raise checks.bad_shape("shrink", name, str(spec.shape), state[name].shape)


def _bypass(graph: Graph, empty: Mapping[int, bool]) -> tuple[list[int], list[int]]:
    """(what stands for each node, nodes that are left) when sums drop the inputs that are ``empty``."""
    source = list(range(len(graph.nodes)))
    for node in graph.nodes:
        if isinstance(node.layer, Add):
            left = [i for i in node.inputs if not empty[i]]
            if len(left) == 1:
                source[node.index] = source[left[0]]
    needed = {source[graph.output_node.index]}
    for node in reversed(graph.nodes):
        if node.index in needed:
            needed.update(source[i] for i in node.inputs)
    return source, sorted(needed | {0})


def _kept_labels(channels: Channels, zero: list[np.ndarray], state: Mapping[str, np.ndarray]) -> np.ndarray:
    """Whether each label stays: it is fixed, or somebody reads more than zeros of it, or the layer would be empty."""
    nodes = [channels.graph.nodes[i] for i in channels.labels]
    keep = np.ones(len(channels.fixed), bool)
    while True:
        needed = channels.fixed.copy()
        for node in nodes:
            if mixes(node.layer):
                (read,) = channels.inputs(node)
                rows = keep[channels.labels[node.index]]
                weight = by_channels(node.layer, state[f"{node.name}.weight"])[rows]
                used = weight.any(axis=(0, 1)) & ~zero[read]
                needed[channels.labels[read][used]] = True
        for node in nodes:
            labels = channels.labels[node.index]
            if not needed[labels].any():
                needed[labels[keep[labels]][0]] = True
        if (needed == keep).all():
            return keep
        keep = needed


def _rebuild(graph: Graph, source: Sequence[int], live: Sequence[int], out: Callable[[Node, int], int]) -> Graph:
    """A new graph of the live nodes; ``out`` tells a node's channels from those of its first input."""
    found = Graph()
    placed = {0: found.input(graph.nodes[0].shape)}
    for node in (graph.nodes[i] for i in live if i):
        inputs = [placed[source[i]] for i in node.inputs]
        into = inputs[0].shape[-1]
        placed[node.index] = found.add(_smaller(node.layer, into, out(node, into)), inputs)
    return found.output(placed[source[graph.output_node.index]])


def _smaller(layer: Layer, into: int, out: int) -> Layer:
    """The layer with so many channels."""
    options: dict[str, Any] = {"weight_init": layer.specs[0].init if layer.specs else None, "name": layer.name}
    biased = any(spec.name == "bias" for spec in layer.specs)
    if type(layer) is Linear:
        return Linear(into, out, biased, **options)
    if type(layer) in (Conv2d, ConvTranspose2d) and (mixes(layer) or depthwise(layer)):
        geometry = layer.geometry | {"groups": into if depthwise(layer) else 1, "bias": biased}
        if type(layer) is ConvTranspose2d:
            geometry["output_padding"] = layer.output_padding
        return type(layer)(into, out, layer.kernel_size, **geometry, **options)
    new = layer.unbound()
    if isinstance(layer, BatchNorm2d):
        new.num_features = out
        new.specs = [replace(spec, shape=(out,)) for spec in layer.specs]
        new.buffer_specs = {name: values[:out] for name, values in layer.buffer_specs.items()}
    return new


def _cut(graph: Graph, channels: Channels, stays: Mapping[int, np.ndarray]) -> ShrinkRecord:
    kept: dict[str, tuple[np.ndarray | None, ...]] = {}
    shapes, dropped = {}, []
    for node in graph.nodes[1:]:
        parameters = {spec.name: spec.shape for spec in node.layer.specs}
        parameters |= {name: values.shape for name, values in node.layer.buffer_specs.items()}
        shapes |= {f"{node.name}.{name}": shape for name, shape in parameters.items()}
        if node.index not in channels.labels:
            dropped.append(node.name)
            continue
        for name, shape in parameters.items():
            kept[f"{node.name}.{name}"] = _indices(channels, node, name, shape, stays)
    return ShrinkRecord(kept, tuple(dropped), shapes)


def _indices(
    channels: Channels, node: Node, name: str, shape: tuple[int, ...], stays: Mapping[int, np.ndarray]
) -> tuple[np.ndarray | None, ...]:
    """What stays of a parameter or buffer on each axis."""
    layer, own = node.layer, stays[node.index]
    axes: list[np.ndarray | None] = [None] * len(shape)
    if name == "weight" and mixes(layer):
        first, last = (own, stays[channels.inputs(node)[0]])[:: -1 if type(layer) is ConvTranspose2d else 1]
        axes[0], axes[-1] = first, last
    elif depthwise(layer) or mixes(layer) or isinstance(layer, BatchNorm2d):
        axes[0] = own
    return tuple(None if stay is None or stay.all() else np.flatnonzero(stay) for stay in axes)
