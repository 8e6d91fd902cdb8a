"""Padding, pixel by pixel."""

from __future__ import annotations

import numpy as np


def pad2d(x, padding, value=0.0):
    left, right, top, bottom = padding
    n, height, width, channels = x.shape
    y = np.full((n, height + top + bottom, width + left + right, channels), float(value))
    for h in range(height):
        for w in range(width):
            if 0 <= h + top < y.shape[1] and 0 <= w + left < y.shape[2]:
                y[:, h + top, w + left] = x[:, h, w]
    return y
