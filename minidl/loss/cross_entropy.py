"""Softmax cross entropy."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from types import ModuleType
from typing import Any

import numpy as np

from minidl import backend, checks
from minidl.dist.communicator import Communicator
from minidl.loss.base import Loss, Sums, check_index, check_labels, out_of_range
from minidl.precision import float32
from minidl.profile import Cost, PassCost


class SoftmaxCrossEntropy(Loss):
    """Mean of −log softmax(logits)[label] over all labels that are not ignored, of all ranks.

    With weights w and smoothing e, a label y costs ``(1 − e)·w_y·(−log p_y) + e/K·Σ w_k·(−log p_k)``, and the sum is
    divided by the sum of w_y. In place of labels each row may have a probability t_k for every class, as mixed images
    do: it costs ``Σ w_k·((1 − e)·t_k + e/K)·(−log p_k)``, and the sum is divided by the number of rows. Both as in
    torch.nn.CrossEntropyLoss.

    Args:
        ignore_index: label that does not count.
        comm: communicator whose ranks hold the shards of one batch.
        label_smoothing: in [0, 1] (Szegedy et al., "Rethinking the Inception architecture", CVPR 2016).
        weight: a positive number or 0 for each class.

    Shapes:
        logits (N, K) with labels (N,), or (N, H, W, K) with labels (N, H, W) for a loss per pixel; labels int32,
        int64 or uint8. With probabilities float32, in the shape of the logits.
    """

    classifies = divisible = True

    def __init__(
        self,
        ignore_index: int = -100,
        comm: Communicator | None = None,
        *,
        label_smoothing: float = 0.0,
        weight: Sequence[float] | None = None,
    ):
        super().__init__(comm)
        who, expected = type(self).__name__, "in [0, 1]"
        self.ignore_index = check_index(who, ignore_index)
        self.label_smoothing = checks.number(who, "label_smoothing", label_smoothing, expected, lambda v: 0 <= v <= 1)
        self.weight = None if weight is None else _weights(who, weight)
        self._weights: dict[str, Any] = {}  # by operation table: the array on its device

    @property
    def _plain(self) -> bool:
        return self.weight is None and self.label_smoothing == 0

    def count(self, target: Any, num_classes: int) -> Any:
        self._require(num_classes)
        ops = backend.ops_of(target)
        if _soft(target):
            counted = ops.from_host(np.array([0, prod(target.shape[:-1]), 0, 0], np.float64))
        else:
            counted = ops.count_labels(target, num_classes, self._weight_on(ops), ignore_index=self.ignore_index)
        self.comm.all_reduce(counted)
        return counted

    def cost(self, shape: tuple[int, ...], itemsize: int = 4, label_itemsize: int = 4) -> Cost:
        """Least work of `forward` and `backward` (as ``backward_data``) on logits of ``shape``. Pure.

        Per logit: maximum, difference, exponential, sum 4; ``(exp(x − lse) − label)·scale`` 3. Per label: logarithm,
        plus the maximum, minus its logit, sum of losses 4; minus its one 1. Smoothing: for
        every logit its loss and their sum 2, and backward its share 1. Class weights are not counted.
        """
        n, labels = prod(shape), prod(shape[:-1])
        kept = labels * (label_itemsize + 4)  # the labels, and lse in float32
        more = n if self.label_smoothing else 0
        return Cost(
            forward=PassCost(4 * n + 4 * labels + 2 * more, n * itemsize + kept),
            backward_data=PassCost(3 * n + labels + more, 2 * n * itemsize + kept),
        )

    def check(self, x: Any, target: Any) -> int:
        who, soft = type(self).__name__, _soft(target) and target.ndim == x.ndim
        classes = _check_probabilities(who, x, target) if soft else check_labels(who, x, target)
        self._require(classes)
        return classes

    def _require(self, classes: int) -> None:
        """Refuse another number of classes than there are weights."""
        if self.weight is not None and len(self.weight) != classes:
            expected = f"({classes},), one for each class"
            raise checks.bad_shape(type(self).__name__, "weight", expected, self.weight.shape)

    def _weight_on(self, ops: ModuleType) -> Any:
        if self.weight is None:
            return None
        if ops.name not in self._weights:
            self._weights[ops.name] = ops.from_host(self.weight)
        return self._weights[ops.name]

    def evaluate(self, ops: ModuleType, x: Any, target: Any) -> tuple[Any, Any]:
        if _soft(target):
            return ops.soft_cross_entropy(x, target, self._weight_on(ops), smoothing=self.label_smoothing)
        if self._plain:
            return ops.softmax_cross_entropy(x, target, ignore_index=self.ignore_index)
        options = {"smoothing": self.label_smoothing, "ignore_index": self.ignore_index}
        return ops.smoothed_cross_entropy(x, target, self._weight_on(ops), **options)

    def gradient(self, ops: ModuleType, x: Any, target: Any, kept: Any, totals: Any, scale: Any) -> Any:
        if _soft(target):
            weight, smoothing = self._weight_on(ops), self.label_smoothing
            return ops.soft_cross_entropy_backward(x, target, kept, totals, weight, scale, smoothing=smoothing)
        if self._plain:
            return ops.softmax_cross_entropy_backward(x, target, kept, totals, scale, ignore_index=self.ignore_index)
        options = {"smoothing": self.label_smoothing, "ignore_index": self.ignore_index}
        return ops.smoothed_cross_entropy_backward(x, target, kept, totals, self._weight_on(ops), scale, **options)

    def sums(self, totals: list[float], num_classes: int | None) -> Sums:
        loss, weight, correct, outside, *more = totals
        if outside:
            raise out_of_range(type(self).__name__, num_classes, outside)
        return Sums(loss, weight, int(correct), int(more[0] if more else weight))

    def plan(self) -> str:
        words = f"ignore_index {self.ignore_index}"
        if not self._plain:
            weight = None if self.weight is None else self.weight.tolist()
            words += f", label_smoothing {self.label_smoothing}, weight {weight}"
        return words


def _soft(target: Any) -> bool:
    """Whether these are probabilities, not labels."""
    return target.dtype.kind == "f"


def _check_probabilities(who: str, x: Any, target: Any) -> int:
    """The number of classes."""
    if x.ndim < 2 or x.shape[-1] < 1 or target.shape != x.shape:
        raise checks.bad_shape(who, "probabilities", f"{x.shape} like the logits, or labels", target.shape)
    if target.dtype != float32:
        raise checks.bad_dtype(who, "probabilities", "float32", target.dtype)
    return x.shape[-1]


def _weights(who: str, weight: Sequence[float]) -> np.ndarray:
    values = np.asarray(weight, np.float32)
    if values.ndim != 1 or values.size == 0 or not np.isfinite(values).all() or (values < 0).any() or not values.any():
        expected = "a finite number of at least 0 for each class, not all 0"
        raise checks.bad_value(who, "weight", expected, weight)
    return values
