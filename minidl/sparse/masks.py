"""Which weights stay: masks by magnitude, for units from single weights to filters, blocks and N of M."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from minidl import checks
from minidl.shapes import round_up

_WORDS = ("weight", "kernel", "filter", "layer")
_KNOWN = (*_WORDS, "filter:8 (keep a multiple)", "block:8x4 (filters x inputs)", "2:4 (kept of neighbouring inputs)")
_SCOPES = ("layer", "global")
GONE = -1.0  # score of what earlier masks dropped: below any magnitude


def require_sparsity(who: str, argument: str, value: float) -> float:
    """``value`` if it is a fraction in [0, 1)."""
    return checks.number(who, argument, value, "in [0, 1)", lambda v: 0 <= v < 1)


def require_masks(who: str, masks: Mapping[str, np.ndarray]) -> None:
    """TypeError for what is no mapping of names to masks, such as the whole of what a search found."""
    checks.instance(who, "masks", masks, Mapping, "a mapping of names to masks", "a search has them in its masks")


@dataclass(frozen=True)
class Granularity:
    """What is dropped together; `parse` makes it of a word.

    Attributes:
        kind: ``"weight"``, ``"kernel"``, ``"filter"``, ``"layer"``, ``"block"`` or ``"n:m"``.
        sizes: (filters, inputs) of a block; (kept, of) of N:M; of filters, (what their number is a multiple of, 1).
    """

    kind: str
    sizes: tuple[int, int] = (1, 1)

    @classmethod
    def parse(cls, text: str) -> Granularity:
        """``"weight"``; ``"kernel"``: the taps that join one input channel with one output; ``"filter"``: all that
        makes one output; ``"filter:8"``: the same, and a multiple of 8 stays, which kernels like; ``"layer"``;
        ``"block:8x4"``: 8 filters by 4 inputs, at each tap; ``"2:4"``: of every 4
        neighbouring inputs at most 2 are kept.

        Raises:
            ValueError: anything else.
        """
        if text in _WORDS:
            return cls(text)
        spelled = (("filter", r"filter:(\d+)()"), ("block", r"block:(\d+)x(\d+)"), ("n:m", r"(\d+):(\d+)"))
        for kind, pattern in spelled:
            if isinstance(text, str) and (found := re.fullmatch(pattern, text)):
                sizes = int(found[1]), int(found[2] or 1)
                if min(sizes) < 1 or (kind == "n:m" and sizes[0] >= sizes[1]):
                    expected = "sizes of at least 1" + (", N below M" if kind == "n:m" else "")
                    raise checks.bad_value("pruning", "granularity", expected, text)
                return cls(kind, sizes)
        raise checks.unknown("granularity", text, _KNOWN)

    @property
    def most(self) -> float:
        """The highest sparsity there is: 1 (not reached), or that of N:M."""
        return 1 - self.sizes[0] / self.sizes[1] if self.kind == "n:m" else 1.0

    def scores(self, weight: np.ndarray) -> np.ndarray:
        """Root mean square of each unit of a weight (out, ..., in): (out units, tap units, in units)."""
        if self.kind in ("weight", "n:m"):
            values = weight.astype(np.promote_types(weight.dtype, np.float32), copy=False)
            return np.abs(values).reshape(weight.shape[0], -1, weight.shape[-1])
        square = np.square(weight.astype(np.float64)).reshape(weight.shape[0], -1, weight.shape[-1])
        if self.kind == "block":
            return np.sqrt(self._sum_blocks(square) / self._sum_blocks(np.ones_like(square)))
        axes = {"kernel": (1,), "filter": (1, 2), "layer": (0, 1, 2)}.get(self.kind, ())
        return np.sqrt(square.mean(axis=axes, keepdims=True) if axes else square)

    def units(self, shape: tuple[int, ...]) -> np.ndarray:
        """How many weights each unit of an array of ``shape`` stands for, in the shape of `scores`."""
        ones = np.ones((shape[0], int(np.prod(shape[1:-1])), shape[-1]), np.int64)
        if self.kind == "block":
            return self._sum_blocks(ones)
        axes = {"kernel": (1,), "filter": (1, 2), "layer": (0, 1, 2)}.get(self.kind, ())
        return ones.sum(axis=axes, keepdims=True) if axes else ones

    def expand(self, keep: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """What is kept of each unit, for each weight of an array of ``shape``."""
        if self.kind == "block":
            rows, columns = (np.arange(n) // size for n, size in zip((shape[0], shape[-1]), self.sizes, strict=True))
            keep = keep[rows][:, :, columns]
        full = shape[0], int(np.prod(shape[1:-1])), shape[-1]
        return np.broadcast_to(keep, full).reshape(shape).copy()

    def _sum_blocks(self, values: np.ndarray) -> np.ndarray:
        (h, w), (rows, taps, columns) = self.sizes, values.shape
        padded = np.zeros((round_up(rows, h), taps, round_up(columns, w)), values.dtype)
        padded[:rows, :, :columns] = values
        return padded.reshape(padded.shape[0] // h, h, taps, padded.shape[2] // w, w).sum(axis=(1, 4))


def keep_largest(scores: np.ndarray, sizes: np.ndarray, sparsity: float) -> np.ndarray:
    """Which of the units to keep, so that the share of dropped weights comes nearest to ``sparsity``.

    Args:
        scores: one for each unit; those below 0 are dropped in any case. Equal ones go in the order in which they lie.
        sizes: weights that each unit stands for.
    """
    gone = int((scores < 0).sum())
    if scores.size == 0 or (sizes == sizes[0]).all():
        lower = int(sparsity * scores.size)
        count = lower + (sparsity * scores.size - lower > 0.5)
        return ~_least(scores, max(count, gone))
    order = np.argsort(scores, kind="stable")
    dropped = np.concatenate([[0], np.cumsum(sizes[order])])
    count = int(np.abs(dropped - sparsity * dropped[-1]).argmin())
    keep = np.ones(scores.size, bool)
    keep[order[: max(count, gone)]] = False
    return keep


def _least(scores: np.ndarray, count: int) -> np.ndarray:
    """True for the ``count`` least, of equal ones the first; without sorting, which takes seconds for millions."""
    if count == 0:
        return np.zeros(scores.size, bool)
    edge = np.partition(scores, count - 1)[count - 1]
    chosen = scores < edge
    chosen[np.flatnonzero(scores == edge)[: count - int(chosen.sum())]] = True
    return chosen


def to_multiple(keep: np.ndarray, scores: np.ndarray, multiple: int) -> np.ndarray:
    """``keep`` with as many units as the nearest multiple, at least one of it, of those with the largest scores.

    All units may stay where their number is no multiple; those with scores below 0 do not come back.
    """
    count = int(keep.sum())
    if multiple == 1 or count == keep.size:
        return keep
    wanted = max(int(count / multiple + 0.5), 1) * multiple
    return ~_least(scores, keep.size - min(wanted, int((scores >= 0).sum())))


def _keep_n_of_m(scores: np.ndarray, sparsity: float, m: int) -> np.ndarray:
    """Of every ``m`` neighbours on the last axis, without the least round(sparsity * m); a rest keeps as many."""
    kept = m - round(sparsity * m)
    rows, columns = scores.shape[:2], scores.shape[2]
    padded = np.full((*rows, round_up(columns, m)), 2 * GONE)
    padded[..., :columns] = scores
    groups = padded.reshape(*rows, -1, m)
    rank = np.argsort(np.argsort(groups, axis=-1, kind="stable"), axis=-1, kind="stable")
    keep = (rank >= m - kept) & (groups >= 0)
    return keep.reshape(padded.shape)[..., :columns]


def magnitude_mask(
    weights: Mapping[str, np.ndarray], sparsity: float, *, granularity: str = "weight", scope: str = "layer",
    masks: Mapping[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Boolean masks that keep the largest weights, by name.

    Args:
        weights: (out, ..., in) arrays by name.
        sparsity: fraction of all weights to be zero, in [0, 1): of each array or, with ``scope="global"``, of all
            together. Absolute: masked twice at 0.5, half remains. Rounded to whole units of the granularity.
        granularity: see `Granularity.parse`; ``"layer"`` goes with ``scope="global"``, N:M with ``"layer"``.
        masks: earlier masks: what they dropped stays dropped.

    Equal magnitudes are dropped in the order in which they lie, so that all ranks agree.

    Raises:
        ValueError: a sparsity outside [0, 1) or above what N:M has, unknown words, arrays that are not finite.
    """
    return score_mask(weights, sparsity, granularity=granularity, scope=scope, masks=masks)


def score_mask(
    weights: Mapping[str, np.ndarray], sparsity: float, *, granularity: str = "weight", scope: str = "layer",
    masks: Mapping[str, np.ndarray] | None = None, rng: np.random.Generator | None = None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """As `magnitude_mask`; with ``rng`` scores are drawn from it instead: random masks."""
    who = "magnitude_mask"
    unit, sparsity = Granularity.parse(granularity), require_sparsity(who, "sparsity", sparsity)
    require_fitting(who, unit, scope, sparsity)
    if not isinstance(weights, Mapping):
        raise checks.bad_dtype(who, "weights", "a dictionary of arrays by name", checks.describe(weights))
    scores = {}
    for name, weight in weights.items():
        if weight.ndim < 2:
            raise checks.bad_shape(who, name, "(out, ..., in)", weight.shape)
        if not np.isfinite(weight).all():
            raise checks.bad_value(who, name, "finite", "NaN or infinity")
        scores[name] = unit.scores(weight)
        if rng is not None:
            scores[name] = rng.random(scores[name].shape)
        if masks is not None and name in masks:
            if np.shape(masks[name]) != weight.shape:
                raise checks.bad_shape(who, f"mask of {name}", str(weight.shape), np.shape(masks[name]))
            scores[name] = np.where(unit.scores(masks[name]) > 0, scores[name], GONE)
    if unit.kind == "n:m":
        keep = {name: _keep_n_of_m(s, sparsity, unit.sizes[1]) for name, s in scores.items()}
    else:
        keep = _by_budget(scores, {name: unit.units(w.shape) for name, w in weights.items()}, sparsity, scope)
    if unit.kind == "filter":
        keep = {n: to_multiple(k.ravel(), scores[n].ravel(), unit.sizes[0]).reshape(k.shape) for n, k in keep.items()}
    return {name: unit.expand(keep[name], weight.shape) for name, weight in weights.items()}


def require_fitting(who: str, unit: Granularity, scope: str, sparsity: float) -> None:
    """Refuse what does not go together.

    Raises:
        ValueError: an unknown scope, one that the granularity cannot have, more sparsity than N:M has.
    """
    if scope not in _SCOPES:
        raise checks.unknown("scope", scope, _SCOPES)
    wanted = {"layer": "global", "n:m": "layer"}.get(unit.kind, scope)
    if scope != wanted:
        what = "N:M" if unit.kind == "n:m" else "layers"
        raise checks.bad_value(who, "scope", f"{wanted!r} for {what}", scope)
    if sparsity > unit.most + 1e-9:
        n, m = unit.sizes
        raise checks.bad_value(who, "sparsity", f"at most {unit.most:g} with {n}:{m}", sparsity)


def _by_budget(
    scores: Mapping[str, np.ndarray], sizes: Mapping[str, np.ndarray], sparsity: float, scope: str
) -> dict[str, np.ndarray]:
    """What is kept of each array's units, by one budget for each array or for all."""
    found: dict[str, np.ndarray] = {}
    for names in [list(scores)] if scope == "global" and scores else [[name] for name in scores]:
        flat, weights = (np.concatenate([part[name].reshape(-1) for name in names]) for part in (scores, sizes))
        ends = np.cumsum([scores[name].size for name in names])[:-1]
        parts = np.split(keep_largest(flat, weights, sparsity), ends)
        found |= {name: part.reshape(scores[name].shape) for name, part in zip(names, parts, strict=True)}
    return found
