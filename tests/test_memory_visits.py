"""Momentum on the host but around its update: less memory, the same bits, every wait there for a reason."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import numpy as np
import pytest

import minidl as m
from minidl import models
from minidl.compile import CompiledStep
from minidl.cuda.launch import dry_run
from minidl.dist.simulated import ImaginedCommunicator
from minidl.memory import Infeasible, Race, best, check, limit_memory, pin, problem, program, record, timeline, validate
from minidl.memory.execute import ScriptedStore
from minidl.memory.record import blank, record_step
from minidl.memory.script import write
from minidl.memory.simulate import Link
from minidl.memory.visits import candidates, last_pass, visiting
from minidl.step import EagerStep
from minidl.store import TensorStore
from tests.conftest import CUDA
from tests.memory_cases import without
from tests.memory_engine import DryEngine, Hazard, Judge

LEAST = 1 << 16


def _network() -> m.Graph:
    graph = m.Graph()
    y = m.ReLU(name="r0")(m.Conv2d(3, 8, 3, padding=1, name="conv0")(graph.input((32, 32, 3))))
    y = m.Flatten()(m.ReLU(name="r1")(m.Conv2d(8, 8, 3, padding=1, name="conv1")(y)))
    y = m.ReLU(name="r2")(m.Linear(8 * 32 * 32, 300, name="fc1")(y))
    return graph.output(m.Linear(300, 10, name="fc2")(y))


def _recording(slots: int = 1):
    return record_step(_network(), 4, slots=slots, group_bytes=0)


def _visited(recording, **options):
    return dataclasses.replace(
        recording, trace=visiting(recording.trace, candidates(recording.trace, LEAST), **options)
    )  # fmt: skip


@pytest.fixture
def small(monkeypatch):
    """Layers of these tests are large enough to be split, and to visit."""
    monkeypatch.setattr("minidl.layers.linear.TILE_BYTES", 4 * 8 * 32 * 32 * 128)
    monkeypatch.setattr("minidl.memory.visits.LEAST_VISITOR", LEAST)
    monkeypatch.setattr("minidl.memory.visits.candidates.__defaults__", (LEAST,))


def test_vgg16_needs_its_largest_momentum_no_more():
    trace = record(blank(models.build("vgg16", (224, 224, 3), 1000)), 16, precision="bf16", gradients="ring")
    numbers = candidates(trace)
    assert "classifier.0:momentum" in {trace.tensors[i].name for i in numbers}
    away = sum(trace.tensors[i].bytes for i in numbers)
    before, after = problem(trace), problem(visiting(trace, numbers))
    assert away > 400 << 20
    assert after.floor < before.floor - 0.95 * away
    times = [0.1] * len(trace)
    hurried, timed = (timeline(t, pin(problem(t), 1 << 34), times) for t in (visiting(trace, numbers),
                      visiting(trace, numbers, times, Link())))  # fmt: skip
    assert timed.exposed_ms < hurried.exposed_ms


def test_momentum_that_is_updated_behind_the_backward_pass_does_not_visit(small):
    kept = record_step(_network(), 4, group_bytes=0).trace
    assert candidates(kept, LEAST) == []
    trace = _recording().trace
    names = [trace.tensors[i].name for i in candidates(trace, LEAST)]
    assert names == ["fc1:momentum"]
    assert candidates(trace, 1 << 30) == []


def test_the_ledger_and_the_json_know_visits(small):
    trace = _visited(_recording()).trace
    (i,) = trace.visitors
    tensor = trace.tensors[i]
    again = type(trace).from_json(trace.to_json())
    assert again == trace and again.digest == trace.digest
    free = problem(_recording().trace)
    p = problem(trace)
    plan = pin(p, p.peak)
    held = np.array(check(trace, plan).device)
    inside = np.arange(len(trace))
    inside = (tensor.first <= inside) & (inside <= tensor.last)
    np.testing.assert_array_equal(held, free.usage - tensor.bytes * ~inside)
    with pytest.raises(ValueError, match="visit of fc1:momentum must be around its touches"):
        moved = dataclasses.replace(tensor, visit=(tensor.touches[0] + 1, tensor.last))
        dataclasses.replace(trace, tensors=(*trace.tensors[:i], moved, *trace.tensors[i + 1 :]))


def test_every_wait_is_needed(small):
    trace = _visited(_recording(), times_ms=[1.0] * len(_recording().trace), link=Link(1e-2, 1e-2)).trace
    p = problem(trace, least=2048)
    plan = pin(p, p.floor)
    operations = program(trace, plan)
    validate(trace, plan, operations)
    waits = [n for n, op in enumerate(operations) if op.kind == "wait"]
    assert len(waits) > 2
    for n in waits:
        with pytest.raises(Race):
            validate(trace, plan, without(operations, n))
    for kind in ("copy_in", "copy_out"):
        gone = [n for n, op in enumerate(operations) if (op.kind, op.index) == (kind, trace.visitors[0])]
        left = [op for n, op in enumerate(operations) if n not in gone and op.kind != "wait"]
        with pytest.raises(Race, match="is missing"):
            validate(trace, plan, left)
    assert operations[-1].index >= last_pass(trace)


def _walk(script, steps: int = 2, deaf: int | None = None):
    """Steps on shapes by a script; the kernels with the tensors that they meet."""
    with dry_run() as log:
        model = m.Model(_network(), device="cuda", group_bytes=0)
        optimizer, loss = m.SGD(model, 0.1, 0.9), m.SoftmaxCrossEntropy()
        optimizer.update_in_backward()
        x, labels = model.ops.zeros((4, 32, 32, 3), np.dtype("f4")), model.ops.zeros((4,), np.dtype("i4"))
        engine = DryEngine(script.arena_bytes, script.host_bytes, deaf)
        store = model.store = ScriptedStore(engine, lambda samples: script)
        for layer in model.layers:
            layer.store = store
        model.observe(model.observer)
        whole = optimizer.velocity
        place = {f"{message.name}:momentum": (message.begin, message.end) for message in model.arena.messages}

        def velocity(begin, end):
            for name, (first, last) in place.items():
                if first <= begin < last and name in script.visitors:
                    return store.visitor(name)[begin - first : end - first]
            return whole[begin:end]

        optimizer._velocity_of = velocity
        log.watcher = judge = Judge(engine)
        for _ in range(steps):
            with store.step(4):
                loss.forward(model.forward(x), labels)
                model.backward(loss.backward())
            optimizer.step()
    return engine, judge


@pytest.mark.parametrize("timed", [False, True])
def test_kernels_meet_the_visitor_and_no_stream_runs_into_another(small, timed):
    recording = _recording()
    times = [1.0] * len(recording.trace)
    visited = _visited(recording, times_ms=times, link=Link(1e-2, 1e-2)) if timed else _visited(recording)
    p = problem(visited.trace, least=2048)
    for plan in (pin(p, p.floor), pin(p, p.peak)):
        script = write(visited, plan)
        validate(visited.trace, plan, script.operations)
        engine, judge = _walk(script)
        assert engine.drained == 0
        tags = [own[2][0] for name, own in judge.kernels if name == "sgd_update" and own[2] is not None]
        assert len(tags) == 2 * 4, "three tiles and the bias in each of two steps"
        assert len(set(tags)) == 1, "always the same content, which goes to the host and comes back"
        waits = sum(call[0] == "wait" for call in engine.calls) // 2
        missed = 0
        for number in range(waits):
            try:
                _walk(script, 1, number)
            except Hazard:
                missed += 1
        assert missed >= waits / 3


def test_best_plans_around_visits(small):
    trace = _visited(_recording()).trace
    p = problem(trace, least=2048)
    plan, run = best(p, p.floor, [0.1] * len(trace))
    assert check(trace, plan).peak <= p.floor and run.total_ms >= run.bound_ms


def test_a_limit_below_what_fits_without_visits_is_met_with_them(small):
    with dry_run():
        for given in (False, True):
            model = m.Model(_network(), device="cuda", group_bytes=0)
            optimizer = m.SGD(model, 0.1, 0.9)
            optimizer.update_in_backward()
            floor = problem(record_step(_network(), 64, slots=1, group_bytes=0).trace, (0, 0), 2048).floor - (1 << 20)
            options = {"engine": DryEngine, "least": 2048, "optimizer": optimizer if given else None}
            if not given:
                with pytest.raises(Infeasible, match="too small"):
                    limit_memory(model, 64, floor, **options)
                continue
            memory = limit_memory(model, 64, floor, **options)
            assert "momentum on the host 9.4 MiB" in memory.describe()
            assert optimizer.velocity.size < 0.1 * model.arena.trainable_size
            loss = m.SoftmaxCrossEntropy()
            for samples in (64, 2, 64):
                x = model.ops.zeros((samples, 32, 32, 3), np.dtype("f4"))
                labels = model.ops.zeros((samples,), np.dtype("i4"))
                with memory.step(samples):
                    loss.forward(model.forward(x), labels)
                    model.backward(loss.backward())
                optimizer.step()
            with pytest.raises(RuntimeError, match="outside a planned step momentum is on the host"):
                loss.forward(model.forward(x), labels)
                model.backward(loss.backward())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_smaller_batches_fit_into_a_tight_limit(small, precision):
    """Their steps are shorter, so that to hide its copies momentum would be there longer: then it comes in a hurry."""
    with dry_run():
        model = m.Model(_network(), device="cuda", precision=precision, group_bytes=0)
        optimizer = m.SGD(model, 0.1, 0.9)
        optimizer.update_in_backward()
        options = {"engine": DryEngine, "least": 2048, "optimizer": optimizer}
        with pytest.raises(Infeasible) as told:
            limit_memory(model, 64, 1000, **options)
        memory = limit_memory(model, 64, told.value.needed, **options)
        assert memory.script.trace.visitors
        for samples in range(1, 64):
            with memory.step(samples):
                pass


def test_an_optimizer_without_momentum_is_planned_without(small):
    with dry_run():
        model = m.Model(_network(), device="cuda", group_bytes=0)
        optimizer = m.SGD(model, 0.1)
        optimizer.update_in_backward()
        memory = limit_memory(model, 64, 1.0, engine=DryEngine, least=2048, optimizer=optimizer)
        assert not memory.script.trace.visitors and not memory.script.trace.resident_bytes["momentum"]


def _deep() -> m.Graph:
    """`_network` over more convolutions, so that momentum of its dense layer is in the way of theirs."""
    graph = m.Graph()
    y = graph.input((32, 32, 3))
    for i in range(6):
        y = m.ReLU(name=f"r{i}")(m.Conv2d(y.shape[-1], 8, 3, padding=1, name=f"conv{i}")(y))
    y = m.ReLU(name="relu")(m.Linear(8 * 32 * 32, 300, name="fc1")(m.Flatten()(y)))
    return graph.output(m.Linear(300, 10, name="fc2")(y))


def test_a_rank_without_samples_updates_momentum_that_is_on_the_host(small):
    """One that got none of a last batch: nothing is planned for it, but sums of gradients come, and go into weights."""
    comm = ImaginedCommunicator(2)
    with dry_run() as log:
        model = m.Model(_deep(), device="cuda", group_bytes=0, comm=comm)
        optimizer, loss = m.SGD(model, 0.1, 0.9), m.SoftmaxCrossEntropy(comm=comm)
        optimizer.update_in_backward(1)
        options = {"engine": DryEngine, "least": 2048, "optimizer": optimizer}
        with pytest.raises(Infeasible) as told:
            limit_memory(model, 256, 1000, **options)
        memory = limit_memory(model, 256, told.value.needed, **options)
        (i,), engine = memory.script.trace.visitors, memory.store.engine
        step = EagerStep(model, optimizer, loss)
        log.watcher = judge = Judge(engine)
        for samples in (256, 0, 0, 7, 256):
            begin, before = len(engine.calls), len(judge.kernels)
            step(model.ops.zeros((samples, 32, 32, 3), np.dtype("f4")), model.ops.zeros((samples,), np.dtype("i4")))
            place = memory.script.host[i], memory.script.trace.tensors[i].bytes
            copies = [call[0] for call in engine.calls[begin:] if call[2:] == place]
            assert copies == ["copy_in", "copy_out"]
            met = [own[2][0] for name, own in judge.kernels[before:] if name == "sgd_update" and own[2] is not None]
            assert len(met) == 1, "the update of the large layer, in the arena"
        tags = {own[2][0] for name, own in judge.kernels if name == "sgd_update" and own[2] is not None}
        assert len(tags) == 1, "always the same content"


@pytest.mark.parametrize("device", ["shapes", CUDA])
@pytest.mark.parametrize("given", [False, True])
def test_another_limit_takes_the_momentum_along(small, device, given):
    """It is where the new plan has it, with the content that it had; the limit that was replaced releases nothing."""
    shapes = device == "shapes"
    with dry_run() if shapes else nullcontext():
        model = m.Model(_network(), device="cuda", group_bytes=0, seed=5)
        optimizer, loss = m.SGD(model, 0.05, 0.9, 1e-2), m.SoftmaxCrossEntropy()
        optimizer.update_in_backward()
        options = {"least": 2048} | ({"engine": DryEngine} if shapes else {})
        with pytest.raises(Infeasible) as told:
            limit_memory(model, 64, 1000, **options)
        tight = told.value.needed - (1 << 19)

        def step(memory) -> None:
            x = model.ops.from_host(np.random.default_rng(3).standard_normal((64, 32, 32, 3), np.float32))
            labels = model.ops.zeros((64,), np.dtype("i4"))
            with memory.step():
                loss.forward(model.forward(x), labels)
                model.backward(loss.backward())
            optimizer.step()

        first = limit_memory(model, 64, tight, optimizer=optimizer, **options)
        step(first)
        assert first.script.trace.visitors and optimizer.velocity.size < 0.1 * model.arena.trainable_size
        before = optimizer.state_dict()
        limit = tight if given else told.value.needed
        second = limit_memory(model, 64, limit, optimizer=optimizer if given else None, **options)
        after = optimizer.state_dict()
        assert bool(second.script.trace.visitors) == given
        assert (optimizer.velocity.size == model.arena.trainable_size) != given
        assert shapes or (before.keys() == after.keys() and all(np.array_equal(before[k], after[k]) for k in before))
        step(second)
        first.release()
        assert model.store is second.store
        step(second)
        second.release()
        assert optimizer.velocity.size == model.arena.trainable_size and type(model.store) is TensorStore


def test_what_cannot_visit_is_refused(small):
    with dry_run():
        model = m.Model(_network(), device="cuda")
        optimizer = m.SGD(model, 0.1, 0.9)
        with pytest.raises(ValueError, match=r"optimizer must be the model's, after update_in_backward\(\)"):
            limit_memory(model, 4, "60%", optimizer=optimizer, engine=DryEngine)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("make", [EagerStep, CompiledStep])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_bits_are_those_of_momentum_on_the_device(small, device, make, precision):
    """Also of a smaller batch in between, of a checkpoint, and when all comes back in the end."""

    def trained(visits: bool) -> dict[str, bytes]:
        model = m.Model(_network(), device="cuda", precision=precision, group_bytes=0, seed=5)
        optimizer, loss = m.SGD(model, 0.05, 0.9, 1e-2), m.SoftmaxCrossEntropy()
        optimizer.update_in_backward()
        ops, memory = model.ops, None
        rng, seen = np.random.default_rng(3), {}
        if visits:
            with pytest.raises(Infeasible) as told:
                limit_memory(model, 64, 1000, least=2048)
            memory = limit_memory(model, 64, told.value.needed - (1 << 19), least=2048, optimizer=optimizer)
            assert memory.script.trace.visitors
        step = (make if visits else EagerStep)(model, optimizer, loss)
        for i, count in enumerate((64, 64, 64, 40, 64, 64)):
            images = rng.standard_normal((count, 32, 32, 3), np.float32).astype(model.precision.storage)
            labels = ops.from_host(rng.integers(0, 10, (count,)).astype(np.int32))
            if i == 3:
                optimizer.load_state_dict(optimizer.state_dict())
            seen[f"totals {i}"] = ops.to_host(step(ops.from_host(images), labels).array).reshape(-1).tobytes()
        for when in ("planned", "released"):
            state = model.state_dict() | optimizer.state_dict()
            seen |= {f"{when} {key}": value.tobytes() for key, value in state.items()}
            if memory is not None:
                memory.release()
                assert optimizer.velocity.size == model.arena.trainable_size
                memory = None
        return seen

    assert trained(True) == trained(False)
