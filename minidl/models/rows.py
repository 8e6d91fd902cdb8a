"""A network whose images are shared out by rows among the ranks of a group."""

from __future__ import annotations

from minidl import checks
from minidl.dist.communicator import Communicator
from minidl.graph import Graph
from minidl.layer import Layer
from minidl.layers import (
    Add,
    AvgPool2d,
    BatchNorm2d,
    Concat,
    Conv2d,
    ConvTranspose2d,
    MaxPool2d,
    Pad,
    ReLU,
    RowParallelConv2d,
)
from minidl.layers.row_plan import share

_SAME_ROWS = (Add, Concat, ReLU)


def by_rows(graph: Graph, group: Communicator) -> Graph:
    """The network of ``graph`` for this rank's rows of the images, with the same names and starting weights.

    Convolutions become `RowParallelConv2d`; batch norms that look at one rank's batch look at that of the group, so
    the network computes what it does on one rank. Give its `Model` a communicator that covers the group.

    Args:
        graph: not yet part of a model; it stays as it is.
        group: rank i of n gets rows ``H * i // n`` to ``H * (i + 1) // n`` of an image, and so of every layer.

    Raises:
        ValueError: for a layer that mixes rows far apart (Linear, global pooling), for one whose windows would lie on
            two ranks (pools, transposed convolutions), and for too few rows; the same on every rank.
    """
    if graph.nodes[0].shape[1:] == ():
        raise checks.bad_value("by_rows", "graph", "one of images", f"input of shape {graph.nodes[0].shape}")
    found = Graph()
    height, *rest = graph.nodes[0].shape
    nodes = [found.input((_own_rows("input", height, group), *rest))]
    for node in graph.nodes[1:]:
        heights = [graph.nodes[i].shape[0] for i in node.inputs]
        layer = _for_rows(node.layer, heights[0], node.shape, group)
        nodes.append(found.add(layer, [nodes[i] for i in node.inputs]))
    return found.output(nodes[graph.output_node.index])


def _own_rows(name: str, height: int, group: Communicator) -> int:
    if height < group.size:
        expected = f"images of at least a row for each of {group.size} ranks"
        raise checks.bad_value(name, "height", expected, height, "split over fewer ranks")
    return share(height, group.size, group.rank).count


def _for_rows(layer: Layer, height: int, out: tuple[int, ...], group: Communicator) -> Layer:
    """The layer that does on this rank's rows what ``layer`` does on images of ``height`` rows."""
    if type(layer) is Conv2d:
        return _convolution(layer, height, group)
    if isinstance(layer, BatchNorm2d):
        new = layer.unbound()
        new.sync = layer.sync or group
        return new
    if isinstance(layer, (MaxPool2d, AvgPool2d, ConvTranspose2d)) and _on_one_rank(layer, height, out[0], group.size):
        return layer.unbound()
    if type(layer) in _SAME_ROWS or (isinstance(layer, Pad) and out[0] == height and layer.padding[2:] == (0, 0)):
        return layer.unbound()
    remedy = "the image's height must divide by the ranks and by all strides, and no layer may mix rows far apart"
    raise checks.bad_value(layer.name, "rows", f"such that {group.size} ranks can share them", repr(layer), remedy)


def _convolution(layer: Conv2d, height: int, group: Communicator) -> Layer:
    axis = layer.kernel_size[0], layer.stride[0], layer.padding[0]
    if axis == (1, 1, 0):
        return layer.unbound()  # each row by itself
    new = RowParallelConv2d(
        layer.in_channels, layer.out_channels, layer.kernel_size, **layer.geometry, height=height, group=group,
        name=layer.name,
    )  # fmt: skip
    new.specs = list(layer.specs)
    return new


def _on_one_rank(layer: Layer, height: int, out: int, ranks: int) -> bool:
    """Whether every window lies within the rows of one rank, who holds its result too."""
    kernel, stride = layer.kernel_size[0], layer.stride[0]
    few, many = (height, out) if isinstance(layer, ConvTranspose2d) else (out, height)
    return (
        kernel == stride
        and getattr(layer, "dilation", (1, 1))[0] == 1
        and layer.padding[0] == 0
        and few * stride == many
        and all(share(few, ranks, i).begin * stride == share(many, ranks, i).begin for i in range(ranks))
    )
