"""Pooling: laws of the operations of both tables."""

from __future__ import annotations

import numpy as np
import pytest

from minidl.precision import float32
from tests.layouts import LAYOUTS, place
from tests.reference import pool2d as reference
from tests.reference.differences import assert_gradient
from tests.tolerance import assert_close, draw


def window(kernel, stride, padding=(0, 0), dilation=(1, 1), ceil_mode=False):
    return {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation, "ceil_mode": ceil_mode}


WINDOWS = {
    "2x2": window((2, 2), (2, 2)),
    "3x3-overlapping": window((3, 3), (2, 2), (1, 1)),
    "3x3-dense": window((3, 3), (1, 1), (1, 1)),
    "uneven": window((2, 5), (3, 1), (1, 2)),
    "dilated": window((3, 2), (1, 2), (1, 0), (2, 3)),
    "gaps": window((1, 2), (3, 4)),
    "ceil": window((3, 3), (2, 2), (0, 1), ceil_mode=True),
    "ceil-dropped": window((2, 2), (4, 3), (1, 1), ceil_mode=True),
    "one": window((1, 1), (1, 1)),
}
SHAPES = [(1, 7, 8, 1), (2, 9, 7, 5), (3, 8, 11, 16), (1, 10, 9, 70), (0, 8, 8, 4)]
windows = pytest.mark.parametrize("w", WINDOWS.values(), ids=WINDOWS.keys())


def backward_options(w):
    return {name: value for name, value in w.items() if name != "ceil_mode"}


def average_options(w):
    return {name: value for name, value in w.items() if name != "dilation"}


@windows
@pytest.mark.parametrize("shape", SHAPES)
def test_max_pool_equals_the_reference(ops, rng, dtype, shape, w):
    # Few different values, so that windows have several maxima.
    x = rng.integers(-3, 3, shape).astype(dtype)
    y, index = ops.max_pool2d(ops.from_host(x), **w)
    expected, position = reference.max_pool2d(x, **w)
    assert y.dtype == dtype and index.dtype == np.uint8
    np.testing.assert_array_equal(ops.to_host(y).astype(np.float64), expected)
    np.testing.assert_array_equal(ops.to_host(index), position)


@windows
@pytest.mark.parametrize("shape", SHAPES)
def test_max_pool_backward_equals_the_reference(ops, rng, dtype, shape, w):
    x = rng.integers(-3, 3, shape).astype(dtype)
    _, index = ops.max_pool2d(ops.from_host(x), **w)
    dy = draw(rng, index.shape, dtype)
    dx = ops.max_pool2d_backward(ops.from_host(dy), index, shape, **backward_options(w))
    assert dx.dtype == dtype
    expected = reference.max_pool2d_backward(dy, ops.to_host(index), shape, **w)
    assert_close(ops.to_host(dx), expected, dtype, terms=9)
    add = draw(rng, shape, dtype)
    dx = ops.max_pool2d_backward(ops.from_host(dy), index, shape, **backward_options(w), add=ops.from_host(add))
    assert dx.dtype == dtype
    assert_close(ops.to_host(dx), expected + add.astype(np.float64), dtype, terms=10)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_max_pool_of_any_layout(ops, rng, dtype, layout):
    w = WINDOWS["3x3-overlapping"]
    x = draw(rng, (2, 9, 10, 6), dtype)
    y, index = ops.max_pool2d(place(ops, x, layout), **w)
    expected, position = reference.max_pool2d(x, **w)
    np.testing.assert_array_equal(ops.to_host(y).astype(np.float64), expected)
    np.testing.assert_array_equal(ops.to_host(index), position)
    dy = draw(rng, y.shape, dtype)
    dx = ops.max_pool2d_backward(place(ops, dy, layout), index, x.shape, **backward_options(w))
    expected = reference.max_pool2d_backward(dy, position, x.shape, **w)
    assert_close(ops.to_host(dx), expected, dtype, terms=4)
    dx = ops.max_pool2d_backward(ops.from_host(dy), index, x.shape, **backward_options(w), add=place(ops, x, layout))
    assert_close(ops.to_host(dx), expected + x.astype(np.float64), dtype, terms=5)


def test_max_pool_of_large_windows_has_wide_indices(ops, rng):
    w = window((17, 16), (9, 16), (3, 0))
    x = draw(rng, (2, 40, 33, 3), float32)
    y, index = ops.max_pool2d(ops.from_host(x), **w)
    expected, position = reference.max_pool2d(x, **w)
    assert index.dtype == np.uint16 and position.max() > 255
    np.testing.assert_array_equal(ops.to_host(y), expected)
    np.testing.assert_array_equal(ops.to_host(index), position)
    dy = draw(rng, y.shape, float32)
    dx = ops.max_pool2d_backward(ops.from_host(dy), index, x.shape, **backward_options(w))
    assert_close(ops.to_host(dx), reference.max_pool2d_backward(dy, position, x.shape, **w), float32, terms=4)


def test_max_pool_of_special_values(ops, rng, dtype):
    x = draw(rng, (1, 6, 6, 3), dtype)
    x[0, :, :, 0] = -np.inf
    x[0, 1, 2, 1] = x[0, 2, 2, 1] = x[0, 5, 0, 1] = np.nan
    x[0, 3, 3, 2] = np.inf
    w = WINDOWS["3x3-overlapping"]
    y, index = ops.max_pool2d(ops.from_host(x), **w)
    expected, position = reference.max_pool2d(x, **w)
    np.testing.assert_array_equal(ops.to_host(y).astype(np.float64), expected)
    np.testing.assert_array_equal(ops.to_host(index), position)


def test_a_window_wholly_in_the_padding_gives_nothing_back(ops):
    w = window((2, 2), (1, 1), (1, 0), (5, 1))
    x = np.arange(8, dtype=np.float32).reshape(1, 4, 2, 1)
    y, index = ops.max_pool2d(ops.from_host(x), **w)
    assert ops.to_host(y).tolist() == [[[[-np.inf]]]]
    dx = ops.max_pool2d_backward(
        ops.from_host(np.ones((1, 1, 1, 1), np.float32)), index, x.shape, **backward_options(w)
    )
    assert not ops.to_host(dx).any()


@pytest.mark.parametrize("count_include_pad", [False, True])
@windows
@pytest.mark.parametrize("shape", SHAPES)
def test_avg_pool_equals_the_reference(ops, rng, dtype, shape, w, count_include_pad):
    options = {**average_options(w), "count_include_pad": count_include_pad}
    x = draw(rng, shape, dtype)
    y = ops.avg_pool2d(ops.from_host(x), **options)
    expected = reference.mean_pool2d(x, reference.avg_windows(shape, **options))
    assert y.dtype == dtype
    assert_close(ops.to_host(y), expected, dtype, terms=10)
    dy = draw(rng, y.shape, dtype)
    dx = ops.avg_pool2d_backward(ops.from_host(dy), shape, **options)
    assert dx.dtype == dtype
    expected = reference.mean_pool2d_backward(dy, shape, reference.avg_windows(shape, **options))
    assert_close(ops.to_host(dx), expected, dtype, terms=10)


ADAPTIVE = [
    ((1, 1), (2, 7, 9, 5)),
    ((3, 2), (2, 7, 9, 5)),
    ((5, 4), (1, 3, 2, 17)),
    ((7, 7), (3, 7, 7, 3)),
    ((2, 3), (0, 4, 4, 6)),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("out, shape", ADAPTIVE)
def test_adaptive_avg_pool_equals_the_reference(ops, rng, dtype, out, shape, layout):
    x = draw(rng, shape, dtype)
    y = ops.adaptive_avg_pool2d(place(ops, x, layout), out)
    expected = reference.mean_pool2d(x, reference.adaptive_windows(shape, out))
    assert y.dtype == dtype
    assert_close(ops.to_host(y), expected, dtype, terms=63)
    dy = draw(rng, y.shape, dtype)
    dx = ops.adaptive_avg_pool2d_backward(place(ops, dy, layout), shape)
    assert dx.dtype == dtype
    expected = reference.mean_pool2d_backward(dy, shape, reference.adaptive_windows(shape, out))
    assert_close(ops.to_host(dx), expected, dtype, terms=9)


def test_global_average_of_a_large_image(ops, rng):
    x = draw(rng, (1, 223, 227, 3), float32, offset=1.0)
    y = ops.to_host(ops.adaptive_avg_pool2d(ops.from_host(x), (1, 1)))
    assert_close(y, x.astype(np.float64).mean(axis=(1, 2), keepdims=True), float32, scale=1.0)


@windows
def test_avg_pool_backward_is_the_adjoint(ops, rng, w):
    """<dy, A x> = <A* dy, x>."""
    options = {**average_options(w), "count_include_pad": True}
    x = draw(rng, (2, 9, 8, 3), float32)
    y = ops.to_host(ops.avg_pool2d(ops.from_host(x), **options)).astype(np.float64)
    dy = draw(rng, y.shape, float32)
    dx = ops.to_host(ops.avg_pool2d_backward(ops.from_host(dy), x.shape, **options)).astype(np.float64)
    assert abs(np.sum(y * dy) - np.sum(dx * x)) <= 1e-6 * np.sqrt(np.sum(y * y) * np.sum(dy.astype(np.float64) ** 2))


def test_reference_gradients_equal_central_differences(rng):
    shape = (1, 5, 4, 2)
    x = rng.permutation(40).reshape(shape) / 4.0  # distinct by far more than a step
    w = WINDOWS["ceil"]
    y, index = reference.max_pool2d(x, **w)
    dy = rng.standard_normal(y.shape)
    dx = reference.max_pool2d_backward(dy, index, shape, **w)
    assert_gradient(dx, lambda v: reference.max_pool2d(v, **w)[0], x, dy)
    for kind in (
        lambda: reference.avg_windows(shape, **average_options(w), count_include_pad=False),
        lambda: reference.adaptive_windows(shape, (3, 3)),
    ):
        dy = rng.standard_normal(reference.mean_pool2d(x, kind()).shape)
        dx = reference.mean_pool2d_backward(dy, shape, kind())
        assert_gradient(dx, lambda v, kind=kind: reference.mean_pool2d(v, kind()), x, dy)


def normalized(ops, rng, shape, dtype, scale=1.0):
    """x, moments, gamma, beta of a batch norm, of few different values so that windows have several maxima."""
    x = rng.integers(-9, 9, shape).astype(dtype)
    moments = np.stack([rng.standard_normal(shape[-1]), rng.uniform(0.3, 2, shape[-1])])
    gamma, beta = rng.standard_normal((2, shape[-1]))
    return [ops.from_host(x), *(ops.from_host(a.astype(np.float32)) for a in (moments, scale * gamma, beta))]


@windows
@pytest.mark.parametrize("shape", SHAPES)
def test_pooling_a_batch_norm_on_the_way_is_pooling_its_output(ops, rng, dtype, shape, w):
    affine = normalized(ops, rng, shape, dtype)
    found = ops.batch_norm_max_pool2d(*affine, **w)
    z = ops.batch_norm_apply(*affine, relu=True)
    y, index, largest = (ops.to_host(array) for array in found)
    for one, other in zip((y, index), ops.max_pool2d(z, **w), strict=True):
        assert one.tobytes() == ops.to_host(other).tobytes()
    if y.size:
        again = ops.batch_norm_apply(ops.from_host(largest), *affine[1:], relu=True)
        assert ops.to_host(again).tobytes() == y.tobytes()


@windows
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", [True, False])
def test_the_gradient_below_a_pooled_batch_norm_is_that_of_two_passes(ops, rng, dtype, shape, w, batch):
    x, moments, gamma, _ = normalized(ops, rng, shape, dtype)
    _, index = ops.max_pool2d(x, **w)
    dy = ops.from_host(draw(rng, index.shape, dtype))
    sums, count = ops.from_host(rng.standard_normal((2, shape[-1]))), ops.from_host(np.array([97.0]))
    given = (sums, count) if batch else (None, None)
    options = backward_options(w)
    found = ops.batch_norm_max_pool2d_backward(dy, index, x, moments, gamma, *given, **options)
    full = ops.max_pool2d_backward(dy, index, x.shape, **options)
    expected = ops.batch_norm_backward_apply(full, x, moments, gamma, *given)
    assert found.dtype == dtype and ops.to_host(found).tobytes() == ops.to_host(expected).tobytes()


def test_a_nan_under_a_pooled_batch_norm_is_seen(ops, rng):
    affine = normalized(ops, rng, (2, 6, 6, 8), float32)
    host = ops.to_host(affine[0])
    host[1, 2, 3, 5] = np.nan
    y, index, _ = ops.batch_norm_max_pool2d(ops.from_host(host), *affine[1:], **WINDOWS["3x3-overlapping"])
    wrong = np.isnan(ops.to_host(y))
    assert wrong[1, ..., 5].any() and wrong.sum() == wrong[1, ..., 5].sum() and ops.to_host(index).max() < 9
