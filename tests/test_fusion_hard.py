"""Every plan against the definition in float64, on what batch norms are bad at: means far from zero, constant channels,
scales that are negative or zero, numbers that are none, a few rows."""

from __future__ import annotations

import numpy as np
import pytest

import minidl as m
from minidl import fusion
from minidl.precision import precision as precision_of
from tests.reference import batch_norm as reference

EPS, MOMENTUM = 1e-5, 0.1
ROUNDED = {"fp32": 2.0**-24, "bf16": 2.0**-9, "fp16": 2.0**-12}
PLANS = pytest.mark.parametrize("how", list(fusion.PLANS))
PRECISIONS = pytest.mark.parametrize("precision", ROUNDED)


def identity(channels):
    return lambda rng, shape: np.eye(channels, dtype=np.float32).reshape(shape)


def model_of(ops, how, precision, image, gamma, beta, shift=None):
    """A batch norm and a ReLU between convolutions that change nothing, so that every mode has its place."""
    graph, c = m.Graph(), image[-1]
    biased = shift is not None
    x = m.Conv2d(c, c, 1, bias=biased, weight_init=identity(c), name="below")(graph.input(image))
    x = m.ReLU(name="relu")(m.BatchNorm2d(c, EPS, MOMENTUM, name="bn")(x))
    graph.output(m.Conv2d(c, c, 1, bias=False, weight_init=identity(c), name="above")(x))
    model = m.Model(graph, device=ops.name, precision=precision, input_grad=True)
    shifts = {"below.bias": shift} if biased else {}
    model.load_state_dict(model.state_dict() | {"bn.weight": gamma, "bn.bias": beta} | shifts)
    fusion.fuse(model, how)
    return model


def step(model, x, dy):
    """y, dx, dgamma, dbeta, running mean and variance of one step, in float64."""
    ops, bn = model.ops, model.graph["bn"].layer
    y = ops.to_host(model.forward(ops.from_host(x)))
    dx = ops.to_host(model.backward(ops.from_host(dy)))
    gradients = model.arena.layer("bn").gradients()
    found = y, dx, *(ops.to_host(gradients[name]) for name in ("weight", "bias"))
    return [np.asarray(a, np.float64) for a in (*found, *(ops.to_host(b) for b in bn.buffers.values()))]


def expected(x, dy, gamma, beta, positive):
    """The same by definition, with the mask that is given."""
    moments, rows = reference.moments(x, EPS), x.size // x.shape[-1]
    g = np.where(positive, dy.astype(np.float64), 0)
    sums = reference.backward_stats(g, x, moments)
    y = reference.apply(x, moments, gamma, beta, relu=True)
    dx = reference.backward_apply(g, x, moments, gamma, sums, rows)
    c = x.shape[-1]
    return y, dx, sums[1], sums[0], *reference.running(x, np.zeros(c), np.ones(c), MOMENTUM)


def assert_near(found, x, dy, gamma, beta, precision):
    """Errors are those of one rounding of each stored array, of sums in float32, and of a mean that is stored in it."""
    y, dx, dgamma, dbeta, mean, variance = found
    wanted = expected(x, dy, gamma, beta, y > 0)
    moments, unit = reference.moments(x, EPS), ROUNDED[precision]
    g, rows = np.abs(dy.astype(np.float64)), x.size // x.shape[-1]
    hat = np.abs(x.astype(np.float64) - moments[0]) * moments[1]
    lost = 2.0**-22 * (1 + np.abs(moments[0]) * moments[1])  # of a deviation
    bound = 2 * unit * np.abs(wanted[0]) + np.abs(gamma) * (lost + 2.0**-21 * hat) + 2.0**-22 * np.abs(beta)
    assert (np.abs(y - wanted[0]) <= bound).all()
    products = (g * hat).reshape(rows, -1)
    of_sum = products.sum(0) * 2.0**-19 + g.reshape(rows, -1).sum(0) * (lost + unit)
    assert (np.abs(dgamma - wanted[2]) <= of_sum + 1e-30).all()
    assert (np.abs(dbeta - wanted[3]) <= g.reshape(rows, -1).sum(0) * (2.0**-20 + unit)).all()
    slope = np.abs(gamma) * moments[1]
    terms = g + g.reshape(rows, -1).mean(0) + hat * (products.mean(0) + of_sum / rows)
    assert (np.abs(dx - wanted[1]) <= 4 * unit * np.abs(wanted[1]) + slope * terms * (2.0**-18 + lost + unit)).all()
    np.testing.assert_allclose(mean, wanted[4], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(variance, wanted[5], rtol=2e-5)


def draw(rng, image, ratio, precision, batch=2):
    storage = precision_of(precision).storage
    shape = (batch, *image)
    x = (rng.standard_normal(shape) + ratio * rng.choice([-1, 1], image[-1])).astype(storage)
    gamma, beta = rng.uniform(0.5, 2, image[-1]), rng.standard_normal(image[-1])
    return x, rng.standard_normal(shape).astype(storage), gamma.astype(np.float32), beta.astype(np.float32)


@PLANS
@PRECISIONS
@pytest.mark.parametrize("image", [(12, 12, 64), (9, 7, 13), (5, 5, 24)])
@pytest.mark.parametrize("far", [False, True], ids=["near", "far"])
def test_means_near_to_zero_and_far_from_it(ops, rng, how, precision, image, far):
    ratio = (1e4 if precision == "fp32" else 1e3) if far else 0.3
    x, dy, gamma, beta = draw(rng, image, ratio, precision)
    assert_near(step(model_of(ops, how, precision, image, gamma, beta), x, dy), x, dy, gamma, beta, precision)


@PLANS
@PRECISIONS
def test_scales_below_zero_and_zero_and_constant_channels(ops, rng, how, precision):
    image = (8, 8, 24)
    x, dy, gamma, beta = draw(rng, image, 1.0, precision)
    gamma[::3], gamma[1::3] = -gamma[::3], 0
    x[..., 2:6] = np.array([3, -100, 0, 1], x.dtype)
    found = step(model_of(ops, how, precision, image, gamma, beta), x, dy)
    assert_near(found, x, dy, gamma, beta, precision)
    assert not found[1][..., 1::3].any(), "nothing comes back through a scale of zero"


@PLANS
@PRECISIONS
@pytest.mark.parametrize("what", [np.nan, np.inf])
def test_what_is_no_number_stays_in_its_channel(ops, rng, how, precision, what):
    """In sums, moments and gradients; output and input gradient go through products with the zeros of filters."""
    image = (8, 8, 16)
    x, dy, gamma, beta = draw(rng, image, 0.5, precision)
    shift = np.zeros(16, np.float32)
    plain = step(model_of(ops, how, precision, image, gamma, beta, shift), x, dy)
    shift[5] = what
    spoilt = step(model_of(ops, how, precision, image, gamma, beta, shift), x, dy)
    assert not np.isfinite([spoilt[4][5], spoilt[5][5]]).any()
    others = [c for c in range(16) if c != 5]
    for index in (2, 3, 4, 5):
        np.testing.assert_array_equal(spoilt[index][others], plain[index][others])


@PLANS
@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize("channels", [5, 16])
def test_a_few_rows(ops, rng, how, rows, channels):
    image = (1, 1, channels)
    x, dy, gamma, beta = draw(rng, image, 0.5, "fp32", rows)
    assert_near(step(model_of(ops, how, "fp32", image, gamma, beta), x, dy), x, dy, gamma, beta, "fp32")


@PLANS
def test_one_row_is_refused(ops, how):
    ones = np.ones(8, np.float32)
    model = model_of(ops, how, "fp32", (1, 1, 8), ones, ones)
    with pytest.raises(ValueError, match="more than one value per channel"):
        model.forward(ops.from_host(np.ones((1, 1, 1, 8), np.float32)))


@PLANS
@PRECISIONS
def test_frozen_statistics_are_constants(ops, rng, how, precision):
    """In evaluation mode the running statistics normalise, forward and backward, and nothing changes them."""
    image = (8, 8, 16)
    x, dy, gamma, beta = draw(rng, image, 2.0, precision)
    model = model_of(ops, how, precision, image, gamma, beta)
    mean, variance = rng.standard_normal(16).astype(np.float32), rng.uniform(0.5, 3, 16).astype(np.float32)
    state = model.state_dict() | {"bn.running_mean": mean, "bn.running_var": variance}
    model.load_state_dict(state)
    model.eval()
    y = np.asarray(ops.to_host(model.forward(ops.from_host(x), grad=True)), np.float64)
    dx = np.asarray(ops.to_host(model.backward(ops.from_host(dy))), np.float64)
    moments = np.stack([mean, 1 / np.sqrt(variance.astype(np.float64) + EPS)])
    unit = 4 * ROUNDED[precision]
    np.testing.assert_allclose(y, reference.apply(x, moments, gamma, beta, relu=True), rtol=unit, atol=2e-5)
    wanted = np.where(y > 0, dy.astype(np.float64), 0) * moments[1] * gamma
    np.testing.assert_allclose(dx, wanted, rtol=2 * unit, atol=1e-6)
    after = model.state_dict()
    assert all((after[name] == value).all() for name, value in state.items())
