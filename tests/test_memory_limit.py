"""Training within a limit: kept, told, refused where it cannot be; the same bits and checkpoints as without one."""

from __future__ import annotations

import weakref
from contextlib import nullcontext

import numpy as np
import pytest

import minidl as m
from minidl import checkpoint, cli, models
from minidl.compile import CompiledStep
from minidl.cuda.device import BUILT_IN
from minidl.cuda.launch import dry_run
from minidl.dist.simulated import ImaginedCommunicator
from minidl.fusion import fuse
from minidl.memory import Infeasible, Violation, limit_memory, problem
from minidl.memory.limited import FUSIONS
from minidl.memory.placement import ALIGN
from minidl.memory.record import blank
from minidl.profile.spans import NULL_PROFILER
from minidl.step import EagerStep
from minidl.store import TensorStore
from tests.conftest import CUDA
from tests.dist.workers.limited import WAYS, network
from tests.memory_engine import DryEngine


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
    """The command, with evaluation between epochs and a last batch that is smaller; by the fusion that it is told, and,
    told none, by one of those that it chooses among."""

    def trained(name: str, *more: str) -> dict[str, np.ndarray]:
        options = ["--model", "resnet20", "--data", "synthetic", "--samples", "100", "--batch", "32", "--epochs", "2"]
        cli.main(["train", *options, "--device", "cuda", "--output", str(tmp_path / name), *more])
        return checkpoint.load(checkpoint.latest(tmp_path / name))[0]

    def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
        return one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)

    free = {how: trained(how, "--fusion", how) for how in FUSIONS}
    assert same(trained("limited", "--fusion", "auto", "--memory-limit", "60%"), free["auto"])
    assert "made again" in capsys.readouterr().out
    chosen = trained("chosen", "--memory-limit", "60%")
    assert any(same(chosen, one) for one in free.values())


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


def _train(model, memory, samples: int, count: int = 1, image: int = 32) -> None:
    optimizer, loss = m.SGD(model, 0.1, 0.9), m.SoftmaxCrossEntropy()
    if model.arena.slots:
        optimizer.update_in_backward()
    for _ in range(count):
        x = model.ops.zeros((samples, image, image, 3), model.precision.storage)
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


@pytest.mark.parametrize("gradients", WAYS)
@pytest.mark.parametrize("options", [{}, {"message_dtype": "bf16"}])
def test_the_plan_of_one_of_several_ranks_is_that_of_its_step(gradients, options, monkeypatch):
    """With batch norms over all ranks, and a dense layer whose gradient one rank alone would make in tiles."""
    if options and gradients == "momentum":
        pytest.skip("refused: rounded messages would round the momentum")
    monkeypatch.setattr("minidl.layers.linear.TILE_BYTES", 4 * 2048 * 128)
    comm = ImaginedCommunicator(2)
    with dry_run():
        model = m.Model(network(), device="cuda", group_bytes=50_000, comm=comm, **options)
        optimizer, arena = m.SGD(model, 0.1, 0.9), model.arena
        WAYS[gradients](optimizer)
        memory = limit_memory(model, 16, "70%", engine=DryEngine, least=2048)
        assert memory.script.rebuilds or memory.script.host_bytes
        own = {id(a): a.nbytes for a in (arena.master, arena.grad, arena.wire, optimizer.velocity)}
        assert sum(own.values()) <= memory.script.beside < sum(own.values()) + 1e6
        step = EagerStep(model, optimizer, m.SoftmaxCrossEntropy(comm=comm))
        for samples in (16, 16, 12):
            step(model.ops.zeros((samples, 32, 32, 3), np.float32), model.ops.zeros((samples,), np.int32))


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


def test_memory_that_is_replaced_or_released_is_free_whoever_still_holds_it(bench):
    """Both arenas at once might be more than the GPU has; and a step in the old one would run without a plan."""
    context, make = bench
    with context():
        model, old = _limited("60%", make)
        _train(model, old, 8)
        engine = weakref.ref(old.store.engine)
        made = []

        def making(*sizes):
            assert engine() is None, "given back before the new one is taken"
            made.append(make(*sizes))
            return made[-1]

        memory = limit_memory(model, 8, "70%", engine=making, least=2048)
        with pytest.raises(RuntimeError, match=r"given back; plan again: limit_memory\(...\)"):
            _train(model, old, 8)
        old.release()
        _train(model, memory, 8)
        with pytest.raises(RuntimeError, match="given back within a step"), memory.step(8):
            memory.release()
        _train(model, memory, 8)
        for _ in range(2):
            memory.release()
        assert type(model.store) is TensorStore
        with pytest.raises(RuntimeError, match="given back"):
            _train(model, memory, 8)


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


def test_what_a_layer_is_handed_but_does_not_read_is_no_source():
    """A value may carry an array that is dead by plan, where a tensor of the step lies now."""
    with dry_run():
        model = m.Model(blank(models.build("resnet50", (224, 224, 3), 1000)), device="cuda", precision="bf16")
        fuse(model, "auto")
        memory = limit_memory(model, 64, 1181116006, engine=DryEngine)
        assert memory.script.rebuilds
        _train(model, memory, 64, image=224)


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
    with pytest.raises(TypeError, match="memory: model must be a Model, got Graph"):
        limit_memory(model.graph, 8, 0.5)


def test_a_reserve_is_left_to_others():
    with dry_run():
        _, all_of_it = _limited("60%", DryEngine)
        _, memory = _limited("60%", DryEngine, reserve=1 << 20)
        assert memory.limit == all_of_it.limit
        assert memory.script.held <= memory.limit - (1 << 20) < all_of_it.script.held
        with pytest.raises(ValueError, match="reserve must be an integer of at least 0, got -1"):
            _limited("60%", DryEngine, reserve=-1)


def test_the_fusion_that_is_predicted_fastest_within_the_limit_is_taken():
    """Its steps are as planned; the limit, a part, is one of what the first plan needs."""
    with dry_run():
        alone, options = {}, {"engine": DryEngine, "least": 1 << 14}
        for how in ("auto", "elementwise", "none"):
            model = m.Model(models.build("resnet20", (32, 32, 3), 10), device="cuda", precision="bf16")
            fuse(model, how)
            limit = "40%" if not alone else alone["auto"][0]
            memory = limit_memory(model, 64, limit, **options)
            alone[how] = memory.limit, memory.predicted.total_ms
        memory = limit_memory(model, 64, "40%", fusions=("auto", "elementwise", "none"), **options)
        fastest = min(alone, key=lambda how: alone[how][1])
        assert memory.limit == alone["auto"][0] and model.fusion == fuse(model, fastest)
        _train(model, memory, 64)
        fuse(model, "gradients")
        for refused in (1000, "no"):
            with pytest.raises(ValueError, match="limit"):
                limit_memory(model, 64, refused, fusions=("auto", "none"), **options)
            assert model.fusion == fuse(model, "gradients")


class _Live:
    """A watcher of a dry run: the most bytes of arrays that were there at once."""

    def __init__(self):
        self.now = self.most = 0
        self._refs = {}

    def allocated(self, array) -> None:
        key, count = id(array), array.nbytes

        def freed(_) -> None:
            self.now -= count
            del self._refs[key]

        self._refs[key] = weakref.ref(array, freed)
        self.now += count
        self.most = max(self.most, self.now)

    def launched(self, name, arguments) -> None:
        pass


FIVE = [("resnet50", 224, 16), ("resnet152", 224, 8), ("vgg16", 224, 8), ("unet", 256, 4), ("densenet121", 224, 8)]


@pytest.mark.parametrize("fusion", ["none", "auto"])
@pytest.mark.parametrize(("name", "image", "batch"), FIVE)
def test_planned_peaks_are_those_of_the_steps_that_run(name, image, batch, fusion):
    """Without a limit, of all arrays that are alive; within one, of the arena and what lies beside it."""
    live = _Live()
    with dry_run(BUILT_IN["H200"], live):
        model = m.Model(blank(models.build(name, (image, image, 3), 2)), device="cuda", precision="bf16")
        fuse(model, fusion)
        optimizer, loss = m.SGD(model, 0.1, 0.9), m.SoftmaxCrossEntropy()
        x = model.ops.empty((batch, image, image, 3), model.precision.storage)
        labels = model.ops.empty((batch, image, image) if name == "unet" else (batch,), np.int32)

        def step() -> None:
            loss.forward(model.forward(x), labels)
            model.backward(loss.backward(optimizer.loss_scale))
            optimizer.step()

        live.most = live.now
        step()
        memory = limit_memory(model, batch, 1.0, engine=DryEngine)
        trace = memory.script.trace
        assert not [t for t in trace.tensors if t.saved and not t.given and t.touches[-1] < trace.loss], "kept unread"
        # What Python holds a moment longer than a kernel reads it.
        assert memory.need <= live.most <= 1.005 * memory.need
        floor = problem(trace, (0, 0)).floor
        try:
            memory = limit_memory(model, batch, (floor + memory.need) // 2, engine=DryEngine)
        except Infeasible as told:  # where both are close, alignment and holes may take all that is between
            assert floor < told.needed <= 1.005 * floor
            memory = limit_memory(model, batch, told.needed, engine=DryEngine)
        with memory.step():
            step()
        engine, script = memory.store.engine, memory.script
        assert script.plan.peak <= script.held <= memory.limit and script.held <= 1.01 * script.plan.peak
        assert (np.flatnonzero(engine.tags >= 0).max() + 1) * ALIGN == script.arena_bytes, "all of it is used"


def test_layers_whose_statistics_are_constants_are_planned_as_they_run():
    with dry_run():
        model = m.Model(models.build("resnet20", (32, 32, 3), 10), device="cuda", precision="bf16")
        for layer in model.layers:
            if isinstance(layer, m.BatchNorm2d):
                layer.training = False
        memory = limit_memory(model, 64, 0.6, engine=DryEngine)
        loss, labels = m.SoftmaxCrossEntropy(), model.ops.empty((64,), np.int32)
        with memory.step(64):
            loss.forward(model.forward(model.ops.empty((64, 32, 32, 3), model.precision.storage)), labels)
            model.backward(loss.backward())


@pytest.mark.parametrize("limit", [0.5, 0.8])
def test_a_tensor_is_made_again_only_of_what_still_lives(limit):
    """Of a sum that two read, the one of which goes back before the other's output is needed."""
    graph = m.Graph()
    x = graph.input((64, 64, 32))
    norm = m.BatchNorm2d(64, name="bn")(m.Conv2d(32, 64, 1, bias=False, name="c1")(x))
    y = m.Add(name="add")(norm, m.Conv2d(32, 64, 1, name="c2")(x))
    relu = m.ReLU(name="relu")(y)
    gate = m.Sigmoid()(m.Conv2d(64, 64, 1, name="c3")(m.AdaptiveAvgPool2d(1, name="pool")(y)))
    pooled = m.MaxPool2d(2)(m.Mul()(y, gate))
    both = m.Concat()(m.Flatten(name="f1")(relu), m.Flatten(name="f2")(m.AdaptiveAvgPool2d(1, name="p2")(pooled)))
    graph.output(m.Linear(both.shape[0], 5, name="l")(both))
    with dry_run(), pytest.raises(Infeasible):
        limit_memory(m.Model(graph, device="cuda", precision="bf16"), 32, limit, engine=DryEngine)
