"""What travels along an edge of a graph: an array, or an array still owed together with what it is made of.

A layer may hand over a `Value` whose ``array`` is missing: the batch normalisation, residual sum and ReLU recorded in
``origin`` are then still to be done, by the consumer's own kernel if it can (fusion), else by `materialize`, one
elementwise kernel. Either way the numbers are the same, so any fusion plan is correct; only bytes and time differ.

Backward, an activation that finished such a value may hand down a `MaskedGradient`, whose mask or slope is still owed,
for the batch norm below to apply in its own kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Normalized:
    """One owed batch normalisation: ``(raw - mean) * rstd * gamma + beta``.

    ``raw``: (..., C), storage dtype; ``moments``: (2, C) float32, mean and rstd; ``gamma``, ``beta``: (C,) float32 or
    None; ``owner``: the batch norm's name.
    """

    raw: Any
    moments: Any
    gamma: Any
    beta: Any
    owner: str = ""


class Function(NamedTuple):
    """An activation as the operation tables take it.

    ``keeps_output``: its gradient is taken as a function of its output, else of its input.
    """

    name: str
    slope: float = 0.0
    keeps_output: bool = False


RELU = Function("relu", keeps_output=True)


@dataclass(frozen=True)
class Origin:
    """What a value is made of: the sum of ``terms``, each normalised or plain, then ReLU if ``relu``; or another
    activation, ``function``, of one normalised term.

    Without terms nothing is known of what the ReLU is over: then the value's array is there. ``owner``: name of the
    ReLU that finished it; none where a convolution did its work already.
    """

    terms: tuple[Normalized | Any, ...]
    relu: bool = False
    owner: str = ""
    function: Function | None = None

    @property
    def open(self) -> bool:
        """Whether it is the sum itself, which more can be added to."""
        return not self.relu and self.function is None


@dataclass(frozen=True, init=False)
class Value:
    """An array with notes, which are never owed.

    Attributes:
        array: None where it is still owed, and follows from ``origin``.
        origin: what it was made of.
        stats: what ``batch_norm_finalize`` takes, from the producer.
        buffer: an array whose first channels ``array`` is; the others are free for the one `Concat` that continues it.
        signs: of ``array``, a rectified sum, from ``batch_norm_join``.
        place: where the convolution that reads this is to write its output (`minidl.layers.join.share_buffers`).
        pooled: what the max pooling that reads it beside others would make of it (`minidl.layers.pool2d.pool_beside`).
        given: what the producer read, if it finished that on the way, for others who read it as well.
    """

    array: Any = None
    origin: Origin | None = None
    stats: Any = None
    buffer: Any = None
    signs: Any = None
    place: Any = None
    pooled: Any = None
    given: Value | None = None

    def __init__(
        self,
        array: Any = None,
        origin: Origin | None = None,
        stats: Any = None,
        buffer: Any = None,
        signs: Any = None,
        place: Any = None,
        pooled: Any = None,
        given: Value | None = None,
    ):
        # A frozen class's own would set them one by one, four times as long; every layer's output is one.
        self.__dict__.update(
            array=array, origin=origin, stats=stats, buffer=buffer, signs=signs, place=place, pooled=pooled, given=given
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return _first(self).shape

    @property
    def dtype(self) -> Any:
        return _first(self).dtype


def owed(value: Value) -> Normalized | None:
    """The one batch norm, with weight and bias, whose output under a ReLU is still owed."""
    if value.array is not None or not value.origin.relu or len(value.origin.terms) > 1:
        return None
    term = value.origin.terms[0]
    return term if isinstance(term, Normalized) and term.gamma is not None and term.beta is not None else None


def joined(value: Value) -> tuple[Normalized, Normalized | Any] | None:
    """What a rectified sum that is still owed is made of, if that is a batch norm and another one or a plain array."""
    if value.array is not None or not value.origin.relu or len(value.origin.terms) != 2:
        return None
    one, other = sorted(value.origin.terms, key=lambda term: not isinstance(term, Normalized))
    return (one, other) if isinstance(one, Normalized) else None


def shortcut(other: Normalized | Any) -> tuple[Any, dict[str, Any]]:
    """The second of `joined` as ``batch_norm_join`` takes it: an array, and keyword arguments."""
    if not isinstance(other, Normalized):
        return other, {}
    return other.raw, {"add_moments": other.moments, "add_gamma": other.gamma, "add_beta": other.beta}


def activated(value: Any) -> tuple[Normalized, Function] | None:
    """The batch norm and the activation over it, other than a ReLU, that are still owed."""
    if not isinstance(value, Value) or value.array is not None or value.origin.function is None:
        return None
    return value.origin.terms[0], value.origin.function


def _first(value: Value) -> Any:
    """Any array that has the value's shape and dtype."""
    if value.array is not None:
        return value.array
    assert value.origin is not None, "a value needs an array or an origin"
    term = value.origin.terms[0]
    return term.raw if isinstance(term, Normalized) else term


def materialize(ops: ModuleType, value: Value) -> Value:
    """The same value with its array filled in; the origin stays, because the backward pass needs it."""
    if value.array is not None:
        return value
    assert value.origin is not None, "a value needs an array or an origin"
    if (both := activated(value)) is not None:
        term, (name, slope, _) = both
        array = ops.batch_norm_activate(term.raw, term.moments, term.gamma, term.beta, name, slope)
        return Value(array, value.origin, value.stats)
    owed = [term for term in value.origin.terms if isinstance(term, Normalized)]
    array, signs = None, None
    for term in value.origin.terms:
        if not isinstance(term, Normalized):
            array = term if array is None else ops.add(array, term)
    relu = value.origin.relu
    if relu and not owed:
        array = ops.relu(array)
    while owed:
        term = owed.pop(0)
        norm, other = (term.raw, term.moments, term.gamma, term.beta), {"add": array}
        if array is None and owed:  # two at once
            term = owed.pop(0)
            other = {"add": term.raw, "add_moments": term.moments, "add_gamma": term.gamma, "add_beta": term.beta}
        if relu and not owed and other["add"] is not None:
            array, signs = ops.batch_norm_join(*norm, **other)
        else:
            array = ops.batch_norm_apply(*norm, **other, relu=relu and not owed)
    return Value(array, value.origin, value.stats, signs=signs)


class MaskedGradient:
    """The gradient of a ReLU's input, the mask still owed: ``dy`` where the ReLU's output was positive, else 0.

    One object may travel down both branches of a join: who masks it first leaves the result for the others. Over a
    single batch norm it may be another activation's, whose slope is owed instead.

    Attributes:
        dy: gradient of the activation's output.
        y: that output, of a ReLU its signs perhaps; None where it is the one batch norm ``term``, and follows from it.
        term: the batch norm under the activation, if there is nothing else.
        function: the activation; a ReLU unless there is a ``term``.
        array: the masked gradient, once somebody has it.
        relu, norm, parts: where a convolution has masked (`masked`), the names of the ReLU and of a batch norm
            under it, and the parts of that one's sums; without a batch norm (``norm`` is empty) those of a bias'
            gradient (`summands`), with no mask and nothing owed where ``relu`` is empty, too.
        other: the second batch norm below a sum, if nobody has taken its sums yet: whoever reads the gradient anyway,
            the first one, may, and leave them as ``norm`` and ``parts``.
        further: the name of that one and the parts of its sums, where the convolution has taken them, too.
    """

    __slots__ = ("array", "dy", "function", "further", "norm", "other", "parts", "relu", "term", "y")

    def __init__(self, dy: Any, *, y: Any = None, term: Normalized | None = None, function: Function = RELU):
        self.dy, self.y, self.term, self.function, self.array = dy, y, term, function, None
        self.relu, self.norm, self.parts, self.other, self.further = "", "", None, None, ("", None)

    @classmethod
    def masked(
        cls, array: Any, relu: str, norm: str = "", parts: Any = None, other: Normalized | None = None
    ) -> MaskedGradient:
        """One that is masked for the layer ``relu`` already, if any, with what was taken for the layer ``norm``."""
        gradient = cls(array)
        gradient.array, gradient.relu, gradient.norm, gradient.parts = array, relu, norm, parts
        gradient.other = other
        return gradient

    def parts_of(self, norm: str) -> Any:
        """The parts of a batch norm's sums, None where nobody has taken them."""
        if self.norm == norm:
            return self.parts
        return self.further[1] if self.further[0] == norm else None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.dy.shape

    @property
    def dtype(self) -> Any:
        return self.dy.dtype

    def finish(self, ops: ModuleType) -> Any:
        """The masked gradient as an array."""
        if self.array is None:
            if self.term is None:
                self.array = ops.relu_backward(self.dy, self.y)
            else:
                self.array = self._behind(ops, self.dy)
        return self.array

    def _behind(self, ops: ModuleType, dy: Any) -> Any:
        """``dy`` times the slope of the activation over the batch norm."""
        name, slope, _ = self.function
        return ops.activate_backward(dy, self._kept(ops, self.term), name, slope)

    def _kept(self, ops: ModuleType, term: Normalized) -> Any:
        """What the activation would have kept over the batch norm: its output, or its input."""
        facts, (name, slope, keeps_output) = (term.raw, term.moments, term.gamma, term.beta), self.function
        return ops.batch_norm_activate(*facts, name, slope) if keeps_output else ops.batch_norm_apply(*facts)


class PooledGradient(MaskedGradient):
    """The gradient of a batch norm's output under a ReLU and a max pooling, left as that of the pooled array.

    Attributes:
        dy: gradient of the pooled array; masked where that is positive once ``array`` is there.
        y, largest, index: as of ``batch_norm_max_pool2d``.
        window: of the pooling, as the operations take it.
    """

    __slots__ = ("index", "largest", "window", "_shape")

    def __init__(self, dy: Any, y: Any, largest: Any, index: Any, shape: tuple[int, ...], window: dict[str, Any]):
        super().__init__(dy, y=y)
        self.largest, self.index, self.window, self._shape = largest, index, window, shape

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    def finish(self, ops: ModuleType) -> Any:
        masked = ops.relu_backward(self.dy, self.y) if self.array is None else self.array
        return ops.max_pool2d_backward(masked, self.index, self._shape, **self.window)


class TiledGradient(MaskedGradient):
    """The gradient of a batch norm's output under a ReLU that others read beside a max pooling, not added up yet.

    Attributes:
        dy: gradient of the pooled array.
        add: that of the ReLU's output from its other readers; None: there is none.
        window: of the pooling, whose windows lie side by side, as the operations take it.
    """

    __slots__ = ("add", "window")

    def __init__(self, dy: Any, add: Any, term: Normalized, window: dict[str, Any]):
        super().__init__(dy, term=term)
        self.add, self.window = add, window

    @property
    def shape(self) -> tuple[int, ...]:
        return self.term.raw.shape

    def finish(self, ops: ModuleType) -> Any:
        if self.array is None:
            y, options = self._kept(ops, self.term), dict(self.window)
            index = ops.max_pool2d(y, **options)[1]
            del options["ceil_mode"]
            dx = ops.max_pool2d_backward(self.dy, index, self.shape, **options, add=self.add)
            self.array = ops.relu_backward(dx, y)
        return self.array


class GatedGradient(MaskedGradient):
    """The gradient of an image that a gate multiplies: the product ``dy * gate`` is still owed.

    A pooling that has it to add, as in squeeze and excitation, adds the gradient of its means. Where the image itself
    was owed, an activation over a batch norm, that one leaves all to the batch norm.

    Attributes:
        gate: (N, 1, 1, C).
        sums: of ``batch_norm_gate_gradient``, where the image was owed.
        dmean: like ``gate``: the gradient of the image's means over its pixels, which is owed too; None: there is none.
        behind: whether the slope of the activation is owed, too: it is the gradient of the batch norm's output then.
    """

    __slots__ = ("behind", "dmean", "gate", "sums")

    def __init__(self, dy: Any, gate: Any, term: Normalized | None = None, function: Function = RELU, sums: Any = None):
        super().__init__(dy, term=term, function=function)
        self.gate, self.sums, self.dmean, self.behind = gate, sums, None, False

    def finish(self, ops: ModuleType) -> Any:
        if self.array is None:
            gate = self.dy, self.gate
            product = ops.mul(*gate) if self.dmean is None else ops.gate_backward(*gate, self.dmean)
            self.array = self._behind(ops, product) if self.behind else product
        return self.array


class SpacedGradient(MaskedGradient):
    """The gradient of an image that is zero but at every second pixel of every second line: these alone, in ``dy``.

    Nobody gets it but the convolution that reads the same image and adds it (`layers.join.leave_strided`).
    """

    __slots__ = ("_shape",)

    def __init__(self, dy: Any, shape: tuple[int, ...]):
        super().__init__(dy)
        self._shape = shape

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    def finish(self, ops: ModuleType) -> Any:
        raise AssertionError("the convolution that it was left to adds it")


class NormGradient(MaskedGradient):
    """The gradient of a batch norm's input, of which the last pass, ``batch_norm_backward_apply``, is still owed.

    The convolution below may make of it both of its own gradients, which then read once what that pass and they
    would read three times; or, as the first of a network, the only one that it has.

    Attributes:
        dy: gradient of the batch norm's output, or a masked `PooledGradient`, whose gathering is owed, too.
        facts: its input, moments, weight, sums and count, as ``batch_norm_backward_apply`` takes them; read until it
            is no longer `owed`.
        passed: the gradient of the convolution's input, once the convolution has made both.
    """

    __slots__ = ("__weakref__", "facts", "passed")

    def __init__(self, dy: Any, *facts: Any):
        super().__init__(dy)
        self.facts, self.passed = facts, None

    @property
    def owed(self) -> bool:
        """Whether nobody has made anything of it yet."""
        return self.array is None and self.passed is None

    def finish(self, ops: ModuleType) -> Any:
        if self.array is None and isinstance(self.dy, PooledGradient):
            facts = self.dy.array, self.dy.index, *self.facts
            self.array = ops.batch_norm_max_pool2d_backward(*facts, **self.dy.window)
        elif self.array is None:
            self.array = ops.batch_norm_backward_apply(self.dy, *self.facts)
        return self.array


def addend(ops: ModuleType, layer: Any, gradient: Any) -> Any:
    """A gradient as a layer's ``backward`` takes it to add."""
    return gradient if isinstance(gradient, layer.accepts_owed) else finished(ops, gradient)


def summands(ops: ModuleType, gradient: Any) -> Any:
    """Rows that add up to the sums of a gradient over its pixels: what a kernel left of them, or its own."""
    left = isinstance(gradient, MaskedGradient) and not gradient.norm and gradient.parts is not None
    return gradient.parts if left else finished(ops, gradient)


def finished(ops: ModuleType, gradient: Any) -> Any:
    """A gradient as an array; None stays None."""
    return gradient.finish(ops) if isinstance(gradient, MaskedGradient) else gradient
