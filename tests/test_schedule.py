"""Schedules equal their formulas at every step, and words on the command line equal the objects they name."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidl.schedule import Constant, Cosine, OneCycle, Polynomial, Step, Warmup, parse


def test_constant():
    assert {Constant(0.3)(step) for step in (0, 1, 10**9)} == {0.3}


def test_step_multiplies_at_each_milestone():
    schedule = Step(8.0, (3, 5), 0.5)
    assert [schedule(step) for step in range(7)] == [8, 8, 8, 4, 4, 2, 2]
    assert Step(0.1, ())(100) == 0.1


@given(total=st.integers(1, 10_000), lr=st.floats(0.1, 2), final=st.floats(0, 0.1))
def test_cosine_equals_its_formula_and_falls(total, lr, final):
    schedule = Cosine(lr, total, final)
    steps = sorted({0, 1, total // 3, total // 2, total - 1, total})
    values = [schedule(step) for step in steps]
    for step, value in zip(steps, values, strict=True):
        formula = math.cos(math.pi * step / (2 * total)) ** 2  # half-angle form of (1 + cos x) / 2
        assert value == pytest.approx(final + (lr - final) * formula, abs=1e-12)
    assert values[0] == pytest.approx(lr) and values == sorted(values, reverse=True)
    assert schedule(total) == schedule(total + 1) == schedule(10 * total) == pytest.approx(final)


@given(total=st.integers(1, 10_000), power=st.floats(0.5, 4), final=st.floats(0, 0.1))
def test_polynomial_equals_its_formula_and_falls(total, power, final):
    schedule = Polynomial(0.8, total, power, final)
    steps = sorted({0, 1, total // 3, total // 2, total - 1, total})
    values = [schedule(step) for step in steps]
    expected = [final + (0.8 - final) * (1 - step / total) ** power for step in steps]
    assert values == pytest.approx(expected) and values == sorted(values, reverse=True)
    assert schedule(total) == schedule(10 * total) == pytest.approx(final)


def test_one_cycle_rises_to_its_peak_and_falls():
    schedule = OneCycle(1.0, 100, 0.3, 10.0, 100.0)
    values = [schedule(step) for step in range(100)]
    assert values[0] == pytest.approx(0.1) and values[29] == max(values) == 1.0
    assert values[99] == schedule(1000) == pytest.approx(0.001)
    assert values[:30] == sorted(values[:30]) and values[29:] == sorted(values[29:], reverse=True)
    assert schedule(10) == pytest.approx(1 + (0.1 - 1) * (1 + math.cos(math.pi * 10 / 29)) / 2)


@given(total=st.integers(2, 40), rise=st.floats(0.01, 0.99))
def test_one_cycle_stays_within_its_bounds(total, rise):
    schedule = OneCycle(0.5, total, rise)
    assert all(0.5 / 25 / 1e4 - 1e-12 <= schedule(step) <= 0.5 for step in range(total + 3))


@pytest.mark.parametrize("schedule", [Constant(0.4), Step(0.4, (2, 7)), Cosine(0.4, 20)])
@pytest.mark.parametrize("start", [0.0, 0.1])
def test_warmup_is_a_line_that_meets_the_schedule(schedule, start):
    steps = 5
    warmed = Warmup(schedule, steps, start)
    values = [warmed(step) for step in range(steps + 1)]
    assert values[0] == start and values[-1] == schedule(steps)
    rises = [after - before for before, after in itertools.pairwise(values)]
    assert rises == pytest.approx([(schedule(steps) - start) / steps] * steps)
    assert all(warmed(step) == schedule(step) for step in range(steps, 30))


def test_no_warmup_is_the_schedule_itself():
    schedule = Cosine(0.1, 10)
    assert Warmup(schedule, 0)(0) == schedule(0)


def test_schedules_are_frozen_and_equal_by_value():
    assert Step(1, [1, 2]) == Step(1, (1, 2)) and hash(Step(1, [1, 2])) == hash(Step(1, (1, 2)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        Cosine(0.1, 3).final = 1


@pytest.mark.parametrize(
    "spec, expected",
    [
        ("constant", Constant(0.2)),
        ("step:30,60,80", Step(0.2, (300, 600, 800), 0.1)),
        ("step:2:0.5", Step(0.2, (20,), 0.5)),
        ("step:0.5,1", Step(0.2, (5, 10), 0.1)),
        ("cosine", Cosine(0.2, 1000, 0.0)),
        ("cosine:0.01", Cosine(0.2, 1000, 0.01)),
    ],
)
def test_words_of_the_command_line(spec, expected):
    run = {"lr": 0.2, "epochs": 100, "steps_per_epoch": 10}
    assert parse(spec, **run) == expected
    assert parse(spec, **run, warmup=2.5) == Warmup(expected, 25)
    assert parse(spec, **run, warmup=None) == Warmup(expected, 10)


def test_a_single_epoch_is_not_all_warm_up():
    assert parse("cosine", lr=0.2, epochs=1, steps_per_epoch=50, warmup=None) == Warmup(Cosine(0.2, 50), 5)


@pytest.mark.parametrize(
    "spec, words",
    [
        ("cosin", "learning-rate schedule 'cosin': expected one of the forms constant, step:30"),
        ("", "forms"),
        ("constant:1", "forms"),
        ("step", "forms"),
        ("step:", "'step:'"),
        ("step:3,2", "rising"),
        ("step:1,1", "rising"),
        ("step:-1", "milestones"),
        ("step:nan", "'step:nan'"),
        ("step:inf", "'step:inf'"),
        ("step:1:0", "gamma"),
        ("step:1:nan", "gamma"),
        ("step:1:0.1:2", "forms"),
        ("cosine:-2", "final"),
        ("cosine:x", "'cosine:x'"),
    ],
)
def test_bad_words_are_named(spec, words):
    with pytest.raises(ValueError, match=words):
        parse(spec, lr=0.2, epochs=100, steps_per_epoch=10)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Constant(-1.0), "lr"),
        (lambda: Constant(math.nan), "lr"),
        (lambda: Cosine(0.1, 0), "total_steps"),
        (lambda: Cosine(0.1, 10, -0.1), "final"),
        (lambda: Step(0.1, (1.5,)), "milestones"),
        (lambda: Step(0.1, 30), r"milestones must be a sequence of steps, such as \(30, 60\), got 30"),
        (lambda: Warmup(Constant(0.1), -1), "steps"),
        (lambda: Warmup(Constant(0.1), 3, start=-0.5), "start"),
        (lambda: parse("cosine", lr=0.1, epochs=2, steps_per_epoch=5, warmup=3), "warmup must be in"),
        (lambda: parse("cosine", lr=0.1, epochs=2, steps_per_epoch=5, warmup=2), "shorter than the run"),
        (lambda: parse("cosine", lr=-0.1, epochs=2, steps_per_epoch=5), "lr"),
    ],
)
def test_arguments_out_of_range(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("schedule", [0.1, Constant])
def test_a_warm_up_is_to_a_schedule(schedule):
    with pytest.raises(TypeError, match=r"Warmup: schedule must be a function of the step, .*; Constant\(lr\)"):
        Warmup(schedule, 5)


def test_polynomial_and_one_cycle_from_words():
    run = {"lr": 0.4, "epochs": 10, "steps_per_epoch": 7}
    assert parse("poly", **run) == Polynomial(0.4, 70)
    assert parse("poly:2:0.001", **run) == Polynomial(0.4, 70, 2.0, 0.001)
    assert parse("onecycle", **run) == OneCycle(0.4, 70)
    assert parse("onecycle:0.2", **run) == OneCycle(0.4, 70, 0.2)
    for word in ("poly:0", "poly:1:2:3", "onecycle:1", "onecycle:a"):
        with pytest.raises(ValueError, match="learning-rate schedule"):
            parse(word, **run)
