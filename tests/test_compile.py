"""Laws of compiled steps: the bits of eager ones, whatever happens between; nothing allocated, nobody waited for."""

from __future__ import annotations

import statistics
import time

import numpy as np
import pytest

import minidl as m
from minidl import data, fusion, models
from minidl.bench.training import TrainingProfile
from minidl.compile import CompiledStep, NotCapturable, obstacle
from minidl.cuda.spin import spin
from minidl.profile.results import load
from minidl.profile.spans import NULL_PROFILER, SpanRecorder
from minidl.step import EagerStep
from minidl.train import Trainer
from tests.tolerance import assert_same_arrays

f32 = np.float32
STEPS = 7
IGNORED = 2


def dropping():
    """A network whose steps differ by what they draw."""
    graph = m.Graph()
    x = m.Conv2d(3, 8, 3, padding=1, name="conv")(graph.input((8, 8, 3)))
    x = m.Dropout(0.3, name="drop1")(m.ReLU(name="relu")(m.BatchNorm2d(8, name="bn")(x)))
    x = m.Dropout(0.5, name="drop2")(m.StochasticDepth(0.4, name="depth")(m.Flatten(name="flat")(x)))
    return graph.output(m.Linear(8 * 64, 4, name="fc")(x))


NETWORKS = {
    "dropping": dropping,
    "resnet20": lambda: models.build("resnet20", (8, 8, 3), 4),
    "unet": lambda: models.build("unet", (32, 32, 3), 4),
}


def make(
    kind, network="dropping", precision="fp32", device="cuda", frozen=(), fuse="none", accumulate=1, loss=None,
    **options,
):  # fmt: skip
    model = m.Model(NETWORKS[network](), device=device, precision=precision, seed=4, frozen=frozen, **options)
    fusion.fuse(model, fuse)
    optimizer = m.SGD(model, 0.1, 0.9, 1e-3, nesterov=True)
    return kind(model, optimizer, loss or m.SoftmaxCrossEntropy(ignore_index=IGNORED), accumulate=accumulate)


def optimizer_of(step):
    return step.optimizer if isinstance(step, EagerStep) else step.eager.optimizer


def batches(step, count=STEPS, samples=6, seed=0, mixed=False):
    rng = np.random.default_rng(seed)
    model = step.model
    *image, classes = model.graph.output_node.shape
    for _ in range(count):
        x = rng.standard_normal((samples, *model.graph.nodes[0].shape)).astype(model.precision.storage)
        labels = rng.integers(0, classes, (samples, *image)).astype(np.int32)
        if mixed:
            labels = rng.dirichlet([1.0] * classes, samples).astype(np.float32)
        yield model.ops.from_host(x), model.ops.from_host(labels)


def take(step, x, labels, number, **options):
    """One step by a schedule; what its totals say."""
    optimizer_of(step).set_lr(0.1 / (1 + number))
    return step(x, labels, 6 * number, **options).read()


def state(step):
    own = {**step.model.state_dict(), **optimizer_of(step).state_dict()}
    random = step.model.random
    return own | {"random": np.array([random.step, random.first_sample])}


def assert_same(a, b):
    assert_same_arrays(state(a), state(b))


def run(step, between=lambda step, number: None, **options):
    losses = []
    for number, (x, labels) in enumerate(batches(step, **options)):
        between(step, number)
        losses.append(take(step, x, labels, number))
    return losses


def assert_equal_runs(cuda_ops, between=lambda step, number: None, samples=6, mixed=False, **options):
    steps = [make(kind, **options) for kind in (EagerStep, CompiledStep)]
    eager, compiled = (run(step, between, samples=samples, mixed=mixed) for step in steps)
    assert eager == compiled and len(set(eager)) == len(eager)
    assert_same(*steps)
    return steps[1]


def replays(compiled):
    """How many graphs the step holds."""
    return sum(unit.graph is not None for program in compiled._programs.values() for unit in program._units.values())


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("network", NETWORKS)
def test_compiled_steps_give_the_bits_of_eager_ones(network, precision, cuda_ops):
    compiled = assert_equal_runs(cuda_ops, network=network, precision=precision)
    assert replays(compiled) == 1 and compiled.batch == 6
    assert 0 < compiled.least_bytes <= compiled.memory_bytes


@pytest.mark.parametrize("plan", ["elementwise", "none"])
def test_fused_and_frozen_networks_compile(plan, cuda_ops):
    assert_equal_runs(cuda_ops, network="resnet20", precision="bf16", fuse=plan, frozen=("conv1.*", "layer1.*"))


@pytest.mark.parametrize(("accumulate", "samples", "graphs"), [(2, 6, 2), (3, 6, 3), (4, 6, 4), (9, 6, 3)])
def test_micro_batches_compile(accumulate, samples, graphs, cuda_ops):
    compiled = assert_equal_runs(cuda_ops, accumulate=accumulate, samples=samples)
    assert replays(compiled) == graphs


@pytest.mark.parametrize("accumulate", [1, 2])
def test_mixed_labels_compile(accumulate, cuda_ops):
    assert_equal_runs(cuda_ops, accumulate=accumulate, mixed=True)


@pytest.mark.parametrize("case", ["smoothed", "weighted", "squares"])
def test_micro_batches_of_other_losses_compile(case, cuda_ops):
    loss = {
        "smoothed": m.SoftmaxCrossEntropy(IGNORED, label_smoothing=0.1),
        "weighted": m.SoftmaxCrossEntropy(IGNORED, weight=[1, 2, 0.5, 3]),
        "squares": m.MSELoss(),
    }[case]
    assert_equal_runs(cuda_ops, accumulate=2, mixed=case == "squares", loss=loss)


def test_whatever_happens_between_steps_is_seen(cuda_ops):
    """Weights loaded, evaluation, a layer in another mode, another plan, an eager step, other messages."""

    def between(step, number):
        model = step.model
        if number == 3:
            other = make(EagerStep, "resnet20")
            model.load_state_dict(other.model.state_dict())
        if number == 4:
            x, labels = next(batches(step, seed=9))
            model.eval()
            totals, logits = step.evaluate(x, labels)
            found = model.ops.to_host(logits).astype(np.float32).argmax(axis=-1)
            labels_ = model.ops.to_host(labels)
            assert totals.read().correct == np.count_nonzero((found == labels_) & (labels_ != IGNORED))
            model.train()
            x, labels = next(batches(step, samples=5, seed=9))
            take(step, x, labels, number)
        if number == 5:
            model.graph["bn1"].layer.training = False
        if number == 6:
            fusion.fuse(model, "elementwise")
        if number == 9:
            fusion.fuse(model, "none")
        if number == 10:
            model.arena.connect(model.comm, 1 << 20)

    steps = [make(kind, "resnet20") for kind in (EagerStep, CompiledStep)]
    eager, compiled = (run(step, between, count=14) for step in steps)
    assert eager == compiled
    assert_same(*steps)
    assert replays(steps[1]) == 3, "the first form, the one with a constant batch norm, the one with other messages"


def test_the_batch_may_be_overwritten_as_soon_as_the_call_returns(cuda_ops):
    steps = [make(kind) for kind in (EagerStep, CompiledStep)]
    held = list(batches(steps[0]))
    pending = []
    for number, (x, labels) in enumerate(held):
        take(steps[0], x, labels, number)
        mine = cuda_ops.cast(x, x.dtype), cuda_ops.contiguous(labels).copy()
        optimizer_of(steps[1]).set_lr(0.1 / (1 + number))
        pending.append(steps[1](*mine, 6 * number))
        mine[0][...] = 0
        mine[1][...] = 0
    assert_same(*steps)
    assert len({totals.read() for totals in pending}) == STEPS, "each step keeps its own totals"


def test_a_replay_allocates_nothing_and_waits_for_nobody(cuda_ops):
    import cupy

    step = make(CompiledStep, "resnet20", accumulate=2)
    given = list(batches(step))
    for number, (x, labels) in enumerate(given):
        take(step, x, labels, number)
    x, labels = given[0]
    pool = cupy.get_default_memory_pool()
    kept = [step(x, labels)]
    cuda_ops.synchronize()
    total, used = pool.total_bytes(), pool.used_bytes()
    spin(0.3)
    began = time.perf_counter()
    for number in range(5):
        optimizer_of(step).set_lr(0.2 / (1 + number))
        kept.append(step(x, labels, number))
    seconds = time.perf_counter() - began
    assert seconds < 0.2, "the host waited for the device"
    assert (pool.total_bytes(), pool.used_bytes()) == (total, used)
    assert len({totals.read() for totals in kept}) == 6


def test_another_kind_of_batch_is_refused_as_by_an_eager_step(cuda_ops):
    step = make(CompiledStep, precision="bf16")
    for number, (x, labels) in enumerate(batches(step)):
        take(step, x, labels, number)
    for wrong in (cuda_ops.to_host(x), cuda_ops.cast(x, f32)):
        for _ in range(3):
            with pytest.raises(TypeError, match="model: x must be"):
                step(wrong, labels)
    with pytest.raises(TypeError, match="SoftmaxCrossEntropy: labels must be"):
        step(x, cuda_ops.to_host(labels))
    fusion.fold(step.model.eval())
    with pytest.raises(RuntimeError, match="is folded for inference"):
        step(x, labels)


class Counting(m.ReLU):
    """Does something new each time."""

    accepts_unfinished = False
    calls = 0

    def compute(self, x):
        self.calls += 1
        self.ops.empty(1000 * self.calls, np.float32)
        return super().compute(x)


class Reading(m.ReLU):
    """Decides on the host."""

    accepts_unfinished = False

    def compute(self, x):
        self.ops.to_host(x)
        return super().compute(x)


@pytest.mark.parametrize(
    ("kind", "words"), [(Counting, "of its record allocates 8,000 bytes"), (Reading, "is capturing")]
)
def test_a_step_that_cannot_be_captured_is_left_as_it_was(kind, words, cuda_ops):
    def special():
        graph = m.Graph()
        x = kind(name="relu")(m.Conv2d(3, 4, 3, name="conv")(graph.input((8, 8, 3))))
        return graph.output(m.Linear(144, 4, name="fc")(m.Flatten(name="flat")(m.Dropout(0.5, name="drop")(x))))

    NETWORKS["special"] = special
    steps = [make(kind, "special") for kind in (EagerStep, CompiledStep)]
    given = list(batches(steps[0]))
    for step in steps:
        for number, (x, labels) in enumerate(given):
            if step is steps[1] and number == 2:
                with pytest.raises(NotCapturable, match=words):
                    take(step, x, labels, number)
                step = step.eager
            take(step, x, labels, number)
    assert_same(*steps)


def test_a_trainer_goes_on_eagerly_and_says_why(cuda_ops, capsys):
    def special():
        graph = m.Graph()
        x = Reading(name="relu")(m.Conv2d(3, 4, 3, name="conv")(graph.input((8, 8, 3))))
        return graph.output(m.Linear(144, 4, name="fc")(m.Flatten(name="flat")(x)))

    NETWORKS["special"] = special
    runs = [trainer("special", compile=wanted) for wanted in (None, False)]
    rows = [run.fit() for run in runs]
    assert rows[0]["train_loss"] == rows[1]["train_loss"]
    assert capsys.readouterr().out.count("steps run eagerly, not as a CUDA graph: the step does not fit") == 1
    with pytest.raises(NotCapturable):
        trainer("special", compile=True).fit()


# -- training ---------------------------------------------------------------------------------------------------------


def trainer(network="dropping", device="cuda", output=None, **options):
    model = m.Model(NETWORKS[network](), device=device, seed=4)
    shape = model.graph.nodes[0].shape
    loaders = [
        data.Loader(
            data.dataset("synthetic", None, s, n=n, shape=shape, num_classes=4), 8, transfer=model.ops.uploader()
        )
        for s, n in (("train", 45), ("test", 12))
    ]
    return Trainer(
        model, m.SGD(model, 0.05, 0.9, 1e-4), m.SoftmaxCrossEntropy(), *loaders,
        schedule=lambda step: 0.05 / (1 + step / 10), epochs=3, report_every=2, output=output, **options,
    )  # fmt: skip


@pytest.mark.parametrize("accumulate", [1, 3])
def test_training_compiled_gives_the_bits_of_eager_training(accumulate, cuda_ops, tmp_path):
    """45 samples in batches of 8: each epoch ends with a smaller one; half of the run comes from a checkpoint."""
    eager = trainer(compile=False, accumulate=accumulate)
    expected = eager.fit()
    whole = trainer(compile=True, accumulate=accumulate)
    row = whole.fit()
    for name in ("train_loss", "train_accuracy", "test_loss", "test_accuracy"):
        assert row[name] == expected[name]
    first = trainer(output=tmp_path, accumulate=accumulate)
    first.epochs = 2
    first.fit()
    second = trainer(output=tmp_path, accumulate=accumulate)
    second.resume(tmp_path)
    second.fit()
    for other in (whole, second):
        assert_same_arrays(other.model.state_dict(), eager.model.state_dict())
        assert replays(other._step) > 0


@pytest.mark.parametrize(("accumulate", "first"), [(1, 0), (1, 1), (1, 2), (3, 2)])
def test_profiled_steps_are_replays_too(accumulate, first, cuda_ops, tmp_path):
    """The third step is the first replay. Those of an epoch's last, smaller batch are not watched."""
    profile = TrainingProfile(tmp_path / "profile.json", every=2, first=first)
    watched, plain = trainer(profile=profile, accumulate=accumulate), trainer(compile=False, accumulate=accumulate)
    assert watched.fit()["train_loss"] == plain.fit()["train_loss"]
    assert_same_arrays(watched.model.state_dict(), plain.model.state_dict())
    (program,) = watched._step._programs.values()
    assert len(program._watched) == accumulate
    content = load(tmp_path / "profile.json")
    assert [step.captured for step in profile.steps].count(False) == (first < 2)
    memory = [point["bytes"] for point in content["memory"]]
    assert max(memory) > min(memory) > 0
    assert {row["timing"] for row in content["rows"] if row["ms"]} == {"graph_step"}
    assert {("conv", "backward_weight"), ("optimizer", "update")} <= {(s["layer"], s["pass"]) for s in content["spans"]}
    starts = [span["start_ms"] for span in content["spans"]]
    assert starts == sorted(starts), "micro-batches follow one another"
    assert content["step"]["graph_profiling_overhead"] is not None
    rows = {(row["layer"], row["pass"]): row for row in content["rows"]}
    assert rows["conv", "forward"]["kernels"] and rows["fc", "backward_weight"]["kernels"]
    for row in content["rows"]:
        assert row["in"] is None or (row["ms"], row["kernels"]) == (0.0, [])


@pytest.mark.alone
def test_a_profile_costs_less_than_a_fiftieth_of_the_run(cuda_ops, rng, tmp_path):
    """Blocks of steps with and without it take turns, so that the clock of the GPU is the same for both; the watched
    step is amid its block, as in training, where the GPU has work while the host reads an earlier one's events.
    """
    model = m.Model(models.build("resnet50", (224, 224, 3), 1000), device="cuda", precision="bf16")
    fusion.fuse(model, "auto", batch=32)  # as `minidl train` does
    images = data.dataset("synthetic", None, "train", n=32, shape=(8, 8, 3), num_classes=1000)
    loader = data.Loader(images, 32, dtype=model.precision.storage)
    optimizer, loss = m.SGD(model, 1e-3, 0.9), m.SoftmaxCrossEntropy()
    run = Trainer(model, optimizer, loss, loader, schedule=lambda step: 1e-3, epochs=1000)
    x = cuda_ops.cast(cuda_ops.from_host(rng.standard_normal((32, 224, 224, 3), f32)), model.precision.storage)
    wanted = cuda_ops.from_host(rng.integers(0, 1000, 32).astype(np.int32))
    batch, off, on = data.Batch(x, wanted, 0, 32), run.profile, TrainingProfile(tmp_path / "profile.json", first=25)

    def seconds(profile, steps=50):
        run.profile = profile
        cuda_ops.synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            run._train(batch)
        cuda_ops.synchronize()
        return time.perf_counter() - started

    for profile in (off, on):  # captures both graphs
        seconds(profile)
    pairs = [(seconds(off), seconds(on)) for _ in range(9)]
    assert statistics.median(b / a for a, b in pairs) < 1.02
    assert len(on.steps) + on._pending >= 10


def test_a_profiler_that_knows_no_graphs_sees_eager_steps(cuda_ops):
    step = make(CompiledStep)
    for number, (x, labels) in enumerate(batches(step)):
        seen = SpanRecorder()
        step.observe(seen if number == STEPS - 1 else NULL_PROFILER)
        take(step, x, labels, number)
        assert bool(seen.events) == (number == STEPS - 1)
    assert replays(step) == 1


# -- micro-batches, on any device -------------------------------------------------------------------------------------


def plain():
    graph = m.Graph()
    x = m.Dropout(0.4, name="drop")(m.ReLU(name="relu")(m.Conv2d(3, 8, 3, name="conv")(graph.input((6, 6, 3)))))
    return graph.output(m.Linear(128, 4, name="fc")(m.Flatten(name="flat")(x)))


NETWORKS["plain"] = plain


@pytest.mark.parametrize("accumulate", [2, 3, 6, 50])
def test_micro_batches_are_the_whole_batch(accumulate, ops):
    """Without batch norm: the same totals and, within rounding, the same weights; ignored labels lie unevenly."""
    steps = [make(EagerStep, "plain", device=ops.name, accumulate=k) for k in (1, accumulate)]
    whole, parts = (run(step) for step in steps)
    for one, other in zip(whole, parts, strict=True):
        assert one[1:] == other[1:] and abs(one.loss - other.loss) < 1e-5 * abs(one.loss)
    assert len({sums.labels for sums in whole}) > 1, "some batches must hold ignored labels"
    one, other = (step.model.state_dict() for step in steps)
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint32])
def test_a_few_numbers_are_assigned(ops, dtype):
    out = ops.zeros(8, np.dtype(dtype))
    ops.assign(out[2:6], [1, 2**31 - 128, 3, 0])
    ops.assign(out[7:], [9])
    np.testing.assert_array_equal(ops.to_host(out), np.array([0, 0, 1, 2**31 - 128, 3, 0, 0, 9], dtype))


def test_a_cpu_says_why_it_does_not_compile(cpu_ops, capsys):
    with pytest.raises(ValueError, match="CUDA graphs need a GPU, and the model is on the cpu; use EagerStep"):
        make(CompiledStep, device="cpu")
    with pytest.raises(ValueError, match="CUDA graphs need a GPU"):
        trainer(device="cpu", compile=True)
    assert isinstance(trainer(device="cpu")._step, EagerStep)
    assert capsys.readouterr().out == ""


def test_what_is_in_the_way_is_named(cpu_ops):
    step = make(EagerStep, device="cpu")
    model, optimizer = step.model, step.optimizer

    def seen(**changed):
        stand_in = {"ops": type("Ops", (), {"name": "cuda"}), "store": model.store, "comm": model.comm}
        stand_in |= {"observer": model.observer} | changed
        return obstacle(type("Model", (), stand_in), optimizer)

    assert seen() is None
    assert "Moving moves saved tensors" in seen(store=type("Moving", (m.model.TensorStore,), {"capturable": False})())
    assert "a SpanRecorder watches" in seen(observer=SpanRecorder())
    assert "with the shm engine the host waits for each sum" in seen(comm=type("Shm", (), {"name": "shm"}))
    optimizer = type("Own", (m.SGD,), {"update": lambda self: None}).__new__(type("P", (m.SGD,), {"update": None}))
    assert "P has an update of its own" in seen()


def test_parts_of_different_models_make_no_step(cpu_ops):
    one, other = make(EagerStep, device="cpu"), make(EagerStep, device="cpu")
    for kind in (EagerStep, CompiledStep):
        with pytest.raises(ValueError, match=f"{kind.__name__}: optimizer must be that of the model"):
            kind(one.model, other.optimizer, one.loss)
        with pytest.raises(ValueError, match=f"{kind.__name__}: accumulate must be"):
            kind(one.model, one.optimizer, one.loss, accumulate=0)
        with pytest.raises(TypeError, match=f"{kind.__name__}: model must be a Model, got Graph"):
            kind(one.model.graph, one.optimizer, one.loss)
