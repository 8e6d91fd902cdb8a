"""Group normalisation, and sums over the pixels of each sample."""

from __future__ import annotations

import numpy as np

from minidl.cpu import _norm
from minidl.cpu.array import QUIET, Array, empty, rows_float32, stored, write_gradient
from minidl.precision import float32
from minidl.shapes import ceil_div

_CHUNK = 256  # rows that are added at once; products in float32, then merged in float64


@QUIET
def group_norm_stats(x: Array, groups: int, *, eps: float) -> Array:
    """Moments (2, N, groups) float32 of ``x`` (N, ..., C): mean and 1 / sqrt(biased variance + eps) of each group."""
    v, n, pixels = samples(x)
    channels = v.shape[1]
    if v.size == 0:
        return np.zeros((2, n, groups), float32)
    chunks = ceil_div(pixels, _CHUNK)
    sums = empty((n * chunks, 2, channels), np.float64)
    _norm.moment_sums(v, pixels, _CHUNK, sums)
    count = np.minimum(_CHUNK, pixels - _CHUNK * np.arange(chunks)).astype(np.float64)[:, None, None]
    starts = (pixels * np.arange(n)[:, None] + _CHUNK * np.arange(chunks)).reshape(-1)
    # Of each chunk and channel: mean and sum of squared deviations. Merged as by Chan, Golub and LeVeque (1983).
    grouped = (n, chunks, groups, channels // groups)
    first, second = (sums[:, i].reshape(grouped) for i in (0, 1))
    mean = v[starts].astype(np.float64).reshape(grouped) + first / count
    squares = second - first * first / count
    total = pixels * (channels // groups)
    centre = (mean * count).sum(axis=(1, 3)) / total
    deviation = mean - centre[:, None, :, None]
    variance = (squares + count * deviation * deviation).sum(axis=(1, 3)) / total
    return np.stack([centre, 1 / np.sqrt(np.maximum(variance, 0) + eps)]).astype(float32)


def group_norm_apply(x: Array, moments: Array, gamma: Array | None = None, beta: Array | None = None) -> Array:
    """``(x - mean) * rstd * gamma + beta`` with the ``moments`` (2, N, groups) of each sample; gamma, beta (C,)."""
    v, n, pixels = samples(x)
    y = empty(v.shape, float32)
    if v.size:
        mean, rstd = _per_channel(moments, v.shape[1])
        scale = rstd if gamma is None else rstd * gamma
        shift = np.zeros_like(scale) if beta is None else np.broadcast_to(beta, scale.shape).copy()
        _norm.affine_rows(v, mean, scale, shift, pixels, y)
    return stored(y, x.shape, x.dtype)


@QUIET
def group_norm_backward_stats(
    dy: Array, x: Array, moments: Array, gamma: Array | None = None, *, dgamma: Array | None = None,
    dbeta: Array | None = None, accumulate: bool = False,
) -> Array:  # fmt: skip
    """Parameter gradients (C,) float32 where asked for, overwritten or added to, and what the data gradient needs.

    Returns:
        sums (2, N, groups) float32: means over each group of ``dy * gamma`` and of ``dy * gamma * xhat``.
    """
    v, n, pixels = samples(x)
    channels, groups = v.shape[1], moments.shape[2]
    mean, rstd = _per_channel(moments, channels)
    first, second = sample_sums(dy, v, mean, n, pixels)
    second = second * rstd
    write_gradient(dbeta, first.sum(axis=0), accumulate)
    write_gradient(dgamma, second.sum(axis=0), accumulate)
    weighted = np.stack([first, second]) * (1.0 if gamma is None else gamma)
    size = max(pixels * (channels // groups), 1)
    return (weighted.reshape(2, n, groups, channels // groups).sum(axis=3) / size).astype(float32)


@QUIET
def group_norm_backward_apply(
    dy: Array, x: Array, moments: Array, gamma: Array | None, sums: Array, *, add: Array | None = None
) -> Array:
    """The gradient of the input, plus ``add``: ``rstd * (dy * gamma - sums[0] - xhat * sums[1])``."""
    v, n, pixels = samples(x)
    dx = empty(v.shape, float32)
    if v.size:
        channels = v.shape[1]
        mean, rstd = _per_channel(moments, channels)
        first, second = _per_channel(sums, channels)
        slope = rstd if gamma is None else rstd * gamma
        more = None if add is None else rows_float32(add)
        _norm.norm_backward_rows(rows_float32(dy), v, mean, slope, first * rstd, second * rstd * rstd, more, pixels, dx)
    return stored(dx, x.shape, x.dtype)


def samples(x: Array) -> tuple[Array, int, int]:
    """``x`` (N, ..., C) as rows in float32, N, and the rows of a sample."""
    v = rows_float32(x)
    return v, x.shape[0], v.shape[0] // max(x.shape[0], 1)


def _per_channel(values: Array, channels: int) -> Array:
    """(2, N, groups) values of groups as (2, N, channels)."""
    return np.repeat(values, channels // values.shape[2], axis=2)


def sample_sums(dy: Array, v: Array, mean: Array, n: int, pixels: int) -> tuple[Array, Array]:
    """Sums of dy and of dy * (x - mean) over the pixels of each sample, (N, C) float64."""
    chunks = ceil_div(pixels, _CHUNK)
    sums = empty((n * chunks, 2, v.shape[1]), float32)
    if v.size:
        _norm.product_sums(rows_float32(dy), v, np.ascontiguousarray(mean), pixels, _CHUNK, sums)
    total = sums.reshape(n, chunks, 2, v.shape[1]).sum(axis=1, dtype=np.float64)
    return total[:, 0], total[:, 1]
