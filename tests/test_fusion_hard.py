"""Every plan against the definition in float64, on what batch norms are bad at: means far from zero, constant channels,
scales that are negative or zero, numbers that are none, a few rows."""

from __future__ import annotations

from typing import NamedTuple

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
# What a ReLU reads: a batch norm; the sum of one and of something else; of two.
BRANCHES = pytest.mark.parametrize("kinds", [(True,), (True, False), (True, True)], ids=["alone", "join", "two"])


class Norm(NamedTuple):
    """A batch norm's scale and shift."""

    gamma: np.ndarray
    beta: np.ndarray


def picking(branch, branches):
    """A convolution's filters that pass on one part of the channels."""

    def init(rng, shape):
        channels = shape[0]
        return np.eye(channels * branches, dtype=np.float32)[branch * channels :][:channels].reshape(shape)

    return init


def model_of(ops, how, precision, image, *norms, shift=None):
    """A ReLU over one batch norm, or over a sum of two branches, each with a batch norm or, for None, without.

    It stands between convolutions that change nothing, so that every mode has its place. Each branch has its part of
    the input's channels.
    """
    graph, (*size, c), n = m.Graph(), image, len(norms)
    source, values = graph.input((*size, n * c)), []
    for i, norm in enumerate(norms):
        weights = picking(i, n)
        x = m.Conv2d(n * c, c, 1, bias=shift is not None, weight_init=weights, name=f"below{i}")(source)
        values.append(x if norm is None else m.BatchNorm2d(c, EPS, MOMENTUM, name=f"bn{i}")(x))
    x = m.ReLU(name="relu")(m.Add(name="add")(*values) if n > 1 else values[0])
    graph.output(m.Conv2d(c, c, 1, bias=False, weight_init=picking(0, 1), name="above")(x))
    model = m.Model(graph, device=ops.name, precision=precision, input_grad=True)
    state = {f"bn{i}.weight": norm.gamma for i, norm in enumerate(norms) if norm}
    state |= {f"bn{i}.bias": norm.beta for i, norm in enumerate(norms) if norm}
    state |= {f"below{i}.bias": shift for i in range(n) if shift is not None}
    model.load_state_dict(model.state_dict() | state)
    fusion.fuse(model, how)
    return model


class Found(NamedTuple):
    """What a step makes, in float64: output, input gradient, and of each batch norm the gradients of scale and shift
    with its running mean and variance."""

    y: np.ndarray
    dx: np.ndarray
    norms: dict[int, list[np.ndarray]]


def step(model, x, dy):
    host = lambda array: np.asarray(model.ops.to_host(array), np.float64)  # noqa: E731
    y = host(model.forward(model.ops.from_host(x)))
    dx = host(model.backward(model.ops.from_host(dy)))
    norms = {}
    for layer in (layer for layer in model.layers if isinstance(layer, m.BatchNorm2d)):
        gradients = model.arena.layer(layer.name).gradients()
        norms[int(layer.name[2:])] = [
            host(a) for a in (gradients["weight"], gradients["bias"], *layer.buffers.values())
        ]
    return Found(y, dx, norms)


def assert_near(found, x, dy, how, precision, *norms):
    """Errors are those of one rounding of each stored array, of sums in float32, and of a mean that is stored in it.

    Without a plan a batch norm below a sum is stored, too.
    """
    unit, parts = ROUNDED[precision], np.split(x.astype(np.float64), len(norms), axis=-1)
    g = np.where(found.y > 0, dy.astype(np.float64), 0)  # by the mask that is found
    wanted, bound = 0.0, 0.0
    for i, (part, norm) in enumerate(zip(parts, norms, strict=True)):
        dx = np.split(found.dx, len(norms), axis=-1)[i]
        if norm is None:
            np.testing.assert_array_equal(dx, g)
            wanted = wanted + part
            continue
        moments = reference.moments(part, EPS)
        own = reference.apply(part, moments, *norm)
        hat = np.abs(part - moments[0]) * moments[1]
        lost = 2.0**-22 * (1 + np.abs(moments[0]) * moments[1])  # of a deviation
        wanted = wanted + own
        bound = bound + np.abs(norm.gamma) * (lost + 2.0**-21 * hat) + 2.0**-22 * np.abs(norm.beta)
        if how == "none" and len(norms) > 1:
            bound = bound + 2 * unit * np.abs(own)
        _assert_gradients_near(found.norms[i], dx, part, dy, g, norm, moments, hat, lost, unit)
    wanted = np.maximum(wanted, 0)
    assert (np.abs(found.y - wanted) <= 2 * unit * np.abs(wanted) + bound).all()


def _assert_gradients_near(found, dx, x, dy, g, norm, moments, hat, lost, unit):
    """Of one batch norm, and its running statistics."""
    dgamma, dbeta, mean, variance = found
    rows, c = x.size // x.shape[-1], x.shape[-1]
    sums = reference.backward_stats(g, x, moments)
    size = np.abs(dy.astype(np.float64))
    products = (size * hat).reshape(rows, -1)
    of_sum = products.sum(0) * 2.0**-19 + size.reshape(rows, -1).sum(0) * (lost + unit)
    assert (np.abs(dgamma - sums[1]) <= of_sum + 1e-30).all()
    assert (np.abs(dbeta - sums[0]) <= size.reshape(rows, -1).sum(0) * (2.0**-20 + unit)).all()
    slope = np.abs(norm.gamma) * moments[1]
    terms = size + size.reshape(rows, -1).mean(0) + hat * (products.mean(0) + of_sum / rows)
    wanted = reference.backward_apply(g, x, moments, norm.gamma, sums, rows)
    assert (np.abs(dx - wanted) <= 4 * unit * np.abs(wanted) + slope * terms * (2.0**-18 + lost + unit)).all()
    running = reference.running(x, np.zeros(c), np.ones(c), MOMENTUM)
    np.testing.assert_allclose(mean, running[0], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(variance, running[1], rtol=2e-5)


def draw(rng, image, ratio, precision, kinds=(True,), batch=2):
    """An input, a gradient, and of each branch its batch norm, or None where it has none: there ``ratio`` is 0.3."""
    storage, c = precision_of(precision).storage, image[-1]
    ratios = np.repeat([ratio if kind else 0.3 for kind in kinds], c)
    x = rng.standard_normal((batch, *image[:-1], c * len(kinds))) + ratios * rng.choice([-1, 1], c * len(kinds))
    dy = rng.standard_normal((batch, *image)).astype(storage)
    norms = [
        Norm(rng.uniform(0.5, 2, c).astype(np.float32), rng.standard_normal(c).astype(np.float32)) if kind else None
        for kind in kinds
    ]
    return x.astype(storage), dy, norms


@PLANS
@PRECISIONS
@BRANCHES
@pytest.mark.parametrize("image", [(12, 12, 64), (9, 7, 13), (5, 5, 24)])
@pytest.mark.parametrize("far", [False, True], ids=["near", "far"])
def test_means_near_to_zero_and_far_from_it(ops, rng, how, precision, kinds, image, far):
    ratio = (1e4 if precision == "fp32" else 1e3) if far else 0.3
    x, dy, norms = draw(rng, image, ratio, precision, kinds)
    assert_near(step(model_of(ops, how, precision, image, *norms), x, dy), x, dy, how, precision, *norms)


@PLANS
@PRECISIONS
@BRANCHES
def test_scales_below_zero_and_zero_and_constant_channels(ops, rng, how, precision, kinds):
    image = (8, 8, 24)
    x, dy, norms = draw(rng, image, 1.0, precision, kinds)
    for norm in filter(None, norms):
        norm.gamma[::3], norm.gamma[1::3] = -norm.gamma[::3], 0
    x[..., 2:6] = np.array([3, -100, 0, 1], x.dtype)
    found = step(model_of(ops, how, precision, image, *norms), x, dy)
    assert_near(found, x, dy, how, precision, *norms)
    assert not found.dx[..., 1:24:3].any(), "nothing comes back through a scale of zero"


@PLANS
@PRECISIONS
@BRANCHES
@pytest.mark.parametrize("what", [np.nan, np.inf])
def test_what_is_no_number_stays_in_its_channel(ops, rng, how, precision, kinds, what):
    """In sums, moments and gradients; output and input gradient go through products with the zeros of filters."""
    image = (8, 8, 16)
    x, dy, norms = draw(rng, image, 0.5, precision, kinds)
    shift = np.zeros(16, np.float32)
    plain = step(model_of(ops, how, precision, image, *norms, shift=shift), x, dy)
    shift[5] = what
    spoilt = step(model_of(ops, how, precision, image, *norms, shift=shift), x, dy)
    others = [c for c in range(16) if c != 5]
    for i, (*gradients, mean, variance) in spoilt.norms.items():
        assert not np.isfinite([mean[5], variance[5]]).any()
        for one, before in zip((*gradients, mean, variance), plain.norms[i], strict=True):
            np.testing.assert_array_equal(one[others], before[others])


@PLANS
@BRANCHES
@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize("channels", [5, 16])
def test_a_few_rows(ops, rng, how, kinds, rows, channels):
    image = (1, 1, channels)
    x, dy, norms = draw(rng, image, 0.5, "fp32", kinds, rows)
    assert_near(step(model_of(ops, how, "fp32", image, *norms), x, dy), x, dy, how, "fp32", *norms)


@PLANS
def test_one_row_is_refused(ops, how):
    ones = np.ones(8, np.float32)
    model = model_of(ops, how, "fp32", (1, 1, 8), Norm(ones, ones))
    with pytest.raises(ValueError, match="more than one value per channel"):
        model.forward(ops.from_host(np.ones((1, 1, 1, 8), np.float32)))


@PLANS
@PRECISIONS
@BRANCHES
def test_frozen_statistics_are_constants(ops, rng, how, precision, kinds):
    """In evaluation mode the running statistics normalise, forward and backward, and nothing changes them."""
    image, unit = (8, 8, 16), 4 * ROUNDED[precision]
    x, dy, norms = draw(rng, image, 2.0, precision, kinds)
    model = model_of(ops, how, precision, image, *norms)
    names = [f"bn{i}.running_" for i, norm in enumerate(norms) if norm]
    means = {f"{name}mean": rng.standard_normal(16).astype(np.float32) for name in names}
    variances = {f"{name}var": rng.uniform(0.5, 3, 16).astype(np.float32) for name in names}
    state = model.state_dict() | means | variances
    model.load_state_dict(state)
    model.eval()
    y = np.asarray(ops.to_host(model.forward(ops.from_host(x), grad=True)), np.float64)
    dx = np.asarray(ops.to_host(model.backward(ops.from_host(dy))), np.float64)
    g, total, size = np.where(y > 0, dy.astype(np.float64), 0), 0.0, 0.0
    for i, (part, norm) in enumerate(zip(np.split(x, len(norms), axis=-1), norms, strict=True)):
        own, slope = part.astype(np.float64), 1.0
        if norm:
            deviation = np.sqrt(variances[f"bn{i}.running_var"].astype(np.float64) + EPS)
            moments = np.stack([means[f"bn{i}.running_mean"], 1 / deviation])
            own, slope = reference.apply(part, moments, *norm), moments[1] * norm.gamma
        total, size = total + own, size + np.abs(own)
        np.testing.assert_allclose(np.split(dx, len(norms), axis=-1)[i], g * slope, rtol=2 * unit, atol=1e-6)
    assert (np.abs(y - np.maximum(total, 0)) <= unit * size + 2e-5).all()
    after = model.state_dict()
    assert all((after[name] == value).all() for name, value in state.items())
