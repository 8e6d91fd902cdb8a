"""A ReLU over a convolution done by its kernel, and one below by its data gradient: the bits of separate passes.

Where the data gradient leaves parts of its sums, for a bias below, they are its sums as it is stored.
"""

from __future__ import annotations

import numpy as np
import pytest

from minidl.precision import bfloat16, float32
from tests.convolutions import CASES as ALL
from tests.convolutions import SIXTEEN, cases, each_tile, pitched, put
from tests.test_conv2d_families import CASES, FEW
from tests.tolerance import assert_close, draw

ADDED = pytest.mark.parametrize("added", [False, True])


def bits(ops, array):
    return ops.to_host(array).tobytes()


def forward(ops, case, x, w, bias, **options):
    """The bits of a convolution with a ReLU over it, which are those of both apart."""
    x, w, bias = (None if array is None else ops.from_host(array) for array in (x, w, bias))
    plain = ops.conv2d(x, w, bias, **case.options, **options)
    found = ops.conv2d(x, w, bias, **case.options, **options, relu=True)
    np.testing.assert_array_equal(
        ops.to_host(found).astype(np.float32), ops.to_host(ops.relu(plain)).astype(np.float32)
    )
    return bits(ops, found)


def backward(ops, case, dy, w, mask, add, **options):
    """The bits of a data gradient masked by the output of a ReLU below, which are those of both apart; and its sums."""
    dy, w, mask, add = (None if array is None else ops.from_host(array) for array in (dy, w, mask, add))
    plain = ops.conv2d_backward_data(dy, w, case.x, add=add, **case.options, **options)
    found = b""
    for expected, below in ((plain, None), (ops.relu_backward(plain, mask), mask)):
        dx, parts = ops.conv2d_backward_data_summed(dy, w, case.x, add=add, mask=below, **case.options, **options)
        assert bits(ops, dx) == bits(ops, expected)
        found += bits(ops, dx)
        if parts is not None:
            rows = ops.to_host(dx).astype(np.float64).reshape(-1, case.x[3])
            assert_sums(ops, parts, rows)
            found += bits(ops, parts)
    return found


def assert_sums(ops, parts, rows):
    """That ``parts`` (R, C) add up to the sums of ``rows``, in parts of which each was added up in float32."""
    sums = ops.from_host(np.full(parts.shape[-1], np.nan, np.float32))
    ops.channel_sum(parts, out=sums)
    scale = np.abs(rows).max(initial=0.0)
    assert_close(ops.to_host(sums), rows.sum(0), float32, terms=len(rows), scale=scale)


def below(rng, case, storage):
    """The output of a ReLU: zeros, the smallest numbers there are, infinite and undefined ones among the others."""
    y = np.maximum(draw(rng, case.x, float32), 0).astype(storage)
    for value in (np.inf, np.nan, np.nextafter(storage.type(0), storage.type(1))):
        y[rng.random(case.x) < 0.02] = value
    return y


@ADDED
@cases(ALL)
def test_on_the_way_is_afterwards(ops, case, dtype, added, rng):
    bias = rng.standard_normal(case.w[0]).astype(np.float32) if added else None
    x, w = draw(rng, case.x, dtype), draw(rng, case.w, dtype)
    x[rng.random(case.x) < 0.001] = np.nan
    forward(ops, case, x, w, bias)
    add = draw(rng, case.x, dtype) if added else None
    backward(ops, case, draw(rng, case.y, dtype), w, below(rng, case, dtype), add)


@SIXTEEN
@ADDED
@cases(CASES)
def test_in_each_family(forced_ops, case, storage, added, rng):
    bias = rng.standard_normal(case.w[0]).astype(np.float32) if added else None
    forward(forced_ops, case, draw(rng, case.x, storage), draw(rng, case.w, storage), bias)
    add = draw(rng, case.x, storage) if added else None
    backward(forced_ops, case, draw(rng, case.y, storage), draw(rng, case.w, storage), below(rng, case, storage), add)


@pytest.mark.parametrize("tf32", [0, 1])
@cases(CASES)
def test_in_float32(cuda_ops, case, tf32, rng):
    bias = rng.standard_normal(case.w[0]).astype(np.float32)
    forward(cuda_ops, case, draw(rng, case.x, float32), draw(rng, case.w, float32), bias, tf32=tf32)
    operands = draw(rng, case.y, float32), draw(rng, case.w, float32), below(rng, case, float32)
    backward(cuda_ops, case, *operands, draw(rng, case.x, float32), tf32=tf32)


@SIXTEEN
@pytest.mark.parametrize("before", [1, 8])
@cases(FEW)
def test_what_is_below_may_lie_at_a_pitch(forced_ops, case, storage, before, rng):
    y = below(rng, case, storage)
    dy, w, mask = put(forced_ops, draw(rng, case.y, storage), draw(rng, case.w, storage), y)
    wide = pitched(forced_ops, y, before, 16)
    found = [forced_ops.conv2d_backward_data_summed(dy, w, case.x, mask=m, **case.options)[0] for m in (mask, wide)]
    assert bits(forced_ops, found[0]) == bits(forced_ops, found[1])


@SIXTEEN
@cases([case for case in CASES if case.stride == (1, 1) and case.name != "one-pixel"])
def test_sums_are_taken_on_the_way(hopper, case, storage, rng):
    """By the kernels for Hopper, masked or not; of one pixel they divide the depth among blocks, and take none."""
    dy, w = put(hopper, draw(rng, case.y, storage), draw(rng, case.w, storage))
    for mask in (None, hopper.from_host(np.ones(case.x, storage))):
        dx, parts = hopper.conv2d_backward_data_summed(dy, w, case.x, mask=mask, **case.options)
        assert parts is not None and parts.shape[1:] == case.x[3:]
        assert_sums(hopper, parts, hopper.to_host(dx).astype(np.float64).reshape(-1, case.x[3]))


@pytest.mark.parametrize("share", [1, 3])
@cases(CASES)
def test_with_every_tile(hopper, case, share, rng, monkeypatch):
    """No matter by which block."""
    x, w, dy, add = (draw(rng, shape, bfloat16) for shape in (case.x, case.w, case.y, case.x))
    bias, mask = rng.standard_normal(case.w[0]).astype(np.float32), below(rng, case, bfloat16)
    for gradient in (False, True):
        found = {}
        for tile in each_tile(monkeypatch, case, gradient, share):
            found.setdefault(tile, []).append(
                backward(hopper, case, dy, w, mask, add if share > 1 else None)
                if gradient
                else forward(hopper, case, x, w, bias)
            )
        for tile, (one, other) in found.items():
            assert one == other, tile


def test_a_mask_of_another_shape_or_type_is_refused_by_name(dry_ops):
    ops = dry_ops
    dy, w = ops.empty((2, 4, 4, 16), float32), ops.empty((16, 3, 3, 8), float32)
    where = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    with pytest.raises(ValueError, match="conv2d_backward_data_summed: mask"):
        ops.conv2d_backward_data_summed(dy, w, (2, 4, 4, 8), mask=ops.empty((2, 4, 4, 16), float32), **where)
    with pytest.raises(TypeError, match="conv2d_backward_data_summed: mask"):
        ops.conv2d_backward_data_summed(dy, w, (2, 4, 4, 8), mask=ops.empty((2, 4, 4, 8), bfloat16), **where)


@pytest.fixture
def dry_ops():
    from minidl import cuda
    from minidl.cuda.launch import dry_run

    with dry_run():
        yield cuda
