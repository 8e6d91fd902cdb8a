"""Normalisation within a sample, the same in training and evaluation: group norm and layer norm."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from minidl import checks
from minidl.initializers import Initializer, ones
from minidl.layers.affine_norm import AffineNorm
from minidl.profile import Cost, PassCost


class GroupNorm(AffineNorm):
    """Normalises groups of neighbouring channels of every image (Wu and He, "Group Normalization", ECCV 2018).

    Args:
        num_groups: divides ``num_channels``; 1 normalises whole images, ``num_channels`` is instance norm.
        eps: added to the variance.
        affine: with weight and bias (C,).
        weight_init: starting scales; default: ones.

    Shapes:
        x (N, H, W, C) or (N, C), unchanged.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        *,
        weight_init: Initializer = ones,
        name: str | None = None,
    ):
        super().__init__(num_channels, eps, affine, name, weight_init)
        self.num_groups = checks.at_least(self.name, "num_groups", num_groups, 1)
        self.num_channels = checks.at_least(self.name, "num_channels", num_channels, 1)
        if num_channels % num_groups:
            expected = f"a multiple of num_groups ({num_groups})"
            raise checks.bad_value(self.name, "num_channels", expected, num_channels)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return self._images_or_vectors(shape, self.num_channels)

    def cost(self, shape: tuple[int, ...], itemsize: int = 4) -> Cost:
        """As in `Layer.cost`. Per element, as in a batch norm: mean 1, squared deviations 3, normalising 3 (2 if not
        affine); ``Σ dy`` 1, ``Σ dy·(x − mean)`` 3; ``slope·(dy − a − (x − mean)·b)`` 5."""
        n, x, vector = prod(shape), prod(shape) * itemsize, 4 * self.num_channels
        moments = 8 * shape[0] * self.num_groups
        affine = self.affine
        return Cost(
            forward=PassCost((7 if affine else 6) * n, 3 * x + moments + 2 * vector * affine),
            backward_data=PassCost(5 * n, 3 * x + 2 * moments + vector * affine),
            backward_weight=PassCost(4 * n, 2 * x + 2 * moments + 3 * vector * affine),
        )

    def compute(self, x: Any) -> Any:
        moments = self.ops.group_norm_stats(x, self.num_groups, eps=self.eps)
        self.save(x=x, moments=moments)
        return self.ops.group_norm_apply(x, moments, *self._affine)

    def backward_weight(self, dy: Any) -> None:
        kept = self.saved()
        kept.sums = self.ops.group_norm_backward_stats(dy, kept.x, kept.moments, self._affine[0], **self._gradients())

    def backward_data(self, dy: Any, add: Any = None) -> Any:
        kept = self.saved()
        return self.ops.group_norm_backward_apply(dy, kept.x, kept.moments, self._affine[0], kept.sums, add=add)

    def describe(self) -> str:
        return f"{self.num_groups}, {self.num_channels}{self._options()}"


class LayerNorm(AffineNorm):
    """Normalises the channels of every pixel or vector (Ba, Kiros and Hinton, "Layer Normalization", 2016).

    Args:
        normalized_shape: the channels C, the last axis; or a sequence of just that. Whole images: `GroupNorm(1, C)`.
        eps: added to the variance.
        elementwise_affine: with weight and bias (C,).
        weight_init: starting scales; default: ones.

    Shapes:
        x (N, ..., C), unchanged.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        *,
        weight_init: Initializer = ones,
        name: str | None = None,
    ):
        if isinstance(normalized_shape, Sequence):
            if len(normalized_shape) != 1:
                remedy = "GroupNorm(1, C) normalises whole images"
                raise checks.bad_value(
                    name or "layernorm", "normalized_shape", "the channels", normalized_shape, remedy
                )
            normalized_shape = normalized_shape[0]
        super().__init__(normalized_shape, eps, elementwise_affine, name, weight_init)
        self.normalized_shape = checks.at_least(self.name, "normalized_shape", normalized_shape, 1)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) < 2 or shape[-1] != self.normalized_shape:
            raise checks.bad_shape(self.name, "x", f"(N, ..., {self.normalized_shape})", shape)
        return shape

    def cost(self, shape: tuple[int, ...], itemsize: int = 4) -> Cost:
        """As in `Layer.cost`; a row is read once. Per element: mean 1, squared deviations 3, ``(x − mean)·rstd`` 2,
        ``·weight + bias`` 2; ``Σ dy`` 1, ``Σ dy·xhat`` 4; ``g = dy·weight`` 1, xhat 2, ``Σ g`` 1, ``Σ g·xhat`` 2,
        ``(g − a − xhat·b)·rstd`` 4."""
        n, x, vector = prod(shape), prod(shape) * itemsize, 4 * self.normalized_shape
        moments, affine = 8 * prod(shape[:-1]), self.affine
        weight = PassCost(5 * n, 2 * x + moments + 2 * vector) if affine else PassCost()
        return Cost(
            forward=PassCost((8 if affine else 6) * n, 2 * x + moments + 2 * vector * affine),
            backward_data=PassCost((10 if affine else 9) * n, 3 * x + moments + vector * affine),
            backward_weight=weight,
        )

    def compute(self, x: Any) -> Any:
        y, moments = self.ops.layer_norm(x, *self._affine, eps=self.eps)
        self.save(x=x, moments=moments)
        return y

    def backward_weight(self, dy: Any) -> None:
        gradients = self._gradients()
        if gradients["dgamma"] is not None or gradients["dbeta"] is not None:
            kept = self.saved()
            self.ops.layer_norm_backward_weight(dy, kept.x, kept.moments, **gradients)

    def backward_data(self, dy: Any, add: Any = None) -> Any:
        kept = self.saved()
        return self.ops.layer_norm_backward_data(dy, kept.x, kept.moments, self._affine[0], add=add)

    def describe(self) -> str:
        return f"{self.normalized_shape}{self._options('elementwise_affine')}"
