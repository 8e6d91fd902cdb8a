"""Fully connected layers of few rows and channels, forced on their own kernel at the edges of what it takes.

On whole numbers nothing is rounded, so every bit is that of the definition, whatever the order of a sum.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest

from minidl import models
from minidl.bench.warm import kernels_of
from minidl.cuda.convolution import conv2d_small
from minidl.cuda.convolution.conv2d_family import family
from minidl.cuda.device import BUILT_IN
from minidl.cuda.launch import dry_run
from minidl.precision import bfloat16, float16, float32
from tests.convolutions import Guarded, both, both_expected, draws, plan_of, same, weight_gradient
from tests.reference import conv2d as reference
from tests.test_conv2d_ops import Case, cases, pitched, put
from tests.tolerance import assert_close, draw, draw_integers

EVERY = pytest.mark.parametrize("storage", [bfloat16, float16, float32], ids=["bf16", "fp16", "fp32"])


def _case(rows: int, channels: int, filters: int) -> Case:
    return Case(f"{rows}x{channels}-{filters}", (rows, 1, 1, channels), (filters, 1, 1))


CASES = [
    _case(1, 1, 1), _case(3, 7, 5), _case(128, 96, 4), _case(128, 4, 96), _case(128, 480, 20), _case(128, 20, 480),
    _case(5, 672, 28), _case(33, 28, 672), _case(130, 131, 3), _case(2, 1, 300), _case(257, 64, 10),
]  # fmt: skip
LARGE = [case for case in CASES if case.x[3] * case.w[0] > 1000]


@pytest.fixture
def small(cuda_ops):
    with family("small"):
        yield cuda_ops


def _three(ops, case, x, w, dy, **some):
    """The three passes, on the host."""
    return [*both(ops, case, x, w, dy, **some), weight_gradient(ops, case, dy, x)]


# ------------------------------------------------------------------------------------------------- plans, without a GPU


def _stems(case, dtype, device="H200", **options):
    from minidl import cuda as ops

    with dry_run(BUILT_IN[device]) as log:
        x, w, dy = (ops.empty(shape, dtype) for shape in (case.x, case.w, case.y))
        ops.conv2d(x, w, **case.options, **options)
        ops.conv2d_backward_data(dy, w, case.x, **case.options, **options)
        ops.conv2d_backward_weight(dy, x, **case.options, out=ops.empty(case.w, float32), **options)
    return [launch.stem for launch in log.launches]


def test_it_is_taken_where_rows_are_few_and_channels_fill_no_vector():
    for dtype in (bfloat16, float16, float32):
        assert _stems(_case(128, 480, 20), dtype, "A100") == ["conv2d_small"] * 3
    assert _stems(_case(128, 480, 20), bfloat16) == ["conv2d_small"] * 3
    assert _stems(_case(128, 10, 240), bfloat16) == ["conv2d_small"] * 3
    for other in (
        _case(128, 1152, 48),  # Hopper's kernels fetch them as they are
        _case(1025, 480, 20),
        _case(1000, 1001, 1001),
        Case("pixels", (128, 2, 2, 480), (20, 1, 1)),
        Case("groups", (128, 1, 1, 480), (20, 1, 1), groups=2),
    ):
        assert "conv2d_small" not in _stems(other, bfloat16), other.name
    assert "conv2d_small" not in _stems(_case(128, 480, 20), float32, tf32=1), "its products are exact"


def test_a_network_with_gates_uses_no_tiles_for_them():
    graph = models.build("efficientnet_b0", (224, 224, 3), 1000)
    stems = {stem for stem, _ in kernels_of(graph, 128, "bf16", "auto", BUILT_IN["H200"])}
    assert "conv2d_small" in stems and not stems & {"conv2d", "conv2d_weight"}


@cases(CASES)
def test_the_grid_covers_every_value_and_no_sum_is_cut_finer_than_it_is_deep(case):
    conv = plan_of(case)
    for which in ("forward", "backward_data", "backward_weight"):
        planned = conv2d_small._plan(conv, 1, which, (8, 8), 0)
        facts = {name: int(planned.problem[name][0]) for name in ("rows", "columns", "depth", "slabs")}
        lanes = planned.defines["LANES"]
        assert (facts["slabs"] - 1) * conv2d_small.THREADS < facts["columns"] * lanes
        assert facts["columns"] * lanes <= facts["slabs"] * conv2d_small.THREADS
        down = planned.grid // facts["slabs"]
        assert (down - 1) * conv2d_small.ROWS < facts["rows"] <= down * conv2d_small.ROWS
        assert lanes == 1 or lanes <= facts["depth"]


# ------------------------------------------------------------------------------------------------------- on a GPU


@cases(CASES)
@EVERY
def test_whole_numbers_give_the_bits_of_the_definition(small, case, storage, rng):
    hosts = draws(rng, case, storage)
    placed, start = put(small, *hosts), draw_integers(rng, case.w, float32)
    weight = reference.conv2d_backward_weight(hosts[2], hosts[0], case.w, **case.options)
    same(_three(small, case, *placed), [*both_expected(case, *hosts, storage), weight])
    np.testing.assert_array_equal(weight_gradient(small, case, placed[2], placed[0], start), weight + start)
    some = [draw_integers(rng, case.w[0], float32), draw_integers(rng, case.x[3], float32)]
    add = draw_integers(rng, case.x, storage)
    bias, dbias, added = put(small, *some, add)
    found = both(small, case, *placed, forward_bias=bias, bias=dbias, add=added)
    same(found, both_expected(case, *hosts, storage, *some, add))
    rectified = small.to_host(small.conv2d(*placed[:2], bias, **case.options, relu=True))
    same([rectified], [np.maximum(found[0].astype(np.float64), 0.0)])


@cases(LARGE)
@EVERY
def test_equals_definition(small, case, storage, rng):
    hosts = [draw(rng, shape, storage) for shape in (case.x, case.w, case.y)]
    y, dx, dw = _three(small, case, *put(small, *hosts))
    x, w, dy = hosts
    assert_close(y, reference.conv2d(x, w, **case.options), storage, terms=case.terms[0], scale=4)
    expected = reference.conv2d_backward_data(dy, w, case.x, **case.options)
    assert_close(dx, expected, storage, terms=case.terms[1], scale=4)
    assert_close(dw, reference.conv2d_backward_weight(dy, x, case.w, **case.options), terms=case.terms[2], scale=4)


@cases(CASES)
@EVERY
def test_pitched_and_misaligned_arrays_and_repeats_give_the_bits_of_dense_ones(small, case, storage, rng):
    hosts, add = [draw(rng, shape, storage) for shape in (case.x, case.w, case.y)], draw(rng, case.x, storage)
    x, w, dy = put(small, *hosts)
    expected = _three(small, case, x, w, dy, add=small.from_host(add))
    same(_three(small, case, x, w, dy, add=small.from_host(add)), expected)
    for before, after in ((8, 8), (2, 4), (3, 2), (1, 1)):
        x, dy, other = (pitched(small, host, before, after) for host in (hosts[0], hosts[2], add))
        same(_three(small, case, x, w, dy, add=other), expected)


@cases(CASES)
@EVERY
def test_all_of_the_output_and_nothing_else_is_written(small, case, storage, rng, monkeypatch):
    hosts, guarded = draws(rng, case, storage), Guarded(small)
    placed = put(small, *hosts)
    monkeypatch.setattr(sys.modules["minidl.cuda.convolution.conv2d"], "empty", guarded)
    found = _three(small, case, *placed)
    same(found[:2], both_expected(case, *hosts, storage))
    guarded.check(2)


@cases(CASES)
@EVERY
def test_not_a_number_reaches_its_row_and_nothing_else(small, case, storage, rng):
    """Rows and columns beyond the last are read again, and dropped."""
    x, w, dy = draws(rng, case, storage)
    w = np.ones_like(w)
    for bad in (np.nan, np.inf):
        hurt, pain = x.copy(), dy.copy()
        hurt[-1, -1, -1, -1], pain[0, 0, 0, 0] = bad, bad
        with np.errstate(invalid="ignore"):
            expected = (
                *both_expected(case, hurt, w, pain, storage),
                reference.conv2d_backward_weight(pain, hurt, case.w, **case.options),
            )
        for one, other in zip(_three(small, case, *put(small, hurt, w, pain)), expected, strict=True):
            np.testing.assert_array_equal(np.isfinite(one.astype(np.float64)), np.isfinite(other.astype(np.float64)))
