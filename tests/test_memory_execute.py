"""Steps by plan: every kernel meets the tensors it would meet without one, and no stream runs into another."""

from __future__ import annotations

import functools
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest

import minidl as m
from minidl.cuda.launch import dry_run, observed
from minidl.fusion import PLANS, fuse
from minidl.memory import Joint, Race, pin, problem, validate, widen
from minidl.memory.execute import ScriptedStore
from minidl.memory.joint import PAIRED_GROUP
from minidl.memory.program import prove
from minidl.memory.record import record_step
from minidl.memory.script import write
from tests.conftest import CUDA
from tests.cuda_graphs import KERNEL, MEMCPY, ancestors, read
from tests.memory_cases import small_graph
from tests.memory_engine import DryEngine, Hazard, Judge

CASES = [
    ("resnet20", 32, 8, "bf16"),
    ("resnet50", 64, 2, "tf32"),
    ("unet", 64, 2, "bf16"),
    ("mixed", 16, 3, "fp32"),
    ("bare", 32, 8, "bf16"),
    ("dense", 16, 4, "bf16"),
    ("gated", 16, 4, "bf16"),
]


def _labels(name: str, image: int, batch: int) -> tuple[int, ...]:
    return (batch, image, image) if name == "unet" else (batch,)


@functools.cache
def _planned(case, fusion: str = "none"):
    """A recording, and plans for it: all moved, much made again, both, pairs of blocks, nothing."""
    name, image, batch, precision = case
    with dry_run():
        graph = _model(case, fusion).graph.unbound()
    recording = record_step(graph, batch, precision=precision)
    trace = recording.trace
    times = [1e-3 + (step.bytes + step.flop / 10) * 1e-9 for step in trace.steps]
    p, tight = problem(trace, least=2048), problem(trace, (0, 0), least=2048)
    middle = (p.floor + p.peak) // 2
    plans = [pin(p, p.floor), pin(p, middle), pin(p, p.peak), pin(tight, tight.floor)]
    joint = Joint(p, times)
    plans += [joint.solve(p.floor, 2e-8), joint.solve(middle, 2e-8), Joint(tight, times).solve(tight.floor, 1e3)]
    coarse = problem(trace, least=1 << 15)
    plans.append(Joint(coarse, times, largest=PAIRED_GROUP).solve(coarse.floor, 1e3))
    return recording, [widen(trace, plan) for plan in plans]


def _steps(model, case, engine, script, judge, count: int = 2) -> None:
    """Training steps on shapes, by a script or without one."""
    name, image, batch, _ = case
    around = nullcontext
    if script is not None:
        around = _by_script(model, script, lambda *_: engine)
        judge.again = lambda: model.store.rebuilding is not None
    optimizer, loss = m.SGD(model, 0.1, 0.9), m.SoftmaxCrossEntropy()
    x = model.ops.empty((batch, image, image, 3), model.precision.storage)
    labels = model.ops.empty(_labels(name, image, batch), np.int32)
    judge.kernels.clear()
    for _ in range(count):
        with around():
            loss.forward(model.forward(x), labels)
            model.backward(loss.backward(optimizer.loss_scale))
        optimizer.step()


def _model(case, fusion: str):
    name, image, _, precision = case
    model = m.Model(small_graph(name, image, width=16), device="cuda", precision=precision)
    fuse(model, fusion)
    return model


def _require_same_tensors(plain: list, planned: list) -> None:
    """Kernel by kernel, what lies at each argument belongs to one array of the plain run and to no other.

    An array that was made again has a second name; no name has two owners.
    """
    assert [name for name, _ in plain] == [name for name, _ in planned]
    owner: dict[int, tuple] = {}
    for (name, before), (_, now) in zip(plain, planned, strict=True):
        for old, new in zip(before, now, strict=True):
            if new is not None:
                assert old[1] == new[1] and owner.setdefault(new[0], old[0]) == old[0], f"{name} meets another tensor"


@pytest.mark.parametrize("fusion", PLANS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[3]}")
def test_every_kernel_meets_the_tensors_of_an_unplanned_step(case, fusion):
    """And no stream touches bytes that another may still be using; over two steps in the same memory."""
    _require_every_tensor(case, fusion)


@pytest.mark.parametrize("fusion", ["gradients", "bnff"])
def test_so_do_those_of_sums_that_convolutions_make_on_the_way(fusion, monkeypatch):
    """By `minidl.ReLU.ahead`: what is made again then, and moved."""
    own = _model

    def ahead(case, fusion):
        model = own(case, fusion)
        for node in model.graph.nodes:
            if isinstance(node.layer, m.ReLU):
                node.layer.ahead = True
        return model

    monkeypatch.setattr(f"{__name__}._model", ahead)
    names = _require_every_tensor(("resnet50", 64, 3, "bf16"), fusion)  # of no other test: plans are kept
    assert "conv2d_join_kernel" in names


def _require_every_tensor(case, fusion: str) -> set[str]:
    """The names of the step's kernels."""
    recording, plans = _planned(case, fusion)
    with dry_run() as log:
        model = _model(case, fusion)
        log.watcher = plain = Judge()
        _steps(model, case, None, None, plain, 1)
    kinds = set()
    for plan in plans:
        script = write(recording, plan)
        validate(recording.trace, plan, script.operations)
        engine, judge = _walked(model, case, script)
        half = len(judge.kernels) // 2
        _require_same_tensors(plain.kernels, judge.kernels[:half])
        assert judge.kernels[:half] != judge.kernels[half:], "each step makes its arrays anew"
        assert engine.drained == 0
        kinds |= {d.choice for d in plan.decisions}
    assert kinds >= {"keep", "offload"} and (case[0] in ("mixed", "bare") or "recompute" in kinds)
    return {name for name, _ in plain.kernels}


def _walked(model, case, script, count: int = 2, **options):
    with dry_run() as log:
        engine = DryEngine(script.arena_bytes, script.host_bytes, **options)
        log.watcher = judge = Judge(engine)
        _steps(model, case, engine, script, judge, count)
    return engine, judge


def test_each_wait_that_is_left_out_is_missed():
    """By the proof of the program, and by the streams' own clocks at the bytes that the kernels touch."""
    case = CASES[2]
    recording, plans = _planned(case)
    plan = max(plans, key=lambda plan: len(plan.chosen("offload")) * len(plan.chosen("recompute")))
    script = write(recording, plan)
    waits = [i for i, op in enumerate(script.operations) if op.kind == "wait"]
    missed = 0
    with dry_run():
        model = _model(case, "none")
    for number in range(len(waits)):
        try:
            _walked(model, case, script, 1, deaf=number)
        except Hazard:
            missed += 1
    # The proof counts memory that changed hands as the same wherever it lies; at real offsets some waits guard nothing.
    assert missed > len(waits) / 2 and len(waits) > 5


# -- whole steps: the same bits under any plan on a GPU; on shapes, all but the bits ----------------------------------


class _Bits:
    """Training steps on a GPU, always from the same start: losses, gradients, weights, momentum and statistics."""

    def __init__(self, case, fusion: str):
        self.case, self.model = case, _model(case, fusion)
        self.start = self.model.state_dict()

    def __call__(self, around=nullcontext, steps: int = 3) -> list[bytes]:
        name, image, batch, _ = self.case
        rng, model = np.random.default_rng(3), self.model
        model.load_state_dict(self.start)
        model.random.step = 0
        optimizer, loss = m.SGD(model, 0.05, 0.9, 1e-4), m.SoftmaxCrossEntropy()
        ops, seen = model.ops, []
        for _ in range(steps):
            images = rng.standard_normal((batch, image, image, 3), np.float32)
            x = ops.from_host(images.astype(model.precision.storage))
            labels = ops.from_host(rng.integers(0, 2, _labels(name, image, batch)).astype(np.int32))
            with around():
                totals = loss.forward(model.forward(x), labels)
                model.backward(loss.backward(optimizer.loss_scale))
            optimizer.step()
            seen += [ops.to_host(totals.array).tobytes(), ops.to_host(model.arena.grad).tobytes()]
        return seen + [a.tobytes() for a in (*model.state_dict().values(), *optimizer.state_dict().values())]


def _by_script(model, script, make):
    """``model`` runs by ``script`` from now on, within the contexts that this returns."""
    store = ScriptedStore(make(script.arena_bytes, script.host_bytes), lambda samples: script)
    model.store = store
    for layer in model.layers:
        layer.store = store
    model.observe(model.observer)
    return lambda: store.step(1)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("fusion", PLANS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[3]}")
def test_any_plan_gives_the_same_bits(case, fusion, device):
    from minidl.cuda.copies import CopyEngine

    recording, plans = _planned(case, fusion)
    train = _Bits(case, fusion)
    plain = train()
    assert plain == train(), "a step must give the same bits twice"
    for plan in dict.fromkeys(plans):
        around = _by_script(train.model, write(recording, plan), CopyEngine)
        assert train(around) == plain, plan.policy


@pytest.mark.parametrize("device", [CUDA])
def test_a_captured_step_by_plan_gives_the_same_bits(device):
    """Nothing is allocated and nobody waits: the step is one CUDA graph, copies and rebuildings included."""
    import cupy

    from minidl.cuda.copies import CopyEngine

    name, image, batch, precision = case = CASES[1]
    recording, plans = _planned(case)
    plan = max(plans, key=lambda plan: len(plan.chosen("offload")) * len(plan.chosen("recompute")))
    script = write(recording, plan)

    def trained(how: str) -> list[bytes]:
        model = _model(case, "none")
        optimizer, loss = m.SGD(model, 0.05, 0.9, 1e-4), m.SoftmaxCrossEntropy()
        rng = np.random.default_rng(3)
        x = model.ops.from_host(rng.standard_normal((batch, image, image, 3), np.float32))
        labels = model.ops.from_host(rng.integers(0, 10, (batch,)).astype(np.int32))
        around = _by_script(model, script, CopyEngine) if how != "plain" else nullcontext

        def step():
            with around():
                totals = loss.forward(model.forward(x), labels)
                model.backward(loss.backward())
            optimizer.step()
            return totals

        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        with stream:
            totals = step()
            if how == "captured":
                stream.begin_capture()
                totals = step()
                graph = stream.end_capture()
            for _ in range(3):
                if how == "captured":
                    graph.launch(stream)
                else:
                    totals = step()
            stream.synchronize()
        return [model.ops.to_host(totals.array).tobytes(), *(a.tobytes() for a in model.state_dict().values())]

    assert trained("plain") == trained("eager") == trained("captured")


@pytest.mark.parametrize("device", [CUDA])
def test_the_captured_graph_has_every_order_that_the_plan_needs(device):
    """Read back from the driver; and no edge between streams is there in vain."""
    import cupy

    from minidl.cuda.copies import CopyEngine

    name, image, batch, precision = case = CASES[2]
    recording, plans = _planned(case)
    plan = max(plans, key=lambda plan: len(plan.chosen("offload")) * len(plan.chosen("recompute")))
    script = write(recording, plan)
    model = _model(case, "none")
    engine = CopyEngine(script.arena_bytes, script.host_bytes)
    around, store = _by_script(model, script, lambda *_: engine), model.store
    optimizer, loss = m.SGD(model, 0.1), m.SoftmaxCrossEntropy()
    x = model.ops.zeros((batch, image, image, 3), model.precision.storage)
    labels = model.ops.zeros((batch, image, image), np.dtype(np.int32))
    kernels: list[tuple[str, int]] = []

    @contextmanager
    def note(stem, kernel, defines):
        updating = store.at < 0  # behind the store's part of the step
        kernels.append(None if updating else ("step", store.at))
        if store.rebuilding is not None:
            kernels[-1] = "rebuild", store.rebuilding
        yield

    def step():
        with around():
            loss.forward(model.forward(x), labels)
            model.backward(loss.backward())
        optimizer.step()

    main = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with main:
        step()
        with observed(note):
            main.begin_capture()
            step()
            graph = main.end_capture()
    nodes, edges = read(graph.graph)
    assert sum(node.kind == KERNEL for node in nodes) == len(kernels)
    order = iter(kernels)
    by_host = {engine.host_address + offset: i for i, offset in script.host.items()}
    owner = []
    for node in nodes:
        if node.kind == KERNEL:
            owner.append(next(order))
        elif node.kind == MEMCPY:
            out = node.target in by_host
            owner.append(("copy_out", by_host[node.target]) if out else ("copy_in", by_host[node.source]))
        else:
            owner.append(None)

    def proven(edges):
        before = ancestors(len(nodes), edges)
        place = {(op.kind, op.index): p for p, op in enumerate(op for op in script.operations if op.kind != "wait")}
        for t, what in enumerate(recording.trace.steps):
            if what.pass_name == "update":
                place.setdefault(("step", t), len(place))
        own: dict[tuple, list[int]] = {key: [] for key in place}
        for n, key in enumerate(owner):
            if key is not None:
                own[key].append(n)
        relation = [0] * len(place)
        for key, mine in own.items():
            for other, theirs in own.items():
                if mine and theirs and before[mine[0]] >> theirs[-1] & 1:
                    relation[place[key]] |= 1 << place[other]
        prove(recording.trace, plan, place, relation)

    proven(edges)
    stream = {"step": "compute", "rebuild": "compute", "copy_out": "out", "copy_in": "in"}
    kinds = [key and stream[key[0]] for key in owner]
    needed = 0
    for a, b in edges:
        rest = [edge for edge in edges if edge != (a, b)]
        if None in (kinds[a], kinds[b]) or kinds[a] == kinds[b] or ancestors(len(nodes), rest)[b] >> a & 1:
            continue  # within a stream, or implied by others
        needed += 1
        with pytest.raises(Race):
            proven(rest)
    assert needed > 5


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[3]}")
def test_only_results_lie_outside_the_arena(case):
    """The logits and the loss's totals, which the caller may keep; the key of dropout."""
    recording, _ = _planned(case)
    outside = [a for a in recording.allocations if a.handed_out]
    names = {recording.trace.tensors[a.tensor].name for a in outside if a.tensor is not None and a.nbytes > 64}
    assert len(names) == 1 and names.pop().partition(":")[0] == small_graph(*case[:2], width=16).output_node.name
