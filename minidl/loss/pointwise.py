"""Losses that compare every element with a target of the same shape."""

from __future__ import annotations

from math import inf, prod
from types import ModuleType
from typing import Any

import numpy as np

from minidl import backend, checks
from minidl.dist.communicator import Communicator
from minidl.loss.base import Loss, Sums
from minidl.profile import Cost


class _Pointwise(Loss):
    """The mean over all elements of all ranks.

    Shapes:
        predictions and targets of one shape (N, ...) and storage dtype.
    """

    divisible = True
    arguments = "predictions", "targets"
    function = ""
    a, b = 1.0, 0.0

    def check(self, x: Any, target: Any) -> None:
        who = type(self).__name__
        if target.shape != x.shape:
            raise checks.bad_shape(who, "targets", f"{x.shape} like the predictions", target.shape)
        if target.dtype != x.dtype:
            remedy = f"convert them with targets.astype({str(x.dtype)!r})"
            raise checks.bad_dtype(who, "targets", f"{x.dtype} like the predictions", target.dtype, remedy)

    def evaluate(self, ops: ModuleType, x: Any, target: Any) -> tuple[Any, Any]:
        return ops.pointwise_loss(x, target, self.function, self.a, self.b), None

    def gradient(self, ops: ModuleType, x: Any, target: Any, kept: Any, totals: Any, scale: Any) -> Any:
        return ops.pointwise_loss_backward(x, target, totals, scale, self.function, self.a, self.b)

    def sums(self, totals: list[float], num_classes: int | None) -> Sums:
        return Sums(totals[0], totals[1], 0, 0)

    def count(self, target: Any, num_classes: int) -> Any:
        counted = backend.ops_of(target).from_host(np.array([0, target.size], np.float64))
        self.comm.all_reduce(counted)
        return counted

    def cost(self, shape: tuple[int, ...], itemsize: int = 4, label_itemsize: int = 4) -> Cost:
        """As `Loss.cost`, of targets like the predictions."""
        return super().cost(shape, itemsize, itemsize * prod(shape[-1:]))

    def plan(self) -> str:
        return f"{self.function} {self.a}, {self.b}"


class MSELoss(_Pointwise):
    """Mean squared error, ``(x − t)²``."""

    function = "mse"


class BCEWithLogitsLoss(_Pointwise):
    """Binary cross entropy of ``sigmoid(x)``, computed on the logits; targets in [0, 1].

    Args:
        pos_weight: factor on the positive terms, above 0.
        comm: as `Loss`.
    """

    function = "bce_with_logits"

    def __init__(self, pos_weight: float = 1.0, comm: Communicator | None = None):
        super().__init__(comm)
        self.a = checks.number(type(self).__name__, "pos_weight", pos_weight, "above 0, finite", lambda v: 0 < v < inf)


class FocalLoss(_Pointwise):
    """Binary cross entropy on logits, times ``(1 − p of the right answer)^gamma``; targets in [0, 1].

    Lin et al., "Focal loss for dense object detection", ICCV 2017.

    Args:
        alpha: weight of positive terms, in [0, 1]; 1 − alpha of the others.
        gamma: 0, or at least 1, where the gradient is bounded.
        comm: as `Loss`.
    """

    function = "focal"

    def __init__(self, alpha: float = 0.25, gamma: float = 2.0, comm: Communicator | None = None):
        super().__init__(comm)
        who = type(self).__name__
        self.a = checks.number(who, "alpha", alpha, "in [0, 1]", lambda v: 0 <= v <= 1)
        self.b = checks.number(who, "gamma", gamma, "of 0, or at least 1, finite", lambda v: v == 0 or 1 <= v < inf)
