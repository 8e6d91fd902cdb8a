"""ONNX export: a runtime of its own computes what the model computes."""

from __future__ import annotations

import numpy as np
import pytest

import minidl as m
from minidl import models
from minidl.onnx import export_onnx, to_onnx

onnx = pytest.importorskip("onnx", reason="needs onnx")
runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")


def randomise(model, rng):
    """Every parameter and running statistic another number, so that none of them can be left out or mixed up."""
    state = model.state_dict()
    for name, value in state.items():
        spread = rng.uniform(0.5, 1.5, value.shape) if value.ndim == 1 else 1 + 0.1 * rng.standard_normal(value.shape)
        state[name] = (np.abs(value) * spread if name.endswith("var") else value * spread + 0.01).astype(np.float32)
    model.load_state_dict(state)
    return model


def assert_same(model, rng, *, layout="NHWC", batch=3):
    randomise(model, rng).eval()
    x = rng.standard_normal((batch, *model.graph.nodes[0].shape)).astype(np.float32)
    expected = model.forward(x)
    session = runtime.InferenceSession(
        to_onnx(model, layout=layout).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    turned = layout == "NCHW" and x.ndim == 4
    (found,) = session.run(["output"], {"input": x.transpose(0, 3, 1, 2) if turned else x})
    if layout == "NCHW" and found.ndim == 4:
        found = found.transpose(0, 2, 3, 1)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def chain(shape, *layers):
    graph = m.Graph()
    x = graph.input(shape)
    for layer in layers:
        x = layer(x)
    return m.Model(graph.output(x))


LAYERS = {
    "conv": ((9, 8, 6), lambda: [m.Conv2d(6, 8, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2)]),
    "conv-without-bias": ((5, 5, 3), lambda: [m.Conv2d(3, 4, 3, bias=False)]),
    "depthwise": ((6, 7, 5), lambda: [m.Conv2d(5, 10, 3, padding=1, groups=5)]),
    "transposed": (
        (5, 4, 6),
        lambda: [m.ConvTranspose2d(6, 4, 3, stride=(2, 3), padding=1, output_padding=(1, 0), groups=2)],
    ),
    "norm": ((4, 5, 3), lambda: [m.BatchNorm2d(3, eps=1e-3)]),
    "norm-without-affine": ((4, 5, 3), lambda: [m.Conv2d(3, 3, 1), m.BatchNorm2d(3, affine=False), m.ReLU()]),
    "norm-of-vectors": ((7,), lambda: [m.Linear(7, 5), m.BatchNorm2d(5)]),
    "max-pool": ((9, 8, 3), lambda: [m.MaxPool2d(3, 2, 1)]),
    "max-pool-ceil": ((8, 10, 3), lambda: [m.MaxPool2d(3, 2, ceil_mode=True, dilation=1)]),
    "max-pool-ceil-dilated": ((8, 10, 3), lambda: [m.MaxPool2d(2, 3, ceil_mode=True, dilation=2)]),
    "max-pool-ceil-padded": ((6, 3, 3), lambda: [m.MaxPool2d((3, 2), 2, (0, 1), ceil_mode=True)]),
    "avg-pool": ((9, 8, 3), lambda: [m.AvgPool2d((3, 2), 2, (1, 0), count_include_pad=False)]),
    "avg-pool-padded": ((9, 8, 3), lambda: [m.AvgPool2d(3, 2, 1)]),
    "adaptive": ((9, 8, 3), lambda: [m.AdaptiveAvgPool2d(1)]),
    "adaptive-parts": ((9, 8, 3), lambda: [m.AdaptiveAvgPool2d((3, 2))]),
    "adaptive-uneven": ((5, 8, 3), lambda: [m.AdaptiveAvgPool2d((3, 9))]),
    "adaptive-uneven-across": ((6, 8, 3), lambda: [m.AdaptiveAvgPool2d((3, 5))]),
    "flatten": ((3, 4, 5), lambda: [m.StochasticDepth(0.1), m.Flatten(), m.Dropout(0.5), m.Linear(60, 7, bias=False)]),
    "pad": ((5, 6, 2), lambda: [m.Pad((1, -2, 0, 3), 0.5)]),
    "group-norm": ((4, 5, 6), lambda: [m.GroupNorm(3, 6)]),
    "group-norm-without-affine": ((4, 5, 6), lambda: [m.GroupNorm(2, 6, affine=False)]),
    "layer-norm": ((4, 5, 6), lambda: [m.LayerNorm(6)]),
    "layer-norm-of-vectors": ((7,), lambda: [m.LayerNorm(7)]),
    "leaky-relu": ((4, 5, 3), lambda: [m.LeakyReLU(0.2)]),
    "relu6": ((4, 5, 3), lambda: [m.Conv2d(3, 3, 1), m.ReLU6()]),
    "sigmoid": ((4, 5, 3), lambda: [m.Sigmoid()]),
    "tanh": ((4, 5, 3), lambda: [m.Tanh()]),
    "silu": ((4, 5, 3), lambda: [m.SiLU()]),
    "gelu": ((4, 5, 3), lambda: [m.GELU()]),
    "gelu-tanh": ((4, 5, 3), lambda: [m.GELU("tanh")]),
    "hardswish": ((4, 5, 3), lambda: [m.Hardswish()]),
    "softmax": ((4, 5, 3), lambda: [m.Softmax()]),
    "softmax-of-vectors": ((7,), lambda: [m.Softmax()]),
    "nearest": ((4, 5, 3), lambda: [m.Upsample((7, 12))]),
    "nearest-smaller": ((9, 8, 3), lambda: [m.Upsample((4, 3))]),
    "bilinear": ((4, 5, 3), lambda: [m.Upsample(scale_factor=2, mode="bilinear")]),
    "bilinear-corners": ((4, 5, 3), lambda: [m.Upsample((9, 7), mode="bilinear", align_corners=True)]),
}


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_computes_the_same(name, layout, rng):
    shape, layers = LAYERS[name]
    assert_same(chain(shape, *layers()), rng, layout=layout)


def test_every_layer_that_has_a_form_is_tested():
    from minidl.onnx import _FORMS

    tested = {type(layer) for _, layers in LAYERS.values() for layer in layers()} | {m.Add, m.Concat, m.Mul}
    assert tested == set(_FORMS)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("resnet20", (32, 32, 3)),
        ("resnet18", (32, 32, 3)),
        ("unet", (32, 48, 3)),
        ("densenet121", (32, 32, 3)),
        ("mobilenet_v2", (32, 32, 3)),
        ("efficientnet_b0", (32, 32, 3)),
        ("lenet", (28, 28, 1)),
        ("mlp", (8, 8, 1)),
    ],
)
def test_whole_networks_compute_the_same(name, shape, rng):
    assert_same(m.Model(models.build(name, shape, 7)), rng, batch=2)


def test_a_file_holds_the_names_of_a_checkpoint(tmp_path):
    model = m.Model(models.build("resnet20", (16, 16, 3), 4))
    export_onnx(model, tmp_path / "net.onnx", layout="NCHW")
    file = onnx.load(tmp_path / "net.onnx")
    assert {constant.name for constant in file.graph.initializer} == set(model.state_dict())
    shapes = [[d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in file.graph.input]
    assert shapes == [["N", 3, 16, 16]] and [node.name for node in file.graph.node][-1] == "output"


def test_what_onnx_cannot_say_is_refused():
    with pytest.raises(ValueError, match="layout"):
        to_onnx(chain((4, 4, 3), m.ReLU()), layout="NWHC")
    with pytest.raises(ValueError, match="ceil_mode"):
        to_onnx(chain((5, 4, 3), m.AvgPool2d(2, ceil_mode=True)))

    class Own(m.ReLU):
        pass

    with pytest.raises(ValueError, match=r"own: layer must be one that ONNX export knows .*got .*Own"):
        to_onnx(chain((5, 4, 3), Own(name="own")))
