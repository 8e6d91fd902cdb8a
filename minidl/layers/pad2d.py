"""Padding and cropping."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from minidl import checks
from minidl.layer import Layer
from minidl.profile import Cost, PassCost


class Pad(Layer):
    """Pads images with a constant, or crops them where the padding is negative.

    Args:
        padding: one integer for all sides or (left, right, top, bottom), torch.nn.functional.pad's order.
        value: what to pad with.

    Shapes:
        x (N, H, W, C) → (N, H + top + bottom, W + left + right, C).
    """

    def __init__(self, padding: int | Sequence[int], value: float = 0.0, *, name: str | None = None):
        super().__init__(name)
        whole = hasattr(padding, "__index__")
        sides = (padding,) * 4 if whole else tuple(padding) if isinstance(padding, Sequence) else ()
        if len(sides) != 4 or not all(hasattr(side, "__index__") for side in sides):
            raise checks.bad_value(self.name, "padding", "an integer or (left, right, top, bottom)", padding)
        self.padding = tuple(int(side) for side in sides)
        self.value = checks.number(self.name, "value", value, "to pad with", lambda v: True)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        n, h, w, c = self.require_image(shape)
        left, right, top, bottom = self.padding
        h, w = h + top + bottom, w + left + right
        if min(h, w) < 1:
            raise checks.bad_shape(self.name, "x", f"images larger than the cropping {self.padding}", shape)
        return n, h, w, c

    def cost(self, shape: tuple[int, ...], itemsize: int = 4) -> Cost:
        left, right, top, bottom = (min(side, 0) for side in self.padding)
        n, h, w, c = shape
        kept = n * max(h + top + bottom, 0) * max(w + left + right, 0) * c
        return Cost(
            forward=PassCost(0, (kept + prod(self.output_shape(shape))) * itemsize),
            backward_data=PassCost(0, (kept + prod(shape)) * itemsize),
        )

    def compute(self, x: Any) -> Any:
        return self.ops.pad2d(x, self.padding, self.value)

    def backward_data(self, dy: Any, add: Any = None) -> Any:
        return self.ops.pad2d(dy, tuple(-side for side in self.padding))

    def describe(self) -> str:
        return f"{self.padding}" + checks.options(value=(self.value, 0.0))
