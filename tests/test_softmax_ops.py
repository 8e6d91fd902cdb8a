"""Softmax: laws of the operations of both tables."""

from __future__ import annotations

import numpy as np
import pytest

from tests.layouts import LAYOUTS, place
from tests.reference import softmax as reference
from tests.reference.differences import assert_gradient
from tests.tolerance import assert_close, draw

SHAPES = [(1, 1), (7, 5), (33, 21), (2, 3, 5, 24), (3, 1000), (9, 2048), (5, 3001), (5, 10000), (1500, 2), (0, 8)]


def test_the_references_gradient_is_the_difference(rng):
    x, dy = rng.standard_normal((3, 5)), rng.standard_normal((3, 5))
    assert_gradient(reference.softmax_backward(dy, reference.softmax(x)), reference.softmax, x, dy)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_softmax_equals_the_reference(ops, rng, dtype, shape, layout):
    x = draw(rng, shape, dtype, scale=4.0)
    y = ops.softmax(place(ops, x, layout))
    assert y.dtype == dtype
    assert_close(ops.to_host(y), reference.softmax(x) if x.size else x, dtype, terms=16)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_softmax_gradient_equals_the_reference(ops, rng, dtype, shape, layout):
    x, dy = draw(rng, shape, dtype), draw(rng, shape, dtype)
    y = (reference.softmax(x) if x.size else x).astype(dtype)
    dx = ops.softmax_backward(place(ops, dy, layout), place(ops, y, layout))
    assert dx.dtype == dtype
    assert_close(ops.to_host(dx), reference.softmax_backward(dy, y), dtype, terms=16)


def test_softmax_neither_overflows_nor_forgets(ops, dtype):
    largest = float(np.finfo(np.float16).max)
    x = np.array([[largest, largest, -largest], [-np.inf, 0, 0], [np.nan, 0, 1]], dtype)
    y = ops.to_host(ops.softmax(ops.from_host(x))).astype(np.float64)
    np.testing.assert_allclose(y[:2], [[0.5, 0.5, 0], [0, 0.5, 0.5]], atol=1e-6)
    assert np.isnan(y[2]).all()
