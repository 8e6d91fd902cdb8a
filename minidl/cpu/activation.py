"""Activation functions and their gradients."""

from __future__ import annotations

from minidl.cpu import _elementwise
from minidl.cpu.array import Array, empty, flat_float32, stored
from minidl.precision import float32

__all__ = ["relu", "relu_backward"]


def relu(x: Array) -> Array:
    """``max(x, 0)``, any shape; NaN stays NaN."""
    y = empty(x.size, float32)
    _elementwise.relu(flat_float32(x), y)
    return stored(y, x.shape, x.dtype)


def relu_backward(dy: Array, y: Array, *, add: Array | None = None) -> Array:
    """``dy`` where the output ``y`` was positive, else 0, plus ``add`` (all of one shape and dtype)."""
    assert y.shape == dy.shape and (add is None or add.shape == dy.shape), "shapes disagree"
    dx = empty(dy.size, float32)
    _elementwise.relu_backward(flat_float32(dy), flat_float32(y), None if add is None else flat_float32(add), dx)
    return stored(dx, dy.shape, dy.dtype)
