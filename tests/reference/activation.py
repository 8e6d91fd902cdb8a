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
    return lambda x, slope=0.0: function(np.asarray(x, np.float64), slope)


def _logistic(x):
    with np.errstate(over="ignore"):  # the exponential of what is far below zero, whose inverse is zero
        return 1 / (1 + np.exp(-x))


_erfc = np.vectorize(math.erfc, otypes=[np.float64])  # NumPy has none

FUNCTIONS = {
    "relu": _of(lambda x, _: np.maximum(x, 0)),
    "relu6": _of(lambda x, _: np.clip(x, 0, 6)),
    "leaky_relu": _of(lambda x, slope: np.where(x > 0, x, slope * x)),
    "sigmoid": _of(lambda x, _: _logistic(x)),
    "tanh": _of(lambda x, _: np.tanh(x)),
    "silu": _of(lambda x, _: x * _logistic(x)),
    "gelu": _of(lambda x, _: 0.5 * x * _erfc(-x / math.sqrt(2))),
    "gelu_tanh": _of(lambda x, _: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
    "hardswish": _of(lambda x, _: x * np.clip(x + 3, 0, 6) / 6),
}
KINKS = {"relu": (0,), "relu6": (0, 6), "leaky_relu": (0,), "hardswish": (-3, 3)}  # where there is no one slope
KEEPS_OUTPUT = ("relu", "relu6", "leaky_relu", "sigmoid", "tanh")


def slope_of(function, x, slope=0.0, step=2.0**-13):
    """The derivative at ``x``, by central differences in float64."""
    x = np.asarray(x, np.float64)
    return (FUNCTIONS[function](x + step, slope) - FUNCTIONS[function](x - step, slope)) / (2 * step)
