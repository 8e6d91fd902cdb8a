"""Elementwise non-linearities."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from minidl.layer import Layer
from minidl.profile import Cost, PassCost
from minidl.value import MaskedGradient, Normalized, Value, materialize

__all__ = ["ReLU"]


class ReLU(Layer):
    """``max(x, 0)``, any shape. Keeps its output, which the next layer usually keeps too: one buffer, counted once.

    Under it a batch norm, or a join of some, may be unfinished: it is then finished here, in one pass with the ReLU,
    and the mask of the gradient is left to them (`MaskedGradient`). Over a single batch norm the output is not kept.
    """

    accepts_add = True
    accepts_masked = True
    accepts_unfinished = True

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def cost(self, shape: tuple[int, ...], itemsize: int = 4) -> Cost:
        n = prod(shape)
        return Cost(forward=PassCost(n, 2 * n * itemsize), backward_data=PassCost(n, 3 * n * itemsize))

    def compute(self, x: Any) -> Any:
        if not isinstance(x, Value) or x.array is not None:
            y = self.ops.relu(x.array if isinstance(x, Value) else x)
            self.save(y=y, finished=False)
            return y
        done = materialize(self.ops, Value(origin=replace(x.origin, relu=True, owner=self.name)))
        y = done.array
        first, *others = x.origin.terms
        if not others and isinstance(first, Normalized):
            # The parameters are no activations: as a tuple they stay where they are.
            affine = (first.gamma, first.beta)
            self.save(raw=first.raw, moments=first.moments, affine=affine, finished=True)
        else:
            self.save(y=y, finished=True)
        return done if self._grad_enabled else y

    def backward_data(self, dy: Any, add: Any = None) -> Any:
        kept = self.saved()
        if isinstance(dy, MaskedGradient):
            if dy.relu == self.name and add is None:
                return dy
            dy = dy.finish(self.ops)
        if not kept.finished:
            return self.ops.relu_backward(dy, kept.y, add=add)
        if hasattr(kept, "y"):
            gradient = MaskedGradient(dy, y=kept.y)
        else:
            gradient = MaskedGradient(dy, term=Normalized(kept.raw, kept.moments, *kept.affine))
        return gradient if add is None else self.ops.add(gradient.finish(self.ops), add)
