"""Padding: laws of the operation of both tables."""

from __future__ import annotations

import numpy as np
import pytest

from tests.layouts import LAYOUTS, place
from tests.reference import pad2d as reference
from tests.tolerance import draw

PADDINGS = [(0, 0, 0, 0), (1, 2, 3, 4), (0, 3, 0, 0), (-1, -2, -1, 0), (2, -1, -2, 3), (5, -6, 4, -5), (-6, 0, 0, 0)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [0.0, -2.5, np.inf])
@pytest.mark.parametrize("padding", PADDINGS)
def test_pad_equals_the_reference(ops, rng, dtype, padding, value, layout):
    x = draw(rng, (2, 5, 6, 3), dtype)
    y = ops.pad2d(place(ops, x, layout), padding, value)
    assert y.dtype == dtype
    np.testing.assert_array_equal(ops.to_host(y).astype(np.float64), reference.pad2d(x, padding, value))


def test_the_default_value_is_zero(ops):
    y = ops.to_host(ops.pad2d(ops.from_host(np.ones((1, 1, 1, 1), np.float32)), (1, 1, 1, 1)))
    assert y.sum() == 1 and y[0, 1, 1, 0] == 1


def test_pad_of_an_empty_batch(ops, dtype):
    assert ops.pad2d(ops.zeros((0, 4, 5, 3), dtype), (1, 2, 3, -1)).shape == (0, 6, 8, 3)


@pytest.mark.parametrize("padding", PADDINGS)
def test_the_opposite_padding_is_the_adjoint(ops, rng, padding):
    """<dy, P x> = <P* dy, x>, exactly: the terms are integers."""
    x = rng.integers(-8, 8, (2, 5, 6, 3)).astype(np.float32)
    y = ops.to_host(ops.pad2d(ops.from_host(x), padding))
    dy = rng.integers(-8, 8, y.shape).astype(np.float32)
    dx = ops.to_host(ops.pad2d(ops.from_host(dy), tuple(-side for side in padding)))
    assert np.sum(y * dy) == np.sum(dx * x)
