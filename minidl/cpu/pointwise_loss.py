"""Losses that compare every element with a target."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from minidl import checks
from minidl.cpu.array import QUIET, Array, empty, flat_float32, stored
from minidl.precision import float32

_CHUNK = 1 << 16  # elements that are computed at a time, so that what is in between stays in the cache


@QUIET
def pointwise_loss(x: Array, target: Array, loss: str, a: float = 1.0, b: float = 0.0) -> Array:
    """Totals (2,) float64 over this rank's elements: sum of the terms, number of elements.

    Args:
        x, target: of one shape and storage dtype.
        loss: "mse"; "bce_with_logits", ``a`` the weight of positive terms; "focal" (on logits), ``a`` the weight of
            positive terms and 1 - a of the others, ``b`` the focusing exponent, 0 or at least 1.
    """
    value, _ = _formula(loss)
    v, t = flat_float32(x), flat_float32(target)
    chunks = range(0, v.size, _CHUNK)
    total = sum(float(value(v[i : i + _CHUNK], t[i : i + _CHUNK], a, b).sum(dtype=np.float64)) for i in chunks)
    return np.array([total, v.size], np.float64)


@QUIET
def pointwise_loss_backward(
    x: Array, target: Array, totals: Array, scale: Array | None, loss: str, a: float = 1.0, b: float = 0.0
) -> Array:
    """The gradient of ``totals[0] / totals[1]`` by ``x``, times ``scale`` ((1,) float32, or None for 1)."""
    _, gradient = _formula(loss)
    factor = np.float32((1.0 if scale is None else float(scale[0])) / float(totals[1]) if totals[1] > 0 else 0.0)
    v, t = flat_float32(x), flat_float32(target)
    dx = empty(v.shape, float32)
    for i in range(0, v.size, _CHUNK):
        dx[i : i + _CHUNK] = gradient(v[i : i + _CHUNK], t[i : i + _CHUNK], a, b) * factor
    return stored(dx, x.shape, x.dtype)


def _logistic(x):
    """1 / (1 + exp(-x)), without overflow."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def _bce(x, t, a, b):
    a = np.float32(a)
    return (1 - t) * x + (1 + (a - 1) * t) * (np.log1p(np.exp(-np.abs(x))) + np.maximum(-x, 0))


def _bce_gradient(x, t, a, b):
    return (1 - t) - (1 + (np.float32(a) - 1) * t) * _logistic(-x)


def _focal(x, t, a, b):
    a, b = np.float32(a), np.float32(b)
    miss = t * _logistic(-x) + (1 - t) * _logistic(x)
    return (a * t + (1 - a) * (1 - t)) * _bce(x, t, 1, 0) * miss**b


def _focal_gradient(x, t, a, b):
    a, b = np.float32(a), np.float32(b)
    p, q = _logistic(x), _logistic(-x)
    miss = t * q + (1 - t) * p
    bend = _bce(x, t, 1, 0) * b * miss ** (b - 1) * (1 - 2 * t) * p * q if b else 0
    return (a * t + (1 - a) * (1 - t)) * (((1 - t) * p - t * q) * miss**b + bend)


_FORMULAS = {
    "bce_with_logits": (_bce, _bce_gradient),
    "focal": (_focal, _focal_gradient),
    "mse": (lambda x, t, a, b: (x - t) ** 2, lambda x, t, a, b: 2 * (x - t)),
}


def _formula(loss: str) -> tuple[Callable[..., Array], Callable[..., Array]]:
    """(terms, their slopes), each of (x, target, a, b) in float32."""
    if loss not in _FORMULAS:
        raise checks.unknown("loss", loss, _FORMULAS)
    return _FORMULAS[loss]
