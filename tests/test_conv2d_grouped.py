"""Convolutions in groups of few channels on the matrix units, forced where they apply.

On whole numbers nothing is rounded, so every bit is that of the definition, whatever the order of a sum.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from minidl.cuda.convolution import conv2d_grouped
from minidl.cuda.convolution.conv2d_family import family
from minidl.cuda.device import BUILT_IN
from minidl.cuda.launch import dry_run
from minidl.precision import bfloat16, float32
from tests.convolutions import (
    SIXTEEN,
    Case,
    both,
    cases,
    exact_weight_gradient,
    obeys,
    pitched,
    plan_of,
    put,
    weight_gradient,
)
from tests.reference import conv2d as reference
from tests.tolerance import assert_close, draw

CASES = [
    Case("4", (1, 5, 9, 16), (16, 3, 3), padding=(1, 1), groups=4),
    Case("8", (2, 6, 7, 32), (32, 3, 3), padding=(1, 1), groups=4),
    Case("16", (1, 5, 17, 64), (64, 3, 3), padding=(1, 1), groups=4),
    Case("24", (1, 4, 5, 72), (72, 3, 3), padding=(1, 1), groups=3),
    Case("32", (1, 5, 6, 64), (64, 3, 3), padding=(1, 1), groups=2),
    Case("2", (1, 5, 6, 12), (12, 3, 3), padding=(1, 1), groups=6),
    Case("3", (1, 5, 6, 12), (12, 3, 3), padding=(1, 1), groups=4),
    Case("6", (1, 5, 6, 18), (18, 3, 3), padding=(1, 1), groups=3),
    Case("12", (1, 5, 6, 36), (36, 3, 3), padding=(1, 1), groups=3),
    Case("4-6", (1, 5, 6, 20), (30, 3, 3), padding=(1, 1), groups=5),
    Case("stride-2", (2, 7, 9, 16), (16, 3, 3), stride=(2, 2), padding=(1, 1), groups=4),
    Case("stride-2-even", (1, 8, 10, 32), (32, 3, 3), stride=(2, 2), padding=(1, 1), groups=4),
    Case("stride-2-32", (2, 9, 10, 64), (64, 3, 3), stride=(2, 2), padding=(1, 1), groups=2),
    Case("stride-3-1", (1, 9, 8, 16), (16, 3, 3), stride=(3, 1), padding=(1, 0), groups=4),
    Case("1x1", (1, 5, 6, 240), (240, 1, 1), groups=3),
    Case("5x5", (1, 6, 7, 8), (8, 5, 5), padding=(2, 2), groups=2),
    Case("mixed", (1, 6, 7, 16), (64, 3, 2), stride=(1, 2), padding=(0, 1), groups=4),
    Case("many-images", (40, 4, 4, 128), (128, 3, 3), padding=(1, 1), groups=32),
    Case("tall", (2, 70, 20, 32), (32, 3, 3), padding=(1, 1), groups=8),
    Case("wide", (1, 6, 61, 64), (64, 3, 3), padding=(1, 1), groups=16),
]
WEIGHTS = [case for case in CASES if case.name != "1x1"]  # whose channels' sums do not fit


@pytest.fixture
def grouped(cuda_ops):
    with family("grouped"):
        yield cuda_ops


def test_groups_are_taken_where_they_fit():
    from minidl import cuda as ops

    def kernels(case, dtype):
        with dry_run() as log:
            x, w, dy = (ops.empty(shape, dtype) for shape in (case.x, case.w, case.y))
            ops.conv2d(x, w, **case.options)
            ops.conv2d_backward_data(dy, w, case.x, **case.options)
        return {launch.name for launch in log.launches}

    for case in CASES:
        conv, device = plan_of(case), BUILT_IN["H200"]
        assert all(conv2d_grouped.applies(conv, 1, back, device) for back in (False, True)), case.name
        # Some fill tiles of 64 columns, of Hopper or not.
        filled = {"1x1": "conv2d_kernel", "32": "conv2d_hopper_kernel", "stride-2-32": "conv2d_hopper_kernel"}
        wanted = filled.get(case.name, "conv2d_grouped_kernel")
        many = dataclasses.replace(case, x=(1000, *case.x[1:]))
        assert kernels(many, bfloat16) == {wanted}, case.name
        assert kernels(many, float32) == {"conv2d_kernel"}
    for stride, few in ((1, (14, 10, 10, 64)), (2, (10, 14, 14, 64))):
        case = Case("few", few, (64, 3, 3), stride=(stride, stride), padding=(1, 1), groups=4)
        assert kernels(case, bfloat16) == {"conv2d_kernel"}
    for other in (
        Case("dilated", (2, 9, 9, 16), (16, 3, 3), dilation=(2, 2), groups=4),
        Case("odd-pitch", (2, 9, 9, 15), (15, 3, 3), groups=3),
        Case("many-filters", (2, 9, 9, 160), (160, 3, 3), groups=2),
    ):
        assert kernels(other, bfloat16) == {"conv2d_kernel"}, other.name


@pytest.mark.parametrize("device", BUILT_IN)
def test_pixels_of_long_strides_are_left_to_others_where_they_do_not_fit(device):
    """The dry run itself asserts that shared memory does; others have the same convolutions with less of a stride."""
    from minidl import cuda as ops

    for kernel, stride, groups, width in itertools.product((1, 3), (1, 3, 5, 8), (2, 16), (8, 48)):
        channels = groups * width
        case = Case("long", (64, 64, 64, channels), (channels, kernel, kernel), (stride, stride), groups=groups)
        with dry_run(BUILT_IN[device]) as log:
            x, w, dy = (ops.empty(shape, bfloat16) for shape in (case.x, case.w, case.y))
            ops.conv2d(x, w, **case.options)
            ops.conv2d_backward_data(dy, w, case.x, **case.options)
            ops.conv2d_backward_weight(dy, x, **case.options, out=ops.empty(case.w, float32))
        by_groups = any(launch.stem.startswith("conv2d_grouped") for launch in log.launches)
        assert by_groups or width > 8 or stride > 1, case


@cases(CASES)
@SIXTEEN
def test_laws_of_single_convolutions(grouped, case, storage, rng, monkeypatch):
    """Products with other groups' channels are with zeros, which would turn NaN and infinity into NaN."""
    obeys(grouped, case, storage, rng, both, monkeypatch, where=((0, 0, 0, 1), (-1, -1, -1, 0)))


@cases(WEIGHTS)
@SIXTEEN
def test_weight_gradients_of_whole_numbers_are_exact(grouped, case, storage, rng):
    exact_weight_gradient(grouped, case, storage, rng)


@cases(WEIGHTS)
def test_weight_gradients_of_misaligned_arrays_and_repeats_have_the_same_bits(grouped, case, rng):
    x, dy = draw(rng, case.x, bfloat16), draw(rng, case.y, bfloat16)
    expected = weight_gradient(grouped, case, *put(grouped, dy, x))
    assert_close(expected, reference.conv2d_backward_weight(dy, x, case.w, **case.options), terms=case.terms[2])
    np.testing.assert_array_equal(weight_gradient(grouped, case, *put(grouped, dy, x)), expected)
    for before, after in ((8, 8), (2, 4), (3, 2), (1, 1)):
        wide = pitched(grouped, dy, before, after), pitched(grouped, x, before, after)
        np.testing.assert_array_equal(weight_gradient(grouped, case, *wide), expected)
