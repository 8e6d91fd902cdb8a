"""Activations in plain float64."""

from __future__ import annotations

import numpy as np


def relu(x):
    x = np.asarray(x, np.float64)
    return np.where(x < 0, 0.0, x)


def relu_backward(dy, y, add=None):
    dx = np.where(np.asarray(y, np.float64) > 0, np.asarray(dy, np.float64), 0.0)
    return dx if add is None else dx + np.asarray(add, np.float64)
