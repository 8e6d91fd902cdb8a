"""Pooling."""

from __future__ import annotations

from math import prod
from typing import Any

from minidl import checks
from minidl.graph import Graph
from minidl.layer import Layer
from minidl.layers.activation import ReLU
from minidl.profile import Cost, PassCost
from minidl.profile.cost import covered
from minidl.shapes import Pair, ceil_div, pool_output_size
from minidl.value import (
    GatedGradient,
    MaskedGradient,
    Normalized,
    Origin,
    PooledGradient,
    TiledGradient,
    Value,
    activated,
    finished,
    materialize,
    owed,
)

MOST_PIXELS = 4  # of windows that a batch norm's kernels pool on the way


class _Pool(Layer):
    """Windows of ``kernel_size`` every ``stride`` pixels (default: the kernel size) of the padded image."""

    def __init__(
        self,
        kernel_size: int | Pair,
        stride: int | Pair | None,
        padding: int | Pair,
        dilation: int | Pair,
        ceil_mode: bool,
        name: str | None,
    ):
        super().__init__(name)
        self.kernel_size = checks.positive_pair(self.name, "kernel_size", kernel_size)
        self.stride = checks.positive_pair(self.name, "stride", kernel_size if stride is None else stride)
        self.padding = checks.positive_pair(self.name, "padding", padding, least=0)
        self.dilation = checks.positive_pair(self.name, "dilation", dilation)
        self.ceil_mode = ceil_mode
        if any(2 * p > k for p, k in zip(self.padding, self.kernel_size, strict=True)):
            raise checks.bad_value(self.name, "padding", f"at most half the kernel {self.kernel_size}", padding)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        n, h, w, c = self.require_image(shape)
        sizes = zip((h, w), self.kernel_size, self.stride, self.padding, self.dilation, strict=True)
        p, q = self.require_output(shape, tuple(pool_output_size(*axis, self.ceil_mode) for axis in sizes))
        return n, p, q, c

    def _read(self, shape: tuple[int, ...]) -> int:
        """Elements of an input of ``shape`` that lie in any window."""
        out = self.output_shape(shape)[1:3]
        axes = (self.kernel_size, self.stride, self.padding, self.dilation)
        return shape[0] * shape[3] * covered(shape[1:3], out, *axes)

    def describe(self) -> str:
        return f"{self.kernel_size}, stride={self.stride}, padding={self.padding}" + checks.options(
            dilation=(self.dilation, (1, 1)), ceil_mode=(self.ceil_mode, False)
        )


class MaxPool2d(_Pool):
    """The largest element of each window; padding counts as −∞, NaN wins.

    Args:
        kernel_size, stride, padding, dilation: an integer or (height, width).
        ceil_mode: keep a last window that is only partly inside.

    Shapes:
        x (N, H, W, C) → (N, P, Q, C).
    """

    accepts_add = True
    accepts_masked = True
    accepts_unfinished = True  # a ReLU over a batch norm; and to know that there is a ReLU below
    masks = False  # a fusion plan's mode: mask the gradient for the ReLU below while it is small, if nobody did
    beside = False  # other readers of a ReLU that pools for it (`pool_beside`)
    modes = ("training", "masks")

    def __init__(
        self,
        kernel_size: int | Pair,
        stride: int | Pair | None = None,
        padding: int | Pair = 0,
        dilation: int | Pair = 1,
        ceil_mode: bool = False,
        *,
        name: str | None = None,
    ):
        super().__init__(kernel_size, stride, padding, dilation, ceil_mode, name)

    @property
    def _window(self) -> dict[str, Pair]:
        return {
            "kernel": self.kernel_size, "stride": self.stride, "padding": self.padding, "dilation": self.dilation,
        }  # fmt: skip

    @property
    def _apart(self) -> bool:
        """Whether no pixel lies in two windows."""
        return self.dilation == (1, 1) and all(s >= k for s, k in zip(self.stride, self.kernel_size, strict=True))

    @property
    def small_tiles(self) -> bool:
        """Whether windows lie side by side, few enough pixels in each for a thread to hold."""
        apart = self.stride == self.kernel_size and self.padding == (0, 0) and self.dilation == (1, 1)
        return apart and prod(self.kernel_size) <= MOST_PIXELS

    def cost(self, shape: tuple[int, ...], itemsize: int = 4) -> Cost:
        # A comparison per tap, one addition per maximum; where each maximum was is kept in one byte or two.
        x, y, window = prod(shape), prod(self.output_shape(shape)), prod(self.kernel_size)
        index = y * (1 if window <= 256 else 2)
        return Cost(
            forward=PassCost(y * window, (self._read(shape) + y) * itemsize + index),
            backward_data=PassCost(y, (y + x) * itemsize + index),
        )

    def compute(self, x: Any) -> Any:
        options = {**self._window, "ceil_mode": self.ceil_mode}
        if isinstance(x, Value):
            if x.pooled is not None and self.beside:
                (term,) = x.origin.terms
                affine = (term.gamma, term.beta)  # no activations: as a tuple they stay where they are
                self.save(raw=term.raw, moments=term.moments, affine=affine)
                return x.pooled
            if (term := owed(x)) is not None:
                y, index, largest = self.ops.batch_norm_max_pool2d(
                    term.raw, term.moments, term.gamma, term.beta, **options
                )
                self.save(index=index, shape=x.shape, y=y, largest=largest)
                # What it is of the largest: for who has the last of its gradients, to mask and sum that (`masked`).
                below = Normalized(largest, term.moments, term.gamma, term.beta, term.owner)
                return Value(y, origin=Origin((below,), relu=True, owner=self.name)) if self.keeps else y
            x = materialize(self.ops, x)
        relu = x.origin.owner if self.masks and isinstance(x, Value) and x.origin and x.origin.relu else ""
        x = x.array if isinstance(x, Value) else x
        y, index = self.ops.max_pool2d(x, **options)
        if not relu:
            self.save(index=index, shape=x.shape)
            return y
        self.save(index=index, shape=x.shape, relu=relu, y=y)
        return Value(y, origin=Origin((), relu=True, owner=relu))  # the largest of a ReLU's outputs is one

    def backward_data(self, dy: Any, add: Any = None) -> Any:
        kept = self.saved()
        if hasattr(kept, "relu") and add is None:
            if not (isinstance(dy, MaskedGradient) and dy.relu == kept.relu):
                dy = MaskedGradient.masked(self.ops.relu_backward(finished(self.ops, dy), kept.y), kept.relu)
            dx = self.ops.max_pool2d_backward(dy.array, kept.index, kept.shape, **self._window)
            # Where windows overlap, what is stored are rounded sums: theirs are others.
            return MaskedGradient.masked(dx, kept.relu, parts=dy.parts if self._apart else None)
        masked = dy if isinstance(dy, MaskedGradient) and dy.norm and dy.relu == self.name else None
        dy = finished(self.ops, dy)
        if hasattr(kept, "raw"):
            term = Normalized(kept.raw, kept.moments, *kept.affine)
            return TiledGradient(dy, add, term, {**self._window, "ceil_mode": self.ceil_mode})
        if hasattr(kept, "largest"):
            gradient = PooledGradient(dy, kept.y, kept.largest, kept.index, kept.shape, self._window)
            if masked is not None:
                gradient.array, gradient.norm, gradient.parts = dy, masked.norm, masked.parts
            return gradient if add is None else self.ops.add(gradient.finish(self.ops), add)
        return self.ops.max_pool2d_backward(dy, kept.index, kept.shape, **self._window, add=add)


class AvgPool2d(_Pool):
    """The mean of each window.

    Args:
        kernel_size, stride, padding, ceil_mode: as in `MaxPool2d`.
        count_include_pad: padding zeros count in the divisor.

    Shapes:
        x (N, H, W, C) → (N, P, Q, C).
    """

    def __init__(
        self,
        kernel_size: int | Pair,
        stride: int | Pair | None = None,
        padding: int | Pair = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        *,
        name: str | None = None,
    ):
        super().__init__(kernel_size, stride, padding, 1, ceil_mode, name)
        self.count_include_pad = count_include_pad

    def describe(self) -> str:
        return super().describe() + checks.options(count_include_pad=(self.count_include_pad, True))

    @property
    def _window(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel_size, "stride": self.stride, "padding": self.padding,
            "ceil_mode": self.ceil_mode, "count_include_pad": self.count_include_pad,
        }  # fmt: skip

    def cost(self, shape: tuple[int, ...], itemsize: int = 4) -> Cost:
        # An addition per tap and one multiplication per mean, both ways.
        x, y = prod(shape), prod(self.output_shape(shape))
        flop = y * (prod(self.kernel_size) + 1)
        return Cost(PassCost(flop, (self._read(shape) + y) * itemsize), PassCost(flop, (y + x) * itemsize))

    def compute(self, x: Any) -> Any:
        self.save(shape=x.shape)
        return self.ops.avg_pool2d(x, **self._window)

    def backward_data(self, dy: Any, add: Any = None) -> Any:
        return self.ops.avg_pool2d_backward(dy, self.saved().shape, **self._window)


class AdaptiveAvgPool2d(Layer):
    """Means over bins that divide any image into ``output_size`` (height, width) parts; 1 is global average pooling.

    Images that are owed, an activation over a batch norm, are then made on the way.

    Shapes:
        x (N, H, W, C) → (N, P, Q, C) with (P, Q) = output_size.
    """

    accepts_add = True
    accepts_owed = (GatedGradient,)
    accepts_unfinished = True

    def __init__(self, output_size: int | Pair, *, name: str | None = None):
        super().__init__(name)
        self.output_size = checks.positive_pair(self.name, "output_size", output_size)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        n, h, w, c = self.require_image(shape)
        self.require_output(shape, (h, w))
        return n, *self.output_size, c

    def cost(self, shape: tuple[int, ...], itemsize: int = 4) -> Cost:
        x, y = prod(shape), prod(self.output_shape(shape))
        bins = prod(_bin_total(size, out) for size, out in zip(shape[1:3], self.output_size, strict=True))
        both = PassCost(shape[0] * shape[3] * bins + y, (x + y) * itemsize)
        return Cost(forward=both, backward_data=both)

    def compute(self, x: Any) -> Any:
        self.save(shape=x.shape)
        if self.output_size == (1, 1) and (both := activated(x)) is not None:
            term, function = both
            return self.ops.batch_norm_means(term.raw, term.moments, term.gamma, term.beta, *function[:2])
        x = materialize(self.ops, x).array if isinstance(x, Value) else x
        return self.ops.adaptive_avg_pool2d(x, self.output_size)

    def backward_data(self, dy: Any, add: Any = None) -> Any:
        if isinstance(add, GatedGradient):
            if self.output_size == (1, 1) and add.dmean is None:
                add.dmean = dy
                return add if add.sums is not None else add.finish(self.ops)
            add = add.finish(self.ops)
        dx = self.ops.adaptive_avg_pool2d_backward(dy, self.saved().shape)
        return dx if add is None else self.ops.add(dx, add)

    def describe(self) -> str:
        return f"{self.output_size}"


def _bin_total(size: int, out: int) -> int:
    """Pixels in all bins along one axis; bins overlap where ``out`` does not divide ``size``."""
    return sum(ceil_div((i + 1) * size, out) - i * size // out for i in range(out))


def pool_beside(graph: Graph) -> None:
    """Let each ReLU that a max pooling of small tiles reads beside others pool what it writes, too.

    So it does where it finishes a batch norm, as at the skip connections of a U-Net: its output is not read again for
    that, and the gradients of its readers are added up by the batch norm, as it reads them.
    """
    readers = graph.consumers()
    for node in graph.nodes:
        if type(node.layer) is not ReLU:
            continue
        above = [graph.nodes[i].layer for i in readers[node.index]]
        pools = [layer for layer in above if type(layer) is MaxPool2d]
        chosen = pools[0] if len(pools) == 1 < len(above) and pools[0].small_tiles else None
        node.layer.tiles = (*chosen.kernel_size, chosen.ceil_mode) if chosen is not None else None
        for layer in pools:
            layer.beside = layer is chosen
