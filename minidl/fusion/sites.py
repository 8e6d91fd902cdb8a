"""Every batch norm of a graph, and what reads it; and every ReLU over a convolution."""

from __future__ import annotations

from dataclasses import dataclass, replace

from minidl.graph import Graph, Node
from minidl.layer import Layer
from minidl.layers import AdaptiveAvgPool2d, Add, BatchNorm2d, Concat, Conv2d, ConvTranspose2d, MaxPool2d, Mul, ReLU
from minidl.layers.activation import Activation


@dataclass(frozen=True)
class Site:
    """One batch norm with the layers that can share its passes; or a ReLU without one.

    Attributes:
        name: of the batch norm, or of the ReLU.
        kind: "relu" (a ReLU reads it), "activation" (another one does), "join" (a residual sum with a ReLU over it),
            "sum" (a residual sum alone), "alone" (nothing that it can share a pass with); "bare": a ReLU over a
            convolution.
        readers: names of those layers, nearest first.
        partner: at a join of two batch norms, the other one's name.
        first_back: whether its gradient is the first of the join's that backward asks for, which masks for both.
        shape: (H, W, C) or (C,), of one sample.
        producer: name of the convolution below it, if it alone reads that.
        lean: whether that is of 1x1 without stride and bias.
        adds: whether it does not begin its input's gradient, but adds to that of others who read it.
        begins: whether it reads the network's input, whose gradient nobody needs, and has no bias.
        joined: over a concatenation the names of that, and of convolutions that write for it alone.
        taker: name of the convolution above the ReLU whose data gradient is the last of the ReLU's readers, hence the
            sum of all; at a join of two batch norms, of the first summand only. A transposed one if it alone reads the
            ReLU; where a max pooling does, of that in its stead; over a bare ReLU also that pooling's own name.
        pooling: whether that is a max pooling.
        beyond: of such a pooling, name of the convolution whose data gradient is the last of its readers, and may mask.
        sole: whether nobody else reads that ReLU, and the taker is no transposed convolution.
        point: whether the taker is of 1x1 without stride and bias.
        pooled: name of the ReLU above it if a max pooling alone reads that.
        gated: name of the activation above it if only a squeeze and excitation reads that: its means over all pixels
            and its product with a gate.
        why: of one that stands alone, the reason.
    """

    name: str
    kind: str
    readers: tuple[str, ...]
    partner: str | None
    first_back: bool
    shape: tuple[int, ...]
    why: str | None = None
    producer: str | None = None
    lean: bool = False
    adds: bool = False
    begins: bool = False
    joined: tuple[str, ...] | None = None
    taker: str | None = None
    pooling: bool = False
    beyond: str | None = None
    sole: bool = False
    point: bool = False
    pooled: str | None = None
    gated: str | None = None

    @property
    def shared(self) -> str | None:
        """The batch norm's name if its normalisation can be part of another layer's pass."""
        return None if self.kind in ("alone", "bare") else self.name

    @property
    def summed(self) -> str | None:
        """The convolution that can take the batch norm's statistics."""
        return None if self.kind == "bare" else self.producer

    @property
    def lazy(self) -> str | None:
        """The batch norm's name if the convolution below can make its gradients of what this one's is made of: no mask
        or slope is owed by then, unless it is under a ReLU or activation that no convolution masks for; but what is
        pooled is masked while it is small."""
        if self.pooled is not None:
            return self.name if self.begins else None
        owed = self.kind == "activation" or (self.kind == "relu" and self.taker is None)
        return self.name if self.lean and not owed else None

    @property
    def leaving(self) -> tuple[str | None, ...] | None:
        """That batch norm, and the convolution that it leaves its last pass to."""
        return None if self.lazy is None else (self.lazy, self.producer)

    @property
    def rectifier(self) -> str | None:
        """The convolution that can do a bare ReLU's work."""
        return self.producer if self.kind == "bare" else None

    @property
    def masking(self) -> tuple[str, ...] | None:
        """The taker; of a pooling, whose output does for the mask, also who reads it, and the bare ReLU, whose output
        nobody needs then."""
        if self.taker is None or not self.pooling:
            return None if self.taker is None else (self.taker,)
        return tuple(filter(None, (self.taker, self.beyond, self.name)))

    @property
    def ahead(self) -> str | None:
        """The name of the ReLU over a residual sum if the convolution that reads it first can make both on its way."""
        return self.readers[-1] if self.kind == "join" and self.point else None

    @property
    def passed_on(self) -> str | None:
        """The name of the ReLU above it if a convolution alone reads that, and can do its work too."""
        return self.readers[0] if self.kind == "relu" and self.sole else None


def find_sites(graph: Graph) -> list[Site]:
    """All batch norms and bare ReLUs, in execution order. Pure: the graph may or may not belong to a model."""
    readers = graph.consumers()
    sites = []
    for node in graph.nodes:
        if isinstance(node.layer, BatchNorm2d):
            site = _site(graph, node, readers)
            taker, sole = _taker(graph, site, readers)
            producer = _producer(graph, node, readers)
            lean = producer is not None and _is_point(graph[producer].layer)
            adds = producer is not None and _adds(graph[producer], readers)
            begins = producer is not None and _begins(graph, graph[producer])
            point = taker is not None and _is_point(graph[taker].layer)
            below = {"producer": producer, "lean": lean, "adds": adds, "begins": begins}
            below["joined"] = _joined(graph, node, readers)
            above = {"pooled": _pooled(graph, site, readers), "gated": _gated(graph, site, readers)}
            sites.append(replace(site, **below, taker=taker, sole=sole, point=point, **above))
        elif isinstance(node.layer, ReLU) and (producer := _producer(graph, node, readers)) is not None:
            sites.append(_bare(graph, node, producer, readers))
    return sites


def _bare(graph: Graph, node: Node, producer: str, readers: list[list[int]]) -> Site:
    site = Site(node.name, "bare", (), None, True, node.shape, producer=producer)
    above = [graph.nodes[i] for i in readers[node.index]]
    pooling = len(above) == 1 and type(above[0].layer) is MaxPool2d
    if node is graph.output_node or not (pooling or isinstance(above[0].layer, Conv2d)):
        return site
    beyond = [graph.nodes[i] for i in readers[above[0].index]] if pooling and above[0] is not graph.output_node else []
    masks = beyond[0].name if beyond and type(beyond[0].layer) is Conv2d else None
    return replace(site, taker=above[0].name, pooling=pooling, beyond=masks)


def _producer(graph: Graph, node: Node, readers: list[list[int]]) -> str | None:
    source = graph.nodes[node.inputs[0]]
    alone = isinstance(source.layer, Conv2d) and len(readers[source.index]) == 1
    return source.name if alone else None


def _adds(node: Node, readers: list[list[int]]) -> bool:
    return max(readers[node.inputs[0]]) > node.index


def _begins(graph: Graph, node: Node) -> bool:
    return type(node.layer) is Conv2d and not node.layer.biased and not graph.nodes[node.inputs[0]].inputs


def _is_point(conv: Layer) -> bool:
    """Whether a layer is a convolution of 1x1 without stride and bias."""
    if type(conv) is not Conv2d or conv.biased:
        return False
    return conv.kernel_size == conv.stride == (1, 1) and conv.padding == (0, 0) and conv.groups == 1


def _joined(graph: Graph, node: Node, readers: list[list[int]]) -> tuple[str, ...] | None:
    source = graph.nodes[node.inputs[0]]
    if type(source.layer) is not Concat:
        return None
    parts = [graph.nodes[i] for i in source.inputs]
    return source.name, *(n.name for n in parts if isinstance(n.layer, Conv2d) and len(readers[n.index]) == 1)


def _taker(graph: Graph, site: Site, readers: list[list[int]]) -> tuple[str | None, bool]:
    """(taker, whether a convolution alone reads the ReLU, and so can do its work too)"""
    if site.kind not in ("relu", "join"):
        return None, False
    if (pooled := _pooled(graph, site, readers)) is not None:
        (pooling,) = (graph.nodes[i] for i in readers[graph[pooled].index])
        first = graph.nodes[min(readers[pooling.index], default=pooling.index)]
        masks = pooling is not graph.output_node and isinstance(first.layer, Conv2d)
        return first.name if masks else None, False
    under, relu = graph[site.readers[0]], graph[site.readers[-1]]
    if site.partner is not None and graph.nodes[under.inputs[0]].name != site.name:
        return None, False
    first = graph.nodes[min(readers[relu.index], default=relu.index)]
    alone = len(readers[relu.index]) == 1 and relu is not graph.output_node
    if alone and type(first.layer) is ConvTranspose2d:
        return first.name, False
    return (first.name, alone) if isinstance(first.layer, Conv2d) else (None, False)


def _pooled(graph: Graph, site: Site, readers: list[list[int]]) -> str | None:
    if site.kind != "relu":
        return None
    relu = graph[site.readers[0]]
    found, _ = _only_reader(graph, relu, readers)
    return relu.name if found is not None and type(found.layer) is MaxPool2d else None


def _gated(graph: Graph, site: Site, readers: list[list[int]]) -> str | None:
    if site.kind != "activation":
        return None
    node = graph[site.readers[0]]
    above = [graph.nodes[i] for i in readers[node.index]]
    if [type(reader.layer) for reader in above] != [AdaptiveAvgPool2d, Mul] or node is graph.output_node:
        return None
    means, product = above
    gate = graph.nodes[product.inputs[1]].shape
    found = means.layer.output_size == (1, 1) and product.inputs[0] == node.index and gate != node.shape
    return node.name if found else None


def _site(graph: Graph, node: Node, readers: list[list[int]]) -> Site:
    found, why = _only_reader(graph, node, readers)
    if found is None or not isinstance(found.layer, (ReLU, Activation, Add)):
        return _alone(node, why or f"read by {found.name}, which needs it finished")
    if not isinstance(found.layer, Add):
        kind = "relu" if isinstance(found.layer, ReLU) else "activation"
        return Site(node.name, kind, (found.name,), None, True, node.shape)
    others = [graph.nodes[i] for i in found.inputs if i != node.index]
    if not others:
        return _alone(node, f"{found.name} adds it to itself")
    # Another batch norm shares the join only if nobody else reads it.
    other = others[0]
    shared = isinstance(other.layer, BatchNorm2d) and len(readers[other.index]) == 1
    partner = other.name if shared else None
    first_back = partner is None or node.index > other.index
    above, _ = _only_reader(graph, found, readers)
    joined = above is not None and isinstance(above.layer, ReLU)
    names = (found.name, above.name) if joined else (found.name,)
    return Site(node.name, "join" if joined else "sum", names, partner, first_back, node.shape)


def _only_reader(graph: Graph, node: Node, readers: list[list[int]]) -> tuple[Node | None, str | None]:
    """The one layer that reads ``node``; or why there is none."""
    if node is graph.output_node:
        return None, "the network's output"
    indices = readers[node.index]
    if len(indices) > 1:
        return None, f"read by several layers: {', '.join(graph.nodes[i].name for i in indices)}"
    return graph.nodes[indices[0]], None


def _alone(node: Node, why: str) -> Site:
    return Site(node.name, "alone", (), None, True, node.shape, why)
