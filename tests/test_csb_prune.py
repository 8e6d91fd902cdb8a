"""Pruning: schedules, masks, what stays zero, resuming, and the step to sparse layers."""

from __future__ import annotations

import numpy as np
import pytest

import minidl as m
from minidl import checkpoint, data
from minidl.sparse import CSBConv2d, CSBLinear, CubicSchedule, PrunedSGD, Pruning, magnitude_mask, sparse_state
from minidl.sparse import to_sparse as convert
from minidl.train import Trainer
from tests.tolerance import assert_same_arrays, draw

f32 = np.float32


# -- schedule ---------------------------------------------------------------------------------------------------------


def test_the_cubic_schedule():
    s = CubicSchedule(final=0.9, begin=100, end=500, initial=0.1, frequency=30)
    assert [s(step) for step in (0, 99, 500, 10_000)] == [0, 0, 0.9, 0.9]
    assert s(100) == pytest.approx(0.1)
    assert s(300) == pytest.approx(0.9 - 0.8 * 0.5**3)
    rising = [s(step) for step in range(100, 501)]
    assert rising == sorted(rising)
    due = [step for step in range(1000) if s.due(step)]
    assert due == [*range(100, 500, 30), 500]
    assert [step for step in range(20) if CubicSchedule(0.5, 7, 7).due(step)] == [7]
    assert CubicSchedule(0.5, 7, 7)(7) == 0.5


@pytest.mark.parametrize("arguments,text", [
    ({"final": 1.0}, r"final must be a number in \[0, 1\)"), ({"final": -0.1}, "final must be"),
    ({"initial": 0.95}, r"initial must be at most final"), ({"end": 9}, r"end must be at least begin \(10\)"),
    ({"begin": 0}, "begin must be an integer of at least 1"), ({"frequency": 0}, "frequency"), ({"power": 0}, "power"),
])  # fmt: skip
def test_schedules_that_cannot_be(arguments, text):
    with pytest.raises(ValueError, match=text):
        CubicSchedule(**({"final": 0.9, "begin": 10, "end": 20} | arguments))


# -- masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_masks_drop_the_smallest_and_exactly_as_many(rng, sparsity, scope):
    weights = {"a": draw(rng, (20, 30), f32), "b": draw(rng, (7, 3, 3, 5), f32, scale=0.1)}
    masks = magnitude_mask(weights, sparsity, scope=scope)
    groups = [["a", "b"]] if scope == "global" else [["a"], ["b"]]
    for names in groups:
        values = np.concatenate([np.abs(weights[n]).ravel() for n in names])
        kept = np.concatenate([masks[n].ravel() for n in names])
        assert abs((~kept).sum() - sparsity * kept.size) <= 0.5
        assert values[~kept].max(initial=0) <= values[kept].min(initial=np.inf)


@pytest.mark.parametrize("granularity,axes", [("kernel", (1, 2)), ("filter", (1, 2, 3))])
def test_kernels_and_filters_go_whole(rng, granularity, axes):
    weight = draw(rng, (20, 3, 3, 10), f32)
    mask = magnitude_mask({"w": weight}, 0.5, granularity=granularity)["w"]
    np.testing.assert_array_equal(mask.all(axis=axes), mask.any(axis=axes))
    assert mask.mean() == 0.5
    norms = np.square(weight.astype(float)).mean(axis=axes)
    whole = mask.all(axis=axes)
    assert norms[~whole].max() <= norms[whole].min()


def test_ties_fall_by_place_and_masks_only_grow(rng):
    mask = magnitude_mask({"w": np.ones((4, 4), f32)}, 0.5)["w"]
    np.testing.assert_array_equal(mask, np.repeat([[False], [False], [True], [True]], 4, axis=1))
    weight = draw(rng, (30, 30), f32)
    first = magnitude_mask({"w": weight}, 0.5)
    moved = np.where(first["w"], 0.1 * weight, 100)  # what was dropped is large now
    second = magnitude_mask({"w": moved}, 0.8, masks=first)
    assert not (second["w"] & ~first["w"]).any() and second["w"].mean() == pytest.approx(0.2)
    same = magnitude_mask({"w": moved}, 0.2, masks=first)  # less than is dropped already
    np.testing.assert_array_equal(same["w"], first["w"])


def test_masks_that_cannot_be():
    w = {"w": np.ones((3, 3), f32)}
    with pytest.raises(TypeError, match="weights must be a dictionary of arrays by name, got float32 array"):
        magnitude_mask(w["w"], 0.5)
    for arguments, text in (({"sparsity": 1.0}, "sparsity must be"), ({"granularity": "row"}, "unknown granularity"),
                            ({"scope": "all"}, "unknown scope"), ({"weights": {"w": np.ones(3, f32)}}, "w must have"),
                            ({"masks": {"w": np.ones((3, 2), bool)}}, r"mask of w must have shape \(3, 3\)"),
                            ({"weights": {"w": np.full((2, 2), np.nan)}}, "w must be finite")):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            magnitude_mask(**({"weights": w, "sparsity": 0.5} | arguments))


# -- training ---------------------------------------------------------------------------------------------------------


def network():
    """Convolutions that can and cannot become sparse, batch norm, a residual join and a linear layer."""
    graph = m.Graph()
    x = graph.input((6, 6, 3))
    x = m.ReLU(name="relu1")(m.Conv2d(3, 12, 3, padding=1, name="first")(x))
    y = m.BatchNorm2d(16, name="bn")(m.Conv2d(12, 16, 1, bias=False, name="point")(x))
    y = m.Add(name="join")(y, m.Conv2d(12, 16, 3, padding=1, groups=2, name="wide")(x))
    y = m.Conv2d(16, 20, 3, 2, padding=1, name="stride")(m.ReLU(name="relu2")(y))
    return graph.output(m.Linear(9 * 20, 5, name="head")(m.Flatten()(y)))


def pruning(final=0.8, begin=2, end=8, **options):
    return Pruning(CubicSchedule(final, begin, end, frequency=2), **options)


def batches(rng, steps):
    return [(draw(rng, (8, 6, 6, 3), f32), rng.integers(0, 5, 8)) for _ in range(steps)]


def train(model, optimizer, data):
    loss = m.SoftmaxCrossEntropy()
    for x, labels in data:
        ops = model.ops
        loss.forward(model.forward(ops.from_host(x.astype(model.precision.storage))), ops.from_host(labels))
        model.backward(loss.backward(optimizer.loss_scale))
        optimizer.step()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_sparsity_follows_the_schedule_and_dropped_weights_stay_zero(ops, rng, precision):
    model = m.Model(network(), device=ops.name, precision=precision)
    optimizer = PrunedSGD(model, 0.05, 0.9, weight_decay=1e-2, nesterov=True, pruning=pruning())
    before: dict[str, np.ndarray] = {}
    for step, batch in enumerate(batches(rng, 14), start=1):
        train(model, optimizer, [batch])
        state, momentum = model.state_dict(), optimizer.state_dict()
        for name, mask in optimizer.masks().items():
            assert not state[name][~mask].any() and not momentum[f"momentum.{name}"][~mask].any()
            assert state[name][mask].all()
            assert not (mask & ~before.get(name, mask)).any()
        before = optimizer.masks()
        reached = optimizer.pruning.schedule(step if step >= 8 else step - step % 2)
        for name, share in optimizer.sparsity().items():
            assert abs(share - reached) <= 0.5 / before[name].size + 1e-9
    assert set(before) == {"point.weight", "wide.weight", "stride.weight", "head.weight"}, "the first stays dense"
    if precision != "fp32":
        working, master = (ops.to_host(a).astype(f32) for a in (model.arena.working, model.arena.master))
        np.testing.assert_array_equal(working == 0, master.astype(model.precision.storage).astype(f32) == 0)


@pytest.mark.parametrize("stop", [1, 3, 6, 11])
def test_a_resumed_run_goes_on_bit_for_bit(ops, rng, tmp_path, stop):
    data = batches(rng, 14)

    def start():
        model = m.Model(network(), device=ops.name)
        return model, PrunedSGD(model, 0.05, 0.9, weight_decay=1e-3, pruning=pruning(scope="global"))

    model, optimizer = start()
    train(model, optimizer, data)
    expected = model.state_dict(), optimizer.state_dict()

    model, optimizer = start()
    train(model, optimizer, data[:stop])
    checkpoint.save(tmp_path / "model", model.state_dict(), {})
    checkpoint.save(tmp_path / "optimizer", optimizer.state_dict(), {})
    model, optimizer = start()
    model.load_state_dict(checkpoint.load(tmp_path / "model")[0])
    optimizer.load_state_dict(checkpoint.load(tmp_path / "optimizer")[0])
    train(model, optimizer, data[stop:])
    for got, wanted in zip((model.state_dict(), optimizer.state_dict()), expected, strict=True):
        assert_same_arrays(got, wanted)


def test_a_trainer_keeps_masks_in_its_checkpoints(cpu_ops, tmp_path):
    def run(folder, epochs):
        graph = network()
        model = m.Model(graph)
        options = {"shape": (6, 6, 3), "num_classes": 5, "n": 24}
        loader = data.Loader(data.dataset("synthetic", None, "train", **options), 8, transfer=model.ops.uploader())
        optimizer = PrunedSGD(model, 0.05, 0.9, pruning=pruning())
        return Trainer(
            model, optimizer, m.SoftmaxCrossEntropy(), loader, schedule=lambda step: 0.05, epochs=epochs, output=folder
        )

    whole = run(tmp_path / "whole", 4)
    whole.fit()
    run(tmp_path / "parts", 2).fit()  # stops in the middle of the schedule
    rest = run(tmp_path / "parts", 4)
    rest.resume(tmp_path / "parts")
    rest.fit()
    assert max(whole.optimizer.sparsity().values()) == pytest.approx(0.8, abs=0.01)
    for part in ("model", "optimizer"):
        assert_same_arrays(*(getattr(r, part).state_dict() for r in (rest, whole)))


def test_sparsity_zero_is_plain_sgd(cpu_ops, rng):
    data, states = batches(rng, 6), []
    for make in (m.SGD, lambda *a: PrunedSGD(*a, pruning=pruning(0.0))):
        model = m.Model(network())
        train(model, make(model, 0.05, 0.9), data)
        states.append(model.state_dict())
    for name, value in states[0].items():
        np.testing.assert_array_equal(states[1][name], value)


def test_what_is_pruned_can_be_chosen(cpu_ops):
    def names(**options):
        return [s.full_name for s in PrunedSGD(m.Model(network()), 0.1, pruning=pruning(**options)).pruned]

    assert names(include=["*point*", "head.weight"]) == ["point.weight", "head.weight"]
    assert names(exclude=["head.*"]) == ["point.weight", "wide.weight", "stride.weight"]
    assert names(include=["first.weight"]) == ["first.weight"]
    with pytest.raises(ValueError, match="unknown parameter pattern 'heda.weight'; did you mean 'head.weight'"):
        names(include=["heda.weight"])
    with pytest.raises(ValueError, match="the first layer stays dense unless include names it"):
        names(include=["first*"])
    with pytest.raises(ValueError, match="list of patterns"):
        pruning(include="head.*")
    with pytest.raises(TypeError, match="schedule must be a CubicSchedule"):
        Pruning(0.5)
    with pytest.raises(TypeError, match="pruning must be a Pruning"):
        PrunedSGD(m.Model(network()), 0.1, pruning=0.5)


# -- to sparse layers -------------------------------------------------------------------------------------------------


def test_the_sparse_model_goes_on_where_the_dense_one_stopped(ops, rng):
    """Same outputs, and after more steps with fixed masks the same weights, momentum taken along."""
    data = batches(rng, 16)
    dense = m.Model(network(), device=ops.name)
    optimizer = PrunedSGD(dense, 0.02, 0.9, weight_decay=1e-3, pruning=pruning())
    train(dense, optimizer, data[:10])

    graph = network()
    assert convert(graph, dense.state_dict(), optimizer.masks()) == ["point", "stride", "head"]
    kinds = [type(graph[name].layer) for name in ("first", "point", "wide", "stride", "head")]
    assert kinds == [m.Conv2d, CSBConv2d, m.Conv2d, CSBConv2d, CSBLinear]
    sparse = m.Model(graph, device=ops.name)
    sparse.load_state_dict(sparse_state(graph, dense.state_dict()))
    tuned = PrunedSGD(sparse, 0.02, 0.9, weight_decay=1e-3, pruning=optimizer.pruning)
    tuned.load_state_dict(sparse_state(graph, optimizer.state_dict(), "momentum."))
    assert list(tuned.masks()) == ["wide.weight"]
    assert sparse.arena.trainable_size < dense.arena.trainable_size

    for model in (dense, sparse):
        model.eval()
    x = ops.from_host(data[0][0])
    np.testing.assert_allclose(ops.to_host(sparse.forward(x)), ops.to_host(dense.forward(x)), rtol=1e-4, atol=1e-5)
    for model in (dense, sparse):
        model.train()
    # The masks stay: the schedule is over.
    train(dense, optimizer, data[10:])
    train(sparse, tuned, data[10:])
    expected = sparse_state(graph, dense.state_dict())
    for name, value in sparse.state_dict().items():
        np.testing.assert_allclose(value, expected[name], rtol=2e-3, atol=2e-4, err_msg=name)


def test_a_model_whose_pruned_layers_are_all_sparse_trains_on(cpu_ops, rng):
    model = m.Model(network())
    chosen = pruning(include=["head.weight"], scope="global")
    optimizer = PrunedSGD(model, 0.05, 0.9, pruning=chosen)
    train(model, optimizer, batches(rng, 8))
    graph = network()
    assert convert(graph, model.state_dict(), optimizer.masks()) == ["head"]
    sparse = m.Model(graph)
    tuned = PrunedSGD(sparse, 0.05, 0.9, pruning=chosen)
    assert tuned.pruned == []
    train(sparse, tuned, batches(rng, 8))


def test_layers_that_are_not_sparse_enough_stay_dense(cpu_ops, rng):
    model = m.Model(network())
    weights = {name: w for name, w in model.state_dict().items() if name.endswith("weight") and w.ndim > 1}
    masks = magnitude_mask(weights, 0.6)
    assert convert(network(), model.state_dict(), masks) == []
    assert "head" in convert(network(), model.state_dict(), masks, threshold=0.5)
    with pytest.raises(ValueError, match="threshold must be"):
        convert(network(), model.state_dict(), masks, threshold=2)


def test_masks_of_filters_make_sparse_layers_too(cpu_ops, rng):
    """Those of biases and batch norms, which go with the filters, are no weights."""
    model = m.Model(network())
    optimizer = PrunedSGD(model, 0.05, pruning=Pruning(None, granularity="filter"))
    optimizer.prune(0.9)
    masks, graph = optimizer.masks(), network()
    assert 1 - masks["stride.bias"].mean() >= 0.7
    assert "stride" in convert(graph, model.state_dict(), masks)
    sparse, x = m.Model(graph), draw(rng, (2, 6, 6, 3), f32)
    sparse.load_state_dict(sparse_state(graph, model.state_dict()))
    np.testing.assert_allclose(sparse.eval().forward(x), model.eval().forward(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"unknown parameter 'head'; did you mean 'head\.\w+'"):
        convert(graph, model.state_dict(), {"head": masks["stride.bias"]})


def test_a_state_of_another_network_is_not_made_sparse(cpu_ops, rng):
    state = m.Model(network()).state_dict()
    masks = magnitude_mask({"head.weight": state["head.weight"]}, 0.9)
    with pytest.raises(ValueError, match=r"to_sparse: state must be one that holds head\.weight, got 'one without it'"):
        convert(network(), {}, masks)
    with pytest.raises(ValueError, match=r"to_sparse: head\.weight must have shape \(5, 180\), got \(180, 5\)"):
        convert(network(), state | {"head.weight": state["head.weight"].T}, masks)


def test_a_graph_replaces_layers_before_it_has_a_model(rng):
    graph = network()
    old = graph["head"].layer
    new = m.Linear(180, 5, bias=False)
    assert graph.replace("head", new).name == "head" and graph["head"].layer is new and graph.output_node.layer is new
    assert old not in graph.layers
    with pytest.raises(ValueError, match=r"head: output of its replacement must have shape \(5,\), got \(6,\)"):
        graph.replace("head", m.Linear(180, 6))
    with pytest.raises(ValueError, match=r"head: x must have shape \(N, 181\)"):
        graph.replace("head", m.Linear(181, 5))
    with pytest.raises(RuntimeError, match="stands in a graph already"):
        graph.replace("head", new)
    with pytest.raises(ValueError, match="unknown layer 'haed'; did you mean 'head'"):
        graph.replace("haed", m.Linear(180, 5))
    m.Model(graph)
    with pytest.raises(RuntimeError, match="belongs to a model"):
        graph.replace("head", m.Linear(180, 5))
