"""Convolutions that normalise their input as they read it: the bits of a pass of its own, and the float64 reference."""

from __future__ import annotations

import numpy as np
import pytest

from minidl.cuda.convolution import conv2d_hopper, conv2d_hopper_tiles, conv2d_weight_hopper
from minidl.cuda.convolution.conv2d_family import Choice, family
from minidl.cuda.device import BUILT_IN
from minidl.cuda.launch import dry_run
from minidl.precision import bfloat16, float32
from tests.convolutions import CASES as ALL
from tests.convolutions import SIXTEEN, Case, cases, each_tile, plan_of, poison, put
from tests.reference import conv2d as reference
from tests.test_conv2d_families import CASES, FEW
from tests.tolerance import STORE, draw, draw_integers


@pytest.fixture(autouse=True)
def on_the_way(monkeypatch):
    """Laws hold also where a pass of its own should be faster."""
    monkeypatch.setattr(conv2d_hopper, "normalizing_pays", lambda *_: True)


def operands(rng, case, storage, ratio=0.0):
    """x whose channels lie so many deviations from zero, its batch norm with gammas of both signs and zero, and w."""
    channels = case.x[3]
    x = draw(rng, case.x, storage, offset=ratio)
    gamma, beta = rng.standard_normal((2, channels)).astype(np.float32)
    gamma[:: max(1, channels // 3)] = 0
    beta += 2  # padding that is normalised too would show
    pixels = x.astype(np.float64).reshape(-1, channels) if x.size else np.zeros((1, channels))
    moments = np.stack([pixels.mean(0), 1 / np.sqrt(pixels.var(0) + 1e-5)]).astype(np.float32)
    return x, draw(rng, case.w, storage, scale=case.terms[0] ** -0.5), (moments, gamma, beta)


def normalised(x, norm, storage):
    """relu((x - mean)*rstd*gamma + beta) in float64, rounded to the storage type."""
    moments, gamma, beta = (part.astype(np.float64) for part in norm)
    y = (x.astype(np.float64) - moments[0]) * moments[1] * gamma + beta
    return np.maximum(y, 0).astype(storage)


def float32_error(x, norm):
    """How far float32 may take the normalised x of a 16-bit type from float64 before it is rounded to that type.

    With s = rstd*gamma(1 + d1), t = (beta - mean*s)(1 + d2) and y = (x*s + t)(1 + d3), each |d| <= 2^-24, y is
    beta + (x - mean)*rstd*gamma(1 + d1) + d2*t, times 1 + d3. Of a channel of one value the first product is nothing
    and t is up to 316 times |mean*gamma|: the term of t alone remains, and may be many units of the 16-bit type.
    """
    moments, gamma, beta = (part.astype(np.float64) for part in norm)
    scale = moments[1] * gamma
    product = (x.astype(np.float64) - moments[0]) * scale
    return 2.0**-24 * (np.abs(beta - moments[0] * scale) + np.abs(product) + np.abs(product + beta)) * (1 + 2.0**-20)


def check(ops, case, x, w, norm):
    """Output and weight gradient, as host arrays, with the batch norm on the way and before."""
    x, w, norm = *put(ops, x, w), put(ops, *norm)
    z = ops.batch_norm_apply(x, *norm, relu=True)
    found, expected = (ops.conv2d(a, w, norm=n, **case.options) for a, n in ((x, norm), (z, None)))
    assert ops.to_host(found).tobytes() == ops.to_host(expected).tobytes()
    sides = [ops.conv2d_stats(a, w, norm=n, **case.options) for a, n in ((x, norm), (z, None))]
    (y, stats), (_, apart) = ([ops.to_host(array) for array in side] for side in sides)
    assert y.tobytes() == ops.to_host(expected).tobytes()
    same_tile = stats.tobytes() == apart.tobytes()
    scale = np.abs(apart).max(initial=1.0)
    assert same_tile or np.abs(stats - apart).max() <= 2.0**-20 * scale
    return y


@cases(ALL)
def test_normalising_on_the_way_is_normalising_before(ops, case, dtype, rng):
    check(ops, case, *operands(rng, case, dtype))


@SIXTEEN
@pytest.mark.parametrize("ratio", [0.0, 1e3])
@cases(CASES)
def test_in_each_family(forced_ops, case, storage, ratio, rng):
    """Also against the definition, far from zero; the padding is of the normalised input."""
    x, w, norm = operands(rng, case, storage, ratio)
    y = check(forced_ops, case, x, w, norm)
    z = normalised(x, norm, storage)
    expected = reference.conv2d(z, w, None, **case.options)
    # Where float32 and float64 round a value to different neighbours the outputs differ by a share of that, and by
    # what float32 had lost before.
    size = np.abs(reference.conv2d(np.abs(z), np.abs(w), None, **case.options)).max(initial=1e-3)
    lost = reference.conv2d(float32_error(x, norm), np.abs(w), None, **case.options)
    unit = 2.0**-8 if storage == bfloat16 else 2.0**-11
    assert (np.abs(y.astype(np.float64) - expected) <= 2 * unit * size + lost).all()


@SIXTEEN
@pytest.mark.parametrize("ratio", [0.0, 30.0, 1e3])
@pytest.mark.parametrize("rows", [1, 2, 700])
def test_what_float32_loses(ops, storage, ratio, rows, rng):
    """A batch norm in a pass of its own; of one row it is constant. CPUs round x - mean and the product, too."""
    x, _, norm = operands(rng, Case("rows", (rows, 1, 1, 64), (8, 1, 1)), storage, ratio)
    exact, lost = normalised(x, norm, np.float64), 3 * float32_error(x, norm)
    y = ops.to_host(ops.batch_norm_apply(*put(ops, x), *put(ops, *norm), relu=True)).astype(np.float64)
    assert (np.abs(y - exact) <= lost + STORE[storage] * (exact + lost) + 2.0**-25).all()


@pytest.mark.parametrize("share", [1, 3])
@cases(CASES)
def test_with_every_tile(hopper, case, share, rng, monkeypatch):
    """Every tile gives the same bits, in outputs that were poisoned before, whichever block computes what."""
    x, w, norm = operands(rng, case, bfloat16, 3.0)
    args, found = (*put(hopper, x, w), put(hopper, *norm)), set()
    poison(monkeypatch)
    for _ in each_tile(monkeypatch, case, False, share, normalized=True):
        y = hopper.conv2d(args[0], args[1], norm=args[2], **case.options)
        found.add(hopper.to_host(y).tobytes())
    assert len(found) == 1
    z = hopper.batch_norm_apply(args[0], *args[2], relu=True)
    assert hopper.to_host(hopper.conv2d(z, args[1], **case.options)).tobytes() in found


@cases(FEW)
def test_nan_and_infinity_pass_the_relu(forced_ops, case, rng):
    """A NaN anywhere under a filter is seen in the output; minus infinity is cut off."""
    x, w, norm = operands(rng, case, bfloat16)
    norm[1][...] = np.abs(norm[1]) + 0.5
    x[0, ..., 1], x[-1, ..., 2] = np.nan, -np.inf
    y = check(forced_ops, case, x, np.abs(w) + 1, norm)
    assert np.isnan(y).any() and not np.isnan(y[1:]).any()


def whole(rng, case, storage):
    """x, its batch norm and dy in whole numbers, whose products' sums are exact in any order."""
    channels = case.x[3]
    x, dy = (draw_integers(rng, shape, storage, limit=2) for shape in (case.x, case.y))
    moments = np.stack([rng.integers(-1, 2, channels), np.ones(channels)]).astype(np.float32)
    gamma, beta = rng.integers(-1, 2, (2, channels)).astype(np.float32)
    return x, (moments, gamma, beta + 1), dy


def check_weight(ops, case, x, norm, dy, accumulate):
    """The weight gradient, to the bit; what lies before it is overwritten or added to."""
    z = normalised(x, norm, np.float64)
    expected = reference.conv2d_backward_weight(dy, z, case.w, **case.options) + 3.0 * accumulate
    start = np.full(case.w, 3.0 if accumulate else np.nan, np.float32)
    x, dy, norm, out = *put(ops, x, dy), put(ops, *norm), ops.from_host(start)
    ops.conv2d_backward_weight(dy, x, norm=norm, out=out, accumulate=accumulate, **case.options)
    np.testing.assert_array_equal(ops.to_host(out), expected.astype(np.float32))


@SIXTEEN
@pytest.mark.parametrize("accumulate", [False, True])
@cases(CASES)
def test_weight_gradients_see_the_normalised_input(forced_ops, case, storage, accumulate, rng):
    check_weight(forced_ops, case, *whole(rng, case, storage), accumulate)


@cases(ALL)
def test_weight_gradients_of_any_shape_and_type(ops, case, dtype, rng):
    check_weight(ops, case, *whole(rng, case, dtype), True)


@pytest.mark.parametrize("division", [(1, 1), (3, 1), (2, 2), (5, 1, 3)], ids=str)
@cases(CASES)
def test_weight_gradients_with_every_tile(hopper, case, division, rng, monkeypatch):
    hosts = whole(rng, case, bfloat16)
    conv = plan_of(case)
    for tile in (*conv2d_weight_hopper.TILES, conv2d_weight_hopper.HALO):
        choice = Choice("hopper", tile.name, division)
        forced = conv2d_weight_hopper.taken(choice, conv, True)
        if forced is not None:
            monkeypatch.setattr(conv2d_weight_hopper, "taken", lambda *_, forced=forced: forced)
            monkeypatch.setattr(conv2d_weight_hopper, "normalizes", lambda _: True)
            check_weight(hopper, case, *hosts, division[1] > 1)
            monkeypatch.undo()


def infinite(rng, case):
    """x, its batch norm, of which one channel's shift is no number and another's infinite, and dy of ones."""
    x, norm, dy = whole(rng, case, bfloat16)
    norm[2][3], norm[2][5] = np.nan, np.inf
    return x, norm, np.ones_like(dy)


def test_what_is_outside_stays_zero_whatever_the_shift(forced_ops, rng):
    """Outputs that see padding alone are zeros."""
    case = Case("far-padding", (3, 1, 1, 64), (64, 3, 3), padding=(3, 3))
    x, norm, _ = infinite(rng, case)
    x, w, norm = *put(forced_ops, x, np.ones(case.w, bfloat16)), put(forced_ops, *norm)
    y = forced_ops.to_host(forced_ops.conv2d(x, w, norm=norm, **case.options)).astype(np.float32)
    assert np.isnan(y[:, 1:4, 1:4]).all()
    y[:, 1:4, 1:4] = 0
    assert not y.any()


def test_taps_outside_and_pixels_behind_the_last_give_nothing_whatever_the_shift(hopper, rng, monkeypatch):
    """All taps but one see padding alone, and the pixels do not fill the last stage. (Not for the kernel with a halo,
    which multiplies all of x by zeros around dy.)"""
    case = Case("one-pixel", (70, 1, 1, 64), (64, 3, 3), padding=(1, 1))
    x, norm, dy = infinite(rng, case)
    x, dy, norm = *put(hopper, x, dy), put(hopper, *norm)
    conv = plan_of(case)
    for tile in conv2d_weight_hopper.TILES:
        forced = conv2d_weight_hopper.taken(Choice("hopper", tile.name, (1, 1)), conv, True)
        if forced is None:
            continue
        monkeypatch.setattr(conv2d_weight_hopper, "taken", lambda *_, forced=forced: forced)
        monkeypatch.setattr(conv2d_weight_hopper, "normalizes", lambda _: True)
        out = hopper.from_host(np.full(case.w, 7, np.float32))
        with family("hopper"):
            hopper.conv2d_backward_weight(dy, x, norm=norm, out=out, **case.options)
        found = hopper.to_host(out)
        assert np.isnan(found[:, 1, 1, 3]).all(), tile.name
        assert (found[:, 1, 1, 5] == np.inf).all(), tile.name
        found[:, 1, 1, 3] = found[:, 1, 1, 5] = 0
        assert np.isfinite(found).all(), tile.name
        found[:, 1, 1] = 0
        assert not found.any(), tile.name
        monkeypatch.undo()


LONG = [
    Case("long-1x1", (32, 56, 56, 64), (256, 1, 1)),
    Case("long-1x1-deep", (32, 28, 28, 512), (128, 1, 1)),
    Case("long-3x3", (32, 28, 28, 128), (128, 3, 3), padding=(1, 1)),
    Case("long-3x3-stride-2", (32, 28, 28, 64), (192, 3, 3), stride=(2, 2), padding=(1, 1)),
]


@pytest.mark.parametrize("on_the_way", [True, False])
@cases(LONG)
def test_long_sums_in_whole_numbers(cuda_ops, case, on_the_way, rng, monkeypatch):
    """Many stages for each block, whose copies need not come in order; twice, to the bit."""
    monkeypatch.setattr(conv2d_weight_hopper, "normalizes", lambda _: on_the_way)
    x, norm, dy = whole(rng, case, bfloat16)
    w = draw_integers(rng, case.w, bfloat16, limit=1)
    x, w, dy, norm = *put(cuda_ops, x, w, dy), put(cuda_ops, *norm)
    z = cuda_ops.batch_norm_apply(x, *norm, relu=True)
    with family("generic"):
        y = cuda_ops.to_host(cuda_ops.conv2d(z, w, **case.options))
        expected = cuda_ops.from_host(np.zeros(case.w, np.float32))
        cuda_ops.conv2d_backward_weight(dy, z, out=expected, **case.options)
    for _ in range(2):
        found = cuda_ops.from_host(np.full(case.w, np.nan, np.float32))
        cuda_ops.conv2d_backward_weight(dy, x, norm=norm, out=found, **case.options)
        np.testing.assert_array_equal(cuda_ops.to_host(found), cuda_ops.to_host(expected))
        assert cuda_ops.to_host(cuda_ops.conv2d(x, w, norm=norm, **case.options)).tobytes() == y.tobytes()


@pytest.mark.parametrize(
    ("shape", "filters", "kernel", "pays"), [((256, 56, 56, 64), 256, 1, True), ((4, 14, 14, 1024), 4096, 3, False)]
)
def test_the_weight_gradient_of_few_pixels_that_many_filters_read_is_preceded_by_a_pass(shape, filters, kernel, pays):
    from minidl import cuda as ops

    options = {"stride": (1, 1), "padding": (kernel // 2,) * 2, "dilation": (1, 1), "groups": 1}
    channels = shape[-1]
    with dry_run(BUILT_IN["H200"]) as log:
        x, dy = ops.empty(shape, bfloat16), ops.empty((*shape[:3], filters), bfloat16)
        norm = ops.empty((2, channels), float32), ops.empty(channels, float32), ops.empty(channels, float32)
        dw = ops.empty((filters, kernel, kernel, channels), float32)
        ops.conv2d_backward_weight(dy, x, norm=norm, out=dw, **options)
    names = [launch.name for launch in log.launches]
    assert ("batch_norm_apply_kernel" in names) != pays


@pytest.mark.parametrize(
    ("images", "side", "kernel", "pays"), [(256, 56, 3, True), (256, 56, 1, True), (256, 7, 3, False), (4, 7, 3, False)]
)
def test_the_input_of_a_few_small_images_is_normalised_before(images, side, kernel, pays, monkeypatch):
    from minidl import cuda as ops

    monkeypatch.setattr(conv2d_hopper, "normalizing_pays", conv2d_hopper_tiles.normalizing_pays)
    options = {"stride": (1, 1), "padding": (kernel // 2,) * 2, "dilation": (1, 1), "groups": 1}
    channels = 64 * 56 // side
    with dry_run(BUILT_IN["H200"]) as log:
        x, w = (
            ops.empty((images, side, side, channels), bfloat16),
            ops.empty((channels, kernel, kernel, channels), bfloat16),
        )
        norm = ops.empty((2, channels), float32), ops.empty(channels, float32), ops.empty(channels, float32)
        ops.conv2d(x, w, norm=norm, **options)
    names = [launch.name for launch in log.launches]
    assert ("batch_norm_apply_kernel" in names) != pays


@pytest.mark.parametrize("device", ["A100", "H200"])
def test_only_where_the_kernel_cannot_is_the_input_normalised_before(device):
    from minidl import cuda as ops

    options = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    with dry_run(BUILT_IN[device]) as log:
        x, w = ops.empty((2, 14, 14, 64), bfloat16), ops.empty((72, 3, 3, 64), bfloat16)
        norm = ops.empty((2, 64), float32), ops.empty(64, float32), ops.empty(64, float32)
        ops.conv2d(x, w, norm=norm, **options)
    names = [launch.name for launch in log.launches]
    assert ("batch_norm_apply_kernel" in names) == (device == "A100")
