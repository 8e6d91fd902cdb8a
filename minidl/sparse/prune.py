"""Magnitude pruning while training, and the step from a masked dense network to a sparse one.

    optimizer = PrunedSGD(model, 0.1, 0.9, pruning=Pruning(CubicSchedule(final=0.9, begin=1000, end=8000)))
    ...                                                     # train as ever: the masks move, then stay
    graph = build()                                         # the network once more
    to_sparse(graph, model.state_dict(), optimizer.masks()) # in place: its pruned layers become sparse ones
    sparse = Model(graph)
    sparse.load_state_dict(sparse_state(graph, model.state_dict()))
    tuned = PrunedSGD(sparse, 0.1, 0.9, pruning=optimizer.pruning)  # masks what stayed dense; momentum goes along:
    tuned.load_state_dict(sparse_state(graph, optimizer.state_dict(), "momentum."))

While masks move, a layer is dense with zeros. Masks are part of the optimizer's state: checkpoints hold them, and a
resumed run goes on bit for bit. A dropped weight cannot come back through momentum or decay: its gradient is masked
and its momentum is discarded.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidl import checks
from minidl.dist.agree import require_same
from minidl.graph import Graph
from minidl.layers import Conv2d, Linear
from minidl.model import Model
from minidl.optim import SGD
from minidl.params import Segment
from minidl.precision import float32
from minidl.sparse.layers import CSBConv2d, CSBLinear

__all__ = ["CubicSchedule", "PrunedSGD", "Pruning", "magnitude_mask", "sparse_state", "to_sparse"]

_GRANULARITIES = ("weight", "kernel", "filter")
_SCOPES = ("layer", "global")
_MASK, _COUNT = "mask.", "pruning.steps"


def _sparsity(who: str, argument: str, value: float) -> float:
    return checks.number(who, argument, value, "in [0, 1)", lambda v: 0 <= v < 1)


@dataclass(frozen=True)
class CubicSchedule:
    """Sparsity by step: ``final + (initial - final)·(1 - (step - begin) / (end - begin))³`` from begin to end.

    M. Zhu, S. Gupta, "To prune, or not to prune", ICLR workshop 2018. Before ``begin`` nothing is pruned, from ``end``
    on it is ``final``.

    Args:
        final, initial: fractions of weights that are zero, in [0, 1), rising.
        begin, end: steps, counted from 1; ``end`` may be ``begin``: all at once.
        frequency: steps between two changes of the masks; the change at ``end`` is always made.
        power: 3 is the cubic one.
    """

    final: float
    begin: int
    end: int
    initial: float = 0.0
    frequency: int = 100
    power: float = 3.0

    def __post_init__(self) -> None:
        who = "CubicSchedule"
        _sparsity(who, "final", self.final)
        _sparsity(who, "initial", self.initial)
        if self.initial > self.final:
            raise checks.bad_value(who, "initial", f"at most final ({self.final})", self.initial)
        checks.at_least(who, "begin", self.begin, 1)
        checks.at_least(who, "frequency", self.frequency, 1)
        if checks.at_least(who, "end", self.end, 1) < self.begin:
            raise checks.bad_value(who, "end", f"at least begin ({self.begin})", self.end)
        checks.number(who, "power", self.power, "above 0", lambda v: v > 0)

    def __call__(self, step: int) -> float:
        """The sparsity wanted after ``step``."""
        if step < self.begin:
            return 0.0
        if step >= self.end:
            return self.final
        left = 1 - (step - self.begin) / (self.end - self.begin)
        return self.final + (self.initial - self.final) * left**self.power

    def due(self, step: int) -> bool:
        """Whether the masks change after ``step``."""
        return self.begin <= step <= self.end and ((step - self.begin) % self.frequency == 0 or step == self.end)


@dataclass(frozen=True)
class Pruning:
    """What is pruned, and how.

    Args:
        schedule: sparsity by step.
        include, exclude: patterns (``fnmatch``) of parameter names. Only weights of products are ever pruned, never
            biases or normalisation; the first of them in the network stays dense unless ``include`` names it exactly.
        granularity: what is dropped together: a ``"weight"``, a ``"kernel"`` (the taps that join one input channel
            with one output), or a ``"filter"`` (all that makes one output).
        scope: the sparsity of each ``"layer"``, or of all together (``"global"``).
    """

    schedule: CubicSchedule
    include: Sequence[str] = ("*",)
    exclude: Sequence[str] = ()
    granularity: str = "weight"
    scope: str = "layer"

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, CubicSchedule):
            raise checks.bad_dtype("Pruning", "schedule", "a CubicSchedule", checks.describe(self.schedule))
        for argument in ("include", "exclude"):
            if isinstance(getattr(self, argument), str):
                raise checks.bad_value("Pruning", argument, "a list of patterns", getattr(self, argument))
        if self.granularity not in _GRANULARITIES:
            raise checks.unknown("granularity", self.granularity, _GRANULARITIES)
        if self.scope not in _SCOPES:
            raise checks.unknown("scope", self.scope, _SCOPES)

    def choose(self, segments: Sequence[Segment]) -> list[Segment]:
        """Those of ``segments``, in forward order, that are pruned.

        Raises:
            ValueError: a pattern that fits none of them, or nothing left.
        """
        weights = [s for s in segments if s.product and s.trainable]
        names = [s.full_name for s in weights]
        for pattern in (*self.include, *self.exclude):
            if not fnmatch.filter(names, pattern):
                raise checks.unknown("parameter pattern", pattern, names)
        chosen = [
            s
            for i, s in enumerate(weights)
            if (s.full_name in self.include or i > 0)
            and any(fnmatch.fnmatchcase(s.full_name, p) for p in self.include)
            and not any(fnmatch.fnmatchcase(s.full_name, p) for p in self.exclude)
        ]
        if not chosen:
            remedy = "the first layer stays dense unless include names it"
            raise checks.bad_value("Pruning", "include", "patterns that leave a weight to prune", self.include, remedy)
        return [s for s in chosen if len(s.shape) > 1]  # those of sparse layers are what pruning left


def _scores(weight: np.ndarray, granularity: str) -> np.ndarray:
    """Root mean square of what is dropped together, (out, taps, in) with axes of length 1 where it is one thing."""
    folded = np.abs(weight.astype(np.float64)).reshape(weight.shape[0], -1, weight.shape[-1])
    axes = {"weight": (), "kernel": (1,), "filter": (1, 2)}[granularity]
    return np.sqrt(np.square(folded).mean(axis=axes, keepdims=True)) if axes else folded


def magnitude_mask(
    weights: Mapping[str, np.ndarray], sparsity: float, *, granularity: str = "weight", scope: str = "layer",
    masks: Mapping[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Boolean masks that keep the largest weights, by name.

    Args:
        weights: (out, ..., in) arrays by name.
        sparsity: fraction of all weights to be zero, in [0, 1): of each array or, with ``scope="global"``, of all
            together. Absolute: masked twice at 0.5, half remains. Rounded to whole units of the granularity.
        granularity: see `Pruning`.
        masks: earlier masks: what they dropped stays dropped.

    Equal magnitudes are dropped in the order in which they lie, so that all ranks agree.

    Raises:
        ValueError: a sparsity outside [0, 1), unknown words, arrays that are not finite.
    """
    sparsity = _sparsity("magnitude_mask", "sparsity", sparsity)
    if granularity not in _GRANULARITIES:
        raise checks.unknown("granularity", granularity, _GRANULARITIES)
    if scope not in _SCOPES:
        raise checks.unknown("scope", scope, _SCOPES)
    scores = {}
    for name, weight in weights.items():
        if weight.ndim < 2:
            raise checks.bad_shape("magnitude_mask", name, "(out, ..., in)", weight.shape)
        if not np.isfinite(weight).all():
            raise checks.bad_value("magnitude_mask", name, "finite", "NaN or infinity")
        scores[name] = _scores(weight, granularity)
        if masks is not None and name in masks:  # below any magnitude: dropped first
            scores[name] = np.where(_scores(masks[name], granularity) > 0, scores[name], -1.0)
    groups = [list(scores)] if scope == "global" and scores else [[name] for name in scores]
    kept: dict[str, np.ndarray] = {}
    for names in groups:
        kept |= _keep_largest({name: scores[name] for name in names}, weights, sparsity)
    return kept


def _keep_largest(
    scores: Mapping[str, np.ndarray], weights: Mapping[str, np.ndarray], sparsity: float
) -> dict[str, np.ndarray]:
    """Masks for one group of arrays that share a budget; a unit counts the weights it stands for."""
    flat = np.concatenate([s.reshape(-1) for s in scores.values()])
    units = np.concatenate([np.full(s.size, weights[name].size // max(s.size, 1)) for name, s in scores.items()])
    order = np.argsort(flat, kind="stable")
    # As many units as bring the share of dropped weights nearest to what is wanted.
    dropped = np.concatenate([[0], np.cumsum(units[order])])
    count = int(np.abs(dropped - sparsity * dropped[-1]).argmin())
    count = max(count, int((flat < 0).sum()))
    keep = np.ones(flat.size, bool)
    keep[order[:count]] = False
    masks, begin = {}, 0
    for name, s in scores.items():
        shape = weights[name].shape
        part = keep[begin : begin + s.size].reshape(s.shape)
        masks[name] = np.broadcast_to(part, (shape[0], weights[name][0, ..., 0].size, shape[-1])).reshape(shape).copy()
        begin += s.size
    return masks


class PrunedSGD(SGD):
    """`SGD` that prunes as it goes: after the steps that the schedule names, the smallest weights become zero for good.

    Args:
        pruning: what, how much and when.
        others: as `SGD`.

    Raises:
        ValueError: as `SGD`; patterns that fit nothing; settings that differ between ranks.
    """

    def __init__(self, model: Model, lr: float, *args: Any, pruning: Pruning, **options: Any):
        super().__init__(model, lr, *args, **options)
        if not isinstance(pruning, Pruning):
            raise checks.bad_dtype("PrunedSGD", "pruning", "a Pruning", checks.describe(pruning))
        self.pruning = pruning
        place = {layer.name: i for i, layer in enumerate(model.layers)}
        self.pruned = pruning.choose(sorted(self.arena.segments, key=lambda s: place[s.layer]))
        self.count = 0
        self._host_masks = {s.full_name: np.ones(s.shape, np.bool_) for s in self.pruned}
        self._mask = self.ops.from_host(np.ones(self.arena.trainable_size, float32))
        require_same(model.comm, "pruning plan", [repr(pruning), *(s.full_name for s in self.pruned)])

    def step(self) -> None:
        super().step()
        self.count += 1
        if self.pruning.schedule.due(self.count):
            self._prune(self.pruning.schedule(self.count))

    def _update(self, begin: int, end: int) -> None:
        # With no gradient, no momentum and no value, neither momentum nor decay moves a dropped weight.
        gradient = self.arena.gradient(begin, end)
        gradient *= self._mask[begin:end]
        super()._update(begin, end)

    def _prune(self, sparsity: float) -> None:
        """Take the masks of the weights as they are. Waits for the device; ranks have equal weights, hence masks."""
        state = self.ops.to_host(self.arena.master)
        weights = {s.full_name: state[s.offset : s.offset + s.size].reshape(s.shape) for s in self.pruned}
        self._host_masks = magnitude_mask(
            weights, sparsity, granularity=self.pruning.granularity, scope=self.pruning.scope, masks=self._host_masks
        )
        self._impose()

    def _impose(self) -> None:
        """Bring the masks to the device, and weights and momentum under them."""
        host = np.ones(self.arena.trainable_size, float32)
        for s in self.pruned:
            host[s.offset : s.offset + s.size] = self._host_masks[s.full_name].reshape(-1)
        self.ops.copy_into(self._mask, self.ops.from_host(host))
        self.arena.master[: host.size] *= self._mask
        if self.velocity is not None:
            self.velocity *= self._mask
        self.arena.refresh_working()

    def masks(self) -> dict[str, np.ndarray]:
        """The masks by parameter name: True where a weight is kept."""
        return {name: mask.copy() for name, mask in self._host_masks.items()}

    def sparsity(self) -> dict[str, float]:
        """The fraction of dropped weights by parameter name."""
        return {name: float(1 - mask.mean()) for name, mask in self._host_masks.items()}

    def state_dict(self) -> dict[str, np.ndarray]:
        """`SGD.state_dict`, the masks and the number of steps taken."""
        masks = {f"{_MASK}{name}": mask.copy() for name, mask in self._host_masks.items()}
        return super().state_dict() | masks | {_COUNT: np.array([self.count], np.int64)}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on from `state_dict`, masks and place in the schedule included; load the model's state first."""
        super().load_state_dict(state)
        self.count = int(state[_COUNT][0])
        self._host_masks = {s.full_name: np.array(state[f"{_MASK}{s.full_name}"]) for s in self.pruned}
        self._impose()


# -- from dense with zeros to sparse ----------------------------------------------------------------------------------


def to_sparse(
    graph: Graph, state: Mapping[str, np.ndarray], masks: Mapping[str, np.ndarray], *, threshold: float = 0.7,
    blocksize: int | None = None,
) -> list[str]:  # fmt: skip
    """Replace layers of a fresh graph by sparse ones, where the masks are at least ``threshold`` sparse.

    Args:
        graph: built like the one that was pruned, without a model yet; changed in place.
        state: the pruned model's `state_dict`.
        masks: by weight name, from `PrunedSGD.masks` or `magnitude_mask`.
        threshold: sparsity from which a layer is converted.
        blocksize: side of a block; None chooses.

    Returns:
        The names of the layers replaced: linear ones and convolutions without groups; the others stay dense with zeros.
    """
    threshold = checks.number("to_sparse", "threshold", threshold, "in [0, 1]", lambda v: 0 <= v <= 1)
    replaced = []
    for name, mask in masks.items():
        layer_name = name.rpartition(".")[0]
        layer = graph[layer_name].layer
        if 1 - mask.mean() < threshold or not _convertible(layer):
            continue
        where = {"mask": mask, "blocksize": blocksize}
        weight, bias = state[name], state.get(f"{layer_name}.bias")
        if isinstance(layer, Linear):
            new = CSBLinear.from_dense(weight, bias, **where)
        else:
            geometry = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}
            new = CSBConv2d.from_dense(weight, bias, **geometry, **where)
        graph.replace(layer_name, new)
        replaced.append(layer_name)
    return replaced


def _convertible(layer: Any) -> bool:
    return isinstance(layer, Linear) or (type(layer) is Conv2d and layer.groups == 1)


def sparse_state(graph: Graph, state: Mapping[str, np.ndarray], prefix: str = "") -> dict[str, np.ndarray]:
    """A dense model's state for the sparse one: each weight of a sparse layer at its pattern, all else as it is.

    ``prefix``: what stands before the parameter's name: ``"momentum."`` for the state of an optimizer, whose masks of
    sparse layers are left out.
    """
    found = dict(state)
    for layer in graph.layers:
        if not isinstance(layer, (CSBLinear, CSBConv2d)):
            continue
        found.pop(f"{_MASK}{layer.name}.weight", None)
        name = f"{prefix}{layer.name}.weight"
        if name in state:
            found[name] = layer.at_pattern(state[name])
    return found
