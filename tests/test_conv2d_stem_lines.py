"""The kernel for first layers that reads windows from lines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from minidl.cuda import nvrtc
from minidl.cuda.convolution import conv2d_stem_lines
from minidl.cuda.convolution.conv2d_family import Choice, kernel
from minidl.cuda.device import BUILT_IN, current_device
from minidl.precision import bfloat16, float32
from tests import emulator
from tests.convolutions import SIXTEEN, Case, Guarded, cases, last_of_many_images, pitched, plan_of, put, same
from tests.kernel_checks import check_report
from tests.reference import conv2d as reference
from tests.test_conv2d_statistics import check, operands
from tests.tolerance import assert_close, draw, draw_integers

H200, LINES = BUILT_IN["H200"], Choice("stem")
CASES = [
    Case("7x7-c3", (2, 20, 64, 3), (64, 7, 7), stride=(2, 2), padding=(3, 3)),
    Case("odd-rows-and-further-filters", (1, 13, 64, 3), (80, 7, 7), stride=(2, 2), padding=(3, 3)),
    Case("two-segments", (1, 6, 320, 3), (64, 7, 7), stride=(2, 2), padding=(3, 3)),
    Case("224-wide", (1, 70, 224, 3), (64, 7, 7), stride=(2, 2), padding=(3, 3)),
    Case("5x5-c2-few-filters", (3, 12, 64, 2), (48, 5, 5), stride=(2, 2), padding=(2, 2)),
    Case("3x3-c3-low-images", (9, 5, 64, 3), (64, 3, 3), stride=(2, 2), padding=(1, 1)),
    Case("3x3-c4-three-groups", (1, 34, 32, 4), (96, 3, 3), padding=(1, 1)),
    Case("7x7-c1-every-row", (1, 11, 64, 1), (64, 7, 7), stride=(1, 2), padding=(3, 3)),
    Case("3x3-c2-one-group", (1, 30, 128, 2), (64, 3, 3), stride=(4, 4)),
]


def whole(rng, case, storage):
    """Numbers whose sums are exact: x, w, bias."""
    drawn = draw_integers(rng, case.x, storage), draw_integers(rng, case.w, storage)
    return *drawn, draw_integers(rng, case.w[0], float32)


def exact(ops, case, storage, rng):
    """The bits of the definition, with a bias and without."""
    x, w, bias = whole(rng, case, storage)
    held = put(ops, x, w, bias)
    same([ops.to_host(ops.conv2d(*held[:2], **case.options))], [reference.conv2d(x, w, **case.options)])
    same([ops.to_host(ops.conv2d(*held, **case.options))], [reference.conv2d(x, w, bias, **case.options)])


def rectified(ops, case, storage, rng):
    x, w, bias = whole(rng, case, storage)
    y = ops.to_host(ops.conv2d(*put(ops, x, w, bias), **case.options, relu=True))
    same([y], [np.maximum(reference.conv2d(x, w, bias, **case.options), 0)])


def stays_where_it_belongs(ops, case, value, rng):
    x, w, _ = whole(rng, case, bfloat16)
    for place in ((0, 0, 0, 0), (-1, -1, -1, -1), (0, x.shape[1] // 2, x.shape[2] // 2, 0)):
        hurt = x.copy()
        hurt[place] = value
        with np.errstate(invalid="ignore"):
            expected = np.isfinite(reference.conv2d(hurt, w, **case.options))
        y = ops.to_host(ops.conv2d(*put(ops, hurt, w), **case.options))
        np.testing.assert_array_equal(np.isfinite(y.astype(np.float32)), expected)


# -- without a GPU ----------------------------------------------------------------------------------------------------


def test_the_kernel_takes_what_it_says():
    def taken(case, code=1, device="H200"):
        return conv2d_stem_lines.applies(plan_of(case), code, BUILT_IN[device])

    first = CASES[0]
    assert all(taken(case) for case in CASES) and taken(first, code=2)
    assert not taken(first, code=0) and not taken(first, device="A100")
    for x in ((2, 20, 66, 3), (2, 20, 32, 3), (2, 20, 64, 5), (0, 20, 64, 3)):
        assert not taken(replace(first, x=x)), x
    for filters in ((32, 7, 7), (68, 7, 7), (64, 7, 9), (64, 9, 7)):
        assert not taken(replace(first, filters=filters)), filters
    assert not taken(replace(first, stride=(2, 3)))


@SIXTEEN
@pytest.mark.parametrize("width", [64, 160, 192, 224, 256, 320, 448])
def test_every_variant_compiles_and_fits(storage, width):
    pytest.importorskip("cuda.pathfinder", reason="needs NVRTC")
    code = 1 if storage == bfloat16 else 2
    conv = plan_of(Case("first", (8, width, width, 3), (64, 7, 7), stride=(2, 2), padding=(3, 3)))
    assert conv2d_stem_lines.applies(conv, code, H200)
    plan, views = conv2d_stem_lines.plan_forward(conv, code, 8, H200)
    assert views.legal
    defines = plan.defines | {"RELU": 0, "STATISTICS": int(code == 1)}
    (report,) = nvrtc.compile_all([("conv2d_stem_lines", tuple(defines.items()))], nvrtc.target(H200.arch), 1)
    check_report("conv2d_stem_lines", report, conv2d_stem_lines.THREADS, plan.shared, H200)


@pytest.fixture
def emulated():
    with emulator.table() as ops, kernel(LINES):
        yield ops
        assert "conv2d_stem_lines_kernel" in ops.kernels


@cases(CASES)
def test_its_source_is_right_whatever_comes_late(emulated, case, rng):
    exact(emulated, case, bfloat16, rng)


def test_it_rectifies(emulated, rng):
    rectified(emulated, CASES[0], bfloat16, rng)


@cases(CASES)
def test_its_statistics_are_those_of_what_is_stored(emulated, case, rng):
    check(emulated, case, *operands(rng, case, bfloat16, 0.0))


@cases(CASES)
def test_a_value_that_is_not_finite_stays_where_it_belongs(emulated, case, rng):
    stays_where_it_belongs(emulated, case, np.inf, rng)


# What would be wrong with the kernel, by luck seen seldom on a GPU or never: a line of it, and what is there instead.
FAULTS = {
    "lines-are-not-waited-for": ("        barrier_wait(at.there(row), round_of(row));\n", ""),
    "lines-are-rewritten-too-soon": ("if (row >= UNDER_WAY) barrier_wait", "if (false) barrier_wait"),
    "lines-are-given-up-early": ("        await_products<0>();\n        settle(sum);\n", "        settle(sum);\n"),
    "the-ring-is-too-short": ("KERNEL_H + (UNDER_WAY - 1) * NEW", "KERNEL_H + (UNDER_WAY - 2) * NEW"),
    "rows-of-the-image-are-not-shared": ("        warpgroups_sync<MAKERS>(1);  //", "        //"),
    "rows-of-the-image-are-not-waited-for": ("        await_copies<AHEAD - 2>();\n        warp", "        warp"),
    "an-output-is-overwritten": ("await_stores_read<OUTPUTS - 1>", "await_stores_read<OUTPUTS>"),
    "an-output-is-stored-too-soon": (
        "            warpgroup_sync(2 + group);\n            if (stores) {", "            if (stores) {"
    ),
    "it-ends-before-all-is-stored": ("    if (stores) await_stores_read<0>();\n", ""),
    "a-warp-is-not-waited-for": ("barrier_init(at.done(threadIdx.x), WARPS)", "barrier_init(at.done(threadIdx.x), 3)"),
    "groups-behind-a-window-are-not-cut": ("2 * s + 2 == ACROSS ? TO_TAILS", "false ? TO_TAILS"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_finds_faults(fault):
    """So what it does not find is unlikely to be there."""

    def finds_none(seed):
        rng = np.random.default_rng(seed)
        with emulator.table(seed) as ops, kernel(LINES):
            exact(ops, CASES[0], bfloat16, rng)
            exact(ops, CASES[2], bfloat16, rng)
            stays_where_it_belongs(ops, CASES[0], np.inf, rng)

    assert emulator.finds("conv2d_stem_lines", *FAULTS[fault], finds_none)


# -- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def lines(cuda_ops):
    """The CUDA table, with the kernel forced."""
    if current_device().arch != (9, 0):
        pytest.skip("needs compute capability 9.0")
    with kernel(LINES):
        yield cuda_ops


@cases(CASES)
@SIXTEEN
def test_whole_numbers_give_the_bits_of_the_definition(lines, case, storage, rng):
    exact(lines, case, storage, rng)
    rectified(lines, case, storage, rng)


@cases(CASES)
@SIXTEEN
def test_the_output_equals_the_definition_wherever_arrays_lie(lines, case, storage, rng):
    x, w, bias = draw(rng, case.x, storage), draw(rng, case.w, storage), draw(rng, case.w[0], float32)
    held = put(lines, x, w, bias)
    y = lines.to_host(lines.conv2d(*held, **case.options))
    expected = reference.conv2d(x, w, bias, **case.options)
    assert_close(y, expected, storage, terms=case.terms[0] + 1, scale=4)
    for before, after in ((0, 0), (8, 8), (1, 2)):
        other = lines.to_host(lines.conv2d(pitched(lines, x, before, after), *held[1:], **case.options))
        assert other.tobytes() == y.tobytes()


@pytest.mark.parametrize("ratio", [0.0, 1e3])
@cases(CASES)
def test_statistics_are_those_of_what_is_stored(lines, case, ratio, rng):
    check(lines, case, *operands(rng, case, bfloat16, ratio))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@cases(CASES)
def test_what_is_not_finite_stays_where_it_belongs(lines, case, value, rng):
    stays_where_it_belongs(lines, case, value, rng)


@cases(CASES)
def test_nothing_is_written_beside_the_parts(lines, case, rng, monkeypatch):
    guarded = Guarded(lines)
    monkeypatch.setattr(conv2d_stem_lines, "empty", guarded)
    check(lines, case, *operands(rng, case, bfloat16, 0.0))
    guarded.check(1)


def test_a_large_batch_equals_its_parts(lines, rng):
    """More blocks than multiprocessors, and more values than 2**31."""
    last_of_many_images(lines, Case("large", (2700, 224, 224, 3), (64, 7, 7), stride=(2, 2), padding=(3, 3)), rng)
