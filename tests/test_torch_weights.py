"""A ResNet-18 as PyTorch computes and saves it: minidl reads the file and gives the same logits."""

from __future__ import annotations

import numpy as np
import pytest

import minidl as m
from minidl import models
from minidl.interchange import export_weights, import_weights
from tests.conftest import CUDA

torch = pytest.importorskip("torch", reason="needs PyTorch")
CLASSES, SIDE = 10, 64


class Block(torch.nn.Module):
    """Two 3x3 convolutions and a shortcut, named as in torchvision."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(outputs)
        self.conv2 = torch.nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = torch.nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride > 1:
            projection = torch.nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = torch.nn.Sequential(projection, torch.nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (y + (x if self.downsample is None else self.downsample(x))).relu()


class ResNet18(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(64)
        widths = [64, 64, 128, 256, 512]
        for i in range(1, 5):
            first = Block(widths[i - 1], widths[i], 1 if i == 1 else 2)
            setattr(self, f"layer{i}", torch.nn.Sequential(first, Block(widths[i], widths[i], 1)))
        self.fc = torch.nn.Linear(512, CLASSES)

    def forward(self, x):
        x = torch.nn.functional.max_pool2d(self.bn1(self.conv1(x)).relu(), 3, 2, 1)
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        return self.fc(x.mean((2, 3)))


@pytest.fixture(scope="module")
def network():
    """With parameters and running statistics that are all different."""
    torch.manual_seed(1)
    net = ResNet18()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.weight.uniform_(0.5, 1.0)
                module.bias.uniform_(-0.2, 0.2)
                module.running_mean.normal_(0.0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
    return net.eval()


@pytest.fixture(scope="module")
def file(network, tmp_path_factory):
    from safetensors.torch import save_file

    path = tmp_path_factory.mktemp("torch") / "resnet18.safetensors"
    save_file(network.state_dict(), path)
    return path


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_the_logits_are_pytorchs_within_float32_rounding(device, network, file):
    x = torch.randn(4, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        theirs = network(x).double().numpy()
        exact = network.double()(x.double()).numpy()
        network.float()
    model = m.Model(models.resnet18(CLASSES, (SIDE, SIDE, 3)), device=device).eval()
    report = import_weights(model, file)
    assert report.complete and all(name.endswith("num_batches_tracked") for name in report.ignored)
    images = np.ascontiguousarray(x.permute(0, 2, 3, 1).numpy())
    ours = model.ops.to_host(model.forward(model.ops.from_host(images), grad=False))
    unit = 2.0**-24 * np.abs(exact).max()
    assert np.abs(theirs - exact).max() < 32 * unit  # what PyTorch's own rounding comes to
    assert np.abs(ours - exact).max() < 32 * unit


def test_what_is_written_back_is_what_was_read_to_the_bit(network, file, tmp_path):
    from safetensors.torch import load_file

    model = m.Model(models.resnet18(CLASSES, (SIDE, SIDE, 3)))
    import_weights(model, file)
    state = load_file(export_weights(model, tmp_path / "back.safetensors"))
    counted = {key for key in network.state_dict() if key.endswith("num_batches_tracked")}
    assert state.keys() == network.state_dict().keys() - counted
    for name, values in state.items():
        assert torch.equal(values, network.state_dict()[name]), name
    again = ResNet18()
    again.load_state_dict(state, strict=False)
    x = torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert torch.equal(again.eval()(x), network(x))
