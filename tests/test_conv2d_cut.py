"""Tiles whose depth the blocks of a cluster share: every law of whole tiles, and which convolutions they are for.

On whole numbers nothing is rounded, so every bit is that of the definition, whatever the order of a sum; on others all
tiles of as many parts give the same bits, which are not those of whole tiles.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from minidl.cuda.convolution import conv2d_hopper, conv2d_hopper_tiles
from minidl.cuda.convolution.conv2d_family import Choice, kernel
from minidl.cuda.device import BUILT_IN
from minidl.cuda.launch import dry_run, observed
from minidl.precision import bfloat16, float16, float32
from tests import test_conv2d_masked as masked
from tests import test_conv2d_normalized as normalized
from tests import test_conv2d_statistics as statistics
from tests.convolutions import (
    bits_of_dense_arrays,
    both,
    both_expected,
    draws,
    keeps_nonfinite_apart,
    plan_of,
    same,
    writes_its_output_alone,
)
from tests.reference import conv2d as reference
from tests.test_conv2d_ops import Case, cases, put
from tests.tolerance import assert_close, draw, draw_integers

CASES = [
    Case("1x1", (3, 9, 7, 264), (328, 1, 1)),
    Case("3x3", (2, 9, 7, 264), (328, 3, 3), padding=(1, 1)),
    Case("few-pixels", (1, 2, 3, 256), (264, 3, 3), padding=(1, 1)),
    Case("stride-2", (3, 13, 10, 392), (256, 3, 3), stride=(2, 2), padding=(1, 1)),
    Case("1x1-stride-2", (2, 13, 12, 264), (520, 1, 1), stride=(2, 2)),
    Case("stride-3-dilated", (2, 19, 20, 256), (264, 2, 4), stride=(3, 2), padding=(2, 1), dilation=(2, 3)),
]
NAMES = {
    "128x128x5/2", "128x128x3*2/2", "128x256x4/2", "256x128x4/2", "192x128x4/2", "128x192x4/3", "128x256x4/4",
}  # fmt: skip
PARTS = pytest.mark.parametrize("parts", [parts for parts in conv2d_hopper_tiles.PARTS if parts > 1])
TILE = pytest.mark.parametrize("name", sorted(NAMES))
STORAGE = pytest.mark.parametrize(
    ("storage", "tf32"), [(bfloat16, 0), (float16, 0), (float32, 1)], ids=["bf16", "fp16", "tf32"]
)


def _choice(name: str) -> Choice:
    return Choice("hopper", name, (1,))


def _names(parts: int, conv, backward: bool = False, normalized: bool = False) -> list[str]:
    tiles = conv2d_hopper_tiles.candidates(conv, backward, BUILT_IN["H200"], normalized, parts)
    return [tile.name for tile in tiles]


# ------------------------------------------------------------------------------------------------------ without a GPU


def test_tiles_are_cut_where_their_columns_are_slabs_and_their_channels_stages():
    conv = plan_of(Case("deep", (2, 8, 8, 256), (200, 1, 1)))
    assert {name for parts in (2, 3, 4) for name in _names(parts, conv)} == NAMES
    shallow = plan_of(Case("shallow", (2, 8, 8, 192), (264, 1, 1)))
    assert not _names(4, shallow) and _names(3, shallow) and _names(4, shallow, backward=True)
    groups = plan_of(Case("groups", (2, 8, 8, 512), (512, 3, 3), padding=(1, 1), groups=2))
    assert not any(_names(parts, groups) for parts in (2, 3, 4))


@PARTS
@cases(CASES)
def test_clusters_are_whole_and_blocks_have_one_tile(parts, case):
    conv, device = plan_of(case), BUILT_IN["H200"]
    for backward in (False, True):
        for tile in conv2d_hopper_tiles.candidates(conv, backward, device, parts=parts):
            pitches = (conv.out_channels, 0) if backward else (conv.channels, 0)
            whole = conv2d_hopper.plan(conv, 1, backward, pitches, False, device, (tile._replace(parts=1), 1))
            for one, other in zip(
                conv2d_hopper.plan(conv, 1, backward, pitches, False, device, (tile, 3)), whole, strict=True
            ):
                assert one.grid == int(one.problem["tiles"][0]) == parts * int(other.problem["tiles"][0])
                assert not one.several and one.patches == other.patches and one.defines["CUT"] == parts


@pytest.mark.parametrize("name", ["H100", "H200"])
@pytest.mark.parametrize(
    ("size", "channels", "filters", "kernel"), [(7, 2048, 512, 1), (7, 512, 512, 3), (28, 128, 512, 1)]
)
def test_whatever_is_fused_is_cut_alike_and_on_every_device(name, size, channels, filters, kernel):
    conv = plan_of(Case("layer", (32, size, size, channels), (filters, kernel, kernel), padding=(kernel // 2,) * 2))
    for backward, code in ((False, 1), (True, 1), (False, 0), (True, 0)):
        parts = conv2d_hopper_tiles.parts_of(conv, backward, code)
        for how in ((0, False), (0, True), *(() if backward or not code else ((1, True), (2, False)))):
            assert conv2d_hopper_tiles.choose(conv, backward, BUILT_IN[name], code, *how)[0].parts == parts


def test_a_tile_by_name_keeps_its_parts_where_something_is_fused():
    """One with two blocks on a multiprocessor has no registers to normalise with: another takes its place."""
    conv, device = plan_of(CASES[0]), BUILT_IN["H200"]
    for parts in (1, 2, 3, 4):
        for name in _names(parts, conv):
            assert conv2d_hopper_tiles.taken(_choice(name), conv, False, device, 1)[0].name == name
            tile, _ = conv2d_hopper_tiles.taken(_choice(name), conv, False, device, 1, 1)
            assert tile.parts == parts and tile.name in _names(parts, conv, normalized=True)
    assert conv2d_hopper_tiles.taken(_choice("128x128x5/7"), conv, False, device, 1) is None


def test_few_tiles_of_great_depth_are_cut():
    """As of ResNet-50's last stage at 32 images; not those that fill the device whole."""
    from minidl import cuda as ops

    def cut(images, size, channels, filters, kernel=1):
        case = Case("layer", (images, size, size, channels), (filters, kernel, kernel), padding=(kernel // 2,) * 2)
        with dry_run(BUILT_IN["H200"]) as log:
            ops.conv2d(ops.empty(case.x, bfloat16), ops.empty(case.w, bfloat16), **case.options)
        return dict(log.launches[0].defines).get("CUT", 1) > 1

    assert cut(32, 7, 2048, 512) and cut(32, 7, 512, 512, 3)
    assert not cut(256, 56, 64, 256) and not cut(256, 14, 256, 256, 3)


# ------------------------------------------------------------------------------------------------------- on a GPU


@pytest.fixture
def only(request):
    """Every launch of conv2d_hopper.cu inside is cut into so many parts."""
    found = []

    def looking(stem, name, defines):
        if stem == "conv2d_hopper":
            found.append(defines["CUT"])
        return nullcontext()

    with observed(looking):
        yield found


@TILE
@STORAGE
@cases(CASES)
def test_whole_numbers_give_the_bits_of_the_definition(hopper, case, storage, tf32, name, only, rng):
    """Alone, with biases and a further gradient, and rectified."""
    hosts = draws(rng, case, storage)
    some = [draw_integers(rng, case.w[0], float32), draw_integers(rng, case.x[3], float32)]
    add = draw_integers(rng, case.x, storage)
    x, w, dy, bias, dbias, added = put(hopper, *hosts, *some, add)
    with kernel(_choice(name)):
        same(both(hopper, case, x, w, dy, tf32=tf32), both_expected(case, *hosts, storage))
        found = both(hopper, case, x, w, dy, bias, tf32, bias=dbias, add=added)
        rectified = hopper.to_host(hopper.conv2d(x, w, bias, **case.options, tf32=tf32, relu=True))
    y, dx = both_expected(case, *hosts, storage, *some, add)
    same([*found, rectified], [y, dx, np.maximum(y.astype(np.float64), 0.0)])
    assert set(only) == {int(name[-1])}


@PARTS
@STORAGE
@cases(CASES)
def test_every_tile_of_as_many_parts_gives_the_same_bits(hopper, case, storage, tf32, parts, rng):
    """Near the definition, and on every run."""
    x, w, dy = hosts = [draw(rng, shape, storage) for shape in (case.x, case.w, case.y)]
    placed, first = put(hopper, *hosts), None
    for name in _names(parts, plan_of(case)) * 2:
        with kernel(_choice(name)):
            found = both(hopper, case, *placed, tf32=tf32)
        first = first or found
        same(found, first)
    check = {"scale": 32, "tf32": bool(tf32)}
    assert_close(first[0], reference.conv2d(x, w, **case.options), storage, terms=case.terms[0], **check)
    expected = reference.conv2d_backward_data(dy, w, case.x, **case.options)
    assert_close(first[1], expected, storage, terms=case.terms[1], **check)


@TILE
@cases(CASES)
def test_pitched_and_misaligned_arrays_give_the_bits_of_dense_ones(hopper, case, name, rng):
    with kernel(_choice(name)):
        bits_of_dense_arrays(hopper, case, bfloat16, rng, both, ((8, 16), (3, 2)))


@TILE
@cases(CASES)
def test_all_of_the_output_and_nothing_else_is_written(hopper, case, name, rng, monkeypatch):
    with kernel(_choice(name)):
        writes_its_output_alone(hopper, case, bfloat16, rng, both, monkeypatch)


@PARTS
@cases(CASES)
def test_what_is_not_finite_stays_where_it_belongs(hopper, case, parts, rng):
    with kernel(_choice(_names(parts, plan_of(case))[0])):
        keeps_nonfinite_apart(hopper, case, bfloat16, rng, both)


@TILE
@cases(CASES)
def test_statistics_are_those_of_the_output(hopper, case, name, only, rng):
    operands = statistics.operands(rng, case, bfloat16, 3.0)
    with kernel(_choice(name)):
        first = statistics.check(hopper, case, *operands)
        again = statistics.check(hopper, case, *operands)
    assert set(only) == {int(name[-1])}
    assert [one.tobytes() for one in first] == [one.tobytes() for one in again]


@TILE
@masked.KINDS
@cases(CASES)
def test_masking_on_the_way_is_masking_afterwards(hopper, case, name, joined, added, only, rng):
    operands = masked.operands(rng, case, bfloat16, joined, added)
    with kernel(_choice(name)):
        assert masked.check(hopper, case, *operands) == masked.check(hopper, case, *operands) is not None
    assert set(only) == {int(name[-1])}


@TILE
@pytest.mark.parametrize("packed", [False, True])
@cases(CASES)
def test_normalising_on_the_way_is_normalising_before(hopper, case, name, packed, only, rng, monkeypatch):
    monkeypatch.setattr(conv2d_hopper, "normalizing_pays", lambda *_: True)
    x, w, norm = normalized.operands(rng, case, bfloat16)
    with kernel(_choice(name)):
        if not packed:
            normalized.check(hopper, case, x, w, norm)
        else:
            placed = *put(hopper, x, w), put(hopper, *norm)
            one, other = (hopper.conv2d(*placed[:2], norm=placed[2], packed=True, **case.options) for _ in range(2))
            assert hopper.to_host(one).tobytes() == hopper.to_host(other).tobytes()
    assert set(only) == {int(name[-1])}
