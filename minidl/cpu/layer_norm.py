"""Layer normalisation over channels."""

from __future__ import annotations

import numpy as np

from minidl.cpu import _norm
from minidl.cpu.array import Array, empty, rows_float32, stored, write_gradient
from minidl.precision import float32
from minidl.shapes import ceil_div

_CHUNK = 256  # rows whose products are added in float32 before they are merged in float64


def layer_norm(x: Array, gamma: Array | None = None, beta: Array | None = None, *, eps: float) -> tuple[Array, Array]:
    """``(x - mean) * rstd * gamma + beta`` for each row of ``x`` (..., C).

    Args:
        gamma, beta: (C,) float32, or None for 1 and 0.

    Returns:
        y like ``x``; moments (2, rows) float32: mean and 1 / sqrt(biased variance + eps).
    """
    v = rows_float32(x)
    y, moments = empty(v.shape, float32), empty((2, v.shape[0]), float32)
    if v.size:
        _norm.layer_norm(v, gamma, beta, eps, moments, y)
    return stored(y, x.shape, x.dtype), moments


def layer_norm_backward_weight(
    dy: Array, x: Array, moments: Array, *, dgamma: Array | None = None, dbeta: Array | None = None,
    accumulate: bool = False,
) -> None:  # fmt: skip
    """``dgamma`` (C,) float32 = sum over rows of ``dy * xhat``, ``dbeta`` = sum of ``dy``; overwritten, or added to."""
    g, v = rows_float32(dy), rows_float32(x)
    sums = empty((ceil_div(v.shape[0], _CHUNK), 2, v.shape[1]), float32)
    if v.size:
        _norm.row_product_sums(g, v, moments, _CHUNK, sums)
    total = sums.sum(axis=0, dtype=np.float64)
    write_gradient(dbeta, total[0], accumulate)
    write_gradient(dgamma, total[1], accumulate)


def layer_norm_backward_data(
    dy: Array, x: Array, moments: Array, gamma: Array | None = None, *, add: Array | None = None
) -> Array:
    """The gradient of the input, plus ``add``: ``rstd * (g - mean of g - xhat * mean of g * xhat)``, g = dy * gamma."""
    v = rows_float32(x)
    dx = empty(v.shape, float32)
    if v.size:
        more = None if add is None else rows_float32(add)
        _norm.layer_norm_backward(rows_float32(dy), v, gamma, moments, more, dx)
    return stored(dx, x.shape, x.dtype)
