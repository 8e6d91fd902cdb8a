"""Convolutions in groups on Hopper's tiles, forced: of whole tiles, of pairs that share one, and, for their weight
gradients, of groups that are taken together.

On whole numbers nothing is rounded, so every bit is that of the definition, whatever the order of a sum.
"""

from __future__ import annotations

import numpy as np
import pytest

from minidl.cuda.convolution import conv2d_hopper, conv2d_hopper_tiles, conv2d_weight_hopper
from minidl.cuda.convolution.conv2d_family import Choice, family, kernel
from minidl.cuda.convolution.conv2d_plan import convolution
from minidl.cuda.convolution.conv2d_weight_tiles import bundled
from minidl.cuda.device import BUILT_IN, current_device
from minidl.precision import bfloat16, float32
from tests.convolutions import (
    SIXTEEN,
    Case,
    both,
    cases,
    obeys,
    plan_of,
    put,
    same,
    weight_gradient,
)
from tests.reference import conv2d as reference
from tests.tolerance import assert_close, draw, draw_integers

CASES = [
    Case("64", (2, 9, 10, 128), (128, 3, 3), padding=(1, 1), groups=2),
    Case("64-stride-2", (3, 9, 10, 192), (192, 3, 3), stride=(2, 2), padding=(1, 1), groups=3),
    Case("64-1x1", (3, 9, 10, 192), (192, 1, 1), groups=3),
    Case("64-to-128", (2, 5, 7, 128), (256, 3, 3), padding=(1, 1), groups=2),
    Case("192", (1, 9, 8, 384), (384, 3, 3), padding=(1, 1), groups=2),
    Case("32", (2, 9, 10, 128), (128, 3, 3), padding=(1, 1), groups=4),
    Case("32-stride-2", (3, 9, 10, 64), (64, 3, 3), stride=(2, 2), padding=(1, 1), groups=2),
    Case("32-1x1", (3, 9, 10, 128), (128, 1, 1), groups=4),
    Case("32-5x3", (2, 19, 20, 128), (128, 5, 3), stride=(1, 2), padding=(3, 1), dilation=(2, 1), groups=4),
    Case("32-many", (40, 7, 7, 256), (256, 3, 3), padding=(1, 1), groups=8),
]
FORWARD = [
    Case("48-to-128", (2, 9, 10, 96), (256, 5, 5), padding=(2, 2), groups=2),
    Case("16-to-64", (2, 9, 10, 48), (192, 3, 3), padding=(1, 1), groups=3),
    Case("32-to-64", (2, 9, 10, 96), (192, 3, 3), padding=(1, 1), groups=3),
]


def test_groups_that_fill_stages_and_tiles_are_taken():
    device = BUILT_IN["H200"]
    for case in CASES:
        assert all(conv2d_hopper.applies(plan_of(case), 1, back, device) for back in (False, True)), case.name
        assert not conv2d_hopper.applies(plan_of(case), 0, False, device), "products of 16-bit types alone"
        assert not conv2d_hopper.applies(plan_of(case), 1, False, BUILT_IN["A100"])
    for case in FORWARD:
        assert [conv2d_hopper.applies(plan_of(case), 1, back, device) for back in (False, True)] == [True, False]
    for channels, filters, groups in ((80, 80, 1), (96, 96, 1), (72, 64, 1), (64, 32, 1), (32, 32, 3), (8, 64, 2)):
        case = Case("other", (2, 9, 10, channels * groups * 2), (filters * groups * 2, 3, 3), groups=groups * 2)
        fits = conv2d_hopper.applies(plan_of(case), 1, False, device)
        assert fits == (channels == filters == 32), (channels, filters, groups)
    odd = Case("odd", (2, 9, 10, 96), (96, 3, 3), groups=3)
    assert not conv2d_hopper.applies(plan_of(odd), 1, False, device), "32 channels without another 32"


@cases(CASES)
@SIXTEEN
def test_laws_of_single_convolutions(hopper, case, storage, rng, monkeypatch):
    obeys(hopper, case, storage, rng, both, monkeypatch)


@cases(FORWARD)
@SIXTEEN
def test_output_of_groups_of_half_a_stage(hopper, case, storage, rng):
    x, w = draw_integers(rng, case.x, storage), draw_integers(rng, case.w, storage)
    expected = reference.conv2d(x, w, **case.options)
    for tile in conv2d_hopper_tiles.candidates(plan_of(case), False, current_device()):
        with kernel(Choice("hopper", tile.name, (1,))):
            found = hopper.to_host(hopper.conv2d(*put(hopper, x, w), **case.options))
        same([found], [expected.astype(storage)])


@cases(CASES)
def test_every_tile_gives_the_same_bits_and_they_are_near_the_definition(hopper, case, rng):
    x, w, dy = (draw(rng, shape, bfloat16) for shape in (case.x, case.w, case.y))
    placed, conv = put(hopper, x, w, dy), plan_of(case)
    tiles = [conv2d_hopper_tiles.candidates(conv, back, current_device()) for back in (False, True)]
    found = []
    for tile in {*tiles[0], *tiles[1]}:
        with kernel(Choice("hopper", tile.name, (1,))):
            found.append(both(hopper, case, *placed))
    for other in found[1:]:
        same(other, found[0])
    assert_close(found[0][0], reference.conv2d(x, w, **case.options), bfloat16, terms=case.terms[0], scale=4)
    expected = reference.conv2d_backward_data(dy, w, case.x, **case.options)
    assert_close(found[0][1], expected, bfloat16, terms=case.terms[1], scale=4)


@cases(CASES)
def test_statistics_and_masks_are_those_of_passes_of_their_own(hopper, case, rng):
    x, w, dy = put(hopper, *(draw(rng, shape, bfloat16) for shape in (case.x, case.w, case.y)))
    y, stats = hopper.conv2d_stats(x, w, **case.options)
    same([hopper.to_host(y)], [hopper.to_host(hopper.conv2d(x, w, **case.options))])
    stats, apart = (hopper.to_host(one).astype(np.float64) for one in (stats, hopper.batch_norm_stats(y)))
    count, filters = apart[0], case.w[0]
    assert stats[0] == count
    deviation = np.sqrt(apart[1 + filters :] / count)
    assert (abs(stats - apart)[1 : 1 + filters] <= 1e-5 * deviation).all()
    np.testing.assert_allclose(stats[1 + filters :], apart[1 + filters :], rtol=1e-5)
    mask = put(hopper, draw(rng, case.x, bfloat16))[0]
    masked = hopper.conv2d_backward_data_summed(dy, w, case.x, **case.options, mask=mask)[0]
    whole = hopper.to_host(hopper.conv2d_backward_data(dy, w, case.x, **case.options))
    same([hopper.to_host(masked)], [np.where(hopper.to_host(mask) > 0, whole, np.zeros_like(whole))])


@cases(CASES)
def test_float32_is_left_to_others(cuda_ops, case, rng):
    x, w = put(cuda_ops, draw(rng, case.x, float32), draw(rng, case.w, float32))
    with family("hopper"), pytest.raises(ValueError, match="family"):
        cuda_ops.conv2d(x, w, **case.options)


TOGETHER = [
    Case("groups-of-32", (3, 9, 7, 256), (256, 3, 3), stride=(2, 2), padding=(1, 1), groups=8),
    Case("groups-of-8", (2, 6, 5, 64), (64, 3, 2), padding=(1, 1), groups=8),
    Case("groups-of-16-and-24", (3, 5, 6, 96), (144, 1, 1), groups=6),
]


@cases(TOGETHER)
@pytest.mark.parametrize(
    ("storage", "tf32"), [(bfloat16, 0), (float32, 1), (float32, 3)], ids=["bf16", "tf32", "tf32x3"]
)
def test_weight_gradients_of_groups_that_are_taken_together(hopper, case, storage, tf32, rng, monkeypatch):
    """Bit by bit, on whole numbers; what one group has of NaN does not reach another."""
    x, dy = (draw_integers(rng, shape, storage) for shape in (case.x, case.y))
    start = draw_integers(rng, case.w, np.float32)
    expected = start + reference.conv2d_backward_weight(dy, x, case.w, **case.options)
    filters, channels = case.w[0] // case.groups, case.x[-1] // case.groups
    for groups in {case.groups // bundle for bundle in (2, 4, case.groups) if case.groups % bundle == 0}:
        monkeypatch.setattr(
            conv2d_weight_hopper, "bundled", lambda conv, tf32, groups=groups: conv._replace(groups=groups)
        )
        placed = hopper.from_host(dy), hopper.from_host(x)
        np.testing.assert_array_equal(weight_gradient(hopper, case, *placed, start, tf32=tf32), expected)
        bad = x.copy()
        bad[..., channels : 2 * channels] = np.nan
        gradient = weight_gradient(hopper, case, placed[0], hopper.from_host(bad), tf32=tf32)
        assert np.isnan(gradient[filters : 2 * filters]).all()
        assert not np.isnan(gradient[:filters]).any() and not np.isnan(gradient[2 * filters :]).any()


def test_narrow_groups_are_taken_together_where_a_block_has_room():
    def groups(images, size, width, groups, tf32=0):
        w = width, 3, 3, width // groups
        return bundled(convolution("test", (images, size, size, width), w, (1, 1), (1, 1), (1, 1), groups), tf32).groups

    assert groups(128, 14, 1024, 32) == 16 and groups(128, 14, 512, 32) == 8
    assert groups(128, 14, 1024, 32, 1) == 32, "a block of float32 has 32 channels"
    assert groups(128, 14, 1024, 16) == 16 and groups(128, 14, 96, 3) == 3 and groups(128, 14, 64, 1) == 1
