"""Elementwise non-linearities."""

from __future__ import annotations

from math import prod
from typing import Any

from minidl.layer import Layer
from minidl.profile import Cost, PassCost

__all__ = ["ReLU"]


class ReLU(Layer):
    """``max(x, 0)``, any shape. Keeps its output, which the next layer usually keeps too: one buffer, counted once."""

    accepts_add = True

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def cost(self, shape: tuple[int, ...], itemsize: int = 4) -> Cost:
        n = prod(shape)
        return Cost(forward=PassCost(n, 2 * n * itemsize), backward_data=PassCost(n, 3 * n * itemsize))

    def compute(self, x: Any) -> Any:
        y = self.ops.relu(x)
        self.save(y=y)
        return y

    def backward_data(self, dy: Any, add: Any = None) -> Any:
        return self.ops.relu_backward(dy, self.saved().y, add=add)
