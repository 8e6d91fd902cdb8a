"""Batch normalization, split where a reduction over ranks may fall.

S. Ioffe, C. Szegedy, "Batch normalization", ICML 2015. Statistics are (count, mean, M2) triples, merged after
T. F. Chan, G. H. Golub, R. J. LeVeque, The American Statistician 37 (1983) 242-247: they keep their accuracy however
large the mean is beside the deviation, and triples of ranks merge like those of chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minidl.cpu import _batch_norm
from minidl.cpu.activation import KEEP_OUTPUT, activate, activate_backward, relu_backward
from minidl.cpu.array import Array, empty, rows_float32, stored, write_gradient
from minidl.precision import float32


def batch_norm_stats(x: Array, *, finish: bool = True) -> Array:
    """Statistics of ``x`` (..., C) over all but the last axis; ``finish`` is for GPUs, where merging takes a kernel.

    Returns:
        (1 + 2C,) float64: the count, C means, C sums of squared deviations from them; zeros when ``x`` is empty.
    """
    stats = empty(1 + 2 * x.shape[-1], np.float64)
    _batch_norm.stats(rows_float32(x), stats)
    return stats


def batch_norm_finalize(
    stats: Array, eps: float, *, running_mean: Array | None = None, running_var: Array | None = None,
    momentum: float = 0.1,
) -> tuple[Array, Array]:  # fmt: skip
    """Merge statistics in row order and turn them into what normalization needs.

    Args:
        stats: (R, 1 + 2C) or (1 + 2C,) float64 from `batch_norm_stats`; rows of count 0 change nothing.
        eps: added to the variance.
        running_mean, running_var: (C,) float32, updated in place: ``(1 - momentum) * old + momentum * batch``, with the
            unbiased variance (the biased one for a count of 1). Untouched when the total count is 0.
        momentum: weight of this batch.

    Returns:
        moments (2, C) float32, the mean and ``1 / sqrt(biased variance + eps)``; count (1,) float64, the total.
    """
    stats = stats.reshape(-1, stats.shape[-1])
    channels = (stats.shape[1] - 1) // 2
    assert all(r is None or r.shape == (channels,) for r in (running_mean, running_var)), (channels, stats.shape)
    moments = empty((2, channels), float32)
    count = empty(1, np.float64)
    _batch_norm.finalize(np.ascontiguousarray(stats), eps, running_mean, running_var, momentum, moments, count)
    return moments, count


def batch_norm_merge(stats: Array) -> Array:
    """Statistics that were left unfinished as `batch_norm_stats` has them, which they are here."""
    return stats


def batch_norm_concat(parts: Sequence[Array]) -> Array:
    """`batch_norm_stats` of arrays side by side along channels, from those of each, (1 + 2 C_i,) float64."""
    sides = [part[1:].reshape(2, -1) for part in parts]
    return np.concatenate([parts[0][:1], np.concatenate(sides, axis=1).reshape(-1)])


def batch_norm_eval_moments(running_mean: Array, running_var: Array, eps: float) -> Array:
    """Moments (2, C) float32 from running statistics (C,) float32, for evaluation."""
    moments = empty((2, running_mean.shape[0]), float32)
    moments[0] = running_mean
    moments[1] = 1.0 / np.sqrt(running_var.astype(np.float64) + eps)
    return moments


def batch_norm_apply(
    x: Array, moments: Array, gamma: Array | None = None, beta: Array | None = None, *, add: Array | None = None,
    add_moments: Array | None = None, add_gamma: Array | None = None, add_beta: Array | None = None, relu: bool = False,
    out: Array | None = None,
) -> Array:  # fmt: skip
    """``(x - mean) * rstd * gamma + beta``, then ``+ add``, then ``max(., 0)``; float32 with one rounding at the end.

    Args:
        x: (..., C), any storage dtype.
        moments: (2, C) float32.
        gamma, beta: (C,) float32; None stands for ones and zeros.
        add: shape and dtype of ``x``.
        add_moments, add_gamma, add_beta: with moments ``add`` is batch-normalised too: the join of a residual block
            with a projection.
        out: shape and dtype of ``x``, pitched or dense: where the result is to lie.
    """
    assert moments.shape == (2, x.shape[-1]) and (add is None or add.shape == x.shape), "shapes disagree"
    assert add is not None or add_moments is None, "moments of nothing"
    affine = (gamma, beta, add_gamma, add_beta)
    assert all(p is None or p.shape == x.shape[-1:] for p in affine), "gamma and beta have one value per channel"
    x_rows, add_rows = rows_float32(x), None if add is None else rows_float32(add)
    if add_moments is not None:
        normalised = empty(x_rows.shape, float32)
        _batch_norm.apply(add_rows, add_moments, add_gamma, add_beta, None, False, normalised)
        add_rows = normalised
    y = empty(x_rows.shape, float32)
    _batch_norm.apply(x_rows, moments, gamma, beta, add_rows, relu, y)
    y = stored(y, x.shape, x.dtype)
    if out is None:
        return y
    assert out.shape == x.shape and out.dtype == x.dtype, (out.shape, out.dtype)
    out[...] = y
    return out


def batch_norm_join(
    x: Array, moments: Array, gamma: Array | None, beta: Array | None, add: Array, *, add_moments: Array | None = None,
    add_gamma: Array | None = None, add_beta: Array | None = None,
) -> tuple[Array, None]:  # fmt: skip
    """`batch_norm_apply` with ``add`` and ReLU; a GPU's kernels leave the signs of the result beside it."""
    affine = {"add_moments": add_moments, "add_gamma": add_gamma, "add_beta": add_beta}
    return batch_norm_apply(x, moments, gamma, beta, add=add, **affine, relu=True), None


def batch_norm_activate(
    x: Array, moments: Array, gamma: Array | None, beta: Array | None, function: str, slope: float = 0.0
) -> Array:
    """`activate` of what `batch_norm_apply` makes of ``x``, in one pass, rounded once."""
    return stored(activate(_normalized(x, moments, gamma, beta), function, slope), x.shape, x.dtype)


def batch_norm_backward_stats(
    dy: Array, x: Array, moments: Array, *, dgamma: Array | None = None, dbeta: Array | None = None,
    accumulate: bool = False,
) -> Array:  # fmt: skip
    """The two sums of the backward pass.

    Args:
        dy, x: (..., C), gradient of the output and the input.
        moments: (2, C) float32 of the forward pass.
        dgamma, dbeta: (C,) float32, overwritten with the parameter gradients of this rank (``accumulate``: increased).

    Returns:
        sums (2, C) float64: ``sum dy`` and ``sum dy * (x - mean) * rstd``.
    """
    assert dy.shape == x.shape and moments.shape == (2, x.shape[-1]), (dy.shape, x.shape, moments.shape)
    sums = empty((2, x.shape[-1]), np.float64)
    _batch_norm.backward_stats(rows_float32(dy), rows_float32(x), moments, sums)
    return batch_norm_backward_sums(sums, moments, dgamma=dgamma, dbeta=dbeta, accumulate=accumulate)


def batch_norm_backward_sums(
    parts: Array, moments: Array, *, dgamma: Array | None = None, dbeta: Array | None = None, accumulate: bool = False
) -> Array:
    """What `batch_norm_backward_stats` returns and writes, from what `conv2d_backward_data_masked` left for it."""
    sums = parts
    write_gradient(dbeta, sums[0], accumulate)
    write_gradient(dgamma, sums[1], accumulate)
    return sums


def batch_norm_activate_backward_stats(
    dy: Array, x: Array, moments: Array, gamma: Array | None, beta: Array | None, function: str = "relu",
    slope: float = 0.0, *, dgamma: Array | None = None, dbeta: Array | None = None, accumulate: bool = False,
) -> Array:  # fmt: skip
    """`batch_norm_backward_stats` behind ``batch_norm_activate(x, moments, gamma, beta, function, slope)``.

    ``dy`` is the gradient of its output. The slope is recomputed from ``x``; the mask of a ReLU with the forward pass's
    rounding.
    """
    masked = _masked(dy, x, moments, gamma, beta, function, slope)
    return batch_norm_backward_stats(masked, x, moments, dgamma=dgamma, dbeta=dbeta, accumulate=accumulate)


def batch_norm_join_backward_stats(
    dy: Array, y: Array, x: Array, moments: Array, *, dgamma: Array | None = None, dbeta: Array | None = None,
    accumulate: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    """(`batch_norm_backward_stats` of ``g``, ``g``) with ``g`` = `relu_backward` of ``dy`` and ``y``.

    ``y`` is the output of a ReLU over a sum with this batch norm in it; the other summands get ``g`` too.
    """
    masked = relu_backward(dy, y)
    return batch_norm_backward_stats(masked, x, moments, dgamma=dgamma, dbeta=dbeta, accumulate=accumulate), masked


def batch_norm_backward_apply(
    dy: Array, x: Array, moments: Array, gamma: Array | None, sums: Array | None, count: Array | None, *,
    add: Array | None = None,
) -> Array:  # fmt: skip
    """``gamma * rstd * (dy - sums[0] / count - xhat * sums[1] / count)``, plus ``add``.

    With ``sums`` and ``count`` None (evaluation mode, where the moments are constants) it is ``gamma * rstd * dy``.

    Args:
        dy, x: (..., C); moments: (2, C) float32; gamma: (C,) float32 or None.
        sums: (2, C) float64 and count: (1,) float64, both over all ranks when statistics are synchronized.
        add: shape and dtype of ``dy``, added before the one rounding.
    """
    assert dy.shape == x.shape and (add is None or add.shape == x.shape), "shapes disagree"
    assert all(p is None or p.shape == (2, x.shape[-1]) for p in (moments, sums)), (moments.shape, x.shape)
    assert gamma is None or gamma.shape == x.shape[-1:], (gamma.shape, x.shape)
    assert (sums is None) == (count is None), "sums and count come together"
    dy_rows = rows_float32(dy)
    dx = empty(dy_rows.shape, float32)
    total = 0.0 if count is None else float(count[0])
    x_rows = dy_rows if sums is None else rows_float32(x)
    add_rows = None if add is None else rows_float32(add)
    _batch_norm.backward_apply(dy_rows, x_rows, moments, gamma, sums, total, add_rows, dx)
    return stored(dx, dy.shape, dy.dtype)


def batch_norm_backward_apply_stats(
    dy: Array, x: Array, moments: Array, gamma: Array | None, sums: Array, count: Array, other: Array,
    other_moments: Array,
) -> tuple[Array, Array]:  # fmt: skip
    """`batch_norm_backward_apply`, and `batch_norm_backward_stats` of ``dy`` with a second batch norm's input.

    Args:
        other, other_moments: that input, the other summand of a sum whose gradient is ``dy``, and moments.

    Returns:
        The gradient of ``x``; and the sums, for `batch_norm_backward_sums` of the second batch norm.
    """
    dx = batch_norm_backward_apply(dy, x, moments, gamma, sums, count)
    return dx, batch_norm_backward_stats(dy, other, other_moments)


def batch_norm_activate_backward_apply(
    dy: Array, x: Array, moments: Array, gamma: Array | None, beta: Array | None, sums: Array | None,
    count: Array | None, function: str = "relu", slope: float = 0.0, *, add: Array | None = None,
) -> Array:  # fmt: skip
    """`batch_norm_backward_apply` behind `batch_norm_activate`, of gradient ``dy``."""
    masked = _masked(dy, x, moments, gamma, beta, function, slope)
    return stored(batch_norm_backward_apply(masked, x, moments, gamma, sums, count, add=add), dy.shape, dy.dtype)


def _normalized(x: Array, moments: Array, gamma: Array | None, beta: Array | None) -> Array:
    """What the batch norm makes of ``x``, not rounded: float32 rows."""
    rows = rows_float32(x)
    z = empty(rows.shape, float32)
    _batch_norm.apply(rows, moments, gamma, beta, None, False, z)
    return z


def _masked(
    dy: Array, x: Array, moments: Array, gamma: Array | None, beta: Array | None, function: str, slope: float
) -> Array:
    """``dy`` times the slope of an activation over the batch norm, in float32; of a ReLU the mask, as rounded."""
    if function == "relu":
        return relu_backward(dy, batch_norm_apply(x, moments, gamma, beta, relu=True))
    kept = _normalized(x, moments, gamma, beta)
    kept = activate(kept, function, slope) if function in KEEP_OUTPUT else kept
    return activate_backward(rows_float32(dy), kept, function, slope).reshape(dy.shape)
