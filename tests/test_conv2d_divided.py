"""Products of few rows on Hopper, whose depth blocks share: which are divided so, and that parts add up to the whole.

On whole numbers nothing is rounded, so every bit is that of the definition, whatever the order of a sum.
"""

from __future__ import annotations

import pytest

from minidl.cuda.convolution import conv2d_divided
from minidl.cuda.convolution.conv2d_family import Choice, kernel
from minidl.cuda.convolution.conv2d_hopper_tiles import quickest
from minidl.cuda.device import BUILT_IN
from minidl.cuda.launch import dry_run
from minidl.precision import bfloat16, float16, float32
from tests.convolutions import (
    Case,
    both,
    both_expected,
    cases,
    draws,
    equals_definition,
    obeys,
    pitched,
    plan_of,
    put,
    same,
)
from tests.tolerance import draw, draw_integers


def _case(images: int, channels: int, filters: int) -> Case:
    return Case(f"{images}x{channels}-{filters}", (images, 1, 1, channels), (filters, 1, 1))


CASES = [
    _case(64, 4096, 1000), _case(1, 2048, 520), _case(3, 1096, 776), _case(130, 1536, 520), _case(256, 2056, 584),
]  # fmt: skip
SPLITS = [
    ("128x64x4*2", 8), ("128x256x4", 2), ("256x128x4", 4), ("128x192x4", 1), ("128x128x5", 8), ("192x128x4", 2),
    ("64x64x6*2", 2), ("64x64x6*2", 8), ("64x64x6*2", 4),
]  # fmt: skip
STORAGE = pytest.mark.parametrize(
    ("storage", "tf32"), [(bfloat16, 0), (float16, 0), (float32, 1)], ids=["bf16", "fp16", "tf32"]
)


# ------------------------------------------------------------------------------------------------------ without a GPU


def _kernels(case, dtype=bfloat16, device="H200", passes=1, **options):
    from minidl import cuda as ops

    with dry_run(BUILT_IN[device]) as log:
        x, w, dy = (ops.empty(shape, dtype) for shape in (case.x, case.w, case.y))
        ops.conv2d(x, w, **case.options, **options)
        if passes > 1:
            ops.conv2d_backward_data_summed(dy, w, case.x, mask=x, **case.options)
    return [launch.name for launch in log.launches]


def test_few_rows_are_divided():
    divided = ["conv2d_divided_kernel"]
    assert _kernels(_case(64, 25088, 4096)) == _kernels(_case(64, 4096, 1000)) == divided
    assert _kernels(_case(64, 4096, 1000), device="H100") == divided
    assert _kernels(_case(64, 25088, 4096), float32, tf32=1) == divided
    assert _kernels(_case(64, 4096, 1000), bias=None, relu=True) == divided
    shallow, many = _case(64, 64, 4096), _case(4000, 25088, 4096)
    for whole in (shallow, many, Case("map", (64, 2, 1, 4096), (1000, 1, 1))):
        assert divided[0] not in _kernels(whole), whole.name
    assert divided[0] not in _kernels(_case(64, 25088, 4096), device="A100")
    masked = _kernels(_case(64, 1000, 4096), passes=2)
    assert masked == [*divided, *divided, "activate_backward_kernel"], "masked when complete"


def test_filters_are_not_turned_for_few_rows_in_tf32():
    from minidl import cuda as ops

    for case, filters_turned in ((_case(64, 4096, 1000), False), (_case(7, 4096, 1000), True)):
        with dry_run(BUILT_IN["H200"]) as log:
            dy, w = ops.empty(case.y, float32), ops.empty(case.w, float32)
            ops.conv2d_backward_data(dy, w, case.x, **case.options, tf32=1)
        turn, product = log.launches[:2]
        assert turn.name == "conv2d_turn_kernel" and (turn.grid[0] > 1000) == filters_turned
        assert product.name == ("conv2d_divided_kernel" if filters_turned else "conv2d_weight_hopper_kernel")


@cases(CASES)
def test_all_multiprocessors_fetch_where_there_is_enough(case):
    """Nearly half of them at least, by tiles or by shares of their depth."""
    conv = plan_of(case)
    for backward in (False, True):
        tile, parts = conv2d_divided.divided(None, conv, backward, 1) or (quickest(conv, backward, 1)[0], 1)
        depth, columns = (conv.out_channels, conv.channels)[:: -1 if not backward else 1]
        if depth * columns >= 2**21:
            assert parts * -(-columns // tile.columns) * -(-conv.images // tile.rows) >= 64


@cases(CASES)
def test_every_choice_can_be_had_by_name(case):
    conv = plan_of(case)
    for backward in (False, True):
        for one in conv2d_divided._candidates(conv, backward, 1):
            assert conv2d_divided.divided(conv2d_divided._choice(one), conv, backward, 1) == one
        assert conv2d_divided.divided(Choice("hopper", "128x256x4", (1,)), conv, backward, 1) is None
        assert conv2d_divided.divided(Choice("hopper", "128x256x4", (1, 3)), conv, backward, 1) is None


# ------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.parametrize(("tile", "parts"), SPLITS, ids=[f"{tile}/{parts}" for tile, parts in SPLITS])
@cases(CASES)
@STORAGE
def test_laws_of_single_convolutions(hopper, case, storage, tf32, tile, parts, rng, monkeypatch):
    with kernel(Choice("hopper", tile, (1, parts))):
        obeys(hopper, case, storage, rng, both, monkeypatch, tf32, ((8, 16), (4, 4), (3, 2)))


@cases([*CASES, _case(64, 1000, 4096), _case(4, 4096, 36)])
def test_data_gradients_in_tf32_are_those_of_the_definition(hopper, case, rng):
    """As left to themselves, of filters as they lie."""
    hosts = draws(rng, case, float32)
    add = draw_integers(rng, case.x, float32)
    x, w, dy, added = put(hopper, *hosts, add)
    same(both(hopper, case, x, w, dy, tf32=1), both_expected(case, *hosts, float32))
    same(both(hopper, case, x, w, dy, tf32=1, add=added), both_expected(case, *hosts, float32, add=add))
    wide = pitched(hopper, hosts[2], 3, 2)
    same(both(hopper, case, x, w, wide, tf32=1), both_expected(case, *hosts, float32))


@cases(CASES)
@STORAGE
def test_equals_definition_and_repeats(hopper, case, storage, tf32, rng):
    equals_definition(hopper, case, storage, rng, both, tf32, scale=32)


@cases(CASES)
def test_what_is_fused_has_the_bits_of_passes_of_their_own(hopper, case, rng):
    """Masks and statistics, whichever way the product is done."""
    x, w, dy = put(hopper, *(draw(rng, shape, bfloat16) for shape in (case.x, case.w, case.y)))
    y, dx = hopper.conv2d(x, w, **case.options), hopper.conv2d_backward_data(dy, w, case.x, **case.options)
    masked = hopper.conv2d_backward_data_summed(dy, w, case.x, mask=x, **case.options)[0]
    same([hopper.to_host(masked)], [hopper.to_host(hopper.relu_backward(dx, x))])
    same([hopper.to_host(hopper.conv2d_stats(x, w, **case.options)[0])], [hopper.to_host(y)])
