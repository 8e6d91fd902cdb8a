"""Steps by plan: every kernel meets the tensors it would meet without one, and no stream runs into another."""

from __future__ import annotations

import functools
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest

import minidl as m
from minidl import checkpoint, cli, models
from minidl.compile import CompiledStep
from minidl.cuda.launch import dry_run, observed
from minidl.fusion import PLANS, fuse
from minidl.memory import Infeasible, Joint, Race, Violation, limit_memory, pin, problem, validate, widen
from minidl.memory.execute import ScriptedStore
from minidl.memory.joint import PAIRED_GROUP
from minidl.memory.limited import unbound
from minidl.memory.placement import Piece, pack
from minidl.memory.program import prove
from minidl.memory.record import record_step
from minidl.memory.script import write
from minidl.profile.spans import NULL_PROFILER
from minidl.step import EagerStep
from minidl.store import TensorStore
from tests.conftest import CUDA
from tests.cuda_graphs import KERNEL, MEMCPY, ancestors, read
from tests.memory_cases import small_graph
from tests.memory_engine import DryEngine, Hazard, Judge, require_apart

CASES = [("resnet20", 32, 8, "bf16"), ("resnet50", 64, 2, "tf32"), ("unet", 64, 2, "bf16"), ("mixed", 16, 3, "fp32")]


def _labels(name: str, image: int, batch: int) -> tuple[int, ...]:
    return (batch, image, image) if name == "unet" else (batch,)


@functools.cache
def _planned(case, fusion: str = "none"):
    """A recording, and plans for it: all moved, much made again, both, pairs of blocks, nothing."""
    name, image, batch, precision = case
    with dry_run():
        graph = unbound(_model(case, fusion).graph)
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
    assert kinds >= {"keep", "offload"} and (case[0] == "mixed" or "recompute" in kinds)


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


@pytest.mark.parametrize("device", [CUDA])
def test_compiled_steps_within_a_limit_give_the_same_bits(device):
    """`CompiledStep` captures the planned step as it is; a smaller batch in between runs eagerly."""

    def trained(limit: str | None) -> list[bytes]:
        model = m.Model(models.build("resnet20", (32, 32, 3), 10), device="cuda", precision="bf16", seed=5)
        optimizer, loss = m.SGD(model, 0.05, 0.9, 1e-4), m.SoftmaxCrossEntropy()
        memory = None if limit is None else limit_memory(model, 64, limit, least=1 << 14)
        step = (EagerStep if limit is None else CompiledStep)(model, optimizer, loss)
        rng, ops, seen = np.random.default_rng(3), model.ops, []
        for count in (64, 64, 64, 40, 64):
            images = rng.standard_normal((count, 32, 32, 3), np.float32).astype(model.precision.storage)
            labels = ops.from_host(rng.integers(0, 10, (count,)).astype(np.int32))
            seen.append(ops.to_host(step(ops.from_host(images), labels).array).reshape(-1).tobytes())
        assert memory is None or memory.script.plan.rebuilt_bytes or memory.script.plan.moved_bytes
        return seen + [array.tobytes() for array in model.state_dict().values()]

    assert trained("60%") == trained(None)


@pytest.mark.parametrize("device", [CUDA])
def test_training_within_a_limit_writes_the_same_checkpoint(device, tmp_path, capsys):
    """The command, with evaluation between epochs and a last batch that is smaller."""
    files = []
    for name, more in (("free", []), ("limited", ["--memory-limit", "60%"])):
        options = ["--model", "resnet20", "--data", "synthetic", "--samples", "100", "--batch", "32", "--epochs", "2"]
        cli.main(["train", *options, "--device", "cuda", "--output", str(tmp_path / name), *more])
        files.append(checkpoint.load(checkpoint.latest(tmp_path / name)))
    assert "made again" in capsys.readouterr().out
    (free, _), (limited, _) = files
    assert free.keys() == limited.keys()
    assert all(np.array_equal(free[key], limited[key]) for key in free)


@pytest.fixture(params=["shapes", CUDA])
def bench(request):
    """(a context to work in, what makes an engine): on shapes, or on a GPU."""
    if request.param == "shapes":
        return dry_run, DryEngine
    from minidl.cuda.copies import CopyEngine

    return nullcontext, CopyEngine


def _limited(limit, make, batch: int = 8, ring: bool = False, **options):
    model = m.Model(models.build("resnet20", (32, 32, 3), 10), device="cuda", group_bytes=50_000)
    if ring:
        m.SGD(model, 0.1, 0.9).update_in_backward()
    return model, limit_memory(model, batch, limit, engine=make, least=2048, **options)


def _train(model, memory, samples: int, count: int = 1) -> None:
    optimizer, loss = m.SGD(model, 0.1, 0.9), m.SoftmaxCrossEntropy()
    if model.arena.slots:
        optimizer.update_in_backward()
    for _ in range(count):
        x = model.ops.zeros((samples, 32, 32, 3), np.dtype(np.float32))
        labels = model.ops.zeros((samples,), np.dtype(np.int32))
        with memory.step(samples):
            loss.forward(model.forward(x), labels)
            model.backward(loss.backward())
        optimizer.step()


def test_a_limit_is_kept_and_told(bench):
    context, make = bench
    with context():
        for limit in ("60%", "75%", 20e6):
            model, memory = _limited(limit, make)
            script = memory.script
            assert script.arena_bytes + script.beside <= memory.limit
            assert memory.limit == (int(memory.need * int(limit[:-1]) / 100) if isinstance(limit, str) else limit)
            _train(model, memory, 8, 2)
            assert "made again" in memory.describe()
        assert not script.rebuilds and not script.host_bytes, "without a need nothing travels"


def test_a_limit_and_a_ring_of_gradients_go_together(bench):
    context, make = bench
    with context():
        model, memory = _limited("60%", make)
        other, with_ring = _limited("60%", make, ring=True)
        assert with_ring.need < memory.need - 0.7 * 4 * model.num_parameters
        _train(other, with_ring, 8, 2)


def test_a_smaller_batch_runs_in_the_same_memory_and_a_larger_is_refused(bench):
    context, make = bench
    with context():
        model, memory = _limited("60%", make)
        for samples in (8, 3, 8, 1):
            _train(model, memory, samples)
        assert all(s.arena_bytes <= memory.script.arena_bytes for s in memory._scripts.values())
        with pytest.raises(ValueError, match="samples must be in 0..8, got 9"):
            _train(model, memory, 9)
        with pytest.raises(RuntimeError, match="plan again"), memory.step(8):
            model.forward(model.ops.zeros((4, 32, 32, 3), np.dtype(np.float32)))
        _train(model, memory, 8)


@pytest.mark.parametrize("limit", ["30%", "60%", "80%"])
@pytest.mark.parametrize("samples", [9, 40, 48, 63])
def test_a_last_batch_of_any_size_fits_where_the_largest_moves_or_rebuilds(limit, samples):
    """Planned afresh within the limit it might move tensors though the largest moves none, or fill a wider arena."""
    with dry_run():
        model = m.Model(models.build("resnet20", (32, 32, 3), 10), device="cuda", precision="bf16")
        memory = limit_memory(model, 64, limit, engine=DryEngine, least=1 << 14)
        engine, script = memory.store.engine, memory._script_for(samples)
        assert script.arena_bytes <= engine.arena_bytes and script.host_bytes <= engine.host_bytes


def test_an_error_in_mid_step_leaves_the_store_usable(bench):
    context, make = bench
    with context():
        model, memory = _limited("60%", make)
        _train(model, memory, 8)
        layer = model.graph["layer2.1.conv1"].layer
        for method in ("compute", "backward_data"):

            def fail(*args, **kwargs):
                raise FloatingPointError("on purpose")

            setattr(layer, method, fail)
            with pytest.raises(FloatingPointError):
                _train(model, memory, 8)
            delattr(layer, method)
            _train(model, memory, 8)
        with memory.step(8):
            model.forward(model.ops.zeros((8, 32, 32, 3), np.dtype(np.float32)))  # and no backward pass
        _train(model, memory, 8)
        model.eval()
        assert model.forward(model.ops.zeros((20, 32, 32, 3), np.dtype(np.float32))).shape == (20, 10)


def test_a_plan_made_before_is_taken_and_another_limit_replaces_it(bench):
    context, make = bench
    with context():
        model, memory = _limited("60%", make)
        plan = memory.script.plan
        again = limit_memory(model, 8, "60%", plan=plan, least=2048, engine=make)
        assert again.script.plan == plan and model.store is again.store
        _train(model, again, 8)
        with pytest.raises(ValueError, match="plan must be one for this model, batch and GPU"):
            limit_memory(model, 7, "60%", plan=plan, least=2048, engine=make)
        with pytest.raises(Violation, match="over the limit"):
            limit_memory(model, 8, "40%", plan=plan, least=2048, engine=make)
        _train(model, again, 8)
        again.release()
        assert type(model.store) is TensorStore and model.profiler is NULL_PROFILER
        model.forward(model.ops.zeros((3, 32, 32, 3), np.dtype(np.float32)))
        assert model.store.saved_bytes


def test_a_step_that_is_not_the_planned_one_is_refused(bench):
    context, make = bench
    with context():
        model, memory = _limited("60%", make)
        fuse(model, "elementwise")
        with pytest.raises(RuntimeError, match=r"plan again: limit_memory\(...\)"):
            _train(model, memory, 8)
        fuse(model, "none")
        _train(model, memory, 8)
        with pytest.raises(RuntimeError, match="a step within a step"), memory.step(8), memory.step(8):
            pass


def test_limits_that_cannot_be_are_refused():
    with dry_run():
        with pytest.raises(Infeasible, match="alone needs .* smallest feasible limit is"):
            _limited("5%", DryEngine)
        _, memory = _limited(1.0, DryEngine)
        floor = problem(memory.script.trace, (0, 0), 2048).floor
        with pytest.raises(Infeasible) as told:
            _limited(floor - 1, DryEngine)
        _, memory = _limited(told.value.needed, DryEngine)
        assert memory.script.arena_bytes + memory.script.beside <= told.value.needed
        with pytest.raises(ValueError, match="host memory must be at least .*, got '1.0 KiB'"):
            _limited("60%", DryEngine, host_limit=1024, rebuild=False)
        with pytest.raises(ValueError, match="limit must be above 0"):
            _limited("no", DryEngine)
    model = m.Model(models.build("resnet20", (32, 32, 3), 10))
    with pytest.raises(ValueError, match="model must be on a GPU, got 'one on the cpu'"):
        limit_memory(model, 8, 0.5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[3]}")
def test_only_results_lie_outside_the_arena(case):
    """The logits and the loss's totals, which the caller may keep; the key of dropout."""
    recording, _ = _planned(case)
    outside = [a for a in recording.allocations if a.handed_out]
    names = {recording.trace.tensors[a.tensor].name for a in outside if a.tensor is not None and a.nbytes > 64}
    assert len(names) == 1 and names.pop().partition(":")[0] == small_graph(*case[:2], width=16).output_node.name


def test_placements_never_overlap(rng):
    tight = []
    for _ in range(60):
        count = int(rng.integers(1, 60))
        begin = rng.integers(0, 40, count)
        end = begin + rng.integers(0, 20, count)
        sizes = rng.integers(0, 5000, count)
        pieces = [Piece(int(s), int(b), int(e)) for s, b, e in zip(sizes, begin, end, strict=True)]
        offsets, total = pack(pieces)
        require_apart(pieces, offsets, total)
        held = [sum(-(-p.bytes // 512) * 512 for p in pieces if p.begin <= t <= p.end) for t in range(60)]
        assert total >= max(held)
        tight.append(total / max(max(held), 1))
    assert np.median(tight) < 1.1


def test_a_planted_overlap_is_found():
    pieces = [Piece(1000, 0, 3), Piece(1000, 2, 5)]
    with pytest.raises(ValueError, match="same bytes at the same time"):
        require_apart(pieces, [0, 512], 2048)
    with pytest.raises(ValueError, match="of an arena of 1536"):
        require_apart(pieces, [0, 1024], 1536)
    require_apart([Piece(1000, 0, 1), Piece(1000, 2, 5)], [0, 0], 1024)
