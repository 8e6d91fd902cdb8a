"""From images to vectors."""

from __future__ import annotations

from math import prod
from typing import Any

from minidl import checks
from minidl.layer import Layer
from minidl.profile import Cost


class Flatten(Layer):
    """(N, H, W, C) → (N, H·W·C) in memory order: channels innermost, where torch, being NCHW, has them outermost."""

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) < 2:
            raise checks.bad_shape(self.name, "x", "(N, ...)", shape)
        return shape[0], prod(shape[1:])

    def cost(self, shape: tuple[int, ...], itemsize: int = 4) -> Cost:
        return Cost()

    def compute(self, x: Any) -> Any:
        self.save(shape=x.shape)
        return self.ops.contiguous(x).reshape(self.output_shape(x.shape))

    def backward_data(self, dy: Any, add: Any = None) -> Any:
        return self.ops.contiguous(dy).reshape(self.saved().shape)
