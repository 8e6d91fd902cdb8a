"""Random networks of all layers: a model is its layers one after the other, whatever fusion plan it follows, and its
launches keep to the limits of every device."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import numpy as np
import pytest

import minidl as m
from minidl import fusion
from minidl.cuda.device import BUILT_IN
from minidl.cuda.launch import dry_run
from minidl.fusion.plans import Plan, candidates, fingerprint
from minidl.fusion.sites import find_sites
from minidl.step import EagerStep

SEEDS = range(60)
BATCH = 3
ACTIVATIONS = (m.ReLU6, m.LeakyReLU, m.Sigmoid, m.Tanh, m.SiLU, m.GELU, m.Hardswish, m.Softmax)
CHANNELS = {"narrow": (1, 2, 3, 4, 5, 8, 13, 16), "wide": (3, 8, 16, 24, 40, 64, 72, 96, 128, 160)}
SIZES = {"narrow": (4, 5, 6, 7, 8, 11), "wide": (4, 7, 8, 14, 28, 33)}


class Builder:
    """Adds layers with arguments drawn at random to inputs drawn at random; what does not fit is left out."""

    def __init__(self, seed: int, scale: str):
        self.rng, self.scale, self.graph, self.read = np.random.default_rng(seed), scale, m.Graph(), set()
        self.nodes = [self.graph.input((*self.draw(SIZES[scale], 2), self.draw(CHANNELS[scale])))]

    def draw(self, values, count=None):
        """One of some values, or a tuple of so many."""
        found = tuple(values[i] for i in self.rng.integers(len(values), size=count or 1))
        return found[0] if count is None else found

    def put(self, layer, *inputs):
        layer.name = f"{layer.name}{len(self.nodes)}"
        node = layer(*inputs)
        self.read.update(x.index for x in inputs)
        self.nodes.append(node)
        return node

    def source(self):
        """Mostly the last node, or one that nobody reads yet."""
        loose = [x for x in self.nodes if x.index not in self.read]
        images = [x for x in self.nodes if len(x.shape) == 3]
        return self.draw(self.draw((loose or images, loose or images, images[-1:], images)))

    def convolution(self, x):
        c, kernel, stride, dilation = x.shape[2], self.draw((1, 1, 2, 3), 2), self.draw((1, 1, 2, 3), 2), 1
        groups = self.draw([g for g in (1, 1, 2, c) if c % g == 0])
        if max(kernel) > 1:
            dilation = self.draw((1, 1, 2), 2)
        padding = tuple(int(self.rng.integers(k)) for k in kernel)
        filters, bias = groups * self.draw(CHANNELS[self.scale][: 4 if groups > 1 else None]), self.draw((True, False))
        if self.draw((True, True, True, False)) or x.shape[0] * x.shape[1] > 100:
            return self.put(m.Conv2d(c, filters, kernel, stride, padding, dilation, groups, bias), x)
        more = tuple(int(self.rng.integers(s)) for s in stride)
        return self.put(m.ConvTranspose2d(c, filters, kernel, stride, padding, more, groups, bias, dilation), x)

    def norm(self, x):
        c = x.shape[2]
        return self.put(self.draw((m.BatchNorm2d, m.BatchNorm2d, lambda c: m.GroupNorm(1, c)))(c), x)

    def composite(self, x):
        """A batch norm with what may share its passes."""
        if self.draw((True, False)):
            x = self.put(m.Conv2d(x.shape[2], self.draw(CHANNELS[self.scale]), 1, bias=False), x)
        y = self.put(m.ReLU() if self.draw((True, True, False)) else self.draw(ACTIVATIONS[:-1])(), self.norm(x))
        return self.convolution(y) if self.draw((True, False)) else y

    def pooling(self, x):
        kernel, ceil_mode = self.draw((1, 2, 2, 3), 2), self.draw((True, False))
        padding, stride = tuple(int(self.rng.integers(k // 2 + 1)) for k in kernel), self.draw((None, 2))
        kinds = (m.MaxPool2d, m.MaxPool2d, m.AvgPool2d)
        return self.put(self.draw(kinds)(kernel, stride, padding, ceil_mode=ceil_mode), x)

    def resizing(self, x):
        size = self.draw(SIZES["narrow"], 2)
        sides = tuple(self.rng.integers(-1, 3, 4).tolist())
        return self.put(self.draw((m.AdaptiveAvgPool2d(2), m.Upsample(size, mode="bilinear"), m.Pad(sides))), x)

    def activation(self, x):
        return self.put(self.draw((m.ReLU, *ACTIVATIONS))(), x)

    def residual(self, x):
        """A block, whose projection may have a batch norm, too."""
        out, stride = self.draw(CHANNELS[self.scale]), self.draw((1, 2))
        y = self.put(m.BatchNorm2d(out), self.put(m.Conv2d(x.shape[2], out, 3, stride, 1, bias=False), x))
        side = self.put(m.Conv2d(x.shape[2], out, 1, stride), x)
        side = self.put(m.BatchNorm2d(out), side) if self.draw((True, False)) else side
        y = self.put(m.Add(), *((y, side) if self.draw((True, False)) else (side, y)))
        return self.put(m.ReLU(), y)

    def dense(self, x):
        """Two layers of a dense block."""
        for _ in range(2):
            y = self.put(m.ReLU(), self.put(m.BatchNorm2d(x.shape[2]), x))
            x = self.put(m.Concat(), x, self.put(m.Conv2d(x.shape[2], 4, 3, padding=1), y))
        return x

    def excitation(self, x):
        c = x.shape[2]
        gate = self.put(m.Conv2d(c, c, 1), self.put(m.AdaptiveAvgPool2d(1), x))
        return self.put(m.Mul(), x, self.put(m.Sigmoid(), gate))

    def joined(self, x):
        join = self.draw((m.Add, m.Mul, m.Concat))
        fits = (lambda y: y.shape[:2] == x.shape[:2]) if join is m.Concat else (lambda y: y.shape == x.shape)
        return self.put(join(), x, self.draw([y for y in self.nodes if fits(y)]))

    STEPS = convolution, composite, norm, pooling, resizing, activation, residual, dense, excitation, joined

    def build(self) -> m.Graph:
        for _ in range(self.rng.integers(3, 9)):
            x = self.source()
            if np.prod(x.shape) < (20000 if self.scale == "narrow" else 1 << 20) and min(x.shape[:2]) > 2:
                with suppress(ValueError):  # a window larger than the image
                    self.draw(self.STEPS)(self, x)
        ends = [self.put(m.Flatten(), x) for x in [*self.nodes] if x.index not in self.read]
        y = ends[0] if len(ends) == 1 else self.put(m.Concat(), *ends)
        return self.graph.output(self.put(m.Linear(y.shape[0], 5), y))

    def plan(self) -> Plan:
        sites = find_sites(self.graph)
        return Plan({site.name: self.draw(candidates(site)) for site in sites}, fingerprint(sites))


def test_random_networks_have_every_layer():
    found = Counter(type(layer) for seed in SEEDS for layer in Builder(seed, "narrow").build().layers)
    left_out = m.Dropout, m.StochasticDepth, m.LayerNorm  # those draw by a model's seed; a group norm stands for it
    known = [kind for kind in vars(m.layers).values() if isinstance(kind, type) and kind.__name__ in m.__all__]
    assert {kind for kind in known if not found[kind]} == set(left_out)


def one_by_one(graph, ops, state, x, dy):
    """Output, gradients and buffers of a network by layers that stand alone; where several read a value, sums."""
    nodes, values = graph.nodes, [x]
    for node in nodes[1:]:
        own = {
            name.removeprefix(f"{node.name}."): array
            for name, array in state.items()
            if name.startswith(f"{node.name}.")
        }
        node.layer.to(ops.name).load_state_dict(own)
        values.append(node.layer.forward(*(values[i] for i in node.inputs)))
    gradients, found = [0.0] * (len(nodes) - 1) + [ops.to_host(dy)], {"y": ops.to_host(values[-1])}
    for node in reversed(nodes[1:]):
        layer, dy = node.layer, gradients[node.index]
        dx = layer.backward(ops.from_host(dy))
        for i, part in zip(node.inputs, dx if isinstance(dx, tuple) else (dx,), strict=True):
            gradients[i] = gradients[i] + ops.to_host(part)
        found |= {f"{node.name}.{name}": ops.to_host(array) for name, array in of_parameters(layer).items()}
    return found | {"dx": gradients[0]}


def of_parameters(layer):
    """Gradients, and running statistics."""
    gradients = layer.params.gradients() if layer.specs else {}
    return gradients | {f"{name} after": array for name, array in layer.buffers.items()}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_model_is_its_layers_one_after_the_other(seed, training, ops, rng):
    builder = Builder(seed, "narrow")
    model = m.Model(builder.build(), device=ops.name, input_grad=True)
    fusion.fuse(model, builder.plan())
    state = {name: moved(rng, name, array) for name, array in model.state_dict().items()}
    model.load_state_dict(state)
    model.train(training)
    x = rng.standard_normal((BATCH, *model.graph.nodes[0].shape)).astype(np.float32)
    dy = rng.standard_normal((BATCH, 5)).astype(np.float32)
    alone = Builder(seed, "narrow").build()
    for layer in alone.layers:
        layer.training = training
    expected = one_by_one(alone, ops, state, ops.from_host(x), ops.from_host(dy))
    given = ops.from_host(x)
    y = model.forward(given, grad=True)
    found = {"y": ops.to_host(y), "dx": ops.to_host(model.backward(ops.from_host(dy)))}
    for layer in model.layers:
        found |= {f"{layer.name}.{name}": ops.to_host(array) for name, array in of_parameters(layer).items()}
    assert found.keys() == expected.keys() and model.store.saved_bytes == 0
    np.testing.assert_array_equal(ops.to_host(given), x)
    largest = max(np.linalg.norm(array) for name, array in expected.items() if "after" not in name)
    for name, array in expected.items():
        # What a batch norm takes out of a gradient leaves what was rounded of it.
        bound = 1e-3 * np.linalg.norm(array) + 1e-5 * largest
        assert np.linalg.norm(found[name] - array) <= bound, f"{name}: off by {np.linalg.norm(found[name] - array)}"


def moved(rng, name, array):
    """A state off its start, at which scales are one and shifts zero."""
    if array.ndim > 1:
        return array
    shift = 0.0 if "var" in name else 0.1 * rng.standard_normal(array.shape)
    return (array * rng.uniform(0.5, 1.5, array.shape) + shift).astype(np.float32)


HELD = {
    "one message at a time": lambda optimizer: optimizer.update_in_backward(1),
    "two at a time": lambda optimizer: optimizer.update_in_backward(2),
    "in the momentum": lambda optimizer: optimizer.gradients_in_momentum(),
}


@pytest.mark.parametrize("how", HELD)
@pytest.mark.parametrize("seed", SEEDS)
def test_where_gradients_are_held_changes_no_bit(seed, how, ops):
    """Nor that layers are updated while others, to which they may have left work, have still to run."""

    def trained(prepare):
        builder = Builder(seed, "narrow")
        precision = ("fp32", "bf16")[seed % 2]
        model = m.Model(builder.build(), device=ops.name, precision=precision, seed=3, group_bytes=0)
        fusion.fuse(model, builder.plan())
        optimizer = m.SGD(model, 0.05, 0.9, 1e-4)
        prepare(optimizer)
        step, rng = EagerStep(model, optimizer, m.SoftmaxCrossEntropy()), np.random.default_rng(seed)
        for _ in range(2):
            x = rng.standard_normal((BATCH, *model.graph.nodes[0].shape)).astype(model.precision.storage)
            step(ops.from_host(x), ops.from_host(rng.integers(0, 5, BATCH).astype(np.int32)))
        state = model.state_dict() | optimizer.state_dict()
        return {name: np.asarray(array).tobytes() for name, array in state.items()}

    assert trained(HELD[how]) == trained(lambda optimizer: None)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "tf32x3", "bf16", "fp16"])
@pytest.mark.parametrize("device", ["A100", "RTX 3090", "H200"])  # others have the limits of one of these
def test_kernels_of_random_networks_keep_to_the_limits_of_the_device(device, precision):
    """Grid, block and shared memory: the dry run itself asserts them."""
    for seed in SEEDS:
        builder = Builder(seed, "wide")
        with dry_run(BUILT_IN[device]) as log:
            model = m.Model(builder.build(), device="cuda", precision=precision, input_grad=True)
            fusion.fuse(model, builder.plan())
            for size in (1, 33):
                model.train(size > 1)
                x = model.ops.empty((size, *model.graph.nodes[0].shape), model.precision.storage)
                y = model.forward(x, grad=True)
                assert model.backward(y).shape[0] == size and [*model.arena.finished()]
        assert log.launches
