"""Joins: laws of the operations of both tables."""

from __future__ import annotations

import numpy as np
import pytest

from tests.layouts import LAYOUTS, place
from tests.reference import join as reference
from tests.tolerance import assert_close, draw, draw_integers


@pytest.mark.parametrize(
    "layouts", [("dense", "dense"), ("pitched", "dense"), ("dense", "strided"), ("pitched", "pitched")]
)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 5, 7, 3), (2, 33, 41, 16), (0, 4, 4, 8), (5, 10)])
def test_add_equals_the_reference(ops, rng, dtype, shape, layouts):
    a, b = draw(rng, shape, dtype), draw(rng, shape, dtype)
    y = ops.add(place(ops, a, layouts[0]), place(ops, b, layouts[1]))
    assert y.dtype == dtype
    assert_close(ops.to_host(y), reference.add(a, b), dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("channels", [(1,), (3, 5), (16, 1, 7), (8, 8, 8, 8)])
@pytest.mark.parametrize("leading", [(2, 5, 3), (0, 4, 4), (7,), (1, 61, 67)])
def test_concat_lays_channels_side_by_side(ops, rng, dtype, leading, channels, layout):
    parts = [draw(rng, (*leading, c), dtype) for c in channels]
    y = ops.concat([place(ops, part, layout) for part in parts])
    assert y.dtype == dtype
    np.testing.assert_array_equal(ops.to_host(y).astype(np.float64), reference.concat(parts))


def test_slices_of_a_concat_are_its_parts(ops, rng):
    """The gradient of concat is slicing, without a copy."""
    a, b = draw(rng, (2, 3, 4, 5), np.float32), draw(rng, (2, 3, 4, 6), np.float32)
    y = ops.concat([ops.from_host(a), ops.from_host(b)])
    np.testing.assert_array_equal(ops.to_host(y[..., :5]), a)
    np.testing.assert_array_equal(ops.to_host(y[..., 5:]), b)


@pytest.mark.parametrize("layouts", [("dense", "dense"), ("pitched", "dense"), ("strided", "pitched")])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 5, 7, 3), (2, 33, 41, 16), (0, 4, 4, 8), (5, 10)])
def test_mul_equals_the_reference(ops, rng, dtype, shape, layouts):
    a, b = draw(rng, shape, dtype), draw(rng, shape, dtype)
    y = ops.mul(place(ops, a, layouts[0]), place(ops, b, layouts[1]))
    assert y.dtype == dtype
    assert_close(ops.to_host(y), a.astype(np.float64) * b.astype(np.float64), dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (3, 5, 7, 3), (2, 33, 41, 24), (70, 2, 2, 48), (0, 4, 4, 8), (3, 0, 4, 5)]
)
def test_a_gate_multiplies_every_pixel_of_its_sample(ops, rng, dtype, shape, layout):
    a, dy = draw(rng, shape, dtype), draw(rng, shape, dtype)
    gate = draw(rng, (shape[0], 1, 1, shape[3]), dtype)
    y = ops.mul(place(ops, a, layout), place(ops, gate, layout))
    assert y.dtype == dtype
    assert_close(ops.to_host(y), a.astype(np.float64) * gate.astype(np.float64), dtype)
    found = ops.gate_gradient(place(ops, dy, layout), place(ops, a, layout))
    assert found.dtype == dtype and found.shape == gate.shape
    expected = (a.astype(np.float64) * dy.astype(np.float64)).sum(axis=(1, 2), keepdims=True)
    assert_close(ops.to_host(found), expected, dtype, terms=max(shape[1] * shape[2], 1))
    dmean = draw(rng, gate.shape, dtype)
    found = ops.gate_backward(place(ops, dy, layout), place(ops, gate, layout), ops.from_host(dmean))
    assert found.dtype == dtype
    product, mean = dy.astype(np.float64) * gate.astype(np.float64), dmean.astype(np.float64)
    assert_close(ops.to_host(found), product + mean / max(shape[1] * shape[2], 1), dtype, terms=2)


def test_gate_gradients_of_whole_numbers_are_exact(ops, rng, dtype):
    a, dy = (draw_integers(rng, (3, 37, 41, 20), dtype, limit=1) for _ in range(2))
    expected = (a.astype(np.float64) * dy.astype(np.float64)).sum(axis=(1, 2), keepdims=True)
    found = ops.to_host(ops.gate_gradient(ops.from_host(dy), ops.from_host(a)))
    np.testing.assert_array_equal(found, expected.astype(dtype))
