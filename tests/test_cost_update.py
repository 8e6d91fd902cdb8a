"""FLOP and bytes of the loss and of the optimizers, by hand."""

from __future__ import annotations

import math

import pytest

import minidl as m
from minidl import models
from minidl.profile import Cost, PassCost
from tests.test_cost import costs


@pytest.mark.parametrize("itemsize, label", [(4, 4), (2, 8), (4, 1)])
def test_loss_cost_by_hand(itemsize, label):
    """Twelve labels of five classes. Each keeps the logarithm of its sum of exponentials, a float32."""
    cost = m.SoftmaxCrossEntropy().cost((2, 2, 3, 5), itemsize=itemsize, label_itemsize=label)
    forward, backward = (4 * 60 + 4 * 12, 60 * itemsize), (3 * 60 + 12, 120 * itemsize)
    assert costs(cost) == [(flop, moved + 12 * (label + 4)) for flop, moved in (forward, backward)] + [(0, 0)]


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


@pytest.mark.parametrize(
    "make, flop, moved",
    [(lambda model: m.AdamW(model), 16, 28), (lambda model: m.LAMB(model), 27, 40),
     (lambda model: m.LARS(model, 0.1), 11, 28)],
)  # fmt: skip
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_adaptive_update_cost_by_hand(make, flop, moved, precision):
    """28 bytes of AdamW: weight, two moments read and written, the gradient. Products read a copy of 16 bits.

    A gradient that was scaled is read once more, divided and looked at.
    """
    model = m.Model(models.mlp(3, (4, 4, 2), (5,)), precision=precision)
    n, products = model.num_parameters, 32 * 5 + 5 * 3
    copies = 0 if precision == "fp32" else 2 * products
    scaled = PassCost(2 * n, 4 * n) if precision == "fp16" else PassCost()
    assert make(model).cost() == PassCost(flop * n, moved * n + copies) + scaled


def test_smoothing_costs_three_operations_more():
    plain, smoothed = m.SoftmaxCrossEntropy().cost((8, 10)), m.SoftmaxCrossEntropy(label_smoothing=0.1).cost((8, 10))
    assert (smoothed.forward - plain.forward, smoothed.backward_data - plain.backward_data) == (
        PassCost(2 * 80), PassCost(80)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("loss", "shape", "itemsize", "target"),
    [
        (m.MSELoss(), (4, 3), 4, 48),
        (m.FocalLoss(), (4, 5, 5, 2), 2, 400),
        (m.BCEWithLogitsLoss(), (7,), 4, 28),
        (m.DiceLoss(), (2, 3, 3, 5), 2, 72),
    ],
)
def test_other_losses_move_predictions_targets_and_gradients_once(loss, shape, itemsize, target):
    x = itemsize * math.prod(shape)
    expected = Cost(forward=PassCost(0, x + target), backward_data=PassCost(0, 2 * x + target))
    assert loss.cost(shape, itemsize=itemsize) == expected
