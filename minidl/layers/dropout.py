"""Dropout of elements, and of whole samples."""

from __future__ import annotations

from math import prod
from types import SimpleNamespace
from typing import Any

from minidl import checks
from minidl.layer import Layer
from minidl.profile import Cost, PassCost


class Dropout(Layer):
    """In training, sets elements to zero with probability ``p`` and scales the others by 1/(1 − p).

    After Srivastava et al. (JMLR 2014). The mask is a function of seed, step, layer name and *global* sample index,
    so it is never stored, and N ranks drop what one rank would have dropped.

    Args:
        p: in [0, 1).

    Shapes:
        x (N, ...), unchanged.
    """

    whole = False  # whether a sample is kept or dropped as one

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
        return self._drop(x, key)

    def recompute(self, saved: SimpleNamespace, x: Any) -> Any:
        return x if saved.key is None else self._drop(x, saved.key)

    def backward_data(self, dy: Any, add: Any = None) -> Any:
        key = self.saved().key
        return dy if key is None else self._drop(dy, key)

    def _drop(self, x: Any, key: Any) -> Any:
        return self.ops.dropout(x, self.p, key, self.stream, whole=self.whole)

    def describe(self) -> str:
        return f"{self.p}"


class StochasticDepth(Dropout):
    """In training, sets whole samples to zero with probability ``p`` and scales the others by 1/(1 − p).

    On the branch of a residual block, whose sample then skips it: Huang et al., "Deep networks with stochastic depth",
    ECCV 2016. As torchvision's with ``mode="row"``; drawn as in `Dropout`.

    Args:
        p: in [0, 1).

    Shapes:
        x (N, ...), unchanged.
    """

    whole = True

    def __init__(self, p: float, *, name: str | None = None):
        super().__init__(p, name=name)
