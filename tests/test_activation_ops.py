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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 5, 7, 3), (2, 9, 11, 16), (1, 33, 41, 30), (0, 5)])
@pytest.mark.parametrize("function", reference.FUNCTIONS)
def test_activations_equal_the_reference(ops, rng, dtype, function, shape, layout):
    x = draw(rng, shape, dtype, scale=3.0)
    y = ops.activate(place(ops, x, layout), function, 0.25)
    assert y.dtype == dtype
    assert_close(ops.to_host(y), reference.FUNCTIONS[function](x, 0.25), dtype, scale=_largest(x))


def _largest(x):
    """The size of the terms: GELU is x/2 plus x/2 times an error function, which cancel below zero."""
    return float(np.abs(x.astype(np.float64)).max(initial=0.0))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("with_add", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 5, 7, 3), (2, 9, 11, 16), (0, 5)])
@pytest.mark.parametrize("function", reference.FUNCTIONS)
def test_activation_gradients_are_slopes(ops, rng, dtype, function, shape, with_add, layout):
    x = draw(rng, shape, dtype, scale=3.0)
    for kink in reference.KINKS.get(function, ()):
        x = np.where(np.abs(x.astype(np.float64) - kink) < 0.05, x + dtype.type(0.25), x).astype(dtype)
    dy = draw(rng, shape, dtype)
    add = draw(rng, shape, dtype) if with_add else None
    value = reference.FUNCTIONS[function](x, 0.25)
    keeps_output = function in reference.KEEPS_OUTPUT
    kept = value.astype(dtype) if keeps_output else x
    dx = ops.activate_backward(
        place(ops, dy, layout), place(ops, kept, layout), function, 0.25,
        add=place(ops, add, layout) if with_add else None,
    )  # fmt: skip
    assert dx.dtype == dtype
    expected = dy.astype(np.float64) * reference.slope_of(function, x, 0.25)
    if function in ("sigmoid", "tanh"):  # their slope follows from the output as it was stored
        rounded = kept.astype(np.float64)
        expected = dy.astype(np.float64) * (rounded * (1 - rounded) if function == "sigmoid" else 1 - rounded**2)
    expected = expected + (0 if add is None else add.astype(np.float64))
    assert_close(ops.to_host(dx), expected, dtype, scale=_largest(dy))


@pytest.mark.parametrize("function", reference.FUNCTIONS)
def test_activations_of_special_values(ops, dtype, function):
    """NaN stays NaN, what saturates does so, and nothing overflows on the way."""
    largest = float(np.finfo(np.float16).max)
    x = np.array([[np.nan, np.inf, largest, -largest, 0.0, -0.0, 100.0, -100.0]], dtype)
    y = ops.to_host(ops.activate(ops.from_host(x), function, 0.25)).astype(np.float64)
    assert np.isnan(y[0, 0])
    expected = reference.FUNCTIONS[function](x[0, 1:].astype(np.float64), 0.25)
    assert y[0, 1] == expected[0]
    assert_close(y[0, 2:], expected[1:], dtype)
    if function not in reference.KEEPS_OUTPUT:
        slope = ops.to_host(ops.activate_backward(ops.from_host(np.ones_like(x)), ops.from_host(x), function))
        assert_close(slope[0, 2:], reference.slope_of(function, x[0, 2:].astype(np.float64), 0.0, 2.0**-10), dtype)


@pytest.mark.parametrize("function", ["tanh", "gelu", "silu", "gelu_tanh"])
def test_small_values_keep_their_digits(ops, function):
    x = np.float32([[1e-20, -3e-8, 1e-4, -2e-3, 0.04, -0.29, 0.31]])
    y = ops.to_host(ops.activate(ops.from_host(x), function)).astype(np.float64)
    np.testing.assert_allclose(y, reference.FUNCTIONS[function](x), rtol=2e-6)


def test_an_unknown_activation_names_the_known_ones(ops):
    with pytest.raises(ValueError, match="unknown activation 'swish'.*known: gelu, gelu_tanh, hardswish"):
        ops.activate(ops.zeros((2, 3), np.dtype(np.float32)), "swish")
