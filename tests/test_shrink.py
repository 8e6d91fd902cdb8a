"""Shrinking: a smaller dense network with the outputs of the masked one, through every kind of join."""

from __future__ import annotations

import numpy as np
import pytest

import minidl as m
from minidl import checkpoint, data, models
from minidl.models import depthwise_separable, squeeze_excitation
from minidl.sharded import ShardedSGD
from minidl.sparse import CubicSchedule, PrunedSGD, Pruning, pruned, resized, shrink, without_masks
from minidl.sparse.channels import Channels
from minidl.train import Trainer
from tests.tolerance import assert_close, draw, draw_integers

f32 = np.float32


def conv(x, channels, name, kernel=3, **options):
    y = m.Conv2d(x.shape[-1], channels, kernel, padding=kernel // 2, name=name, **options)(x)
    return m.BatchNorm2d(y.shape[-1], name=f"{name}_bn")(y)


def residual():
    """Two blocks on one trunk, the second with a projection, flattened into a linear layer."""
    graph = m.Graph()
    x = m.ReLU(name="r0")(conv(graph.input((6, 6, 3)), 8, "stem", bias=False))
    y = conv(m.ReLU(name="r1")(conv(x, 6, "a1")), 8, "a2")
    x = m.ReLU(name="r2")(m.Add(name="join1")(x, y))
    y = conv(m.ReLU(name="r3")(conv(x, 7, "b1", stride=2)), 10, "b2")
    x = m.ReLU(name="r4")(m.Add(name="join2")(y, conv(x, 10, "proj", 1, stride=2)))
    return graph.output(m.Linear(9 * 10, 5, name="head")(m.Flatten()(x)))


def mobile():
    """Depthwise convolutions, one of them with two outputs for a channel, and a gate."""
    graph = m.Graph()
    x = m.ReLU6(name="r0")(conv(graph.input((6, 6, 3)), 8, "stem"))
    with m.scope("sep"):
        x = depthwise_separable(x, 12)
    with m.scope("gate"):
        x = squeeze_excitation(x, 4)
    x = m.ReLU(name="r1")(conv(x, 24, "double", groups=12))
    x = m.MaxPool2d(2, name="pool")(m.ReLU(name="r2")(conv(x, 6, "mix", 1)))
    return graph.output(m.Linear(6, 5, name="head")(m.Flatten()(m.AdaptiveAvgPool2d(1, name="avg")(x))))


def unet():
    """A skip by concatenation around a transposed convolution, biases and no batch norm on the way down."""
    graph = m.Graph()
    x = graph.input((8, 8, 3))
    top = m.ReLU(name="r0")(m.Conv2d(3, 8, 3, padding=1, name="top")(x))
    low = m.ReLU(name="r1")(m.Conv2d(8, 12, 3, 2, padding=1, name="down")(top))
    up = m.ConvTranspose2d(12, 6, 2, 2, name="up")(low)
    x = m.Concat(name="cat")(up, top)
    x = m.LeakyReLU(name="r2")(conv(x, 9, "merge"))
    return graph.output(m.Conv2d(9, 4, 1, name="head")(x))


def dense():
    """Every layer reads all before it."""
    graph = m.Graph()
    x = conv(graph.input((4, 4, 3)), 6, "stem")  # means of 16 pixels are exact
    for i in range(3):
        y = conv(m.ReLU(name=f"r{i}")(m.BatchNorm2d(x.shape[-1], name=f"n{i}")(x)), 4, f"grow{i}")
        x = m.Concat(name=f"cat{i}")(x, y)
    return graph.output(m.Linear(18, 5, name="head")(m.Flatten()(m.AdaptiveAvgPool2d(1, name="avg")(x))))


NETWORKS = {"residual": residual, "mobile": mobile, "unet": unet, "dense": dense}


def model_of(graph, ops, **options):
    return m.Model(graph, device=ops.name, **options)


def integers(model, rng):
    """A state of whole numbers in which batch norms scale by whole numbers, so that every sum is exact."""
    state = model.state_dict()
    for name, value in state.items():
        state[name] = draw_integers(rng, value.shape, f32, limit=1)
        if name.endswith("running_var"):
            state[name] = np.full(value.shape, 1 - 1e-5, f32)  # with eps it is 1
    return state


def drop(state, optimizer):
    return {name: value * optimizer.masks()[name] if name in optimizer.masks() else value
            for name, value in state.items()}  # fmt: skip


def pruner(model, final=0.6, kind=PrunedSGD, **options):
    options = {"granularity": "filter", "exclude": ["head.*"]} | options
    return kind(model, 0.05, 0.9, weight_decay=1e-3, pruning=Pruning(CubicSchedule(final, 1, 1), **options))


def take_steps(model, optimizer, batches):
    loss = m.SoftmaxCrossEntropy()
    for x, labels in batches:
        loss.forward(model.forward(model.ops.from_host(x)), model.ops.from_host(labels))
        model.backward(loss.backward(optimizer.loss_scale))
        optimizer.step()


def batches(rng, model, number):
    shape, out = model.graph.nodes[0].shape, model.graph.output_node.shape
    return [(draw(rng, (4, *shape), f32), rng.integers(0, out[-1], (4, *out[:-1])).astype(np.int32))
            for _ in range(number)]  # fmt: skip


def cost(graph, batch=4):
    shapes = graph.shapes((batch, *graph.nodes[0].shape))
    costs = [n.layer.cost(*(shapes[i] for i in n.inputs)) for n in graph.nodes if n.layer]
    return [sum(getattr(getattr(c, p), what) for c in costs for p in ("forward", "backward_data", "backward_weight"))
            for what in ("flop", "bytes")]  # fmt: skip


def drawn_network(seed):
    """A network of random layers and joins; the same for the same seed."""
    rng = np.random.default_rng(seed)
    graph = m.Graph()
    nodes = [m.Conv2d(2, 4, 3, padding=1, name="stem")(graph.input((4, 4, 2)))]
    for i in range(9):
        x, name = nodes[rng.integers(max(len(nodes) - 3, 0), len(nodes))], f"n{i}"
        like = [y for y in nodes if y.shape == x.shape]
        other = like[rng.integers(len(like))]
        kind = rng.choice(["conv", "conv", "norm", "relu", "deep", "add", "add", "mul", "cat", "pool"])
        layer = {
            "conv": m.Conv2d(x.shape[-1], int(rng.integers(1, 6)), 3, padding=1, bias=bool(i % 2), name=name),
            "norm": m.BatchNorm2d(x.shape[-1], name=name), "relu": m.ReLU(name=name), "add": m.Add(name=name),
            "deep": m.Conv2d(x.shape[-1], 2 * x.shape[-1], 3, padding=1, groups=x.shape[-1], name=name),
            "mul": m.Mul(name=name), "cat": m.Concat(name=name), "pool": m.MaxPool2d(3, 1, 1, name=name),
        }[kind]  # fmt: skip
        nodes.append(layer(x, other) if kind in ("add", "mul", "cat") else layer(x))
    ends = [n for n in graph.nodes if not graph.consumers()[n.index]]
    last = m.Concat(name="all")(*ends) if len(ends) > 1 else ends[0]
    return graph.output(m.Linear(16 * last.shape[-1], 3, name="head")(m.Flatten()(last)))


def test_any_network_with_dead_channels_keeps_its_outputs(cpu_ops):
    """Half of all filters and a third of all columns die at random, in no pattern that the graph asks for."""
    smaller = 0
    for seed in range(60):
        rng = np.random.default_rng([seed, 1])
        model = m.Model(drawn_network(seed))
        state = integers(model, rng)
        for name, value in state.items():
            if not name.startswith("head") and "running" not in name:
                value[rng.random(len(value)) < 0.5] = 0
            if value.ndim == 4:
                value[..., rng.random(value.shape[-1]) < 0.3] = 0
        model.load_state_dict(state)
        graph, cut = shrink(drawn_network(seed), state)
        small = m.Model(graph)
        small.load_state_dict(cut.state(state))
        x = draw_integers(rng, (3, 4, 4, 2), f32, limit=1)
        expected = model.eval().forward(x)
        assert np.abs(expected).max() < 1 << 22, "else sums would not be exact"
        np.testing.assert_array_equal(small.eval().forward(x), expected, err_msg=f"seed {seed}")
        smaller += small.num_parameters < model.num_parameters
    assert smaller > 30


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_whole_numbers_give_the_same_bits(ops, rng, name, training):
    """Where sums are exact nothing but the order of terms could differ: the outputs are equal to the bit."""
    model = model_of(NETWORKS[name](), ops)
    optimizer = pruner(model)
    take_steps(model, optimizer, batches(rng, model, 1))
    state = drop(integers(model, rng), optimizer)
    graph, cut = shrink(NETWORKS[name](), state)
    small = model_of(graph, ops)
    assert small.num_parameters < 0.65 * model.num_parameters
    x = ops.from_host(draw_integers(rng, (3, *graph.nodes[0].shape), f32, limit=2))
    outputs = []
    for which, values in ((model, state), (small, cut.state(state))):
        which.load_state_dict(values)
        outputs.append(ops.to_host(which.eval().forward(x) if not training else which.train().forward(x)))
    if training:  # batch statistics are no whole numbers
        assert_close(outputs[1], outputs[0], terms=1 << 12, scale=np.abs(outputs[0]).max() / 64)
    else:
        np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize("name", NETWORKS)
def test_training_goes_on_where_the_masked_network_was(ops, rng, name):
    """Momentum taken along by name, both networks take the same steps; the small one costs less."""
    model = model_of(NETWORKS[name](), ops)
    optimizer = pruner(model)
    steps = batches(rng, model, 6)
    take_steps(model, optimizer, steps[:2])
    graph, cut = shrink(NETWORKS[name](), model.state_dict())
    small = model_of(graph, ops)
    small.load_state_dict(cut.state(model.state_dict()))
    tuned = m.SGD(small, 0.05, 0.9, weight_decay=1e-3)
    tuned.load_state_dict(without_masks(cut.state(optimizer.state_dict())))
    take_steps(model, optimizer, steps[2:])
    take_steps(small, tuned, steps[2:])
    expected = cut.state(model.state_dict())
    for key, value in small.state_dict().items():
        np.testing.assert_allclose(value, expected[key], rtol=2e-3, atol=2e-4, err_msg=key)
    for before, after in zip(cost(model.graph), cost(graph), strict=True):
        assert after < 0.8 * before
    assert tuned.velocity.size < optimizer.velocity.size


@pytest.mark.parametrize("name", ["resnet20", "resnet50", "mobilenet_v2", "efficientnet_b0", "densenet121", "unet"])
def test_the_networks_shrink(cpu_ops, rng, name):
    def build():
        return models.build(name, (32, 32, 3), 4)

    model = m.Model(build())
    state = model.state_dict()
    for key in state:  # statistics and scales of a network that has learnt
        if key.endswith("running_mean") or (key.endswith("bias") and state[key].ndim == 1):
            state[key] = draw(rng, state[key].shape, f32, scale=0.2)
    model.load_state_dict(state)
    optimizer = pruner(model, 0.5, exclude=[])
    optimizer.after_step()
    graph, cut = shrink(build(), model.state_dict())
    small = m.Model(graph)
    small.load_state_dict(cut.state(model.state_dict()))
    x = draw(rng, (2, 32, 32, 3), f32)
    before, after = model.eval().forward(x), small.eval().forward(x)
    assert np.ptp(before) > 0.01
    np.testing.assert_allclose(after, before, rtol=1e-3, atol=1e-5 * np.abs(before).max())
    assert small.num_parameters < 0.35 * model.num_parameters and cost(graph)[0] < 0.45 * cost(model.graph)[0]


def test_every_dropped_filter_is_cut_and_no_other(cpu_ops, rng):
    model = m.Model(residual())
    optimizer = pruner(model, include=["stem.weight", "*"])
    take_steps(model, optimizer, batches(rng, model, 1))
    graph, cut = shrink(residual(), model.state_dict())
    for name, mask in optimizer.masks().items():
        rows = mask.reshape(len(mask), -1).any(axis=1)
        np.testing.assert_array_equal(cut.kept[name][0], np.flatnonzero(rows), err_msg=name)
        assert cut.state({name: mask})[name].all(), "masks of what is left are full"
    names = {"stem", "a2"}
    tied = [optimizer.masks()[f"{name}.weight"].any(axis=(1, 2, 3)) for name in names]
    np.testing.assert_array_equal(*tied)
    assert cut.dropped == ()


def test_filters_are_those_of_least_norm_in_each_tied_set(cpu_ops, rng):
    model = m.Model(residual())
    weights = model.state_dict()
    optimizer = pruner(model, 0.5)
    optimizer.after_step()
    norm = {name: np.square(weights[f"{name}.weight"].astype(float)).mean(axis=(1, 2, 3)) for name in ("a1", "b1")}
    size = {name: weights[f"{name}.weight"][0].size for name in ("b2", "proj")}
    both = [np.square(weights[f"{name}.weight"].astype(float)).sum(axis=(1, 2, 3)) for name in size]
    norm["b2"] = norm["proj"] = sum(both) / sum(size.values())
    for name, values in norm.items():
        kept = optimizer.masks()[f"{name}.weight"].any(axis=(1, 2, 3))
        assert abs((~kept).sum() - 0.5 * kept.size) <= 0.5
        assert values[~kept].max() <= values[kept].min()
        for vector in ("weight", "bias"):
            np.testing.assert_array_equal(optimizer.masks()[f"{name}_bn.{vector}"], kept)
    assert not [name for name in optimizer.masks() if name.startswith(("stem", "a2", "head"))], "the first is dense"


def test_branches_go_whole(ops, rng):
    """Layers as units: of ResNet-20 two thirds of the blocks; what is left is the network without them."""

    def build():
        return models.resnet20(4, (16, 16, 3))

    model = model_of(build(), ops)
    optimizer = pruner(model, 0.6, granularity="layer", scope="global", exclude=["fc.*"])
    steps = batches(rng, model, 4)
    take_steps(model, optimizer, steps[:2])
    graph, cut = shrink(build(), model.state_dict())
    gone = {name.split(".conv")[0] for name in cut.dropped if ".conv" in name}
    assert gone and set(cut.dropped) >= {f"{block}.{name}" for block in gone for name in ("conv2", "bn1", "bn2", "add")}
    assert all(f"{block}.conv{i}" in cut.dropped for block in gone for i in (1, 2))
    removed = sum(model.state_dict()[f"{block}.conv{i}.weight"].size for block in gone for i in (1, 2))
    assert abs(removed / model.num_parameters - 0.6) < 0.15
    small = model_of(graph, ops)
    small.load_state_dict(cut.state(model.state_dict()))
    x = ops.from_host(steps[3][0])
    outputs = [ops.to_host(which.eval().forward(x)) for which in (model, small)]
    np.testing.assert_array_equal(*outputs, err_msg="adding zero changes no bit")
    tuned = m.SGD(small, 0.05, 0.9, weight_decay=1e-3)
    tuned.load_state_dict(without_masks(cut.state(optimizer.state_dict())))
    for which, with_ in ((model, optimizer), (small, tuned)):
        take_steps(which.train(), with_, steps[2:])
    expected = cut.state(model.state_dict())
    for key, value in small.state_dict().items():
        np.testing.assert_array_equal(value, expected[key], err_msg=key)


@pytest.mark.parametrize("kind", [m.AdamW, m.LARS, m.LAMB])
def test_other_optimizers_prune_too(ops, rng, kind):
    model = model_of(residual(), ops)
    optimizer = pruned(kind)(model, 1e-2, weight_decay=1e-2, pruning=Pruning(
        CubicSchedule(0.6, 2, 6, frequency=2), exclude=["head.*"], granularity="filter"))  # fmt: skip
    for batch in batches(rng, model, 9):
        take_steps(model, optimizer, [batch])
        state = model.state_dict() | optimizer.state_dict()
        for name, mask in optimizer.masks().items():
            for key in (name, f"momentum.{name}", f"first.{name}", f"second.{name}"):
                assert key not in state or not state[key][~mask].any(), key
    assert min(mask.mean() for mask in optimizer.masks().values()) < 0.5
    with pytest.raises(TypeError, match="kind must be an optimizer class that holds its whole state"):
        pruned(ShardedSGD)


def test_a_checkpoint_is_taken_along_and_resumed(cpu_ops, tmp_path):
    def trainer(graph, make, folder, epochs):
        model = m.Model(graph)
        options = {"shape": (6, 6, 3), "num_classes": 5, "n": 24}
        loader = data.Loader(data.dataset("synthetic", None, "train", **options), 8, transfer=model.ops.uploader())
        return Trainer(model, make(model), m.SoftmaxCrossEntropy(), loader, schedule=lambda step: 0.05, epochs=epochs,
                       output=folder, settings={"network": "residual"})  # fmt: skip

    first = trainer(residual(), pruner, tmp_path / "masked", 2)
    first.fit()
    tensors, state = checkpoint.load(checkpoint.latest(tmp_path / "masked"))
    graph, cut = shrink(residual(), first.model.state_dict())
    checkpoint.save(checkpoint.step_path(tmp_path / "small", first.step), without_masks(cut.state(tensors)), state)
    again = trainer(graph, lambda model: m.SGD(model, 0.05, 0.9, weight_decay=1e-3), tmp_path / "small", 3)
    again.resume(tmp_path / "small")
    assert again.step == first.step == 6
    np.testing.assert_array_equal(again.optimizer.state_dict()["momentum.head.bias"],
                                  first.optimizer.state_dict()["momentum.head.bias"])  # fmt: skip
    again.fit()
    masked = trainer(residual(), pruner, tmp_path / "masked", 3)
    masked.resume(tmp_path / "masked")
    masked.fit()
    expected = cut.state(masked.model.state_dict())
    for key, value in again.model.state_dict().items():
        np.testing.assert_allclose(value, expected[key], rtol=1e-3, atol=1e-4, err_msg=key)


def test_what_nothing_reads_goes_and_what_is_fixed_stays(cpu_ops, rng):
    """A filter need not be zero to go: it is enough that all who read it multiply it by zeros."""
    graph = residual()
    state = m.Model(graph).state_dict()
    state["a2.weight"][..., 2] = 0
    small, cut = shrink(residual(), state)
    np.testing.assert_array_equal(cut.kept["a1.weight"][0], [0, 1, 3, 4, 5])
    np.testing.assert_array_equal(cut.kept["a1_bn.running_var"][0], [0, 1, 3, 4, 5])
    assert [i is None for i in cut.kept["a1.weight"]] == [False, True, True, True]
    assert small["a1_bn"].layer.num_features == 5 and small["a2"].layer.in_channels == 5
    untouched, cut = shrink(residual(), m.Model(residual()).state_dict())
    assert all(axis is None for axes in cut.kept.values() for axis in axes)
    assert [repr(layer) for layer in untouched.layers] == [repr(layer) for layer in graph.layers]


def test_a_layer_keeps_one_channel(cpu_ops, rng):
    state = m.Model(residual()).state_dict()
    for name in ("b1.weight", "b1.bias", "b1_bn.weight", "b1_bn.bias"):
        state[name][...] = 0
    graph, cut = shrink(residual(), state)
    assert graph["b1"].layer.out_channels == 1
    models_ = [m.Model(residual()), m.Model(graph)]
    x = draw(rng, (2, 6, 6, 3), f32)
    outputs = []
    for model, values in zip(models_, (state, cut.state(state)), strict=True):
        model.load_state_dict(values)
        outputs.append(model.eval().forward(x))
    np.testing.assert_array_equal(*outputs)
    model = m.Model(residual())
    optimizer = pruner(model, 0.99)
    optimizer.after_step()
    for name, mask in optimizer.masks().items():
        assert mask.any(), name


def test_norms_over_channels_hold_theirs(cpu_ops):
    def build():
        graph = m.Graph()
        x = m.GroupNorm(2, 8, name="norm")(m.Conv2d(3, 8, 3, name="a")(graph.input((6, 6, 3))))
        x = m.Conv2d(6, 6, 3, name="b")(m.Sigmoid(name="s")(m.Conv2d(8, 6, 1, name="c")(x)))
        return graph.output(m.Linear(6 * 4, 3, name="head")(m.Flatten()(x)))

    graph = build()
    channels = Channels(graph)
    assert channels.fixed[channels.labels[graph["a"].index]].all()
    assert not channels.fixed[channels.labels[graph["c"].index]].any()
    state = m.Model(graph).state_dict()
    for name in ("a", "c"):
        state[f"{name}.weight"][0] = state[f"{name}.bias"][0] = 0  # a half, after the sigmoid
    small, _ = shrink(build(), state)
    assert [layer.out_channels for layer in (small["a"].layer, small["c"].layer)] == [8, 6]
    optimizer = pruner(m.Model(small), 0.5, exclude=[])
    assert optimizer.masks().keys() == {"b.weight", "b.bias"}, "behind a sigmoid no mask makes zeros"


def test_what_cannot_be_shrunk_is_refused(cpu_ops):
    model = m.Model(residual())
    state = model.state_dict()
    with pytest.raises(RuntimeError, match="the graph belongs to a model; build the graph again"):
        shrink(model.graph, state)
    with pytest.raises(ValueError, match="state must be one that holds head.bias"):
        shrink(residual(), {k: v for k, v in state.items() if k != "head.bias"})
    with pytest.raises(ValueError, match=r"a1.weight must have shape \(6, 3, 3, 8\)"):
        shrink(residual(), state | {"a1.weight": state["a2.weight"]})
    _, cut = shrink(residual(), state)
    with pytest.raises(ValueError, match=r"momentum.a1.bias must have shape \(6,\), got"):
        cut.state({"momentum.a1.bias": state["a1.weight"]})
    lone = m.Graph()
    lone.output(m.Linear(4, 3, name="head")(lone.input((4,))))
    with pytest.raises(ValueError, match="no filter can go"):
        pruner(m.Model(lone), include=["head.weight"], exclude=[])
    with pytest.raises(ValueError, match="no layer can go"):
        pruner(m.Model(unet()), granularity="layer", scope="global", exclude=[])
    with pytest.raises(ValueError, match="scope must be 'global' for layers"):
        Pruning(CubicSchedule(0.5, 1, 1), granularity="layer")


@pytest.mark.parametrize("granularity", ["filter", "layer"])
@pytest.mark.parametrize("name", [*NETWORKS, "resnet20", "mobilenet_v2", "densenet121", "unet-model"])
def test_a_shrunk_state_tells_its_network(cpu_ops, name, granularity):
    """`resized` builds from names and shapes what `shrink` built from values."""

    def build():
        if name in NETWORKS:
            return NETWORKS[name]()
        return models.build(name.removesuffix("-model"), (32, 32, 3), 4)

    model = m.Model(build())
    try:
        optimizer = pruner(model, 0.5, granularity=granularity, scope="global", exclude=[])
    except ValueError as error:
        assert granularity == "layer" and "no layer can go" in str(error)
        assert not any(isinstance(layer, m.Add) for layer in model.layers)
        return
    optimizer.after_step()
    graph, cut = shrink(build(), model.state_dict())
    assert cut.dropped or granularity == "filter"
    again = resized(build(), cut.state(model.state_dict()))
    assert [(n.name, n.inputs, n.shape, repr(n.layer)) for n in again.nodes] == [
        (n.name, n.inputs, n.shape, repr(n.layer)) for n in graph.nodes
    ]
    m.Model(again).load_state_dict(cut.state(model.state_dict()))


def test_states_of_other_networks_are_refused(cpu_ops):
    state = m.Model(residual()).state_dict()
    with pytest.raises(ValueError, match="state must be of a network cut out of this one.*lacks stem.weight"):
        resized(residual(), {k: v for k, v in state.items() if k != "stem.weight"})
    with pytest.raises(RuntimeError, match="belongs to a model"):
        resized(m.Model(residual()).graph, state)
