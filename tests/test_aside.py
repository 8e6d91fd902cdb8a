"""Laws of weight gradients on a branch of the graph: the bits of one stream, and memory that is not taken too early."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from minidl.aside import Aside, Branch
from minidl.compile import CompiledStep
from minidl.cuda.capture import Recording, Replaying
from tests.test_compile import assert_equal_runs, make, run


def test_without_a_branch_work_is_done_at_once():
    done = []
    aside = Aside()
    aside.run(done.append, "dy", None)
    assert done == ["dy"]
    aside.join()


def test_what_is_released_on_a_branch_stays_in_use_until_it_is_joined():
    addresses = iter(range(100, 200))
    recording = Recording(lambda size: SimpleNamespace(ptr=next(addresses)))
    first = recording.malloc(8, 0)
    with recording.deferred() as freed:
        second = recording.malloc(16, 0)
        recording.free(second, 0)
    third = recording.malloc(24, 0)
    recording.free(first, 0)
    recording.settle(freed)
    recording.free(third, 0)
    assert recording.events == [8, 16, 24, ~0, ~1, ~2]

    replaying = Replaying(recording.events, [0, 8, 24], 0, 48)
    assert [replaying.malloc(size, 0) for size in (8, 16)] == [0, 8]
    with replaying.deferred() as freed:
        replaying.free(8, 0)
    assert replaying.malloc(24, 0) == 24
    replaying.free(0, 0)
    replaying.settle(freed)
    replaying.free(24, 0)
    replaying.finish()


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize(("network", "precision"), [("resnet20", "bf16"), ("unet", "bf16"), ("dropping", "fp32")])
def test_any_depth_gives_the_bits_of_eager_steps(cuda_ops, network, precision, depth, monkeypatch):
    started, own = [], Branch._start
    monkeypatch.setattr(Branch, "DEPTH", depth)
    monkeypatch.setattr(Branch, "_start", lambda self, work, dy: started.append(1) or own(self, work, dy))
    assert_equal_runs(cuda_ops, network=network, precision=precision, fuse="gradients")
    assert len(started) >= 4  # of the recorded step and of the captured one


@pytest.mark.gpu
@pytest.mark.parametrize("why", ["look", "plan"])
def test_gradients_that_somebody_looks_at_and_planned_memory_stay_on_one_stream(cuda_ops, why, monkeypatch):
    monkeypatch.setattr(Branch, "_start", lambda *_: pytest.fail("a branch"))
    step = make(CompiledStep, network="resnet20", precision="bf16")
    if why == "look":
        step.model.arena.look = lambda layer: None
    else:
        monkeypatch.setattr(type(step.model.store), "resident", False)
    assert np.isfinite([loss.loss for loss in run(step)]).all()
