"""Steps by plan: every kernel meets the tensors it would meet without one, and no stream runs into another."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import minidl as m
from minidl import models
from minidl.cuda.launch import dry_run
from minidl.fusion import fuse
from minidl.memory import Infeasible, Joint, limit_memory, pin, problem, validate, widen
from minidl.memory.arena import Piece, pack, require_apart
from minidl.memory.execute import ScriptedStore
from minidl.memory.program import Operation
from minidl.memory.record import record_step
from minidl.memory.script import write
from tests.conftest import CUDA
from tests.memory_engine import DryEngine, Hazard, Judge

CASES = [("resnet20", 32, 8, "bf16"), ("resnet50", 64, 2, "tf32"), ("unet", 64, 2, "bf16"), ("mixed", 16, 3, "fp32")]


def _graph(name: str, image: int) -> m.Graph:
    """A library model, a narrow U-Net, or a network with what those lack: dropout, a view, a dense join."""
    if name == "unet":
        return models.build(name, (image, image, 3), 2, width=16, depth=3)
    if name != "mixed":
        return models.build(name, (image, image, 3), 10)
    graph = m.Graph()
    x = graph.input((image, image, 3))
    y = m.ReLU(name="r1")(m.Conv2d(3, 8, 3, padding=1, name="c1")(x))
    z = m.Dropout(0.3, name="d1")(m.Conv2d(8, 8, 3, padding=1, name="c2")(y))
    y = m.MaxPool2d(2, name="p1")(m.BatchNorm2d(16, name="b1")(m.Concat(name="cat")(y, z)))
    y = m.Linear(16 * (image // 2) ** 2, 32, name="l1")(m.Flatten(name="f")(y))
    return graph.output(m.Linear(32, 10, name="l2")(m.Dropout(0.5, name="d2")(m.ReLU(name="r2")(y))))


def _labels(name: str, image: int, batch: int) -> tuple[int, ...]:
    return (batch, image, image) if name == "unet" else (batch,)


@functools.cache
def _planned(case, fusion: str = "none"):
    """A recording, and plans for it: all moved, much made again, both, nothing."""
    name, image, batch, precision = case
    graph = _graph(name, image)
    with dry_run():
        fuse(m.Model(graph, device="cuda", precision=precision), fusion)
    deferred = {layer.name: layer.deferred for layer in graph.layers if hasattr(layer, "deferred")}
    graph = _graph(name, image)
    for layer in graph.layers:
        layer.deferred = deferred.get(layer.name, False)
    recording = record_step(graph, batch, precision=precision)
    trace = recording.trace
    plans = []
    for window in ((1, 1), (0, 0)):
        p = problem(trace, window, least=2048)
        middle = (p.floor + p.peak) // 2
        plans += [pin(p, p.floor), pin(p, middle), pin(p, p.peak)]
        joint = Joint(p, [1e-3 + (step.bytes + step.flop / 10) * 1e-9 for step in trace.steps])
        for limit in (p.floor, middle):
            plans += [joint.solve(limit, price) for price in (1e-9, 2e-8, 1e3)]
    return recording, [widen(trace, plan) for plan in plans]


def _steps(model, case, engine, script, judge, count: int = 2) -> None:
    """Training steps on shapes, by a script or without one."""
    name, image, batch, _ = case
    store = ScriptedStore(engine) if script is not None else model.store
    if script is not None:
        model.store = store
        for layer in model.layers:
            layer.store = store
        model.observe(model.profiler)
        judge.again = lambda: store._rebuilding is not None
    optimizer, loss = m.SGD(model, 0.1, 0.9), m.SoftmaxCrossEntropy()
    x = model.ops.empty((batch, image, image, 3), model.precision.storage)
    labels = model.ops.empty(_labels(name, image, batch), np.int32)
    judge.kernels.clear()
    for _ in range(count):
        if script is None:
            model.backward(_backward(model, loss, x, labels, optimizer))
        else:
            with store.running(script):
                model.backward(_backward(model, loss, x, labels, optimizer))
        optimizer.step()


def _backward(model, loss, x, labels, optimizer):
    loss.forward(model.forward(x), labels)
    return loss.backward(optimizer.loss_scale)


def _model(case, fusion: str):
    name, image, _, precision = case
    model = m.Model(_graph(name, image), device="cuda", precision=precision)
    fuse(model, fusion)
    return model


def _same_tensors(plain: list, planned: list, aliases: dict) -> None:
    """Kernel by kernel the same arguments: a renaming of the plain run's arrays to the arena's, one to one."""
    assert [name for name, _ in plain] == [name for name, _ in planned]
    for (name, before), (_, now) in zip(plain, planned, strict=True):
        for old, new in zip(before, now, strict=True):
            if new is None:
                continue
            assert old[1] == new[1], name
            assert aliases.setdefault(old[0], new[0]) == new[0], f"{name} gets another tensor"


@pytest.mark.parametrize("fusion", ["none", "elementwise"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[3]}")
def test_every_kernel_meets_the_tensors_of_an_unplanned_step(case, fusion):
    recording, plans = _planned(case, fusion)
    with dry_run() as log:
        model = _model(case, fusion)
        log.watcher = plain = Judge()
        _steps(model, case, None, None, plain, 1)
    kinds = set()
    for plan in plans:
        script = write(recording, plan)
        validate(recording.trace, plan, script.operations)
        with dry_run() as log:
            model = _model(case, fusion)
            engine = DryEngine(script.arena_bytes, script.host_bytes)
            log.watcher = judge = Judge(engine)
            _steps(model, case, engine, script, judge)
            half = len(judge.kernels) // 2
        _same_tensors(plain.kernels, judge.kernels[:half], _Remade(script, engine))
        assert engine.drained == 0
        kinds |= {d.choice for d in plan.decisions}
    assert kinds >= {"keep", "offload"} and (case[0] == "mixed" or "recompute" in kinds)


class _Remade(dict):
    """Renamings in which a tensor made again may have a second name, given once."""

    def __init__(self, script, engine):
        super().__init__()
        self.left = len(script.rebuilds)

    def setdefault(self, old, new):
        if old not in self:
            self[old] = new
        elif self[old] != new and self.left:
            self.left -= 1
            self[old] = new
        return self[old]
