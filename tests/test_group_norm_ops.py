"""Group norm and layer norm: laws of the operations of both tables."""

from __future__ import annotations

import numpy as np
import pytest

from minidl.precision import float32
from tests.layouts import LAYOUTS, place
from tests.reference import group_norm as reference
from tests.reference.differences import assert_gradient
from tests.tolerance import assert_close, draw, draw_integers

EPS = 1e-5
# (N, H, W, C), groups
CASES = [
    ((1, 1, 1, 2), 1), ((3, 5, 7, 6), 3), ((2, 9, 11, 32), 8), ((4, 3, 2, 30), 30), ((2, 33, 41, 24), 2),
    ((70, 4, 4, 64), 32), ((5, 12), 4), ((2, 9, 7, 600), 1), ((0, 4, 4, 8), 2),
]  # fmt: skip
ROWS = [
    (1, 2),
    (7, 5),
    (33, 96),
    (2, 3, 5, 24),
    (3, 1000),
    (5, 10000),
    (1500, 7),
    (9, 512),
    (7, 768),
    (6, 2048),
    (5, 3001),
    (0, 8),
]


def parameters(rng, channels):
    return draw(rng, channels, float32, offset=1.0), draw(rng, channels, float32)


def test_the_references_gradients_are_differences(rng):
    x, dy = rng.standard_normal((2, 2, 3, 6)), rng.standard_normal((2, 2, 3, 6))
    gamma = rng.standard_normal(6)
    dx, dgamma, dbeta = reference.group_norm_backward(dy, x, 3, EPS, gamma)
    assert_gradient(dx, lambda x: reference.group_norm(x, 3, EPS, gamma), x, dy)
    assert_gradient(dgamma, lambda gamma: reference.group_norm(x, 3, EPS, gamma), gamma, dy)
    assert_gradient(dbeta, lambda beta: reference.group_norm(x, 3, EPS, gamma, beta), np.zeros(6), dy)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape, groups", CASES)
def test_group_norm_equals_the_reference(ops, rng, dtype, shape, groups, layout):
    x = draw(rng, shape, dtype, scale=2.0, offset=0.5)
    gamma, beta = parameters(rng, shape[-1])
    array = place(ops, x, layout)
    moments = ops.group_norm_stats(array, groups, eps=EPS)
    assert moments.dtype == float32 and moments.shape == (2, shape[0], groups)
    y = ops.group_norm_apply(array, moments, ops.from_host(gamma), ops.from_host(beta))
    assert y.dtype == dtype
    assert_close(ops.to_host(moments), reference.moments(x, groups, EPS), float32, terms=4)
    assert_close(ops.to_host(y), reference.group_norm(x, groups, EPS, gamma, beta), dtype, terms=4)
    plain = ops.to_host(ops.group_norm_apply(array, moments))
    assert_close(plain, reference.group_norm(x, groups, EPS), dtype, terms=4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("with_add", [False, True])
@pytest.mark.parametrize("shape, groups", CASES)
def test_group_norm_gradients_equal_the_reference(ops, rng, dtype, shape, groups, with_add, layout):
    x, dy = draw(rng, shape, dtype, scale=2.0, offset=0.5), draw(rng, shape, dtype)
    gamma, _ = parameters(rng, shape[-1])
    add = draw(rng, shape, dtype) if with_add else None
    array, gradient, weight = place(ops, x, layout), place(ops, dy, layout), ops.from_host(gamma)
    moments = ops.group_norm_stats(array, groups, eps=EPS)
    dgamma, dbeta = (ops.from_host(np.full(shape[-1], 3, np.float32)) for _ in range(2))
    sums = ops.group_norm_backward_stats(
        gradient, array, moments, weight, dgamma=dgamma, dbeta=dbeta, accumulate=with_add
    )
    more = place(ops, add, layout) if with_add else None
    dx = ops.group_norm_backward_apply(gradient, array, moments, weight, sums, add=more)
    assert dx.dtype == dtype and sums.dtype == float32
    expected = reference.group_norm_backward(dy, x, groups, EPS, gamma)
    scale = reference.moments(x, groups, EPS)[1].max(initial=0) * np.abs(gamma).max()
    assert_close(ops.to_host(dx), expected[0] + (0 if add is None else add.astype(float)), dtype, terms=16, scale=scale)
    terms = max(x.size // shape[-1], 1)
    for found, wanted in zip((dgamma, dbeta), expected[1:], strict=True):
        assert_close(ops.to_host(found), wanted + (3 if with_add else 0), float32, terms=terms, scale=4.0)


def test_group_norm_without_parameters_has_gradients_too(ops, rng):
    x, dy = draw(rng, (2, 3, 4, 6), float32), draw(rng, (2, 3, 4, 6), float32)
    moments = ops.group_norm_stats(ops.from_host(x), 2, eps=EPS)
    sums = ops.group_norm_backward_stats(ops.from_host(dy), ops.from_host(x), moments)
    dx = ops.to_host(ops.group_norm_backward_apply(ops.from_host(dy), ops.from_host(x), moments, None, sums))
    assert_close(dx, reference.group_norm_backward(dy, x, 2, EPS)[0], float32, terms=16)


@pytest.mark.parametrize("offset", [100.0, 1e4])
def test_a_mean_far_from_zero_costs_no_digits(ops, rng, offset):
    x = draw(rng, (3, 40, 50, 12), float32, offset=offset)
    x[0, 0, 0] += 300  # and neither does a first pixel that is far from all others
    moments = ops.to_host(ops.group_norm_stats(ops.from_host(x), 3, eps=EPS))
    np.testing.assert_allclose(moments, reference.moments(x, 3, EPS), rtol=3e-5)
    _, rows = ops.layer_norm(ops.from_host(x), eps=EPS)
    expected = reference.moments(x.reshape(-1, 12), 1, EPS)[..., 0]
    np.testing.assert_allclose(ops.to_host(rows), expected, rtol=3e-5)


def test_parameter_gradients_of_whole_numbers_are_exact(ops, rng, dtype):
    """dbeta is a sum of whole numbers, in any order; dgamma too where the moments are 0 and 1."""
    x, dy = (draw_integers(rng, (6, 37, 41, 20), dtype, limit=2) for _ in range(2))
    moments = ops.from_host(np.stack([np.zeros((6, 5)), np.ones((6, 5))]).astype(np.float32))
    dgamma, dbeta = (ops.from_host(np.zeros(20, np.float32)) for _ in range(2))
    ops.group_norm_backward_stats(ops.from_host(dy), ops.from_host(x), moments, dgamma=dgamma, dbeta=dbeta)
    rows = ops.from_host(np.stack([np.zeros(6 * 37 * 41), np.ones(6 * 37 * 41)]).astype(np.float32))
    row_gamma, row_beta = (ops.from_host(np.zeros(20, np.float32)) for _ in range(2))
    ops.layer_norm_backward_weight(ops.from_host(dy), ops.from_host(x), rows, dgamma=row_gamma, dbeta=row_beta)
    g, v = dy.astype(np.float64), x.astype(np.float64)
    for found in (dgamma, row_gamma):
        np.testing.assert_array_equal(ops.to_host(found), (g * v).sum(axis=(0, 1, 2)))
    for found in (dbeta, row_beta):
        np.testing.assert_array_equal(ops.to_host(found), g.sum(axis=(0, 1, 2)))


def test_a_misaligned_array_has_the_same_bits(ops, rng, dtype):
    x, dy = draw(rng, (3, 19, 17, 32), dtype), draw(rng, (3, 19, 17, 32), dtype)
    found = []
    for layout in ("dense", "pitched"):
        array, gradient = place(ops, x, layout), place(ops, dy, layout)
        moments = ops.group_norm_stats(array, 4, eps=EPS)
        y, rows = ops.layer_norm(array, eps=EPS)
        dx = ops.layer_norm_backward_data(gradient, array, rows)
        gate = ops.gate_gradient(gradient, array)
        sums = ops.group_norm_backward_stats(gradient, array, moments)
        found.append([ops.to_host(a) for a in (moments, sums, y, rows, dx, gate, ops.softmax(array))])
    for dense, pitched in zip(*found, strict=True):
        np.testing.assert_array_equal(dense, pitched)


@pytest.mark.parametrize("shape", [(20000, 256), (20000, 512), (150_000, 24), (5000, 1000), (9000, 1024)])
def test_a_row_has_its_bits_whatever_stands_beside_it(cuda_ops, rng, dtype, shape):
    """Threads take several rows at once where there are many, and one elsewhere."""
    x, dy = (cuda_ops.from_host(draw(rng, shape, dtype)) for _ in range(2))
    gamma, beta = (cuda_ops.from_host(values) for values in parameters(rng, shape[1]))

    def results(x, dy):
        y, moments = cuda_ops.layer_norm(x, gamma, beta, eps=EPS)
        p = cuda_ops.softmax(x)
        dx = cuda_ops.layer_norm_backward_data(dy, x, moments, gamma), cuda_ops.softmax_backward(dy, p)
        return [cuda_ops.to_host(a) for a in (y, moments[0], moments[1], p, *dx)]

    whole = results(x, dy)
    for begin in range(0, shape[0], shape[0] // 3):
        end = min(begin + 333, shape[0])
        for many, few in zip(whole, results(x[begin:end], dy[begin:end]), strict=True):
            np.testing.assert_array_equal(many[begin:end], few)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", ROWS)
def test_layer_norm_equals_the_reference(ops, rng, dtype, shape, layout):
    x, dy, add = (draw(rng, shape, dtype, offset=offset) for offset in (0.5, 0.0, 0.0))
    gamma, beta = parameters(rng, shape[-1])
    weight = ops.from_host(gamma)
    array, gradient = place(ops, x, layout), place(ops, dy, layout)
    y, moments = ops.layer_norm(array, weight, ops.from_host(beta), eps=EPS)
    assert y.dtype == dtype and moments.dtype == float32
    rows = x.reshape(-1, shape[-1])
    assert moments.shape == (2, rows.shape[0])
    expected = reference.group_norm(rows, 1, EPS, gamma, beta).reshape(shape)
    spread = reference.moments(rows, 1, EPS)[1].max(initial=1)
    assert_close(ops.to_host(y), expected, dtype, terms=16, scale=max(spread, 1.0))
    plain, _ = ops.layer_norm(array, eps=EPS)
    assert_close(ops.to_host(plain), reference.group_norm(rows, 1, EPS).reshape(shape), dtype, terms=16, scale=spread)

    dx, dgamma, dbeta = reference.group_norm_backward(dy.reshape(rows.shape), rows, 1, EPS, gamma)
    scale = spread * np.abs(gamma).max() * 4
    for more in (None, add):
        found = ops.layer_norm_backward_data(
            gradient, array, moments, weight, add=None if more is None else place(ops, more, layout)
        )
        assert found.dtype == dtype
        wanted = dx.reshape(shape) + (0 if more is None else more.astype(np.float64))
        assert_close(ops.to_host(found), wanted, dtype, terms=16, scale=scale)
    for accumulate in (False, True):
        outs = [ops.from_host(np.full(shape[-1], 3, np.float32)) for _ in range(2)]
        ops.layer_norm_backward_weight(gradient, array, moments, dgamma=outs[0], dbeta=outs[1], accumulate=accumulate)
        for out, wanted in zip(outs, (dgamma, dbeta), strict=True):
            wanted = wanted + (3 if accumulate else 0)
            assert_close(ops.to_host(out), wanted, float32, terms=max(len(rows), 1), scale=4.0)
