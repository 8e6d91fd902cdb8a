"""What normalisations share: eps, a learned scale and shift of each channel, and where their gradients go."""

from __future__ import annotations

from math import inf
from typing import Any

from minidl import checks
from minidl.initializers import Initializer, ones, zeros
from minidl.layer import Layer


class AffineNorm(Layer):
    """``(x − mean) / sqrt(variance + eps)·weight + bias``, however the moments are taken."""

    accepts_add = True

    def __init__(self, channels: int, eps: float, affine: bool, name: str | None, weight_init: Initializer = ones):
        super().__init__(name)
        self.eps = checks.number(self.name, "eps", eps, "above 0, finite", lambda v: 0 < v < inf)
        self.affine = bool(affine)
        if affine:
            self.declare("weight", (channels,), weight_init, product=False)
            self.declare("bias", (channels,), zeros, product=False)

    def _images_or_vectors(self, shape: tuple[int, ...], channels: int) -> tuple[int, ...]:
        """``shape``, (N, H, W, C) or (N, C) with so many channels."""
        if len(shape) != 2:
            return self.require_image(shape, channels)
        if shape[1] != channels:
            raise checks.bad_shape(self.name, "x", f"(N, {channels})", shape)
        return shape

    def _options(self, affine: str = "affine", **more: tuple[Any, Any]) -> str:
        """What is not as usual, for `describe`; ``affine``: the name of that argument."""
        return checks.options(eps=(self.eps, 1e-5), **more, **{affine: (self.affine, True)})

    @property
    def _affine(self) -> tuple[Any, Any]:
        return self.params.get("weight"), self.params.get("bias")

    def _gradients(self) -> dict[str, Any]:
        """Where the parameter gradients go, as the operations take it."""
        weight, bias = self.grad("weight"), self.grad("bias")
        return {
            "dgamma": weight.view if weight else None,
            "dbeta": bias.view if bias else None,
            "accumulate": any(not g.first for g in (weight, bias) if g is not None),
        }
