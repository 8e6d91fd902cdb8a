"""bench_train.py times steps that compute the same, ours and PyTorch's, and says so where they do not."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import bench_train
from minidl import fusion
from minidl.bench.setup import Setup
from minidl.profile.results import result


def setup(precision="fp32", device="cpu"):
    return Setup("resnet20", 4, precision, device, image_size=16, classes=4)


def test_plans_of_ours_compute_the_same_and_are_told_apart():
    inside = []

    class Within:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            inside.append(self.name)

        def __exit__(self, *error):
            pass

    plan = fusion.choose(fusion.find_sites(setup().graph()), "elementwise")
    ours = bench_train.Ours(setup(), {"mine": plan}, Within)
    rows = bench_train.in_turns(ours, ["eager", "eager:mine"], (), blocks=2, steps=1)
    assert [row["arm"] for row in rows] == ["eager", "eager, mine"] and set(inside) == {"", "mine"}
    assert rows[0]["losses"] == pytest.approx(rows[1]["losses"], rel=1e-3) and len(set(rows[0]["losses"])) > 1
    ratio = np.array(rows[1]["losses"]) / rows[0]["losses"]
    assert rows[1]["losses_apart"] == {"eager": pytest.approx(np.abs(ratio - 1).max())}
    assert ours.plan("mine") is plan and ours.plan("").sites != plan.sites
    result("bench_train", rows)  # has what a result file needs


def test_arms_follow_each_other_equally_often(monkeypatch):
    """However few blocks are asked for: who draws much power leaves a slower machine to the next."""
    ran = []
    monkeypatch.setattr(bench_train, "row_ms", lambda comm, step, steps, device: ran.append(step()) or 1.0)
    monkeypatch.setattr(bench_train, "host_ms", lambda step, device: 1.0)
    monkeypatch.setattr(bench_train, "settle", lambda step, device: None)
    monkeypatch.setattr(bench_train, "check_finite", lambda name, last: None)
    monkeypatch.setattr(bench_train, "compared", lambda ours, names: ({n: [1.0] for n in names}, dict.fromkeys(names)))
    ours = bench_train.Ours(setup())
    names = ["a", "b", "c"]
    monkeypatch.setattr(ours, "arm", lambda name: (lambda: name, lambda: None))
    bench_train.in_turns(ours, names, (), blocks=2, steps=1)
    order = ran[len(names) :]  # after the first steps of each
    turns = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert all(sorted(turn) == names for turn in turns)
    follows = Counter(pair for turn in turns for pair in pairwise(turn))
    assert len(follows) == 6 and len(set(follows.values())) == 1


def test_a_plan_that_computes_something_else_is_refused(monkeypatch):
    losses = iter([[2.0, 1.0], [2.0, 1.1]])
    ours = bench_train.Ours(setup())
    monkeypatch.setattr(ours, "first_losses", lambda name: (next(losses), 0))
    with pytest.raises(AssertionError, match="eager:elementwise computes something else"):
        bench_train.compared(ours, ["eager", "eager:elementwise"])


def test_arms_of_one_plan_have_the_same_bits(monkeypatch):
    losses = iter([[2.0, 1.0], [2.0, 1.0 + 1e-12]])
    ours = bench_train.Ours(setup())
    monkeypatch.setattr(ours, "first_losses", lambda name: (next(losses), 0))
    with pytest.raises(AssertionError, match="has not the bits"):
        bench_train.compared(ours, ["eager:none", "compiled:none"])


def test_an_arm_that_diverged_while_it_was_timed_is_refused(monkeypatch):
    ours = bench_train.Ours(setup())
    ours.parts[1].set_lr(1e6)
    monkeypatch.setattr(ours, "first_losses", lambda name: ([2.0], 0))
    with pytest.raises(AssertionError, match="eager has diverged: its loss became nan"):
        bench_train.in_turns(ours, ["eager"], [], blocks=2, steps=3)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_pytorchs_step_is_ours(precision):
    """Its update in one kernel, gradients written anew and, in float16, a scaled loss: its losses fall as ours do."""
    pytest.importorskip("torch", reason="needs torch as a peer")
    rows = bench_train.in_turns(bench_train.Ours(setup(precision)), ["eager"], ["torch-eager"], blocks=2, steps=1)
    (row,) = rows
    theirs = row["peer_losses"]["torch-eager"]
    assert theirs == pytest.approx(row["losses"], rel=bench_train.TOLERANCE.get(precision, 3e-2))
    assert len(theirs) == len(row["losses"]) == bench_train.CHECKED_STEPS
    assert row["ratio_to_best_peer"] == pytest.approx(row["peers"]["torch-eager"] / row["ms"])


def test_a_peer_that_computes_something_else_is_refused(monkeypatch):
    pytest.importorskip("torch", reason="needs torch as a peer")
    from benchmarks import torch_steps

    monkeypatch.setattr(torch_steps, "LR", 1.0)
    with pytest.raises(AssertionError, match="torch-eager computes something else"):
        bench_train.in_turns(bench_train.Ours(setup()), ["eager"], ["torch-eager"], blocks=2, steps=1)


def test_every_peer_is_one_of_pytorchs_arms():
    pytest.importorskip("torch", reason="needs torch as a peer")
    from benchmarks import torch_steps

    assert set(bench_train.PEERS) == set(torch_steps.ARMS)
    assert torch_steps.WARM_UP == bench_train.CHECKED_STEPS
