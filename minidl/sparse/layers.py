"""Layers whose weight lives in Compressed Sparse Blocks: linear, and convolution.

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
from minidl.layers import Conv2d, Linear
from minidl.precision import float32
from minidl.profile import Cost, PassCost
from minidl.profile.cost import covered
from minidl.shapes import Pair, round_up
from minidl.sparse.csb import CSBMatrix, on_host
from minidl.sparse.pattern import CSBPattern, choose_side, side_of

# By `Precision.tf32`, how products may be split: three of bfloat16 are nearer to float32's than a single TF32 one.
SPLITS = {0: None, 1: "bf16x3", 3: "tf32x3"}


class _CSBLayer(Layer):
    """What both layers share: rows of features times a sparse weight, and the two gradients."""

    def __init__(
        self, pattern: CSBPattern, bias: bool, weight_init: Initializer | None, bias_init: Initializer | None,
        name: str | None,
    ):  # fmt: skip
        super().__init__(name)
        remedy = "from_dense makes the layer from a weight with zeros"
        checks.instance(self.name, "pattern", pattern, CSBPattern, "a CSBPattern", remedy)
        if 0 in pattern.shape:
            raise checks.bad_shape(self.name, "pattern", "(out, in), both at least 1", pattern.shape)
        self.pattern = pattern
        fan_in = uniform_fan_in(round(pattern.nnz / pattern.shape[0]))  # of an average output
        self.declare("weight", (pattern.nnz,), fan_in if weight_init is None else weight_init, product=True)
        if bias:
            self.declare("bias", (pattern.shape[0],), fan_in if bias_init is None else bias_init, product=False)

    @staticmethod
    def _parts(dense: Any, bias: Any, blocksize: int | Pair | None, mask: Any) -> tuple[CSBPattern, dict[str, Any]]:
        """The pattern of a dense float32 (out, in) weight, and the arguments that start a layer with its values."""
        matrix = CSBMatrix.from_dense(np.asarray(on_host(dense), float32), blocksize, mask=mask)
        values = matrix.data
        start = {"weight_init": lambda rng, shape: values, "bias": bias is not None}
        if bias is not None:
            shift = np.array(on_host(bias), float32)
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

    def _cost(self, samples: int, x: int, read: int, itemsize: int) -> Cost:
        """Of ``samples`` outputs of all features, from ``read`` of the ``x`` elements of the input: the pattern's
        elements count, its zeros do not; indices are bytes, too.
        """
        out, pattern = self.pattern.shape[0], self.pattern
        y, flop = samples * out, 2 * samples * pattern.nnz
        weight = pattern.nnz * itemsize + pattern.nbytes
        bias = PassCost(y, 4 * out) if self._biased else PassCost()
        return Cost(
            PassCost(flop, (read + y) * itemsize + weight) + bias,
            PassCost(flop, (x + y) * itemsize + weight),
            PassCost(flop, (read + y) * itemsize + 4 * pattern.nnz + pattern.nbytes) + bias,
        )

    def at_pattern(self, dense: Any) -> np.ndarray:
        """The elements of a dense array in the weight's shape that are parameters of this layer, (nnz,) on the host.

        Raises:
            ValueError: for another shape.
        """
        dense = np.asarray(dense)
        if dense.shape != self._dense_shape:
            raise checks.bad_shape(self.name, "dense", f"{self._dense_shape} like the weight", dense.shape)
        row, column = self.pattern.coordinates()
        return np.ascontiguousarray(self._matrix_of(dense)[row, column])

    def dense(self, values: np.ndarray) -> np.ndarray:
        """The dense array in the weight's shape whose elements at the pattern are ``values`` (nnz,), on the host; the
        others are zero: what `at_pattern` takes back.
        """
        matrix = np.zeros(self.pattern.shape, values.dtype)
        matrix[self.pattern.coordinates()] = values
        return self._weight_of(matrix)

    @property
    def dense_axes(self) -> int:
        """Of the dense weight."""
        return len(self._dense_shape)

    @property
    def _dense_shape(self) -> tuple[int, ...]:
        return self.pattern.shape

    def _weight_of(self, matrix: np.ndarray) -> np.ndarray:
        return matrix

    def _matrix_of(self, dense: np.ndarray) -> np.ndarray:
        """A dense weight as the matrix that the pattern is of."""
        return dense

    def _forward(self, x: Any) -> Any:
        """(rows, in) -> (rows, out)."""
        return self.ops.csb_matmul(
            *self.pattern.on(self.ops), self.params["weight"], x, *self._where, features_last=True,
            bias=self.params.get("bias"), split=SPLITS[self.tf32],
            order=self.pattern.order(self.ops, False, True),
        )  # fmt: skip

    def _backward_weight(self, dy: Any, x: Any) -> None:
        """Gradients from rows (rows, out) and (rows, in)."""
        if (weight := self.grad("weight")) is not None:
            self.ops.csb_sampled(
                *self.pattern.on(self.ops), dy, x, *self._where, features_last=True, out=weight.view,
                accumulate=not weight.first, split=SPLITS[self.tf32],
            )  # fmt: skip
        self._backward_bias(dy)

    def _backward_bias(self, dy: Any) -> None:
        if (bias := self.grad("bias")) is not None:
            self.ops.channel_sum(dy, out=bias.view, accumulate=not bias.first)

    def _backward_data(self, dy: Any) -> Any:
        """(rows, out) -> (rows, in)."""
        return self.ops.csb_matmul(
            *self.pattern.on(self.ops), self.params["weight"], dy, *self._where, transposed=True, features_last=True,
            split=SPLITS[self.tf32], order=self.pattern.order(self.ops, True, True),
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
        bias_init: of the bias; default: the same rule.

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
        cls,
        weight: Any,
        bias: Any = None,
        *,
        mask: Any = None,
        blocksize: int | Pair | None = None,
        name: str | None = None,
    ) -> CSBLinear:
        """A layer that starts with a dense weight (out, in): its nonzeros, or the elements where ``mask`` is true."""
        pattern, start = cls._parts(weight, bias, blocksize, mask)
        return cls(pattern, name=name, **start)

    output_shape = Linear.output_shape

    def cost(self, shape: tuple[int, ...], itemsize: int = 4) -> Cost:
        return self._cost(shape[0], prod(shape), prod(shape), itemsize)

    def compute(self, x: Any) -> Any:
        self.save(x=x)
        return self._forward(x)

    def backward_weight(self, dy: Any) -> None:
        self._backward_weight(dy, self.saved().x)

    def backward_data(self, dy: Any, add: Any = None) -> Any:
        assert add is None, "not declared in accepts_add"
        return self._backward_data(dy)


class CSBConv2d(_CSBLayer):
    """Convolution of NHWC images with a sparse filter, without a matrix of patches.

    Args:
        pattern: of the filter as a matrix with a row for each output channel. Its columns are the taps of the kernel,
            row by row, each with ``in_channels`` columns or, where there are several taps, as many as make whole
            blocks; those beyond ``in_channels`` have no elements. `from_dense` makes it.
        bias, weight_init, bias_init: as in `CSBLinear`.
        kernel_size, stride, padding, dilation: an integer or (height, width); padding is with zeros.
        in_channels: C; None takes all columns of a tap.

    Shapes:
        x (N, H, W, C) → (N, P, Q, K) with P = (H + 2·padding − dilation·(kernel − 1) − 1) // stride + 1; weight (nnz,),
        bias (K,).

    Raises:
        TypeError, ValueError: as `CSBLinear`; a pattern that does not fit the kernel; bad sizes.
    """

    def __init__(
        self, pattern: CSBPattern, bias: bool = True, *, kernel_size: int | Pair = 1, in_channels: int | None = None,
        stride: int | Pair = 1, padding: int | Pair = 0, dilation: int | Pair = 1,
        weight_init: Initializer | None = None, bias_init: Initializer | None = None, name: str | None = None,
    ):  # fmt: skip
        super().__init__(pattern, bias, weight_init, bias_init, name)
        self.kernel_size = checks.positive_pair(self.name, "kernel_size", kernel_size)
        self.stride = checks.positive_pair(self.name, "stride", stride)
        self.padding = checks.positive_pair(self.name, "padding", padding, least=0)
        self.dilation = checks.positive_pair(self.name, "dilation", dilation)
        self.out_channels, columns = pattern.shape
        taps = prod(self.kernel_size)
        room = columns // taps if in_channels is None else _room(in_channels, taps, pattern.side)
        self.in_channels = room if in_channels is None else checks.at_least(self.name, "in_channels", in_channels, 1)
        if columns != taps * room or room != _room(self.in_channels, taps, pattern.side):
            wanted = f"{taps} taps of whole blocks of {pattern.side} columns" if taps > 1 else f"{room} columns"
            raise checks.bad_shape(self.name, "pattern", f"(out_channels, {wanted})", pattern.shape, "see from_dense")
        if (pattern.coordinates()[1] % room >= self.in_channels).any():
            wanted = f"without elements in columns of a tap from {self.in_channels} on"
            raise checks.bad_value(self.name, "pattern", wanted, "some", "see from_dense")

    @classmethod
    def from_dense(
        cls, weight: Any, bias: Any = None, *, stride: int | Pair = 1, padding: int | Pair = 0,
        dilation: int | Pair = 1, mask: Any = None, blocksize: int | Pair | None = None, name: str | None = None,
    ) -> CSBConv2d:  # fmt: skip
        """A layer that starts with a dense filter (K, R, S, C); ``mask`` in its shape, as in `CSBLinear.from_dense`."""
        weight = np.asarray(on_host(weight), float32)
        if weight.ndim != 4 or 0 in weight.shape:
            raise checks.bad_shape("CSBConv2d", "weight", "(K, R, S, C), none of them 0", weight.shape)
        if mask is not None and np.shape(mask) != weight.shape:
            raise checks.bad_shape("CSBConv2d", "mask", f"{weight.shape} like the weight", np.shape(mask))
        kernel, channels = weight.shape[1:3], weight.shape[3]
        if blocksize is None and prod(kernel) > 1:
            blocksize = _side_for(weight, mask)
        room = channels if prod(kernel) == 1 else _room(channels, prod(kernel), side_of(blocksize))
        flat, kept = (_flat(array, room) for array in (weight, mask))
        pattern, start = cls._parts(flat, bias, blocksize, kept)
        return cls(
            pattern, kernel_size=kernel, in_channels=channels, stride=stride, padding=padding, dilation=dilation,
            name=name, **start,
        )  # fmt: skip

    @property
    def geometry(self) -> dict[str, Any]:
        """Keyword arguments of the convolution operations."""
        return {
            "kernel": self.kernel_size, "stride": self.stride, "padding": self.padding, "dilation": self.dilation
        }  # fmt: skip

    @property
    def _pointwise(self) -> bool:
        """Whether each output pixel is the product of one input pixel."""
        return self.kernel_size == (1, 1) and self.padding == (0, 0)

    def filters(self) -> Any:
        """The dense (K, R, S, C) filter, zeros and all."""
        wide = self.matrix.toarray().reshape(self.out_channels, *self.kernel_size, -1)
        return wide[..., : self.in_channels]

    @property
    def _dense_shape(self) -> tuple[int, ...]:
        return self.out_channels, *self.kernel_size, self.in_channels

    def _weight_of(self, matrix: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(matrix.reshape(*self._dense_shape[:3], -1)[..., : self.in_channels])

    def _matrix_of(self, dense: np.ndarray) -> np.ndarray:
        return _flat(dense, self.pattern.shape[1] // prod(self.kernel_size))

    output_shape = Conv2d.output_shape

    def cost(self, shape: tuple[int, ...], itemsize: int = 4) -> Cost:
        out = self.output_shape(shape)
        axes = self.kernel_size, self.stride, self.padding, self.dilation
        read = shape[0] * shape[3] * covered(shape[1:3], out[1:3], *axes)
        return self._cost(prod(out[:3]), prod(shape), read, itemsize)

    def _rows(self, x: Any) -> Any:
        """The pixels that the stride meets, as rows: a view where it meets all."""
        if self.stride != (1, 1):
            x = self.ops.contiguous(x[:, :: self.stride[0], :: self.stride[1]])
        return x.reshape(prod(x.shape[:3]), x.shape[3])

    def compute(self, x: Any) -> Any:
        self.save(x=x)
        if self._pointwise:
            return self._forward(self._rows(x)).reshape(self.output_shape(x.shape))
        return self.ops.csb_conv2d(
            *self.pattern.on(self.ops), self.params["weight"], x, *self._where, **self.geometry,
            bias=self.params.get("bias"), tf32=self.tf32,
            order=self.pattern.order(self.ops, False, True),
        )  # fmt: skip

    def backward_weight(self, dy: Any) -> None:
        x = self.saved().x
        if self._pointwise:
            self._backward_weight(dy.reshape(prod(dy.shape[:3]), dy.shape[3]), self._rows(x))
            return
        if (weight := self.grad("weight")) is not None:
            self.ops.csb_conv2d_backward_weight(
                *self.pattern.on(self.ops), dy, x, *self._where, **self.geometry, out=weight.view,
                accumulate=not weight.first, tf32=self.tf32,
            )  # fmt: skip
        self._backward_bias(dy)

    def backward_data(self, dy: Any, add: Any = None) -> Any:
        assert add is None, "not declared in accepts_add"
        shape = self.saved().x.shape
        if not self._pointwise:
            order = self.pattern.order(self.ops, True, True, prod(self.kernel_size), self.in_channels)
            return self.ops.csb_conv2d_backward_data(
                *self.pattern.on(self.ops), self.params["weight"], dy, shape, *self._where, **self.geometry,
                tf32=self.tf32, order=order,
            )  # fmt: skip
        part = self._backward_data(dy.reshape(prod(dy.shape[:3]), dy.shape[3]))
        if self.stride == (1, 1):
            return part.reshape(shape)
        dx = self.ops.zeros(shape, dy.dtype)
        dx[:, :: self.stride[0], :: self.stride[1]] = part.reshape(*dy.shape[:3], shape[3])
        return dx

    def describe(self) -> str:
        defaults = {"kernel_size": (1, 1), "stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
        geometry = [f", {key}={getattr(self, key)}" for key, usual in defaults.items() if getattr(self, key) != usual]
        return super().describe() + "".join(geometry)


def _room(channels: int, taps: int, side: int) -> int:
    """Columns of a tap: whole blocks, so that no block has two taps; of a single one, no more than there are."""
    return channels if taps == 1 else round_up(channels, side)


def _side_for(weight: np.ndarray, mask: Any) -> int:
    """A side for the blocks of a filter (K, R, S, C): no more than twice the channels of a tap."""
    nnz = int(np.count_nonzero(weight if mask is None else mask))
    side = choose_side((weight.shape[0], prod(weight.shape[1:])), nnz)
    while side // 2 >= weight.shape[3]:
        side //= 2
    return side


def _flat(filters: Any, room: int) -> Any:
    """(K, R, S, C) as a matrix whose taps have so many columns; None as it is."""
    if filters is None:
        return None
    out, r, s, channels = np.shape(filters)
    return np.pad(filters, ((0, 0), (0, 0), (0, 0), (0, room - channels))).reshape(out, r * s * room)
