"""Which channels of a network live and die together, read off its graph.

Every channel of every node carries a *label*. Layers that work channel by channel (norms, activations, pools, depthwise
convolutions) hand labels on; sums and products tie those of their inputs; convolutions and linear layers, which mix
channels, begin new ones. What carries one label can only be removed as a whole: a filter of a residual network takes
with it that channel of every block of its stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from minidl.graph import Graph, Node
from minidl.layer import Layer
from minidl.layers import (
    GELU,
    AdaptiveAvgPool2d,
    Add,
    AvgPool2d,
    BatchNorm2d,
    Concat,
    Conv2d,
    ConvTranspose2d,
    Dropout,
    Flatten,
    Hardswish,
    LeakyReLU,
    Linear,
    MaxPool2d,
    Mul,
    Pad,
    ReLU,
    ReLU6,
    Sigmoid,
    SiLU,
    Tanh,
    Upsample,
)

_ACTIVATIONS = (GELU, Hardswish, LeakyReLU, ReLU, ReLU6, SiLU, Tanh)  # of zero, zero
_POOLS = (AdaptiveAvgPool2d, AvgPool2d, MaxPool2d)
_KEEP_ZERO = (*_ACTIVATIONS, *_POOLS, Dropout, Upsample)
_CHANNELWISE = (*_KEEP_ZERO, BatchNorm2d, Pad, Sigmoid)


def depthwise(layer: Layer | None) -> bool:
    """Whether each output channel of a convolution reads one input channel only."""
    return type(layer) is Conv2d and layer.groups == layer.in_channels and layer.groups > 1


def mixes(layer: Layer | None) -> bool:
    """Whether the layer's weight joins every input channel with every output channel."""
    return type(layer) is Linear or (type(layer) in (Conv2d, ConvTranspose2d) and layer.groups == 1)


def _is_zero(layer: Layer, state: Mapping[str, np.ndarray], inputs: list[np.ndarray], channels: int) -> np.ndarray:
    """`zero_channels` of one layer, from those of its inputs."""
    get = lambda name: state.get(f"{layer.name}.{name}")  # noqa: E731
    if mixes(layer) or depthwise(layer):
        weight = by_channels(layer, get("weight"))  # (out, taps, in); of a depthwise one, in is 1
        read = ~inputs[0][None, :] if mixes(layer) else ~np.repeat(inputs[0], channels // inputs[0].size)[:, None]
        silent = ~(weight.any(axis=1) & read).any(axis=1)
        return silent & (get("bias") == 0) if get("bias") is not None else silent
    if isinstance(layer, BatchNorm2d):
        return (get("weight") == 0) & (get("bias") == 0) if layer.specs else np.zeros(channels, bool)
    if isinstance(layer, _KEEP_ZERO) or (isinstance(layer, Pad) and layer.value == 0):
        return inputs[0]
    if isinstance(layer, Add):
        return inputs[0] & inputs[1]
    if isinstance(layer, Mul):
        return inputs[0] | inputs[1]
    if isinstance(layer, Concat):
        return np.concatenate(inputs)
    if isinstance(layer, Flatten):
        return np.tile(inputs[0], channels // inputs[0].size)
    return np.zeros(channels, bool)


def by_channels(layer: Layer, weight: np.ndarray) -> np.ndarray:
    """A weight as (out, taps, in)."""
    if isinstance(layer, ConvTranspose2d):
        weight = weight.swapaxes(0, -1)
    return weight.reshape(weight.shape[0], -1, weight.shape[-1])


def zero_channels(graph: Graph, state: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Of every node, which channels are zero whatever finite values the others hold, (channels,) bool.

    Args:
        state: the parameters by name.
    """
    found: list[np.ndarray] = []
    for node in graph.nodes:
        channels = node.shape[-1]
        inputs = [found[i] for i in node.inputs]
        found.append(np.zeros(channels, bool) if node.layer is None else _is_zero(node.layer, state, inputs, channels))
    return found


@dataclass
class Channels:
    """The labels of a graph.

    Args:
        graph: of layers or already of a model.
        source: the node that stands for each node: another one where a sum is left out; default: itself.
        live: indices of the nodes that are there; default: all.

    Attributes:
        labels: for every live node, the label of each channel, in an array of integers.
        fixed: whether a label must stay, by label: those of the input and the output, and of what layers read or make
            that this analysis does not know (group norms, grouped convolutions, sparse layers).
    """

    graph: Graph
    source: list[int] | None = None
    live: list[int] | None = None
    labels: dict[int, np.ndarray] = field(init=False, default_factory=dict)
    fixed: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self._parent: list[int] = []
        fixed: list[np.ndarray] = []
        nodes = self.graph.nodes if self.live is None else [self.graph.nodes[i] for i in self.live]
        for node in nodes:
            inputs = [self.labels[i] for i in self.inputs(node)]
            self.labels[node.index] = self._labels(node, inputs)
            if not _known(node.layer):
                fixed += [*inputs, self.labels[node.index]]
        output = self.graph.output_node.index
        fixed.append(self.labels[self.source[output] if self.source else output])
        roots = np.array([self._root(i) for i in range(len(self._parent))], np.int64)
        self.labels = {index: roots[labels] for index, labels in self.labels.items()}
        self.fixed = np.zeros(len(roots), bool)
        self.fixed[roots[np.concatenate(fixed)]] = True

    def inputs(self, node: Node) -> list[int]:
        """The nodes that ``node`` reads."""
        return [self.source[i] for i in node.inputs] if self.source is not None else list(node.inputs)

    def _labels(self, node: Node, inputs: list[np.ndarray]) -> np.ndarray:
        layer, channels = node.layer, node.shape[-1]
        if isinstance(layer, _CHANNELWISE):
            return inputs[0]
        if depthwise(layer):
            return np.repeat(inputs[0], channels // inputs[0].size)
        if isinstance(layer, (Add, Mul)):
            for a, b in zip(*inputs, strict=True):
                self._tie(a, b)
            return inputs[0]
        if isinstance(layer, Concat):
            return np.concatenate(inputs)
        if isinstance(layer, Flatten):
            return np.tile(inputs[0], channels // inputs[0].size)
        first = len(self._parent)
        self._parent += range(first, first + channels)
        return np.arange(first, first + channels)

    def _root(self, label: int) -> int:
        while self._parent[label] != label:
            self._parent[label] = label = self._parent[self._parent[label]]
        return label

    def _tie(self, a: int, b: int) -> None:
        a, b = self._root(a), self._root(b)
        self._parent[max(a, b)] = min(a, b)


def _known(layer: Layer | None) -> bool:
    """Whether channels of the layer's input and output can go; the input node's cannot."""
    tying = (*_CHANNELWISE, Add, Mul, Concat, Flatten)
    return isinstance(layer, tying) or mixes(layer) or depthwise(layer)
