"""Batch normalization in plain float64: over all axes but the last."""

from __future__ import annotations

import numpy as np


def _rows(x):
    return np.asarray(x, np.float64).reshape(-1, np.shape(x)[-1])


def stats(x):
    """(1 + 2C,): count, means, sums of squared deviations; zeros for no rows."""
    x = _rows(x)
    if len(x) == 0:
        return np.zeros(1 + 2 * x.shape[1])
    mean = np.sum(x, axis=0) / len(x)
    return np.concatenate([[len(x)], mean, np.sum((x - mean) ** 2, axis=0)])


def moments(x, eps):
    """(2, C): mean and 1 / sqrt(biased variance + eps)."""
    x = _rows(x)
    mean = np.sum(x, axis=0) / len(x)
    return np.stack([mean, 1 / np.sqrt(np.sum((x - mean) ** 2, axis=0) / len(x) + eps)])


def running(x, running_mean, running_var, momentum):
    """Both running statistics after one batch: the variance unbiased, but for a single row."""
    x = _rows(x)
    mean = np.sum(x, axis=0) / len(x)
    variance = np.sum((x - mean) ** 2, axis=0) / max(len(x) - 1, 1)
    return (1 - momentum) * running_mean + momentum * mean, (1 - momentum) * running_var + momentum * variance


def apply(x, moments, gamma=None, beta=None, add=None, relu=False):
    y = (np.asarray(x, np.float64) - moments[0]) * moments[1]
    y = y if gamma is None else y * gamma
    y = y if beta is None else y + beta
    y = y if add is None else y + np.asarray(add, np.float64)
    return np.where(y < 0, 0, y) if relu else y


def backward_stats(dy, x, moments):
    """(2, C): sum dy and sum dy * xhat."""
    dy, x = _rows(dy), _rows(x)
    return np.stack([np.sum(dy, axis=0), np.sum(dy * (x - moments[0]) * moments[1], axis=0)])


def backward_apply(dy, x, moments, gamma, sums, count, add=None):
    dy, x = np.asarray(dy, np.float64), np.asarray(x, np.float64)
    slope = moments[1] if gamma is None else moments[1] * gamma
    if sums is None:
        dx = slope * dy
    else:
        dx = slope * (dy - sums[0] / count - (x - moments[0]) * moments[1] * sums[1] / count)
    return dx if add is None else dx + np.asarray(add, np.float64)


def forward(x, gamma, beta, eps):
    """The whole operation in training mode."""
    return apply(x, moments(x, eps), gamma, beta)


def backward(dy, x, gamma, eps):
    """dx, dgamma, dbeta of the whole operation in training mode."""
    m = moments(x, eps)
    sums = backward_stats(dy, x, m)
    return backward_apply(dy, x, m, gamma, sums, _rows(x).shape[0]), sums[1], sums[0]
