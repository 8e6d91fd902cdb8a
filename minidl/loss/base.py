"""What all losses share: the door, the spans, the one all-reduce, and the templates of the two passes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from types import ModuleType
from typing import Any, NamedTuple

from minidl import backend, checks
from minidl.dist.communicator import Communicator
from minidl.dist.world import given
from minidl.precision import bfloat16, float16, float32
from minidl.profile.cost import Cost, PassCost
from minidl.profile.spans import NULL_PROFILER, Profiler

_LABELS = ("int32", "int64", "uint8")
_LOGITS = (float32, bfloat16, float16)


class Sums(NamedTuple):
    """What a loss counted, of all ranks."""

    loss: float = 0.0
    weight: float = 0.0
    correct: int = 0
    labels: int = 0

    @property
    def mean_loss(self) -> float:
        """Mean loss; 0 when nothing was counted."""
        return self.loss / self.weight if self.weight else 0.0

    @property
    def accuracy(self) -> float:
        """Fraction of counted labels whose class has the largest logit; 0 where there are none."""
        return self.correct / self.labels if self.labels else 0.0

    def plus(self, other: Sums) -> Sums:
        """Those of both batches."""
        return Sums(*map(sum, zip(self, other, strict=True)))


@dataclass(frozen=True)
class Totals(checks.Told):
    """What a loss adds up, still on the device.

    Reading any property waits for the device; training loops read only the steps they report.

    Attributes:
        array: float64, as `of` takes it; or one such row for each micro-batch.
        of: the loss, which knows what stands where.
        num_classes: None where there are no classes.
    """

    ops: ModuleType
    array: Any
    num_classes: int | None
    of: Loss

    def read(self) -> Sums:
        """The sums over the batch of all ranks.

        Raises:
            ValueError: when labels lay outside the classes.
        """
        host = self.ops.to_host(self.array)
        return self.of.sums((host if host.ndim == 1 else host.sum(axis=0)).tolist(), self.num_classes)

    @property
    def loss(self) -> float:
        """Mean loss; 0 when nothing was counted."""
        return self.read().mean_loss

    @property
    def accuracy(self) -> float:
        """Fraction of counted labels whose class has the largest logit; 0 where there are none."""
        return self.read().accuracy


def out_of_range(who: str, num_classes: int, count: float) -> ValueError:
    """For ``count`` labels that are no class."""
    remedy = f"the network has {num_classes} classes"
    return checks.impossible(who, f"{int(count)} labels outside 0..{num_classes - 1}, not the ignored index", remedy)


class Loss:
    """Base class of all losses.

    A loss's author writes `check`, `evaluate`, `gradient`, `sums` and `plan`, `count` where it is `divisible`, and may
    say by `cost` what it computes.

    Args:
        comm: communicator whose ranks hold the shards of one batch; may be left out where there is one rank.
    """

    classifies = False  # whether `sums` counts right answers, so that there is an accuracy to tell
    arguments = "logits", "labels"  # what errors call predictions and targets
    divisible = False  # whether a batch may be cut into micro-batches: `count` knows what their losses are divided by

    def __init__(self, comm: Communicator | None = None):
        self.comm = given(comm, type(self).__name__)
        self.profiler: Profiler = NULL_PROFILER
        self._saved: tuple[Any, ...] | None = None

    def check(self, x: Any, target: Any) -> int | None:
        """Refuse arrays that do not belong together; the number of classes, if any."""
        raise NotImplementedError

    def evaluate(self, ops: ModuleType, x: Any, target: Any) -> tuple[Any, Any]:
        """(totals of this rank, float64; what `gradient` needs beyond them)."""
        raise NotImplementedError

    def gradient(self, ops: ModuleType, x: Any, target: Any, kept: Any, totals: Any, scale: Any) -> Any:
        """The gradient by ``x`` of what `sums` makes of the joint ``totals``, times ``scale``."""
        raise NotImplementedError

    def sums(self, totals: list[float], num_classes: int | None) -> Sums:
        """What the joint totals, read to the host, mean."""
        raise NotImplementedError

    def plan(self) -> str:
        """What must be alike on all ranks, in words."""
        raise NotImplementedError

    def count(self, target: Any, num_classes: int) -> Any:
        """Totals that hold what the whole batch's loss is divided by, over all ranks: for `forward` of its parts.

        For losses that are `divisible`.
        """
        raise NotImplementedError

    def cost(self, shape: tuple[int, ...], itemsize: int = 4, label_itemsize: int = 4) -> Cost:
        """Least work of `forward` and `backward` (as ``backward_data``) on predictions of ``shape``. Pure.

        Default: what passes through memory where predictions, a label for each row of them and the gradient are read or
        written once, and no FLOP.
        """
        x, labels = prod(shape) * itemsize, prod(shape[:-1]) * label_itemsize
        return Cost(forward=PassCost(0, x + labels), backward_data=PassCost(0, 2 * x + labels))

    def __call__(self, x: Any, target: Any, **options: Any) -> Totals:
        """`forward`."""
        return self.forward(x, target, **options)

    def forward(self, x: Any, target: Any, grad: bool = True, count: Any = None) -> Totals:
        """Evaluate the loss; keeps what `backward` needs unless ``grad`` is False.

        Args:
            count: from `count`, of the whole batch that this is a micro-batch of: what `backward` divides by. Default:
                what this one counted.

        Raises:
            ValueError: when the shapes do not belong together.
            TypeError: for predictions of no storage dtype, or targets of a dtype that the loss does not take.
        """
        who, (predictions, targets) = type(self).__name__, self.arguments
        array, ops = backend.take_in(x, who, predictions)
        target, target_ops = backend.take_in(target, who, targets)
        if target_ops is not ops:
            raise checks.bad_dtype(
                who, targets, f"a {ops.name} array like the {predictions}", f"a {target_ops.name} array"
            )
        if array.dtype not in _LOGITS:
            raise checks.bad_dtype(who, predictions, "float32, bfloat16 or float16", array.dtype)
        classes = self.check(array, target)
        with self.profiler.span("loss", "forward"):
            totals, kept = self.evaluate(ops, array, target)
        with self.profiler.span("loss", "wait"):
            self.comm.all_reduce(totals)
        divisor = totals if count is None else count
        self._saved = (ops, array, target, kept, divisor, backend.answer_in_kind(x)) if grad else None
        return Totals(ops, totals, classes, self)

    def backward(self, scale: Any = None) -> Any:
        """Gradient of the mean loss by the predictions, of the whole batch's mean if it was counted.

        Args:
            scale: a factor, float32[1] on the device: the loss scale.

        Raises:
            RuntimeError: without a forward pass.
        """
        who = type(self).__name__
        if self._saved is None:
            remedy = f"call forward({', '.join(self.arguments)}) first"
            raise checks.order(who, "backward without a forward pass", remedy)
        ops, array, target, kept, totals, answer = self._saved
        if scale is not None and (backend.ops_of(scale) is not ops or (scale.shape, scale.dtype) != ((1,), float32)):
            remedy = "pass optimizer.loss_scale"
            raise checks.bad_dtype(who, "scale", f"a float32 {ops.name} array (1,)", checks.describe(scale), remedy)
        self._saved = None
        with self.profiler.span("loss", "backward_data"):
            dx = self.gradient(ops, array, target, kept, totals, scale)
        return answer(dx)


def check_labels(who: str, logits: Any, labels: Any) -> int:
    """Refuse labels that do not belong to ``logits``, in the name of ``who``; the number of classes."""
    if logits.ndim < 2 or logits.shape[-1] < 1:
        raise checks.bad_shape(who, "logits", "(N, K) or (N, H, W, K) with at least one class", logits.shape)
    if labels.shape != logits.shape[:-1]:
        remedy = "labels of pixels take a network with logits of pixels, such as unet" if labels.ndim == 3 else None
        if labels.shape == logits.shape:
            remedy = "labels.argmax(-1), or probabilities in float32"
        expected = f"{logits.shape[:-1]} (the logits without classes)"
        raise checks.bad_shape(who, "labels", expected, labels.shape, remedy)
    if str(labels.dtype) not in _LABELS:
        raise checks.bad_dtype(who, "labels", "int32, int64 or uint8", labels.dtype)
    return logits.shape[-1]


def check_index(who: str, value: Any) -> int:
    """``ignore_index`` as an int."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise checks.bad_value(who, "ignore_index", "an integer", value)
    return int(value)
