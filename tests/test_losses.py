"""Losses and metrics: doors, what is read, ranks that equal one, and a training run with each."""

from __future__ import annotations

import numpy as np
import pytest

import minidl as m
from minidl import models
from minidl.dist.communicator import SoloCommunicator
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


def of_pixels(loss, a=0.0, b=0.0):
    """The mean of a pointwise loss by its definition."""
    return lambda x, t: reference.pointwise(x, t, loss, a, b) / x.size


def of_rows(totals):
    return totals[0] / totals[1]


# a loss, whether it takes labels, and its definition in float64
DEFINED = {
    "plain": (
        m.SoftmaxCrossEntropy(), True,
        lambda x, t: of_rows(reference.smoothed_cross_entropy(x, t, None, 0, -100)),
    ),
    "smoothed": (
        m.SoftmaxCrossEntropy(label_smoothing=0.2), True,
        lambda x, t: of_rows(reference.smoothed_cross_entropy(x, t, None, 0.2, -100)),
    ),
    "ignoring": (
        m.SoftmaxCrossEntropy(weight=[1, 2, 0.5], ignore_index=1), True,
        lambda x, t: of_rows(reference.smoothed_cross_entropy(x, t, [1, 2, 0.5], 0, 1)),
    ),
    "soft": (
        m.SoftmaxCrossEntropy(label_smoothing=0.1), False,
        lambda x, t: of_rows(reference.soft_cross_entropy(x, t, None, 0.1)),
    ),
    "dice": (m.DiceLoss(), True, lambda x, t: reference.dice(x, t, 1.0, -100)),
    "dice-ignoring": (m.DiceLoss(smooth=0.25, ignore_index=2), True, lambda x, t: reference.dice(x, t, 0.25, 2)),
    "bce": (m.BCEWithLogitsLoss(2.0), False, of_pixels("bce_with_logits", 2.0)),
    "mse": (m.MSELoss(), False, of_pixels("mse")),
    "focal": (m.FocalLoss(), False, of_pixels("focal", 0.25, 2.0)),
    "focal-plain": (m.FocalLoss(alpha=1.0, gamma=0.0), False, of_pixels("focal", 1.0, 0.0)),
    "focal-of-one": (m.FocalLoss(alpha=0.0, gamma=1.0), False, of_pixels("focal", 0.0, 1.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFINED)
def test_what_is_read_is_the_definition(name, ops, rng):
    loss, labelled, defined = DEFINED[name]
    logits, labels = drawn(rng, ops, (4, 5), 3)
    target = labels if labelled else rng.uniform(0, 1, logits.shape).astype(f32)
    totals = loss.forward(ops.from_host(logits), ops.from_host(target))
    assert totals.loss == pytest.approx(defined(logits, target), rel=2e-6)
    if not isinstance(loss, m.SoftmaxCrossEntropy):
        assert totals.read()[2:] == (0, 0), "it tells right answers from wrong ones"


class Shard(SoloCommunicator):
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


def step_of(loss, ops, accumulate):
    model = m.Model(models.mlp(3, (4, 4, 2), (16,)), device=ops.name, seed=3)
    return EagerStep(model, m.SGD(model, 0.1), loss, accumulate=accumulate)


DIVISIBLE = [name for name in LOSSES if name != "dice"]


@pytest.mark.parametrize("name", DIVISIBLE)
def test_what_is_counted_is_of_all_ranks(name, cpu_ops, rng):
    make, labelled = LOSSES[name]
    logits, labels = drawn(rng, cpu_ops, (10,), 3)
    labels[::4] = -100
    target = labels if labelled else rng.integers(0, 2, logits.shape).astype(f32)
    comm = Shard()
    comm.other = make().count(target[:3], 3)
    assert make(comm=comm).count(target[3:], 3)[1] == make().forward(logits, target).array[1] > 0


@pytest.mark.parametrize("name", DIVISIBLE)
def test_micro_batches_add_up_to_the_whole(name, ops, rng):
    """Of batches of 7, 2 and 1 samples; ignored labels and classes of other weights lie unevenly."""
    make, labelled = LOSSES[name]
    x = ops.from_host(rng.standard_normal((10, 4, 4, 2)).astype(f32))
    labels = np.array([0, -100, 2, 1, 1, -100, -100, 2, 2, 0], np.int32)
    target = ops.from_host(labels if labelled else rng.dirichlet([1, 1, 1], 10).astype(f32))
    whole, parts = (step_of(make(), ops, accumulate) for accumulate in (1, 3))
    for part in (slice(0, 7), slice(7, 9), slice(9, 10)):
        expected, found = (step(x[part], target[part]).read() for step in (whole, parts))
        assert found == pytest.approx(expected, rel=2e-6)
        for key, values in whole.model.state_dict().items():
            np.testing.assert_allclose(parts.model.state_dict()[key], values, rtol=1e-5, atol=1e-6)


def test_a_loss_that_is_no_sum_over_samples_is_not_cut(cpu_ops):
    step_of(m.DiceLoss(), cpu_ops, 1)
    with pytest.raises(ValueError, match="EagerStep: accumulate must be 1 with dice .*, got 2; take whole"):
        step_of(m.DiceLoss(), cpu_ops, 2)


CONSTRUCTORS = {
    "smoothing": (
        lambda: m.SoftmaxCrossEntropy(label_smoothing=1.5),
        r"Entropy: label_smoothing must be a number in \[0, 1\]",
    ),
    "negative weight": (lambda: m.SoftmaxCrossEntropy(weight=[1, -1]), "weight must be a finite number of at least 0"),
    "no weight": (lambda: m.SoftmaxCrossEntropy(weight=[0, 0]), "not all 0"),
    "pos_weight": (lambda: m.BCEWithLogitsLoss(0), "BCEWithLogitsLoss: pos_weight must be a number above 0"),
    "alpha": (lambda: m.FocalLoss(alpha=2), "FocalLoss: alpha must be"),
    "gamma": (lambda: m.FocalLoss(gamma=0.5), "gamma must be a number of 0, or at least 1"),
    "smooth": (lambda: m.DiceLoss(smooth=0), "smooth must be a number above 0"),
    "index": (lambda: m.DiceLoss(ignore_index=1.5), "DiceLoss: ignore_index must be an integer"),
    "k": (lambda: m.TopK(0), "k must be an integer of at least 1"),
}


@pytest.mark.parametrize("case", CONSTRUCTORS)
def test_impossible_settings_are_refused(case):
    make, text = CONSTRUCTORS[case]
    with pytest.raises(ValueError, match=text):
        make()


def test_doors_say_what_does_not_fit():
    x = np.zeros((2, 3), f32)
    with pytest.raises(ValueError, match=r"MSELoss: targets must have shape \(2, 3\) like the predictions"):
        m.MSELoss().forward(x, np.zeros(2, f32))
    with pytest.raises(TypeError, match=r"BCEWithLogitsLoss: targets must be float32 like .*, got int64; .*astype"):
        m.BCEWithLogitsLoss().forward(x, np.zeros((2, 3), np.int64))
    with pytest.raises(
        ValueError, match=r"probabilities must have shape \(2, 3\) like the logits, or labels, got \(2, 4\)"
    ):
        m.SoftmaxCrossEntropy().forward(x, np.zeros((2, 4), f32))
    with pytest.raises(TypeError, match="MSELoss: predictions must be float32, bfloat16 or float16, got float64"):
        m.MSELoss().forward(np.zeros((2, 3)), x)
    with pytest.raises(TypeError, match="FocalLoss: targets must be a NumPy"):
        m.FocalLoss().forward(x, None)
    with pytest.raises(TypeError, match="SoftmaxCrossEntropy: probabilities must be float32, got float64"):
        m.SoftmaxCrossEntropy().forward(x, np.zeros((2, 3)))
    for call in (
        lambda loss: loss.forward(x, np.zeros(2, np.int64)),
        lambda loss: loss.count(np.zeros(2, np.int64), 3),
    ):
        with pytest.raises(ValueError, match=r"weight must have shape \(3,\), one for each class, got \(2,\)"):
            call(m.SoftmaxCrossEntropy(weight=[1, 2]))
    with pytest.raises(ValueError, match="DiceLoss: logits must have shape .* at least two classes"):
        m.DiceLoss().forward(x[:, :1], np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="DiceLoss: 1 labels outside"):
        _ = m.DiceLoss().forward(x, np.array([0, 7])).loss
    with pytest.raises(ValueError, match="1 labels outside"):
        _ = m.SoftmaxCrossEntropy(label_smoothing=0.1).forward(x, np.array([0, 7])).loss
    with pytest.raises(RuntimeError, match=r"MSELoss: backward without .*; call forward\(predictions, targets\)"):
        m.MSELoss().backward()
    for logits in (np.zeros(3, f32), np.zeros((3, 0), f32)):
        with pytest.raises(ValueError, match=r"\(N, K\) or \(N, H, W, K\) with at least one class"):
            m.SoftmaxCrossEntropy().forward(logits, np.zeros(3, np.int64))
    of_pixels, of_classes = np.zeros((2, 3, 3), np.int64), np.zeros((2, 3), np.int64)
    for labels, remedy in (
        (of_pixels, "such as unet"),
        (of_classes, "argmax"),
        (np.zeros(5, np.int64), "got \\(5,\\)$"),
    ):
        with pytest.raises(ValueError, match=rf"labels must have shape \(2,\) .*{remedy}"):
            m.SoftmaxCrossEntropy().forward(x, labels)


@pytest.mark.parametrize("scale", [np.ones(2, f32), np.ones((), f32), np.ones(1), 2.0])
def test_a_scale_that_is_none_is_refused_and_the_pass_can_be_taken_again(scale):
    loss = m.MSELoss()
    loss.forward(np.ones((2, 3), f32), np.zeros((2, 3), f32))
    with pytest.raises(TypeError, match=r"MSELoss: scale must be a float32 cpu array \(1,\).*optimizer.loss_scale"):
        loss.backward(scale)
    np.testing.assert_allclose(loss.backward(np.full(1, 3.0, f32)), np.full((2, 3), 1.0, f32))


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


@pytest.mark.parametrize("case", LOSSES)
@pytest.mark.parametrize("large", [np.nan, np.inf, -np.inf, 6e4])
def test_overflow_and_nan_are_no_news(case, large, ops, dtype, rng):
    """The loss scale reacts to them: nobody is warned (a warning is an error here)."""
    make, labelled = LOSSES[case]
    logits, labels = drawn(rng, ops, (4,), 3)
    x = logits.astype(dtype)
    x[0], x[1, 1] = large, large
    shares = np.eye(3, dtype=f32 if case == "soft" else dtype)[labels]
    loss = make()
    loss.forward(ops.from_host(x), ops.from_host(labels if labelled else shares))
    loss.backward()


@pytest.mark.parametrize("metric", [m.TopK(2), m.Confusion()])
def test_a_metric_that_was_reset_knows_of_nothing(metric, ops):
    for classes in (3, 2):
        metric.update(ops.from_host(np.eye(classes, dtype=f32)), ops.from_host(np.arange(classes)))
        assert metric.value() == 1.0
        metric.reset()
        with pytest.raises(RuntimeError, match="nothing was counted yet"):
            metric.read()


def test_intersection_over_union_of_classes():
    matrix = np.array([[3, 1, 0], [2, 4, 0], [0, 0, 0]])
    np.testing.assert_allclose(m.Confusion.iou(matrix), [3 / 6, 4 / 7, np.nan])


@pytest.mark.parametrize("make", [m.MSELoss, m.SoftmaxCrossEntropy, m.TopK, m.Confusion, m.Model])
@pytest.mark.parametrize("comm", [4, True, SoloCommunicator])
def test_what_is_no_communicator_is_refused(make, comm):
    graph, who = ((models.mlp(3, (4, 4, 2)),), "model") if make is m.Model else ((), make.__name__)
    with pytest.raises(TypeError, match=rf"{who}: comm must be a communicator, got .*; dist.init\(\) gives one"):
        make(*graph, comm=comm)


def test_metrics_refuse_what_does_not_fit():
    with pytest.raises(RuntimeError, match="nothing was counted yet"):
        m.TopK().read()
    with pytest.raises(ValueError, match="TopK: k must be at most the number of classes, 3, got 4"):
        m.TopK(4).update(np.zeros((2, 3), f32), np.array([0, 1]))
    metric = m.Confusion()
    metric.update(np.zeros((2, 3), f32), np.array([0, 5]))
    with pytest.raises(ValueError, match="Confusion: 1 labels outside"):
        metric.read()
    with pytest.raises(ValueError, match=r"Confusion: labels must have shape \(2,\)"):
        metric.update(np.zeros((2, 3), f32), np.array([0]))
    with pytest.raises(ValueError, match=r"\(\.\.\., 3\) as before"):
        metric.update(np.zeros((2, 4), f32), np.array([0, 1]))


def test_labels_outside_the_classes_are_an_error(cpu_ops, rng):
    loss = m.SoftmaxCrossEntropy()
    totals = loss.forward(rng.standard_normal((3, 4)).astype(f32), np.array([0, 4, -1]))
    with pytest.raises(ValueError, match="2 labels outside"):
        _ = totals.loss


def test_loss_doors(cpu_ops):
    loss = m.SoftmaxCrossEntropy()
    logits = np.zeros((2, 3), f32)
    with pytest.raises(ValueError, match=r"labels must have shape \(2,\)"):
        loss.forward(logits, np.zeros(3, np.int32))
    with pytest.raises(TypeError, match="int32, int64 or uint8"):
        loss.forward(logits, np.zeros(2))
    with pytest.raises(RuntimeError, match="forward"):
        loss.backward()


def test_logits_and_scales_at_the_door_of_the_loss(cpu_ops):
    loss, labels = m.SoftmaxCrossEntropy(), np.zeros(2, np.int32)
    with pytest.raises(TypeError, match="logits must be float32"):
        loss.forward(np.zeros((2, 3)), labels)
    for shape in ((2, 0), (2,), ()):
        with pytest.raises(ValueError, match="logits must have shape"):
            loss.forward(np.zeros(shape, f32), labels)
    loss.forward(np.zeros((2, 3), f32), labels)
    with pytest.raises(TypeError, match=r"scale must be a float32 cpu array \(1,\)"):
        loss.backward(2.0)
    with pytest.raises(ValueError, match="ignore_index must be an integer"):
        m.SoftmaxCrossEntropy(ignore_index=1.5)
