"""Layers that join several inputs: residual sums and channel concatenation."""

from __future__ import annotations

from math import prod
from typing import Any

from minidl import checks
from minidl.layer import Layer
from minidl.profile import Cost, PassCost
from minidl.value import Normalized, Origin, Value, materialize

__all__ = ["Add", "Concat"]


class Add(Layer):
    """Sum of two inputs of one shape: the join of a residual block. Both gradients are ``dy`` itself.

    A sum of unfinished batch norms is left unfinished too.
    """

    num_inputs = 2
    accepts_unfinished = True
    accepts_masked = True

    def output_shape(self, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
        if a != b:
            raise checks.bad_shape(self.name, "second input", f"{a} like the first", b)
        return a

    def cost(self, a: tuple[int, ...], b: tuple[int, ...], itemsize: int = 4) -> Cost:
        n = prod(a)
        return Cost(forward=PassCost(n, 3 * n * itemsize))

    def compute(self, *inputs: Any) -> Any:
        self.save()
        terms = [term for x in inputs for term in self._terms(x)]
        if any(isinstance(term, Normalized) for term in terms):
            return Value(origin=Origin(tuple(terms)))
        return self.ops.add(*terms)

    def _terms(self, x: Any) -> tuple[Any, ...]:
        """What ``x`` adds to the sum: summands still owed, or one array."""
        if isinstance(x, Value) and x.array is None and not x.origin.relu:
            return x.origin.terms
        return (materialize(self.ops, x).array if isinstance(x, Value) else x,)

    def backward_data(self, dy: Any, add: Any = None) -> tuple[Any, Any]:
        return dy, dy


class Concat(Layer):
    """Concatenation of two or more inputs along channels. The gradients are channel slices of ``dy``, not copies.

    Shapes:
        (N, H, W, C1), (N, H, W, C2), ... → (N, H, W, C1 + C2 + ...).
    """

    num_inputs = 0  # any number

    def output_shape(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        if len(shapes) < 2:
            raise checks.bad_value(self.name, "number of inputs", "at least 2", len(shapes))
        for shape in shapes:
            if not shape or shape[:-1] != shapes[0][:-1]:
                raise checks.bad_shape(self.name, "every input", f"{(*shapes[0][:-1], 'C')} like the first", shape)
        return *shapes[0][:-1], sum(shape[-1] for shape in shapes)

    def cost(self, *shapes: tuple[int, ...], itemsize: int = 4) -> Cost:
        return Cost(forward=PassCost(0, 2 * sum(map(prod, shapes)) * itemsize))

    def compute(self, *parts: Any) -> Any:
        self.save(channels=tuple(part.shape[-1] for part in parts))
        return self.ops.concat(parts)

    def backward_data(self, dy: Any, add: Any = None) -> tuple[Any, ...]:
        parts, begin = [], 0
        for channels in self.saved().channels:
            parts.append(dy[..., begin : begin + channels])
            begin += channels
        return tuple(parts)
