"""Pruning while training, and the step from a masked dense network to a sparse one.

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
and its momentum is discarded. Pruned filters and layers are cut out by `minidl.sparse.shrink`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np

from minidl import checks
from minidl.dist.agree import require_same
from minidl.graph import Graph
from minidl.layers import Conv2d, Linear
from minidl.model import Model
from minidl.optim import SGD
from minidl.precision import float32
from minidl.segments import Segment
from minidl.sparse.layers import CSBConv2d, CSBLinear
from minidl.sparse.masks import (
    Granularity,
    magnitude_mask,
    require_fitting,
    require_masks,
    require_sparsity,
    score_mask,
)
from minidl.sparse.structured import Branches, Filters

_MASK, _COUNT = "mask.", "pruning.steps"


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
        require_sparsity(who, "final", self.final)
        require_sparsity(who, "initial", self.initial)
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
        schedule: sparsity by step; None: masks stay as `PrunedSGD.impose` sets them.
        include, exclude: patterns (``fnmatch``) of parameter names. Only weights of products are ever chosen, never
            biases or normalisation; the first of them in the network stays dense unless ``include`` names it exactly.
        granularity: what is dropped together: a ``"weight"``; a ``"kernel"`` (the taps that join one input channel
            with one output); a ``"block:8x4"`` of 8 filters and 4 inputs at one tap; ``"2:4"``: of every 4 neighbouring
            inputs 2 are kept; a ``"filter"`` (all that makes one output, with its bias and batch norm, and the filters
            that the graph ties to it); ``"filter:8"``: the same, a multiple of 8 stays; a ``"layer"`` (a residual
            branch). Filters and layers leave what `shrink` cuts out.
        scope: the sparsity of each ``"layer"`` (of filters: each set of tied ones), or of all together (``"global"``,
            the only one of layers).

    Raises:
        ValueError: unknown words, and what does not go together.
        TypeError: a schedule that is none.
    """

    schedule: CubicSchedule | None
    include: Sequence[str] = ("*",)
    exclude: Sequence[str] = ()
    granularity: str = "weight"
    scope: str = "layer"

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, CubicSchedule | None):
            raise checks.bad_dtype("Pruning", "schedule", "a CubicSchedule or None", checks.describe(self.schedule))
        for argument in ("include", "exclude"):
            if isinstance(getattr(self, argument), str):
                raise checks.bad_value("Pruning", argument, "a list of patterns", getattr(self, argument))
        unit = Granularity.parse(self.granularity)
        require_fitting("Pruning", unit, self.scope, 0.0)
        if unit.kind == "n:m" and self.schedule is not None and abs(self.schedule.final - unit.most) > 1e-9:
            expected = f"one that ends at {unit.most:g}, as {self.granularity} does"
            raise checks.bad_value("Pruning", "schedule", expected, self.schedule.final)

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


class Units(Protocol):
    """What can be masked, and the masks of a sparsity: `Filters`, `Branches`, and units within one weight.

    Attributes:
        names: parameters that masks may clear.
        parts: what can be pruned by itself: weights, sets of tied filters, branches.
    """

    names: list[str]
    parts: list[str]

    def masks(
        self, weights: Mapping[str, np.ndarray], sparsity: float, scope: str, masks: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Masks of all parameters in ``names``, by magnitude; what ``masks`` dropped stays dropped."""

    def part_masks(
        self, part: str, weights: Mapping[str, np.ndarray], sparsity: float, rng: np.random.Generator | None = None
    ) -> dict[str, np.ndarray]:
        """Masks of the parameters of one part, by magnitude or drawn from ``rng``."""


@dataclass(frozen=True)
class _Weights:
    """Units that lie within one weight."""

    names: list[str]
    granularity: str

    @property
    def parts(self) -> list[str]:
        return self.names

    def part_masks(
        self, part: str, weights: Mapping[str, np.ndarray], sparsity: float, rng: np.random.Generator | None = None
    ) -> dict[str, np.ndarray]:
        return score_mask({part: weights[part]}, sparsity, granularity=self.granularity, rng=rng)

    def masks(
        self, weights: Mapping[str, np.ndarray], sparsity: float, scope: str, masks: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        return magnitude_mask(weights, sparsity, granularity=self.granularity, scope=scope, masks=masks)


def units_of(pruning: Pruning, model: Model) -> Units:
    """What ``pruning`` prunes in a model.

    Raises:
        ValueError: as `Pruning.choose`; nothing that could be pruned so.
    """
    place = {layer.name: i for i, layer in enumerate(model.layers)}
    segments = sorted((s for s in model.arena.segments if s.trainable), key=lambda s: place[s.layer])
    names = [s.full_name for s in pruning.choose(segments)]
    unit, trainable = Granularity.parse(pruning.granularity), {s.full_name for s in segments}
    if unit.kind == "filter" and names:
        return Filters(model.graph, names, trainable, unit.sizes[0])
    if unit.kind == "layer" and names:
        return Branches(model.graph, names, trainable)
    return _Weights(names, pruning.granularity)


class _Pruned:
    """What an optimizer needs to prune as it goes; comes before it among the bases of a class."""

    def __init__(self, model: Model, *args: Any, pruning: Pruning, **options: Any):
        who = type(self).__name__
        super().__init__(model, *args, **options)
        self.pruning = checks.instance(who, "pruning", pruning, Pruning, "a Pruning")
        self._units = units_of(pruning, model)
        known = {s.full_name: s for s in self.arena.segments}
        self.pruned = [known[name] for name in self._units.names]
        self.count = 0
        self._host_masks = {s.full_name: np.ones(s.shape, np.bool_) for s in self.pruned}
        self._mask = self.ops.from_host(np.ones(self.arena.trainable_size, float32))
        require_same(model.comm, "pruning plan", [repr(pruning), *self._units.names])

    def after_step(self) -> None:
        super().after_step()
        self.count += 1
        schedule = self.pruning.schedule
        if schedule is not None and schedule.due(self.count):
            self.prune(schedule(self.count))

    def _condition(self, begin: int, end: int) -> None:
        # With no gradient, no momentum and no value, neither momentum nor decay moves a dropped weight.
        gradient = self.arena.gradient(begin, end)
        gradient *= self._mask[begin:end]
        super()._condition(begin, end)

    def prune(self, sparsity: float) -> None:
        """Take the masks of the weights as they are; what was dropped stays so.

        Waits for the device. Ranks have equal weights, hence masks.

        Raises:
            ValueError: a sparsity outside [0, 1), weights that are not finite.
        """
        require_sparsity(type(self).__name__, "sparsity", sparsity)
        state = self.ops.to_host(self.arena.master)
        weights = {s.full_name: state[s.offset : s.offset + s.size].reshape(s.shape) for s in self.pruned}
        for name, weight in weights.items():
            if not np.isfinite(weight).all():
                raise checks.bad_value(type(self).__name__, name, "finite when it is pruned", "NaN or infinity")
        if weights:
            self._host_masks = self._units.masks(weights, sparsity, self.pruning.scope, self._host_masks)
            self._impose()

    def impose(self, masks: Mapping[str, np.ndarray]) -> None:
        """Set masks by parameter name, those of others left as they are: weights under them become zero.

        Raises:
            ValueError: a name that is not pruned, another shape.
            TypeError: no mapping, a mask that is not of booleans.
        """
        who = type(self).__name__
        require_masks(who, masks)
        for name, mask in masks.items():
            if name not in self._host_masks:
                raise checks.unknown("pruned parameter", name, self._host_masks)
            if getattr(mask, "dtype", None) != np.bool_:
                raise checks.bad_dtype(who, name, "a mask of booleans", checks.describe(mask))
            if mask.shape != self._host_masks[name].shape:
                raise checks.bad_shape(who, name, str(self._host_masks[name].shape), mask.shape)
        self._host_masks |= {name: mask.copy() for name, mask in masks.items()}
        self._impose()

    def _impose(self) -> None:
        """Bring the masks to the device, and weights and moments under them."""
        host = np.ones(self.arena.trainable_size, float32)
        for s in self.pruned:
            host[s.offset : s.offset + s.size] = self._host_masks[s.full_name].reshape(-1)
        self.ops.copy_into(self._mask, self.ops.from_host(host))
        self.arena.master[: host.size] *= self._mask
        for history in self._histories:
            history *= self._mask
        self.arena.refresh_working()

    def plan(self) -> str:
        return f"{super().plan()}, {self.pruning!r}"

    def masks(self) -> dict[str, np.ndarray]:
        """The masks by parameter name: True where a weight is kept."""
        return {name: mask.copy() for name, mask in self._host_masks.items()}

    def sparsity(self) -> dict[str, float]:
        """The fraction of dropped weights by parameter name."""
        return {name: float(1 - mask.mean()) for name, mask in self._host_masks.items()}

    def state_dict(self) -> dict[str, np.ndarray]:
        """The optimizer's state, the masks and the number of steps taken."""
        masks = {f"{_MASK}{name}": mask.copy() for name, mask in self._host_masks.items()}
        return super().state_dict() | masks | {_COUNT: np.array([self.count], np.int64)}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on from `state_dict`, masks and place in the schedule included; load the model's state first."""
        super().load_state_dict(state)
        self.count = int(state[_COUNT][0])
        self._host_masks = {s.full_name: np.array(state[f"{_MASK}{s.full_name}"]) for s in self.pruned}
        self._impose()


class PrunedSGD(_Pruned, SGD):
    """`SGD` that prunes as it goes: after the steps that the schedule names, the smallest weights become zero for good.

    Args:
        pruning: what, how much and when.
        others: as `SGD`.

    Raises:
        ValueError: as `SGD`; patterns that fit nothing; nothing that could be pruned so; settings that differ between
            ranks.
    """


@cache
def pruned(kind: type[SGD]) -> type[SGD]:
    """The optimizer class ``kind`` (`AdamW`, `LARS`, ...) with what `PrunedSGD` adds to `SGD`.

    Raises:
        TypeError: for what is no optimizer, or shares its momentum out over ranks.
    """
    if kind is SGD:
        return PrunedSGD
    if isinstance(kind, type) and issubclass(kind, _Pruned):
        return kind
    if not (isinstance(kind, type) and issubclass(kind, SGD)) or kind._state_size is not SGD._state_size:
        raise checks.bad_dtype("pruned", "kind", "an optimizer class that holds its whole state", repr(kind))
    return type(f"Pruned{kind.__name__}", (_Pruned, kind), {"__doc__": f"`{kind.__name__}` that prunes as it goes."})


def without_masks(state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The state of a pruning optimizer, or all of a checkpoint, for the plain one: moments and learning rate stay."""
    own = lambda name: name.removeprefix("optimizer.")  # noqa: E731  (as checkpoints name it)
    return {name: value for name, value in state.items() if not own(name).startswith(_MASK) and own(name) != _COUNT}


# -- from dense with zeros to sparse ----------------------------------------------------------------------------------


def to_sparse(
    graph: Graph, state: Mapping[str, np.ndarray], masks: Mapping[str, np.ndarray], *, threshold: float = 0.7,
    blocksize: int | tuple[int, int] | None = None,
) -> list[str]:  # fmt: skip
    """Replace layers of a fresh graph by sparse ones, where the masks are at least ``threshold`` sparse.

    Args:
        graph: built like the one that was pruned, without a model yet; changed in place.
        state: the pruned model's `state_dict`.
        masks: by weight name, from `PrunedSGD.masks` or `magnitude_mask`; those of biases and norms are passed over.
        threshold: sparsity from which a layer is converted.
        blocksize: side of a block; None chooses.

    Returns:
        The names of the layers replaced: linear ones and convolutions without groups; the others stay dense with zeros.

    Raises:
        ValueError: masks of parameters that the graph lacks; a state without their weights, or with others.
        TypeError: masks that are no mapping.
    """
    threshold = checks.number("to_sparse", "threshold", threshold, "in [0, 1]", lambda v: 0 <= v <= 1)
    require_masks("to_sparse", masks)
    known = {f"{layer.name}.{spec.name}": layer for layer in graph.layers for spec in layer.specs}
    replaced = []
    for name, mask in masks.items():
        if name not in known:
            raise checks.unknown("parameter", name, known)
        layer, (layer_name, _, parameter) = known[name], name.rpartition(".")
        if parameter != "weight" or not _convertible(layer) or 1 - np.mean(mask) < threshold:
            continue
        if name not in state:
            raise checks.bad_value("to_sparse", "state", f"one that holds {name}", "one without it")
        shape = next(spec.shape for spec in layer.specs if spec.name == "weight")
        if np.shape(state[name]) != shape:
            raise checks.bad_shape("to_sparse", name, str(shape), np.shape(state[name]))
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
    sparse layers are left out; for that of `AdamW` or `LAMB` ``"first."``, and once more ``"second."``.
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
