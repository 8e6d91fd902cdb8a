"""Which kernels each pass of a step launches, and whose kernels do the work of a pass that launches none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from minidl.bench.step import TrainingStep
from minidl.fusion import Plan, find_sites
from minidl.fusion.plans import modes_of
from minidl.graph import Graph, Node
from minidl.layers import Concat, MaxPool2d
from minidl.profile.spans import GraphProfiler

Key = tuple[str, str]


class Launches:
    """A profiler that notes the kernels launched within `noting` under the span that is open, beside another profiler.

    Attributes:
        found: the kernels of each (layer, pass), in order.
    """

    def __init__(self, beside: GraphProfiler | None = None):
        self.found: dict[Key, list[str]] = {}
        self._beside = beside
        self._open: list[list[str]] = []

    @contextmanager
    def span(self, layer: str, pass_name: str, stream: Any = None) -> Iterator[None]:
        """See `minidl.profile.Profiler`."""
        self._open.append(self.found.setdefault((layer, pass_name), []))
        try:
            with self._beside.span(layer, pass_name, stream) if self._beside else nullcontext():
                yield
        finally:
            self._open.pop()

    def noting(self) -> AbstractContextManager[None]:
        """Around the launches that are noted."""
        from minidl.cuda.launch import observed

        return observed(self._launched)

    def _launched(self, stem: str, name: str, defines: Mapping[str, int | str]) -> AbstractContextManager[None]:
        if self._open:
            self._open[-1].append(f"{stem}.{name}")
        return nullcontext()

    def capturing(self) -> AbstractContextManager[Any]:
        """See `minidl.profile.spans.GraphProfiler`."""
        return self._beside.capturing() if self._beside else nullcontext()

    def launching(self, piece: Any) -> None:
        """See `minidl.profile.spans.GraphProfiler`."""
        if self._beside:
            self._beside.launching(piece)


def launches(step: TrainingStep) -> dict[Key, list[str]]:
    """The kernels of each (layer, pass) of a step, in order; takes one. Empty on the CPU."""
    if step.ops.name != "cuda":
        return {}
    noted = Launches()
    step.observe(noted)
    try:
        with noted.noting():
            step()
    finally:
        step.observe()
    return noted.found


def absorbed(graph: Graph, plan: Plan, kernels: Mapping[Key, list[str]]) -> dict[Key, str]:
    """For each pass that a fusion plan leaves without a kernel of its own, the layer whose kernels do its work.

    Forward that is the next reader with kernels, which normalises and sums; backward the convolution above that masks
    and sums, where the plan has one, else, and under a pooling, the batch norm; of a lazy batch norm's input the
    convolution below, whose own data gradient may be made along with its weight's. Of a ReLU without a batch norm it is
    the convolution below, and backward the layer above. Of a concatenation that copies nothing it is the last that
    writes, of a pooling beside other readers the ReLU, and backward the batch norm.
    """
    found: dict[Key, str] = {}
    readers = graph.consumers()
    for site in find_sites(graph):
        modes = modes_of(plan.sites[site.name])
        if site.kind == "bare":
            for pass_name, by in (("forward", site.producer), ("backward_data", site.taker)):
                if kernels.get((site.name, pass_name)) == [] and by is not None:
                    found[site.name, pass_name] = by
        if "lazy" in modes:
            for name in (site.name, site.producer):
                if kernels.get((name, "backward_data")) == []:
                    found[name, "backward_data"] = site.producer
        if not modes or not site.readers:
            continue
        above = site.taker if "gradients" in modes and not site.pooled else site.name
        made = {"pooled": site.pooled, "gated": site.gated}.items()  # by who reads it
        beyond = [graph.nodes[i].name for mode, name in made if mode in modes for i in readers[graph[name].index]]
        for name in (site.name, *site.readers, *beyond):
            if kernels.get((name, "forward")) == []:
                found.setdefault((name, "forward"), _next_reader(graph, readers, name, kernels))
            for pass_name in ("backward_data", "backward_weight"):
                if kernels.get((name, pass_name)) == [] and name != above:
                    found.setdefault((name, pass_name), above)
    for node in graph.nodes:
        if isinstance(node.layer, MaxPool2d) and kernels.get((node.name, "forward")) == []:
            relu = graph.nodes[node.inputs[0]]
            found[node.name, "forward"] = relu.name
            found.setdefault((node.name, "backward_data"), graph.nodes[relu.inputs[0]].name)
        if isinstance(node.layer, Concat) and kernels.get((node.name, "forward")) == []:
            found[node.name, "forward"] = _last_writer(graph, node, kernels)
    return found


def _last_writer(graph: Graph, node: Node, kernels: Mapping[Key, list[str]]) -> str:
    """The nearest layer below with kernels in its forward pass."""
    while not kernels.get((node.name, "forward")):
        node = graph.nodes[max(node.inputs)]
    return node.name


def _next_reader(graph: Graph, readers: list[list[int]], name: str, kernels: Mapping[Key, list[str]]) -> str:
    """The nearest layer above with kernels in its forward pass."""
    node = graph[name]
    while not kernels.get((node.name, "forward")):
        node = graph.nodes[readers[node.index][0]]
    return node.name
