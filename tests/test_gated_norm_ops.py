"""Squeeze and excitation over a batch norm and an activation: laws of the operations of both tables."""

from __future__ import annotations

import numpy as np
import pytest

from minidl.cuda.norm import gated_norm
from minidl.precision import float32
from tests.layouts import LAYOUTS, place
from tests.reference import activation
from tests.reference import batch_norm as reference
from tests.test_batch_norm_ops import away_from_kinks
from tests.tolerance import assert_close, draw

SHAPES = [
    (1, 1, 1, 1),
    (3, 5, 7, 3),
    (2, 33, 41, 24),
    (70, 2, 2, 48),
    (3, 1, 1, 300),
    (601, 2, 3, 16),
    (0, 4, 4, 8),
    (3, 0, 4, 5),
]


def problem(rng, shape, dtype, function):
    """(x, moments, gamma, beta, what the batch norm makes of x, dz): dz is zero where there is no one slope."""
    channels = shape[-1]
    moments = np.stack([0.1 * rng.standard_normal(channels), rng.uniform(0.5, 1.5, channels)]).astype(np.float32)
    gamma, beta = rng.uniform(1, 3, channels).astype(np.float32), rng.standard_normal(channels).astype(np.float32)
    x, z, apart = away_from_kinks(draw(rng, shape, dtype), moments, gamma, beta, function)
    # A slope counts with the gradient of the means, too: no value may stay on a kink.
    assert apart.all()
    return x, moments, gamma, beta, z, draw(rng, shape, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("function", ["silu", "hardswish", "relu6", "gelu"])
def test_a_gate_over_a_batch_norm_equals_the_reference(ops, rng, dtype, function, shape, layout):
    """Means and product; gradients of gate, parameters and input, where gate and gradient of the means come late."""
    x, moments, gamma, beta, z, dz = problem(rng, shape, dtype, function)
    gate, dmean = (draw(rng, (shape[0], 1, 1, shape[3]), dtype) for _ in range(2))
    affine = [ops.from_host(v) for v in (moments, gamma, beta)]
    x_, dz_, gate_, dmean_ = (place(ops, v, layout) for v in (x, dz, gate, dmean))
    y = activation.FUNCTIONS[function](z, 0.25)
    pixels, size = max(shape[1] * shape[2], 1), float(np.abs(z).max(initial=0.0))

    means = ops.batch_norm_means(x_, *affine, function, 0.25)
    assert means.dtype == dtype and means.shape == gate.shape
    expected = y.sum(axis=(1, 2), keepdims=True) / pixels
    assert_close(ops.to_host(means), expected, dtype, terms=8, scale=size)
    out = ops.batch_norm_gate(x_, *affine, gate_, function, 0.25)
    assert out.dtype == dtype and out.shape == shape
    exact = [v.astype(np.float64) for v in (gate, dmean, dz)]
    most = float(np.abs(exact[0]).max(initial=0.0))
    assert_close(ops.to_host(out), y * exact[0], dtype, terms=8, scale=size * most)

    dgate, sums = ops.batch_norm_gate_gradient(dz_, x_, *affine, function, 0.25)
    assert dgate.dtype == dtype and dgate.shape == gate.shape
    largest = float(np.abs(exact[2]).max(initial=0.0)) * (1 + size)
    expected = (exact[2] * y).sum(axis=(1, 2), keepdims=True)
    assert_close(ops.to_host(dgate), expected, dtype, terms=8 * pixels, scale=largest)

    dy = exact[2] * exact[0] + exact[1] / pixels
    g = dy * activation.slope_of(function, z, 0.25)
    largest = float(np.abs(dy).max(initial=0.0)) * (1 + size) + largest * most
    gradients = [ops.from_host(np.ones(shape[-1], np.float32)) for _ in range(2)]
    written = dict(zip(("dgamma", "dbeta"), gradients, strict=True))
    total = ops.batch_norm_gate_backward_stats(sums, gate_, dmean_, pixels, affine[0], **written, accumulate=True)
    expected = reference.backward_stats(g, x, moments.astype(np.float64))
    bound = {"terms": 8 * max(g.size // shape[-1], 1), "scale": 2 * largest}
    assert_close(ops.to_host(total), expected, float32, **bound)
    assert_close(ops.to_host(gradients[0]), 1 + expected[1], float32, **bound)
    assert_close(ops.to_host(gradients[1]), 1 + expected[0], float32, **bound)

    known = rng.standard_normal((2, shape[-1])), np.array([float(max(g.size // shape[-1], 1))])
    for given in (known, (None, None)):
        on_device = [None if one is None else ops.from_host(one) for one in given]
        facts = dz_, gate_, dmean_, x_, *affine, *on_device
        dx = ops.batch_norm_gate_backward_apply(*facts, function, 0.25)
        assert dx.dtype == dtype and dx.shape == shape
        expected = reference.backward_apply(g, x, moments.astype(np.float64), gamma, *given)
        assert_close(ops.to_host(dx), expected, dtype, terms=8, scale=3 * largest)


def test_long_sums_are_taken_in_parts(cuda_ops, rng, dtype, monkeypatch):
    """Of so many terms in float32 at a time; more than there are in any shape above."""
    monkeypatch.setattr(gated_norm, "MOST_PER_THREAD", 4)
    test_a_gate_over_a_batch_norm_equals_the_reference(cuda_ops, rng, dtype, "silu", (2, 33, 41, 24), LAYOUTS[0])


@pytest.mark.parametrize("affine", [False, True])
def test_a_layout_changes_no_bit(ops, rng, dtype, affine):
    """Nor do a gate that lies otherwise, or vectors that are narrower for it."""
    x, moments, gamma, beta, _, dz = problem(rng, (3, 9, 40, 48), dtype, "silu")
    gate, dmean = (draw(rng, (3, 1, 1, 48), dtype) for _ in range(2))
    parameters = [ops.from_host(v) if affine else None for v in (gamma, beta)]
    found = []
    for layout in LAYOUTS:
        x_, dz_, gate_, dmean_ = (place(ops, v, layout) for v in (x, dz, gate, dmean))
        facts = x_, ops.from_host(moments), *parameters
        known = ops.from_host(np.ones((2, 48))), ops.from_host(np.array([9.0]))
        dgate, sums = ops.batch_norm_gate_gradient(dz_, *facts, "silu")
        outputs = [
            ops.batch_norm_means(*facts, "silu"), ops.batch_norm_gate(*facts, gate_, "silu"), dgate, sums,
            ops.batch_norm_gate_backward_apply(dz_, gate_, dmean_, *facts, *known, "silu"),
        ]  # fmt: skip
        found.append([ops.to_host(one) for one in outputs])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(one, two)


def test_sums_of_a_mean_far_from_zero_keep_their_digits(ops, rng):
    """They are of x less its mean: at a mean of a thousand deviations the batch norm's sums are as exact as at none."""
    x = (1000 + rng.standard_normal((2, 30, 30, 8))).astype(np.float32)
    dz, gate, dmean = (rng.standard_normal(shape).astype(np.float32) for shape in (x.shape, *[(2, 1, 1, 8)] * 2))
    moments = reference.moments(x, 1e-5).astype(np.float32)
    affine = [ops.from_host(moments), None, None]
    _, sums = ops.batch_norm_gate_gradient(ops.from_host(dz), ops.from_host(x), *affine, "silu")
    total = ops.batch_norm_gate_backward_stats(sums, ops.from_host(gate), ops.from_host(dmean), 900, affine[0])
    z = reference.apply(x, moments.astype(np.float64))
    g = (dz.astype(np.float64) * gate + dmean.astype(np.float64) / 900) * activation.slope_of("silu", z)
    expected = reference.backward_stats(g, x, moments.astype(np.float64))
    # A value is x - mean, exact, times what is rounded once.
    assert_close(ops.to_host(total), expected, float32, terms=8 * 1800, scale=10.0)
