"""What travels along an edge of a graph: an array, or an array still owed together with what it is made of.

A layer may hand over a `Value` whose ``array`` is missing: the batch normalisation, residual sum and ReLU recorded in
``origin`` are then still to be done, by the consumer's own kernel if it can (fusion), else by `materialize`, one
elementwise kernel. Either way the numbers are the same, so any fusion plan is correct; only bytes and time differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

__all__ = ["Normalized", "Origin", "Value", "materialize"]


@dataclass(frozen=True)
class Normalized:
    """One owed batch normalisation: ``(raw - mean) * rstd * gamma + beta``.

    ``raw``: (..., C), storage dtype; ``moments``: (2, C) float32, mean and rstd; ``gamma``, ``beta``: (C,) float32 or
    None.
    """

    raw: Any
    moments: Any
    gamma: Any
    beta: Any


@dataclass(frozen=True)
class Origin:
    """What a value is made of: the sum of ``terms``, each normalised or plain, then ReLU if ``relu``.

    ``mask``: the ReLU's sign bits where they were kept for the backward pass, else None.
    """

    terms: tuple[Normalized | Any, ...]
    relu: bool = False
    mask: Any = None


@dataclass(frozen=True)
class Value:
    """An array with notes. ``stats`` is never owed: batch-norm sums (1 + 2C,) float64 taken by the producer."""

    array: Any = None
    origin: Origin | None = None
    stats: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        return _first(self).shape

    @property
    def dtype(self) -> Any:
        return _first(self).dtype


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
    array = None
    terms = sorted(value.origin.terms, key=lambda term: isinstance(term, Normalized))  # plain terms first: added to
    for i, term in enumerate(terms):
        relu = value.origin.relu and i == len(terms) - 1
        if isinstance(term, Normalized):
            array = ops.batch_norm_apply(term.raw, term.moments, term.gamma, term.beta, add=array, relu=relu)
        else:
            array = term if array is None else ops.add(array, term)
            array = ops.relu(array) if relu else array
    return Value(array, value.origin, value.stats)
