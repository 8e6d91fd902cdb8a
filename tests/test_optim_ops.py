"""Optimizer updates: laws of the operations of both tables."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from minidl import scalars
from minidl.precision import bfloat16, float16, float32
from tests.reference import optim as reference
from tests.tolerance import assert_close, draw

SEGMENTS = np.float32([[1.0, 1e-2, 1.0, 0.0], [0.1, 0.0, 1.0, 0.0], [2.0, 1e-4, 0.5, 0.0]])
SIZES = [0, 64, 192, 64 * 37, 64 * 1031]


def make_control(lr=0.1, momentum=0.9, loss_scale=1.0, nonfinite=0.0, good=0.0, skipped=0.0, interval=3.0):
    return np.float32([lr, momentum, loss_scale, nonfinite, good, skipped, interval, 0.0])


def arenas(rng, size):
    segment_of = rng.integers(0, len(SEGMENTS), size // 64).astype(np.int32)
    return (*(draw(rng, size, float32) for _ in range(3)), segment_of)


@pytest.mark.parametrize("kind", ["plain", "momentum", "nesterov"])
@pytest.mark.parametrize("working_type", [None, float32, bfloat16, float16])
@pytest.mark.parametrize("size", SIZES)
def test_sgd_equals_the_reference(ops, rng, size, working_type, kind):
    master, grad, momentum, segment_of = arenas(rng, size)
    momentum = None if kind == "plain" else momentum
    control = make_control(loss_scale=1024.0)
    grad *= np.float32(1024)
    w, b = ops.from_host(master), None if momentum is None else ops.from_host(momentum)
    working = None if working_type is None else ops.zeros(size, working_type)
    rest = [ops.from_host(a) for a in (segment_of, SEGMENTS, control)]
    ops.sgd_update(w, ops.from_host(grad), b, working, *rest, nesterov=kind == "nesterov")
    expected_w, expected_b = reference.sgd_update(
        master, grad, momentum, segment_of, SEGMENTS, control, kind == "nesterov"
    )
    assert_close(ops.to_host(w), expected_w, float32)
    if b is not None:
        assert_close(ops.to_host(b), expected_b, float32)
    if working is not None:
        np.testing.assert_array_equal(ops.to_host(working), ops.to_host(w).astype(working_type))


@pytest.mark.parametrize("working_type", [None, float32, bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_a_gradient_added_to_the_momentum_gives_the_bits_of_one_apart(ops, rng, size, working_type):
    master, grad, momentum, segment_of = arenas(rng, size)
    rest = [ops.from_host(a) for a in (segment_of, SEGMENTS, make_control())]
    found = []
    for added in (False, True):
        w, b = ops.from_host(master), ops.from_host(momentum)
        working = None if working_type is None else ops.zeros(size, working_type)
        if added:
            ops.sgd_begin(w, b, *rest)
            np.testing.assert_array_equal(ops.to_host(w), master)
            b = ops.from_host(ops.to_host(b) + grad)
        ops.sgd_update(w, None if added else ops.from_host(grad), b, working, *rest, nesterov=False)
        found.append([ops.to_host(a).tobytes() for a in (w, b, working) if a is not None])
    assert found[0] == found[1]


def test_begun_momentum_equals_the_reference(ops, rng):
    master, _, momentum, segment_of = arenas(rng, 64 * 37)
    b = ops.from_host(momentum)
    ops.sgd_begin(ops.from_host(master), b, *(ops.from_host(a) for a in (segment_of, SEGMENTS, make_control())))
    _, expected = reference.sgd_update(master, 0 * master, momentum, segment_of, SEGMENTS, make_control(), False)
    assert_close(ops.to_host(b), expected, float32)


@pytest.mark.parametrize("kind", ["plain", "nesterov"])
def test_no_gradient_needs_plain_momentum(ops, rng, kind):
    master, _, momentum, segment_of = (ops.from_host(a) for a in arenas(rng, 64))
    with pytest.raises(ValueError, match="grad must be an array without momentum or with nesterov, got None"):
        ops.sgd_update(
            master, None, None if kind == "plain" else momentum, None, segment_of, ops.from_host(SEGMENTS),
            ops.from_host(make_control()), nesterov=kind == "nesterov",
        )  # fmt: skip


def test_several_steps_equal_the_reference(ops, rng):
    master, _, _, segment_of = arenas(rng, 256)
    momentum, control = np.zeros(256, np.float32), make_control()
    w, b = ops.from_host(master), ops.from_host(momentum)
    rest = [ops.from_host(a) for a in (segment_of, SEGMENTS, control)]
    expected_w, expected_b = master, momentum
    for _ in range(10):
        grad = draw(rng, 256, float32)
        ops.sgd_update(w, ops.from_host(grad), b, None, *rest, nesterov=False)
        expected_w, expected_b = reference.sgd_update(
            expected_w, grad, expected_b, segment_of, SEGMENTS, control, False
        )
    assert_close(ops.to_host(w), expected_w, float32, terms=10)
    assert_close(ops.to_host(b), expected_b, float32, terms=10)


@pytest.mark.parametrize("working_type", [float32, bfloat16])
def test_an_overflow_changes_nothing(ops, rng, working_type):
    master, grad, momentum, segment_of = arenas(rng, 640)
    grad[17] = np.inf
    working = draw(rng, 640, working_type)
    w, g, b, v = (ops.from_host(a) for a in (master, grad, momentum, working))
    rest = [ops.from_host(a) for a in (segment_of, SEGMENTS, make_control(nonfinite=1.0))]
    ops.sgd_update(w, g, b, v, *rest, nesterov=False)
    for array, before in ((w, master), (b, momentum), (v, working)):
        np.testing.assert_array_equal(ops.to_host(array), before)


def test_sgd_on_a_slice_leaves_the_rest_of_the_arena(ops, rng):
    master, grad, momentum, segment_of = arenas(rng, 320)
    w, g, b = (ops.from_host(a) for a in (master, grad, momentum))
    part = slice(64, 192)
    rest = [ops.from_host(a) for a in (SEGMENTS, make_control())]
    ops.sgd_update(w[part], g[part], b[part], None, ops.from_host(segment_of)[1:3], *rest, nesterov=True)
    expected, _ = reference.sgd_update(
        master[part], grad[part], momentum[part], segment_of[1:3], SEGMENTS, make_control(), True
    )
    after = ops.to_host(w)
    assert_close(after[part], expected, float32)
    np.testing.assert_array_equal(np.delete(after, np.r_[part]), np.delete(master, np.r_[part]))


@pytest.mark.parametrize("size", [64, 64 * 999])
def test_find_nonfinite_sees_every_place(ops, rng, size):
    grad = draw(rng, size, float32, scale=1e30)
    grad[:3] = [np.finfo(np.float32).max, np.finfo(np.float32).tiny / 4, -0.0]
    control = ops.from_host(make_control(nonfinite=1.0))
    ops.find_nonfinite(ops.from_host(grad), control)
    assert ops.to_host(control)[3] == 0
    for at in (0, 1, 31, 63, size // 2 + 1, size - 1):
        for value in (np.nan, np.inf, -np.inf):
            bad = grad.copy()
            bad[at] = value
            ops.find_nonfinite(ops.from_host(bad), control)
            assert ops.to_host(control)[3] == 1
    np.testing.assert_array_equal(np.delete(ops.to_host(control), 3), np.delete(make_control(), 3))


def test_find_nonfinite_in_nothing(ops):
    control = ops.from_host(make_control(nonfinite=1.0))
    ops.find_nonfinite(ops.zeros(0, float32), control)
    assert ops.to_host(control)[3] == 0


def test_loss_scale_follows_the_reference(ops, rng):
    expected = make_control(loss_scale=2.0**22)
    control = ops.from_host(expected)
    for step in range(60):
        nonfinite = np.float32(rng.random() < (0.05 if step < 30 else 0.9))
        expected[3] = nonfinite
        here = ops.to_host(control)
        here[3] = nonfinite
        control = ops.from_host(here)
        ops.update_loss_scale(control)
        expected = reference.update_loss_scale(expected)
        np.testing.assert_array_equal(ops.to_host(control), expected)


@pytest.mark.parametrize("loss_scale, nonfinite, after", [(2.0**24, 0.0, 2.0**24), (1.0, 1.0, 1.0), (1.5, 1.0, 1.0)])
def test_loss_scale_stays_within_bounds(ops, loss_scale, nonfinite, after):
    control = ops.from_host(make_control(loss_scale=loss_scale, nonfinite=nonfinite, interval=1.0))
    ops.update_loss_scale(control)
    assert ops.to_host(control)[2] == after


def test_kernels_find_the_scalars_where_they_lie():
    """Names differ where a variant's macro has one."""
    header = (Path(scalars.__file__).parent / "cuda" / "scalars.cuh").read_text()
    named = {"LEARNING_RATE": "LR", "MOMENTUM_FACTOR": "MOMENTUM"}
    kinds = [[named.get(name, name) for name in kind.split(", ")] for kind in re.findall(r"enum { (.*) };", header)]
    assert len(kinds) == 2 and max(map(len, kinds)) <= scalars.SIZE
    for kind in kinds:
        assert [getattr(scalars, name) for name in kind] == list(range(len(kind)))
    assert {*sum(kinds, []), "SIZE"} == {name for name in vars(scalars) if name.isupper()}
