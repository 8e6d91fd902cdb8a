"""Layers and models inside PyTorch: gradients by PyTorch's own check, shared memory, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import minidl as m
from minidl import models
from minidl.torch_bridge import as_torch
from tests.conftest import CUDA

torch = pytest.importorskip("torch", reason="needs PyTorch")


@pytest.fixture(params=["cpu", CUDA])
def device(request):
    return request.param


def drawn(shape, device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()


LAYERS = {
    "conv": (lambda: m.Conv2d(3, 4, 3, padding=1, stride=2), [(2, 5, 6, 3)]),
    "linear": (lambda: m.Linear(5, 3), [(4, 5)]),
    "norm": (lambda: m.BatchNorm2d(3), [(2, 3, 4, 3)]),
    "pool": (lambda: m.AvgPool2d(2), [(2, 4, 4, 3)]),
    "add": (lambda: m.Add(), [(2, 3, 3, 2)] * 2),
    "concat": (lambda: m.Concat(), [(2, 3, 3, 2), (2, 3, 3, 1)]),
}


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_pass_torchs_check(device, name):
    make, shapes = LAYERS[name]
    module = as_torch(make(), device=device)
    inputs = [drawn(shape, device) for shape in shapes]

    def run(*tensors):
        return module(*tensors[: len(inputs)])

    # In float32 differences need wide steps; these layers are linear, or smooth over such a step.
    with pytest.warns(UserWarning, match="double precision"):
        assert torch.autograd.gradcheck(run, (*inputs, *module.parameters()), eps=1e-2, atol=2e-2, rtol=2e-2)


def small(**options):
    return m.Model(models.build("resnet20", (8, 8, 3), 5), input_grad=True, **options)


def test_a_model_gives_what_minidl_gives(device):
    model, other = small(device=device), small(device=device)
    module, x = as_torch(model), drawn((3, 8, 8, 3), device)
    y = module(x)
    y.square().sum().backward()
    array = other.ops.from_host(x.detach().cpu().numpy())
    out = other.forward(array)
    dx = other.backward(other.ops.from_host(2 * other.ops.to_host(out)))
    np.testing.assert_array_equal(y.detach().cpu().numpy(), other.ops.to_host(out))
    np.testing.assert_array_equal(x.grad.cpu().numpy(), other.ops.to_host(dx))
    for layer in other.layers:
        for name, gradient in (layer.params.gradients() if layer.specs else {}).items():
            mine = getattr(module, f"{layer.name}.{name}".replace(".", "_")).grad
            np.testing.assert_array_equal(mine.cpu().numpy(), other.ops.to_host(gradient))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_torchs_optimizers_train_it(device, precision):
    torch.manual_seed(0)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    model = small(device=device, precision=precision)
    module = as_torch(model)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    x, target = drawn((16, 8, 8, 3), device, dtype).detach(), torch.arange(16, device=device) % 5
    losses = []
    for _ in range(12):
        loss = torch.nn.functional.cross_entropy(module(x).float(), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    state = model.state_dict()  # the memory is one: what torch trained, minidl saves
    for name, parameter in module.named_parameters():
        found = {key.replace(".", "_"): value for key, value in state.items()}[name]
        np.testing.assert_array_equal(parameter.detach().cpu().numpy(), found)


def test_several_passes_under_way_go_back_in_any_order(device):
    module, a, b = as_torch(small(device=device)), drawn((3, 8, 8, 3), device), drawn((2, 8, 8, 3), device)
    module.eval()  # batch statistics aside, a sample's gradient is its own
    alone = [torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()]) for x in (a, b)]
    one, other = module(a), module(b)
    together = [torch.autograd.grad(y.square().sum(), [x, *module.parameters()]) for y, x in ((one, a), (other, b))]
    for found, expected in zip(together, alone, strict=True):
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_array_equal(x.cpu().numpy(), y.cpu().numpy())


def test_evaluation_uses_running_statistics_and_keeps_nothing(device):
    model = small(device=device)
    module, x = as_torch(model), drawn((4, 8, 8, 3), device).detach()
    module(x)
    module.eval()
    with torch.no_grad():
        y = module(x)
    assert not y.requires_grad and model.store.saved_bytes == 0
    expected = model.forward(model.ops.from_host(x.cpu().numpy()), grad=False)
    np.testing.assert_array_equal(y.cpu().numpy(), model.ops.to_host(expected))


def test_what_cannot_be_is_refused(device):
    module = as_torch(m.Conv2d(3, 4, 3), device=device)
    with pytest.raises(TypeError, match="torch tensor"):
        module(np.zeros((1, 5, 5, 3), np.float32))
    with pytest.raises(ValueError, match="NHWC|shape"):
        module(drawn((1, 3, 5, 5), device))
    with pytest.raises(RuntimeError, match="as_torch"):
        module.half()
    with pytest.raises(ValueError, match="input_grad=True"):
        as_torch(m.Model(models.build("mlp", (4, 4, 1), 2), device=device))
    with pytest.raises(RuntimeError, match="belongs to a model"):
        as_torch(small(device=device).layers[0])
