"""Squeeze and excitation over a batch norm and its activation, of which only the batch norm's input is read."""

from __future__ import annotations

import numpy as np

from minidl.cpu.activation import activate
from minidl.cpu.array import Array, rows_float32, stored, write_gradient
from minidl.cpu.batch_norm import _masked, _normalized, batch_norm_backward_apply
from minidl.precision import float32


def batch_norm_means(
    x: Array, moments: Array, gamma: Array | None, beta: Array | None, function: str, slope: float = 0.0
) -> Array:
    """Means (N, 1, ..., 1, C) over the pixels of each sample of what ``batch_norm_activate`` makes of x (N, ..., C).

    Its values are not rounded before.
    """
    y = _samples(_activated(x, moments, gamma, beta, function, slope), x)
    return _gates(y.sum(axis=1, dtype=np.float64) / max(y.shape[1], 1), x)


def batch_norm_gate(
    x: Array, moments: Array, gamma: Array | None, beta: Array | None, gate: Array, function: str, slope: float = 0.0
) -> Array:
    """What ``batch_norm_activate`` makes of x (N, ..., C), times a ``gate`` (N, 1, ..., 1, C); rounded once."""
    y = _samples(_activated(x, moments, gamma, beta, function, slope), x)
    return stored(y * rows_float32(gate)[:, None], x.shape, x.dtype)


def batch_norm_gate_gradient(
    dz: Array, x: Array, moments: Array, gamma: Array | None, beta: Array | None, function: str, slope: float = 0.0
) -> tuple[Array, Array]:
    """The gradient of the gate of `batch_norm_gate`, and sums that its batch norm needs later, in one pass.

    Args:
        dz: gradient of its output, (N, ..., C).

    Returns:
        dgate (N, 1, ..., 1, C): sums of ``dz*y`` with y what is gated; and (N, 4, C) float32: sums of ``dz*s``, ``s``,
        ``dz*s*(x - mean)`` and ``s*(x - mean)`` with s the slope of the activation.
    """
    assert dz.shape == x.shape and dz.dtype == x.dtype, (dz.shape, x.shape, dz.dtype, x.dtype)
    g, y = (_samples(array, x) for array in (rows_float32(dz), _activated(x, moments, gamma, beta, function, slope)))
    ones = np.ones(x.shape, float32)
    slopes = [_samples(_masked(one, x, moments, gamma, beta, function, slope), x) for one in (dz, ones)]
    centred = _samples(rows_float32(x) - moments[0], x)
    terms = *slopes, *(s * centred for s in slopes)
    sums = np.stack([term.sum(axis=1, dtype=np.float64) for term in terms], axis=1).astype(float32)
    return _gates((g * y).sum(axis=1, dtype=np.float64), x), sums


def batch_norm_gate_backward_stats(
    sums: Array, gate: Array, dmean: Array, pixels: int, moments: Array, *, dgamma: Array | None = None,
    dbeta: Array | None = None, accumulate: bool = False,
) -> Array:  # fmt: skip
    """`batch_norm_backward_stats` behind `batch_norm_gate` and `batch_norm_means`, from what `batch_norm_gate_gradient`
    left of images of so many ``pixels``: the gradient of the activation's output is ``dz*gate + dmean/pixels``.
    """
    factors = rows_float32(gate).astype(np.float64), rows_float32(dmean).astype(np.float64) / pixels
    total = [sum(f * sums[:, k + i] for i, f in enumerate(factors)).sum(axis=0) for k in (0, 2)]
    found = np.stack([total[0], total[1] * moments[1]])
    write_gradient(dbeta, found[0], accumulate)
    write_gradient(dgamma, found[1], accumulate)
    return found


def batch_norm_gate_backward_apply(
    dz: Array, gate: Array, dmean: Array, x: Array, moments: Array, gamma: Array | None, beta: Array | None,
    sums: Array | None, count: Array | None, function: str, slope: float = 0.0,
) -> Array:  # fmt: skip
    """``batch_norm_activate_backward_apply`` of the gradient ``dz*gate + dmean/pixels``, which is never written."""
    g = _samples(rows_float32(dz), x)
    dy = g * rows_float32(gate)[:, None] + rows_float32(dmean)[:, None] / np.float32(max(g.shape[1], 1))
    masked = _masked(dy.reshape(x.shape), x, moments, gamma, beta, function, slope)
    return stored(batch_norm_backward_apply(masked, x, moments, gamma, sums, count), x.shape, x.dtype)


def _activated(x: Array, moments: Array, gamma: Array | None, beta: Array | None, function: str, slope: float) -> Array:
    """What the activation makes of the batch norm, not rounded: float32 rows."""
    return activate(_normalized(x, moments, gamma, beta), function, slope)


def _samples(rows: Array, x: Array) -> Array:
    """Rows of x as (N, pixels, C)."""
    return rows.reshape(x.shape[0], -1, x.shape[-1]) if x.size else np.zeros((x.shape[0], 0, x.shape[-1]), float32)


def _gates(values: Array, x: Array) -> Array:
    """(N, C) as gates of the type of x."""
    return stored(values.astype(float32), (x.shape[0], *(1,) * (x.ndim - 2), x.shape[-1]), x.dtype)
