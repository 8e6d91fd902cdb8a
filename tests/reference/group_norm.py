"""Normalisation within a sample in plain float64: group norm; a layer norm is one of rows with one group."""

from __future__ import annotations

import numpy as np


def _grouped(x, groups):
    """(N, ..., C) as (N, P, groups, C / groups)."""
    x = np.asarray(x, np.float64)
    return x.reshape(x.shape[0], int(np.prod(x.shape[1:-1])), groups, x.shape[-1] // groups)


def moments(x, groups, eps):
    """(2, N, groups): mean and 1 / sqrt(biased variance + eps)."""
    v = _grouped(x, groups)
    return np.stack([v.mean(axis=(1, 3)), 1 / np.sqrt(v.var(axis=(1, 3)) + eps)])


def _xhat(x, groups, eps):
    mean, rstd = (m[:, None, :, None] for m in moments(x, groups, eps))
    return (_grouped(x, groups) - mean) * rstd, rstd


def group_norm(x, groups, eps, gamma=1.0, beta=0.0):
    xhat, _ = _xhat(x, groups, eps)
    return xhat.reshape(np.shape(x)) * np.asarray(gamma, np.float64) + np.asarray(beta, np.float64)


def group_norm_backward(dy, x, groups, eps, gamma=1.0):
    """(dx, dgamma, dbeta)."""
    xhat, rstd = _xhat(x, groups, eps)
    dy = np.asarray(dy, np.float64)
    axes = tuple(range(dy.ndim - 1))
    g = _grouped(dy * np.asarray(gamma, np.float64), groups)
    first = g.mean(axis=(1, 3), keepdims=True)
    second = (g * xhat).mean(axis=(1, 3), keepdims=True)
    dx = rstd * (g - first - xhat * second)
    return dx.reshape(dy.shape), (dy * xhat.reshape(dy.shape)).sum(axes), dy.sum(axes)
