"""Graph: a flat list of nodes in execution order, built by calling layers on nodes::

    graph = Graph()
    x = graph.input((32, 32, 3))
    with scope("stem"):
        x = ReLU()(BatchNorm2d(16, name="bn")(Conv2d(3, 16, 3, padding=1, name="conv")(x)))
    graph.output(x)

Planners, the profiler, checkpoints and the order of messages all read this one list.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain, count
from weakref import WeakSet

from minidl import checks
from minidl.layer import Layer
from minidl.profile import Cost

_scopes: ContextVar[tuple[str, ...]] = ContextVar("minidl_scopes", default=())
_placed: WeakSet[Layer] = WeakSet()  # layers that stand in some graph, and have their full names from it


@contextlib.contextmanager
def scope(name: str) -> Iterator[None]:
    """Prefix the names of all layers added inside: ``with scope("layer1.0"):`` makes ``layer1.0.conv1``."""
    token = _scopes.set((*_scopes.get(), name))
    try:
        yield
    finally:
        _scopes.reset(token)


@dataclass(frozen=True)
class Node:
    """One step of a graph. ``shape`` is that of one sample; the input node has no layer.

    Attributes:
        index: position in execution order.
        layer: what runs here.
        inputs: indices of the nodes whose outputs it takes, in order.
    """

    graph: Graph = field(repr=False)
    index: int
    layer: Layer | None
    inputs: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.layer.name if self.layer is not None else "input"

    def __add__(self, other: object) -> Node:
        raise TypeError("nodes are joined by layers: Add(name=...)(a, b), Mul(name=...)(a, b), Concat(name=...)(a, b)")

    __radd__ = __mul__ = __rmul__ = __add__
    __array_ufunc__ = None  # NumPy's functions refuse nodes, and leave operators to them


class Graph:
    """A network: one input, one output, nodes in execution order."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._names: dict[str, Node] = {}
        self._output: int | None = None

    def input(self, shape: Sequence[int]) -> Node:
        """The graph's input: shape of one sample, (H, W, C) or (C,)."""
        if self.nodes:
            raise checks.order("graph", "it has an input already", "a graph has one input")
        if not isinstance(shape, Sequence) or len(shape) not in (1, 3):
            raise checks.bad_value("graph", "input shape", "(H, W, C) or (C,), without the batch", shape)
        sizes = tuple(checks.at_least("graph", "input shape", size, 1) for size in shape)
        self.nodes.append(Node(self, 0, None, (), sizes))
        return self.nodes[0]

    def output(self, node: Node) -> Graph:
        """Declare the graph's output and check that every node leads to it."""
        if not isinstance(node, Node) or node.graph is not self:
            raise checks.bad_value("graph", "output", "a node of this graph", getattr(node, "name", node))
        needed = {node.index}
        for other in reversed(self.nodes):
            if other.index in needed:
                needed.update(other.inputs)
        unused = [n.name for n in self.nodes if n.index not in needed]
        if unused:
            expected = "a node that every layer leads to"
            raise checks.bad_value("graph", "output", expected, f"{node.name}, without {unused}")
        self._output = node.index
        return self

    @property
    def finished(self) -> bool:
        """Whether `output` was called after the last layer."""
        return self._output is not None

    @property
    def output_node(self) -> Node:
        """The node declared by `output`."""
        if not self.finished:
            raise checks.order("graph", "its output is not known yet", "call graph.output(node) when it is built")
        return self.nodes[self._output]

    def add(self, layer: Layer, inputs: Sequence[Node]) -> Node:
        """Append ``layer`` on ``inputs``; `Layer.__call__` does this. Gives the layer its full name.

        Layers without weights that nobody named are numbered: ``relu``, ``relu2``. Names of weights are for the author.

        The output must be declared after the last layer, or again.

        Raises:
            ValueError: a name that is taken, inputs of several graphs, a shape that the layer cannot take.
            RuntimeError: the layer stands in this or another graph already, or the graph belongs to a model.
        """
        if layer in _placed:
            which = "this" if any(node.layer is layer for node in self.nodes) else "another"
            remedy = "a layer stands in one graph, in one place: make another layer for each"
            raise checks.order(layer.name, f"it stands in {which} graph already", remedy)
        if any(node.graph is not self for node in inputs):
            raise checks.bad_value(layer.name, "inputs", "nodes of one graph", "nodes of several")
        if len(inputs) != layer.num_inputs and layer.num_inputs > 0:
            raise checks.bad_value(layer.name, "number of inputs", str(layer.num_inputs), len(inputs))
        if any(other is not None and other.bound for other in (layer, self.nodes[-1].layer)):
            raise checks.order(layer.name, "added to a graph that belongs to a model", "build the graph first, whole")
        own = layer.name
        name = ".".join((*_scopes.get(), own))
        if own == type(layer).__name__.lower() and not (layer.specs or layer.buffer_specs):
            numbered = chain([name], (f"{name}{i}" for i in count(2)))  # no weights go by such a name
            name = next(free for free in numbered if free not in self._names)
        if name in self._names or name == "input":
            raise checks.bad_value(
                type(layer).__name__, "name", f"new in the graph (add name=... or a scope around {name!r})", name
            )
        layer.name = name
        try:
            shape = layer.output_shape(*((1, *node.shape) for node in inputs))
        except BaseException:
            layer.name = own
            raise
        self._output = None
        node = Node(self, len(self.nodes), layer, tuple(node.index for node in inputs), shape[1:])
        self.nodes.append(node)
        self._names[name] = node
        _placed.add(layer)
        return node

    def replace(self, name: str, layer: Layer) -> Node:
        """Put ``layer`` in the place of the one called ``name``, whose name it takes; before a model is built.

        Raises:
            ValueError: no such layer, or one with another output shape.
            RuntimeError: ``layer`` stands in a graph already, or this graph belongs to a model.
        """
        old = self[name]
        if layer in _placed:
            raise checks.order(layer.name, "it stands in a graph already", "make another layer")
        if old.layer.bound:
            raise checks.order(name, "replaced in a graph that belongs to a model", "build the graph again")
        own, layer.name = layer.name, name
        try:
            shape = layer.output_shape(*((1, *self.nodes[i].shape) for i in old.inputs))
            if shape[1:] != old.shape:
                raise checks.bad_shape(name, "output of its replacement", str(old.shape), shape[1:])
        except BaseException:
            layer.name = own
            raise
        node = Node(self, old.index, layer, old.inputs, old.shape)
        self.nodes[old.index] = self._names[name] = node
        _placed.add(layer)
        return node

    @property
    def layers(self) -> list[Layer]:
        """All layers in execution order."""
        return [node.layer for node in self.nodes if node.layer is not None]

    def __getitem__(self, name: str) -> Node:
        if name not in self._names:
            raise checks.unknown("layer", name, self._names)
        return self._names[name]

    def consumers(self) -> list[list[int]]:
        """For every node the indices of the nodes that read it, in execution order."""
        readers: list[list[int]] = [[] for _ in self.nodes]
        for node in self.nodes:
            for i in node.inputs:
                readers[i].append(node.index)
        return readers

    def unbound(self) -> Graph:
        """The same network of layers that belong to no model (`Layer.unbound`)."""
        other = Graph()
        for node in self.nodes:
            layer = None if node.layer is None else node.layer.unbound()
            other.nodes.append(Node(other, node.index, layer, node.inputs, node.shape))
            other._names[node.name] = other.nodes[-1]
        return other.output(other.nodes[self.output_node.index])

    def costs(self, batch: int, itemsize: int = 4) -> Iterator[tuple[Node, Cost]]:
        """Each layer's node with the least work of its passes over so many samples (`Layer.cost`), in order."""
        for node in self.nodes:
            if node.layer is not None:
                inputs = ((batch, *self.nodes[i].shape) for i in node.inputs)
                yield node, node.layer.cost(*inputs, itemsize=itemsize)

    def shapes(self, input_shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The output shape of every node for this input shape, batch first.

        Raises:
            ValueError: naming the first layer that cannot take what reaches it.
        """
        found: list[tuple[int, ...]] = []
        for node in self.nodes:
            if node.layer is None:
                if len(input_shape) != len(node.shape) + 1 or input_shape[-1] != node.shape[-1]:
                    wanted = ("N, H, W, " if len(node.shape) == 3 else "N, ") + str(node.shape[-1])
                    remedy = checks.images_first(input_shape, node.shape[-1])
                    if len(input_shape) == len(node.shape):
                        remedy = "one sample is x[None]"
                    raise checks.bad_shape("model", "x", f"({wanted})", input_shape, remedy)
                found.append(tuple(input_shape))
            else:
                found.append(node.layer.output_shape(*(found[i] for i in node.inputs)))
        return found
