"""Metrics of evaluation, counted exactly over all batches and all ranks.

A metric counts on the device as whole numbers in float64, which hold them exactly; reading it adds up the ranks.
Reading is a collective: every rank reads, in the same order.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from minidl import backend, checks
from minidl.dist.communicator import Communicator
from minidl.dist.world import given
from minidl.loss.base import check_index, check_labels, out_of_range

_MOST_PARTS = 64  # counts of batches that are kept before they are added up


class _Counts:
    """Counts of batches, kept on the device."""

    def __init__(self, ignore_index: int, comm: Communicator | None):
        self.ignore_index = check_index(type(self).__name__, ignore_index)
        self.comm = given(comm, type(self).__name__)
        self.reset()

    def update(self, logits: Any, labels: Any) -> None:
        """Count a batch of this rank: ``logits`` (N, K) or (N, H, W, K), ``labels`` without classes, as a loss's.

        Raises:
            ValueError, TypeError: for arrays that do not belong together, or another number of classes than before.
        """
        x, ops = backend.take_in(logits, type(self).__name__, "logits")
        labels, _ = backend.take_in(labels, type(self).__name__, "labels")
        classes = check_labels(type(self).__name__, x, labels)
        if self._classes not in (None, classes):
            raise checks.bad_shape(type(self).__name__, "logits", f"(..., {self._classes}) as before", x.shape)
        self._ops, self._classes = ops, classes
        self._parts.append(self._count(ops, x, labels))
        if len(self._parts) == _MOST_PARTS:
            self._parts = [self._total()]

    def reset(self) -> None:
        """Start anew, as if nothing had been counted: the next batch may have another number of classes."""
        self._ops: ModuleType | None = None
        self._parts: list[Any] = []
        self._classes: int | None = None

    def _count(self, ops: ModuleType, logits: Any, labels: Any) -> Any:
        raise NotImplementedError

    def _read(self) -> np.ndarray:
        """The counts of all batches and ranks, on the host."""
        if self._ops is None:
            raise checks.order(type(self).__name__, "nothing was counted yet", "call update(logits, labels)")
        joint = self._total()
        self.comm.all_reduce(joint)
        return self._ops.to_host(joint)

    def _total(self) -> Any:
        """The counts of this rank's batches, on the device."""
        return self._ops.from_host(sum((self._ops.to_host(part) for part in self._parts), np.zeros(self._size)))

    @property
    def _size(self) -> int:
        raise NotImplementedError

    def value(self) -> float:
        """The one figure of the metric, for a training log."""
        raise NotImplementedError


class TopK(_Counts):
    """How often the label is among the ``k`` largest logits, and the largest; equal logits count in order of class.

    Args:
        k: at least 1, at most the number of classes.
        ignore_index: label that does not count.
        comm: communicator whose ranks hold the shards.
    """

    _size = 6

    def __init__(self, k: int = 5, ignore_index: int = -100, comm: Communicator | None = None):
        super().__init__(ignore_index, comm)
        self.k = checks.at_least("TopK", "k", k, 1)

    def require(self, num_classes: int) -> None:
        """Refuse a network of fewer than ``k`` classes."""
        if self.k > num_classes:
            raise checks.bad_value("TopK", "k", f"at most the number of classes, {num_classes}", self.k)

    def _count(self, ops: ModuleType, logits: Any, labels: Any) -> Any:
        self.require(logits.shape[-1])
        totals, _ = ops.smoothed_cross_entropy(
            logits, labels, smoothing=0.0, ignore_index=self.ignore_index, top=self.k
        )
        return totals

    def read(self) -> tuple[float, float]:
        """(top-1 accuracy, top-k accuracy) over everything counted; 0 where there were no labels.

        Raises:
            RuntimeError: before the first batch.
            ValueError: when labels lay outside the classes.
        """
        _, _, first, outside, labels, within = self._read()
        if outside:
            raise out_of_range(type(self).__name__, self._classes, outside)
        return first / max(labels, 1), within / max(labels, 1)

    def value(self) -> float:
        """Top-k accuracy."""
        return self.read()[1]


class Confusion(_Counts):
    """The confusion matrix, and intersection over union of each class.

    Args:
        ignore_index: label that does not count.
        comm: communicator whose ranks hold the shards.
    """

    def __init__(self, ignore_index: int = -100, comm: Communicator | None = None):
        super().__init__(ignore_index, comm)

    @property
    def _size(self) -> int:
        return self._classes * self._classes + 1

    def _count(self, ops: ModuleType, logits: Any, labels: Any) -> Any:
        return ops.confusion_counts(logits, labels, ignore_index=self.ignore_index)

    def read(self) -> np.ndarray:
        """(K, K) int64: how often [label, class of the first largest logit].

        Raises:
            RuntimeError: before the first batch.
            ValueError: when labels lay outside the classes.
        """
        *counts, outside = self._read()
        if outside:
            raise out_of_range(type(self).__name__, self._classes, outside)
        return np.array(counts).astype(np.int64).reshape(self._classes, self._classes)

    def value(self) -> float:
        """Mean intersection over union of the classes that occur; NaN where none does."""
        found = self.iou(self.read())
        found = found[~np.isnan(found)]
        return float(found.mean()) if found.size else float("nan")

    @staticmethod
    def iou(matrix: np.ndarray) -> np.ndarray:
        """(K,) intersection over union of each class of a confusion matrix; NaN for a class that nowhere occurs."""
        hit = np.diag(matrix).astype(np.float64)
        union = matrix.sum(axis=0) + matrix.sum(axis=1) - hit
        return np.divide(hit, union, out=np.full(len(hit), np.nan), where=union > 0)
