"""Batch normalization: laws of the operations of both tables."""

from __future__ import annotations

import numpy as np
import pytest

from minidl.precision import float32
from tests.layouts import LAYOUTS, place
from tests.reference import activation
from tests.reference import batch_norm as reference
from tests.reference.differences import assert_gradient
from tests.tolerance import assert_close, draw

SHAPES = [
    (1, 1, 1, 1),
    (3, 5, 7, 3),
    (2, 9, 11, 13),
    (4, 8, 8, 16),
    (1, 17, 1, 300),
    (2311, 5),
    (257, 64),
    (0, 4, 4, 8),
]
EPS = 1e-5


def assert_stats(actual, x):
    """Means within one rounding to float32 and some units of the deviation, M2 (a sum of positive terms, so of relative
    accuracy) within some units."""
    expected = reference.stats(x)
    channels = x.shape[-1]
    assert actual.shape == expected.shape and actual.dtype == np.float64
    assert actual[0] == expected[0]
    if expected[0] == 0:
        assert not actual.any()
        return
    mean, m2 = np.split(expected[1:], [channels])
    assert_close(actual[1 : 1 + channels], mean, float32, scale=float(np.max(m2) / expected[0]) ** 0.5)
    assert_close(actual[1 + channels :], m2, float32, scale=float(np.max(m2)))


def random_moments(rng, channels):
    return np.stack([rng.standard_normal(channels), rng.uniform(0.5, 2, channels)]).astype(np.float32)


def vectors(rng, channels):
    return rng.standard_normal((2, channels)).astype(np.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_statistics_equal_the_reference(ops, rng, dtype, shape, layout):
    x = draw(rng, shape, dtype, offset=0.5)
    assert_stats(ops.to_host(ops.batch_norm_stats(place(ops, x, layout))), x)


@pytest.mark.parametrize("channels", [(5,), (1, 1), (3, 8), (64, 32, 1)])
def test_statistics_side_by_side_are_those_of_a_concatenation(ops, rng, channels):
    parts = [draw(rng, (7, 5, c), float32, offset=i) for i, c in enumerate(channels)]
    found = ops.to_host(ops.batch_norm_concat([ops.batch_norm_stats(ops.from_host(part)) for part in parts]))
    assert_stats(found, np.concatenate(parts, axis=-1))
    for part, begin in zip(parts, np.cumsum((0, *channels)), strict=False):
        own, c = ops.to_host(ops.batch_norm_stats(ops.from_host(part))), part.shape[-1]
        one = found[1:].reshape(2, -1)[:, begin : begin + c]
        assert one.tobytes() == own[1:].reshape(2, -1).tobytes() and found[0] == own[0]


@pytest.mark.parametrize("ratio", [1e2, 1e3, 1e4])
def test_statistics_stay_accurate_far_from_zero(ops, rng, ratio):
    x = draw(rng, (3, 31, 29, 7), float32, offset=ratio)
    stats = ops.batch_norm_stats(ops.from_host(x))
    assert_stats(ops.to_host(stats), x)
    moments, _ = ops.batch_norm_finalize(stats, EPS)
    y = ops.to_host(ops.batch_norm_apply(ops.from_host(x), moments))
    # The mean is stored in float32: half a unit of it is a shift of that many deviations.
    np.testing.assert_allclose(y, reference.forward(x, 1.0, 0.0, EPS), rtol=2e-5, atol=2.0**-24 * ratio + 1e-5)


def test_one_outlier_does_not_spoil_the_statistics(ops):
    x = np.zeros((512, 3), np.float32)
    x[0] = 1e4
    x[1:] += np.float32(1.0)
    # The last bits of small squares are lost beside a huge one, always in the same direction: 512 times half a unit.
    actual = ops.to_host(ops.batch_norm_stats(ops.from_host(x)))
    np.testing.assert_allclose(actual, reference.stats(x), rtol=2.0**-24 * 512)


def test_constant_channels_have_no_variance(ops):
    x = np.broadcast_to(np.float32([3.1, -1e6, 0.0]), (700, 3))
    stats = ops.to_host(ops.batch_norm_stats(ops.from_host(x)))
    np.testing.assert_array_equal(stats[4:], 0)


@pytest.mark.parametrize("cuts", [(0,), (700,), (350,), (1,), (3, 100, 101), (0, 0, 699, 700)])
def test_statistics_of_parts_merge_into_those_of_the_whole(ops, rng, cuts):
    x = draw(rng, (700, 9), float32, offset=100.0)
    parts = [ops.to_host(ops.batch_norm_stats(ops.from_host(part))) for part in np.split(x, cuts)]
    moments, count = ops.batch_norm_finalize(ops.from_host(np.stack(parts)), EPS)
    expected = reference.moments(x, EPS)
    assert ops.to_host(count).tolist() == [700.0]
    assert_close(ops.to_host(moments)[0], expected[0], float32, scale=1.0)
    assert_close(ops.to_host(moments)[1], expected[1], float32, scale=1.0)


@pytest.mark.parametrize("rows", [1, 2, 65])
@pytest.mark.parametrize("momentum", [0.1, 1.0])
def test_finalize_updates_running_statistics(ops, rng, rows, momentum):
    x = draw(rng, (rows, 6), float32, offset=2.0)
    old = np.abs(draw(rng, (2, 6), float32))
    mean, var = ops.from_host(old[0]), ops.from_host(old[1])
    stats = ops.batch_norm_stats(ops.from_host(x))
    ops.batch_norm_finalize(stats, EPS, running_mean=mean, running_var=var, momentum=momentum)
    expected = reference.running(x, old[0].astype(np.float64), old[1].astype(np.float64), momentum)
    assert_close(ops.to_host(mean), expected[0], float32, scale=1.0)
    assert_close(ops.to_host(var), expected[1], float32, terms=rows, scale=1.0)


def test_finalize_takes_one_record_or_a_table_of_one(ops, rng):
    stats = ops.to_host(ops.batch_norm_stats(ops.from_host(draw(rng, (40, 5), float32))))
    flat, count = ops.batch_norm_finalize(ops.from_host(stats), EPS)
    table, _ = ops.batch_norm_finalize(ops.from_host(stats[None]), EPS)
    assert flat.shape == (2, 5) and flat.dtype == np.float32 and count.shape == (1,) and count.dtype == np.float64
    np.testing.assert_array_equal(ops.to_host(flat), ops.to_host(table))


def test_nothing_counted_changes_nothing(ops):
    mean, var = ops.from_host(np.float32([1, 2])), ops.from_host(np.float32([3, 4]))
    empty = ops.batch_norm_stats(ops.zeros((0, 3, 3, 2), float32))
    moments, count = ops.batch_norm_finalize(empty, EPS, running_mean=mean, running_var=var)
    assert ops.to_host(count)[0] == 0 and np.isfinite(ops.to_host(moments)).all()
    assert ops.to_host(mean).tolist() == [1, 2] and ops.to_host(var).tolist() == [3, 4]


def test_evaluation_moments(ops, rng):
    mean, var = draw(rng, 11, float32), np.abs(draw(rng, 11, float32))
    moments = ops.to_host(ops.batch_norm_eval_moments(ops.from_host(mean), ops.from_host(var), EPS))
    np.testing.assert_array_equal(moments[0], mean)
    assert_close(moments[1], 1 / np.sqrt(var.astype(np.float64) + EPS), float32)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("with_add", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_apply_equals_the_reference(ops, rng, dtype, shape, with_add, relu, layout):
    x, moments = draw(rng, shape, dtype), random_moments(rng, shape[-1])
    add = draw(rng, shape, dtype) if with_add else None
    gamma, beta = vectors(rng, shape[-1])
    y = ops.batch_norm_apply(
        place(ops, x, layout),
        *map(ops.from_host, (moments, gamma, beta)),
        add=place(ops, add, layout) if with_add else None,
        relu=relu,
    )
    expected = reference.apply(x, moments.astype(np.float64), gamma, beta, add, relu)
    assert y.dtype == dtype
    assert_close(ops.to_host(y), expected, dtype, terms=4)


@pytest.mark.parametrize("which", ["neither", "gamma", "beta"])
def test_apply_without_gamma_or_beta(ops, rng, which):
    x, moments = draw(rng, (3, 4, 5, 6), float32), random_moments(rng, 6)
    gamma, beta = vectors(rng, 6)
    given = {"gamma": gamma} if which == "gamma" else {"beta": beta} if which == "beta" else {}
    y = ops.batch_norm_apply(
        ops.from_host(x), ops.from_host(moments), **{name: ops.from_host(value) for name, value in given.items()}
    )
    assert_close(ops.to_host(y), reference.apply(x, moments.astype(np.float64), **given), float32, terms=4)


def test_apply_keeps_nan(ops):
    x = np.float32([[np.nan, 1.0, -1.0]])
    moments = np.float32([[0, 0, 0], [1, 1, 1]])
    y = ops.to_host(ops.batch_norm_apply(ops.from_host(x), ops.from_host(moments), relu=True))
    np.testing.assert_array_equal(y, [[np.nan, 1, 0]])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_backward_sums_equal_the_reference(ops, rng, dtype, shape, layout):
    dy, x, moments = draw(rng, shape, dtype), draw(rng, shape, dtype), random_moments(rng, shape[-1])
    sums = ops.batch_norm_backward_stats(place(ops, dy, layout), place(ops, x, layout), ops.from_host(moments))
    expected = reference.backward_stats(dy, x, moments.astype(np.float64))
    assert sums.dtype == np.float64
    # One term is dy * (x - mean) * rstd: up to |dy| * (|x| + |mean|) * rstd, a few units.
    assert_close(ops.to_host(sums), expected, float32, terms=int(np.prod(shape[:-1])), scale=4.0)


@pytest.mark.parametrize("accumulate", [False, True])
def test_parameter_gradients_are_the_sums(ops, rng, accumulate):
    dy, x, moments = draw(rng, (90, 12), float32), draw(rng, (90, 12), float32), random_moments(rng, 12)
    old = vectors(rng, 12)
    dgamma, dbeta = ops.from_host(old[0]), ops.from_host(old[1])
    sums = ops.to_host(
        ops.batch_norm_backward_stats(
            *map(ops.from_host, (dy, x, moments)), dgamma=dgamma, dbeta=dbeta, accumulate=accumulate
        )
    )
    base = old.astype(np.float64) if accumulate else np.zeros((2, 12))
    assert_close(ops.to_host(dgamma), base[0] + sums[1], float32)
    assert_close(ops.to_host(dbeta), base[1] + sums[0], float32)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("with_add", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_backward_apply_equals_the_reference(ops, rng, dtype, shape, with_add, training, layout):
    dy, x, moments = draw(rng, shape, dtype), draw(rng, shape, dtype), random_moments(rng, shape[-1])
    gamma, _ = vectors(rng, shape[-1])
    add = draw(rng, shape, dtype) if with_add else None
    rows = 10.0 + np.prod(shape[:-1])  # more than here: other ranks have rows, too
    sums, count = (rng.standard_normal((2, shape[-1])) * rows, np.array([rows])) if training else (None, None)
    dx = ops.batch_norm_backward_apply(
        place(ops, dy, layout),
        place(ops, x, layout),
        ops.from_host(moments),
        ops.from_host(gamma),
        None if sums is None else ops.from_host(sums),
        None if count is None else ops.from_host(count),
        add=place(ops, add, layout) if with_add else None,
    )
    expected = reference.backward_apply(dy, x, moments.astype(np.float64), gamma, sums, count, add)
    assert dx.dtype == dtype
    assert_close(ops.to_host(dx), expected, dtype, terms=4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_backward_apply_with_the_sums_of_another(ops, rng, dtype, shape, layout):
    """The bits of its own pass; and sums that equal the reference, and are the same each time."""
    dy, x, other = (draw(rng, shape, dtype) for _ in range(3))
    moments, other_moments = random_moments(rng, shape[-1]), random_moments(rng, shape[-1])
    gamma, _ = vectors(rng, shape[-1])
    sums, count = rng.standard_normal((2, shape[-1])), np.array([10.0 + np.prod(shape[:-1])])
    dy_, x_, other_ = (place(ops, array, layout) for array in (dy, x, other))
    facts = list(map(ops.from_host, (moments, gamma, sums, count)))
    beside = ops.from_host(other_moments)
    expected = reference.backward_stats(dy, other, other_moments.astype(np.float64))
    found = []
    for given in (facts, [facts[0], None, *facts[2:]], facts):
        dx, parts = ops.batch_norm_backward_apply_stats(dy_, x_, *given, other_, beside)
        assert dx.dtype == dtype
        assert_same(ops.to_host(dx), ops.to_host(ops.batch_norm_backward_apply(dy_, x_, *given)))
        gradients = [ops.empty(shape[-1:], float32) for _ in range(2)]
        total = ops.batch_norm_backward_sums(parts, beside, dgamma=gradients[0], dbeta=gradients[1])
        assert_close(ops.to_host(total), expected, float32, terms=int(np.prod(shape[:-1])), scale=4.0)
        assert_close(np.stack([ops.to_host(g) for g in gradients[::-1]]), ops.to_host(total), float32)
        found.append(ops.to_host(total).tobytes())
    assert len(set(found)) == 1


def test_backward_apply_without_gamma(ops, rng):
    dy, x, moments = draw(rng, (20, 7), float32), draw(rng, (20, 7), float32), random_moments(rng, 7)
    sums = rng.standard_normal((2, 7))
    dx = ops.batch_norm_backward_apply(
        *map(ops.from_host, (dy, x, moments)), None, ops.from_host(sums), ops.from_host(np.array([20.0]))
    )
    expected = reference.backward_apply(dy, x, moments.astype(np.float64), None, sums, 20.0)
    assert_close(ops.to_host(dx), expected, float32, terms=4)


@pytest.mark.parametrize("shape", [(5, 3), (2, 2, 3, 2), (2, 1)])
def test_reference_gradients_equal_central_differences(rng, shape):
    x, dy = rng.standard_normal(shape), rng.standard_normal(shape)
    gamma, beta = rng.standard_normal((2, shape[-1]))
    dx, dgamma, dbeta = reference.backward(dy, x, gamma, 0.1)
    assert_gradient(dx, lambda v: reference.forward(v, gamma, beta, 0.1), x, dy)
    assert_gradient(dgamma, lambda v: reference.forward(x, v, beta, 0.1), gamma, dy)
    assert_gradient(dbeta, lambda v: reference.forward(x, gamma, v, 0.1), beta, dy)


@pytest.mark.parametrize("shape", [(4, 7, 7, 9), (300, 32)])
def test_the_parts_together_give_the_gradient(ops, rng, shape):
    x, dy = draw(rng, shape, float32, offset=3.0), draw(rng, shape, float32)
    gamma, beta = vectors(rng, shape[-1])
    x_, dy_, gamma_, beta_ = map(ops.from_host, (x, dy, gamma, beta))
    moments, count = ops.batch_norm_finalize(ops.batch_norm_stats(x_), EPS)
    y = ops.batch_norm_apply(x_, moments, gamma_, beta_)
    dgamma, dbeta = ops.empty(shape[-1:], float32), ops.empty(shape[-1:], float32)
    sums = ops.batch_norm_backward_stats(dy_, x_, moments, dgamma=dgamma, dbeta=dbeta)
    dx = ops.batch_norm_backward_apply(dy_, x_, moments, gamma_, sums, count)
    rows = int(np.prod(shape[:-1]))
    expected = reference.backward(dy, x, gamma, EPS)
    assert_close(ops.to_host(y), reference.forward(x, gamma, beta, EPS), float32, terms=4)
    assert_close(ops.to_host(dx), expected[0], float32, terms=8)
    assert_close(ops.to_host(dgamma), expected[1], float32, terms=rows, scale=4.0)
    assert_close(ops.to_host(dbeta), expected[2], float32, terms=rows, scale=4.0)


# ------------------------------------------------------------------------------------------------ fused with its ReLU


def assert_same(a, b):
    """To the bit, but for the sign and payload of NaN."""
    np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))


def near_zero(rng, shape, dtype, moments, gamma, beta):
    """Inputs whose outputs lie on both sides of zero, some so close that they round to zero, some NaN."""
    x = draw(rng, shape, dtype).astype(np.float64)
    tiny = rng.choice([0.0, 2.0**-26, -(2.0**-26), 2.0**-24, 2.0**-135, 2.0**-133, 1e-3], shape)
    root = moments[0] + (tiny - beta) / (gamma * moments[1])
    x = np.where(rng.random(shape) < 0.5, x, root).astype(dtype)
    x[rng.random(shape) < 0.02] = np.nan
    return x


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("with_add", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_recomputed_mask_is_the_forward_passs_to_the_bit(ops, rng, dtype, shape, with_add, layout):
    moments, (gamma, beta) = random_moments(rng, shape[-1]), vectors(rng, shape[-1])
    moments[:, 0], gamma[0], beta[0] = (0, 1), 1, 0  # a channel that is its own output
    x, dy, add = near_zero(rng, shape, dtype, moments, gamma, beta), *(draw(rng, shape, dtype) for _ in range(2))
    x_, dy_, add_ = (place(ops, array, layout) for array in (x, dy, add))
    affine = [ops.from_host(v) for v in (moments, gamma, beta)]
    masked = ops.relu_backward(dy_, ops.batch_norm_apply(x_, *affine, relu=True))
    plain = ops.batch_norm_backward_stats(masked, x_, affine[0])
    fused = ops.batch_norm_activate_backward_stats(dy_, x_, *affine)
    assert_same(ops.to_host(fused), ops.to_host(plain))
    sums, count = ops.from_host(rng.standard_normal((2, shape[-1]))), ops.from_host(np.array([7.0]))
    for given in ((sums, count), (None, None)):
        options = {"add": add_ if with_add else None}
        plain = ops.batch_norm_backward_apply(masked, x_, *affine[:2], *given, **options)
        fused = ops.batch_norm_activate_backward_apply(dy_, x_, *affine, *given, **options)
        assert fused.dtype == dtype
        assert_same(ops.to_host(fused), ops.to_host(plain))


def away_from_kinks(x, moments, gamma, beta, function):
    """``x``, and what the batch norm makes of it in float64; moved off kinks, which have no one slope."""
    for kink in activation.KINKS.get(function, ()):
        z = reference.apply(x, moments.astype(np.float64), gamma, beta)
        x = np.where(np.abs(z - kink) < 0.02 * (1 + abs(kink)), (x.astype(np.float64) + 0.5).astype(x.dtype), x)
    z = reference.apply(x, moments.astype(np.float64), gamma, beta)
    near = [np.abs(z - kink) < 1e-3 for kink in activation.KINKS.get(function, ())]
    return x, z, ~np.any([np.zeros(z.shape, bool), *near], axis=0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("with_add", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 5, 7, 3), (4, 8, 8, 16), (257, 64), (0, 4, 4, 8)])
@pytest.mark.parametrize("function", activation.FUNCTIONS)
def test_an_activation_over_a_batch_norm_equals_the_reference(ops, rng, dtype, function, shape, with_add, layout):
    """Forward; and backward, where its slope is recomputed from the batch norm's input."""
    channels = shape[-1]
    moments = np.stack([0.1 * rng.standard_normal(channels), rng.uniform(0.5, 1.5, channels)]).astype(np.float32)
    gamma, beta = rng.uniform(1, 3, channels).astype(np.float32), rng.standard_normal(channels).astype(np.float32)
    x, z, apart = away_from_kinks(draw(rng, shape, dtype), moments, gamma, beta, function)
    dy, add = draw(rng, shape, dtype), draw(rng, shape, dtype) if with_add else None
    dy[~apart] = 0  # whatever the slope is
    affine = [ops.from_host(v) for v in (moments, gamma, beta)]
    x_, dy_ = place(ops, x, layout), place(ops, dy, layout)

    y = ops.batch_norm_activate(x_, *affine, function, 0.25)
    assert y.dtype == dtype
    size = float(np.abs(z).max(initial=0.0))
    rounds = {"terms": 8, "scale": size}
    assert_close(ops.to_host(y), activation.FUNCTIONS[function](z, 0.25), dtype, **rounds)

    g = dy.astype(np.float64) * activation.slope_of(function, z, 0.25)
    sums = ops.batch_norm_activate_backward_stats(dy_, x_, *affine, function, 0.25)
    expected = reference.backward_stats(g, x, moments.astype(np.float64))
    # Terms: dy times a slope, whose error is that of the batch norm's output and of what it consists of.
    size = float(np.abs(dy.astype(np.float64)).max(initial=0.0)) * (1 + size)
    assert_close(ops.to_host(sums), expected, float32, terms=8 * g.size // channels, scale=size)

    known = rng.standard_normal((2, channels)), np.array([float(max(g.size // channels, 1))])
    for given in (known, (None, None)):
        on_device = [None if one is None else ops.from_host(one) for one in given]
        more = None if add is None else place(ops, add, layout)
        dx = ops.batch_norm_activate_backward_apply(dy_, x_, *affine, *on_device, function, 0.25, add=more)
        assert dx.dtype == dtype
        expected = reference.backward_apply(g, x, moments.astype(np.float64), gamma, *given, add=add)
        assert_close(ops.to_host(dx), expected, dtype, terms=8, scale=3 * size)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_behind_a_join_leave_the_masked_gradient(ops, rng, dtype, shape, layout):
    dy, y, x = (draw(rng, shape, dtype) for _ in range(3))
    y = np.maximum(y, 0).astype(dtype)
    moments = ops.from_host(random_moments(rng, shape[-1]))
    dy_, y_, x_ = (place(ops, array, layout) for array in (dy, y, x))
    masked = ops.relu_backward(dy_, y_)
    gradients = [ops.empty(shape[-1:], float32) for _ in range(4)]
    plain = ops.batch_norm_backward_stats(masked, x_, moments, dgamma=gradients[0], dbeta=gradients[1])
    sums, left = ops.batch_norm_join_backward_stats(dy_, y_, x_, moments, dgamma=gradients[2], dbeta=gradients[3])
    for one, other in ((masked, left), (plain, sums), gradients[::2], gradients[1::2]):
        assert_same(ops.to_host(one), ops.to_host(other))


def signs_of(y):
    """Where an array is positive, a bit for each value, rows in multiples of 16 bytes."""
    bits = np.packbits(np.asarray(y, np.float32) > 0, axis=-1, bitorder="little")
    return np.pad(bits, [(0, 0)] * (y.ndim - 1) + [(0, -bits.shape[-1] % 16)])


@pytest.mark.parametrize("partner", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [*SHAPES, (3, 5, 2, 128), (2, 3, 3, 136), (7, 264)])
def test_a_join_leaves_the_signs_of_its_output(ops, rng, dtype, shape, layout, partner):
    """Which serve its gradient as the output itself does, to the bit."""
    moments, (gamma, beta) = random_moments(rng, shape[-1]), vectors(rng, shape[-1])
    x, add, dy, more = near_zero(rng, shape, dtype, moments, gamma, beta), *(draw(rng, shape, dtype) for _ in range(3))
    add[rng.random(shape) < 0.5] = 0
    x_, add_, dy_, more_ = (place(ops, array, layout) for array in (x, add, dy, more))
    affine = [ops.from_host(v) for v in (moments, gamma, beta)]
    names = ("add_moments", "add_gamma", "add_beta")
    other = dict(zip(names, affine, strict=True)) if partner else {}
    y, signs = ops.batch_norm_join(*(x_, *affine, add_), **other)
    assert_same(ops.to_host(y), ops.to_host(ops.batch_norm_apply(x_, *affine, add=add_, **other, relu=True)))
    if signs is None:
        aligned = layout == LAYOUTS[0] and shape[-1] % 8 == 0
        assert ops.name == "cpu" or dtype == float32 or not aligned, "kept the output where its signs would do"
        return
    used = -(-shape[-1] // 8)
    assert ops.to_host(signs)[..., :used].tobytes() == signs_of(ops.to_host(y))[..., :used].tobytes()
    assert signs.shape == signs_of(ops.to_host(y)).shape
    for rest in (None, more_):
        masked = (ops.relu_backward(dy_, kept, add=rest) for kept in (y, signs))
        assert_same(*map(ops.to_host, masked))
    gradients = [ops.empty(shape[-1:], float32) for _ in range(4)]
    sums, left = ops.batch_norm_join_backward_stats(dy_, y, x_, affine[0], dgamma=gradients[0], dbeta=gradients[1])
    again = ops.batch_norm_join_backward_stats(dy_, signs, x_, affine[0], dgamma=gradients[2], dbeta=gradients[3])
    for one, two in zip((sums, left, *gradients[:2]), (*again, *gradients[2:]), strict=True):
        assert_same(ops.to_host(one), ops.to_host(two))


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_join_normalises_both_of_its_summands(ops, rng, dtype, shape, layout, affine):
    x, add = draw(rng, shape, dtype), draw(rng, shape, dtype)
    moments, add_moments = random_moments(rng, shape[-1]), random_moments(rng, shape[-1])
    parameters = [*vectors(rng, shape[-1]), *vectors(rng, shape[-1])] if affine else [None] * 4
    gamma, beta, add_gamma, add_beta = (None if p is None else ops.from_host(p) for p in parameters)
    y = ops.batch_norm_apply(
        place(ops, x, layout), ops.from_host(moments), gamma, beta,
        add=place(ops, add, layout), add_moments=ops.from_host(add_moments), add_gamma=add_gamma, add_beta=add_beta,
        relu=True,
    )  # fmt: skip
    other = reference.apply(add, add_moments.astype(np.float64), *parameters[2:])
    expected = reference.apply(x, moments.astype(np.float64), *parameters[:2], other, relu=True)
    assert y.dtype == dtype
    assert_close(ops.to_host(y), expected, dtype, terms=8)
