"""The Dice loss of segmentation."""

from __future__ import annotations

from math import inf
from types import ModuleType
from typing import Any

from minidl import checks
from minidl.dist.communicator import Communicator
from minidl.loss.base import Loss, Sums, check_index, check_labels, out_of_range


class DiceLoss(Loss):
    """One minus the mean over classes of ``(2 Σ p·t + smooth) / (Σ p + Σ t + smooth)``, p the softmax of the logits.

    The sums go over all pixels of the batch of all ranks that are not ignored (Milletari, Navab and Ahmadi, "V-Net",
    3DV 2016, with plain instead of squared sums).

    Args:
        smooth: above 0; keeps classes without a pixel defined.
        ignore_index: label that does not count.
        comm: as `Loss`.

    Shapes:
        logits (N, H, W, K) with labels (N, H, W), or (N, K) with labels (N,); K at least 2.
    """

    def __init__(self, smooth: float = 1.0, ignore_index: int = -100, comm: Communicator | None = None):
        super().__init__(comm)
        self.smooth = checks.number(type(self).__name__, "smooth", smooth, "above 0, finite", lambda v: 0 < v < inf)
        self.ignore_index = check_index(type(self).__name__, ignore_index)

    def check(self, x: Any, target: Any) -> int:
        classes = check_labels(type(self).__name__, x, target)
        if classes < 2:
            raise checks.bad_shape(type(self).__name__, "logits", "(..., K) with at least two classes", x.shape)
        return classes

    def evaluate(self, ops: ModuleType, x: Any, target: Any) -> tuple[Any, Any]:
        p = ops.softmax(x)
        return ops.dice_sums(p, target, ignore_index=self.ignore_index), p

    def gradient(self, ops: ModuleType, x: Any, target: Any, kept: Any, totals: Any, scale: Any) -> Any:
        options = {"smooth": self.smooth, "ignore_index": self.ignore_index}
        return ops.dice_backward(kept, target, totals, scale, **options)

    def sums(self, totals: list[float], num_classes: int | None) -> Sums:
        """The loss is one number of the whole batch: its weight is 1."""
        *counts, outside = totals
        if outside:
            raise out_of_range(type(self).__name__, num_classes, outside)
        hit, mass, pixels = (counts[i * num_classes : (i + 1) * num_classes] for i in range(3))
        scores = [(2 * h + self.smooth) / (m + t + self.smooth) for h, m, t in zip(hit, mass, pixels, strict=True)]
        return Sums(1 - sum(scores) / num_classes, 1.0, 0, 0)

    def plan(self) -> str:
        return f"dice {self.smooth}, ignore_index {self.ignore_index}"
