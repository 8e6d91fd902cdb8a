"""Depths that do not fill their last stage, which then begins early: every tile, with the bits of stages filled up.

On whole numbers nothing is rounded, so every bit is that of the definition, whatever the order of a sum.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest

from minidl.cuda.convolution import conv2d_hopper, conv2d_walk
from minidl.cuda.convolution.conv2d_family import Choice, kernel
from minidl.cuda.convolution.conv2d_hopper_tiles import PAIRED, SMALL, SWAPPED, TILES
from minidl.cuda.launch import observed
from minidl.precision import bfloat16, float16, float32
from minidl.shapes import ceil_div
from tests import test_conv2d_masked as masked
from tests import test_conv2d_statistics as statistics
from tests.convolutions import (
    Case,
    both,
    both_expected,
    cases,
    draws,
    forget_plans,
    keeps_nonfinite_apart,
    plan_of,
    put,
    same,
    writes_its_output_alone,
)
from tests.tolerance import draw, draw_integers

# Of 16-bit types one, two and three products of the last stage, of float32 likewise.
CASES = [
    Case("1x1", (3, 14, 13, 80), (240, 1, 1)),
    Case("3x3", (2, 9, 7, 112), (352, 3, 3), padding=(1, 1)),
    Case("stride-2", (3, 13, 10, 96), (176, 3, 3), stride=(2, 2), padding=(1, 1)),
    Case("1x1-stride-2", (2, 13, 12, 144), (80, 1, 1), stride=(2, 2)),
    Case("stride-3-dilated", (2, 19, 20, 208), (96, 2, 4), stride=(3, 2), padding=(2, 1), dilation=(2, 3)),
]
SINGLE = [Case("1x1", (3, 14, 13, 40), (56, 1, 1)), Case("3x3", (2, 9, 7, 72), (80, 3, 3), padding=(1, 1))]
EVERY = pytest.mark.parametrize("tile", (*TILES, SMALL, *SWAPPED, PAIRED), ids=lambda tile: tile.name)


@pytest.mark.parametrize("code", [0, 1])
def test_the_last_stage_begins_where_its_products_do(code):
    """With what is there and nothing else; not where a product would be of channels of both."""
    channels, product = (64, 16) if code else (32, 8)
    for depth in range(4, 400, 4):
        conv = plan_of(Case("any", (1, 4, 4, depth), (8, 1, 1)))
        tail, begins = conv2d_walk.tail_of(conv, False, code), (ceil_div(depth, channels) - 1) * channels
        if depth > channels and depth % channels and depth % product == 0:
            assert 0 < tail * product < channels and depth - channels + tail * product == begins
        else:
            assert tail == 0
    grouped = plan_of(Case("groups", (1, 4, 4, 160), (160, 1, 1), groups=2))
    assert conv2d_walk.tail_of(grouped, False, code) == conv2d_walk.tail_of(grouped, True, code) == 0


@pytest.fixture
def tails(hopper):
    """The CUDA table; the family's launches of both directions are seen to have tails."""
    found = []

    def looking(stem, name, defines):
        if stem == "conv2d_hopper":
            found.append(defines["TAIL"])
        return nullcontext()

    with observed(looking):
        yield hopper
    assert found and all(found)


EXACT = *itertools.product(CASES, (bfloat16, float16)), *itertools.product(SINGLE, (float32,))


@EVERY
@pytest.mark.parametrize(("case", "storage"), EXACT, ids=lambda value: value.name)
def test_whole_numbers_give_the_bits_of_the_definition(tails, case, storage, tile, rng):
    hosts = draws(rng, case, storage)
    add, bias = draw_integers(rng, case.x, storage), draw_integers(rng, case.w[0], float32)
    x, w, dy, added, shift = put(tails, *hosts, add, bias)
    with kernel(Choice("hopper", tile.name, (1,))):
        found = both(tails, case, x, w, dy, shift, int(storage == float32), add=added)
    same(found, both_expected(case, *hosts, storage, bias, None, add))


@EVERY
@cases(CASES)
def test_the_bits_are_those_of_stages_filled_with_zeros(hopper, case, tile, rng, monkeypatch):
    placed = put(hopper, *(draw(rng, shape, bfloat16) for shape in (case.x, case.w, case.y)))
    with kernel(Choice("hopper", tile.name, (1,))):
        found = both(hopper, case, *placed)
        monkeypatch.setattr(conv2d_hopper, "tail_of", lambda *_: 0)
        forget_plans()
        same(both(hopper, case, *placed), found)
    forget_plans()


@cases(CASES)
def test_all_of_the_output_and_nothing_else_is_written(tails, case, rng, monkeypatch):
    with kernel(Choice("hopper", TILES[0].name, (1,))):
        writes_its_output_alone(tails, case, bfloat16, rng, both, monkeypatch)


@cases(CASES)
def test_what_is_not_finite_stays_where_it_belongs(tails, case, rng):
    """Channels that two stages have are multiplied once, those before them are not in the place of others."""
    first, last = (0, 0, 0, case.x[3] - 64), (-1, -1, -1, case.y[3] - 1)
    with kernel(Choice("hopper", TILES[-1].name, (1,))):
        keeps_nonfinite_apart(tails, case, bfloat16, rng, both, (first, last))


@cases(CASES[:3])
def test_statistics_and_masks_are_those_of_the_output(tails, case, rng):
    with kernel(Choice("hopper", TILES[5].name, (1,))):
        statistics.check(tails, case, *statistics.operands(rng, case, bfloat16, 3.0))
        masked.check(tails, case, *masked.operands(rng, case, bfloat16, False, False))
