"""Activation functions and their gradients."""

from __future__ import annotations

from minidl import checks
from minidl.cpu import _activation
from minidl.cpu.array import Array, empty, flat_float32, stored
from minidl.precision import float32

KEEP_OUTPUT = ("relu", "relu6", "leaky_relu", "sigmoid", "tanh")  # whose gradient is a function of the output


def _index(function: str) -> int:
    if function not in _activation.FUNCTIONS:
        raise checks.unknown("activation", function, _activation.FUNCTIONS)
    return _activation.FUNCTIONS.index(function)


def activate(x: Array, function: str, slope: float = 0.0) -> Array:
    """``function(x)``, any shape; NaN stays NaN.

    Args:
        function: "relu", "relu6", "leaky_relu", "sigmoid", "tanh", "silu", "gelu", "gelu_tanh" or "hardswish".
        slope: of "leaky_relu" below zero.
    """
    y = empty(x.size, float32)
    _activation.activate(_index(function), flat_float32(x), y, slope)
    return stored(y, x.shape, x.dtype)


def activate_backward(dy: Array, kept: Array, function: str, slope: float = 0.0, *, add: Array | None = None) -> Array:
    """``dy`` times the slope of ``function``, plus ``add`` (all of one shape and dtype).

    Args:
        kept: the output of "relu", "relu6", "leaky_relu", "sigmoid" and "tanh"; the input of the others.
    """
    assert kept.shape == dy.shape and (add is None or add.shape == dy.shape), "shapes disagree"
    dx = empty(dy.size, float32)
    more = None if add is None else flat_float32(add)
    _activation.activate_backward(_index(function), flat_float32(dy), flat_float32(kept), more, dx, slope)
    return stored(dx, dy.shape, dy.dtype)


def relu(x: Array) -> Array:
    """``max(x, 0)``, any shape; NaN stays NaN."""
    return activate(x, "relu")


def relu_backward(dy: Array, y: Array, *, add: Array | None = None) -> Array:
    """``dy`` where the output ``y`` was positive, else 0, plus ``add`` (all of one shape and dtype)."""
    return activate_backward(dy, y, "relu", add=add)
