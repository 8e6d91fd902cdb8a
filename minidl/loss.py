"""Losses. `forward` gives totals that are already joined over ranks, `backward` the first gradient.

A loss is divided by the *global* number of labels, and gradient messages are sums; so N ranks equal one rank on the
joined batch, also with uneven shards or ignored labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from types import ModuleType
from typing import Any

from minidl import backend, checks, interop
from minidl.dist.communicator import SOLO, Communicator
from minidl.precision import bfloat16, float16, float32
from minidl.profile import Cost, PassCost
from minidl.profile.spans import NULL_PROFILER, Profiler

__all__ = ["SoftmaxCrossEntropy", "Totals"]

_LABELS = ("int32", "int64", "uint8")
_LOGITS = (float32, bfloat16, float16)


@dataclass(frozen=True)
class Totals:
    """What a loss adds up, still on the device: float64 of loss sum, labels, correct ones, labels out of range.

    One such row (4,), or one for each micro-batch (K, 4). Reading any property waits for the device; training loops
    read only the steps they report.
    """

    ops: ModuleType
    array: Any
    num_classes: int

    def read(self) -> tuple[float, int, int]:
        """(summed loss, labels counted, correct predictions).

        Raises:
            ValueError: when labels lay outside the classes.
        """
        loss, count, correct, bad = self.ops.to_host(self.array).reshape(-1, 4).sum(axis=0).tolist()
        if bad:
            raise checks.bad_value(
                "loss", "labels", f"in 0..{self.num_classes - 1} or the ignored index", f"{int(bad)} labels outside"
            )
        return loss, int(count), int(correct)

    @property
    def loss(self) -> float:
        """Mean loss over all counted labels; 0 when there are none."""
        loss, count, _ = self.read()
        return loss / count if count else 0.0

    @property
    def accuracy(self) -> float:
        """Fraction of counted labels whose class has the largest logit."""
        _, count, correct = self.read()
        return correct / count if count else 0.0


class SoftmaxCrossEntropy:
    """Mean of −log softmax(logits)[label] over all labels that are not ignored, of all ranks.

    Args:
        ignore_index: label that does not count.
        comm: communicator whose ranks hold the shards of one batch.

    Shapes:
        logits (N, K) with labels (N,), or (N, H, W, K) with labels (N, H, W) for a loss per pixel; labels int32,
        int64 or uint8.
    """

    def __init__(self, ignore_index: int = -100, comm: Communicator = SOLO):
        if isinstance(ignore_index, bool) or not hasattr(ignore_index, "__index__"):
            raise checks.bad_value("loss", "ignore_index", "an integer", ignore_index)
        self.ignore_index = int(ignore_index)
        self.comm = comm
        self.profiler: Profiler = NULL_PROFILER
        self._saved: tuple[Any, ...] | None = None

    def cost(self, shape: tuple[int, ...], itemsize: int = 4, label_itemsize: int = 4) -> Cost:
        """Least work of `forward` and `backward` (as ``backward_data``) on logits of ``shape``. Pure.

        Per logit: maximum, difference, exponential, sum 4; ``(exp(x − lse) − label)·scale`` 3. Per label: logarithm,
        plus the maximum, minus its logit, sum of losses 4; minus its one 1.
        """
        n, labels = prod(shape), prod(shape[:-1])
        kept = labels * (label_itemsize + 4)  # the labels, and lse in float32
        return Cost(
            forward=PassCost(4 * n + 4 * labels, n * itemsize + kept),
            backward_data=PassCost(3 * n + labels, 2 * n * itemsize + kept),
        )

    def count(self, labels: Any, num_classes: int) -> Any:
        """How many of ``labels`` count, over all ranks: what `forward` wants of a batch that is cut into parts."""
        counted = backend.ops_of(labels).count_labels(labels, num_classes, ignore_index=self.ignore_index)
        self.comm.all_reduce(counted)
        return counted

    def forward(self, logits: Any, labels: Any, grad: bool = True, count: Any = None) -> Totals:
        """Evaluate the loss; keeps what `backward` needs unless ``grad`` is False.

        Args:
            count: from `count`, of the whole batch that this is a micro-batch of: what `backward` divides by. Default:
                the labels given here.

        Raises:
            ValueError: when the shapes do not belong together.
            TypeError: for logits of no storage dtype, labels that are not integers.
        """
        array, ops = interop.take_in(logits, "loss", "logits")
        labels, label_ops = interop.take_in(labels, "loss", "labels")
        if label_ops is not ops:
            raise checks.bad_dtype("loss", "labels", f"a {ops.name} array like the logits", f"a {label_ops.name} array")
        if array.ndim < 2 or array.shape[-1] < 1:
            raise checks.bad_shape("loss", "logits", "(N, K) or (N, H, W, K) with at least one class", array.shape)
        if array.dtype not in _LOGITS:
            raise checks.bad_dtype("loss", "logits", "float32, bfloat16 or float16", array.dtype)
        if labels.shape != array.shape[:-1]:
            raise checks.bad_shape("loss", "labels", f"{array.shape[:-1]} (the logits without classes)", labels.shape)
        if str(labels.dtype) not in _LABELS:
            raise checks.bad_dtype("loss", "labels", "int32, int64 or uint8", labels.dtype)
        with self.profiler.span("loss", "forward"):
            totals, lse = ops.softmax_cross_entropy(array, labels, ignore_index=self.ignore_index)
        with self.profiler.span("loss", "wait"):
            self.comm.all_reduce(totals)
        divisor = totals if count is None else count
        self._saved = (ops, array, labels, lse, divisor, interop.answer_in_kind(logits)) if grad else None
        return Totals(ops, totals, array.shape[-1])

    def backward(self, scale: Any = None) -> Any:
        """Gradient of the mean loss by the logits, of the whole batch's mean if it was counted.

        Args:
            scale: a factor, float32[1] on the device: the loss scale.

        Raises:
            RuntimeError: without a forward pass.
        """
        if self._saved is None:
            raise checks.order("loss", "backward without a forward pass", "call forward(logits, labels) first")
        ops, logits, labels, lse, totals, answer = self._saved
        if scale is not None and (backend.ops_of(scale) is not ops or (scale.shape, scale.dtype) != ((1,), float32)):
            remedy = "pass optimizer.loss_scale"
            raise checks.bad_dtype("loss", "scale", f"a float32 {ops.name} array (1,)", checks.describe(scale), remedy)
        self._saved = None
        assert prod(logits.shape[:-1]) == prod(labels.shape)
        with self.profiler.span("loss", "backward_data"):
            dx = ops.softmax_cross_entropy_backward(logits, labels, lse, totals, scale, ignore_index=self.ignore_index)
        return answer(dx)
