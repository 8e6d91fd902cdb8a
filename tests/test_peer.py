"""A training step of whole networks equals PyTorch's, where torch is installed: logits, loss and every gradient."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

import minidl as m
from minidl import models
from minidl.bench.isolated import Case
from minidl.precision import precision
from minidl.profile.timing import Budget

torch = pytest.importorskip("torch", reason="needs torch as a peer")
from minidl.bench import torch_calls  # noqa: E402
from minidl.bench.torch_twin import TorchGraph, from_nhwc  # noqa: E402

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


@contextmanager
def torch_threads(number):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def distance(a, b):
    """Relative distance of all gradients together."""
    total = sum(np.sum((a[name] - b[name]) ** 2) for name in b)
    return np.sqrt(total / sum(np.sum(values**2) for values in b.values()))


@pytest.mark.parametrize("name", NETWORKS)
def test_one_step_is_as_near_to_float64_as_torchs(name, ops, rng):
    """Both libraries round in float32, in different orders, and ReLU masks flip near zero; neither may be the worse.

    Whether a mask flips is chance: PyTorch's own gradients are off by 1e-5 or by 7e-3, with the number of its threads,
    so it is asked in several orders.
    """
    shape, options = NETWORKS[name]
    build = lambda: models.build(name, shape, 5, **options)  # noqa: E731
    model = m.Model(build(), device=ops.name)
    images = rng.standard_normal((6, *shape)).astype(np.float32)
    labels = rng.integers(0, 5, (6, *model.output_node.shape[:-1])).astype(np.int32)
    state = model.state_dict()
    exact, exact_loss, exact_gradients = torch_step(build(), state, images, labels, torch.float64)
    logits_off, loss_off, gradients_off = 0.0, 0.0, 0.0
    for threads in (1, 2, 4):
        with torch_threads(threads):
            single, loss, gradients = torch_step(build(), state, images, labels, torch.float32)
        logits_off = max(logits_off, np.abs(single - exact).max())
        loss_off = max(loss_off, abs(loss - exact_loss))
        gradients_off = max(gradients_off, distance(gradients, exact_gradients))

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
    assert np.abs(ops.to_host(logits) - exact).max() <= 3 * logits_off + 1e-6 * np.abs(exact).max()
    assert abs(totals.loss - exact_loss) <= 3 * loss_off + 1e-5
    assert distance(gradients, exact_gradients) <= 3 * gradients_off + 1e-5


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


# -- torch's passes of one layer ------------------------------------------------------------------------

QUICK = Budget(samples=2, seconds=0.0, least=2, sample_ms=0.01)

TWINS = {
    "conv": (lambda: m.Conv2d(4, 6, (3, 2), stride=(1, 2), padding=(1, 0), dilation=(1, 2), groups=2), [(2, 6, 7, 4)]),
    "depthwise": (lambda: m.Conv2d(5, 5, 3, padding=1, groups=5, bias=False), [(2, 4, 5, 5)]),
    "transposed": (lambda: m.ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2), [(2, 3, 4, 4)]),
    "transposed, plain": (lambda: m.ConvTranspose2d(3, 2, 2, stride=2, bias=False), [(1, 3, 2, 3)]),
    "linear": (lambda: m.Linear(7, 5), [(4, 7)]),
    "linear, plain": (lambda: m.Linear(7, 5, bias=False), [(4, 7)]),
    "batch norm": (lambda: m.BatchNorm2d(3), [(2, 4, 5, 3)]),
    "batch norm of vectors": (lambda: m.BatchNorm2d(3, affine=False), [(6, 3)]),
    "relu": (lambda: m.ReLU(), [(2, 3, 4, 5)]),
    **{
        name: (make, [(2, 3, 4, 5)])
        for name, make in {
            "relu6": m.ReLU6,
            "leaky relu": m.LeakyReLU,
            "sigmoid": m.Sigmoid,
            "tanh": m.Tanh,
            "silu": m.SiLU,
            "gelu": m.GELU,
            "gelu by tanh": lambda: m.GELU("tanh"),
            "hardswish": m.Hardswish,
            "softmax": m.Softmax,
            "layer norm": lambda: m.LayerNorm(5),
            "group norm": lambda: m.GroupNorm(5, 5),
        }.items()
    },
    "group norm, plain": (lambda: m.GroupNorm(2, 6, affine=False), [(2, 4, 5, 6)]),
    "upsample": (lambda: m.Upsample(scale_factor=(2, 1.5)), [(2, 3, 4, 5)]),
    "upsample, bilinear": (lambda: m.Upsample((7, 3), mode="bilinear"), [(2, 3, 4, 5)]),
    "upsample, corners": (lambda: m.Upsample((7, 3), mode="bilinear", align_corners=True), [(2, 3, 4, 5)]),
    "mul": (lambda: m.Mul(), [(2, 3, 4, 5)] * 2),
    "gate": (lambda: m.Mul(), [(2, 3, 4, 5), (2, 1, 1, 5)]),
    "max pool": (lambda: m.MaxPool2d(3, 2, 1, ceil_mode=True), [(2, 6, 7, 3)]),
    "max pool, dilated": (lambda: m.MaxPool2d((2, 3), 1, dilation=2), [(1, 6, 7, 3)]),
    "average pool": (lambda: m.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), [(2, 6, 7, 3)]),
    "adaptive pool": (lambda: m.AdaptiveAvgPool2d((2, 3)), [(2, 5, 7, 3)]),
    "global pool": (lambda: m.AdaptiveAvgPool2d(1), [(2, 5, 7, 3)]),
    "no dropout": (lambda: m.Dropout(0.0), [(4, 6)]),
    "no stochastic depth": (lambda: m.StochasticDepth(0.0), [(4, 3, 3, 6)]),
    "flatten": (lambda: m.Flatten(), [(2, 3, 4, 5)]),
    "add": (lambda: m.Add(), [(2, 3, 4, 5)] * 2),
    "concat": (lambda: m.Concat(), [(2, 3, 4, 5), (2, 3, 4, 1), (2, 3, 4, 2)]),
    "pad": (lambda: m.Pad((1, 2, -1, 3), value=0.5), [(2, 4, 5, 3)]),
}


def nhwc(tensor):
    values = tensor.detach().float().numpy()
    return np.moveaxis(values, 1, -1) if values.ndim == 4 else values


def grouped(calls):
    """The results of the calls of a set, by pass: data gradients, then parameter gradients."""
    found = {name: [nhwc(t) for t in (r if isinstance(r, tuple) else (r,))] for name, r in calls.items()}
    if "backward" in found:
        dx, *grads = found.pop("backward")
        found |= {"backward_data": [dx], "backward_weight": grads}
    return found


def test_every_layer_type_has_a_twin_under_test():
    from minidl import layers

    parts = {"ChannelParallelConv2d", "RowParallelConv2d"}  # of a convolution, between ranks
    assert {type(make()).__name__ for make, _ in TWINS.values()} | parts == set(layers.__all__)


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
@pytest.mark.parametrize("name", TWINS)
def test_the_calls_that_are_timed_compute_what_the_layer_computes(name, mode, rng):
    make, shapes = TWINS[name]
    layer, sets = make().to("cpu", mode), []
    dtype = layer.precision.storage
    for _ in range(2):
        x = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
        sets.append((x, rng.standard_normal(layer.output_shape(*shapes)).astype(dtype)))
    given = [([a.astype(np.float32) for a in x], dy.astype(np.float32)) for x, dy in sets]
    calls = torch_calls.layer_calls(layer, shapes, mode, "cpu", 2, given=given)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if mode == "fp32" else {"rtol": 3e-2, "atol": 6e-2}
    assert all(len(those) == 2 for those in calls.values())
    for i, (x, dy) in enumerate(sets):
        theirs = grouped({key: those[i]() for key, those in calls.items()})
        again = grouped({key: those[i]() for key, those in calls.items()})
        y, dx = layer.forward(*x), layer.backward(dy)
        np.testing.assert_allclose(theirs["forward"][0], y.astype(np.float32), **tolerance)
        dx = dx if isinstance(dx, tuple) else (dx,)
        assert len(theirs["backward_data"]) == len(dx)
        for found, expected in zip(theirs["backward_data"], dx, strict=True):
            np.testing.assert_allclose(found, expected.astype(np.float32), **tolerance)
        grads = layer.params.gradients() if layer.specs else {}
        assert len(theirs.get("backward_weight", [])) == len(grads)
        for found, expected in zip(theirs.get("backward_weight", []), grads.values(), strict=True):
            scale = np.abs(expected).max()
            np.testing.assert_allclose(found / scale, expected / scale, **tolerance)
        for key, values in theirs.items():
            for first, second in zip(values, again[key], strict=True):
                np.testing.assert_array_equal(first, second, err_msg=f"{key} changes when it is called again")


def test_batch_norms_twin_in_evaluation_mode_takes_the_running_statistics(rng):
    layer, x = m.BatchNorm2d(3), rng.standard_normal((4, 3, 2, 3)).astype(np.float32) * 3 + 1
    layer.forward(x)
    layer.training = False
    calls = torch_calls.layer_calls(layer, [x.shape], "fp32", "cpu", 1, given=[([x], x)])
    y, dx = layer.forward(x), layer.backward(x)
    np.testing.assert_allclose(nhwc(calls["forward"][0]()), y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(nhwc(calls["backward"][0]()[0]), dx, rtol=1e-5, atol=1e-5)


def test_dropouts_twin_drops_forward_what_it_drops_backward():
    layer = m.Dropout(0.4)
    ones = np.ones((50, 40), np.float32)
    calls = torch_calls.layer_calls(layer, [ones.shape], "fp32", "cpu", 1, given=[([ones], ones)])
    y, (dx,) = nhwc(calls["forward"][0]()), map(nhwc, calls["backward_data"][0]())
    for values in (y, dx):
        assert set(np.unique(values.round(5))) == {0.0, np.float32(1 / 0.6).round(5)}
        assert abs((values > 0).mean() - 0.6) < 0.06
    again = nhwc(calls["backward_data"][0]()[0])
    np.testing.assert_array_equal(dx, again, "a backward pass belongs to one forward pass")


@pytest.mark.parametrize(
    "make, shape", [(lambda: m.Conv2d(2, 3, 3), (1, 5, 5, 2)), (lambda: m.BatchNorm2d(2), (1, 5, 5, 2))]
)
def test_a_fan_outs_gradient_is_added(make, shape, rng):
    layer = make().to("cpu")
    x, dy = (rng.standard_normal(s).astype(np.float32) for s in (shape, layer.output_shape(shape)))
    plain, summed = (
        torch_calls.layer_calls(layer, [shape], "fp32", "cpu", 1, given=[([x], dy)], adds=adds)
        for adds in ((), (True,))
    )
    key = "backward" if "backward" in plain else "backward_data"
    np.testing.assert_allclose(nhwc(summed[key][0]()[0]), nhwc(plain[key][0]()[0]) + x, rtol=1e-6, atol=1e-6)


def test_making_calls_leaves_the_layer_alone():
    layer = m.Conv2d(2, 3, 3)
    calls = torch_calls.layer_calls(layer, [(1, 5, 5, 2)], "bf16", "cpu", 3)
    assert layer.ops is None, "it may still adopt any device"
    assert {name: len(those) for name, those in calls.items()} == dict.fromkeys(
        ("forward", "backward_data", "backward_weight"), 3
    )
    y = calls["forward"][0]()
    assert y.dtype == torch.bfloat16 and y.is_contiguous(memory_format=torch.channels_last)
    assert not torch.equal(y, calls["forward"][1]()), "each set has values of its own"
    with pytest.raises(ValueError, match="precision must be fp32, bf16 or fp16 on the cpu"):
        torch_calls.layer_calls(layer, [(1, 5, 5, 2)], "tf32", "cpu", 1)


def test_calls_are_timed_each_and_a_way_of_another_device_is_refused():
    import time

    def wait(seconds):
        time.sleep(seconds)
        return torch.zeros(1)

    calls = [partial(wait, 0.002), partial(wait, 0.030)]
    assert 16 <= torch_calls.time_calls(calls, QUICK, "hot").min_ms < 30, "half of both; a sleep may only be longer"
    with pytest.raises(ValueError, match="way must be one of cold, hot on cpu, got 'replayed'"):
        torch_calls.time_calls(calls, QUICK, "replayed")


@pytest.mark.parametrize("needs_input_grad", [True, False])
def test_the_baseline_of_a_case_has_the_passes_that_are_asked_for(needs_input_grad):
    shape = (2, 6, 6, 3)
    find = lambda layer: torch_calls.peer_ms(  # noqa: E731
        Case(1, layer, (shape,), needs_input_grad=needs_input_grad), precision("fp32"), "cpu", 1, QUICK
    )
    conv, norm = find(m.Conv2d(3, 4, 3)), find(m.BatchNorm2d(3))
    both = {"forward", "backward_data", "backward_weight"}
    assert conv.keys() == (both if needs_input_grad else both - {"backward_data"})
    assert all(ms > 0 for ms in conv.values())
    if needs_input_grad:
        assert norm["backward_data"] > 0 and norm["backward_weight"] is None
    else:
        assert norm.keys() == {"forward", "backward_weight"} and norm["backward_weight"] > 0
