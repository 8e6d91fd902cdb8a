"""Softmax over the last axis in plain float64."""

from __future__ import annotations

import numpy as np


def softmax(x):
    x = np.asarray(x, np.float64)
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def softmax_backward(dy, y):
    dy, y = np.asarray(dy, np.float64), np.asarray(y, np.float64)
    return y * (dy - (dy * y).sum(axis=-1, keepdims=True))
