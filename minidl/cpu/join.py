"""Operations that join several arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minidl.cpu import _elementwise
from minidl.cpu.array import Array, empty, flat_float32, rows, stored
from minidl.precision import float32

__all__ = ["add", "concat"]


def add(a: Array, b: Array) -> Array:
    """``a + b``, both of one shape and dtype, added in float32 and rounded once."""
    assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, a.dtype, b.shape, b.dtype)
    y = empty(a.size, float32)
    _elementwise.add(flat_float32(a), flat_float32(b), y)
    return stored(y, a.shape, a.dtype)


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
