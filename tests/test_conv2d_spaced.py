"""Data gradients that add every second pixel of every second line: the bits of an addend that is zero elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

import minidl as m
from minidl.cuda.convolution.conv2d_family import family
from minidl.cuda.device import BUILT_IN
from minidl.cuda.launch import dry_run
from minidl.fusion import fuse
from minidl.graph import Graph
from minidl.layers import Add, BatchNorm2d, Conv2d, Flatten, Linear, ReLU
from minidl.precision import bfloat16, float16, float32
from tests.convolutions import SIXTEEN, Case, cases, each_tile, poison, put
from tests.test_batch_norm_ops import signs_of
from tests.test_optim import gradients
from tests.tolerance import draw

CASES = [
    Case("even", (3, 14, 14, 64), (264, 1, 1)),
    Case("odd", (2, 9, 13, 136), (72, 1, 1)),
    Case("narrow", (40, 3, 1, 8), (16, 1, 1)),
    Case("one-pixel-high", (5, 1, 6, 200), (64, 1, 1)),
    Case("lines-over-tiles", (1, 3, 150, 320), (456, 1, 1)),
]


def operands(rng, case, storage):
    """dy, w, what is added, whole and every second pixel of it, and what is below."""
    full = np.zeros(case.x, storage)
    full[:, ::2, ::2] = draw(rng, full[:, ::2, ::2].shape, storage)
    y = np.maximum(draw(rng, case.x, float32), 0).astype(storage)
    moments = np.stack([rng.standard_normal(case.x[3]), rng.uniform(0.5, 2, case.x[3])]).astype(np.float32)
    gradient = draw(rng, case.y, storage), draw(rng, case.w, storage)
    return *gradient, full, np.ascontiguousarray(full[:, ::2, ::2]), draw(rng, case.x, storage), moments, y


def check(ops, case, hosts):
    dy, w, full, half, x, moments, y = put(ops, *hosts)
    assert ops.conv2d_adds_spaced(x.shape, w, **case.options)
    dx = [ops.conv2d_backward_data(dy, w, x.shape, add=add, **case.options) for add in (full, half)]
    masks = [ops.conv2d_backward_data_summed(dy, w, x.shape, add=add, mask=y, **case.options) for add in (full, half)]
    below = [{}, {"y": y}, {"y": y, "signs": ops.from_host(signs_of(hosts[-1]))}]
    sides = [
        [ops.conv2d_backward_data_masked(dy, w, x, moments, **how, add=add, **case.options) for add in (full, half)]
        for how in below
    ]
    pairs = [dx, *(pair for one, other in (masks, *sides) for pair in zip(one, other, strict=True))]
    for one, other in pairs:
        assert ops.to_host(one).tobytes() == ops.to_host(other).tobytes()


@SIXTEEN
@cases(CASES)
def test_what_is_not_there_is_zero(hopper, case, storage, rng):
    check(hopper, case, operands(rng, case, storage))


@pytest.mark.parametrize("share", [1, 3])
@cases(CASES)
def test_with_every_tile(hopper, case, share, rng, monkeypatch):
    hosts = operands(rng, case, bfloat16)
    poison(monkeypatch, "conv2d_hopper")
    for _ in each_tile(monkeypatch, case, True, share):
        check(hopper, case, hosts)


@pytest.mark.parametrize("which", ["3x3", "stride", "fp32", "generic"])
def test_others_want_all_of_it(which):
    """A convolution that adds no such array says so, and refuses it."""
    kernel, stride = (3 if which == "3x3" else 1), (2 if which == "stride" else 1)
    where = {"stride": (stride,) * 2, "padding": (kernel // 2,) * 2, "dilation": (1, 1), "groups": 1}
    dtype = float32 if which == "fp32" else float16
    with dry_run(), family("generic" if which in ("fp32", "generic") else "hopper"):
        ops = m.backend.get_ops("cuda")
        w, half = ops.empty((16, kernel, kernel, 64), dtype), ops.empty((4, 8, 8, 64), dtype)
        dy = ops.empty((4, 16 // stride, 16 // stride, 16), dtype)
        assert not ops.conv2d_adds_spaced((4, 16, 16, 64), w, **where)
        with pytest.raises(ValueError, match="add"):
            ops.conv2d_backward_data(dy, w, (4, 16, 16, 64), add=half, **where)


def block(image=(12, 10, 64), first=1, between=False):
    """A stage's first block: its input goes through a convolution, and through a projection with a stride of two."""
    graph = Graph()
    x = ReLU(name="below")(BatchNorm2d(64, name="norm")(Conv2d(image[2], 64, 1, name="stem")(graph.input(image))))
    y = Conv2d(64, 32, first, padding=first // 2, bias=False, name="conv1")(x)
    y = Conv2d(32, 128, 3, stride=2, padding=1, name="conv2")(ReLU(name="relu")(y))
    shortcut = Conv2d(64, 128, 1, stride=2, bias=False, name="projection")(x)
    y = Add(name="add")(y, shortcut)
    if between:
        y = Add(name="more")(y, Conv2d(64, 128, 1, stride=2, name="third")(x))
    return graph.output(Linear(128 * 6 * 5, 4, name="fc")(Flatten()(y)))


@pytest.mark.parametrize(("first", "between", "left"), [(1, False, True), (3, False, True), (1, True, False)])
def test_who_leaves_its_gradient_to_whom(first, between, left):
    model = m.Model(block(first=first, between=between))
    layers = {layer.name: layer for layer in model.layers}
    assert layers["projection"].left_to is (layers["conv1"] if left else None)
    assert all(layer.left_to is None for name, layer in layers.items() if name in ("conv1", "conv2", "stem"))


def learn(plan, device, leaves=True):
    """Gradients of a block's parameters."""
    model = m.Model(block(), device=device, precision="bf16")
    fuse(model, plan)
    if not leaves:
        for layer in model.layers:
            layer.left_to = None
    rng = np.random.default_rng(1)
    x, dy = (draw(rng, shape, bfloat16) for shape in ((9, 12, 10, 64), (9, 4)))
    model.forward(model.ops.from_host(x))
    model.backward(model.ops.from_host(dy))
    return gradients(model)


@pytest.mark.parametrize("plan", ["none", "gradients", "bnff"])
def test_a_block_learns_as_if_all_was_written(cuda_ops, plan):
    found, expected = (learn(plan, "cuda", leaves) for leaves in (True, False))
    assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)


@pytest.mark.parametrize("plan", ["none", "gradients"])
def test_zeros_are_neither_written_nor_read(plan):
    with dry_run(BUILT_IN["H200"]) as log:
        learn(plan, "cuda")
    kernels = [dict(launch.defines) for launch in log.launches if launch.stem == "conv2d_hopper"]
    assert sum(defines["SPACED"] for defines in kernels) == 1
    assert not any(defines["SPREAD"] and defines["BACKWARD"] and defines["FLAT"] for defines in kernels)
    assert sum(defines["SPREAD"] for defines in kernels) == 1, "of the 3x3 convolution"
