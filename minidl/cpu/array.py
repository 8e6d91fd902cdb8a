"""Arrays of the CPU table: making, copying and viewing them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod

import numpy as np

from minidl import shapes
from minidl.cpu._array import Block
from minidl.precision import bfloat16, float16, float32

Array = np.ndarray

_STORAGE = (float32, bfloat16, float16)
# Overflow and NaN are ordinary events in training (a loss scale reacts to them), not news.
QUIET = np.errstate(over="ignore", invalid="ignore")

_POOLED_BYTES = 1 << 16  # smaller arrays come and go within the C library's own heap without page faults


def empty(shape: int | Sequence[int], dtype) -> Array:
    """A dense array with undefined content. Every operation and layer allocates here and nowhere else.

    The memory of large arrays is 256-byte aligned and is reused, see `minidl.cpu._array`.
    """
    dtype = np.dtype(dtype)
    nbytes = (int(shape) if isinstance(shape, int | np.integer) else prod(shape)) * dtype.itemsize
    if nbytes < _POOLED_BYTES:
        return np.empty(shape, dtype)
    return np.ndarray(shape, dtype, buffer=Block(nbytes))


def zeros(shape: int | Sequence[int], dtype) -> Array:
    """A dense array of zeros."""
    out = empty(shape, dtype)
    out.fill(0)
    return out


def from_host(host, dtype=None) -> Array:
    """A dense copy of a NumPy array, list or scalar, converted to ``dtype`` (default: its own)."""
    host = np.asarray(host)
    return cast(host, host.dtype if dtype is None else dtype)


def to_host(x: Array) -> np.ndarray:
    """A dense copy as a NumPy array."""
    return np.array(x, order="C")


def contiguous(x: Array) -> Array:
    """``x`` itself when it is dense in C order, else a dense copy."""
    return x if x.flags.c_contiguous else cast(x, x.dtype)


def cast(x: Array, dtype) -> Array:
    """A dense copy of ``x``, rounded to nearest even in ``dtype``; values beyond its range become infinite."""
    out = empty(x.shape, dtype)
    copy_into(out, x)
    return out


def copy_into(out: Array, x: Array) -> None:
    """``out[...] = x``, rounded to nearest even when the dtypes differ; both dense or pitched, of one shape.

    Nothing is done where ``x`` is what lies there already.
    """
    assert out.shape == x.shape, (out.shape, x.shape)
    if out.dtype == x.dtype:
        if out.__array_interface__["data"] != x.__array_interface__["data"] or out.strides != x.strides:
            np.copyto(out, x)
        return
    # An overflow to infinity is an ordinary event in float16 training (the loss scale reacts to it), not news.
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(out, x, casting="unsafe")


def write_gradient(out: Array | None, total: Array, accumulate: bool) -> None:
    """``total`` into the gradient of a parameter, float32, or added to it; None: nobody asks for that gradient.

    It is rounded first, so that one that is added has the bits of one that stands alone.
    """
    if out is not None:
        np.add(total.astype(float32, copy=False), out if accumulate else float32.type(0), out=out)


def assign(out: Array, values: Sequence[float]) -> None:
    """Write a few numbers from the host into ``out``, (n,) float32, int32 or uint32 with n up to 4."""
    out[...] = np.array(values, out.dtype)


def synchronize() -> None:
    """Return when all queued work is done: at once, as the CPU table queues none."""


def aside(flop: float, moved: float, itemsize: int) -> AbstractContextManager[bool]:
    """Within, work may run on a second stream, beside what comes next: only other work ``aside`` reads its results
    before `rejoin`.

    Gives whether it may read what other work ``aside`` has made.

    Args:
        flop, moved: what it computes, and the bytes that it moves.
        itemsize: of what it multiplies.
    """
    return nullcontext(True)


def rejoin() -> None:
    """What comes next may read all that was made `aside`."""


def rows(x: Array) -> Array:
    """``x`` (..., C) as (rows, C) with unit channel stride and any row pitch.

    A view, unless ``x`` is neither dense nor pitched: then a dense copy.
    """
    if not x.flags.c_contiguous and shapes.pixel_pitch(x.shape, x.strides, x.itemsize) is None:
        x = contiguous(x)
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def rows_float32(x: Array) -> Array:
    """`rows` of ``x`` in float32, the type all CPU kernels compute in: a view of a float32 array, else a copy."""
    assert x.dtype in _STORAGE, f"storage dtype expected, got {x.dtype}"
    return rows(x) if x.dtype == float32 else rows(cast(x, float32))


def flat_float32(x: Array) -> Array:
    """All elements of ``x`` as one dense float32 vector: a view where possible, else a copy."""
    assert x.dtype in _STORAGE, f"storage dtype expected, got {x.dtype}"
    return (contiguous(x) if x.dtype == float32 else cast(x, float32)).reshape(-1)


def stored(y: Array, shape: Sequence[int], dtype) -> Array:
    """A float32 result in its final shape and storage dtype: itself when that is float32, else rounded once."""
    y = y.reshape(shape)
    return y if y.dtype == dtype else cast(y, dtype)
