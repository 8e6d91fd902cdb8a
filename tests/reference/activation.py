"""Activations in plain float64."""

from __future__ import annotations

import math

import numpy as np


def relu(x):
    x = np.asarray(x, np.float64)
    return np.where(x < 0, 0.0, x)


def relu_backward(dy, y, add=None):
    dx = np.where(np.asarray(y, np.float64) > 0, np.asarray(dy, np.float64), 0.0)
    return dx if add is None else dx + np.asarray(add, np.float64)


def _of(function):
    return lambda x, slope=0.0: np.array([function(float(v), slope) for v in np.ravel(x)]).reshape(np.shape(x))


def _logistic(x):
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def _gelu_tanh(x):
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


FUNCTIONS = {
    "relu": _of(lambda x, _: max(x, 0.0)),
    "relu6": _of(lambda x, _: min(max(x, 0.0), 6.0)),
    "leaky_relu": _of(lambda x, slope: x if x > 0 else slope * x),
    "sigmoid": _of(lambda x, _: _logistic(x)),
    "tanh": _of(lambda x, _: math.tanh(x)),
    "silu": _of(lambda x, _: x * _logistic(x)),
    "gelu": _of(lambda x, _: 0.5 * x * math.erfc(-x / math.sqrt(2))),
    "gelu_tanh": _of(lambda x, _: _gelu_tanh(x)),
    "hardswish": _of(lambda x, _: x * min(max(x + 3, 0.0), 6.0) / 6),
}
KINKS = {"relu": (0,), "relu6": (0, 6), "leaky_relu": (0,), "hardswish": (-3, 3)}  # where there is no one slope
KEEPS_OUTPUT = ("relu", "relu6", "leaky_relu", "sigmoid", "tanh")


def slope_of(function, x, slope=0.0, step=2.0**-13):
    """The derivative at ``x``, by central differences in float64."""
    x = np.asarray(x, np.float64)
    return (FUNCTIONS[function](x + step, slope) - FUNCTIONS[function](x - step, slope)) / (2 * step)
