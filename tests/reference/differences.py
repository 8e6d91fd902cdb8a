"""Central differences of float64 functions, which prove the references' own gradients."""

from __future__ import annotations

import numpy as np

STEP = 2.0**-13


def gradient(function, x, dy):
    """d/dx of ``sum(function(x) * dy)``, element by element."""
    x = np.array(x, np.float64)
    result = np.zeros(x.shape)
    for at in np.ndindex(x.shape):
        there = x[at]
        x[at] = there + STEP
        above = np.sum(function(x) * dy)
        x[at] = there - STEP
        result[at] = (above - np.sum(function(x) * dy)) / (2 * STEP)
        x[at] = there
    return result


def assert_gradient(actual, function, x, dy):
    """Assert that ``actual`` is that gradient, up to the third derivative times the squared step."""
    np.testing.assert_allclose(actual, gradient(function, x, dy), rtol=1e-5, atol=1e-6)
