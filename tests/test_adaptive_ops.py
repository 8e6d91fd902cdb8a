"""Adaptive optimizers, clipping and averages: laws of the operations of both tables."""

from __future__ import annotations

import numpy as np
import pytest

from minidl.precision import bfloat16, float16, float32
from tests.reference import adaptive as reference
from tests.test_optim_ops import make_control
from tests.tolerance import assert_close, draw

# [lr_scale, weight_decay, momentum_scale, trust applies] and the chunks of each segment
SEGMENTS = np.float32([[1.0, 1e-2, 1.0, 1.0], [0.5, 0.0, 1.0, 0.0], [2.0, 1e-1, 0.5, 1.0], [1.0, 0.3, 1.0, 1.0]])
CHUNKS = [(1, 1, 1, 1), (37, 1, 400, 2), (1100, 3, 2, 5)]
EPS, SCALE, COEFFICIENT = 1e-6, 512.0, 0.02
BETAS = tuple(float(np.float32(beta)) for beta in (0.9, 0.99))  # as the record holds them


def make_record(step=0):
    record = np.float32([*BETAS, EPS, step, 0, 0, COEFFICIENT, 0])
    record[4:6] = [1 - float(b) ** step for b in record[:2]]
    return record


class Arena:
    """Random arenas of segments, the last of which has weights of zero."""

    def __init__(self, ops, rng, chunks, working_type=None, nonfinite=0.0):
        self.bounds = np.cumsum([0, *chunks]).astype(np.int32)
        n = 64 * int(self.bounds[-1])
        self.host = {name: draw(rng, n, float32) for name in ("master", "grad", "first", "second")}
        self.host["master"][64 * self.bounds[-2] :] = 0
        self.host["second"] **= 2
        self.control = make_control(lr=0.1, momentum=0.8, loss_scale=SCALE, nonfinite=nonfinite)
        scaled = self.host | {"grad": self.host["grad"] * np.float32(SCALE)}
        self.device = {name: ops.from_host(array) for name, array in scaled.items()}
        self.working = None if working_type is None else ops.zeros(n, working_type)
        segment_of = np.repeat(np.arange(len(chunks), dtype=np.int32), chunks)
        self.tables = ops.from_host(segment_of), ops.from_host(SEGMENTS)
        self.ops = ops

    def segments(self):
        for (begin, end), row in zip(zip(self.bounds[:-1], self.bounds[1:], strict=True), SEGMENTS, strict=True):
            part = slice(64 * begin, 64 * end)
            yield part, {name: array[part].astype(np.float64) for name, array in self.host.items()}, row

    def check(self, names, new):
        """That the arrays ``names`` are, segment by segment, what ``new(arrays, row)`` makes of them.

        A direction is a quotient of moments: where the second is small, weights move far, and errors with them.
        """
        made = [new(host, row) for _, host, row in self.segments()]
        for name, wanted in zip(names, zip(*made, strict=True), strict=True):
            assert_close(self.ops.to_host(self.device[name]), np.concatenate(wanted), float32)
        if self.working is not None:
            found = self.ops.to_host(self.device["master"]).astype(self.working.dtype)
            np.testing.assert_array_equal(self.ops.to_host(self.working), found)

    def scalars(self, record):
        return self.ops.from_host(self.control), self.ops.from_host(record)


def test_advance_counts_and_corrects(ops):
    control, record = make_control(), ops.from_host(make_record())
    for step in range(1, 6):
        ops.adam_advance(ops.from_host(control), record)
        np.testing.assert_allclose(ops.to_host(record), make_record(step), rtol=1e-6)
    ops.adam_advance(ops.from_host(make_control(nonfinite=1.0)), record)
    np.testing.assert_allclose(ops.to_host(record), make_record(5), rtol=1e-6)


@pytest.mark.parametrize("working_type", [None, float32, bfloat16, float16])
@pytest.mark.parametrize("chunks", CHUNKS)
def test_adamw_equals_the_reference(ops, rng, chunks, working_type):
    arena = Arena(ops, rng, chunks, working_type)
    a = arena.device
    args = a["master"], a["grad"], a["first"], a["second"], arena.working, *arena.tables
    ops.adamw_update(*args, *arena.scalars(make_record(3)))

    def new(host, row):
        return reference.adam(*host.values(), 0.1 * row[0], row[1], BETAS, EPS, 3, trust=False)

    arena.check(("master", "first", "second"), new)


@pytest.mark.parametrize("working_type", [None, bfloat16])
@pytest.mark.parametrize("chunks", CHUNKS)
def test_lamb_equals_the_reference(ops, rng, chunks, working_type):
    arena = Arena(ops, rng, chunks, working_type)
    a = arena.device
    bounds, moments, scalars = ops.from_host(arena.bounds), (a["first"], a["second"]), arena.scalars(make_record(3))
    norms = ops.lamb_moments(a["master"], a["grad"], *moments, *arena.tables, bounds, *scalars)
    assert norms.shape == (4, 2) and norms.dtype == float32
    ops.lamb_update(a["master"], *moments, arena.working, *arena.tables, norms, *scalars)

    def new(host, row):
        return reference.adam(*host.values(), 0.1 * row[0], row[1], BETAS, EPS, 3, trust=bool(row[3]))

    arena.check(("master", "first", "second"), new)


@pytest.mark.parametrize("working_type", [None, bfloat16])
@pytest.mark.parametrize("chunks", CHUNKS)
def test_lars_equals_the_reference(ops, rng, chunks, working_type):
    arena = Arena(ops, rng, chunks, working_type)
    a, scalars = arena.device, arena.scalars(make_record())
    norms = ops.segment_norms(a["master"], a["grad"], ops.from_host(arena.bounds), scalars[0])
    wanted = [[np.linalg.norm(host["master"]), np.linalg.norm(host["grad"])] for _, host, _ in arena.segments()]
    np.testing.assert_allclose(ops.to_host(norms), wanted, rtol=1e-6)
    ops.lars_update(a["master"], a["grad"], a["first"], arena.working, *arena.tables, norms, *scalars)

    def new(host, row):
        rate, decay, keep, trust = row
        arrays = host["master"], host["grad"], host["first"]
        return reference.lars(*arrays, 0.1 * rate, decay, 0.8 * keep, COEFFICIENT, bool(trust))

    arena.check(("master", "first"), new)


def test_norms_of_a_slice_begin_with_its_first_segment(ops, rng):
    arena = Arena(ops, rng, CHUNKS[1])
    a, bounds = arena.device, arena.bounds[1:4]
    part = slice(64 * bounds[0], 64 * bounds[-1])
    control = ops.from_host(arena.control)
    norms = ops.segment_norms(a["master"][part], a["grad"][part], ops.from_host(bounds), control)
    wanted = [[np.linalg.norm(h["master"]), np.linalg.norm(h["grad"])] for _, h, _ in list(arena.segments())[1:3]]
    np.testing.assert_allclose(ops.to_host(norms), wanted, rtol=1e-6)


def test_an_overflow_changes_nothing(ops, rng):
    arena = Arena(ops, rng, CHUNKS[0], bfloat16, nonfinite=1.0)
    a, scalars = arena.device, arena.scalars(make_record(2))
    before = {name: ops.to_host(array) for name, array in a.items()}
    moments, bounds = (a["first"], a["second"]), ops.from_host(arena.bounds)
    ops.adamw_update(a["master"], a["grad"], *moments, arena.working, *arena.tables, *scalars)
    norms = ops.lamb_moments(a["master"], a["grad"], *moments, *arena.tables, bounds, *scalars)
    ops.lamb_update(a["master"], *moments, arena.working, *arena.tables, norms, *scalars)
    ops.lars_update(a["master"], a["grad"], a["first"], arena.working, *arena.tables, norms, *scalars)
    for name, array in a.items():
        np.testing.assert_array_equal(ops.to_host(array), before[name])
    assert not ops.to_host(arena.working).astype(np.float32).any()


@pytest.mark.parametrize("size", [0, 64, 64 * 1031])
def test_clipping_bounds_values_and_norms(ops, rng, size):
    grad, control = draw(rng, size, float32, scale=100.0), ops.from_host(make_control(loss_scale=SCALE))
    found = ops.from_host(grad)
    ops.clip_values(found, 0.1, control)
    limit = np.float32(0.1) * np.float32(SCALE)
    np.testing.assert_array_equal(ops.to_host(found), np.clip(grad, -limit, limit))
    square = ops.gradient_square(ops.from_host(grad))
    exact = np.sum(grad.astype(np.float64) ** 2)
    assert square.dtype == np.float64 and square.shape == (1,)
    np.testing.assert_allclose(ops.to_host(square), [exact], rtol=1e-6)
    for limit in (1e6, 0.25):
        found = ops.from_host(grad)
        ops.clip_norm(found, square, limit, control)
        factor = min(1.0, limit * SCALE / exact**0.5) if size else 1.0
        np.testing.assert_allclose(ops.to_host(found), grad * factor, rtol=2e-6)


def test_the_square_of_whole_numbers_is_exact(ops, rng):
    grad = rng.integers(-3, 4, 64 * 3001).astype(np.float32)
    assert ops.to_host(ops.gradient_square(ops.from_host(grad)))[0] == np.sum(grad.astype(np.int64) ** 2)


def test_nan_stays_when_clipped_and_does_not_spread(ops):
    grad = np.ones(64, np.float32)
    grad[5] = np.nan
    control = ops.from_host(make_control())
    for clip in (
        lambda g: ops.clip_values(g, 1.0, control),
        lambda g: ops.clip_norm(g, ops.gradient_square(g), 1.0, control),
    ):
        found = ops.from_host(grad)
        clip(found)
        np.testing.assert_array_equal(ops.to_host(found), grad)


@pytest.mark.parametrize("size", [0, 64, 64 * 999])
def test_blend_equals_the_reference(ops, rng, size):
    average, x = draw(rng, size, float32), draw(rng, size, float32)
    found = ops.from_host(average)
    ops.blend(found, ops.from_host(x), 0.9)
    keep = float(np.float32(0.9))
    expected = keep * average.astype(np.float64) + (1 - keep) * x.astype(np.float64)
    assert_close(ops.to_host(found), expected, float32, scale=4.0)
