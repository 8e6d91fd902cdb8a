"""Fully connected layer."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from minidl import checks
from minidl.dist.communicator import Work
from minidl.initializers import Initializer, kaiming_uniform, uniform_fan_in
from minidl.layer import Layer
from minidl.messages import factors
from minidl.profile import Cost, PassCost

TILE_BYTES = 64 << 20
"""A gradient beyond this is made in tiles of at most so much, so that a ring of gradients need not hold all of it."""

_ROWS = 128  # of a tile are a multiple of this, as kernels multiply
_POINT = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}


class Linear(Layer):
    """``y = x·weightᵀ + bias`` for vectors: a 1×1 convolution of one-pixel images, and computed as one.

    Args:
        in_features, out_features, bias: as in torch.nn.
        weight_init, bias_init: starting weights and biases; default as in torch.nn.

    Shapes:
        x (N, in_features) → (N, out_features); weight (out_features, in_features), bias (out_features,).

    On several GPUs, where a batch is small beside the weights, the rows of x and dy travel in the place of the gradient
    that is their product, and each rank computes the sum over all (`minidl.messages.factors`).
    """

    accepts_add = True
    factored = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        name: str | None = None,
    ):
        super().__init__(name)
        self.in_features = checks.at_least(self.name, "in_features", in_features, 1)
        self.out_features = checks.at_least(self.name, "out_features", out_features, 1)
        rows = max(TILE_BYTES // (4 * in_features) // _ROWS, 1) * _ROWS
        shape, rows = (out_features, in_features), rows if rows < out_features else 0
        begin = kaiming_uniform() if weight_init is None else weight_init
        self.declare("weight", shape, begin, product=True, rows=rows)
        if bias:
            fan_in = uniform_fan_in(in_features)
            self.declare("bias", (out_features,), fan_in if bias_init is None else bias_init, product=False)

    @property
    def biased(self) -> bool:
        """Whether it has a bias."""
        return any(spec.name == "bias" for spec in self.specs)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) != 2 or shape[1] != self.in_features:
            remedy = "put a Flatten() before it" if len(shape) > 2 else None
            raise checks.bad_shape(self.name, "x", f"(N, {self.in_features})", shape, remedy)
        return shape[0], self.out_features

    def cost(self, shape: tuple[int, ...], itemsize: int = 4) -> Cost:
        n, x, y = shape[0], shape[0] * self.in_features, shape[0] * self.out_features
        w = self.in_features * self.out_features
        product = PassCost(2 * n * w, (x + w + y) * itemsize)
        bias = PassCost(y, 4 * self.out_features) if self.biased else PassCost()
        return Cost(product + bias, product, PassCost(2 * n * w, (x + y) * itemsize + 4 * w) + bias)

    def compute(self, x: Any) -> Any:
        self.save(x=x)
        y = self.ops.conv2d(_image(x), _image(self.params["weight"]), self.params.get("bias"), **_POINT, tf32=self.tf32)
        return y.reshape(x.shape[0], self.out_features)

    def send_factors(self, dy: Any) -> Work | None:
        rows = self.params.shares(dy.shape[0]) if self.params else None
        if rows is None:
            return None
        ends, width = [0, *accumulate(rows)], self.in_features + self.out_features
        both = self.ops.empty((ends[-1], factors.pitch(self.in_features, self.out_features)), dy.dtype)
        own = both[ends[self.comm.rank] : ends[self.comm.rank + 1]]
        self.ops.copy_into(own[:, : self.in_features], self.saved().x)
        self.ops.copy_into(own[:, self.in_features : width], dy)
        self.recall(SimpleNamespace(x=both[:, : self.in_features], dy=both[:, self.in_features : width]))
        span = partial(self.profiler.span, self.name, "all_reduce")
        cuts = [end * both.shape[1] for end in ends]
        return self.comm.start_all_gather(both.reshape(-1), cuts, span, self.name)

    def backward_weight(self, dy: Any) -> None:
        rows = self.specs[0].rows or self.out_features
        for begin in range(0, self.out_features, rows):
            self.backward_weight_tile(dy, slice(begin, min(begin + rows, self.out_features)))

    def backward_weight_tile(self, dy: Any, rows: slice) -> None:
        saved = self.saved()
        dy = getattr(saved, "dy", dy)  # of all ranks, as x, where factors were sent
        if (weight := self.grad("weight", rows)) is not None:
            self.ops.conv2d_backward_weight(
                _image(dy[:, rows]), _image(saved.x), **_POINT,
                out=_image(weight.view), accumulate=not weight.first, tf32=self.tf32,
            )  # fmt: skip
        if rows.stop == self.out_features and (bias := self.grad("bias")) is not None:
            self.ops.channel_sum(dy, out=bias.view, accumulate=not bias.first)

    def backward_data(self, dy: Any, add: Any = None) -> Any:
        n = dy.shape[0]
        dx = self.ops.conv2d_backward_data(
            _image(dy), _image(self.params["weight"]), (n, 1, 1, self.in_features), **_POINT,
            add=None if add is None else _image(add), tf32=self.tf32,
        )  # fmt: skip
        return dx.reshape(n, self.in_features)

    def describe(self) -> str:
        return f"{self.in_features}, {self.out_features}" + checks.options(bias=(self.biased, True))


def _image(matrix: Any) -> Any:
    """(rows, columns) as one-pixel images (rows, 1, 1, columns); a view, also of a pitched matrix."""
    return matrix[:, None, None, :]
