"""Convolutions on their kernels where there is no GPU, whatever comes late: every bit is the definition's.

The kernels' own source, by `tests.emulator`. Sizes that end inside of tiles; few, as a value takes a thousand
instructions of this machine for each of a GPU.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from minidl.cuda.convolution import conv2d_hopper, conv2d_weight_hopper
from minidl.cuda.convolution.conv2d_choice import options
from minidl.cuda.convolution.conv2d_family import Choice, Question, family, kernel
from minidl.cuda.device import BUILT_IN
from minidl.cuda.rows import DTYPE
from minidl.precision import bfloat16, float32
from tests import emulator, test_softmax_ops
from tests.convolutions import (
    Case,
    both,
    cases,
    draws,
    exact_on_whole_numbers,
    exact_weight_gradient,
    plan_of,
    put,
    same,
    three,
    three_expected,
)
from tests.reference import conv2d as reference
from tests.test_conv2d_masked import PAIRS, check, check_pair, operands, other_norm
from tests.test_conv2d_stem import EDGES
from tests.tolerance import draw_integers

CASES = [
    Case("1x1", (2, 9, 11, 72), (136, 1, 1)),
    Case("1x1-stride-2", (2, 9, 11, 64), (64, 1, 1), stride=(2, 2)),
    Case("3x3", (2, 7, 9, 64), (72, 3, 3), padding=(1, 1)),
    Case("stride-2", (2, 10, 9, 64), (64, 3, 3), stride=(2, 2), padding=(1, 1)),
    Case("channels-over-stages", (1, 8, 9, 136), (24, 3, 3), padding=(1, 1)),
    Case("dilated", (1, 11, 13, 16), (16, 3, 2), padding=(2, 1), dilation=(2, 2)),
]
FEW = [case for case in CASES if case.name in ("1x1", "3x3", "stride-2")]
# By wgmma and by mma.sync, windows at even values and at odd ones, in lines and in pairs.
FIRST = ("3x3-c3", "7x7-c3-stride-2", "7x11-c2-stride-4", "11x11-c3-both-parities", "1x3-c3-many-images")


@pytest.fixture(params=[0, 1])
def emulated(request):
    """The CUDA table with its convolutions on Hopper's kernels, two orders of events."""
    with emulator.table(request.param) as ops, family("hopper"):
        yield ops


@cases(CASES)
def test_outputs_and_data_gradients(emulated, case, rng):
    exact_on_whole_numbers(emulated, case, bfloat16, rng, both)
    assert "conv2d_hopper_kernel" in emulated.kernels


@cases(CASES)
def test_weight_gradients(emulated, case, rng):
    exact_weight_gradient(emulated, case, bfloat16, rng)
    assert "conv2d_weight_hopper_kernel" in emulated.kernels


# Of each family beside Hopper's, with what it launches.
FAMILIES = {
    "conv2d_kernel": ("generic", Case("odd-channels", (2, 7, 9, 20), (12, 3, 3), stride=(2, 1), padding=(1, 0))),
    "conv2d_weight_kernel": ("generic", Case("in-groups", (1, 8, 9, 24), (36, 3, 3), padding=(1, 1), groups=3)),
    "conv2d_grouped_kernel": ("grouped", Case("grouped", (2, 8, 9, 32), (32, 3, 3), padding=(1, 1), groups=4)),
    "depthwise_strip_kernel": (None, Case("depthwise", (2, 9, 11, 32), (32, 3, 3), padding=(1, 1), groups=32)),
    "conv2d_thin_narrow_kernel": ("thin", Case("thin", (2, 9, 11, 64), (7, 1, 1))),
    "conv2d_small_kernel": ("small", Case("small", (8, 1, 1, 200), (24, 1, 1))),
}


@pytest.mark.parametrize(("launched", "of"), FAMILIES.items(), ids=FAMILIES)
def test_other_families(launched, of, rng):
    with emulator.table() as ops, family(of[0]) if of[0] else nullcontext():
        exact_on_whole_numbers(ops, of[1], bfloat16, rng, three)
    assert launched in ops.kernels


@cases([case for case in EDGES if case.name in FIRST])
def test_first_layers(case, rng):
    with emulator.table() as ops, family("stem"), kernel(Choice("stem", "registers")):
        x, w, dy = draws(rng, case, bfloat16)
        same([ops.conv2d(*put(ops, x, w), **case.options)], [three_expected(case, x, w, dy, bfloat16)[0]])
        exact_weight_gradient(ops, case, bfloat16, rng)
    assert {"conv2d_stem_kernel", "conv2d_stem_weight_kernel"} <= set(ops.kernels)


@cases(FEW)
def test_statistics_on_the_way(emulated, case, rng):
    x, w, _ = draws(rng, case, bfloat16)
    y, stats = emulated.conv2d_stats(*put(emulated, x, w), **case.options)
    rows = y.astype(np.float64).reshape(-1, case.w[0])
    means, squares = stats[1:].reshape(2, -1)
    np.testing.assert_allclose(means, rows.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(squares, ((rows - rows.mean(0)) ** 2).sum(0), rtol=1e-12)


@pytest.mark.parametrize(("joined", "added"), [(False, False), (True, True)])
@cases(FEW)
def test_masks_and_sums_on_the_way(emulated, case, joined, added, rng):
    check(emulated, case, *operands(rng, case, bfloat16, joined, added))


PAIR = Case("pair", (2, 20, 21, 256), (64, 1, 1))


@pytest.mark.parametrize("choice", options(Question("backward_data", plan_of(PAIR), 1, 0), BUILT_IN["H200"]), ids=str)
def test_every_tile_that_takes_sums_for_two_batch_norms(choice, rng):
    """Others lack stages: they would wait for ever."""
    with emulator.table(1) as ops, kernel(choice):
        if ops.conv2d_takes_pair(PAIR.x, ops.empty(PAIR.w, bfloat16), **PAIR.options):
            check_pair(ops, PAIR, operands(rng, PAIR, bfloat16, True, True), other_norm(rng, PAIR, bfloat16))
        else:
            assert choice.family != "hopper" or not choice.tile.startswith(("64x64", "128x128", "256x64"))


@pytest.mark.parametrize("added", [False, True])
@cases(PAIRS)
def test_sums_for_two_batch_norms_on_the_way(emulated, case, added, rng):
    assert emulated.conv2d_takes_pair(case.x, emulated.empty(case.w, bfloat16), **case.options)
    check_pair(emulated, case, operands(rng, case, bfloat16, True, added), other_norm(rng, case, bfloat16))
    assert "conv2d_hopper_kernel" in emulated.kernels


@cases(FEW)
def test_normalising_on_the_way(emulated, case, rng, monkeypatch):
    """Output and weight gradient of an input that is nowhere in memory, also where that takes longer."""
    monkeypatch.setattr(conv2d_hopper, "normalizing_pays", lambda *facts: True)
    monkeypatch.setattr(conv2d_weight_hopper, "normalizes", lambda conv: True)
    (x, w, dy), channels = draws(rng, case, bfloat16), case.x[3]
    mean, beta = draw_integers(rng, channels, float32, limit=1), draw_integers(rng, channels, float32, limit=1)
    norm = np.stack([mean, np.ones(channels, float32)]), np.full(channels, 2, float32), beta
    seen = np.maximum((x.astype(float32) - mean) * 2 + beta, 0).astype(bfloat16)
    found, out = emulated.conv2d(*put(emulated, x, w), **case.options, norm=norm), np.full(w.shape, np.nan, float32)
    expected = reference.conv2d(seen, w, **case.options).astype(float32).astype(bfloat16)
    np.testing.assert_array_equal(found.astype(float32), expected.astype(float32))
    emulated.conv2d_backward_weight(*put(emulated, dy, x), **case.options, out=out, norm=norm)
    np.testing.assert_array_equal(out, reference.conv2d_backward_weight(dy, seen, w.shape, **case.options))
    assert set(emulated.kernels) <= {"conv2d_hopper_kernel", "conv2d_weight_hopper_kernel", "conv2d_weight_sum_kernel"}


WINDOWS = {
    "forward": Case("windows", (2, 11, 9, 64), (64, 3, 3), padding=(1, 1)),
    "backward_data": Case("windows", (2, 11, 9, 64), (64, 3, 3), padding=(1, 1)),
    "backward_weight": Case("many-windows", (4, 24, 17, 64), (64, 3, 3), padding=(1, 1)),  # more steps than stages
}


def tiles_of(which):
    """The tiles of Hopper's kernels for these windows, those with a halo among them; of single blocks, not clusters."""
    found = options(Question(which, plan_of(WINDOWS[which]), DTYPE[bfloat16], 0), BUILT_IN["H200"])
    single = [choice for choice in found if choice.family == "hopper" and choice.split[-1:] in ((), (1,))]
    return [(which, choice) for choice in single]


def windows(ops, which, choice, rng):
    """A pass by a tile, and what it should give."""
    case, place = WINDOWS[which], list(WINDOWS).index(which)
    x, w, dy = hosts = draws(rng, case, bfloat16)
    with kernel(choice):
        if which == "forward":
            found = ops.conv2d(x, w, **case.options)
        elif which == "backward_data":
            found = ops.conv2d_backward_data(dy, w, x.shape, **case.options)
        else:
            ops.conv2d_backward_weight(dy, x, **case.options, out=(found := ops.empty(w.shape, float32)))
    return found, three_expected(case, *hosts, bfloat16)[place]


@pytest.mark.parametrize(("which", "choice"), [pair for which in WINDOWS for pair in tiles_of(which)], ids=str)
def test_every_tile(which, choice, rng):
    with emulator.table(3) as ops:
        found, expected = windows(ops, which, choice, rng)
        assert ("halo" in ops.kernels[0]) == ("halo" in choice.tile)
    same([found], [expected])


# What would be wrong with a kernel: its source, a line of it, and what is there instead.
FAULTS = {
    "a-stage-is-given-up-early": (
        "conv2d_hopper",
        "if (speaks && step > 0) barrier_arrive(before);\n        before = at.emptied(ring.index);",
        "if (speaks) barrier_arrive(at.emptied(ring.index));",
    ),
    "a-stage-is-not-waited-for": (
        "conv2d_hopper",
        "                barrier_wait(at.emptied(ring.index), ring.parity ^ 1);\n",
        "",
    ),
    "rows-are-not-waited-for": (
        "conv2d_hopper",
        "    for (; step < end; ++step) {\n        barrier_wait(at.filled(ring.index), ring.parity);",
        "    for (; step < end; ++step) {",
    ),
    "no-fence-for-the-engine": (
        "conv2d_hopper",
        "DEVICE void fence_for_engine() {",
        "DEVICE void fence_for_engine() { return;",
    ),
    "a-gradient-is-given-up-early": (
        "conv2d_weight_hopper",
        "if (speaks && step > 0) barrier_arrive(before);",
        "if (speaks) barrier_arrive(at.emptied(ring.index));",
    ),
    "too-few-bytes-are-counted": (
        "conv2d_weight_hopper",
        "barrier_expect(barrier, STAGE_BYTES)",
        "barrier_expect(barrier, 64)",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault, rng):
    stem, right, wrong = FAULTS[fault]
    which = "backward_weight" if stem == "conv2d_weight_hopper" else "forward"
    choice = min((choice for _, choice in tiles_of(which)), key=lambda choice: "x4" not in choice.tile)  # few stages

    def check(seed):
        with emulator.table(seed) as ops:
            same(*[[array] for array in windows(ops, which, choice, rng)])

    assert emulator.finds(stem, right, wrong, check)


# Of kernels that laws of operations are held against (conftest.py).
SIMPLE_FAULTS = {
    "each-row-is-the-first": ("at.row(j) < rows ? at.row(j) : 0", "0"),
    "a-peak-is-forgotten": ("v[e] - peak", "v[e]"),
    "a-sum-is-forgotten": ("over_row(total)", "total"),
}


@pytest.mark.parametrize("fault", SIMPLE_FAULTS)
def test_laws_of_operations_find_faults(fault, rng):
    def check(seed):
        with emulator.table(seed) as ops:
            test_softmax_ops.test_softmax_equals_the_reference(ops, rng, bfloat16, (3, 200), "dense")
            test_softmax_ops.test_softmax_neither_overflows_nor_forgets(ops, float32)

    assert emulator.finds("softmax", *SIMPLE_FAULTS[fault], check)
