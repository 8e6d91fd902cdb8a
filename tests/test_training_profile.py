"""Profiles of a run: its rows, which steps are watched, and that nothing else changes."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

from minidl.bench.training import TrainingProfile
from minidl.profile.results import load
from minidl.profile.views import footer
from tests.test_train import final, trainer
from tests.tolerance import assert_same_arrays


def test_a_profiled_run_writes_its_layers_and_trains_to_the_same_bits(cpu_ops, tmp_path):
    watched = TrainingProfile(tmp_path / "profile.json", every=2, first=1)
    plain, profiled = trainer(), trainer(profile=watched)
    plain.fit()
    profiled.fit()
    assert_same_arrays(final(plain), final(profiled))
    content = load(watched.path)
    assert watched.written and content["setup"]["steps"] == 5, "of ten steps the second, fourth, ..."
    rows = {(row["layer"], row["pass"]) for row in content["rows"]}
    assert {("conv1", "forward"), ("fc", "backward_weight"), ("optimizer", "update"), ("step", "step")} <= rows
    assert footer(content)


def test_watched_steps_are_rare_but_the_second(cpu_ops, tmp_path):
    watched = TrainingProfile(tmp_path / "profile.json", every=50, first=5)
    kinds = []

    class Steps:
        def __init__(self, kind):
            self.kind = kind

        @contextmanager
        def step(self, **options):
            kinds.append((self.kind, watched._seen - 1))
            yield

        def read(self):
            return []

    watched._profiler, watched._around, watched._batch = Steps("watched"), Steps("plain"), 8
    model = SimpleNamespace(ops=cpu_ops)
    for i in range(130):
        with watched.step(SimpleNamespace(model=model, observe=lambda profiler: None), None if i == 55 else 8):
            pass
    assert kinds == [
        ("watched", 5), ("plain", 10), ("watched", 15), ("plain", 30), ("plain", 80), ("watched", 105),
    ], "the smaller batch is not watched"  # fmt: skip


def test_a_long_run_keeps_no_more_than_some_hundred_watched_steps(cpu_ops, tmp_path):
    watched = TrainingProfile(tmp_path / "profile.json", every=2, first=0)
    trainer_ = SimpleNamespace(model=SimpleNamespace(ops=cpu_ops), observe=lambda profiler: None)
    for _ in range(5000):
        with watched.step(trainer_, 8):
            pass
    watched._read()
    assert watched.every == 32 and 100 <= len(watched.steps) <= 204 and len(watched.plain) <= 204


def test_a_run_too_short_for_a_profile_says_so(cpu_ops, tmp_path):
    watched = TrainingProfile(tmp_path / "profile.json", every=1000)
    trainer(profile=watched).fit()
    assert not watched.written and not watched.path.exists() and "it takes 2" in watched.too_short
