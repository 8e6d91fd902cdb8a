"""Any plan gives the same bits: whole training steps with tensors moved to the host and back."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import minidl as m
from minidl import models
from minidl.memory import Joint, PlannedStore, Trace, Violation, best, pin, problem, record
from minidl.memory.policies import vdnn
from minidl.store import TensorStore
from tests.memory_cases import real_trace, small_graph

NETWORKS = [("resnet20", 32, 4, "fp32"), ("resnet20", 32, 4, "bf16"), ("unet", 32, 2, "fp32"), ("mixed", 16, 3, "fp32")]


def _trace(name: str, image: int, batch: int, precision: str) -> Trace:
    return record(small_graph(name, image), batch, precision=precision)


def _train(name: str, image: int, batch: int, precision: str, store: TensorStore | None, steps: int = 2) -> list[bytes]:
    """Losses, gradients, weights and statistics of some steps, as bytes; dropout and momentum included."""
    rng = np.random.default_rng(3)
    classes = 2 if name == "unet" else 10
    model = m.Model(small_graph(name, image), precision=precision, seed=5, store=store)
    optimizer, loss = m.SGD(model, 0.05, 0.9, 1e-4), m.SoftmaxCrossEntropy()
    seen = []
    for _ in range(steps):
        x = rng.standard_normal((batch, image, image, 3), np.float32).astype(model.precision.storage)
        shape = (batch, image, image) if name == "unet" else (batch,)
        labels = rng.integers(0, classes, shape).astype(np.int32)
        totals = loss.forward(model.forward(x), labels)
        model.backward(loss.backward(optimizer.loss_scale))
        seen += [totals.array.tobytes(), model.arena.grad.tobytes()]
        optimizer.step()
    return seen + [array.tobytes() for array in model.state_dict().values()]


@pytest.mark.parametrize("case", NETWORKS, ids=lambda case: f"{case[0]}-{case[3]}")
def test_any_plan_gives_the_same_bits(case, rng):
    trace = _trace(*case)
    p = problem(trace, least=1)
    plain = _train(*case, None)
    kept = [set(rng.choice(len(p.gaps), len(p.gaps) // 2, replace=False).tolist()) for _ in range(2)]
    plans = [pin(p, p.floor), pin(p, (p.floor + p.peak) // 2), pin(p, p.peak), vdnn(p, p.peak)]
    plans += [p.plan("random", p.peak, some) for some in kept]
    for plan in plans:
        store = PlannedStore(trace, plan)
        assert _train(*case, store) == plain
        assert store.moved_out == store.moved_in == 2 * plan.moved_bytes
        assert store.held_bytes == 0 and store.saved_bytes == 0


def test_the_store_holds_what_the_plan_keeps():
    """Between the passes exactly the kept candidates and what is no candidate are on the device."""
    case = ("resnet20", 32, 4, "fp32")
    trace = _trace(*case)
    p = problem(trace, least=4096)
    saved = sum(t.bytes for t in trace.tensors if t.saved)
    for limit in (p.floor, (p.floor + p.peak) // 2, p.peak):
        plan = pin(p, limit)
        store = PlannedStore(trace, plan)
        model = m.Model(models.build("resnet20", (32, 32, 3), 10), store=store)
        y = model.forward(np.zeros((4, 32, 32, 3), np.float32))
        assert store.held_bytes == saved - plan.moved_bytes
        model.backward(np.zeros_like(y))
        assert store.held_bytes == 0 and store.peak_bytes <= saved
        model.forward(np.zeros((4, 32, 32, 3), np.float32))
        store.clear()
        assert store.held_bytes == 0


def test_a_smaller_last_batch_may_use_the_plan_and_a_larger_may_not():
    trace = real_trace("resnet20", 32, 4)
    p = problem(trace, least=4096)
    store = PlannedStore(trace, pin(p, p.floor))
    model = m.Model(models.build("resnet20", (32, 32, 3), 10), store=store)
    optimizer = m.SGD(model, 0.1)

    def step(batch: int) -> None:
        model.backward(np.zeros_like(model.forward(np.zeros((batch, 32, 32, 3), np.float32))))
        optimizer.step()

    step(4)
    step(3)
    with pytest.raises(RuntimeError, match="planned were .*; plan for the largest batch"):
        step(5)
    step(4)  # an error in mid-step leaves the store usable
    assert store.held_bytes == 0


def test_plans_that_cannot_be_carried_out_are_refused():
    trace = real_trace("resnet20", 32, 4)
    p = problem(trace, least=4096)
    limit = p.floor + (p.peak - p.floor) // 4
    rebuilt = Joint(p, [1e-9] * len(trace)).solve(limit, 1.0)
    with pytest.raises(ValueError, match="plan must be one that only keeps and moves"):
        PlannedStore(trace, rebuilt)
    plan, _ = best(p, limit, [1.0] * len(trace), rebuild=False)
    with pytest.raises(Violation, match="plan again"):
        PlannedStore(real_trace("unet", 32), plan)
    with pytest.raises(Violation):
        PlannedStore(trace, dataclasses.replace(plan, capacity=plan.peak - 1))
    with pytest.raises(ValueError, match="plan must be at most 1.0 KiB on the host, got 'one that needs"):
        PlannedStore(trace, plan, host_limit=1024)
    moving = problem(trace, least=64, state=True)
    with pytest.raises(ValueError, match="plan must be one that moves saved tensors only"):
        PlannedStore(trace, pin(moving, moving.floor))
    model = m.Model(models.build("lenet", (32, 32, 3), 10), store=PlannedStore(trace, plan))
    with pytest.raises(RuntimeError, match="which the plan's trace does not know; trace and plan again"):
        model.forward(np.zeros((2, 32, 32, 3), np.float32))
