"""Depthwise convolutions on the GPU: strips that keep filters and sums in registers, and what else takes the rest.

On whole numbers nothing is rounded, so every bit is that of the definition, whatever the order of a sum.
"""

from __future__ import annotations

import numpy as np
import pytest

from minidl.cuda.convolution import depthwise_strip
from minidl.precision import bfloat16, float16, float32
from minidl.shapes import ceil_div
from tests.convolutions import (
    SIXTEEN,
    Case,
    bits_of_dense_arrays,
    cases,
    draws,
    exact_on_whole_numbers,
    plan_of,
    put,
    same,
    stems_of,
    three,
    three_expected,
    writes_its_output_alone,
)
from tests.tolerance import draw

CASES = [
    Case("3x3", (2, 9, 8, 36), (36, 3, 3), padding=(1, 1), groups=36),
    Case("3x3-odd-channels", (2, 9, 8, 37), (37, 3, 3), padding=(1, 1), groups=37),
    Case("3x3-valid", (1, 11, 9, 6), (6, 3, 3), groups=6),
    Case("3x3-wide", (1, 40, 71, 10), (10, 3, 3), padding=(1, 1), groups=10),
    Case("3x3-small", (3, 7, 7, 200), (200, 3, 3), padding=(1, 1), groups=200),
    Case("3x3-stride-2", (1, 29, 30, 34), (34, 3, 3), stride=(2, 2), padding=(1, 1), groups=34),
    Case("3x3-stride-2-even", (2, 28, 28, 64), (64, 3, 3), stride=(2, 2), padding=(1, 1), groups=64),
    Case("5x5", (2, 14, 14, 48), (48, 5, 5), padding=(2, 2), groups=48),
    Case("5x5-stride-2", (2, 12, 9, 6), (6, 5, 5), stride=(2, 2), padding=(2, 2), groups=6),
    Case("5x3-stride-2", (2, 9, 10, 16), (16, 5, 3), stride=(2, 2), padding=(2, 1), groups=16),
    Case("7x7", (1, 13, 17, 4), (4, 7, 7), padding=(3, 3), groups=4),
    Case("stride-3-2", (1, 13, 17, 4), (4, 3, 3), stride=(3, 2), padding=(1, 1), groups=4),
    Case("stride-over-kernel", (1, 8, 9, 4), (4, 3, 3), stride=(4, 4), groups=4),
    Case("padded-beyond-kernel", (1, 5, 6, 2), (2, 3, 5), stride=(2, 3), padding=(4, 6), groups=2),
    Case("1x1-stride-2", (2, 8, 9, 4), (4, 1, 1), stride=(2, 2), groups=4),
    Case("kernel-over-image", (2, 2, 3, 4), (4, 5, 5), padding=(2, 2), groups=4),
    Case("many-images", (300, 3, 3, 8), (8, 3, 3), padding=(1, 1), groups=8),
]
OTHERS = [
    Case("dilated", (1, 11, 9, 6), (6, 3, 3), padding=(2, 2), dilation=(2, 2), groups=6),
    Case("multiplier", (2, 9, 8, 6), (12, 3, 3), padding=(1, 1), groups=6),
    Case("11x11", (1, 13, 12, 6), (6, 11, 11), padding=(5, 5), groups=6),
]
NAMES = ("3x3", "3x3-odd-channels", "3x3-stride-2-even", "5x5", "5x3-stride-2", "stride-over-kernel")
FEW = [case for case in CASES if case.name in NAMES]
CACHED = (depthwise_strip._columns, depthwise_strip._strip, depthwise_strip.plan, depthwise_strip.plan_weight)


# -- without a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [float32, bfloat16, float16], ids=["fp32", "bf16", "fp16"])
def test_strips_are_taken_where_they_fit(dtype):
    for case in CASES:
        assert set(stems_of(case, dtype)) - {"channel_sum"} <= {"depthwise_strip"}, case.name
    for case in OTHERS:
        assert "depthwise_strip" not in stems_of(case, dtype), case.name


@cases(CASES)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward_data"])
def test_strips_meet_every_tap_once(case, backward):
    """Base positions, steps and spreads: each output finds the sources and taps of the definition along each axis."""
    conv = plan_of(case)
    if max(conv.dilation) > 1:
        return
    bases = depthwise_strip._bases(conv, backward)
    for axis in (0, 1):
        base, source, output = (pair[axis] for pair in bases)
        kernel, stride, padding = conv.kernel[axis], conv.stride[axis], conv.padding[axis]
        inner, outer = (conv.height, conv.width)[axis], (conv.out_height, conv.out_width)[axis]
        step, spread = (1, stride) if backward else (stride, 1)
        sight = ceil_div(kernel, stride) if backward else kernel
        found = []
        for i in range(base):
            for seen in range(sight):
                at = i * step + source + seen
                for out in range(spread):
                    tap = (sight - 1 - seen) * stride + out if backward else seen
                    here = i * spread + output + out
                    if tap < kernel and 0 <= here < (inner if backward else outer):
                        if 0 <= at < (outer if backward else inner):
                            found.append((at, tap, here) if backward else (here, tap, at))
        meetings = {
            (p, r, p * stride - padding + r)
            for p in range(outer)
            for r in range(kernel)
            if 0 <= p * stride - padding + r < inner
        }
        assert len(found) == len(set(found)) and set(found) == meetings


@cases(CASES)
@pytest.mark.parametrize("images", [1, 64, 700])
def test_weight_gradients_are_cut_for_one_round_of_blocks(case, images):
    """Every row is in one item, every item in one chunk, and the GPU can hold all blocks at once."""
    conv = plan_of(case)._replace(images=images)
    for code, itemsize in ((0, 4), (1, 2)):
        planned, chunks = depthwise_strip.plan_weight(conv, code, (conv.channels,) * 2, itemsize)
        of = {name: int(planned.problem[name][0]) for name in ("items", "chunk", "strips", "runs", "run", "slabs")}
        assert of["items"] == images * of["strips"] * of["runs"]
        assert (of["runs"] - 1) * of["run"] < conv.out_height <= of["runs"] * of["run"]
        assert (chunks - 1) * of["chunk"] < of["items"] <= chunks * of["chunk"]
        assert planned.grid == of["slabs"] * chunks <= depthwise_strip.PLACES * planned.defines["RESIDENT"]


@pytest.mark.parametrize(
    ("size", "channels", "kernel", "stride", "which", "run", "chunks"),
    [
        (56, 144, 3, 2, "backward_weight", 28, 103),
        (28, 192, 3, 2, "forward", 7, None),
        (28, 192, 3, 1, "backward_data", 7, None),
        (14, 384, 3, 1, "forward", 14, None),
        (14, 384, 3, 1, "backward_data", 14, None),
        (14, 576, 3, 1, "backward_weight", 7, 43),
        (14, 480, 3, 1, "backward_weight", 14, 64),
        (7, 1152, 5, 1, "backward_weight", 7, 22),
        (14, 672, 5, 2, "backward_weight", 7, 32),
    ],
)
def test_runs_that_were_measured_to_be_fastest_are_taken(size, channels, kernel, stride, which, run, chunks):
    """Of 128 images in bfloat16 on an H200: 3 to 12 % before the next of the runs and chunks that were tried."""
    x, filters = (128, size, size, channels), (channels, kernel, kernel)
    case = Case("layer", x, filters, stride=(stride,) * 2, padding=(kernel // 2,) * 2, groups=channels)
    if which == "backward_weight":
        planned, found = depthwise_strip.plan_weight(plan_of(case), 1, (channels,) * 2, 2)
        assert found == chunks
    else:
        backward = which == "backward_data"
        planned = depthwise_strip.plan(plan_of(case), 1, backward, (channels,) * 2, 2, 2, not backward)
    assert planned.problem["run"][0] == run


# -- on a GPU ---------------------------------------------------------------------------------------------------------


@cases([*CASES, *OTHERS])
def test_whole_numbers_give_the_bits_of_the_definition(cuda_ops, case, dtype, rng):
    exact_on_whole_numbers(cuda_ops, case, dtype, rng, three)


@cases(FEW)  # each pitch is a kernel of its own
def test_pitched_and_misaligned_arrays_give_the_bits_of_dense_ones(cuda_ops, case, dtype, rng):
    bits_of_dense_arrays(cuda_ops, case, dtype, rng, three, ((2, 4), (3, 2)))


@cases(FEW)
@SIXTEEN
def test_every_strip_gives_the_same_output(cuda_ops, case, storage, rng, monkeypatch):
    """Sums of an output depend neither on how many columns a thread has nor on how many rows."""
    hosts = [draw(rng, shape, storage) for shape in (case.x, case.w, case.y)]
    found = []
    for columns, wanted, places in ((range(1, 9), 1 << 18, 132), ([1], 1, 1), ([2], 1 << 18, 3), ([3], 1 << 30, 132)):
        monkeypatch.setattr(depthwise_strip, "COLUMNS", columns)
        monkeypatch.setattr(depthwise_strip, "WANTED", wanted)
        monkeypatch.setattr(depthwise_strip, "PLACES", places)
        for cached in CACHED:
            cached.cache_clear()
        found.append(three(cuda_ops, case, *put(cuda_ops, *hosts))[:2])
    for cached in CACHED:
        cached.cache_clear()
    for other in found[1:]:
        same(other, found[0])


@cases(CASES)
def test_all_of_the_output_and_nothing_else_is_written(cuda_ops, case, rng, monkeypatch):
    writes_its_output_alone(cuda_ops, case, bfloat16, rng, three, monkeypatch, ("conv2d", "depthwise_strip"), 3)


@cases(CASES[:9])
def test_not_a_number_reaches_what_it_touches_and_nothing_else(cuda_ops, case, rng):
    x, w, dy = draws(rng, case, bfloat16)
    x[0, 0, 0, 1], dy[-1, -1, -1, 0] = np.nan, np.inf
    w = np.ones_like(w)
    found = three(cuda_ops, case, *put(cuda_ops, x, w, dy))
    with np.errstate(invalid="ignore"):
        expected = three_expected(case, x, w, dy, bfloat16)
    *outputs, gradient = (
        [np.isfinite(array.astype(np.float64)) for array in pair] for pair in zip(found, expected, strict=True)
    )
    for one, other in outputs:
        np.testing.assert_array_equal(one, other)
    # A gradient's sums run over padding too, with zeros that NaN times: it may reach all taps, but of its own filter.
    np.testing.assert_array_equal(*(finite.all(axis=(1, 2, 3)) for finite in gradient))
