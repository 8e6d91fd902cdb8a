"""What pruning does to a network that stays as it is: sensitivity of each part, and the search among random masks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from minidl import checks
from minidl.dist.agree import require_same
from minidl.model import Model
from minidl.sparse.masks import require_masks, require_sparsity
from minidl.sparse.prune import Pruning, units_of

Evaluate = Callable[[], float]


@contextlib.contextmanager
def masked(model: Model, masks: Mapping[str, np.ndarray]) -> Iterator[None]:
    """Within it, the model's parameters under ``masks`` (booleans by name) are zero; afterwards all is as before.

    Raises:
        ValueError: a name or a shape that the model does not have.
        RuntimeError: the model is folded for inference and would not notice.
    """
    if any(layer.folded is not None for layer in model.layers):
        raise checks.order("masked", "the model is folded for inference", "call model.train() first")
    require_masks("masked", masks)
    ops, arena = model.ops, model.arena
    segments = {s.full_name: s for s in arena.segments}
    before = ops.to_host(arena.master).copy()
    host = before.copy()
    for name, mask in masks.items():
        if name not in segments:
            raise checks.unknown("parameter", name, segments)
        s = segments[name]
        if mask.shape != s.shape:
            raise checks.bad_shape("masked", name, str(s.shape), mask.shape)
        host[s.offset : s.offset + s.size] *= mask.reshape(-1)
    try:
        ops.copy_into(arena.master, ops.from_host(host))
        arena.refresh_working()
        yield
    finally:
        ops.copy_into(arena.master, ops.from_host(before))
        arena.refresh_working()


@dataclass(frozen=True)
class Sensitivity:
    """What ``evaluate`` gave with one ``part`` of the network pruned to ``sparsity``, ``before`` with none."""

    part: str
    sparsity: float
    score: float
    before: float


def sensitivity(
    model: Model, pruning: Pruning, evaluate: Evaluate, sparsities: Sequence[float] = (0.5, 0.7, 0.8, 0.9)
) -> list[Sensitivity]:
    """How much each part suffers when it alone is pruned by magnitude, without training.

    Li et al., "Pruning filters for efficient convnets", ICLR 2017, section 3.2; Han et al., NIPS 2015, figure 6.

    Args:
        pruning: which parts, at which granularity; its schedule is not used. Branches (``"layer"``) go whole.
        evaluate: an error, such as ``lambda: 1 - trainer.evaluate()[1]``; the same on all ranks, and called by all.

    Returns:
        One entry for each part and sparsity, in the network's order. The model is as it was, to the bit.

    Raises:
        ValueError: as `Pruning.choose`; a sparsity outside [0, 1), or more than N:M has.
    """
    units, weights, before = units_of(pruning, model), _weights(model), _error(model, evaluate)
    for sparsity in sparsities:
        require_sparsity("sensitivity", "sparsities", sparsity)
    if pruning.granularity == "layer":
        sparsities = (1.0,)
    found = []
    for part in units.parts:
        for sparsity in sparsities:
            with masked(model, units.part_masks(part, weights, sparsity)):
                found.append(Sensitivity(part, sparsity, _error(model, evaluate), before))
    return found


@dataclass(frozen=True)
class MaskSearch:
    """What a search chose.

    Attributes:
        masks: booleans by parameter name, for `PrunedSGD.impose`.
        before: what ``evaluate`` gave at the start.
        scores: of every candidate, by part, each with the masks chosen before it.
    """

    masks: dict[str, np.ndarray]
    before: float
    scores: dict[str, tuple[float, ...]]


def random_mask_search(
    model: Model, pruning: Pruning, evaluate: Evaluate, *, sparsity: float, candidates: int = 50, seed: int = 0
) -> MaskSearch:
    """Draw masks at random and keep the one that does least harm, part by part from the first to the last layer.

    S. Anwar, W. Sung, "Coarse pruning of convolutional neural networks with random masks", 2016: of N candidates the
    one with the lowest misclassification rate is kept, then the network is trained on with fixed masks. They prune
    feature maps (``"filter"``), then kernels. A candidate whose error is NaN is kept only where all are.

    Args:
        pruning: which parts, at which granularity (not ``"layer"``); its schedule is not used.
        evaluate: an error as in `sensitivity`, on the same samples each time.
        sparsity: of every part.
        candidates: masks drawn for each part.
        seed: of the draws: the same on all ranks.

    Raises:
        ValueError: as `sensitivity`.
    """
    who = "random_mask_search"
    require_sparsity(who, "sparsity", sparsity)
    checks.at_least(who, "candidates", candidates, 1)
    if pruning.granularity == "layer":
        raise checks.bad_value(who, "granularity", "one that can be drawn: a filter, a kernel, ...", "layer")
    require_same(model.comm, "random mask search", [repr(pruning), f"{sparsity} {candidates} {seed}"])
    units, weights, before = units_of(pruning, model), _weights(model), _error(model, evaluate)
    chosen: dict[str, np.ndarray] = {}
    scores: dict[str, tuple[float, ...]] = {}
    for number, part in enumerate(units.parts):
        drawn = []
        for candidate in range(candidates):
            rng = np.random.default_rng([seed, number, candidate])
            masks = _both(chosen, units.part_masks(part, weights, sparsity, rng))
            with masked(model, masks):
                drawn.append((_error(model, evaluate), masks))
        scores[part] = tuple(score for score, _ in drawn)
        chosen = min(drawn, key=lambda one: (math.isnan(one[0]), one[0]))[1]  # of equal ones the first; NaN last
    return MaskSearch(chosen, before, scores)


def _both(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What both masks keep: a batch norm may lie over filters of several parts."""
    return {**a, **{name: mask & a[name] if name in a else mask for name, mask in b.items()}}


def _weights(model: Model) -> dict[str, np.ndarray]:
    host = model.ops.to_host(model.arena.master)
    return {s.full_name: host[s.offset : s.offset + s.size].reshape(s.shape).copy() for s in model.arena.segments}


def _error(model: Model, evaluate: Evaluate) -> float:
    """What ``evaluate`` gave; of ranks that got different ones, rank 0's."""
    found = evaluate()
    try:
        value = float(found)
    except (TypeError, ValueError):
        remedy = "such as 1 - trainer.evaluate()[1]"
        raise checks.bad_dtype("", "what evaluate returns", "a number", checks.describe(found), remedy) from None
    return model.comm.share(value)[0]
