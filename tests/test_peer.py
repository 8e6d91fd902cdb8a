"""A training step of whole networks equals PyTorch's, where torch is installed: logits, loss and every gradient."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import minidl as m
from minidl import models

torch = pytest.importorskip("torch", reason="needs torch as a peer")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from torch_peer import TorchGraph, from_nhwc  # noqa: E402

NETWORKS = {
    "resnet20": ((32, 32, 3), {}),
    "resnet18": ((64, 64, 3), {}),
    "resnet50": ((64, 64, 3), {}),
    "densenet121": ((64, 64, 3), {}),
    "unet": ((32, 48, 3), {"width": 8}),
    "lenet": ((28, 28, 1), {}),
    "mlp": ((9, 7, 2), {}),
}


def torch_step(graph, state, images, labels, dtype):
    """(logits NHWC, loss, gradients by minidl's names in minidl's layout) of PyTorch in ``dtype``, float64 arrays."""
    peer = TorchGraph(graph).load(state).to(dtype)
    logits = peer(from_nhwc(images, dtype=dtype))
    loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels).long())
    loss.backward()
    gradients = {}
    for name, parameter in peer.named_parameters():
        layer, _, field = name.removeprefix("layers.").rpartition(".")
        values = parameter.grad.double().numpy()
        gradients[f"{layer.replace('/', '.')}.{field}"] = np.moveaxis(values, 1, -1) if values.ndim == 4 else values
    return np.moveaxis(logits.detach().double().numpy(), 1, -1), loss.item(), gradients


def distance(a, b):
    """Relative distance of all gradients together."""
    total = sum(np.sum((a[name] - b[name]) ** 2) for name in b)
    return np.sqrt(total / sum(np.sum(values**2) for values in b.values()))


@pytest.mark.parametrize("name", NETWORKS)
def test_one_step_is_as_near_to_float64_as_torchs(name, ops, rng):
    """Both libraries round in float32, in different orders, and ReLU masks flip near zero; neither may be the worse."""
    shape, options = NETWORKS[name]
    build = lambda: models.build(name, shape, 5, **options)  # noqa: E731
    model = m.Model(build(), device=ops.name)
    images = rng.standard_normal((6, *shape)).astype(np.float32)
    labels = rng.integers(0, 5, (6, *model.output_node.shape[:-1])).astype(np.int32)
    state = model.state_dict()
    exact, exact_loss, exact_gradients = torch_step(build(), state, images, labels, torch.float64)
    single, single_loss, single_gradients = torch_step(build(), state, images, labels, torch.float32)

    loss = m.SoftmaxCrossEntropy()
    logits = model.forward(ops.from_host(images))
    totals = loss.forward(logits, ops.from_host(labels))
    model.backward(loss.backward())
    gradients = {
        f"{layer.name}.{field}": ops.to_host(gradient).astype(np.float64)
        for layer in model.layers if layer.specs
        for field, gradient in layer.params.gradients().items()
    }  # fmt: skip

    assert gradients.keys() == exact_gradients.keys()
    allowed = 3 * np.abs(single - exact).max() + 1e-6 * np.abs(exact).max()
    assert np.abs(ops.to_host(logits) - exact).max() <= allowed
    assert abs(totals.loss - exact_loss) <= 3 * abs(single_loss - exact_loss) + 1e-5
    assert distance(gradients, exact_gradients) <= 3 * distance(single_gradients, exact_gradients) + 1e-5


# -- torch tensors at a layer's door --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_torch_tensor_is_answered_by_a_torch_tensor_on_its_device(ops, dtype):
    device = "cuda" if ops.name == "cuda" else "cpu"
    x = torch.randn(2, 3, 6, 5, device=device, dtype=dtype).to(memory_format=torch.channels_last)
    layer = m.Conv2d(3, 4, 3, padding=1)
    y = layer.forward(x.permute(0, 2, 3, 1))
    assert isinstance(y, torch.Tensor) and y.device == x.device and y.dtype == dtype and y.shape == (2, 6, 5, 4)
    weight = torch.from_numpy(layer.state_dict()["weight"]).to(device, dtype).permute(0, 3, 1, 2)
    bias = torch.from_numpy(layer.state_dict()["bias"]).to(device, dtype)
    expected = torch.nn.functional.conv2d(x, weight, bias, padding=1).permute(0, 2, 3, 1)
    torch.testing.assert_close(y, expected, rtol=5e-3, atol=5e-3)
    dx = layer.backward(torch.ones_like(y))
    assert isinstance(dx, torch.Tensor) and dx.device == x.device and dx.shape == (2, 6, 5, 3)


def test_torch_tensors_in_the_wrong_layout_or_with_gradients_are_refused(ops):
    device = "cuda" if ops.name == "cuda" else "cpu"
    with pytest.raises(ValueError, match=r"permute\(0, 2, 3, 1\)"):
        m.Conv2d(3, 4, 3).forward(torch.zeros(2, 3, 6, 5, device=device))
    with pytest.raises(TypeError, match="cannot be borrowed through DLPack.*detach"):
        m.ReLU().forward(torch.zeros(2, 3, device=device, requires_grad=True))
