"""Non-linearities: of every element, and softmax over channels."""

from __future__ import annotations

from dataclasses import replace
from math import inf, prod
from typing import Any

from minidl import checks
from minidl.layer import Layer
from minidl.profile import Cost, PassCost
from minidl.value import (
    Function,
    GatedGradient,
    MaskedGradient,
    Normalized,
    Origin,
    PooledGradient,
    TiledGradient,
    Value,
    activated,
    finished,
    joined,
    materialize,
    shortcut,
)


class ReLU(Layer):
    """``max(x, 0)``, any shape. Keeps its output, which the next layer usually keeps too: one buffer, counted once.

    Under it a batch norm, or a join of some, may be unfinished: it is then finished here, in one pass with the ReLU,
    and the mask of the gradient is left to them (`MaskedGradient`). Over a single batch norm the output is not kept,
    and by the mode ``deferred`` of a fusion plan not made either: who reads it does both.

    Over a convolution that did its work already (`Conv2d.rectifies`) it does nothing but keep it; not even that in the
    mode ``masks``, where the pooling that alone reads it masks the gradient.

    In the mode ``ahead``, over a sum of batch norms that is to be finished here, the convolution that reads the output
    first makes it on its way (`conv2d_join`) where it can, and gives it to the other readers (`Value.given`).
    """

    accepts_add = True
    accepts_masked = True
    accepts_unfinished = True
    modes = ("training", "deferred", "masks", "ahead")
    deferred = False
    masks = False
    ahead = False
    room = 0  # channels that a concatenation will continue the output with, in one buffer (`join.share_buffers`)
    tiles: tuple[int, int, bool] | None = None  # of a pooling beside others: height, width, ceil_mode (`pool_beside`)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def cost(self, shape: tuple[int, ...], itemsize: int = 4) -> Cost:
        n = prod(shape)
        return Cost(forward=PassCost(n, 2 * n * itemsize), backward_data=PassCost(n, 3 * n * itemsize))

    def compute(self, x: Any) -> Any:
        if not isinstance(x, Value):
            y = self.ops.relu(x)
            self.save(y=y, finished=False)
            return y
        if activated(x) is not None:
            x = materialize(self.ops, x)
        if x.array is not None:
            rectified = x.origin is not None and x.origin.relu
            y = x.array if rectified else self.ops.relu(x.array)
            self.save(finished=False, **({} if self.masks else {"y": y}))
            return Value(y, origin=Origin((), relu=True, owner=self.name)) if self.keeps else y
        done = Value(origin=replace(x.origin, relu=True, owner=self.name))
        first, *others = x.origin.terms
        if not others and isinstance(first, Normalized):
            # The parameters are no activations: as a tuple they stay where they are.
            affine = (first.gamma, first.beta)
            self.save(raw=first.raw, moments=first.moments, affine=affine, finished=True)
            if self.deferred:
                return done
            done = self._finished(first, done) if self.keeps else materialize(self.ops, done)
        elif self.ahead and (pair := joined(done)) is not None:
            one, (add, named) = pair[0], shortcut(pair[1])
            moments, *affine = named.values() or (None,) * 3
            self.save(
                raw=one.raw, moments=one.moments, affine=(one.gamma, one.beta), add=add, add_moments=moments,
                add_affine=tuple(affine), finished=True,
            )  # fmt: skip
            return done
        else:
            done = materialize(self.ops, done)
            self.save(y=done.array if done.signs is None else done.signs, finished=True)
        return done if self.keeps else done.array

    def _finished(self, term: Normalized, done: Value) -> Value:
        """``done`` with its array, in a buffer if there is to be room beside it, and pooled for who asked for it."""
        *image, channels = term.raw.shape
        buffer = self.ops.empty((*image, channels + self.room), term.raw.dtype) if self.room else None
        norm, out = (term.raw, term.moments, term.gamma, term.beta), buffer[..., :channels] if self.room else None
        if self.tiles is None or term.gamma is None:
            return replace(done, array=self.ops.batch_norm_apply(*norm, relu=True, out=out), buffer=buffer)
        *kernel, ceil_mode = self.tiles
        y, pooled = self.ops.batch_norm_max_tiles(*norm, kernel=tuple(kernel), ceil_mode=ceil_mode, out=out)
        return replace(done, array=y, buffer=buffer, pooled=pooled)

    def backward_data(self, dy: Any, add: Any = None) -> Any:
        kept = self.saved()
        if isinstance(dy, PooledGradient | TiledGradient) and add is None:
            return dy  # of this ReLU's output, and masked for it, or to be
        if isinstance(dy, MaskedGradient):
            if dy.relu == self.name and add is None:
                return dy
            dy = dy.finish(self.ops)
        if not kept.finished:
            return self.ops.relu_backward(dy, kept.y, add=add)
        if hasattr(kept, "y"):
            gradient = MaskedGradient(dy, y=kept.y)
        elif hasattr(kept, "add"):  # whoever made the sum has left it to others to mask for it, and they have not
            norm, (gamma, beta) = (kept.raw, kept.moments, *kept.affine), kept.add_affine
            other = {"add_moments": kept.add_moments, "add_gamma": gamma, "add_beta": beta}
            y, signs = self.ops.batch_norm_join(*norm, kept.add, **other)
            gradient = MaskedGradient(dy, y=y if signs is None else signs)
        else:
            gradient = MaskedGradient(dy, term=Normalized(kept.raw, kept.moments, *kept.affine))
        return gradient if add is None else self.ops.add(gradient.finish(self.ops), add)


class Activation(Layer):
    """``function`` of every element, any shape; one operation each way.

    A batch norm under it may be unfinished: it is then finished here, in one pass with the activation, whose slope is
    left to it (`MaskedGradient`); nothing of its own is kept. By the mode ``deferred`` of a fusion plan it is not made
    either: a squeeze and excitation makes it as it reads it, and the batch norm gets the gradient with the gate owed
    (`GatedGradient`).

    Attributes:
        function: name in the operation tables.
        keeps_output: backward needs the output, which the next layer usually keeps too; else it needs the input.
        flop: operations per element, forward and backward, as the formulas below count them.
    """

    accepts_add = True
    accepts_masked = True
    accepts_unfinished = True
    modes = ("training", "deferred")
    deferred = False
    function = ""
    keeps_output = False
    flop = (0, 0)
    slope = 0.0

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def cost(self, shape: tuple[int, ...], itemsize: int = 4) -> Cost:
        n, (forward, backward) = prod(shape), self.flop
        return Cost(PassCost(forward * n, 2 * n * itemsize), PassCost(backward * n, 3 * n * itemsize))

    def compute(self, x: Any) -> Any:
        term = _unfinished_norm(x)
        if term is not None:
            # The parameters are no activations: as a tuple they stay where they are.
            affine = (term.gamma, term.beta)
            self.save(raw=term.raw, moments=term.moments, affine=affine)
            if self.deferred:
                return Value(origin=Origin((term,), owner=self.name, function=self._function))
            return self.ops.batch_norm_activate(term.raw, term.moments, *affine, self.function, self.slope)
        x = materialize(self.ops, x).array if isinstance(x, Value) else x
        y = self.ops.activate(x, self.function, self.slope)
        self.save(kept=y if self.keeps_output else x)
        return y

    def backward_data(self, dy: Any, add: Any = None) -> Any:
        kept = self.saved()
        if isinstance(dy, GatedGradient) and dy.dmean is not None and dy.array is None and add is None:
            dy.behind = True
            return dy
        dy = finished(self.ops, dy)
        if hasattr(kept, "kept"):
            return self.ops.activate_backward(dy, kept.kept, self.function, self.slope, add=add)
        term = Normalized(kept.raw, kept.moments, *kept.affine)
        gradient = MaskedGradient(dy, term=term, function=self._function)
        return gradient if add is None else self.ops.add(gradient.finish(self.ops), add)

    @property
    def _function(self) -> Function:
        return Function(self.function, self.slope, self.keeps_output)


def _unfinished_norm(x: Any) -> Normalized | None:
    """The one batch norm that is still owed, if that is all that is."""
    if not isinstance(x, Value) or x.array is not None or not x.origin.open or len(x.origin.terms) > 1:
        return None
    return x.origin.terms[0] if isinstance(x.origin.terms[0], Normalized) else None


class ReLU6(Activation):
    """``min(max(x, 0), 6)`` (Howard et al., "MobileNets", 2017). Keeps its output."""

    function, keeps_output, flop = "relu6", True, (2, 2)


class LeakyReLU(Activation):
    """``x`` above zero, ``negative_slope * x`` below (Maas, Hannun and Ng, ICML 2013). Keeps its output.

    Args:
        negative_slope: at least 0, so that the output has the sign of the input.
    """

    function, keeps_output, flop = "leaky_relu", True, (2, 2)

    def __init__(self, negative_slope: float = 0.01, *, name: str | None = None):
        super().__init__(name)
        self.slope = checks.number(
            self.name, "negative_slope", negative_slope, "of at least 0, finite", lambda v: 0 <= v < inf
        )

    def describe(self) -> str:
        return f"{self.slope}"


class Sigmoid(Activation):
    """``1 / (1 + exp(-x))``. Keeps its output."""

    function, keeps_output, flop = "sigmoid", True, (4, 3)


class Tanh(Activation):
    """``tanh(x)``. Keeps its output."""

    function, keeps_output, flop = "tanh", True, (1, 3)


class SiLU(Activation):
    """``x * sigmoid(x)``, also called swish (Elfwing, Uchibe and Doya 2017). Keeps its input."""

    function, flop = "silu", (5, 9)


class GELU(Activation):
    """``x`` times the normal distribution function of ``x`` (Hendrycks and Gimpel 2016). Keeps its input.

    Args:
        approximate: "none", or "tanh": ``x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2``.
    """

    def __init__(self, approximate: str = "none", *, name: str | None = None):
        super().__init__(name)
        if approximate not in ("none", "tanh"):
            raise checks.unknown("approximation of GELU", approximate, ("none", "tanh"))
        self.approximate = approximate
        self.function = "gelu" if approximate == "none" else "gelu_tanh"
        self.flop = (5, 11) if approximate == "none" else (10, 17)

    def describe(self) -> str:
        return f"approximate={self.approximate!r}"


class Hardswish(Activation):
    """``x * min(max(x + 3, 0), 6) / 6`` (Howard et al., "Searching for MobileNetV3", ICCV 2019). Keeps its input."""

    function, flop = "hardswish", (5, 5)


class Softmax(Layer):
    """``exp(x) / sum of exp(x)`` over channels, the last axis, around the largest. Keeps its output.

    A loss wants logits: `SoftmaxCrossEntropy` does both in one pass.
    """

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) < 2 or shape[-1] < 1:
            raise checks.bad_shape(self.name, "x", "(N, ..., C) with at least one channel", shape)
        return shape

    def cost(self, shape: tuple[int, ...], itemsize: int = 4) -> Cost:
        n = prod(shape)
        return Cost(PassCost(5 * n, 2 * n * itemsize), PassCost(4 * n, 3 * n * itemsize))

    def compute(self, x: Any) -> Any:
        y = self.ops.softmax(x)
        self.save(y=y)
        return y

    def backward_data(self, dy: Any, add: Any = None) -> Any:
        return self.ops.softmax_backward(dy, self.saved().y)
