"""Convolution and transposed convolution."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from minidl import checks
from minidl.initializers import Initializer, kaiming_uniform, uniform_fan_in
from minidl.layer import Layer
from minidl.profile import Cost, PassCost
from minidl.profile.cost import covered
from minidl.shapes import Pair, conv_output_size, conv_transpose_output_size
from minidl.value import (
    MaskedGradient,
    Normalized,
    NormGradient,
    Origin,
    PooledGradient,
    SpacedGradient,
    Value,
    finished,
    joined,
    materialize,
    owed,
    shortcut,
    summands,
)


class _Convolution(Layer):
    """What the two convolutions share: geometry, parameters, weight and bias gradients."""

    accepts_add = True
    accepts_masked = True  # for the sums that may come with one
    accepts_unfinished = True  # a ReLU over a batch norm; what a finished one was made of; where the output is to lie
    # A fusion plan's mode: the input's gradient is masked for the ReLU below, and summed for a batch norm under that.
    masks = False
    modes = ("training", "masks")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Pair,
        stride: int | Pair,
        padding: int | Pair,
        dilation: int | Pair,
        groups: int,
        name: str | None,
    ):
        super().__init__(name)
        self.in_channels = checks.at_least(self.name, "in_channels", in_channels, 1)
        self.out_channels = checks.at_least(self.name, "out_channels", out_channels, 1)
        self.kernel_size = checks.positive_pair(self.name, "kernel_size", kernel_size)
        self.stride = checks.positive_pair(self.name, "stride", stride)
        self.padding = checks.positive_pair(self.name, "padding", padding, least=0)
        self.dilation = checks.positive_pair(self.name, "dilation", dilation)
        self.groups = checks.at_least(self.name, "groups", groups, 1)
        for argument, channels in (("in_channels", in_channels), ("out_channels", out_channels)):
            if channels % groups:
                raise checks.bad_value(self.name, argument, f"a multiple of groups ({groups})", channels)

    @property
    def geometry(self) -> dict[str, Any]:
        """Keyword arguments of the convolution operations."""
        return {"stride": self.stride, "padding": self.padding, "dilation": self.dilation, "groups": self.groups}

    @property
    def biased(self) -> bool:
        """Whether it has a bias."""
        return any(spec.name == "bias" for spec in self.specs)

    def _window(self, image: tuple[int, ...], out: tuple[int, ...]) -> int:
        """Elements of ``image`` under the windows of the convolution that maps it to ``out``."""
        axes = (self.kernel_size, self.stride, self.padding, self.dilation)
        return image[0] * image[3] * covered(image[1:3], out[1:3], *axes)

    def _below(self, x: Value) -> dict[str, Any]:
        """What the gradient of an input needs to be masked: of a ReLU over a convolution, a batch norm, or a sum."""
        origin = x.origin
        if not self.masks or origin is None or not origin.relu:
            return {}
        if not origin.terms:
            return {"relu": origin.owner}
        norms = [term for term in origin.terms if isinstance(term, Normalized)]
        if not norms:
            return {}
        # Of a block and its projection the later one, whose backward pass comes first, and takes the sums of the other.
        norm, sole, others = norms[-1], len(origin.terms) == 1, norms[:-1]
        # The parameters are no activations: as a tuple they stay where they are.
        facts = origin.owner, norm.owner, sole, (norm.gamma, norm.beta)
        signs = x.signs if self._reads_signs(x.shape) else None
        kept = {"raw": norm.raw, "moments": norm.moments, "below": facts, "signs": signs}
        if others:
            kept |= {"other": others[0].owner, "other_raw": others[0].raw, "other_moments": others[0].moments}
        return kept

    def _masked(self, dy: Any, kept: Any, **options: Any) -> Any:
        """The input's gradient, masked and summed for what `_below` kept where a kernel does this on the way."""
        _, _, sole, affine = kept.below
        output = {} if sole else {"y": kept.x, "signs": kept.signs}
        if hasattr(kept, "other") and kept.signs is not None and self._takes_pair(kept):
            output["other"] = kept.other_raw, kept.other_moments
        dx, parts = self.ops.conv2d_backward_data_masked(
            dy, self.params["weight"], kept.raw, kept.moments, *affine, **output, **self.geometry, tf32=self.tf32,
            **options,
        )  # fmt: skip
        return dx if parts is None else self._summed(dx, parts, kept, "other" in output)

    def _summed(self, dx: Any, parts: Any, kept: Any, pair: bool) -> MaskedGradient:
        """A masked gradient with the sums of the batch norm below, and of another under the same sum, if it is a
        ``pair``; else that one's are to be taken."""
        relu, norm, _, _ = kept.below
        gradient = MaskedGradient.masked(dx, relu, norm, parts[0] if pair else parts)
        if pair:
            gradient.further = kept.other, parts[1]
        elif hasattr(kept, "other"):
            gradient.other = Normalized(kept.other_raw, kept.other_moments, None, None, kept.other)
        return gradient

    def _takes_pair(self, kept: Any) -> bool:
        """Whether a kernel takes the sums of both batch norms below a sum."""
        return False

    def _reads_signs(self, shape: tuple[int, ...]) -> bool:
        """Whether masking an input of this shape takes the signs of a sum, if they are there, not the sum itself."""
        return True

    def _backward_bias(self, dy: Any) -> None:
        if (bias := self.grad("bias")) is not None:
            self.ops.channel_sum(summands(self.ops, dy), out=bias.view, accumulate=not bias.first)

    def describe(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}" + checks.options(
            stride=(self.stride, (1, 1)), padding=(self.padding, (0, 0)), dilation=(self.dilation, (1, 1)),
            groups=(self.groups, 1), bias=(self.biased, True),
        )  # fmt: skip


class Conv2d(_Convolution):
    """Two-dimensional convolution (cross-correlation) of NHWC images with KRSC filters.

    Args:
        in_channels, out_channels: C and K.
        kernel_size, stride, padding, dilation: an integer or (height, width); padding is with zeros.
        groups: channels are split into this many independent convolutions; ``groups=in_channels`` is depthwise.
        bias: add a learned vector of K elements.
        weight_init, bias_init: starting weights and biases; default as in torch.nn.

    Shapes:
        x (N, H, W, C) → (N, P, Q, K) with P = (H + 2·padding − dilation·(kernel − 1) − 1) // stride + 1.
        weight (K, R, S, C / groups), bias (K,).

    Raises:
        ValueError: bad sizes; an input that is not NHWC with C channels, or smaller than the kernel.
    """

    # Modes of a fusion plan: in training, take the batch norm's statistics of the output on the way; do the work of the
    # ReLU above; be left the last pass of the batch norm above.
    statistics = False
    rectifies = False
    lazy = False
    accepts_owed = (SpacedGradient,)
    sums = False  # adds up its input's gradient for the bias of a convolution below (`layers.join.sum_for_biases`)
    left_to: Conv2d | None = None  # reads the same image, and adds this one's gradient (`layers.join.leave_strided`)
    # Set by hand, by no plan: an unfinished input is made in packed 16-bit arithmetic (`ops.conv2d`).
    packed = False
    modes = ("training", "statistics", "masks", "rectifies", "lazy", "packed")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Pair,
        stride: int | Pair = 1,
        padding: int | Pair = 0,
        dilation: int | Pair = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        name: str | None = None,
    ):
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, name)
        shape = (self.out_channels, *self.kernel_size, self.in_channels // self.groups)
        self.declare("weight", shape, kaiming_uniform() if weight_init is None else weight_init, product=True)
        if bias:
            fan_in = uniform_fan_in(prod(shape[1:]))
            self.declare("bias", (self.out_channels,), fan_in if bias_init is None else bias_init, product=False)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        n, h, w, _ = self.require_image(shape, self.in_channels)
        sizes = zip((h, w), self.kernel_size, self.stride, self.padding, self.dilation, strict=True)
        p, q = self.require_output(shape, tuple(conv_output_size(*axis) for axis in sizes))
        return n, p, q, self.out_channels

    def cost(self, shape: tuple[int, ...], itemsize: int = 4) -> Cost:
        return self._cost(shape, self.output_shape(shape), itemsize)

    def _cost(self, shape: tuple[int, ...], out: tuple[int, ...], itemsize: int) -> Cost:
        x, y, w = prod(shape), prod(out), prod(self.specs[0].shape)
        read = self._window(shape, out)
        product = 2 * y * prod(self.specs[0].shape[1:])
        bias = PassCost(y, 4 * self.out_channels) if self.biased else PassCost()
        return Cost(
            forward=PassCost(product, (read + w + y) * itemsize) + bias,
            backward_data=PassCost(product, (y + w + x) * itemsize),
            backward_weight=PassCost(product, (read + y) * itemsize + 4 * w) + bias,
        )

    def compute(self, x: Any) -> Any:
        place = x.place if isinstance(x, Value) else None
        options, given = {**self.geometry, "tf32": self.tf32, "out": place}, None
        if isinstance(x, Value) and (pair := joined(x)) is not None:
            if self._makes_join(x):
                return self._compute_join(x, *pair)
            x = given = replace(materialize(self.ops, x), place=None)
        if not isinstance(x, Value):
            self.save(x=x)
        elif (term := owed(x)) is not None:
            options["norm"] = norm = term.moments, term.gamma, term.beta
            options["packed"] = self.packed
            facts = x.origin.owner, term.owner, True, norm[1:]
            self.save(raw=term.raw, moments=term.moments, below=facts)
            x = term.raw
        else:
            x = materialize(self.ops, x)
            self.save(x=x.array, **self._below(x))
            x = x.array
        weight, bias, relu = self.folded or (self.params["weight"], self.params.get("bias"), self.rectifies)
        if self.statistics and self.training:
            y, stats = self.ops.conv2d_stats(x, weight, bias, **options, finish=False)
            return Value(y, stats=stats, buffer=place, given=given)
        if relu:
            y = self.ops.conv2d(x, weight, bias, **options, relu=True)
            return Value(y, origin=Origin((), relu=True), given=given)
        y = self.ops.conv2d(x, weight, bias, **options)
        return y if place is None and given is None else Value(y, buffer=place, given=given)

    def _makes_join(self, x: Value) -> bool:
        """Whether a kernel makes the sum that is read on the way."""
        if self.biased or self.rectifies or self.folded or x.place is not None:
            return False
        return self.ops.conv2d_makes_join(x.shape, self.params["weight"], **self.geometry, tf32=self.tf32)

    def _compute_join(self, x: Value, one: Normalized, other: Normalized | Any) -> Value:
        norm, (add, named) = (one.raw, one.moments, one.gamma, one.beta), shortcut(other)
        options = {**self.geometry, "tf32": self.tf32, "statistics": self.statistics and self.training, "finish": False}
        z, signs, y, stats = self.ops.conv2d_join(*norm, add, self.params["weight"], **named, **options)
        given = replace(x, array=z, signs=signs)
        self.save(x=z, **self._below(given))
        return Value(y, stats=stats, given=given)

    def backward_weight(self, dy: Any) -> None:
        kept = self.saved()
        if (weight := self.grad("weight")) is not None:
            options = {**self.geometry, "out": weight.view, "accumulate": not weight.first, "tf32": self.tf32}
            pooled = dy.dy if isinstance(dy, NormGradient) and isinstance(dy.dy, PooledGradient) else None
            if pooled is not None and not self.needs_input_grad and not self.biased and hasattr(kept, "x"):
                facts = pooled.array, pooled.index, *dy.facts, kept.x
                self.ops.conv2d_backward_weight_pooled(*facts, pooling=pooled.window, **options)
            elif isinstance(dy, NormGradient) and pooled is None and (both := self._both(kept)) is not None:
                self._backward_both(dy, kept, both, options)
            else:
                # An input that was never written is made again.
                x, norm = (kept.x, None) if hasattr(kept, "x") else (kept.raw, (kept.moments, *kept.below[3]))
                array = finished(self.ops, dy)
                cost = self._cost(x.shape, array.shape, x.itemsize).backward_weight
                with self.ops.aside(cost.flop, cost.bytes, x.itemsize):
                    self.ops.conv2d_backward_weight(array, x, norm=norm, **options)
        self._backward_bias(dy)

    def _takes_pair(self, kept: Any) -> bool:
        return self.ops.conv2d_takes_pair(kept.raw.shape, self.params["weight"], **self.geometry, tf32=self.tf32)

    def _reads_signs(self, shape: tuple[int, ...]) -> bool:
        options = {**self.geometry, "below": 1, "add": True, "tf32": self.tf32}
        return not (self.lazy and self.ops.conv2d_makes_both(shape, self.params["weight"], **options))

    def _both(self, kept: Any) -> dict[str, Any] | None:
        """What a kernel is told that makes both gradients of what a batch norm above has left to do, the input's as it
        is, or masked for a ReLU below; None where there is none that can."""
        if not self.needs_input_grad or self.biased or self.sums or hasattr(kept, "relu"):
            return None
        add = self._add.dy if isinstance(self._add, SpacedGradient) else self._add
        if not hasattr(kept, "below"):
            ways = [{"x": kept.x}] if hasattr(kept, "x") else []
        else:
            _, _, sole, affine = kept.below
            known = sole and all(vector is not None for vector in affine)
            ways = [{"x": kept.raw, "norm": (kept.moments, *affine)}] if known else []
            if hasattr(kept, "x"):
                ways.append({"x": kept.x, "below": (kept.raw, kept.moments)})
                if hasattr(kept, "other"):
                    ways.insert(-1, ways[-1] | {"other": (kept.other_raw, kept.other_moments)})
            ways = ways if self.masks else []
        for way in ways:
            facts = {"norm": "norm" in way, "below": ("below" in way) + ("other" in way), "add": add is not None}
            facts |= {**self.geometry, "tf32": self.tf32}
            if self.ops.conv2d_makes_both(way["x"].shape, self.params["weight"], **facts):
                return way | {"add": add}
        return None

    def _backward_both(self, dy: NormGradient, kept: Any, both: dict[str, Any], options: dict[str, Any]) -> None:
        dx, parts = self.ops.conv2d_backward_both(dy.dy, *dy.facts, self.params["weight"], **both, **options)
        dy.passed = self._summed(dx, parts, kept, "other" in both) if hasattr(kept, "below") else dx

    @property
    def every_second(self) -> bool:
        """Whether it sees every second pixel of every second line, and no other."""
        return self.kernel_size == (1, 1) and self.stride == (2, 2) and self.padding == (0, 0) and self.groups == 1

    def adds_spaced(self, shape: tuple[int, ...]) -> bool:
        """Whether its input's gradient, of this shape, takes a `SpacedGradient` on the way."""
        return self.ops.conv2d_adds_spaced(shape, self.params["weight"], **self.geometry, tf32=self.tf32)

    def backward_data(self, dy: Any, add: Any = None) -> Any:
        if isinstance(dy, NormGradient) and dy.passed is not None and add is self._add:
            return dy.passed
        dy, add = finished(self.ops, dy), add.dy if isinstance(add, SpacedGradient) else add
        kept, weight, options = self.saved(), self.params["weight"], {**self.geometry, "add": add, "tf32": self.tf32}
        if hasattr(kept, "relu"):
            dx, parts = self.ops.conv2d_backward_data_summed(dy, weight, kept.x.shape, mask=kept.x, **options)
            return MaskedGradient.masked(dx, kept.relu, parts=parts)
        if self.sums and add is None:
            dx, parts = self.ops.conv2d_backward_data_summed(dy, weight, kept.x.shape, **options)
            return MaskedGradient.masked(dx, "", parts=parts)
        if not self.masks or not hasattr(kept, "below"):
            shape = (kept.x if hasattr(kept, "x") else kept.raw).shape
            if add is None and self.left_to is not None and self.left_to.adds_spaced(shape):
                seen, options["stride"] = (*dy.shape[:3], shape[3]), (1, 1)
                return SpacedGradient(self.ops.conv2d_backward_data(dy, weight, seen, **options), shape)
            return self.ops.conv2d_backward_data(dy, weight, shape, **options)
        return self._masked(dy, kept, add=add)


class ConvTranspose2d(_Convolution):
    """Transposed convolution: the data gradient of a convolution used as a forward pass (upsampling by ``stride``).

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias: as in torch.nn.
        output_padding: rows and columns added at the bottom and right, to choose among the input sizes that the
            matching convolution would map to one; smaller than stride or dilation.
        weight_init, bias_init: starting weights and biases; default as in torch.nn.

    Shapes:
        x (N, H, W, C) → (N, P, Q, K) with P = (H − 1)·stride − 2·padding + dilation·(kernel − 1) + output_padding + 1.
        weight (C, R, S, K / groups), bias (K,).
    """

    accepts_add = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Pair,
        stride: int | Pair = 1,
        padding: int | Pair = 0,
        output_padding: int | Pair = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | Pair = 1,
        *,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        name: str | None = None,
    ):
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, name)
        self.output_padding = checks.positive_pair(self.name, "output_padding", output_padding, least=0)
        for extra, s, d in zip(self.output_padding, self.stride, self.dilation, strict=True):
            if extra >= max(s, d):
                raise checks.bad_value(self.name, "output_padding", "smaller than stride or dilation", output_padding)
        shape = (self.in_channels, *self.kernel_size, self.out_channels // self.groups)
        self.declare("weight", shape, kaiming_uniform() if weight_init is None else weight_init, product=True)
        if bias:
            fan_in = uniform_fan_in(prod(shape[1:]))
            self.declare("bias", (self.out_channels,), fan_in if bias_init is None else bias_init, product=False)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        n, h, w, _ = self.require_image(shape, self.in_channels)
        sizes = zip(
            (h, w), self.kernel_size, self.stride, self.padding, self.dilation, self.output_padding, strict=True
        )
        p, q = self.require_output(shape, tuple(conv_transpose_output_size(*axis) for axis in sizes))
        return n, p, q, self.out_channels

    def cost(self, shape: tuple[int, ...], itemsize: int = 4) -> Cost:
        out = self.output_shape(shape)
        x, y, w = prod(shape), prod(out), prod(self.specs[0].shape)
        read = self._window(out, shape)  # of dy: backward, this is a convolution
        product = 2 * x * prod(self.specs[0].shape[1:])
        bias = PassCost(y, 4 * self.out_channels) if self.biased else PassCost()
        return Cost(
            forward=PassCost(product, (x + w + y) * itemsize) + bias,
            backward_data=PassCost(product, (read + w + x) * itemsize),
            backward_weight=PassCost(product, (x + (y if self.biased else read)) * itemsize + 4 * w) + bias,
        )

    def describe(self) -> str:
        return super().describe() + checks.options(output_padding=(self.output_padding, (0, 0)))

    @property
    def _further(self) -> tuple[int, int, int, int]:
        """As `pad2d` takes them, the pixels of zeros that the input gets: of an output padding of a stride or more the
        matching convolution sees whole windows, which are to have their pixels."""
        below, right = (extra // s for extra, s in zip(self.output_padding, self.stride, strict=True))
        return 0, right, 0, below

    def compute(self, x: Any) -> Any:
        place, below, out, further = None, {}, self.output_shape(x.shape), self._further
        if isinstance(x, Value):
            place, x = x.place, materialize(self.ops, x)
            below, x = {} if any(further) else self._below(x), x.array
        if any(further):
            x = self.ops.pad2d(x, further)
        self.save(x=x, **below)
        y = self.ops.conv2d_backward_data(
            x, self.params["weight"], out, **self.geometry,
            bias=self.params.get("bias"), tf32=self.tf32, out=place,
        )  # fmt: skip
        return y if place is None else Value(y, buffer=place)

    def backward_weight(self, dy: Any) -> None:
        x = self.saved().x
        if (weight := self.grad("weight")) is not None:
            # The roles of input and output are swapped: x is the gradient-shaped operand here.
            self.ops.conv2d_backward_weight(
                x, finished(self.ops, dy), **self.geometry, out=weight.view, accumulate=not weight.first, tf32=self.tf32
            )
        self._backward_bias(dy)

    def backward_data(self, dy: Any, add: Any = None) -> Any:
        assert add is None, "not declared in accepts_add"
        kept, dy = self.saved(), finished(self.ops, dy)
        if self.masks and hasattr(kept, "below"):
            return self._masked(dy, kept, transposed=True)
        dx, further = self.ops.conv2d(dy, self.params["weight"], **self.geometry, tf32=self.tf32), self._further
        return self.ops.pad2d(dx, tuple(-side for side in further)) if any(further) else dx
