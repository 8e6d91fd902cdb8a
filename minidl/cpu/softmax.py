"""Softmax over channels."""

from __future__ import annotations

from minidl.cpu import _norm
from minidl.cpu.array import Array, empty, rows_float32, stored
from minidl.precision import float32


def softmax(x: Array) -> Array:
    """``exp(x) / sum of exp(x)`` along the last axis of ``x`` (..., C)."""
    v = rows_float32(x)
    y = empty(v.shape, float32)
    if v.size:
        _norm.softmax(v, y)
    return stored(y, x.shape, x.dtype)


def softmax_backward(dy: Array, y: Array) -> Array:
    """``y * (dy - sum of dy * y)`` along the last axis, from the output ``y``."""
    assert dy.shape == y.shape, (dy.shape, y.shape)
    g, v = rows_float32(dy), rows_float32(y)
    dx = empty(v.shape, float32)
    if v.size:
        _norm.softmax_backward(g, v, dx)
    return stored(dx, y.shape, y.dtype)
