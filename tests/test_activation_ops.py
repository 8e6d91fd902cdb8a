"""Activations: laws of the operations of both tables."""

from __future__ import annotations

import numpy as np
import pytest

from minidl.precision import float32
from tests.layouts import LAYOUTS, place
from tests.reference import activation as reference
from tests.tolerance import assert_close, draw

SHAPES = [(1, 1, 1, 1), (3, 5, 7, 3), (2, 9, 11, 16), (1, 33, 41, 30), (2, 3, 5), (0, 4, 4, 8), (0, 5)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_relu_equals_the_reference(ops, rng, dtype, shape, layout):
    x = draw(rng, shape, dtype)
    y = ops.relu(place(ops, x, layout))
    assert y.dtype == dtype
    np.testing.assert_array_equal(ops.to_host(y).astype(np.float64), reference.relu(x))


def test_relu_of_special_values(ops, dtype):
    x = np.array([[np.nan, np.inf, -np.inf, 0.0, -0.0]], dtype)
    np.testing.assert_array_equal(
        ops.to_host(ops.relu(ops.from_host(x))).astype(np.float64), [[np.nan, np.inf, 0, 0, 0]]
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("with_add", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_relu_backward_equals_the_reference(ops, rng, dtype, shape, with_add, layout):
    dy, y = draw(rng, shape, dtype), reference.relu(draw(rng, shape, dtype)).astype(dtype)
    add = draw(rng, shape, dtype) if with_add else None
    dx = ops.relu_backward(
        place(ops, dy, layout), place(ops, y, layout), add=place(ops, add, layout) if with_add else None
    )
    assert dx.dtype == dtype
    assert_close(ops.to_host(dx), reference.relu_backward(dy, y, add), dtype)


def test_relu_backward_drops_what_is_not_finite(ops):
    dy = ops.from_host(np.float32([[np.inf, np.nan, np.inf]]))
    y = ops.from_host(np.float32([[0.0, 0.0, 1.0]]))
    np.testing.assert_array_equal(ops.to_host(ops.relu_backward(dy, y)), [[0, 0, np.inf]])


def test_relu_gradient_is_the_slope(ops, rng):
    """Away from the kink relu is linear, so finite differences are exact up to rounding."""
    x = draw(rng, (4, 5, 6), float32)
    x += np.sign(x)
    dy = draw(rng, x.shape, float32)
    dx = ops.to_host(ops.relu_backward(ops.from_host(dy), ops.relu(ops.from_host(x))))
    step = 0.5
    slope = (reference.relu(x + step) - reference.relu(x - step)) / (2 * step)
    assert_close(dx, slope * dy, float32)
