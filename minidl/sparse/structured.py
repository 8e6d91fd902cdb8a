"""Pruning of whole filters and whole residual branches: masks that `minidl.sparse.shrink` turns into a smaller network.

A filter that stays half alive is no gain: with its weights go its bias, scale and shift of the batch norm over it, and
the same channel wherever the graph ties it to another (`minidl.sparse.channels`). What is left of it is zero.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np

from minidl import checks
from minidl.graph import Graph, Node
from minidl.layers import Add, BatchNorm2d, ConvTranspose2d
from minidl.sparse.channels import Channels, depthwise, mixes, zero_channels
from minidl.sparse.masks import GONE, keep_largest, to_multiple


class Filters:
    """Filters as units, tied ones as one.

    Args:
        graph: the network.
        weights: names of the weights whose filters may go.
        trainable: names of all parameters that can be masked.
        multiple: what the number that stays of each set is a multiple of, but where all stay.

    Raises:
        ValueError: when none can go.
    """

    def __init__(self, graph: Graph, weights: Collection[str], trainable: Collection[str], multiple: int = 1):
        self.channels, self.multiple = Channels(graph), multiple
        self._nodes = [n for n in graph.nodes if mixes(n.layer) or depthwise(n.layer)]
        fixed = self.channels.fixed.copy()
        for node in self._nodes:
            if f"{node.name}.weight" not in weights:
                fixed[self._labels(node)] = True
        zero = zero_channels(graph, _cleared(graph, weights, trainable))
        for node in self._nodes:
            if mixes(node.layer):
                (read,) = node.inputs
                fixed[self.channels.labels[read][~zero[read]]] = True
        self._free = ~fixed
        self._group = np.full(len(fixed), -1)
        made: dict[tuple[str, ...], int] = {}
        for label, names in self._producers().items():
            self._group[label] = made.setdefault(names, len(made))
        self.parts = ["+".join(names) for names in made]
        if not self._free[np.concatenate([self._labels(n) for n in self._nodes])].any():
            raise checks.impossible("Pruning", "no filter can go: all are tied to the input, the output or an excluded "
                                    "weight", "name more in include, or prune weights")  # fmt: skip
        self.names = [
            f"{node.name}.{name}" for node, name in self._parameters() if self._free[self._labels(node)].any()
        ]

    def _labels(self, node: Node) -> np.ndarray:
        return self.channels.labels[node.index]

    def _parameters(self) -> Iterator[tuple[Node, str]]:
        """What has one slice for each channel: weights and biases of products, parameters of batch norms."""
        for node in self.channels.graph.nodes:
            if mixes(node.layer) or depthwise(node.layer) or isinstance(node.layer, BatchNorm2d):
                yield from ((node, spec.name) for spec in node.layer.specs)

    def _producers(self) -> dict[int, tuple[str, ...]]:
        """For each label that may go, the layers that make it."""
        found: dict[int, tuple[str, ...]] = {}
        for node in self._nodes:
            for label in np.unique(self._labels(node)).tolist():
                if self._free[label]:
                    found[label] = (*found.get(label, ()), node.name)
        return found

    def masks(
        self, weights: Mapping[str, np.ndarray], sparsity: float, scope: str, masks: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Masks by parameter name, that drop the filters of least root mean square.

        Args:
            weights: all parameters named in `names`.
            sparsity: fraction of the weights of all that may go; in each set of tied filters, at least one stays.
            masks: earlier ones.
        """
        alive = np.ones(len(self._free), bool)
        for node in self._nodes:
            if (name := f"{node.name}.weight") in self.names:
                alive[self._labels(node)[~_rows(node, masks[name]).any(axis=1)]] = False
        sizes, scores = self._sizes_and_scores(weights)
        units = np.flatnonzero(self._free & (sizes > 0))
        scores = np.where(alive, scores, GONE)[units]
        return self._spread(units, self._keep(scores, sizes[units], self._group[units], sparsity, scope), weights)

    def part_masks(
        self, part: str, weights: Mapping[str, np.ndarray], sparsity: float, rng: np.random.Generator | None = None
    ) -> dict[str, np.ndarray]:
        """Masks of one set of tied filters, by magnitude or drawn from ``rng``; at least one filter stays."""
        sizes, scores = self._sizes_and_scores(weights)
        units = np.flatnonzero(self._group == self.parts.index(part))
        scores = scores[units] if rng is None else rng.random(units.size)
        keep = self._keep(scores, sizes[units], self._group[units], sparsity, "layer")
        return {name: mask for name, mask in self._spread(units, keep, weights).items() if not mask.all()}

    def _sizes_and_scores(self, weights: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Weights of each label's filters, and their root mean square."""
        size, square = np.zeros(len(self._free)), np.zeros(len(self._free))
        for node in self._nodes:
            if (name := f"{node.name}.weight") in self.names:
                rows = _rows(node, weights[name])
                np.add.at(size, self._labels(node), rows.shape[1])
                np.add.at(square, self._labels(node), np.square(rows, dtype=np.float64).sum(axis=1))
        return size, np.sqrt(square / np.maximum(size, 1))

    def _keep(
        self, scores: np.ndarray, sizes: np.ndarray, groups: np.ndarray, sparsity: float, scope: str
    ) -> np.ndarray:
        keep = np.ones(scores.size, bool)
        for members in [np.arange(scores.size)] if scope == "global" else [groups == g for g in np.unique(groups)]:
            keep[members] = keep_largest(scores[members], sizes[members], sparsity)
        for g in np.unique(groups):
            members = np.flatnonzero(groups == g)
            keep[members[scores[members].argmax()]] = True
            keep[members] = to_multiple(keep[members], scores[members], self.multiple)
        return keep

    def _spread(self, units: np.ndarray, kept: np.ndarray, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The masks of all parameters when the labels ``units`` are ``kept`` or not."""
        keep, found = np.ones(len(self._free), bool), {}
        keep[units] = kept
        for node, name in self._parameters():
            full = f"{node.name}.{name}"
            if full in self.names:
                shape, own = weights[full].shape, keep[self._labels(node)]
                across = isinstance(node.layer, ConvTranspose2d) or len(shape) == 1
                own = own if across else own.reshape(-1, *(1,) * (len(shape) - 1))
                found[full] = np.broadcast_to(own, shape).copy()
        return found


def _rows(node: Node, weight: np.ndarray) -> np.ndarray:
    """One row of weights for each output channel."""
    if isinstance(node.layer, ConvTranspose2d):
        weight = np.moveaxis(weight, -1, 0)
    return weight.reshape(weight.shape[0], -1)


class Branches:
    """Residual branches as units: what reaches the network's output through one input of one sum only.

    Args:
        graph, weights, trainable: as for `Filters`.

    Raises:
        ValueError: when there is none.
    """

    def __init__(self, graph: Graph, weights: Collection[str], trainable: Collection[str]):
        readers = graph.consumers()
        zero = zero_channels(graph, _cleared(graph, weights, trainable))
        self._branches: list[list[str]] = []
        products = {f"{n.name}.{s.name}" for n in graph.nodes if n.layer for s in n.layer.specs if s.product}
        self._products = products
        for node in graph.nodes:
            if not isinstance(node.layer, Add):
                continue
            found = []
            for i in node.inputs:
                names = [f"{n.name}.{s.name}" for n in _only_through(graph, readers, i, node.index)
                         for s in n.layer.specs]  # fmt: skip
                own = [name for name in names if name in products]
                if own and zero[i].all() and all(name in weights for name in own):
                    found.append(names)
            # A sum may lose one branch, not both: the one with more layers, not the projection beside it.
            self._branches += [max(found, key=len)] if found else []
        if not self._branches:
            raise checks.impossible(
                "Pruning", "no layer can go: the network has no residual branch that may be pruned whole",
                "prune filters or weights",
            )  # fmt: skip
        self.names = list(dict.fromkeys(name for names in self._branches for name in names))
        self.parts = ["+".join(n.rpartition(".")[0] for n in names if n in products) for names in self._branches]

    def masks(
        self, weights: Mapping[str, np.ndarray], sparsity: float, scope: str, masks: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """As `Filters.masks`, for branches: the least root mean square of all weights in one goes first."""
        assert scope == "global", "checked in Pruning"
        sizes, scores = [], []
        for names in self._branches:
            own = [weights[name].astype(np.float64) for name in names if name in self._products]
            sizes.append(sum(w.size for w in own))
            rms = np.sqrt(sum(np.square(w).sum() for w in own) / sizes[-1])
            scores.append(rms if any(masks[name].any() for name in names) else GONE)
        keep = keep_largest(np.array(scores), np.array(sizes), sparsity)
        found = {name: np.ones(weights[name].shape, bool) for name in self.names}
        for names, kept in zip(self._branches, keep.tolist(), strict=True):
            for name in names:
                found[name] &= kept  # a branch may lie within another
        return found

    def part_masks(
        self, part: str, weights: Mapping[str, np.ndarray], sparsity: float, rng: np.random.Generator | None = None
    ) -> dict[str, np.ndarray]:
        """Masks that leave one branch out: it goes whole, whatever the sparsity."""
        names = self._branches[self.parts.index(part)]
        return {name: np.zeros(weights[name].shape, bool) for name in names}


def _only_through(graph: Graph, readers: list[list[int]], last: int, add: int) -> list[Node]:
    """The nodes from ``last`` down that nobody but the sum ``add`` has a use for."""
    found = {last} if readers[last] == [add] else set()
    for index in range(last - 1, 0, -1):
        if readers[index] and found.issuperset(readers[index]):
            found.add(index)
    return [graph.nodes[i] for i in sorted(found) if i]


def _cleared(graph: Graph, weights: Collection[str], trainable: Collection[str]) -> dict[str, np.ndarray]:
    """A state in which all that a mask may clear is zero, and nothing else."""
    found = {}
    for layer in graph.layers:
        for spec in layer.specs:
            name = f"{layer.name}.{spec.name}"
            cleared = name in trainable and (name in weights or not spec.product)
            found[name] = np.zeros(spec.shape) if cleared else np.ones(spec.shape)
    return found
