"""Graphs: names, scopes, shapes, and what building refuses."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

import minidl as m
from minidl import models
from minidl.value import GatedGradient


def small():
    graph = m.Graph()
    x = graph.input((8, 8, 3))
    with m.scope("stem"):
        x = m.ReLU()(m.Conv2d(3, 4, 3, padding=1, name="conv")(x))
    y = m.Conv2d(4, 4, 1, name="side")(x)
    return graph, graph.output(m.Add()(x, y))


def test_scopes_name_layers_and_shapes_follow():
    graph, _ = small()
    assert [layer.name for layer in graph.layers] == ["stem.conv", "stem.relu", "side", "add"]
    assert graph["stem.conv"].shape == (8, 8, 4)
    assert graph.shapes((5, 16, 8, 3))[-1] == (5, 16, 8, 4)
    assert graph.consumers()[2] == [3, 4]


def test_a_name_stands_once_and_the_error_names_the_remedy():
    graph = m.Graph()
    x = m.Linear(4, 4)(graph.input((4,)))
    with pytest.raises(ValueError, match=r"Linear: name .*scope around 'linear'"):
        m.Linear(4, 4)(x)
    with pytest.raises(ValueError, match=r"ReLU: name .*scope around 'linear'"):
        m.ReLU(name="linear")(x)


def test_layers_without_weights_that_nobody_named_are_numbered():
    graph = m.Graph()
    x = graph.input((4, 4, 3))
    for _ in range(3):
        x = m.ReLU()(x)
    with m.scope("a"):
        x = m.Dropout(0.5)(m.ReLU()(x))
    m.ReLU()(m.ReLU(name="relu4")(x))
    wanted = ["relu", "relu2", "relu3", "a.relu", "a.dropout", "relu4", "relu5"]
    assert [layer.name for layer in graph.layers] == wanted
    x = m.BatchNorm2d(3, affine=False)(x)
    with pytest.raises(ValueError, match=r"BatchNorm2d: name .*scope around 'batchnorm2d'"):  # its statistics have it
        m.BatchNorm2d(3, affine=False)(x)


def test_a_layer_stands_in_a_graph_once():
    graph = m.Graph()
    layer = m.Linear(4, 4, name="fc")
    x = layer(graph.input((4,)))
    with pytest.raises(RuntimeError, match="fc: it stands in this graph already; .*make another layer"):
        layer(x)


def test_a_layer_stands_in_one_graph_and_keeps_its_name():
    layer = m.Linear(4, 4, name="fc")
    with m.scope("head"):
        kept = layer(m.Graph().input((4,)))
        with pytest.raises(RuntimeError, match=r"head\.fc: it stands in another graph already; .*make another layer"):
            layer(m.Graph().input((4,)))
    assert layer.name == kept.name == "head.fc" and kept.graph["head.fc"] is kept


def test_shape_errors_come_while_building_and_name_the_layer():
    graph = m.Graph()
    with m.scope("block"), pytest.raises(ValueError, match=r"block.conv: x"):
        m.Conv2d(4, 4, 3, name="conv")(graph.input((8, 8, 3)))


def test_an_output_that_leaves_layers_behind_is_refused():
    graph = m.Graph()
    x = graph.input((4,))
    m.Linear(4, 4, name="lost")(x)
    with pytest.raises(ValueError, match="lost"):
        graph.output(m.Linear(4, 2, name="kept")(x))
    with pytest.raises(RuntimeError, match="output"):
        _ = graph.output_node


def test_unknown_layers_are_named_with_what_is_near():
    graph, _ = small()
    with pytest.raises(ValueError, match="did you mean 'stem.conv'"):
        _ = graph["stem.conf"]


# Parameters of torchvision's networks (and of the U-Net with 64..1024 channels), counted from their publications.
PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "resnext50_32x4d": 25_028_904,
    "wide_resnet50_2": 68_883_240,
    "vgg16": 138_357_544,
    "vgg16_bn": 138_365_992,
    "densenet121": 7_978_856,
    "mobilenet_v2": 3_504_872,
    "efficientnet_b0": 5_288_548,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_models_have_the_published_number_of_parameters(name):
    graph = models.build(name, (224, 224, 3), 1000)
    assert sum(prod(spec.shape) for layer in graph.layers for spec in layer.specs) == PARAMETERS[name]
    assert graph.output_node.shape == (1000,)


@pytest.mark.parametrize(
    ("name", "shape", "output"),
    [
        ("mlp", (28, 28, 1), (10,)),
        ("lenet", (28, 28, 1), (10,)),
        ("resnet20", (32, 32, 3), (10,)),
        ("resnet20", (8, 8, 1), (10,)),
        ("unet", (64, 96, 3), (64, 96, 10)),
        ("mobilenet_v2", (33, 40, 1), (10,)),
        ("efficientnet_b0", (40, 33, 3), (10,)),
        ("unet", (31, 191, 3), (31, 191, 10)),
    ],
)
def test_models_of_other_inputs(name, shape, output):
    assert models.build(name, shape, 10).output_node.shape == output


def test_a_narrow_mobilenet_has_the_published_number_of_parameters():
    graph = models.mobilenet_v2(width=0.5)
    assert sum(prod(spec.shape) for layer in graph.layers for spec in layer.specs) == 1_968_680


def test_squeeze_excitation_and_depthwise_separable_blocks(rng):
    graph = m.Graph()
    x = graph.input((6, 5, 8))
    with m.scope("a"):
        y = models.depthwise_separable(x, 12, stride=2)
    assert y.shape == (3, 3, 12)
    with m.scope("b"):
        y = models.squeeze_excitation(y, 3)
    graph.output(y)
    model = m.Model(graph)
    shapes = {name: values.shape for name, values in model.state_dict().items() if name.endswith("weight")}
    assert shapes["a.depthwise.0.weight"] == (8, 3, 3, 1) and shapes["a.pointwise.0.weight"] == (12, 1, 1, 8)
    assert shapes["b.fc1.weight"] == (3, 1, 1, 12) and shapes["b.fc2.weight"] == (12, 1, 1, 3)
    image = rng.standard_normal((2, 6, 5, 8)).astype(np.float32)
    gate = graph["b.scale_activation"].layer
    found = {}
    compute = gate.compute
    gate.compute = lambda value: found.setdefault("gate", compute(value))
    before = graph["a.pointwise.2"].layer
    inner = before.compute
    before.compute = lambda value: found.setdefault("x", inner(value))
    out = model.forward(image)
    np.testing.assert_allclose(out, found["x"].array * found["gate"], rtol=1e-6)
    model.backward(out)


def squeezed(further=False):
    """A squeeze and excitation over a convolution, which with ``further`` another layer reads too."""
    graph = m.Graph()
    x = m.Conv2d(3, 8, 3, padding=1, name="below")(graph.input((6, 5, 3)))
    y = models.squeeze_excitation(x, 4)
    return graph.output(m.Conv2d(8, 4, 1, name="above")(m.Add()(x, y) if further else y))


@pytest.mark.parametrize("further", [False, True])
def test_both_gradients_of_gated_images_are_one_pass(ops, rng, further, monkeypatch):
    """Of a gate made of their means; where a further layer reads the images, each is a pass of its own."""
    image, dy = (rng.standard_normal((3, 6, 5, c)).astype(np.float32) for c in (3, 4))
    found, passes = [], []
    joined = ops.gate_backward
    monkeypatch.setattr(ops, "gate_backward", lambda *args: passes.append(1) or joined(*args))
    for gated in (True, False):
        model = m.Model(squeezed(further), device=ops.name)
        model.graph["avgpool"].layer.accepts_owed = (GatedGradient,) if gated else ()
        model.forward(ops.from_host(image))
        model.backward(ops.from_host(dy))
        views = [model.arena.layer(name).grad("weight").view for name in ("below", "fc1", "fc2", "above")]
        found.append([ops.to_host(view) for view in views])
    assert len(passes) == (not further)
    for one, apart in zip(*found, strict=True):
        np.testing.assert_allclose(one, apart, rtol=1e-5, atol=1e-6 * np.abs(apart).max())


@pytest.mark.parametrize("means", ["other", "parts"])
def test_a_gate_of_something_else_is_a_gate(cpu_ops, rng, means):
    """Of other images' means, or beside means over some of the pixels."""
    graph = m.Graph()
    x = m.Conv2d(3, 8, 3, padding=1, name="a")(graph.input((6, 4, 3)))
    other = m.Conv2d(3, 8, 1, name="b")(graph.nodes[0]) if means == "other" else None
    gate = m.AdaptiveAvgPool2d(1, name="means")(other if means == "other" else m.AdaptiveAvgPool2d(2, name="parts")(x))
    model = m.Model(graph.output(m.Mul(name="mul")(x, gate)))
    direction = rng.standard_normal((2, 6, 4, 8)).astype(np.float32)
    image = rng.standard_normal((2, 6, 4, 3)).astype(np.float32)
    model.forward(image)
    model.backward(direction)
    view = model.arena.layer("a").grad("weight").view.copy()
    weight = model.graph["a"].layer.params["weight"]
    step = 2.0**-6 * np.sign(view)
    values = []
    for sign in (1, -1):
        weight += sign * step
        values.append(float((model.forward(image).astype(np.float64) * direction).sum()))
        weight -= sign * step
    assert (values[0] - values[1]) / 2 == pytest.approx(float((view * step).sum()), rel=1e-3)


def test_unet_pads_on_the_way_up_only_where_pooling_dropped_a_row_or_column():
    """191 columns are pooled to 95, 47, 23, 11; 128 rows halve evenly."""
    pads = [node.layer.padding for node in models.build("unet", (128, 191, 3), 2).nodes if node.name.endswith(".pad")]
    assert pads == [(0, 1, 0, 0)] * 4
    assert not [node for node in models.build("unet", (128, 192, 3), 2).nodes if node.name.endswith(".pad")]


def test_unknown_models_and_unfit_images_are_clear_errors():
    with pytest.raises(ValueError, match="did you mean 'resnet18'"):
        models.build("resnet81", (224, 224, 3), 10)
    with pytest.raises(ValueError, match="at least 16"):
        models.build("unet", (100, 15, 3), 2)
    with pytest.raises(ValueError, match="at least as large"):
        models.build("vgg16", (16, 16, 3), 2)
    with pytest.raises(ValueError, match=r"mlp: hidden must be a sequence of widths, such as \(128, 128\), got 128"):
        models.mlp(hidden=128)
    with pytest.raises(ValueError, match="efficientnet_b0: stochastic_depth must be a number in .*, got 2"):
        models.efficientnet_b0(stochastic_depth=2)


def parameter_names(model):
    return {f"{layer.name}.{s.name}" for layer in models.build(model, (64, 64, 3), 10).layers for s in layer.specs}


def test_resnet_names_are_torchvisions():
    names = parameter_names("resnet50")
    assert {
        "conv1.weight", "bn1.bias", "layer1.0.downsample.0.weight", "layer1.0.downsample.1.weight",
        "layer3.5.conv2.weight", "layer4.2.bn3.weight", "fc.weight", "fc.bias",
    } <= names  # fmt: skip
    names = parameter_names("densenet121")
    assert {
        "features.conv0.weight", "features.norm0.weight", "features.denseblock3.denselayer24.conv2.weight",
        "features.transition2.norm.bias", "features.transition2.conv.weight", "features.norm5.weight",
        "classifier.bias",
    } <= names  # fmt: skip


def test_a_layer_that_was_refused_keeps_its_own_name():
    layer = m.Linear(4, 4, name="fc")
    with m.scope("head"):
        with pytest.raises(ValueError, match=r"head\.fc: x must have shape"):
            layer(m.Graph().input((5,)))
        layer(m.Graph().input((4,)))
    assert layer.name == "head.fc"


def test_layers_added_after_the_output_or_the_model():
    graph = m.Graph()
    x = m.ReLU(name="a")(graph.input((4,)))
    graph.output(x)
    y = m.ReLU(name="b")(x)
    with pytest.raises(RuntimeError, match="output is not known"):
        m.Model(graph)
    m.Model(graph.output(y))
    with pytest.raises(RuntimeError, match="c: added to a graph that belongs to a model"):
        m.ReLU(name="c")(y)


@pytest.mark.parametrize("shape", [5, (), (3, 4), (2, 8, 8, 3)])
def test_an_input_is_an_image_or_a_vector(shape):
    with pytest.raises(ValueError, match="graph: input shape"):
        m.Graph().input(shape)


def test_an_output_is_a_node():
    with pytest.raises(ValueError, match="a node of this graph"):
        m.Graph().output(None)


@pytest.mark.parametrize("name", ["mobilenet_v2", "efficientnet_b0"])
def test_mobile_networks_fit_a_batch(name, ops, rng):
    model = m.Model(models.build(name, (32, 32, 3), 4, dropout=0.0), device=ops.name)
    x = ops.from_host(rng.standard_normal((8, 32, 32, 3)).astype(np.float32))
    labels = ops.from_host(rng.integers(0, 4, 8))
    loss, optimizer, seen = m.SoftmaxCrossEntropy(), m.AdamW(model, 2e-3), []
    for _ in range(6):
        seen.append(loss.forward(model.forward(x), labels).loss)
        model.backward(loss.backward())
        optimizer.step()
    assert seen[-1] < 0.5 * seen[0], seen
