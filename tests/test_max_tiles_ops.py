"""A batch norm under a ReLU that is read whole and pooled in tiles: laws of the operations of both tables."""

from __future__ import annotations

import numpy as np
import pytest

from minidl.precision import float32
from tests.layouts import LAYOUTS, place
from tests.test_pool2d_ops import normalized
from tests.tolerance import draw

KERNELS = [(2, 2), (1, 2), (3, 1), (1, 4), (1, 1)]
SHAPES = [(1, 7, 8, 1), (2, 9, 7, 5), (3, 8, 12, 16), (1, 10, 9, 70), (0, 8, 8, 4), (5, 12, 24, 6), (2, 64, 33, 24)]
cases = pytest.mark.parametrize(
    ("kernel", "shape", "ceil_mode"),
    [(k, s, c) for k in KERNELS for s in SHAPES for c in (False, True) if c or (k != (1, 1) and s != SHAPES[-1])],
)


def window(kernel):
    return {"kernel": kernel, "stride": kernel, "padding": (0, 0), "dilation": (1, 1)}


def apart(ops, norm, kernel, ceil_mode):
    """y, pooled, index of two passes."""
    y = ops.batch_norm_apply(*norm, relu=True)
    return y, *ops.max_pool2d(y, **window(kernel), ceil_mode=ceil_mode)


def gradient_apart(ops, dy, add, index, shape, kernel):
    return ops.max_pool2d_backward(dy, index, shape, **window(kernel), add=add)


def same(ops, *pairs):
    for found, expected in pairs:
        assert found.dtype == expected.dtype and ops.to_host(found).tobytes() == ops.to_host(expected).tobytes()


@cases
def test_pooling_beside_writing_is_that_of_two_passes(ops, rng, dtype, kernel, shape, ceil_mode):
    norm = normalized(ops, rng, shape, dtype)
    y, pooled, _ = apart(ops, norm, kernel, ceil_mode)
    same(ops, *zip(ops.batch_norm_max_tiles(*norm, kernel=kernel, ceil_mode=ceil_mode), (y, pooled), strict=True))
    wide = ops.from_host(np.full((*shape[:-1], shape[-1] + 8), 7, dtype))
    out, again = ops.batch_norm_max_tiles(*norm, kernel=kernel, ceil_mode=ceil_mode, out=wide[..., : shape[-1]])
    same(ops, (ops.contiguous(out), y), (again, pooled))
    assert (ops.to_host(wide)[..., shape[-1] :] == dtype.type(7)).all()


@cases
@pytest.mark.parametrize("added", [True, False])
def test_the_gradient_of_both_readers_is_that_of_separate_passes(ops, rng, dtype, kernel, shape, ceil_mode, added):
    norm = normalized(ops, rng, shape, dtype)
    _, pooled, index = apart(ops, norm, kernel, ceil_mode)
    dy = ops.from_host(draw(rng, pooled.shape, dtype))
    add = ops.from_host(draw(rng, shape, dtype)) if added else None
    whole = gradient_apart(ops, dy, add, index, shape, kernel)
    count, channels = ops.from_host(np.array([97.0])), shape[-1]
    for known in ((ops.from_host(rng.standard_normal((2, channels))), count), (None, None)):
        found = ops.batch_norm_max_tiles_backward_apply(dy, add, *norm, *known, kernel=kernel)
        same(ops, (found, ops.batch_norm_activate_backward_apply(whole, *norm, *known)))
    own, other = ([ops.from_host(np.ones(channels, np.float32)) for _ in range(2)] for _ in range(2))
    grads = [dict(zip(("dgamma", "dbeta"), pair, strict=True)) for pair in (own, other)]
    sums = ops.batch_norm_max_tiles_backward_stats(dy, add, *norm, kernel=kernel, **grads[0], accumulate=True)
    expected = ops.batch_norm_activate_backward_stats(whole, *norm, **grads[1], accumulate=True)
    terms = 1e-6 * np.sqrt(max(1, np.prod(shape[:-1])))  # each of about one, in another order
    x, dx = (
        np.abs(ops.to_host(a).astype(np.float64)).reshape(-1, channels).max(0, initial=1) for a in (norm[0], whole)
    )
    bound = terms * dx * np.stack([np.ones(channels), 2 * x * ops.to_host(norm[1])[1]])
    assert (np.abs(ops.to_host(sums) - ops.to_host(expected)) <= 8 * bound).all()
    for a, b, most in zip(own, other, bound[::-1], strict=True):
        assert (np.abs(ops.to_host(a) - ops.to_host(b)) <= 8 * most + 1e-5).all()


def test_sums_are_those_of_float64(ops, rng, dtype):
    """And each maximum's gradient goes to one pixel: with dy alone all of it is found again where y is positive."""
    norm = normalized(ops, rng, (3, 10, 13, 16), dtype)
    y, pooled, _ = apart(ops, norm, (2, 2), True)
    dy = draw(rng, pooled.shape, dtype)
    sums = ops.batch_norm_max_tiles_backward_stats(ops.from_host(dy), None, *norm, kernel=(2, 2))
    positive = ops.to_host(pooled).astype(np.float64) > 0
    expected = (dy.astype(np.float64) * positive).reshape(-1, 16).sum(0)
    np.testing.assert_allclose(ops.to_host(sums)[0], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("height", [8, 9])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_gives_the_same_bits(ops, rng, dtype, layout, height):
    shape, kernel = (2, height, 10, 12), (2, 2)
    norm = normalized(ops, rng, shape, dtype)
    hosts = ops.to_host(norm[0]), draw(rng, (2, 4, 5, 12), dtype), draw(rng, shape, dtype)
    (x, dy, add), (x_, dy_, add_) = (
        [put(a) for a in hosts] for put in (ops.from_host, lambda a: place(ops, a, layout))
    )
    sums, count = ops.from_host(rng.standard_normal((2, 12))), ops.from_host(np.array([97.0]))
    options = {"kernel": kernel}
    for found, expected in zip(
        (*ops.batch_norm_max_tiles(x_, *norm[1:], **options, ceil_mode=False),
         ops.batch_norm_max_tiles_backward_stats(dy_, add_, x_, *norm[1:], **options),
         ops.batch_norm_max_tiles_backward_apply(dy_, add_, x_, *norm[1:], sums, count, **options)),
        (*ops.batch_norm_max_tiles(x, *norm[1:], **options, ceil_mode=False),
         ops.batch_norm_max_tiles_backward_stats(dy, add, x, *norm[1:], **options),
         ops.batch_norm_max_tiles_backward_apply(dy, add, x, *norm[1:], sums, count, **options)),
        strict=True,
    ):  # fmt: skip
        same(ops, (ops.contiguous(found), expected))


def test_a_nan_is_pooled_and_gets_no_gradient(ops, rng):
    norm = normalized(ops, rng, (2, 6, 6, 8), float32)
    host = ops.to_host(norm[0])
    host[1, 2, 3, 5] = np.nan
    norm[0] = ops.from_host(host)
    y, pooled = (ops.to_host(a) for a in ops.batch_norm_max_tiles(*norm, kernel=(2, 2), ceil_mode=False))
    assert np.isnan(y).sum() == np.isnan(pooled).sum() == 1 and np.isnan(pooled[1, 1, 1, 5])
    dy = ops.from_host(np.ones(pooled.shape, np.float32))
    dx = ops.to_host(ops.batch_norm_max_tiles_backward_apply(dy, None, *norm, None, None, kernel=(2, 2)))
    assert (dx[1, 2:4, 2:4, 5] == 0).all() and np.isfinite(dx).all()
