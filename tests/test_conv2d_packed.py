"""Convolutions that normalise their input in packed 16-bit arithmetic: its definition to the bit, and its bound."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from minidl import cpu
from minidl.cuda.array import empty
from minidl.cuda.convolution import conv2d_hopper, conv2d_hopper_tiles
from minidl.cuda.convolution.conv2d_family import family, forced_family
from minidl.cuda.device import current_device
from minidl.cuda.rows import DTYPE
from minidl.layers import Conv2d
from minidl.precision import bfloat16, float16
from minidl.value import Normalized, Origin, Value
from tests.convolutions import SIXTEEN, cases, forget_plans, plan_of, put
from tests.test_conv2d_families import CASES, FEW
from tests.test_conv2d_normalized import LONG, normalised, operands

UNIT = {bfloat16: 2.0**-8, float16: 2.0**-11}


def affine(norm, storage):
    """s and t, as they are rounded to the storage type."""
    moments, gamma, beta = norm
    s = moments[1] * gamma
    t = (beta - moments[0].astype(np.float64) * s).astype(np.float32)
    return s.astype(storage), t.astype(storage)


def packed(x, norm, storage):
    """relu(x*s + t) with one rounding."""
    s, t = (part.astype(np.float64) for part in affine(norm, storage))
    with np.errstate(invalid="ignore", over="ignore"):
        return (np.maximum(x.astype(np.float64) * s + t, 0) + 0.0).astype(storage)


def run(ops, case, x, w, norm, storage, tile=None, share=1):
    """The output, in an array that was poisoned before; by one tile, or the one that is chosen."""
    conv = plan_of(case)
    y = empty(conv.y_shape, storage)
    y.fill(np.nan)
    (x, w), norm = put(ops, x, w), put(ops, *norm)
    with pytest.MonkeyPatch.context() as patch:
        if tile is not None:
            patch.setattr(conv2d_hopper, "choose", lambda *_: (tile, share))
        forget_plans()
        below = conv2d_hopper.Below(x, *norm)
        conv2d_hopper.forward_fused(conv, DTYPE[storage], x, w, None, y, below=below, packed=True)
    forget_plans()
    return ops.to_host(y)


def plain(ops, case, z, w, name="hopper", tile=None):
    """By one tile, or the one that is chosen."""
    with family(name), pytest.MonkeyPatch.context() as patch:
        if tile is not None:
            patch.setattr(conv2d_hopper, "choose", lambda *_: (tile, 1))
        forget_plans()
        y = ops.to_host(ops.conv2d(*put(ops, z, w), **case.options))
    forget_plans()  # nobody else's are of this tile
    return y


@SIXTEEN
@pytest.mark.parametrize("ratio", [0.0, 3.0])
def test_the_bound(storage, ratio, rng):
    """Before its one rounding within u (|s*x| + |t|) of float64, but for float32's own roundings on the way."""
    x = (rng.standard_normal((4096, 64)) + ratio).astype(storage)
    gamma, beta = rng.standard_normal((2, 64)).astype(np.float32)
    pixels = x.astype(np.float64)
    moments = np.stack([pixels.mean(0), 1 / np.sqrt(pixels.var(0) + 1e-5)]).astype(np.float32)
    exact = np.maximum((pixels - moments[0]) * moments[1].astype(np.float64) * gamma + beta, 0)
    s = moments[1].astype(np.float64) * gamma
    size = np.abs(s * pixels) + np.abs(beta - moments[0] * s)
    error = np.abs(packed(x, (moments, gamma, beta), storage).astype(np.float64) - exact)
    before = (UNIT[storage] + 2.0**-22) * size
    assert (error <= before + UNIT[storage] * (exact + before) + 2.0**-24).all()


@SIXTEEN
@pytest.mark.parametrize("ratio", [0.0, 3.0])
@cases(CASES)
def test_with_every_tile(hopper, case, storage, ratio, rng):
    """The bits of a convolution of the input as defined: padding is zero behind the ReLU, whatever the shift."""
    x, w, norm = operands(rng, case, storage, ratio)
    norm[2][::2] += 100
    z, device = packed(x, norm, storage), current_device()
    conv = plan_of(case)
    for parts in conv2d_hopper_tiles.PARTS:
        tiles = conv2d_hopper_tiles.candidates(conv, False, device, normalized=True, parts=parts)
        expected = plain(hopper, case, z, w, tile=tiles[0]).tobytes() if tiles else None
        for tile, share in itertools.product(tiles, (1, 3)):
            assert run(hopper, case, x, w, norm, storage, tile, share).tobytes() == expected, tile.name


@cases(CASES)
def test_nan_and_infinity_pass_the_relu(hopper, case, rng):
    x, w, norm = operands(rng, case, bfloat16)
    norm[1][...] = np.abs(norm[1]) + 0.5
    x[0, ..., 1], x[-1, ..., 2], w = np.nan, -np.inf, np.abs(w) + 1
    y, expected = run(hopper, case, x, w, norm, bfloat16), plain(hopper, case, packed(x, norm, bfloat16), w)
    np.testing.assert_array_equal(y.astype(np.float32), expected.astype(np.float32))
    assert np.isnan(y[0]).any() and not np.isnan(y[1:]).any()


@cases(LONG)
def test_many_stages_twice(hopper, case, rng):
    x, w, norm = operands(rng, case, bfloat16, 1.0)
    expected = plain(hopper, case, packed(x, norm, bfloat16), w).tobytes()
    for _ in range(2):
        assert run(hopper, case, x, w, norm, bfloat16).tobytes() == expected


@pytest.mark.parametrize("statistics", [False, True])
@cases(FEW)
def test_only_where_it_is_asked_for(forced_ops, case, statistics, rng, monkeypatch):
    """A kernel that has the input normalised in a pass of its own keeps to float32."""
    monkeypatch.setattr(conv2d_hopper, "normalizing_pays", lambda *_: True)
    hosts, name = operands(rng, case, bfloat16, 1.0), forced_family()
    (x, w), norm = put(forced_ops, *hosts[:2]), put(forced_ops, *hosts[2])
    op = (lambda *a, **o: forced_ops.conv2d_stats(*a, **o)[0]) if statistics else forced_ops.conv2d
    z = forced_ops.to_host(forced_ops.batch_norm_apply(x, *norm, relu=True))
    allowed = packed(hosts[0], hosts[2], bfloat16) if name == "hopper" else z
    for how, made in ((False, z), (True, allowed)):
        found = forced_ops.to_host(op(x, w, norm=norm, **case.options, packed=how))
        assert found.tobytes() == plain(forced_ops, case, made, hosts[1], name).tobytes()


def test_a_layer_asks_for_it_where_told(rng, monkeypatch):
    asked, own = [], cpu.conv2d
    monkeypatch.setattr(cpu, "conv2d", lambda *a, packed=False, **o: asked.append(packed) or own(*a, **o))
    raw = rng.standard_normal((2, 3, 3, 8)).astype(np.float32)
    norm = np.ones((2, 8), np.float32), np.ones(8, np.float32), np.zeros(8, np.float32)
    layer = Conv2d(8, 8, 1)
    layer.forward(raw)
    for layer.packed in (False, True):
        layer.forward(Value(None, Origin((Normalized(raw, *norm),), relu=True)))
    assert asked == [False, False, True]


def test_far_from_zero_it_is_no_match(rng):
    """Why it is allowed only while |mean| / deviation stays small: what it loses grows with that."""
    x = (rng.standard_normal((4096, 1)) + 100).astype(bfloat16)
    pixels = x.astype(np.float64)
    moments = np.stack([pixels.mean(0), 1 / pixels.std(0)]).astype(np.float32)
    norm = moments, np.ones(1, np.float32), np.zeros(1, np.float32)
    exact = normalised(x, norm, np.float64)
    lost = [np.abs(f(x, norm, bfloat16).astype(np.float64) - exact).max() for f in (packed, normalised)]
    assert lost[0] > 16 * lost[1]
