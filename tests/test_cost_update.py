"""FLOP and bytes of the loss and of the optimizers: by hand, and counted as in `tests.test_cost`."""

from __future__ import annotations

import math

import numpy as np
import pytest

import minidl as m
from minidl import models
from minidl.profile import PassCost
from tests.counting import Counter, costs, numbers

STORAGE = {2: "float16", 4: "float32"}


@pytest.mark.parametrize("itemsize, label_type", [(4, np.int32), (2, np.int64), (4, np.uint8)])
def test_loss_cost_is_what_its_formula_does(itemsize, label_type, rng):
    shape = (2, 2, 3, 5)
    logits = rng.standard_normal(shape).astype(STORAGE[itemsize])
    labels = rng.integers(0, 5, shape[:-1]).astype(label_type)
    rows, count = labels.size, labels.size
    forward, backward = Counter(), Counter()
    x, wanted = forward.operand(logits.reshape(rows, 5), itemsize), forward.operand(labels.ravel(), labels.itemsize)
    total, kept = forward.zero(), []
    for row in range(rows):
        values = [x[row, k] for k in range(5)]
        top, exponentials = forward.zero(), forward.zero()
        top.value = -math.inf
        for value in values:
            top = value.maximum(top)
        for value in values:
            exponentials = exponentials + (value - top).exp()
        kept.append(exponentials.log() + top)
        total = total + (kept[-1] - values[int(float(wanted[row]))])
    kept = forward.write(kept)

    x, wanted = backward.operand(logits.reshape(rows, 5), itemsize), backward.operand(labels.ravel(), labels.itemsize)
    lse, gradient = backward.operand(kept), numbers(backward, (rows, 5))
    for row in range(rows):
        for k in range(5):
            gradient[row, k] = (x[row, k] - lse[row]).exp()
        label = int(float(wanted[row]))
        gradient[row, label] = gradient[row, label] - 1.0
        for k in range(5):
            gradient[row, k] = gradient[row, k] * (1 / count)
    gradient = backward.write(gradient, itemsize)

    loss = m.SoftmaxCrossEntropy()
    tolerance = 1e-5 if itemsize == 4 else 2e-3
    assert loss.forward(logits, labels).loss == pytest.approx(float(total) / count, rel=tolerance)
    np.testing.assert_allclose(loss.backward().reshape(rows, 5), gradient, rtol=tolerance, atol=tolerance)
    cost = loss.cost(shape, itemsize=itemsize, label_itemsize=labels.itemsize)
    assert costs(cost) == [forward.counts, backward.counts, (0, 0)]


def network():
    graph = m.Graph()
    x = m.BatchNorm2d(3)(m.Conv2d(2, 3, 1)(graph.input((2, 2, 2))))
    return graph.output(m.Linear(12, 2, bias=False)(m.Flatten()(x)))


def test_update_cost_by_hand():
    """Weights of products 6 + 24 = 30, other parameters 3 + 3 + 3 = 9; float32 each, without the arena's padding."""
    plain = m.SGD(m.Model(network()), 0.1).cost()
    assert (plain.flop, plain.bytes) == (2 * 39, 39 * 12)  # w -= lr*g: read g and w, write w
    heavy = m.SGD(m.Model(network()), 0.1, momentum=0.9, weight_decay=1e-4, nesterov=True).cost()
    assert (heavy.flop, heavy.bytes) == (8 * 39, 39 * 20)
    exempt = m.SGD(m.Model(network()), 0.1, weight_decay=1e-4, decay_norm_and_bias=False).cost()
    assert (exempt.flop, exempt.bytes) == (2 * 39 + 2 * 30, 39 * 12)
    rounded = m.SGD(m.Model(network(), precision="bf16"), 0.1, momentum=0.9).cost()
    assert (rounded.flop, rounded.bytes) == (4 * 39, 39 * 20 + 30 * 2)
    scaled = m.SGD(m.Model(network(), precision="fp16"), 0.1, momentum=0.9).cost()
    assert (scaled.flop, scaled.bytes) == (6 * 39, 39 * 24 + 30 * 2)
    frozen = m.SGD(m.Model(network(), frozen=["conv2d.*"]), 0.1).cost()
    assert (frozen.flop, frozen.bytes) == (2 * 30, 30 * 12)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(
    "momentum, decay, nesterov", [(0, 0, False), (0.9, 0, False), (0.9, 0.1, True), (0, 0.1, False)]
)
def test_update_cost_is_what_its_formula_does(precision, momentum, decay, nesterov, rng):
    model = m.Model(network(), precision=precision)
    optimizer = m.SGD(model, 0.1, momentum, decay, nesterov)
    x = rng.standard_normal((4, 2, 2, 2)).astype(model.precision.storage)
    loss, labels = m.SoftmaxCrossEntropy(), np.array([0, 1, 1, 0], np.int32)
    counter, expected = Counter(), {}
    for _ in range(2):  # the second with momentum
        loss.forward(model.forward(x), labels)
        model.backward(loss.backward(optimizer.loss_scale))
        counter, velocity = Counter(), optimizer.state_dict()
        scale = float(optimizer.loss_scale[0]) if optimizer.scales_loss else None
        for s in model.arena.segments:
            part = slice(s.offset, s.offset + s.size)
            weight = counter.operand(model.arena.master[part])
            old = velocity.get(f"momentum.{s.full_name}")
            copied = 2 if precision == "fp16" and s.product else 0
            expected[s.full_name] = updated(
                counter, weight, model.arena.grad[part], old, 0.1, momentum, decay, nesterov, scale, copied
            )
        optimizer.step()
    assert optimizer.skipped_steps == 0
    for name, values in expected.items():
        np.testing.assert_allclose(model.state_dict()[name].ravel(), values, rtol=1e-5, atol=1e-6)
    assert (optimizer.cost().flop, optimizer.cost().bytes) == counter.counts


def updated(counter, weight, grad, old, lr, momentum, decay, nesterov, scale, copied):
    """One parameter after a step, as `m.SGD` documents it."""
    gradient, new, moved = counter.operand(grad), [], []
    if scale is not None:
        tested = counter.operand(grad)
        assert all(tested[i].masked(1.0).value < math.inf for i in range(weight.shape[0]))
    buffer = counter.operand(old.ravel()) if old is not None else None
    for i in range(weight.shape[0]):
        g, w = gradient[i], weight[i]
        g = g * (1 / scale) if scale is not None else g
        g = g + w * decay if decay else g
        if buffer is not None:
            moved.append(buffer[i] * momentum + g)
            g = g + moved[-1] * momentum if nesterov else moved[-1]
        new.append(w - g * lr)
    counter.write(moved)
    if copied:
        counter.write(new, copied)
    return counter.write(new)


@pytest.mark.parametrize(
    "make, flop, moved",
    [(lambda model: m.AdamW(model), 16, 28), (lambda model: m.LAMB(model), 27, 40),
     (lambda model: m.LARS(model, 0.1), 11, 28)],
)  # fmt: skip
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_adaptive_update_cost_by_hand(make, flop, moved, precision):
    """28 bytes of AdamW: weight, two moments read and written, the gradient. Products read a rounded copy in bf16."""
    model = m.Model(models.mlp(3, (4, 4, 2), (5,)), precision=precision)
    n, products = model.num_parameters, 32 * 5 + 5 * 3
    copies = 2 * products if precision == "bf16" else 0
    assert make(model).cost() == PassCost(flop * n, moved * n + copies)


def test_smoothing_costs_three_operations_more():
    plain, smoothed = m.SoftmaxCrossEntropy().cost((8, 10)), m.SoftmaxCrossEntropy(label_smoothing=0.1).cost((8, 10))
    assert (smoothed.forward - plain.forward, smoothed.backward_data - plain.backward_data) == (
        PassCost(2 * 80), PassCost(80)
    )  # fmt: skip
