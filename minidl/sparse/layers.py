"""Layers whose weight lives in Compressed Sparse Blocks: linear, and 1×1 convolution.

The pattern is fixed when the layer is made. The parameter is the vector of values, so gradients, messages between
ranks, momentum and checkpoints hold the elements of the pattern and nothing else.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from minidl import checks
from minidl.initializers import Initializer, uniform_fan_in
from minidl.layer import Layer
from minidl.precision import float32
from minidl.profile import Cost, PassCost
from minidl.shapes import Pair, ceil_div
from minidl.sparse.csb import CSBMatrix
from minidl.sparse.pattern import CSBPattern

__all__ = ["CSBConv2d", "CSBLinear"]


class _CSBLayer(Layer):
    """What both layers share: rows of features times a sparse weight, and the two gradients."""

    def __init__(
        self, pattern: CSBPattern, bias: bool, weight_init: Initializer | None, bias_init: Initializer | None,
        name: str | None,
    ):  # fmt: skip
        super().__init__(name)
        if not isinstance(pattern, CSBPattern):
            remedy = "from_dense makes the layer from a weight with zeros"
            raise checks.bad_dtype(self.name, "pattern", "a CSBPattern", checks.describe(pattern), remedy)
        if 0 in pattern.shape:
            raise checks.bad_shape(self.name, "pattern", "(out, in), both at least 1", pattern.shape)
        self.pattern = pattern
        fan_in = uniform_fan_in(round(pattern.nnz / pattern.shape[0]))  # of an average output
        self.declare("weight", (pattern.nnz,), weight_init or fan_in, product=True)
        if bias:
            self.declare("bias", (pattern.shape[0],), bias_init or fan_in, product=False)

    @staticmethod
    def _parts(dense: Any, bias: Any, blocksize: int | None, mask: Any) -> tuple[CSBPattern, dict[str, Any]]:
        """The pattern of a dense float32 (out, in) weight, and the arguments that start a layer with its values."""
        matrix = CSBMatrix.from_dense(np.asarray(dense, float32), blocksize, mask=mask)
        values = matrix.data
        start = {"weight_init": lambda rng, shape: values, "bias": bias is not None}
        if bias is not None:
            shift = np.array(bias, float32)
            if shift.shape != matrix.shape[:1]:
                raise checks.bad_shape("from_dense", "bias", str(matrix.shape[:1]), shift.shape)
            start["bias_init"] = lambda rng, shape: shift
        return matrix.pattern, start

    @property
    def _biased(self) -> bool:
        return len(self.specs) == 2

    @property
    def matrix(self) -> CSBMatrix:
        """The weight (out, in) as it stands, sharing the values."""
        self._require_state()
        return CSBMatrix(self.pattern, self.params["weight"])

    @property
    def _where(self) -> tuple[Any, ...]:
        return self.pattern.shape, self.pattern.side

    def _cost(self, samples: int, itemsize: int) -> Cost:
        """Of ``samples`` rows: the pattern's elements count, its zeros do not; indices are bytes, too."""
        out, into = self.pattern.shape
        weight = self.pattern.nnz * itemsize + self.pattern.nbytes
        flop = 2 * samples * self.pattern.nnz
        product = PassCost(flop, samples * (out + into) * itemsize + weight)
        bias = PassCost(samples * out, 4 * out) if self._biased else PassCost()
        gradient = samples * (out + into) * itemsize + 4 * self.pattern.nnz + self.pattern.nbytes
        return Cost(product + bias, product, PassCost(flop, gradient) + bias)

    def _forward(self, x: Any) -> Any:
        """(rows, in) -> (rows, out)."""
        return self.ops.csb_matmul(
            *self.pattern.on(self.ops), self.params["weight"], x, *self._where, features_last=True,
            bias=self.params.get("bias"), tf32x3=self.tf32,
        )  # fmt: skip

    def _backward_weight(self, dy: Any, x: Any) -> None:
        """Gradients from rows (rows, out) and (rows, in)."""
        if (weight := self.grad("weight")) is not None:
            self.ops.csb_sampled(
                *self.pattern.on(self.ops), dy, x, *self._where, features_last=True, out=weight.view,
                accumulate=not weight.first,
            )  # fmt: skip
        if (bias := self.grad("bias")) is not None:
            self.ops.channel_sum(dy, out=bias.view, accumulate=not bias.first)

    def _backward_data(self, dy: Any) -> Any:
        """(rows, out) -> (rows, in)."""
        return self.ops.csb_matmul(
            *self.pattern.on(self.ops), self.params["weight"], dy, *self._where, transposed=True, features_last=True,
            tf32x3=self.tf32,
        )  # fmt: skip

    def describe(self) -> str:
        """The fingerprint is there so that ranks which disagree about the pattern find out."""
        out, into = self.pattern.shape
        text = f"{into}, {out}, elements={self.pattern.nnz}, pattern={self.pattern.fingerprint:#010x}"
        return text + ("" if self._biased else ", bias=False")


class CSBLinear(_CSBLayer):
    """``y = x·weightᵀ + bias`` with a sparse weight (out_features, in_features).

    Args:
        pattern: where the weight has elements.
        bias: add a learned vector of out_features elements.
        weight_init: of the (nnz,) values in the pattern's order; default: torch.nn's rule with the mean fan-in.

    Shapes:
        x (N, in_features) → (N, out_features); parameters weight (nnz,), bias (out_features,).

    Raises:
        TypeError: a pattern that is none.
        ValueError: an empty one; an x of another shape.
    """

    def __init__(
        self, pattern: CSBPattern, bias: bool = True, *, weight_init: Initializer | None = None,
        bias_init: Initializer | None = None, name: str | None = None,
    ):  # fmt: skip
        super().__init__(pattern, bias, weight_init, bias_init, name)
        self.out_features, self.in_features = pattern.shape

    @classmethod
    def from_dense(
        cls, weight: Any, bias: Any = None, *, mask: Any = None, blocksize: int | None = None, name: str | None = None
    ) -> CSBLinear:
        """A layer that starts with a dense weight (out, in): its nonzeros, or the elements where ``mask`` is true."""
        pattern, start = cls._parts(weight, bias, blocksize, mask)
        return cls(pattern, name=name, **start)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) != 2 or shape[1] != self.in_features:
            remedy = "put a Flatten() before it" if len(shape) > 2 else None
            raise checks.bad_shape(self.name, "x", f"(N, {self.in_features})", shape, remedy)
        return shape[0], self.out_features

    def cost(self, shape: tuple[int, ...], itemsize: int = 4) -> Cost:
        return self._cost(shape[0], itemsize)

    def compute(self, x: Any) -> Any:
        self.save(x=x)
        return self._forward(x)

    def backward_weight(self, dy: Any) -> None:
        self._backward_weight(dy, self.saved().x)

    def backward_data(self, dy: Any, add: Any = None) -> Any:
        assert add is None, "not declared in accepts_add"
        return self._backward_data(dy)


class CSBConv2d(_CSBLayer):
    """1×1 convolution of NHWC images with a sparse filter: each pixel is a row of a product.

    Args:
        pattern: of the filter as a matrix (out_channels, in_channels).
        bias, weight_init: as in `CSBLinear`.
        stride: an integer or (height, width).

    Shapes:
        x (N, H, W, C) → (N, (H − 1) // stride + 1, (W − 1) // stride + 1, K); weight (nnz,), bias (K,).

    Raises:
        TypeError, ValueError: as `CSBLinear`; a bad stride.
    """

    def __init__(
        self, pattern: CSBPattern, bias: bool = True, *, stride: int | Pair = 1, weight_init: Initializer | None = None,
        bias_init: Initializer | None = None, name: str | None = None,
    ):  # fmt: skip
        super().__init__(pattern, bias, weight_init, bias_init, name)
        self.out_channels, self.in_channels = pattern.shape
        self.stride = checks.positive_pair(self.name, "stride", stride)

    @classmethod
    def from_dense(
        cls, weight: Any, bias: Any = None, *, stride: int | Pair = 1, mask: Any = None, blocksize: int | None = None,
        name: str | None = None,
    ) -> CSBConv2d:  # fmt: skip
        """A layer that starts with a dense filter (K, 1, 1, C); ``mask`` in its shape, as in `CSBLinear.from_dense`."""
        if weight.ndim != 4 or weight.shape[1:3] != (1, 1):
            raise checks.bad_shape("CSBConv2d", "weight", "(K, 1, 1, C)", weight.shape, "larger filters stay dense")
        flat = weight.shape[0], weight.shape[3]
        pattern, start = cls._parts(
            weight.reshape(flat), bias, blocksize, None if mask is None else np.asarray(mask).reshape(flat)
        )
        return cls(pattern, stride=stride, name=name, **start)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        n, h, w, _ = self._image(shape, self.in_channels)
        p, q = self._fitting(shape, (ceil_div(h, self.stride[0]), ceil_div(w, self.stride[1])))
        return n, p, q, self.out_channels

    def cost(self, shape: tuple[int, ...], itemsize: int = 4) -> Cost:
        pixels = prod(self.output_shape(shape)[:3])
        cost = self._cost(pixels, itemsize)
        unread = (prod(shape) - pixels * self.in_channels) * itemsize  # of the input gradient: written whole
        return Cost(cost.forward, cost.backward_data + PassCost(0, unread), cost.backward_weight)

    def _rows(self, x: Any) -> Any:
        """The pixels that the stride meets, as rows: a view where it meets all."""
        if self.stride != (1, 1):
            x = self.ops.contiguous(x[:, :: self.stride[0], :: self.stride[1]])
        return x.reshape(prod(x.shape[:3]), x.shape[3])

    def compute(self, x: Any) -> Any:
        self.save(x=x)
        return self._forward(self._rows(x)).reshape(self.output_shape(x.shape))

    def backward_weight(self, dy: Any) -> None:
        self._backward_weight(dy.reshape(prod(dy.shape[:3]), dy.shape[3]), self._rows(self.saved().x))

    def backward_data(self, dy: Any, add: Any = None) -> Any:
        assert add is None, "not declared in accepts_add"
        shape = self.saved().x.shape
        part = self._backward_data(dy.reshape(prod(dy.shape[:3]), dy.shape[3]))
        if self.stride == (1, 1):
            return part.reshape(shape)
        dx = self.ops.zeros(shape, dy.dtype)
        dx[:, :: self.stride[0], :: self.stride[1]] = part.reshape(*dy.shape[:3], shape[3])
        return dx

    def describe(self) -> str:
        return super().describe() + (f", stride={self.stride}" if self.stride != (1, 1) else "")
