"""Layers that join several inputs: residual sums, products and channel concatenation."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from minidl import checks
from minidl.graph import Graph, Node
from minidl.layer import Layer
from minidl.layers.activation import ReLU
from minidl.layers.conv2d import Conv2d, ConvTranspose2d
from minidl.profile import Cost, PassCost
from minidl.value import (
    GatedGradient,
    MaskedGradient,
    Normalized,
    NormGradient,
    Origin,
    Value,
    activated,
    finished,
    materialize,
    summands,
)


class Add(Layer):
    """Sum of two inputs of one shape: the join of a residual block. Both gradients are ``dy`` itself.

    A sum of unfinished batch norms is left unfinished too, for a reader that does more in the same pass.
    """

    num_inputs = 2
    accepts_unfinished = True
    accepts_masked = True
    left = True  # whether there is such a reader (`leave_sums`)

    def output_shape(self, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
        if a != b:
            raise checks.bad_shape(self.name, "second input", f"{a} like the first", b)
        return a

    def cost(self, a: tuple[int, ...], b: tuple[int, ...], itemsize: int = 4) -> Cost:
        n = prod(a)
        return Cost(forward=PassCost(n, 3 * n * itemsize))

    def compute(self, *inputs: Any) -> Any:
        terms = [term for x in inputs for term in self._terms(x)]
        if any(isinstance(term, Normalized) for term in terms):
            owed = Value(origin=Origin(tuple(terms)))
            return owed if self.left else materialize(self.ops, owed).array
        return self.ops.add(*terms)

    def _terms(self, x: Any) -> tuple[Any, ...]:
        """What ``x`` adds to the sum: summands still owed, or one array."""
        if isinstance(x, Value) and x.array is None and x.origin.open:
            return x.origin.terms
        return (materialize(self.ops, x).array if isinstance(x, Value) else x,)

    def backward_data(self, dy: Any, add: Any = None) -> tuple[Any, Any]:
        if isinstance(dy, NormGradient):  # which only one layer may take over
            dy = finished(self.ops, dy)
        return dy, dy


class Mul(Layer):
    """Product of two inputs: of one shape, or images times a gate, one number for each sample and channel.

    In a network the gradient of gated images is left owed (`GatedGradient`): where the gate is made of their means, as
    in squeeze and excitation, the pooling adds that of the means in one pass. Images that are owed, an activation over
    a batch norm, are made on the way, and not kept.

    Shapes:
        (N, ..., C), (N, ..., C) → (N, ..., C), or (N, H, W, C), (N, 1, 1, C) → (N, H, W, C).
    """

    num_inputs = 2
    accepts_unfinished = True

    def output_shape(self, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
        if b != a and (len(a) != 4 or b != _gate(a)):
            expected = f"{a} like the first" + (f", or {_gate(a)}" if len(a) == 4 else "")
            swapped = len(b) == 4 and a == _gate(b)
            raise checks.bad_shape(self.name, "second input", expected, b, "the gate comes second" if swapped else None)
        return a

    def cost(self, a: tuple[int, ...], b: tuple[int, ...], itemsize: int = 4) -> Cost:
        n, m = prod(a), prod(b)
        # Both gradients are products with dy; that of a gate is summed over the pixels.
        both = PassCost((2 if a == b else 3) * n, (3 * n + 2 * m) * itemsize)
        return Cost(forward=PassCost(n, (2 * n + m) * itemsize), backward_data=both)

    def compute(self, a: Any, b: Any) -> Any:
        b = materialize(self.ops, b).array if isinstance(b, Value) else b
        both = activated(a) if a.shape != b.shape else None
        if both is not None:
            term, function = both
            affine = term.gamma, term.beta  # no activations: as a tuple they stay where they are
            self.save(raw=term.raw, moments=term.moments, affine=affine, function=function, b=b)
            return self.ops.batch_norm_gate(term.raw, term.moments, *affine, b, *function[:2])
        inside = isinstance(a, Value)
        a = materialize(self.ops, a).array if inside else a
        self.save(a=a, b=b, gated=inside and a.shape != b.shape)
        return self.ops.mul(a, b)

    def backward_data(self, dy: Any, add: Any = None) -> tuple[Any, Any]:
        kept = self.saved()
        if hasattr(kept, "raw"):
            facts, function = (kept.raw, kept.moments, *kept.affine), kept.function
            db, sums = self.ops.batch_norm_gate_gradient(dy, *facts, *function[:2])
            return GatedGradient(dy, kept.b, Normalized(*facts), function, sums), db
        da = GatedGradient(dy, kept.b) if kept.gated else self.ops.mul(dy, kept.b)
        return da, self.ops.mul(dy, kept.a) if kept.b.shape == dy.shape else self.ops.gate_gradient(dy, kept.a)


def _gate(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a gate of images."""
    return shape[0], 1, 1, shape[-1]


class Concat(Layer):
    """Concatenation of two or more inputs along channels. The gradients are channel slices of ``dy``, not copies.

    In a model, concatenations of concatenations, as in a dense block, write into one buffer (`share_buffers`): each
    copies only what is new, and all of them together take the memory of the last. So does the first of what they join
    where it is a ReLU that finishes a batch norm, as in a U-Net. What is new and written by a convolution for the
    concatenation alone is written there at once. (Pleiss et al., "Memory-efficient
    implementation of DenseNets", 2017, do so with buffers that are filled again in the backward pass.)

    Shapes:
        (N, H, W, C1), (N, H, W, C2), ... → (N, H, W, C1 + C2 + ...).
    """

    num_inputs = 0  # any number
    accepts_unfinished = True  # for the statistics and the buffer of a finished one
    accepts_masked = True  # for the sums that may come with one
    modes = ("training", "statistics")
    statistics = False  # a fusion plan's mode: in training, those of the parts are those of the whole
    room = 0  # channels that others will continue the output with, in its buffer
    continues = False  # the buffer of the first input
    placed: tuple[int, ...] = ()  # which of its inputs are written there

    def output_shape(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        if len(shapes) < 2:
            raise checks.bad_value(self.name, "number of inputs", "at least 2", len(shapes))
        for shape in shapes:
            if not shape or shape[:-1] != shapes[0][:-1]:
                raise checks.bad_shape(self.name, "every input", f"{(*shapes[0][:-1], 'C')} like the first", shape)
        return *shapes[0][:-1], sum(shape[-1] for shape in shapes)

    def cost(self, *shapes: tuple[int, ...], itemsize: int = 4) -> Cost:
        lies = {*self.placed, *([0] if self.continues else [])}
        copied = [shape for i, shape in enumerate(shapes) if i not in lies]
        return Cost(forward=PassCost(0, 2 * sum(map(prod, copied)) * itemsize))

    def compute(self, *inputs: Any) -> Any:
        values = [materialize(self.ops, x) if isinstance(x, Value) else Value(x) for x in inputs]
        self.save(channels=tuple(value.shape[-1] for value in values))
        y, buffer = self._joined(values)
        stats = self._stats(values) if self.statistics and self.training else None
        return Value(y, stats=stats, buffer=buffer) if stats is not None or buffer is not None else y

    def _joined(self, values: list[Value]) -> tuple[Any, Any]:
        """(the parts side by side, the buffer that they lie in, if there is room for more)"""
        parts = [value.array for value in values]
        buffer, begin = values[0].buffer if self.continues else None, 0
        if buffer is not None:
            begin = parts.pop(0).shape[-1]
        elif self.room:
            channels = sum(part.shape[-1] for part in parts) + self.room
            buffer = self.ops.empty((*parts[0].shape[:-1], channels), parts[0].dtype)
        else:
            return self.ops.concat(parts), None
        for part in parts:
            self.ops.copy_into(buffer[..., begin : begin + part.shape[-1]], part)
            begin += part.shape[-1]
        return buffer[..., :begin], buffer if self.room else None

    def _stats(self, values: list[Value]) -> Any:
        """Statistics of the whole: a channel's do not depend on what lies beside it."""
        stats = [self.ops.batch_norm_stats(v.array) if v.stats is None else v.stats for v in values]
        return self.ops.batch_norm_concat(stats)

    def backward_data(self, dy: Any, add: Any = None) -> tuple[Any, ...]:
        array, sums = finished(self.ops, dy), summands(self.ops, dy)
        parts, begin = [], 0
        for channels in self.saved().channels:
            own = slice(begin, begin + channels)
            part = array[..., own]
            parts.append(part if sums is array else MaskedGradient.masked(part, "", parts=sums[..., own]))
            begin += channels
        return tuple(parts)


def sum_for_biases(graph: Graph) -> None:
    """Let each convolution add up the gradient of its input where the bias of a convolution below is to have the sums.

    The graph is a model's, in which that bias is trained. It does so where it alone reads what that one writes, or a
    concatenation of it. Under a ReLU the convolution that masks for it does (`Conv2d.masks`).
    """
    readers = graph.consumers()

    def only_reader(node: Node) -> Node | None:
        return graph.nodes[readers[node.index][0]] if len(readers[node.index]) == 1 else None

    for node in graph.nodes:
        if type(node.layer) not in (Conv2d, ConvTranspose2d) or not node.layer.params.trainable("bias"):
            continue
        above = only_reader(node)
        if above is not None and isinstance(above.layer, Concat):
            above = only_reader(above)
        if above is not None and type(above.layer) is Conv2d:
            above.layer.sums = True


def leave_sums(graph: Graph) -> None:
    """Let each residual sum leave itself unfinished where a ReLU or another sum alone reads it.

    Several readers would finish it once each, and each would keep what it made; any one other makes it as it is.
    """
    readers = graph.consumers()
    for node in graph.nodes:
        if isinstance(node.layer, Add):
            above = [graph.nodes[i].layer for i in readers[node.index]]
            node.layer.left = len(above) == 1 and isinstance(above[0], ReLU | Add)


def leave_strided(graph: Graph) -> None:
    """Let each 1x1 convolution with a stride of two leave its gradient to one without that comes before it.

    So does the projection of a residual block, which sees every fourth pixel: the others' zeros are neither written
    nor read, where a kernel adds what there is. Of all readers of the image only these two may be there.
    """
    readers = graph.consumers()
    for node in graph.nodes:
        if type(node.layer) is not Conv2d:
            continue
        image = graph.nodes[node.inputs[0]]
        first, *others = (graph.nodes[i] for i in readers[image.index])
        meet = others == [node] and image.layer is not None and image is not graph.output_node
        whole = type(first.layer) is Conv2d and first.layer.stride == (1, 1)
        node.layer.left_to = first.layer if meet and whole and node.layer.every_second else None


class Place(NamedTuple):
    """Where a convolution's output lies: in the buffer of the node ``owner``, from channel ``first`` on."""

    owner: int
    first: int


def share_buffers(graph: Graph) -> dict[int, Place]:
    """Let each concatenation or ReLU whose output a concatenation continues leave room for that in its buffer.

    Returns:
        Convolutions that only such a concatenation reads, by index of the node: they may write there.
    """
    places = {}
    readers = graph.consumers()
    for node in reversed(graph.nodes):
        below = graph.nodes[node.inputs[0]] if isinstance(node.layer, Concat) else None
        if below is None or not (isinstance(below.layer, Concat) or type(below.layer) is ReLU):
            continue
        first = [i for i in readers[below.index] if graph.nodes[i].inputs[0] == below.index]
        if [i for i in first if isinstance(graph.nodes[i].layer, Concat)] == [node.index]:
            node.layer.continues = True
            below.layer.room = node.layer.room + node.shape[-1] - below.shape[-1]
            written, first = [], below.shape[-1]
            for place, part in enumerate(graph.nodes[i] for i in node.inputs[1:]):
                convolution = type(part.layer) in (Conv2d, ConvTranspose2d)
                if convolution and readers[part.index] == [node.index] and part.index > below.index:
                    places[part.index] = Place(below.index, first)
                    written.append(place + 1)
                first += part.shape[-1]
            node.layer.placed = tuple(written)
    return places
