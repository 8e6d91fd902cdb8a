"""Resizing of images."""

from __future__ import annotations

from math import prod
from numbers import Real
from typing import Any

from minidl import checks
from minidl.layer import Layer
from minidl.profile import Cost, PassCost
from minidl.shapes import Pair, resize_axis

_MODES = ("nearest", "bilinear")


class Upsample(Layer):
    """Resizes images to ``size``, or by ``scale_factor``, rounding down.

    Positions follow from the two sizes, as in torch.nn.functional.interpolate with ``recompute_scale_factor=True``.

    Args:
        size: (height, width) of the output.
        scale_factor: a positive number or a pair (height, width), in place of ``size``.
        mode: "nearest" or "bilinear". Shrinking images averages nothing: use pooling.
        align_corners: of "bilinear": keep the centres of the corner pixels instead of the image's edges.

    Shapes:
        x (N, H, W, C) → (N, P, Q, C).
    """

    def __init__(
        self,
        size: int | Pair | None = None,
        scale_factor: float | tuple[float, float] | None = None,
        mode: str = "nearest",
        align_corners: bool = False,
        *,
        name: str | None = None,
    ):
        super().__init__(name)
        if (size is None) == (scale_factor is None):
            raise checks.bad_value(self.name, "size", "given, or scale_factor, not both", (size, scale_factor))
        if mode not in _MODES:
            raise checks.unknown("mode of Upsample", mode, _MODES)
        if align_corners and mode == "nearest":
            raise checks.bad_value(self.name, "align_corners", "False in mode 'nearest'", align_corners)
        self.size = None if size is None else checks.positive_pair(self.name, "size", size)
        factors = (scale_factor, scale_factor) if isinstance(scale_factor, Real) else tuple(scale_factor or ())
        if self.size is None and len(factors) != 2:
            raise checks.bad_value(self.name, "scale_factor", "a number or a pair (height, width)", scale_factor)
        positive = lambda v: 0 < v < float("inf")  # noqa: E731
        self.scale = tuple(checks.number(self.name, "scale_factor", f, "above 0, finite", positive) for f in factors)
        self.mode, self.align_corners = mode, bool(align_corners)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        n, h, w, c = self.require_image(shape)
        self.require_output(shape, (h, w))
        size = self.size or (int(h * self.scale[0]), int(w * self.scale[1]))
        return n, *self.require_output(shape, size), c

    def cost(self, shape: tuple[int, ...], itemsize: int = 4) -> Cost:
        """As in `Layer.cost`: four products and sums for each bilinear output, both ways; nearest, one sum backward."""
        out = self.output_shape(shape)
        x, y = prod(shape), prod(out)
        read = shape[0] * shape[3] * prod(self._read(i, o) for i, o in zip(shape[1:3], out[1:3], strict=True))
        bilinear = self.mode == "bilinear"
        forward = PassCost(8 * y if bilinear else 0, (read + y) * itemsize)
        return Cost(forward=forward, backward_data=PassCost(8 * y if bilinear else y, (x + y) * itemsize))

    def _read(self, size: int, out: int) -> int:
        """Positions of an axis that any output reads."""
        a, b, d, *_, bilinear = resize_axis(size, out, self.mode, self.align_corners)
        lows = {max(a * o + b, 0) // d for o in range(out)}
        return len(lows | ({min(low + 1, size - 1) for low in lows} if bilinear else set()))

    def compute(self, x: Any) -> Any:
        self.save(shape=x.shape)
        return self.ops.upsample2d(x, self.output_shape(x.shape)[1:3], self.mode, self.align_corners)

    def backward_data(self, dy: Any, add: Any = None) -> Any:
        return self.ops.upsample2d_backward(dy, self.saved().shape, self.mode, self.align_corners)

    def describe(self) -> str:
        target = f"size={self.size}" if self.size else f"scale_factor={self.scale}"
        return f"{target}, mode={self.mode!r}" + (", align_corners=True" if self.align_corners else "")
