"""Tiles whose depth the two blocks of a cluster share: every law of whole tiles, and which convolutions they are for.

On whole numbers nothing is rounded, so every bit is that of the definition, whatever the order of a sum.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from minidl.cuda.convolution import conv2d_hopper
from minidl.cuda.convolution.conv2d_family import Choice, kernel
from minidl.cuda.convolution.conv2d_hopper_tiles import PAIRED, PARTS, TILES, candidates, choose, parts_of, taken
from minidl.cuda.convolution.conv2d_walk import CLASSES, walks_of
from minidl.cuda.device import BUILT_IN
from minidl.cuda.launch import dry_run, observed
from minidl.precision import bfloat16, float16, float32
from tests import test_conv2d_masked as masked
from tests import test_conv2d_normalized as normalized
from tests import test_conv2d_statistics as statistics
from tests.convolutions import (
    bits_of_dense_arrays,
    both,
    equals_definition,
    exact_on_whole_numbers,
    independent_of_the_batch,
    keeps_nonfinite_apart,
    plan_of,
    writes_its_output_alone,
)
from tests.test_conv2d_ops import Case, cases, put

CASES = [
    Case("1x1", (3, 9, 7, 264), (328, 1, 1)),
    Case("3x3", (2, 9, 7, 264), (328, 3, 3), padding=(1, 1)),
    Case("few-pixels", (1, 2, 3, 256), (264, 3, 3), padding=(1, 1)),
    Case("two-stages", (2, 8, 8, 72), (80, 1, 1)),
    Case("stride-2", (3, 13, 10, 392), (256, 3, 3), stride=(2, 2), padding=(1, 1)),
    Case("1x1-stride-2", (2, 13, 12, 264), (520, 1, 1), stride=(2, 2)),
    Case("stride-3-dilated", (2, 19, 20, 256), (264, 2, 4), stride=(3, 2), padding=(2, 1), dilation=(2, 3)),
]
CHOICE = Choice("hopper", PAIRED.name, (1,))
STORAGE = pytest.mark.parametrize(
    ("storage", "tf32"), [(bfloat16, 0), (float16, 0), (float32, 1)], ids=["bf16", "fp16", "tf32"]
)


# ------------------------------------------------------------------------------------------------------ without a GPU


def test_what_is_deep_and_small_may_be_cut():
    """Two stages of channels at least, in one group, and a multiprocessor for each block."""
    device = BUILT_IN["H200"]

    def able(images, channels, filters, groups=1, backward=False):
        conv = plan_of(Case("any", (images, 8, 8, channels), (filters, 1, 1), groups=groups))
        return candidates(conv, backward, device, parts=2) == [PAIRED]

    assert able(2, 72, 8) and not able(2, 64, 72) and able(2, 64, 72, backward=True)
    assert not able(2, 512, 512, groups=2)
    assert able(132, 128, 128) and not able(133, 128, 128) and not able(68, 128, 256)
    assert PARTS == (1, 2) and PAIRED.parts == 2 and all(tile.parts == 1 for tile in TILES)


@cases(CASES)
def test_clusters_are_whole_and_blocks_have_one_tile(case):
    conv, device = plan_of(case), BUILT_IN["H200"]
    for backward in (False, True):
        pitches = (conv.out_channels, 0) if backward else (conv.channels, 0)
        whole = conv2d_hopper.plan(conv, 1, backward, pitches, False, device, (PAIRED._replace(parts=1), 1))
        cut = conv2d_hopper.plan(conv, 1, backward, pitches, False, device, (PAIRED, 3))
        for one, other in zip(cut, whole, strict=True):
            assert one.grid == int(one.problem["tiles"][0]) == 2 * int(other.problem["tiles"][0])
            assert not one.several and one.patches == other.patches and one.defines["CUT"] == 2


@pytest.mark.parametrize("name", ["H100", "H200"])
@pytest.mark.parametrize(
    ("size", "channels", "filters", "kernel", "cut"),
    [(7, 2048, 512, 1, True), (7, 512, 512, 3, True), (28, 128, 512, 1, False)],
)
def test_whatever_is_fused_is_cut_alike_and_on_every_device(name, size, channels, filters, kernel, cut):
    """As ResNet-50's last stage is at 32 images."""
    conv = plan_of(Case("layer", (32, size, size, channels), (filters, kernel, kernel), padding=(kernel // 2,) * 2))
    assert parts_of(conv, False, 1) == 1 + cut
    for backward, code in ((False, 1), (True, 1), (False, 0), (True, 0)):
        parts = parts_of(conv, backward, code)
        for how in ((0, False), (0, True), *(() if backward or not code else ((1, True), (2, False)))):
            assert choose(conv, backward, BUILT_IN[name], code, *how)[0].parts == parts


def test_a_tile_by_name_keeps_its_parts_where_something_is_fused():
    """One with two blocks on a multiprocessor has no registers to normalise with: another takes its place."""
    conv, device = plan_of(CASES[0]), BUILT_IN["H200"]
    for tile in (*TILES, PAIRED):
        assert taken(Choice("hopper", tile.name, (1,)), conv, False, device, 1) == (tile, 1)
        other, _ = taken(Choice("hopper", tile.name, (1,)), conv, False, device, 1, 1)
        assert other.parts == tile.parts and other in candidates(conv, False, device, True, tile.parts)
    assert taken(Choice("hopper", "128x128x5/7", (1,)), conv, False, device, 1) is None


def test_what_fills_the_device_is_not_cut():
    from minidl import cuda as ops

    def cut(images, size, channels, filters, kernel=1):
        case = Case("layer", (images, size, size, channels), (filters, kernel, kernel), padding=(kernel // 2,) * 2)
        with dry_run(BUILT_IN["H200"]) as log:
            ops.conv2d(ops.empty(case.x, bfloat16), ops.empty(case.w, bfloat16), **case.options)
        return dict(log.launches[0].defines)["CUT"] > 1

    assert cut(32, 7, 2048, 512) and cut(32, 7, 512, 512, 3)
    assert not cut(256, 56, 64, 256) and not cut(256, 14, 256, 256, 3)


# ------------------------------------------------------------------------------------------------------- on a GPU


@pytest.fixture
def paired(hopper):
    """The CUDA table with convolutions of two parts; every launch of their kernel is seen to be one."""
    found = set()

    def looking(stem, name, defines):
        if stem == "conv2d_hopper":
            found.add(defines["CUT"])
        return nullcontext()

    with kernel(CHOICE), observed(looking):
        yield hopper
    assert found == {2}


@STORAGE
@cases(CASES)
def test_whole_numbers_give_the_bits_of_the_definition(paired, case, storage, tf32, rng):
    exact_on_whole_numbers(paired, case, storage, rng, both, tf32)


@STORAGE
@cases(CASES)
def test_equals_definition_and_repeats(paired, case, storage, tf32, rng):
    equals_definition(paired, case, storage, rng, both, tf32, scale=32)


@cases(CASES)
def test_pitched_and_misaligned_arrays_give_the_bits_of_dense_ones(paired, case, rng):
    bits_of_dense_arrays(paired, case, bfloat16, rng, both, ((8, 16), (3, 2)))


@cases(CASES)
def test_all_of_the_output_and_nothing_else_is_written(paired, case, rng, monkeypatch):
    writes_its_output_alone(paired, case, bfloat16, rng, both, monkeypatch)


@cases(CASES[:3])
def test_an_images_result_does_not_depend_on_its_batch(paired, case, rng):
    independent_of_the_batch(paired, case, rng, images=9)  # of many the depth is not cut


@cases(CASES)
def test_what_is_not_finite_stays_where_it_belongs(paired, case, rng):
    keeps_nonfinite_apart(paired, case, bfloat16, rng, both)


@cases(CASES)
def test_statistics_are_those_of_the_output(paired, case, rng):
    operands = statistics.operands(rng, case, bfloat16, 3.0)
    one, other = (statistics.check(paired, case, *operands) for _ in range(2))
    assert [array.tobytes() for array in one] == [array.tobytes() for array in other]


@masked.KINDS
@cases(CASES)
def test_masking_on_the_way_is_masking_afterwards(paired, case, joined, added, rng):
    operands = masked.operands(rng, case, bfloat16, joined, added)
    one, other = (masked.check(paired, case, *operands) for _ in range(2))
    assert one == other and (one is None) == (len(walks_of(plan_of(case), True)) > CLASSES)


@pytest.mark.parametrize("packed", [False, True])
@cases(CASES)
def test_normalising_on_the_way_is_normalising_before(paired, case, packed, rng, monkeypatch):
    monkeypatch.setattr(conv2d_hopper, "normalizing_pays", lambda *_: True)
    x, w, norm = normalized.operands(rng, case, bfloat16)
    if not packed:
        normalized.check(paired, case, x, w, norm)
    else:
        placed = *put(paired, x, w), put(paired, *norm)
        one, other = (paired.conv2d(*placed[:2], norm=placed[2], packed=True, **case.options) for _ in range(2))
        assert paired.to_host(one).tobytes() == paired.to_host(other).tobytes()
