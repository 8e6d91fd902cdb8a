"""Data gradients that are masked for the ReLU below, and summed for the batch norm below that: the bits of the separate
passes where there are no sums, and their sums to a few units."""

from __future__ import annotations

import numpy as np
import pytest

from minidl.precision import bfloat16, float32
from tests.convolutions import CASES as ALL
from tests.convolutions import SIXTEEN, Case, cases, each_tile, pitched, poison, put
from tests.test_batch_norm_ops import signs_of
from tests.test_conv2d_families import CASES, FEW
from tests.tolerance import assert_close, draw

KINDS = pytest.mark.parametrize(("joined", "added"), [(False, False), (False, True), (True, False), (True, True)])


def operands(rng, case, storage, joined, added):
    """dy, w, add and what is below, as host arrays."""
    channels = case.x[3]
    x = draw(rng, case.x, storage, offset=0.3)
    moments = np.stack([rng.standard_normal(channels), rng.uniform(0.5, 2, channels)]).astype(np.float32)
    gamma, beta = rng.standard_normal((2, channels)).astype(np.float32)
    y = np.maximum(draw(rng, case.x, float32), 0).astype(storage) if joined else None
    add = draw(rng, case.x, storage) if added else None
    return draw(rng, case.y, storage), draw(rng, case.w, storage), add, x, moments, gamma, beta, y


def check(ops, case, *hosts):
    """The masked gradient and its sums, against those of separate passes; None where no kernel does it on the way.

    The signs of the ReLU's output serve as well as the output, to the bit.
    """
    dy, w, add, x, moments, gamma, beta, y = (None if h is None else ops.from_host(h) for h in hosts)
    plain = ops.conv2d_backward_data(dy, w, x.shape, add=add, **case.options)
    found, parts = ops.conv2d_backward_data_masked(dy, w, x, moments, gamma, beta, y=y, add=add, **case.options)
    if ops.name == "cuda" and hosts[-1] is not None:
        signs = ops.from_host(signs_of(hosts[-1]))
        again = ops.conv2d_backward_data_masked(
            dy, w, x, moments, gamma, beta, y=y, signs=signs, add=add, **case.options
        )
        assert (parts is None) == (again[1] is None)
        for one, other in zip((found, parts), again, strict=True):
            assert one is None or ops.to_host(one).tobytes() == ops.to_host(other).tobytes()
    if parts is None:
        assert ops.to_host(found).tobytes() == ops.to_host(plain).tobytes()
        return None
    output = ops.batch_norm_apply(x, moments, gamma, beta, relu=True) if y is None else y
    expected = ops.relu_backward(plain, output)
    assert ops.to_host(found).tobytes() == ops.to_host(expected).tobytes()
    gradients = put(ops, *(np.full(case.x[3], np.nan, np.float32) for _ in range(2)))
    sums = ops.to_host(ops.batch_norm_backward_sums(parts, moments, dgamma=gradients[0], dbeta=gradients[1]))
    g = ops.to_host(expected).astype(np.float64).reshape(-1, case.x[3])
    centred = (hosts[3].astype(np.float64).reshape(g.shape) - hosts[4][0]) * hosts[4][1]
    for row, gradient, terms in zip(sums, reversed(gradients), (g, g * centred), strict=True):
        scale = np.abs(terms).max(initial=0.0)
        assert_close(row, terms.sum(0), float32, terms=len(g), scale=scale)
        assert_close(ops.to_host(gradient), row, float32, scale=scale)
    return ops.to_host(found).tobytes(), sums.tobytes()


def check_pair(ops, case, hosts, other):
    """Sums for two batch norms, beside what `check` finds for the first; ``other``: input and moments of the second."""
    dy, w, add, x, moments, gamma, beta, y = (None if h is None else ops.from_host(h) for h in hosts)
    norm, options = (moments, gamma, beta), {"y": y, "add": add, **case.options}
    if ops.name == "cuda":
        options["signs"] = ops.from_host(signs_of(hosts[-1]))
    alone, first = ops.conv2d_backward_data_masked(dy, w, x, *norm, **options)
    held = put(ops, *other)
    found, parts = ops.conv2d_backward_data_masked(dy, w, x, *norm, **options, other=held)
    assert ops.to_host(found).tobytes() == ops.to_host(alone).tobytes()
    assert ops.to_host(parts[0]).tobytes() == ops.to_host(first).tobytes()
    sums = ops.to_host(ops.batch_norm_backward_sums(parts[1], held[1]))
    g = ops.to_host(found).astype(np.float64).reshape(-1, case.x[3])
    centred = (other[0].astype(np.float64).reshape(g.shape) - other[1][0]) * other[1][1]
    for row, terms in zip(sums, (g, g * centred), strict=True):
        assert_close(row, terms.sum(0), float32, terms=len(g), scale=np.abs(terms).max(initial=0.0))


def other_norm(rng, case, storage):
    """Input and moments of a second batch norm below."""
    moments = np.stack([rng.standard_normal(case.x[3]), rng.uniform(0.5, 2, case.x[3])]).astype(np.float32)
    return draw(rng, case.x, storage, offset=-0.4), moments


PAIRS = [
    Case("1x1", (2, 9, 11, 64), (128, 1, 1)),
    Case("1x1-few-channels", (3, 7, 5, 24), (40, 1, 1)),
    Case("1x1-several-columns", (2, 12, 13, 264), (72, 1, 1)),
]


@SIXTEEN
@pytest.mark.parametrize("added", [False, True], ids=["alone", "added"])
@cases(PAIRS)
def test_sums_for_two_batch_norms(ops, case, storage, added, rng):
    if ops.name == "cuda":
        w = ops.empty(case.w, storage)
        if not ops.conv2d_takes_pair(case.x, w, **case.options):
            pytest.skip("needs compute capability 9.0")
        large = Case("3x3", (2, 9, 11, 64), (64, 3, 3), padding=(1, 1))
        assert not ops.conv2d_takes_pair(large.x, ops.empty(large.w, storage), **large.options)
    hosts = operands(rng, case, storage, True, added)
    check_pair(ops, case, hosts, other_norm(rng, case, storage))


@KINDS
@cases(ALL)
def test_masking_on_the_way_is_masking_afterwards(ops, case, dtype, joined, added, rng):
    check(ops, case, *operands(rng, case, dtype, joined, added))


def check_transposed(ops, case, storage, rng):
    """Of a transposed convolution, whose gradient is a forward pass: ``y`` of the case is its input."""
    dy, w, x = (draw(rng, shape, storage, offset=o) for shape, o in ((case.x, 0), (case.w, 0), (case.y, 0.3)))
    moments = np.stack([rng.standard_normal(case.y[3]), rng.uniform(0.5, 2, case.y[3])]).astype(np.float32)
    gamma, beta = rng.standard_normal((2, case.y[3])).astype(np.float32)
    dy_, w_, x_, *norm = put(ops, dy, w, x, moments, gamma, beta)
    plain = ops.conv2d(dy_, w_, **case.options)
    found, parts = ops.conv2d_backward_data_masked(dy_, w_, x_, *norm, **case.options, transposed=True)
    if parts is None:
        assert ops.to_host(found).tobytes() == ops.to_host(plain).tobytes()
        return
    expected = ops.relu_backward(plain, ops.batch_norm_apply(x_, *norm, relu=True))
    assert ops.to_host(found).tobytes() == ops.to_host(expected).tobytes()
    sums = ops.to_host(ops.batch_norm_backward_sums(parts, norm[0]))
    g = ops.to_host(expected).astype(np.float64).reshape(-1, case.y[3])
    centred = (x.astype(np.float64).reshape(g.shape) - moments[0]) * moments[1]
    for row, terms in zip(sums, (g, g * centred), strict=True):
        assert_close(row, terms.sum(0), float32, terms=len(g), scale=np.abs(terms).max(initial=0.0))


@cases(ALL)
def test_of_a_transposed_convolution(ops, case, dtype, rng):
    check_transposed(ops, case, dtype, rng)


@SIXTEEN
@cases(CASES)
def test_of_a_transposed_convolution_in_each_family(forced_ops, case, storage, rng):
    check_transposed(forced_ops, case, storage, rng)


@SIXTEEN
@KINDS
@cases(CASES)
def test_in_each_family(forced_ops, case, storage, joined, added, rng):
    check(forced_ops, case, *operands(rng, case, storage, joined, added))


@SIXTEEN
@pytest.mark.parametrize("before", [1, 8])
@cases(FEW)
def test_what_is_below_may_lie_at_a_pitch(forced_ops, case, storage, before, rng):
    """As a part of a dense block's buffer does, aligned for the copy engine or not."""
    dy, w, add, x, moments, gamma, beta, y = operands(rng, case, storage, True, True)
    rest = put(forced_ops, moments, gamma, beta)
    dy_, w_, add_, x_, y_ = put(forced_ops, dy, w, add, x, y)
    wide = [pitched(forced_ops, array, before, 16) for array in (x, y)]
    dense = forced_ops.conv2d_backward_data_masked(dy_, w_, x_, *rest, y=y_, add=add_, **case.options)
    found = forced_ops.conv2d_backward_data_masked(dy_, w_, wide[0], *rest, y=wide[1], add=add_, **case.options)
    assert (dense[1] is None) == (found[1] is None)
    for one, other in zip(dense, found, strict=True):
        if one is not None:
            assert forced_ops.to_host(one).tobytes() == forced_ops.to_host(other).tobytes()


@pytest.mark.parametrize(("joined", "added", "share"), [(False, False, 1), (True, True, 3)])
@cases(CASES)
def test_with_every_tile(hopper, case, joined, added, share, rng, monkeypatch):
    """Each part that is read has been written, and no matter by which block."""
    hosts = operands(rng, case, bfloat16, joined, added)
    poison(monkeypatch, "conv2d_hopper")
    found = {}
    for tile in each_tile(monkeypatch, case, True, share):
        found.setdefault(tile, []).append(check(hopper, case, *hosts))
    for tile, (one, other) in found.items():
        assert one == other, tile


@cases(FEW)
def test_a_nan_in_the_gradient_is_seen(forced_ops, case, rng):
    """Where the ReLU was positive: behind its zeros nothing counts."""
    dy, w, add, x, moments, gamma, beta, y = operands(rng, case, bfloat16, True, True)
    y[...], add[..., 1] = 1, np.nan
    y[..., 2], add[..., 2] = 0, np.nan
    args = [None if h is None else forced_ops.from_host(h) for h in (dy, w, x, moments, gamma, beta)]
    y, signs, add = put(forced_ops, y, signs_of(y), add)
    for given in ({"y": y}, {"y": y, "signs": signs}):
        found, parts = forced_ops.conv2d_backward_data_masked(*args, **given, add=add, **case.options)
        if parts is not None:
            sums = forced_ops.to_host(forced_ops.batch_norm_backward_sums(parts, args[3]))
            found = forced_ops.to_host(found).astype(np.float32)
            assert np.isnan(sums[:, 1]).all() and np.isnan(sums).sum() == 2
            assert np.isnan(found[..., 1]).all() and not found[..., 2].any()
