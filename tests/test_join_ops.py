"""Joins: laws of the operations of both tables."""

from __future__ import annotations

import numpy as np
import pytest

from tests.layouts import LAYOUTS, place
from tests.reference import join as reference
from tests.tolerance import assert_close, draw


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
