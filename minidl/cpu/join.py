"""Operations that join several arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minidl.cpu import _elementwise, _norm
from minidl.cpu.array import Array, empty, flat_float32, rows, rows_float32, stored
from minidl.cpu.group_norm import sample_sums, samples
from minidl.precision import float32


def add(a: Array, b: Array) -> Array:
    """``a + b``, both of one shape and dtype, added in float32 and rounded once."""
    assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, a.dtype, b.shape, b.dtype)
    y = empty(a.size, float32)
    _elementwise.add(flat_float32(a), flat_float32(b), y)
    return stored(y, a.shape, a.dtype)


def mul(a: Array, b: Array) -> Array:
    """``a * b`` of one dtype, multiplied in float32 and rounded once.

    Args:
        b: like ``a``; or a gate (N, 1, ..., 1, C), one number for each sample and channel of ``a`` (N, ..., C).
    """
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    if a.shape == b.shape:
        y = empty(a.size, float32)
        _elementwise.mul(flat_float32(a), flat_float32(b), y)
        return stored(y, a.shape, a.dtype)
    return _gated(a, b, np.zeros_like(b))


def gate_backward(dy: Array, gate: Array, dmean: Array) -> Array:
    """The gradient of an image ``a`` (N, ..., C) from that of ``mul(a, gate)`` and that of its mean over all pixels.

    ``dy * gate + dmean / pixels``, rounded once; ``gate`` and ``dmean`` are (N, 1, ..., 1, C).
    """
    return _gated(dy, gate, dmean)


def _gated(a: Array, gate: Array, mean: Array) -> Array:
    v, n, pixels = samples(a)
    for one in (gate, mean):
        assert one.shape == (n, *(1,) * (a.ndim - 2), a.shape[-1]) and one.dtype == a.dtype, (a.shape, one.shape)
    y = empty(v.shape, float32)
    if v.size:
        factor, shift = (np.ascontiguousarray(rows_float32(one)) for one in (gate, mean))
        _norm.affine_rows(v, np.zeros_like(factor), factor, shift / np.float32(pixels), pixels, y)
    return stored(y, a.shape, a.dtype)


def gate_gradient(dy: Array, a: Array) -> Array:
    """The gradient of the gate of `mul`: ``dy * a`` (N, ..., C) added up over each sample, (N, 1, ..., 1, C)."""
    v, n, pixels = samples(a)
    _, products = sample_sums(dy, v, np.zeros((n, a.shape[-1]), float32), n, pixels)
    return stored(products.astype(float32), (n, *(1,) * (a.ndim - 2), a.shape[-1]), a.dtype)


def concat(parts: Sequence[Array]) -> Array:
    """``parts`` (..., C_i) side by side along channels: (..., sum of C_i); equal dtypes and leading axes."""
    leading, dtype = parts[0].shape[:-1], parts[0].dtype
    assert all(part.shape[:-1] == leading and part.dtype == dtype for part in parts), "parts do not fit together"
    y = empty((*leading, sum(part.shape[-1] for part in parts)), dtype)
    target = rows(y).view(np.uint8)
    first = 0
    for part in parts:
        width = part.shape[-1] * dtype.itemsize
        if part.size:
            _elementwise.copy_rows(rows(part).view(np.uint8), target[:, first : first + width])
        first += width
    return y
