"""Dropout."""

from __future__ import annotations

from math import prod
from types import SimpleNamespace
from typing import Any

from minidl import checks
from minidl.layer import Layer
from minidl.profile import Cost, PassCost

__all__ = ["Dropout"]


class Dropout(Layer):
    """In training, sets elements to zero with probability ``p`` and scales the others by 1/(1 − p).

    After Srivastava et al. (JMLR 2014). The mask is a function of seed, step, layer name and *global* sample index,
    so it is never stored, and N ranks drop what one rank would have dropped.
    """

    def __init__(self, p: float = 0.5, *, name: str | None = None):
        super().__init__(name)
        self.p = checks.number(self.name, "p", p, "in [0, 1)", lambda v: 0 <= v < 1)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if not shape:
            raise checks.bad_shape(self.name, "x", "(N, ...)", shape)
        return shape

    def cost(self, shape: tuple[int, ...], itemsize: int = 4) -> Cost:
        """As in `Layer.cost`, in the present mode: nothing in evaluation. The mask is not stored."""
        if not self.training or self.p == 0:
            return Cost()
        both = PassCost(prod(shape), 2 * prod(shape) * itemsize)
        return Cost(forward=both, backward_data=both)

    def compute(self, x: Any) -> Any:
        if not self.training or self.p == 0:
            self.save(key=None)
            return x
        key = self.random.key(self.ops)
        self.save(key=key)
        return self.ops.dropout(x, self.p, key, self.stream)

    def recompute(self, saved: SimpleNamespace, x: Any) -> Any:
        return x if saved.key is None else self.ops.dropout(x, self.p, saved.key, self.stream)

    def backward_data(self, dy: Any, add: Any = None) -> Any:
        key = self.saved().key
        return dy if key is None else self.ops.dropout(dy, self.p, key, self.stream)

    def describe(self) -> str:
        return f"{self.p}"
