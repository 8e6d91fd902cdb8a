"""Losses and metrics: doors, what is read, ranks that equal one, and a training run with each."""

from __future__ import annotations

import numpy as np
import pytest

import minidl as m
from minidl import models
from minidl.step import EagerStep
from tests.reference import losses as reference

f32 = np.float32


def drawn(rng, ops, shape, classes):
    logits = rng.standard_normal((*shape, classes)).astype(f32)
    return logits, rng.integers(0, classes, shape).astype(np.int32)


def test_smoothed_and_weighted_cross_entropy_reads_its_means(ops, rng):
    logits, labels = drawn(rng, ops, (12,), 5)
    weight = [1.0, 0.5, 2.0, 1.0, 0.0]
    loss = m.SoftmaxCrossEntropy(label_smoothing=0.1, weight=weight)
    totals = loss.forward(ops.from_host(logits), ops.from_host(labels))
    expected = reference.smoothed_cross_entropy(logits, labels, weight, 0.1, -100)
    assert totals.loss == pytest.approx(expected[0] / expected[1], rel=1e-6)
    assert totals.accuracy == expected[2] / 12
    assert loss.backward().shape == logits.shape


LOSSES = {
    "plain": (lambda **c: m.SoftmaxCrossEntropy(**c), True),
    "smoothed": (lambda **c: m.SoftmaxCrossEntropy(label_smoothing=0.2, **c), True),
    "weighted": (lambda **c: m.SoftmaxCrossEntropy(weight=[1, 2, 0.5], **c), True),
    "soft": (lambda **c: m.SoftmaxCrossEntropy(label_smoothing=0.1, **c), False),
    "dice": (lambda **c: m.DiceLoss(**c), True),
    "bce": (lambda **c: m.BCEWithLogitsLoss(2.0, **c), False),
    "mse": (lambda **c: m.MSELoss(**c), False),
    "focal": (lambda **c: m.FocalLoss(**c), False),
}


class Shard:
    """One of two ranks whose totals are known: adds the other's."""

    rank, size, name = 0, 2, "pair"

    def __init__(self):
        self.other = None

    def all_reduce(self, array):
        if self.other is not None:
            array += self.other


@pytest.mark.parametrize("name", LOSSES)
def test_two_ranks_equal_one(name, cpu_ops, rng):
    make, labelled = LOSSES[name]
    logits, labels = drawn(rng, cpu_ops, (10,), 3)
    target = labels if labelled else rng.integers(0, 2, logits.shape).astype(f32)
    whole = make()
    totals = whole.forward(logits, target)
    expected = whole.backward()
    halves = slice(0, 3), slice(3, 10)
    alone = [make().forward(logits[half], target[half]).array for half in halves]
    found = []
    for half, other in zip(halves, reversed(alone), strict=True):
        comm = Shard()
        comm.other = other
        part = make(comm=comm)
        joint = part.forward(logits[half], target[half])
        assert joint.loss == pytest.approx(totals.loss, rel=1e-6)
        found.append(part.backward())
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=2e-5, atol=1e-8)


@pytest.mark.parametrize("name", LOSSES)
def test_a_few_steps_lower_the_loss(name, ops, rng):
    make, labelled = LOSSES[name]
    model = m.Model(models.mlp(3, (4, 4, 2), (16,)), device=ops.name)
    x = ops.from_host(rng.standard_normal((16, 4, 4, 2)).astype(f32))
    labels = rng.integers(0, 3, 16).astype(np.int32)
    target = ops.from_host(labels if labelled else np.eye(3, dtype=f32)[labels])
    loss, optimizer, seen = make(), m.SGD(model, 0.2, 0.9), []
    for _ in range(25):
        seen.append(loss.forward(model.forward(x), target).loss)
        model.backward(loss.backward(optimizer.loss_scale))
        optimizer.step()
    assert seen[-1] < 0.6 * seen[0], seen


def test_micro_batches_of_mixed_labels_add_up_to_the_whole(ops, rng):
    x = ops.from_host(rng.standard_normal((7, 4, 4, 2)).astype(f32))
    target = ops.from_host(rng.dirichlet([1, 1, 1], 7).astype(f32))
    states = []
    for accumulate in (1, 3):
        model = m.Model(models.mlp(3, (4, 4, 2), (16,)), device=ops.name)
        step = EagerStep(model, m.SGD(model, 0.1), m.SoftmaxCrossEntropy(), accumulate=accumulate)
        states.append((step(x, target).read(), model.state_dict()))
    (whole, expected), (parts, found) = states
    assert parts == pytest.approx(whole, rel=1e-6)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-6)


CONSTRUCTORS = {
    "smoothing": (lambda: m.SoftmaxCrossEntropy(label_smoothing=1.5), r"label_smoothing must be a number in \[0, 1\]"),
    "negative weight": (lambda: m.SoftmaxCrossEntropy(weight=[1, -1]), "weight must be a finite number of at least 0"),
    "no weight": (lambda: m.SoftmaxCrossEntropy(weight=[0, 0]), "not all 0"),
    "pos_weight": (lambda: m.BCEWithLogitsLoss(0), "pos_weight must be a number above 0"),
    "alpha": (lambda: m.FocalLoss(alpha=2), "alpha must be"),
    "gamma": (lambda: m.FocalLoss(gamma=0.5), "gamma must be a number of 0, or at least 1"),
    "smooth": (lambda: m.DiceLoss(smooth=0), "smooth must be a number above 0"),
    "index": (lambda: m.DiceLoss(ignore_index=1.5), "ignore_index must be an integer"),
    "k": (lambda: m.TopK(0), "k must be an integer of at least 1"),
}


@pytest.mark.parametrize("case", CONSTRUCTORS)
def test_impossible_settings_are_refused(case):
    make, text = CONSTRUCTORS[case]
    with pytest.raises(ValueError, match=text):
        make()


def test_doors_say_what_does_not_fit():
    x = np.zeros((2, 3), f32)
    with pytest.raises(ValueError, match=r"targets must have shape \(2, 3\) like the predictions"):
        m.MSELoss().forward(x, np.zeros(2, f32))
    with pytest.raises(TypeError, match=r"targets must be float32 like the predictions, got int64; .*astype"):
        m.BCEWithLogitsLoss().forward(x, np.zeros((2, 3), np.int64))
    with pytest.raises(
        ValueError, match=r"probabilities must have shape \(2, 3\) like the logits, or labels, got \(2, 4\)"
    ):
        m.SoftmaxCrossEntropy().forward(x, np.zeros((2, 4), f32))
    with pytest.raises(TypeError, match="probabilities must be float32, got float64"):
        m.SoftmaxCrossEntropy().forward(x, np.zeros((2, 3)))
    with pytest.raises(ValueError, match="a class for each weight"):
        m.SoftmaxCrossEntropy(weight=[1, 2]).forward(x, np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="at least two classes"):
        m.DiceLoss().forward(x[:, :1], np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="1 labels outside"):
        _ = m.DiceLoss().forward(x, np.array([0, 7])).loss
    with pytest.raises(ValueError, match="1 labels outside"):
        _ = m.SoftmaxCrossEntropy(label_smoothing=0.1).forward(x, np.array([0, 7])).loss
    with pytest.raises(RuntimeError, match="without a forward pass"):
        m.MSELoss().backward()


# -- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_add_up_batches_and_ranks(ops, rng):
    logits, labels = drawn(rng, ops, (40,), 6)
    labels[::7] = -100
    top, confusion = m.TopK(3), m.Confusion()
    for part in (slice(0, 11), slice(11, 11), slice(11, 40)):
        for metric in (top, confusion):
            metric.update(ops.from_host(logits[part]), ops.from_host(labels[part]))
    kept = labels >= 0
    order = np.argsort(-logits, axis=1, kind="stable")
    expected = (order[:, :3] == labels[:, None]).any(axis=1)[kept].mean()
    assert top.read() == ((order[:, 0] == labels)[kept].mean(), expected)
    matrix = np.zeros((6, 6), np.int64)
    np.add.at(matrix, (labels[kept], order[kept, 0]), 1)
    np.testing.assert_array_equal(confusion.read(), matrix)
    top.reset()
    top.update(ops.from_host(np.eye(6, dtype=f32)), ops.from_host(np.arange(6)))
    assert top.read() == (1.0, 1.0)


def test_ranks_are_joined_exactly(cpu_ops, rng):
    logits, labels = drawn(rng, cpu_ops, (30,), 4)
    whole = m.Confusion()
    whole.update(logits, labels)
    parts = [m.Confusion(comm=Shard()) for _ in range(2)]
    for part, half in zip(parts, (slice(0, 12), slice(12, 30)), strict=True):
        part.update(logits[half], labels[half])
    parts[0].comm.other = np.append(parts[1].read().ravel(), 0).astype(np.float64)
    np.testing.assert_array_equal(parts[0].read(), whole.read())


def test_intersection_over_union_of_classes():
    matrix = np.array([[3, 1, 0], [2, 4, 0], [0, 0, 0]])
    np.testing.assert_allclose(m.Confusion.iou(matrix), [3 / 6, 4 / 7, np.nan])


def test_metrics_refuse_what_does_not_fit():
    with pytest.raises(RuntimeError, match="nothing was counted yet"):
        m.TopK().read()
    metric = m.Confusion()
    metric.update(np.zeros((2, 3), f32), np.array([0, 5]))
    with pytest.raises(ValueError, match="1 labels outside"):
        metric.read()
    with pytest.raises(ValueError, match=r"\(\.\.\., 3\) as before"):
        metric.update(np.zeros((2, 4), f32), np.array([0, 1]))
