"""Convolutions between many channels and few, forced on their own kernels at the edges of what these take.

On whole numbers nothing is rounded, so every bit is that of the definition, whatever the order of a sum.
"""

from __future__ import annotations

import numpy as np
import pytest

from minidl.cuda.convolution import conv2d_thin
from minidl.cuda.convolution.conv2d_family import family
from minidl.cuda.device import BUILT_IN
from minidl.precision import bfloat16, float16, float32
from minidl.shapes import ceil_div
from tests.convolutions import (
    EVERY,
    SIXTEEN,
    Case,
    both,
    cases,
    equals_definition,
    obeys,
    plan_of,
    put,
    same,
    stems_of,
    three,
)
from tests.test_conv2d_normalized import check as check_normalized
from tests.test_conv2d_normalized import operands as normalized_operands
from tests.tolerance import draw, rounded


def _case(pixels: tuple[int, int, int], channels: int, filters: int) -> Case:
    return Case(f"{channels}-{filters}-{'x'.join(map(str, pixels))}", (*pixels, channels), (filters, 1, 1))


CASES = [
    _case((3, 17, 29), 64, 2), _case((3, 17, 29), 2, 64),  # rows beyond a block's, not a multiple of a warp's
    _case((1, 1, 1), 64, 2), _case((1, 1, 1), 2, 64),
    _case((2, 5, 7), 1, 1), _case((2, 5, 7), 16, 16), _case((1, 3, 11), 3, 2),
    _case((2, 9, 8), 32, 3), _case((2, 9, 8), 96, 5), _case((1, 9, 8), 40, 7),
    _case((2, 9, 8), 48, 8), _case((1, 9, 8), 130, 9), _case((1, 9, 8), 64, 15), _case((1, 11, 12), 520, 16),
    _case((2, 9, 8), 1, 24), _case((1, 9, 8), 4, 36), _case((1, 9, 8), 7, 33), _case((1, 9, 8), 10, 260),
    _case((2, 40, 41), 72, 12), _case((2, 40, 41), 13, 200),
]  # fmt: skip
HALVES = [
    _case((2, 9, 8), 24, 144), _case((2, 9, 8), 144, 24), _case((1, 9, 8), 32, 130), _case((2, 5, 7), 200, 31),
    _case((2, 9, 8), 24, 264), _case((2, 9, 8), 40, 3), _case((2, 9, 8), 8, 8),
    _case((1, 3, 11), 17, 17), _case((2, 40, 41), 88, 25), _case((2, 40, 41), 32, 96),
]  # fmt: skip
MORE = [_case((2, 9, 8), 40, 240), _case((1, 3, 11), 48, 50), _case((2, 40, 41), 40, 72), _case((2, 9, 8), 248, 48)]
PASSES = "forward", "backward_data", "backward_weight"
TO_FEW = [case for case in CASES + HALVES if case.w[0] <= min(conv2d_thin.LABELS, case.x[3])]
LARGE = [case for case in CASES if case.x[1] == 40 or case.x[1] == 17]


@pytest.fixture
def thin(cuda_ops):
    with family("thin"):
        yield cuda_ops


# ------------------------------------------------------------------------------------------------- plans, without a GPU


def test_they_are_taken_where_pixels_are_many_and_one_side_is_thin():
    mine = ["conv2d_thin", "conv2d_thin", "conv2d_thin_weight", "channel_sum"]
    for dtype in (bfloat16, float16, float32):
        for channels, filters in ((64, 2), (2, 64), (64, 7), (3, 33), (72, 8), (66, 15)):
            assert stems_of(_case((32, 256, 256), channels, filters), dtype) == mine
        for other in (
            _case((4, 14, 14), 64, 2),
            _case((32, 256, 256), 64, 17),
            _case((32, 256, 256), 3, 3),
            Case("3x3", (32, 256, 256, 64), (2, 3, 3), padding=(1, 1)),
            Case("strided", (32, 256, 256, 64), (2, 1, 1), stride=(2, 2)),
            Case("groups", (32, 256, 256, 64), (2, 1, 1), groups=2),
        ):
            assert not set(mine[:3]) & set(stems_of(other, dtype)), other.name
    assert stems_of(_case((32, 256, 256), 64, 2), float32, tf32=1) == mine


@pytest.mark.parametrize(
    ("channels", "filters", "size", "wanted"),
    [
        (32, 16, 112, (True, True)), (16, 96, 112, (True, True)), (144, 24, 56, (False, True)),
        (24, 144, 56, (True, True)), (192, 32, 28, (False, None)), (32, 192, 28, (True, False)),
        (96, 24, 56, (False, True)), (24, 96, 14, (True, True)),
    ],
)  # fmt: skip
def test_what_was_measured_to_be_faster_is_taken(channels, filters, size, wanted):
    """Output and data gradient of MobileNetV2's layers at batch 128, on an H200; None where both are as fast."""
    found = stems_of(_case((128, size, size), channels, filters), bfloat16)
    assert "conv2d_thin_weight" not in found
    for stem, thin in zip(found[:2], wanted, strict=True):
        assert thin is None or (stem == "conv2d_thin") == thin


def test_an_output_of_few_channels_is_theirs_where_others_fill_up_with_zeros_or_memory_bounds_it():
    """As measured on an H200: from less than a stage of channels; to 16, and to eight, where there are not many."""
    for channels, filters, thin in (
        (32, 32, True), (32, 24, True), (56, 24, True), (64, 32, False), (144, 24, False),
        (136, 8, True), (384, 8, False), (704, 8, False), (96, 16, True), (152, 16, False), (704, 16, False),
    ):  # fmt: skip
        stem = stems_of(_case((643, 25, 25), channels, filters), bfloat16)[0]
        assert (stem == "conv2d_thin") == thin, (channels, filters)


@pytest.mark.parametrize(
    "case", [_case((1, 9, 9), 40, 33), Case("3x3", (1, 9, 9, 64), (2, 3, 3)), _case((1, 9, 9), 8192, 16)]
)
def test_what_they_cannot_do_is_refused(case):
    with family("thin"), pytest.raises(ValueError, match="family"):
        stems_of(case, bfloat16)
    assert not any(conv2d_thin.applies(plan_of(case), 1, which) for which in PASSES)


def test_more_than_sixteen_are_for_16_bits():
    conv = plan_of(_case((1, 9, 9), 32, 17))
    assert all(conv2d_thin.applies(conv, 1, which) and not conv2d_thin.applies(conv, 0, which) for which in PASSES)


def test_more_than_32_are_for_outputs_and_data_gradients():
    for few, wide, wanted in ((40, 240, True), (48, 64, True), (41, 240, False), (56, 240, False)):
        for sides in ((few, wide), (wide, few)):
            conv = plan_of(_case((1, 9, 9), *sides))
            assert [conv2d_thin.applies(conv, 1, which) for which in PASSES] == [wanted, wanted, False]
            assert not any(conv2d_thin.applies(conv, 0, which) for which in PASSES)


def test_what_many_channels_keep_busy_is_left_to_others():
    """Of the many, by pixels, as measured on an H200; None where both are as fast."""
    for pixels, channels, filters, thin in (
        (6144, 8, 192, True), (6144, 16, 192, None), (6144, 8, 768, False), (6144, 24, 1408, False),
        (24576, 8, 768, True), (24576, 24, 192, True), (24576, 16, 768, False), (24576, 32, 384, False),
        (98304, 24, 192, True), (98304, 24, 768, False), (393216, 16, 192, True), (393216, 32, 384, False),
    ):  # fmt: skip
        forward, data, *_ = stems_of(_case((pixels // 1024, 32, 32), channels, filters), bfloat16)
        assert thin is None or (forward == "conv2d_thin") == thin, (pixels, channels, filters)
        forward, data, *_ = stems_of(_case((pixels // 1024, 32, 32), filters, channels), bfloat16)
        assert thin is None or (data == "conv2d_thin") == thin, (pixels, filters, channels)
    assert stems_of(_case((13, 36, 36), 24, 440), bfloat16)[0] == "conv2d_thin", "whose rows begin within sectors"


def test_few_channels_of_a_data_gradient_in_tf32_are_left_to_others():
    assert stems_of(_case((64, 56, 56), 12, 96), float32, tf32=1)[:3] == ["conv2d_thin", "conv2d_turn", "conv2d_hopper"]
    assert stems_of(_case((64, 56, 56), 4, 96), float32, tf32=1)[:2] == ["conv2d_thin", "conv2d_thin"]


@pytest.mark.parametrize(
    ("images", "channels", "filters", "wanted"),
    [
        (64, 40, 240, (True, True)), (32, 40, 240, (True, None)), (16, 40, 240, (False, None)),
        (64, 240, 40, (False, True)), (64, 144, 40, (False, True)),
    ],
)  # fmt: skip
def test_more_than_32_are_taken_where_they_were_measured_to_be_faster(images, channels, filters, wanted):
    """Output and data gradient of EfficientNet-B0's layers, on an H200."""
    found = stems_of(_case((images, 28, 28), channels, filters), bfloat16)
    for stem, thin in zip(found[:2], wanted, strict=True):
        assert thin is None or (stem == "conv2d_thin") == thin


@pytest.mark.parametrize("device", BUILT_IN.values(), ids=list(BUILT_IN))
@cases(CASES)
def test_blocks_take_every_row_once_and_chunks_do_not_depend_on_the_device(case, device):
    conv = plan_of(case)
    for code in (0, 1):
        for backward in (False, True):
            planned = conv2d_thin._plan_gather(conv, code, 0, backward, (8, 8), (1, 1, 1), False)
            half = code and not planned.defines["NARROW"] and planned.defines["FEW"] > conv2d_thin.LEAN
            rows = conv2d_thin.ROWS // (1 + half) * int(planned.problem["share"][0])
            assert (planned.grid - 1) * rows < conv.pixels <= planned.grid * rows
            assert planned.shared <= device.shared_per_block
        planned = conv2d_thin._plan_weight(conv, code, 0, (8, 8), (1, 1))
        chunk = int(planned.problem["chunk"][0])
        assert chunk % conv2d_thin.STEP == 0 and planned.grid[1] == ceil_div(conv.pixels, chunk)


# ------------------------------------------------------------------------------------------------------- on a GPU


ALL = [(case, storage) for case in CASES for storage in (bfloat16, float16, float32)]
ALL += [(case, storage) for case in HALVES for storage in (bfloat16, float16)]


@pytest.mark.parametrize(("case", "storage"), ALL, ids=lambda value: value.name)
def test_laws_of_single_convolutions(thin, case, storage, rng, monkeypatch):
    """Rows and channels that pad a product are zeros, which infinity would turn into NaN."""
    obeys(thin, case, storage, rng, three, monkeypatch, modules=("conv2d", "conv2d_thin"), count=3)


@cases(MORE)
@SIXTEEN
def test_laws_of_more_than_32(thin, case, storage, rng, monkeypatch):
    obeys(thin, case, storage, rng, both, monkeypatch)


@cases(LARGE)
@EVERY
def test_equals_definition(thin, case, storage, rng):
    equals_definition(thin, case, storage, rng, three)


@cases([*LARGE, *HALVES[-2:]])
@SIXTEEN
def test_as_many_rows_as_a_block_takes_change_no_bit(thin, case, storage, rng, monkeypatch):
    arrays = put(thin, *(draw(rng, shape, storage) for shape in (case.x, case.w, case.y)))
    expected = three(thin, case, *arrays)
    monkeypatch.setattr(conv2d_thin, "_plan_gather", conv2d_thin._plan_gather.__wrapped__)
    monkeypatch.setattr(conv2d_thin, "MOVES", 1 << 40)
    for blocks in (1, 2, 5):
        monkeypatch.setattr(conv2d_thin, "ENOUGH", blocks)
        same(three(thin, case, *arrays), expected)


@cases(LARGE)
def test_tf32_rounds_operands_and_nothing_else(thin, case, rng):
    hosts = [draw(rng, shape, float32) for shape in (case.x, case.w, case.y)]

    def of(tf32, arrays):
        return three(thin, case, *put(thin, *arrays), tf32=tf32)

    same(of(1, hosts), of(0, map(rounded, hosts)))
    same(of(3, hosts), of(0, hosts))


@cases(TO_FEW)
@SIXTEEN
def test_normalising_on_the_way_is_normalising_before(thin, case, storage, rng):
    """Output, to the bit and without a pass, and weight gradient, whose rows beyond the last count as none."""
    x, w, norm = normalized_operands(rng, case, storage)
    x[0, 0, 0, 0] = np.nan
    check_normalized(thin, case, x, w, norm)
    conv, (dy, x, *norm) = plan_of(case), put(thin, draw(rng, case.y, storage), x, *norm)
    assert conv2d_thin.normalizes(conv, 1)
    z, found = thin.batch_norm_apply(x, *norm, relu=True), []
    for source, given in ((x, norm), (z, None)):
        out = thin.from_host(np.full(case.w, np.inf, float32))
        thin.conv2d_backward_weight(dy, source, norm=given, out=out, **case.options)
        found.append(thin.to_host(out))
    same(found[:1], found[1:])
