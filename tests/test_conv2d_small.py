"""Fully connected layers of few rows and channels, forced on their own kernel at the edges of what it takes.

On whole numbers nothing is rounded, so every bit is that of the definition, whatever the order of a sum.
"""

from __future__ import annotations

import pytest

from minidl import models
from minidl.bench.conv_tuning import of_network
from minidl.cuda.convolution import conv2d_small
from minidl.cuda.convolution.conv2d_choice import options
from minidl.cuda.convolution.conv2d_family import family
from minidl.cuda.device import BUILT_IN
from minidl.precision import bfloat16, float16, float32
from tests.convolutions import (
    EVERY,
    Case,
    cases,
    equals_definition,
    obeys,
    plan_of,
    stems_of,
    three,
)


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


# ------------------------------------------------------------------------------------------------- plans, without a GPU


def test_it_is_taken_where_rows_are_few_and_channels_fill_no_vector():
    for dtype in (bfloat16, float16, float32):
        assert stems_of(_case(128, 480, 20), dtype, "A100") == ["conv2d_small"] * 3
    assert stems_of(_case(128, 480, 20), bfloat16) == ["conv2d_small"] * 3
    assert stems_of(_case(128, 10, 240), bfloat16) == ["conv2d_small"] * 3
    for other in (
        _case(128, 1152, 48),  # Hopper's kernels fetch them as they are
        _case(1025, 480, 20),
        _case(1000, 1001, 1001),
        Case("pixels", (128, 2, 2, 480), (20, 1, 1)),
        Case("groups", (128, 1, 1, 480), (20, 1, 1), groups=2),
    ):
        assert "conv2d_small" not in stems_of(other, bfloat16), other.name
    assert "conv2d_small" not in stems_of(_case(128, 480, 20), float32, tf32=1), "its products are exact"


def test_a_network_with_gates_uses_no_tiles_for_them():
    graph, device = models.build("efficientnet_b0", (224, 224, 3), 1000), BUILT_IN["H200"]
    asked = [question for question in of_network(graph, 128, "bf16", device) if question.conv.pixels == 128]
    families = [options(question, device)[0].family for question in asked]
    assert set(families) == {"small", "hopper"} and families.count("small") == 30


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
def test_laws_of_single_convolutions(small, case, storage, rng, monkeypatch):
    """Rows and columns beyond the last are read again, and dropped."""
    obeys(small, case, storage, rng, three, monkeypatch)


@cases(LARGE)
@EVERY
def test_equals_definition(small, case, storage, rng):
    equals_definition(small, case, storage, rng, three)
