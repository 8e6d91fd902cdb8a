"""A training step of whole networks equals PyTorch's, where torch is installed: logits, loss and every gradient."""

from __future__ import annotations

import argparse
import json
from functools import partial

import numpy as np
import pytest

import minidl as m
from minidl import models
from minidl.bench.isolated import Case
from minidl.bench.layers import empty_row
from minidl.precision import precision
from minidl.profile.timing import Budget

torch = pytest.importorskip("torch", reason="needs torch as a peer")
from minidl.bench import torch_peer  # noqa: E402
from minidl.bench.torch_calls import Operands  # noqa: E402
from minidl.bench.torch_peer import TorchGraph, from_nhwc  # noqa: E402

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

    assert {type(make()).__name__ for make, _ in TWINS.values()} == set(layers.__all__)


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
    calls = torch_peer.layer_calls(layer, shapes, mode, "cpu", 2, given=given)
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
    calls = torch_peer.layer_calls(layer, [x.shape], "fp32", "cpu", 1, given=[([x], x)])
    y, dx = layer.forward(x), layer.backward(x)
    np.testing.assert_allclose(nhwc(calls["forward"][0]()), y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(nhwc(calls["backward"][0]()[0]), dx, rtol=1e-5, atol=1e-5)


def test_dropouts_twin_drops_forward_what_it_drops_backward():
    layer = m.Dropout(0.4)
    ones = np.ones((50, 40), np.float32)
    calls = torch_peer.layer_calls(layer, [ones.shape], "fp32", "cpu", 1, given=[([ones], ones)])
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
        torch_peer.layer_calls(layer, [shape], "fp32", "cpu", 1, given=[([x], dy)], adds=adds) for adds in ((), (True,))
    )
    key = "backward" if "backward" in plain else "backward_data"
    np.testing.assert_allclose(nhwc(summed[key][0]()[0]), nhwc(plain[key][0]()[0]) + x, rtol=1e-6, atol=1e-6)


def test_making_calls_leaves_the_layer_alone():
    layer = m.Conv2d(2, 3, 3)
    calls = torch_peer.layer_calls(layer, [(1, 5, 5, 2)], "bf16", "cpu", 3)
    assert layer.ops is None, "it may still adopt any device"
    assert {name: len(those) for name, those in calls.items()} == dict.fromkeys(
        ("forward", "backward_data", "backward_weight"), 3
    )
    y = calls["forward"][0]()
    assert y.dtype == torch.bfloat16 and y.is_contiguous(memory_format=torch.channels_last)
    assert not torch.equal(y, calls["forward"][1]()), "each set has values of its own"
    with pytest.raises(ValueError, match="precision must be fp32, bf16 or fp16 on the cpu"):
        torch_peer.layer_calls(layer, [(1, 5, 5, 2)], "tf32", "cpu", 1)


def test_calls_are_timed_each_and_a_way_of_another_device_is_refused():
    import time

    def wait(seconds):
        time.sleep(seconds)
        return torch.zeros(1)

    calls = [partial(wait, 0.002), partial(wait, 0.030)]
    assert 16 <= torch_peer.time_calls(calls, QUICK, "hot").min_ms < 30, "half of both; a sleep may only be longer"
    with pytest.raises(ValueError, match="way must be one of cold, hot on cpu, got 'replayed'"):
        torch_peer.time_calls(calls, QUICK, "replayed")


@pytest.mark.parametrize("needs_input_grad", [True, False])
def test_the_baseline_of_a_case_has_the_passes_that_are_asked_for(needs_input_grad):
    shape = (2, 6, 6, 3)
    find = lambda layer: torch_peer.peer_ms(  # noqa: E731
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


# -- the table of any module ----------------------------------------------------------------------------


class Odd(torch.nn.Module):
    """A leaf that minidl has nothing like: two outputs, one of integers, and an option."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x, *, shift):
        return {"y": x * self.scale + shift, "n": torch.arange(3)}


class Block(torch.nn.Module):
    """A residual block with an in-place ReLU used twice, and what stands between layers."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn = torch.nn.BatchNorm2d(4)
        self.relu = torch.nn.ReLU(inplace=True)
        self.odd = Odd()
        self.mish = torch.nn.Mish()
        self.flat = torch.nn.Flatten()
        self.fc = torch.nn.Linear(4 * 25, 7)

    def forward(self, x):
        y = self.relu(self.bn(self.conv(x)))
        y = self.relu(y + self.odd(y, shift=torch.ones(1))["y"])
        return self.fc(self.flat(self.mish(y)))


def table(module, x, **options):
    options = {"budget": QUICK, "ways": ("hot",)} | options
    return torch_peer.bench_module(module, x, **options)


def test_the_table_of_a_module_has_a_row_for_each_pass_of_each_leaf_in_order(rng):
    module = Block()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    images = rng.standard_normal((2, 5, 5, 3)).astype(np.float32)
    rows = table(module, images, case="block", ceilings=None)
    found = [(row["layer"], row["pass"]) for row in rows]
    three = ("forward", "backward_data", "backward_weight")
    assert found == [
        ("conv", "forward"), ("conv", "backward_weight"),  # nobody asks for the gradient of the images
        *(("bn", name) for name in three), *(("relu", name) for name in three[:2]),
        *(("odd", name) for name in three), *(("relu", name) for name in three[:2]),
        *(("mish", name) for name in three[:2]), *(("flat", name) for name in three[:2]),
        *(("fc", name) for name in three), ("step", "unaccounted"), ("step", "step"),
    ]  # fmt: skip
    assert [row["index"] for row in rows[:-2]] == [0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 7]
    keys = empty_row("", "", "", precision("fp32"), "cpu", 1).keys()
    assert all(row.keys() == keys and row["arm"] == "torch" and row["case"] == "block" for row in rows)
    json.dumps(rows, allow_nan=False)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), f"{name} was changed"
    assert module.relu.inplace
    first, second = ([row for row in rows if row["index"] == i] for i in (2, 4))
    assert [row["ms"] for row in first] == [row["ms"] for row in second], "equal leaves are measured once"

    by = {(row["index"], row["pass"]): row for row in rows}
    conv, bn = m.Conv2d(3, 4, 3, padding=1, bias=False).cost((2, 5, 5, 3)), m.BatchNorm2d(4).cost((2, 5, 5, 4))
    assert by[0, "forward"]["input_shapes"] == [[2, 5, 5, 3]] and by[0, "forward"]["output_shape"] == [2, 5, 5, 4]
    assert (by[0, "backward_weight"]["flop"], by[0, "backward_weight"]["bytes"]) == (
        conv.backward_weight.flop, conv.backward_weight.bytes
    )  # fmt: skip
    joint = bn.backward_data + bn.backward_weight
    assert (by[1, "backward_data"]["flop"], by[1, "backward_data"]["bytes"]) == (joint.flop, joint.bytes)
    assert by[1, "backward_weight"]["ms"] == 0.0 and by[1, "backward_weight"]["in"] == "bn"
    assert by[3, "forward"]["flop"] is by[3, "forward"]["bytes"] is by[5, "backward_data"]["flop"] is None
    assert by[3, "forward"]["type"] == "Odd" and by[3, "forward"]["parameters"] == 1
    assert rows[-1]["flop"] is None, "not all of the step's work is known"
    work = [row for row in rows[:-2] if row["in"] is None]
    assert all(row["ms"] > 0 and row["timing"] == "hot" and row["timings"]["hot"]["n"] == 2 for row in work)
    assert rows[-2]["ms"] == pytest.approx(rows[-1]["ms"] - sum(row["ms"] for row in work))


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_the_table_of_a_twin_has_minidls_work(mode):
    graph = models.build("unet", (16, 16, 3), 5, width=4)
    images = np.random.default_rng(0).standard_normal((2, 16, 16, 3)).astype(np.float32)
    rows = table(TorchGraph(graph), images, precision=mode)
    shapes = graph.shapes((2, 16, 16, 3))
    itemsize = precision(mode).storage.itemsize
    seen = {}
    for row in rows[:-2]:
        total = seen.setdefault(row["index"], [0, 0])
        for i, key in enumerate(("flop", "bytes")):
            total[i] += row[key] or 0
    for node, (flop, moved) in zip(graph.nodes[1:], seen.values(), strict=True):
        whole = node.layer.cost(*(shapes[i] for i in node.inputs), itemsize=itemsize)
        asked = whole.total if node.index > 1 else whole.forward + whole.backward_weight
        assert (flop, moved) == (asked.flop, asked.bytes), node.name
    assert {row["dtype"] for row in rows} == {mode}
    work = [row for row in rows[:-2] if row["in"] is None]
    assert rows[-1]["flop"] == sum(row["flop"] for row in work)


def test_a_single_module_is_measured_as_a_layer_inside_a_network():
    ceilings = {"copy_gb_per_s": 10.0, "matrix_tflops": {"fp32": 1.0}, "vector_tflops": {"fp32": 0.1}}
    rows = table(torch.nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8), ceilings=ceilings)
    assert [row["pass"] for row in rows] == ["forward", "backward_data", "backward_weight", "unaccounted", "step"]
    assert rows[0]["layer"] == "Conv2d" and rows[0]["case"] == "Conv2d/2x3x8x8"
    cost = m.Conv2d(3, 4, 3).cost((2, 8, 8, 3))
    assert rows[-1]["flop"] == cost.total.flop
    assert rows[0]["floor_ms"] == pytest.approx(max(cost.forward.flop / 1e9, cost.forward.bytes / 1e7))
    assert rows[0]["bound"] == "memory" and rows[0]["roof_share"] == pytest.approx(rows[0]["floor_ms"] / rows[0]["ms"])
    inplace = table(torch.nn.ReLU(inplace=True), torch.randn(4, 5))
    assert [row["pass"] for row in inplace] == ["forward", "backward_data", "unaccounted", "step"]


@pytest.mark.parametrize(
    "module, x",
    [
        (torch.nn.Conv2d(3, 4, 3, padding="same"), torch.randn(1, 3, 5, 5)),
        (torch.nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), torch.randn(1, 3, 5, 5)),
        (torch.nn.AdaptiveAvgPool2d((None, 2)), torch.randn(1, 3, 5, 5)),
        (torch.nn.Embedding(10, 3), torch.tensor([[1, 2], [3, 4]])),
        (torch.nn.Conv2d(3, 4, 3), torch.randn(3, 5, 5)),
        (torch.nn.MultiheadAttention(4, 2, batch_first=True), (torch.randn(2, 3, 4),) * 3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_minidl_has_no_layer_for_is_timed_without_flop(module, x):
    rows = table(module, x)
    assert len(rows) >= 3 and all(row["flop"] is None and row["bytes"] is None for row in rows)
    assert all(row["ms"] > 0 for row in rows if row["in"] is None and row["pass"] != "unaccounted")


def test_other_numbers_of_axes_have_the_work_of_their_elements():
    norm = table(torch.nn.BatchNorm1d(3), torch.randn(4, 3, 6))
    assert norm[0]["flop"] == m.BatchNorm2d(3).cost((24, 3)).forward.flop and norm[0]["input_shapes"] == [[4, 3, 6]]
    rows = table(torch.nn.Linear(6, 5), torch.randn(2, 3, 4, 6))
    assert rows[0]["flop"] == m.Linear(6, 5).cost((24, 6)).forward.flop
    assert rows[0]["input_shapes"] == [[2, 3, 4, 6]] and rows[0]["output_shape"] == [2, 3, 4, 5]


@pytest.mark.parametrize("make", [lambda: torch.nn.LSTM(3, 4), lambda: torch.nn.MultiheadAttention(3, 1)])
def test_gradients_of_modules_with_ways_of_their_own_reach_all_parameters(make):
    module = make()
    args = [torch.randn(5, 2, 3).requires_grad_() for _ in range(1 if isinstance(module, torch.nn.LSTM) else 3)]
    found = Operands(module, args).gradients(inputs=True, parameters=True)
    assert len(found) == len(args) + len(list(module.parameters()))
    assert all(g is not None and g.isfinite().all() for g in found)


def test_operands_ask_for_nothing_that_has_no_gradient():
    one = Operands(torch.nn.ReLU(), [torch.randn(3)])
    assert one.inputs == () and one.parameters == () and one.outputs() == ()


# -- modules by name ------------------------------------------------------------------------------------


@pytest.fixture
def nets(tmp_path, monkeypatch):
    """A working directory with a file of modules."""
    (tmp_path / "peer_nets.py").write_text(
        "import torch\n"
        "def build():\n    return torch.nn.Linear(2, 3)\n"
        "def needs(width):\n    return torch.nn.Linear(2, width)\n"
        "ready = torch.nn.ReLU()\nnumber = 3\n"
        "class Family:\n    small = staticmethod(build)\n"
    )
    monkeypatch.chdir(tmp_path)


def test_modules_are_loaded_by_name(nets):
    import sys

    path = list(sys.path)
    assert isinstance(torch_peer.load("peer_nets:build"), torch.nn.Linear)
    assert isinstance(torch_peer.load("peer_nets:ready"), torch.nn.ReLU)
    assert isinstance(torch_peer.load("peer_nets:Family.small"), torch.nn.Linear)
    assert isinstance(torch_peer.load("torch.nn:ReLU"), torch.nn.ReLU)
    assert sys.path == path


@pytest.mark.parametrize(
    "spec, kind, message",
    [
        ("resnet18", ValueError, "package.module:function.*got 'resnet18'"),
        ("peer_nets:", ValueError, "package.module:function"),
        ("no_such_package_at_all:net", ValueError, "no_such_package_at_all cannot be imported"),
        ("peer_nets:biuld", ValueError, "unknown name in peer_nets 'biuld'; did you mean 'build'"),
        ("peer_nets:needs", TypeError, "width.*takes no arguments"),
        ("peer_nets:number", TypeError, "a torch.nn.Module, or a function that returns one"),
    ],
)
def test_a_name_that_leads_to_no_module_is_refused(nets, spec, kind, message):
    with pytest.raises(kind, match=message):
        torch_peer.load(spec)


# -- the command ----------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Kept ceilings, so that a test does not measure the machine."""
    from minidl.profile import ceilings

    record = {"copy_gb_per_s": 10.0, "matrix_tflops": {"fp32": 1.0}, "vector_tflops": {"fp32": 0.1}, "device": "cpu"}
    monkeypatch.setattr(ceilings, "find", lambda ops, comm=None, **options: record)
    (tmp_path / "peer_command_nets.py").write_text(
        "import torch\n"
        "def build():\n    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.SiLU())\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def given(**changes):
    """Options of ``minidl bench layers --torch``, as its parser leaves them."""
    usual = {
        "torch": "peer_command_nets:build", "batch": 2, "image_size": 8, "classes": None, "precision": "fp32",
        "device": "cpu", "ways": ["hot"], "remeasure": False, "kernels": False, "energy": False, "nvtx": False,
        "trace": None,
    }  # fmt: skip
    return argparse.Namespace(**usual | changes)


def test_the_command_makes_the_content_of_a_result_file(home):
    from minidl.profile import results, views

    results.write(home / "out.json", torch_peer.bench_command(given()))
    content = results.load(home / "out.json")
    assert content["benchmark"] == "layers" and content["setup"]["model"] == "peer_command_nets:build"
    assert content["step"]["images_per_s"] == pytest.approx(2e3 / content["rows"][-1]["ms"])
    assert [row["type"] for row in content["rows"][:-2]] == ["Conv2d"] * 2 + ["ReLU"] * 2 + ["SiLU"] * 2
    assert content["rows"][0]["case"] == "torch build/8x8/b2" and content["rows"][0]["roof_share"] > 0
    for name in views.VIEWS:
        _, columns, cells = views.view(content, name)
        assert all(len(line) == len(columns) for line in cells)


@pytest.mark.parametrize(
    "option", [{"kernels": True}, {"energy": True}, {"nvtx": True}, {"trace": "t.json"}, {"classes": 3}, {"batch": 0}]
)
def test_options_that_a_torch_module_cannot_have_are_refused(home, option):
    with pytest.raises(ValueError, match=f"--{next(iter(option))} must be"):
        torch_peer.bench_command(given(**option))
