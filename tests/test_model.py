"""Laws of the model: the two passes, fan-out, stores, spans, messages, values, freezing, state."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

import minidl as m
from minidl import models, value
from minidl.profile import SpanRecorder
from minidl.store import TensorStore, arrays_of
from tests.parts import Twins

f32 = np.float32
STEP = 2.0**-11


def residual(sync=False):
    """A small network with every kind of join: residual add, three readers of one value, concatenation, dropout."""
    graph = m.Graph()
    x = m.Conv2d(3, 4, 3, padding=1, name="conv1")(graph.input((6, 6, 3)))
    x = m.ReLU(name="relu1")(m.BatchNorm2d(4, sync=sync, name="bn1")(x))
    a = m.Conv2d(4, 4, 3, padding=1, name="conv2")(x)
    b = m.ReLU(name="relu2")(m.Conv2d(4, 4, 1, name="conv3")(x))
    y = m.Concat()(m.Add()(m.StochasticDepth(0.3)(a), x), b)
    y = m.Flatten()(m.AdaptiveAvgPool2d(2, name="pool")(m.MaxPool2d(2, name="maxpool")(y)))
    y = m.Dropout(0.3)(y)
    return graph.output(m.Linear(32, 5, name="fc")(y))


def batch(rng, n=6, size=6, classes=5):
    return rng.standard_normal((n, size, size, 3)).astype(f32), rng.integers(0, classes, n).astype(np.int32)


def run(model, images, labels, loss=None):
    """Forward, loss, backward; (loss, gradients by name, logits)."""
    loss = loss or m.SoftmaxCrossEntropy()
    logits = model.forward(model.ops.from_host(images))
    totals = loss.forward(logits, model.ops.from_host(labels))
    model.backward(loss.backward())
    gradients = {
        f"{layer.name}.{name}": model.ops.to_host(g).copy()
        for layer in model.layers
        if layer.specs
        for name, g in layer.params.gradients().items()
    }
    return totals.loss, gradients, model.ops.to_host(logits)


def test_gradients_of_a_whole_network_equal_central_differences(ops, rng):
    images, labels = batch(rng)
    model = m.Model(residual(), device=ops.name)
    _, gradients, _ = run(model, images, labels)
    state = model.state_dict()
    for name, gradient in gradients.items():
        v = rng.standard_normal(gradient.shape).astype(f32)
        v /= np.linalg.norm(v)
        values = []
        for h in (STEP, -STEP):  # small: ReLU and max pooling have kinks
            model.load_state_dict({**state, name: state[name] + f32(h) * v})
            model.random.step = 0  # the same dropout mask as in the step above
            logits = model.ops.to_host(model.forward(model.ops.from_host(images))).astype(np.float64)
            logits -= logits.max(axis=1, keepdims=True)
            picked = logits[np.arange(len(labels)), labels] - np.log(np.exp(logits).sum(axis=1))
            values.append(-picked.mean())
        numeric = (values[0] - values[1]) / (2 * STEP)
        assert abs(np.sum(gradient * v) - numeric) < 5e-3 * (np.linalg.norm(gradient) + 0.1), name


def test_the_same_seed_gives_the_same_bits_twice(ops, rng):
    images, labels = batch(rng)
    results = []
    for _ in range(2):
        model = m.Model(residual(), device=ops.name, seed=7)
        optimizer = m.SGD(model, 0.1, momentum=0.9, weight_decay=1e-4)
        for _ in range(3):
            loss, _, _ = run(model, images, labels)
            optimizer.step()
        results.append((loss, model.state_dict()))
    assert results[0][0] == results[1][0]
    for name, values in results[0][1].items():
        np.testing.assert_array_equal(values, results[1][1][name])


class HostStore(TensorStore):
    """Moves every saved tensor to the host and back: what a memory planner does, at its most extreme."""

    def __init__(self, ops):
        super().__init__()
        self.ops, self.moved = ops, 0

    def save(self, owner, items):
        arrays = [id(array) for array in arrays_of(items.values())]
        self.moved += len(arrays)
        super().save(owner, {n: ("host", self.ops.to_host(v)) if id(v) in arrays else v for n, v in items.items()})

    def take(self, owner):
        saved = vars(super().take(owner))
        back = {n: self.ops.from_host(v[1]) for n, v in saved.items() if isinstance(v, tuple) and v[0] == "host"}
        return SimpleNamespace(**saved | back)


def test_any_store_gives_the_same_bits(ops, rng):
    images, labels = batch(rng)
    store = HostStore(ops)
    plain = run(m.Model(residual(), device=ops.name), images, labels)
    moved = run(m.Model(residual(), device=ops.name, store=store), images, labels)
    assert store.moved > 5 and plain[0] == moved[0]
    for name, gradient in plain[1].items():
        np.testing.assert_array_equal(gradient, moved[1][name])


def test_a_tensor_saved_twice_counts_once(cpu_ops, rng):
    model = m.Model(residual())
    images, _ = batch(rng)
    model.forward(images)
    # relu1's output is kept by relu1 itself and is the input of conv2 and conv3.
    kept = [model.store.fork().take(name) for name in ("conv2", "conv3")]
    assert kept[0].x is kept[1].x
    before = model.store.saved_bytes
    model.store.take("conv2")
    assert model.store.saved_bytes == before > 0, "conv3 still holds it"
    model.forward(images)
    model.backward(np.ones((6, 5), f32))
    assert model.store.saved_bytes == 0


def test_the_order_of_a_step(cpu_ops, rng):
    spans = SpanRecorder()
    model = m.Model(residual(), profiler=spans)
    images, labels = batch(rng)
    run(model, images, labels)
    passes = [event for event in spans.events if event[0] == "conv2"]
    assert passes == [("conv2", p) for p in ("forward", "backward_weight", "message", "backward_data")]
    assert ("conv1", "backward_data") not in spans.events, "the first layer has no data gradient"
    first = [layer for layer, p in spans.events if p == "backward_weight"]
    assert first[0] == "fc" and first[-1] == "conv1"


class Recording(Twins):
    """Notes what it is asked to send and to wait for."""

    def __init__(self):
        super().__init__()
        self.sent = []

    def start_all_reduce(self, array, span=None, name=""):
        self.sent.append(array.size)
        return self

    def wait(self):
        self.sent.append("wait")


def test_each_layer_sends_its_own_message_last_layer_first(cpu_ops, rng):
    comm = Recording()
    model = m.Model(residual(), comm=comm, group_bytes=0)
    run(model, *batch(rng))
    sizes = [size for size in comm.sent if size != "wait"]
    assert len(sizes) == len(model.arena.messages) == 5  # fc, conv3, conv2, bn1, conv1
    assert sizes == [m_.end - m_.begin for m_ in model.arena.messages]
    assert "wait" not in comm.sent, "only the update waits"
    m.SGD(model, 0.1).step()
    assert comm.sent.count("wait") == 5


def test_neighbouring_layers_share_a_message_when_asked(cpu_ops, rng):
    comm = Recording()
    model = m.Model(residual(), comm=comm, group_bytes=1 << 20)
    run(model, *batch(rng))
    assert comm.sent == [model.arena.trainable_size]


def test_a_second_backward_or_an_early_update_is_an_error(cpu_ops, rng):
    model = m.Model(residual())
    optimizer = m.SGD(model, 0.1)
    with pytest.raises(RuntimeError, match="update before backward"):
        optimizer.step()
    images, labels = batch(rng)
    run(model, images, labels)
    with pytest.raises(RuntimeError, match="under way"):
        run(model, images, labels)


def test_micro_batches_accumulate(ops, rng):
    images, labels = batch(rng)
    graph = lambda: models.mlp(5, (6, 6, 3), (8,))  # noqa: E731  (no batch norm: its statistics would differ)
    whole = m.Model(graph(), device=ops.name)
    _, expected, _ = run(whole, images, labels)
    model = m.Model(graph(), device=ops.name)
    for i, part in enumerate((slice(0, 2), slice(2, 6))):
        loss = m.SoftmaxCrossEntropy()
        logits = model.forward(ops.from_host(images[part]))
        loss.forward(logits, ops.from_host(labels[part]))
        scale = ops.from_host(np.array([len(labels[part]) / len(labels)], f32))
        model.backward(loss.backward(scale), accumulate=i > 0, send=i == 1)
    for layer in model.layers:
        for name, gradient in layer.params.gradients().items() if layer.specs else ():
            np.testing.assert_allclose(ops.to_host(gradient), expected[f"{layer.name}.{name}"], rtol=2e-5, atol=1e-6)


def test_frozen_parameters_stay_and_nothing_runs_below_them(cpu_ops, rng):
    spans = SpanRecorder()
    model = m.Model(residual(), frozen=["conv1.*", "bn1.*", "conv2.bias"], profiler=spans)
    before = model.state_dict()
    run(model, *batch(rng))
    m.SGD(model, 0.5).step()
    after = model.state_dict()
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {
        "conv2.weight", "conv3.weight", "conv3.bias", "fc.weight", "fc.bias", "bn1.running_mean", "bn1.running_var",
    }  # fmt: skip
    assert ("conv1", "backward_weight") not in spans.events and ("conv2", "backward_data") not in spans.events
    with pytest.raises(ValueError, match="unknown parameter pattern 'conv9"):
        m.Model(residual(), frozen=["conv9.*"])


def test_a_partly_frozen_network_computes_the_gradients_of_a_free_one(cpu_ops, rng):
    images, labels = batch(rng)
    _, free, _ = run(m.Model(residual()), images, labels)
    _, frozen, _ = run(m.Model(residual(), frozen=["conv2.*", "bn1.bias"]), images, labels)
    assert set(free) - set(frozen) == {"conv2.weight", "conv2.bias", "bn1.bias"}
    for name, gradient in frozen.items():
        np.testing.assert_array_equal(gradient, free[name])


# -- deferred values --------------------------------------------------------------------------------


class Deferring(m.BatchNorm2d):
    """A batch norm that leaves its normalisation to whoever reads it, as a fusion plan asks of it."""

    deferred = True


class Absorbing(m.Layer):
    """Takes values unfinished and finishes them itself."""

    accepts_unfinished = True

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seen = []

    def output_shape(self, shape):
        return shape

    def compute(self, x):
        self.seen.append(x.array is None)
        self.save()
        return value.materialize(self.ops, x).array

    def backward_data(self, dy, add=None):
        return dy


@pytest.mark.parametrize("consumer", ["plain", "absorbing"])
def test_a_deferred_normalisation_changes_nothing(consumer, ops, rng):
    def network(norm, middle):
        graph = m.Graph()
        x = m.Conv2d(3, 4, 3, name="conv1")(graph.input((6, 6, 3)))
        x = norm(4, name="bn1")(x)
        if middle is not None:
            x = middle(x)
        x = m.Conv2d(4, 4, 3, name="conv2")(m.ReLU(name="relu")(x))
        return graph.output(m.Linear(16, 5, name="fc")(m.Flatten()(x)))

    images, labels = batch(rng)
    absorbing = Absorbing(name="absorb")
    plain = run(m.Model(network(m.BatchNorm2d, None), device=ops.name), images, labels)
    middle = absorbing if consumer == "absorbing" else None
    deferred = run(m.Model(network(Deferring, middle), device=ops.name), images, labels)
    assert absorbing.seen == ([True] if middle else [])
    assert plain[0] == deferred[0]
    for name, gradient in plain[1].items():
        np.testing.assert_array_equal(gradient, deferred[1][name])


def test_materialize_finishes_a_join_with_a_projection(ops, rng):
    x, z = (rng.standard_normal((2, 3, 3, 4)).astype(f32) for _ in range(2))
    moments, gamma = rng.uniform(0.5, 2, (2, 4)).astype(f32), rng.uniform(0.5, 2, 4).astype(f32)
    a, b, mo, g = (ops.from_host(v) for v in (x, z, moments, gamma))
    term = lambda raw: value.Normalized(raw, mo, g, None)  # noqa: E731
    normal = lambda raw: (raw - moments[0]) * moments[1] * gamma  # noqa: E731
    joined = value.materialize(ops, value.Value(origin=value.Origin((term(a), term(b)), relu=True)))
    np.testing.assert_allclose(ops.to_host(joined.array), np.maximum(normal(x) + normal(z), 0), rtol=1e-5, atol=1e-5)
    assert joined.origin is not None
    joined = value.materialize(ops, value.Value(origin=value.Origin((term(a), b), relu=True)))
    np.testing.assert_allclose(ops.to_host(joined.array), np.maximum(normal(x) + z, 0), rtol=1e-5, atol=1e-5)
    plain = value.materialize(ops, value.Value(origin=value.Origin((a, b))))
    np.testing.assert_array_equal(ops.to_host(plain.array), x + z)
    assert value.materialize(ops, plain) is plain


def test_an_unfinished_value_at_a_plain_layer_is_an_error(cpu_ops):
    with pytest.raises(RuntimeError, match="materialize"):
        m.Flatten().forward(value.Value(origin=value.Origin((np.zeros((1, 2), f32),))))


# -- state ------------------------------------------------------------------------------------------


def test_state_round_trips_and_misfits_are_listed(ops, rng):
    model, other = m.Model(residual(), device=ops.name, seed=1), m.Model(residual(), device=ops.name, seed=2)
    images, labels = batch(rng)
    run(model, images, labels)
    state = model.state_dict()
    other.load_state_dict(state)
    model.eval(), other.eval()
    x = ops.from_host(images)
    np.testing.assert_array_equal(ops.to_host(model.forward(x)), ops.to_host(other.forward(x)))
    wrong = {**state, "extra": np.zeros(3, f32), "fc.bias": np.zeros(4, f32)}
    del wrong["conv1.weight"]
    with pytest.raises(ValueError, match=r"1 missing: conv1.weight; 1 unexpected: extra; 1 different: fc.bias"):
        other.load_state_dict(wrong)


def test_model_doors(cpu_ops):
    model = m.Model(residual())
    with pytest.raises(ValueError, match=r"model: x must have shape \(N, H, W, 3\)"):
        model.forward(np.zeros((2, 3, 6, 6), f32))
    with pytest.raises(ValueError, match="at least one sample"):
        model.forward(np.zeros((0, 6, 6, 3), f32))
    with pytest.raises(TypeError, match="model: x must be float32"):
        model.forward(np.zeros((2, 6, 6, 3)))
    with pytest.raises(TypeError, match="from_host"):
        model.forward([[1.0]])
    with pytest.raises(ValueError, match="unknown precision 'fp8'"):
        m.Model(residual(), precision="fp8")
    with pytest.raises(ValueError, match="tf32"):
        m.Model(residual(), precision="tf32")
    with pytest.raises(ValueError, match="frozen must be a list of patterns"):
        m.Model(residual(), frozen="fc.*")
    with pytest.raises(ValueError, match="unknown device 'tpu'"):
        m.Model(residual(), device="tpu")
    graph = residual()
    m.Model(graph)
    with pytest.raises(RuntimeError, match="another model"):
        m.Model(graph)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bit_models_learn(precision, ops, rng):
    images, labels = batch(rng, 16)
    model = m.Model(residual(), device=ops.name, precision=precision)
    optimizer = m.SGD(model, 0.05, momentum=0.9)
    loss = m.SoftmaxCrossEntropy()
    x, t = ops.from_host(images.astype(model.precision.storage)), ops.from_host(labels)
    losses = []
    for _ in range(30):
        losses.append(loss.forward(model.forward(x), t).loss)
        model.backward(loss.backward(optimizer.loss_scale))
        optimizer.step()
    assert min(losses[-5:]) < 0.6 * losses[0]


def test_an_overflowing_loss_scale_backs_off_on_the_device(ops, rng):
    images, labels = batch(rng)
    model = m.Model(residual(), device=ops.name, precision="fp16")
    optimizer = m.SGD(model, 0.1, momentum=0.9, loss_scale=2.0**40)
    before = model.state_dict()
    loss = m.SoftmaxCrossEntropy()
    loss.forward(model.forward(ops.from_host(images.astype(np.float16))), ops.from_host(labels))
    model.backward(loss.backward(optimizer.loss_scale))
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert ops.to_host(optimizer.loss_scale)[0] == 2.0**39
    after = model.state_dict()
    for s in model.arena.segments:
        np.testing.assert_array_equal(before[s.full_name], after[s.full_name])


def test_a_backward_pass_that_fails_half_way_changes_nothing(cpu_ops, rng, monkeypatch):
    model = m.Model(residual(), group_bytes=0)
    optimizer, before = m.SGD(model, 0.1), model.state_dict()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(m.BatchNorm2d, "backward_weight", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        run(model, *batch(rng))
    with pytest.raises(RuntimeError, match="update before backward"):
        optimizer.step()
    for s in model.arena.segments:
        np.testing.assert_array_equal(before[s.full_name], model.state_dict()[s.full_name])
    run(model, *batch(rng))
    optimizer.step()


def test_after_an_update_there_is_nothing_to_accumulate_on(cpu_ops):
    model = m.Model(models.mlp(3, (2, 2, 1), (4,)))
    optimizer, x, dy, norms = m.SGD(model, 0.0), np.ones((2, 2, 2, 1), f32), np.ones((2, 3), f32), []
    for _ in range(2):
        model.forward(x)
        model.backward(dy, accumulate=True)
        norms.append(model.arena.grad.copy())
        optimizer.step()
    np.testing.assert_array_equal(*norms)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_model_without_anything_to_train(precision, cpu_ops, rng):
    model = m.Model(residual(), frozen=["*"], precision=precision)
    optimizer = m.SGD(model, 0.1, momentum=0.9)
    images, _ = batch(rng)
    y = model.forward(images.astype(model.precision.storage))
    model.backward(y)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())


def test_ranks_whose_layers_differ_are_told(cpu_ops):
    class Other(Recording):
        def share(self, value, name=""):
            theirs = [str(v).replace(", sync=True", "") for v in value] if isinstance(value, list) else b"other"
            return [value, theirs]

    with pytest.raises(ValueError, match=r"ranks differ in parameter plan.*bn1 BatchNorm2d\(4, sync=True\)"):
        m.Model(residual(sync=True), comm=Other(), group_bytes=0)


def test_seeds_and_graphs_at_the_door(cpu_ops):
    for seed in (-1, 1.5, 1 << 70):
        with pytest.raises(ValueError, match="model: seed must be"):
            m.Model(residual(), seed=seed)
    with pytest.raises(TypeError, match="model: graph must be a Graph"):
        m.Model("resnet20")
    with pytest.raises(TypeError, match="SGD: model must be a Model"):
        m.SGD(residual().layers, 0.1)
    optimizer = m.SGD(m.Model(residual()), 0.1)
    for lr in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="SGD: lr must be"):
            optimizer.set_lr(lr)


def test_a_gpu_that_is_not_there_is_a_clear_error(monkeypatch):
    from minidl import cuda

    def refuse():
        raise RuntimeError("no usable CUDA device")

    monkeypatch.setattr(cuda, "require_device", refuse)
    with pytest.raises(RuntimeError, match="no usable CUDA device"):
        m.Model(residual(), device="cuda")
    with pytest.raises(RuntimeError, match="no usable CUDA device"):
        m.Conv2d(3, 4, 3).to("cuda")


def test_a_forked_store_goes_back_again(ops, rng):
    """Two layers that share a slot: the gradients of each fork are those of the store itself."""
    norm, relu = m.BatchNorm2d(3), m.ReLU()
    norm.store = relu.store = store = TensorStore()
    x, dy = (ops.from_host(rng.standard_normal((2, 4, 4, 3)).astype(np.float32)) for _ in range(2))
    relu.forward(norm.forward(x))
    found = []
    for kept in (store.fork(), store.fork(), store):
        norm.store = relu.store = kept
        found.append(ops.to_host(norm.backward(relu.backward(dy))))
        assert kept.saved_bytes == 0
        with pytest.raises(RuntimeError, match="without a forward pass"):
            norm.backward(dy)
    assert (found[0] == found[1]).all() and (found[1] == found[2]).all()


def test_the_gradient_of_the_input_is_handed_over_when_asked_for(ops, rng):
    def built(**options):
        graph = m.Graph()
        x = graph.input((8, 8, 3))
        y = m.ReLU()(m.BatchNorm2d(4)(m.Conv2d(3, 4, 3, padding=1, name="first")(x)))
        y = m.Add()(m.Conv2d(4, 6, 3, padding=1, name="main")(y), m.Conv2d(3, 6, 1, name="side")(x))
        return m.Model(graph.output(m.Linear(384, 5)(m.Flatten()(y))), device=ops.name, **options)

    plain, asked = built(), built(input_grad=True)
    x, dy = rng.standard_normal((2, 8, 8, 3)).astype(np.float32), rng.standard_normal((2, 5)).astype(np.float32)
    for model in (plain, asked):
        model.eval()
        model.forward(ops.from_host(x), grad=True)
    assert plain.backward(ops.from_host(dy)) is None
    dx = ops.to_host(asked.backward(ops.from_host(dy))).astype(np.float64)
    np.testing.assert_array_equal(ops.to_host(plain.arena.grad), ops.to_host(asked.arena.grad))
    step = (1e-3 * np.sign(dx)).astype(np.float32)  # along which no terms cancel
    ahead, behind = (
        np.vdot(ops.to_host(asked.forward(ops.from_host(x + s * step), grad=False)).astype(np.float64), dy)
        for s in (1, -1)
    )
    assert (ahead - behind) / 2 == pytest.approx(np.vdot(dx, step), rel=2e-2)


def test_a_model_is_not_copied_but_made_again_as_the_error_says(rng):
    model, images = m.Model(residual()), batch(rng)[0]
    for taken in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"^a Model cannot be copied or pickled; Model\(model\.graph\.unbound"):
            taken(model)
    again = m.Model(model.graph.unbound(), seed=1)
    again.load_state_dict(model.state_dict())
    for one in (model, again):
        one.eval()
    np.testing.assert_array_equal(again.forward(images), model.forward(images))
