"""Softmax cross entropy with a probability for every class."""

from __future__ import annotations

import numpy as np

from minidl.cpu.array import QUIET, Array, empty, rows_float32, stored
from minidl.precision import float32


def _shares(targets: Array, weights: Array | None, smoothing: float) -> Array:
    """(rows, K) float32: the targets as the loss sees them, smoothed and weighted."""
    t = rows_float32(targets)
    u = np.float32(1 - smoothing) * t + np.float32(smoothing / t.shape[1])
    return u if weights is None else u * weights


@QUIET
def soft_cross_entropy(
    logits: Array, targets: Array, weights: Array | None = None, *, smoothing: float = 0.0
) -> tuple[Array, Array]:
    """Totals over this rank's rows, to be added over ranks before anything is divided.

    Args:
        logits: (..., K), any storage dtype; targets: (..., K) float32, the probability of each class.
        weights: (K,) float32, of the classes; None for ones.
        smoothing: share of every row's targets that is spread over all classes.

    Returns:
        totals (4,) float64: summed loss, rows, rows whose first largest logit stands where the first largest target
        does, 0; lse (...) float32.
    """
    x, u = rows_float32(logits).astype(np.float64), _shares(targets, weights, smoothing)
    count = len(x)
    peak = x.max(axis=1, keepdims=True) if count else x[:, :1]
    lse = peak + np.log(np.exp(x - peak).sum(axis=1, keepdims=True))
    correct = np.count_nonzero(x.argmax(axis=1) == rows_float32(targets).argmax(axis=1)) if count else 0
    totals = np.array([float((u * (lse - x)).sum()), count, correct, 0.0])
    return totals, lse.astype(float32).reshape(logits.shape[:-1])


@QUIET
def soft_cross_entropy_backward(
    logits: Array, targets: Array, lse: Array, totals: Array, weights: Array | None = None, scale: Array | None = None,
    *, smoothing: float = 0.0,
) -> Array:  # fmt: skip
    """The gradient of ``totals[0] / totals[1]`` times ``scale``, in the dtype of ``logits``.

    Args:
        lse, totals: of the forward pass, the totals summed over all ranks.
        scale: (1,) float32, the loss scale; None stands for 1.
    """
    x, u = rows_float32(logits), _shares(targets, weights, smoothing)
    factor = (1.0 if scale is None else float(scale[0])) / float(totals[1]) if totals[1] > 0 else 0.0
    dx = empty(x.shape, float32)
    np.exp(x - lse.reshape(-1, 1), out=dx)
    dx *= u.sum(axis=1, keepdims=True, dtype=np.float64).astype(float32)
    dx -= u
    dx *= np.float32(factor)
    return stored(dx, logits.shape, logits.dtype)
