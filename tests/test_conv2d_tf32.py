"""Convolution of float32 on Hopper's matrix units: operands are rounded to TF32, products and sums are float32's.

On whole numbers nothing is rounded, so every bit is that of the definition; what is rounded, and how, has laws apart.
"""

from __future__ import annotations

import numpy as np
import pytest

from minidl.cuda.convolution import conv2d_hopper, conv2d_hopper_tiles, conv2d_weight_hopper
from minidl.cuda.convolution.conv2d_family import family
from minidl.cuda.device import BUILT_IN
from minidl.cuda.launch import dry_run
from minidl.precision import float32
from tests import convolutions
from tests.convolutions import (
    Case,
    both,
    cases,
    obeys,
    plan_of,
    put,
    same,
    same_bits_by_every_tile,
    three,
    three_expected,
)
from tests.test_conv2d_families import CASES as SIXTEEN_BIT
from tests.test_conv2d_families import CUT
from tests.tolerance import assert_close, draw, rounded

CASES = [
    *SIXTEEN_BIT,
    Case("fours", (2, 9, 10, 12), (20, 3, 3), padding=(1, 1)),
    Case("fours-1x1", (3, 14, 13, 36), (140, 1, 1)),
    Case("fours-stride-2", (3, 11, 10, 44), (4, 3, 3), stride=(2, 2), padding=(1, 1)),
]
SOME = [case for case in CASES if case.name in ("fours", "channels-over-stages", "stride-3-2-dilated", "1x1", "linear")]


def draws(rng, case):
    return convolutions.draws(rng, case, float32)


def all_expected(case, x, w, dy):
    return three_expected(case, x, w, dy, float32)


# -- without a GPU ----------------------------------------------------------------------------------------------------


def test_it_is_taken_where_rounding_is_allowed():
    from minidl import cuda as ops

    def kernels(device, channels, tf32, side=9):
        case = Case("any", (32, side, side + 1, channels), (32, 3, 3), padding=(1, 1))
        with dry_run(BUILT_IN[device]) as log:
            for shape, call in ((case.x, ops.conv2d), (case.y, ops.conv2d_backward_data)):
                more = () if call is ops.conv2d else (case.x,)
                call(ops.empty(shape, float32), ops.empty(case.w, float32), *more, **case.options, tf32=tf32)
        return {launch.name for launch in log.launches}

    assert kernels("H200", 32, True) == kernels("H100", 20, True) == {"conv2d_hopper_kernel", "conv2d_turn_kernel"}
    assert kernels("H200", 64, True, 224) == {"conv2d_halo_kernel", "conv2d_turn_kernel"}, "windows of wide images"
    assert kernels("H200", 16, False) == kernels("A100", 16, True) == {"conv2d_kernel"}
    assert kernels("H200", 5, True) == {"widen_kernel", "conv2d_hopper_kernel", "conv2d_kernel"}, "8, then 5"
    first = {"conv2d_stem_kernel", "conv2d_stem_pack_kernel"}
    assert kernels("H200", 3, True) == {*first, "conv2d_kernel"}, "images have a kernel of their own"
    assert kernels("H200", 16, True) == kernels("H200", 8, True) == {"conv2d_hopper_kernel", "conv2d_turn_kernel"}
    few = plan_of(Case("any", (32, 9, 10, 4), (32, 5, 5), padding=(2, 2)))
    assert not conv2d_hopper.pays(few, 0, False), "less than a quarter of each stage would be full"
    assert "conv2d_kernel" in kernels("H200", 18, True)
    with family("hopper"), pytest.raises(ValueError, match="family"):
        kernels("H200", 16, False)


@pytest.mark.parametrize(
    ("x", "filters", "which", "tile"),
    [
        ((256, 14, 14, 1024), (256, 1, 1), "forward", "128x256x4"),
        ((256, 28, 28, 512), (256, 1, 1), "forward", "128x256x4"),
        ((256, 14, 14, 256), (1024, 1, 1), "backward_data", "128x256x4"),
        ((256, 7, 7, 512), (512, 3, 3), "forward", "192x128x4"),
        ((256, 7, 7, 2048), (512, 1, 1), "forward", "192x128x4"),
        ((256, 28, 28, 128), (128, 3, 3), "backward_data", "192x128x4"),
        ((256, 56, 56, 64), (64, 3, 3), "backward_weight", "64x64x4*3"),
        ((256, 14, 14, 256), (1024, 1, 1), "backward_weight", "256x128x4"),
    ],
)
def test_tiles_that_were_measured_to_be_fastest_are_taken(x, filters, which, tile):
    """Of layers of ResNet-50 on an H200, most of them a tenth before the next tile that is as large."""
    conv = plan_of(Case("layer", x, filters, padding=(filters[1] // 2,) * 2))
    if which == "backward_weight":
        assert conv2d_weight_hopper.choose(conv, False, 1)[0].name == tile
    else:
        assert conv2d_hopper_tiles.choose(conv, which == "backward_data", BUILT_IN["H200"], 0)[0].name == tile


# -- on a GPU ---------------------------------------------------------------------------------------------------------


@cases(CASES)
def test_laws_of_single_convolutions(hopper, case, rng, monkeypatch):
    obeys(hopper, case, float32, rng, both, monkeypatch, 1, ((4, 8), (3, 2), (1, 1)))


@cases([case for case in SOME if max(case.terms) < 1000])  # the units cut long sums off
def test_operands_are_rounded_to_nearest(hopper, case, rng):
    """Images, by the copy engine, and filters: sums of rounded operands differ by float32's own rounding alone."""
    hosts = [draw(rng, shape, float32) for shape in (case.x, case.w, case.y)]
    hosts = [(host.view(np.uint32) | np.uint32(1)).view(np.float32) for host in hosts]
    found = three(hopper, case, *put(hopper, *hosts), tf32=1)
    near = all_expected(case, *map(rounded, hosts))
    for one, expected, terms in zip(found, near, case.terms, strict=True):
        assert_close(one, expected, terms=terms, scale=CUT)
    exact = all_expected(case, *hosts)
    for one, expected, terms in zip(found, exact, case.terms, strict=True):
        assert_close(one, expected, terms=terms, scale=4, tf32=True)


@cases(CASES)
@pytest.mark.parametrize("share", [1, 3])
def test_every_tile_gives_the_same_bits(hopper, case, rng, monkeypatch, share):
    same_bits_by_every_tile(hopper, case, float32, rng, monkeypatch, share)


@cases(SOME)
def test_nan_and_infinity_reach_what_they_touch_and_nothing_else(hopper, case, rng):
    x, w, dy = draws(rng, case)
    for bad in (np.nan, np.inf):
        hurt, pain = x.copy(), dy.copy()
        hurt[0, 0, 0, 1], pain[-1, -1, -1, 0] = bad, bad
        w_ones = np.ones_like(w)
        found = three(hopper, case, *put(hopper, hurt, w_ones, pain), tf32=1)
        with np.errstate(invalid="ignore"):
            expected = all_expected(case, hurt, w_ones, pain)
        assert_reached(found, expected)


def assert_reached(found, expected):
    """NaN and infinity where they belong. Of the filters' gradient (last) where a tap is outside of an image, zeros may
    be multiplied: what reaches one tap may reach all of the same two channels, and no others.
    """
    (*images, gradient), (*truths, truth) = ([np.isfinite(one) for one in some] for some in (found, expected))
    for one, other in zip(images, truths, strict=True):
        np.testing.assert_array_equal(one, other)
    assert (gradient <= truth).all() and (gradient >= truth.all(axis=(1, 2), keepdims=True)).all()


# -- three products ----------------------------------------------------------------------------------------------------

THREE = [*SOME, *(case for case in CASES if case.name in ("asymmetric", "fours-stride-2", "one-pixel-3x3", "11x11"))]


@cases(THREE)
def test_three_products_of_whole_numbers_are_exact(cuda_ops, case, rng):
    hosts = draws(rng, case)
    same(three(cuda_ops, case, *put(cuda_ops, *hosts), tf32=3), all_expected(case, *hosts))


@cases(THREE)
def test_three_products_come_near_to_float32(cuda_ops, case, rng):
    """What is left out of a product is 2**-22 of it, twice; what the units cut off a stage's sum is less."""
    hosts = [draw(rng, shape, float32) for shape in (case.x, case.w, case.y)]
    placed = put(cuda_ops, *hosts)
    exact, sizes = all_expected(case, *hosts), all_expected(case, *map(np.abs, hosts))
    near, one = (three(cuda_ops, case, *placed, tf32=tf32) for tf32 in (3, 1))
    for found, rough, expected, size in zip(near, one, exact, sizes, strict=True):
        assert (np.abs(found - expected) <= 2.0**-20 * size).all()
        assert np.abs(found - expected).mean() <= np.abs(rough - expected).mean() / 100
    same(three(cuda_ops, case, *placed, tf32=3), near)


@cases(THREE)
def test_three_products_carry_nan_and_infinity(cuda_ops, case, rng):
    """Also a NaN whose bits are all ones, which a carry of rounding turns into a zero."""
    x, w, dy = draws(rng, case)
    for bad in (np.nan, np.inf, np.uint32(0x7FFFFFFF).view(np.float32)):
        hurt, pain = x.copy(), dy.copy()
        hurt[0, 0, 0, 1], pain[-1, -1, -1, 0] = bad, bad
        hosts = hurt, np.ones_like(w), pain
        with np.errstate(invalid="ignore"):
            expected = all_expected(case, *hosts)
        assert_reached(three(cuda_ops, case, *put(cuda_ops, *hosts), tf32=3), expected)


def test_other_numbers_of_products_are_refused():
    from minidl import cuda as ops

    case = Case("plain", (2, 9, 10, 16), (32, 3, 3))
    with dry_run(), pytest.raises(ValueError, match="tf32 must be 0"):
        ops.conv2d(ops.empty(case.x, float32), ops.empty(case.w, float32), **case.options, tf32=2)
