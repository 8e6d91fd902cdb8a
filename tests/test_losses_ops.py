"""Losses beyond plain cross entropy, and what metrics count: laws of the operations of both tables."""

from __future__ import annotations

import numpy as np
import pytest

from minidl.precision import float32
from tests.layouts import LAYOUTS, place
from tests.reference import losses as reference
from tests.reference import softmax as softmax_reference
from tests.reference.differences import gradient
from tests.tolerance import assert_close, draw

IGNORE = 255
SHAPES = [
    (1, 1),
    (7, 10),
    (2, 5, 3, 4),
    (33, 1000),
    (9, 512),
    (5, 2500),
    (1, 41, 37, 21),
    (3, 9000),
    (0, 10),
    (0, 4, 4, 3),
]


def labelled(rng, shape, dtype, label_type=np.int64):
    """Logits, some of them equal, and labels: every fifth ignored, one out of range."""
    logits = np.round(draw(rng, shape, dtype, scale=3.0).astype(np.float64), 1).astype(dtype)
    labels = rng.integers(0, min(shape[-1], IGNORE), shape[:-1]).astype(label_type)
    labels.reshape(-1)[::5] = IGNORE
    labels.reshape(-1)[3:4] = shape[-1] if shape[-1] < 127 else 0
    return logits, labels


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_smoothed_totals_equal_the_reference(ops, rng, dtype, shape, smoothing, weighted):
    logits, labels = labelled(rng, shape, dtype)
    weights = rng.uniform(0.2, 2, shape[-1]).astype(np.float32) if weighted else None
    for layout, top in (("dense", 5), ("dense", 1), ("pitched", 5), ("strided", 1)):
        totals, lse = ops.smoothed_cross_entropy(
            place(ops, logits, layout), ops.from_host(labels), ops.from_host(weights) if weighted else None,
            smoothing=smoothing, ignore_index=IGNORE, top=top,
        )  # fmt: skip
        expected = reference.smoothed_cross_entropy(logits, labels, weights, smoothing, IGNORE, top)
        found = ops.to_host(totals)
        assert found.dtype == np.float64 and lse.dtype == float32 and lse.shape == labels.shape
        np.testing.assert_array_equal(found[2:], expected[2:])
        np.testing.assert_allclose(found[:2], expected[:2], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("top", [1, 2])
@pytest.mark.parametrize("classes", [3, 21, 64, 200])
def test_a_row_with_a_nan_is_never_right(ops, dtype, classes, top):
    logits = np.zeros((3, classes), dtype)
    logits[:, 1] = 5
    logits[0, 1], logits[1, 0] = np.nan, np.nan
    labels = ops.from_host(np.ones(3, np.int64))
    totals, _ = ops.smoothed_cross_entropy(ops.from_host(logits), labels, smoothing=0.1, ignore_index=IGNORE, top=top)
    found = ops.to_host(totals)
    assert np.isnan(found[0]) and found[1:].tolist() == [3, 1, 0, 3, 1]


@pytest.mark.parametrize("label_type", [np.uint8, np.int32, np.int64])
@pytest.mark.parametrize("classes", [3, 21, 24])
def test_labels_may_lie_anywhere(ops, rng, label_type, classes):
    """Kernels copy labels in vectors; an array of them may begin at any of its elements."""
    logits, labels = labelled(rng, (333, classes), float32, label_type)
    x, where = ops.from_host(logits[5:]), ops.from_host(labels)[5:]
    totals, _ = ops.softmax_cross_entropy(x, where, ignore_index=IGNORE)
    smoothed, _ = ops.smoothed_cross_entropy(x, where, smoothing=0.1, ignore_index=IGNORE)
    for found in (totals, smoothed):
        expected = reference.smoothed_cross_entropy(logits[5:], labels[5:], None, 0.0, IGNORE, 1)
        np.testing.assert_array_equal(ops.to_host(found)[1:4], expected[1:4])
    counts = ops.to_host(ops.confusion_counts(x, where, ignore_index=IGNORE))
    np.testing.assert_array_equal(counts, reference.confusion_counts(logits[5:], labels[5:], IGNORE))
    sums = ops.to_host(ops.dice_sums(x, where, ignore_index=IGNORE))
    np.testing.assert_allclose(sums, reference.dice_sums(logits[5:], labels[5:], IGNORE), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(7, 10), (2, 3, 2, 5), (4, 33)])
def test_smoothed_gradient_is_the_difference(ops, rng, dtype, shape, smoothing, weighted):
    logits, labels = labelled(rng, shape, dtype)
    weights = rng.uniform(0.2, 2, shape[-1]).astype(np.float32) if weighted else None
    arrays = ops.from_host(logits), ops.from_host(labels)
    w = ops.from_host(weights) if weighted else None
    totals, lse = ops.smoothed_cross_entropy(*arrays, w, smoothing=smoothing, ignore_index=IGNORE)
    scale = ops.from_host(np.float32([8]))
    dx = ops.smoothed_cross_entropy_backward(*arrays, lse, totals, w, scale, smoothing=smoothing, ignore_index=IGNORE)
    assert dx.dtype == dtype

    def mean(x):
        return np.divide(*reference.smoothed_cross_entropy(x, labels, weights, smoothing, IGNORE)[:2])

    assert_close(ops.to_host(dx), gradient(mean, logits, 8.0), dtype, scale=4.0)


def mixed(rng, shape, dtype):
    """Logits, some of them equal, and what two labels each make of a row; some shares tie."""
    logits, _ = labelled(rng, shape, dtype)
    one, other = (np.eye(shape[-1], dtype=float32)[rng.integers(0, shape[-1], shape[:-1])] for _ in range(2))
    share = rng.choice(np.float32([0.5, 0.25, 0.9, 1.0]), (*shape[:-1], 1))
    return logits, share * one + (1 - share) * other


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_soft_totals_equal_the_reference(ops, rng, dtype, shape, smoothing, weighted):
    logits, targets = mixed(rng, shape, dtype)
    weights = rng.uniform(0.2, 2, shape[-1]).astype(np.float32) if weighted else None
    expected = reference.soft_cross_entropy(logits, targets, weights, smoothing)
    w = ops.from_host(weights) if weighted else None
    for layout in LAYOUTS:
        totals, lse = ops.soft_cross_entropy(place(ops, logits, layout), ops.from_host(targets), w, smoothing=smoothing)
        found = ops.to_host(totals)
        assert found.dtype == np.float64 and lse.dtype == float32 and lse.shape == shape[:-1]
        np.testing.assert_array_equal(found[1:], expected[1:])
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(7, 10), (2, 3, 2, 5), (4, 33), (2, 64)])
def test_soft_gradient_is_the_difference(ops, rng, dtype, shape, smoothing, weighted):
    logits, targets = mixed(rng, shape, dtype)
    weights = rng.uniform(0.2, 2, shape[-1]).astype(np.float32) if weighted else None
    arrays, w = (ops.from_host(logits), ops.from_host(targets)), ops.from_host(weights) if weighted else None
    totals, lse = ops.soft_cross_entropy(*arrays, w, smoothing=smoothing)
    dx = ops.soft_cross_entropy_backward(*arrays, lse, totals, w, ops.from_host(np.float32([8])), smoothing=smoothing)
    assert dx.dtype == dtype

    def mean(x):
        return np.divide(*reference.soft_cross_entropy(x, targets, weights, smoothing)[:2])

    assert_close(ops.to_host(dx), gradient(mean, logits, 8.0), dtype, scale=4.0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_probabilities_of_one_class_are_its_label(ops, rng, dtype, smoothing):
    logits = draw(rng, (31, 10), dtype, scale=3.0)
    labels = rng.integers(0, 10, 31)
    hard, soft = ops.from_host(labels), ops.from_host(np.eye(10, dtype=float32)[labels])
    x, options = ops.from_host(logits), {"smoothing": smoothing, "ignore_index": IGNORE}
    totals, lse = ops.smoothed_cross_entropy(x, hard, **options)
    dx = ops.smoothed_cross_entropy_backward(x, hard, lse, totals, **options)
    joint, norm = ops.soft_cross_entropy(x, soft, smoothing=smoothing)
    np.testing.assert_allclose(ops.to_host(joint)[:3], ops.to_host(totals)[:3], rtol=1e-6)
    found = ops.soft_cross_entropy_backward(x, soft, norm, joint, smoothing=smoothing)
    assert_close(ops.to_host(found), ops.to_host(dx).astype(np.float64), dtype, scale=2.0)


def test_shards_of_a_weighted_loss_give_the_gradient_of_the_whole(ops, rng):
    logits, labels = labelled(rng, (30, 7), float32)
    labels[12:15] = IGNORE
    weights = ops.from_host(rng.uniform(0.2, 2, 7).astype(np.float32))
    options = {"smoothing": 0.1, "ignore_index": IGNORE}
    whole = ops.from_host(logits), ops.from_host(labels)
    totals, lse = ops.smoothed_cross_entropy(*whole, weights, **options)
    expected = ops.to_host(ops.smoothed_cross_entropy_backward(*whole, lse, totals, weights, **options))
    parts, joint = [], np.zeros(6)
    for a, b in ((0, 12), (12, 15), (15, 15), (15, 30)):
        arrays = ops.from_host(logits[a:b]), ops.from_host(labels[a:b])
        part, lse = ops.smoothed_cross_entropy(*arrays, weights, **options)
        joint += ops.to_host(part)
        parts.append((*arrays, lse))
    np.testing.assert_allclose(joint, ops.to_host(totals), rtol=1e-12)
    joint = ops.from_host(joint)
    dx = [ops.to_host(ops.smoothed_cross_entropy_backward(*part, joint, weights, **options)) for part in parts]
    np.testing.assert_allclose(np.concatenate(dx), expected, rtol=1e-6, atol=1e-9)


def many(classes: int) -> tuple[int, int]:
    """Rows so many that each block takes several groups of them, and so few that it takes one."""
    return (1_100_001, 280_000) if classes <= 3 else (280_001, 70_000)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("classes", [1, 3, 21, 62])
def test_many_rows_are_the_sum_of_a_few(cuda_ops, rng, dtype, classes, weighted):
    """Blocks take several groups of rows where there are many."""
    ops, rows, part_rows = cuda_ops, *many(classes)
    logits, labels = ops.from_host(draw(rng, (rows, classes), dtype)), rng.integers(0, classes, rows)
    labels[::5], labels[3] = IGNORE, classes
    labels = ops.from_host(labels)
    weights = ops.from_host(rng.uniform(0.2, 2, classes).astype(np.float32)) if weighted else None
    options = {"smoothing": 0.1, "ignore_index": IGNORE}
    totals, lse = ops.smoothed_cross_entropy(logits, labels, weights, top=2, **options)
    plain, plain_lse = ops.softmax_cross_entropy(logits, labels, ignore_index=IGNORE)
    dx = ops.smoothed_cross_entropy_backward(logits, labels, lse, totals, weights, **options)
    sums, plain_sums = np.zeros(6), np.zeros(4)
    for begin in range(0, rows, part_rows):
        few = slice(begin, min(begin + part_rows, rows))
        part, norm = ops.smoothed_cross_entropy(logits[few], labels[few], weights, top=2, **options)
        plain_part, plain_norm = ops.softmax_cross_entropy(logits[few], labels[few], ignore_index=IGNORE)
        found = ops.smoothed_cross_entropy_backward(logits[few], labels[few], norm, totals, weights, **options)
        sums += ops.to_host(part)
        plain_sums += ops.to_host(plain_part)
        for whole, piece in ((lse, norm), (plain_lse, plain_norm), (dx, found)):
            np.testing.assert_array_equal(ops.to_host(whole[few]), ops.to_host(piece))
    np.testing.assert_allclose(ops.to_host(totals), sums, rtol=1e-12)
    np.testing.assert_allclose(ops.to_host(plain), plain_sums, rtol=1e-12)


@pytest.mark.parametrize("classes", [3, 16, 21, 24, 32, 48, 62, 64])
def test_many_pixels_are_the_sum_of_a_few(cuda_ops, rng, dtype, classes):
    ops, rows, part_rows = cuda_ops, *many(classes)
    p, labels = ops.softmax(ops.from_host(draw(rng, (rows, classes), dtype))), rng.integers(0, classes, rows)
    labels[::5], labels[3] = IGNORE, classes
    labels, scale = ops.from_host(labels), ops.from_host(np.float32([3e5]))
    sums, found = (
        ops.dice_sums(p, labels, ignore_index=IGNORE),
        ops.to_host(ops.confusion_counts(p, labels, ignore_index=IGNORE)),
    )
    dx = ops.dice_backward(p, labels, sums, scale, smooth=1.0, ignore_index=IGNORE)
    counts, parts = np.zeros(classes**2 + 1), np.zeros(3 * classes + 1)
    for begin in range(0, rows, part_rows):
        few = slice(begin, min(begin + part_rows, rows))
        part = ops.dice_backward(p[few], labels[few], sums, scale, smooth=1.0, ignore_index=IGNORE)
        np.testing.assert_array_equal(ops.to_host(dx[few]), ops.to_host(part))
        counts += ops.to_host(ops.confusion_counts(p[few], labels[few], ignore_index=IGNORE))
        parts += ops.to_host(ops.dice_sums(p[few], labels[few], ignore_index=IGNORE))
    np.testing.assert_array_equal(found, counts)
    np.testing.assert_allclose(ops.to_host(sums), parts, rtol=1e-6)


LOSSES = [("mse", 1.0, 0.0), ("bce_with_logits", 1.0, 0.0), ("bce_with_logits", 3.0, 0.0), ("focal", 0.25, 2.0),
          ("focal", 0.5, 0.0), ("focal", 0.75, 1.0), ("focal", 0.3, 2.5), ("focal", 0.25, 5.0)]  # fmt: skip


@pytest.mark.parametrize("loss, a, b", LOSSES)
@pytest.mark.parametrize("shape", [(1,), (3, 5, 7, 3), (2, 9, 11, 16), (5, 9001), (0, 5)])
def test_pointwise_losses_equal_the_reference(ops, rng, dtype, shape, loss, a, b):
    x = draw(rng, shape, dtype, scale=4.0)
    target = rng.integers(0, 2, shape).astype(dtype) if loss != "mse" else draw(rng, shape, dtype)
    if loss != "mse":
        target.reshape(-1)[::7] = 0.25  # soft targets
    for layout in LAYOUTS if len(shape) == 4 else ["dense"]:
        totals = ops.pointwise_loss(place(ops, x, layout), place(ops, target, layout), loss, a, b)
        assert totals.dtype == np.float64 and totals.shape == (2,)
        expected = reference.pointwise(x, target, loss, a, b)
        np.testing.assert_allclose(ops.to_host(totals), [expected, x.size], rtol=2e-6)


@pytest.mark.parametrize("loss, a, b", LOSSES)
def test_pointwise_gradients_are_differences(ops, rng, dtype, loss, a, b):
    x = draw(rng, (3, 41), dtype, scale=3.0)
    x[0, :4] = [20, -20, 60, -60]
    target = rng.integers(0, 2, x.shape).astype(dtype)
    target[1] = np.float32(0.25)
    arrays = ops.from_host(x), ops.from_host(target)
    totals = ops.pointwise_loss(*arrays, loss, a, b)
    dx = ops.pointwise_loss_backward(*arrays, totals, ops.from_host(np.float32([1000])), loss, a, b)
    assert dx.dtype == dtype
    step = 2.0**-14
    term = reference.POINTWISE[loss]
    values = zip(x.astype(np.float64).ravel(), target.astype(np.float64).ravel(), strict=True)
    slope = [(term(v + step, t, a, b) - term(v - step, t, a, b)) / (2 * step) for v, t in values]
    expected = np.reshape(slope, x.shape) * 1000 / x.size
    assert_close(ops.to_host(dx), expected, dtype, scale=1000 / x.size * (64 if loss == "mse" else 2))


@pytest.mark.parametrize(("loss", "b"), [("mse", 0.0), ("bce_with_logits", 0.0), ("focal", 0.0), ("focal", 2.0)])
def test_a_nan_is_in_its_gradient_and_in_no_other(ops, dtype, loss, b):
    x, target = np.linspace(-200, 200, 9).astype(dtype), np.resize([0, 1], 9).astype(dtype)
    x[4] = np.nan
    x, target = ops.from_host(x), ops.from_host(target)
    totals = ops.pointwise_loss(x, target, loss, 0.25, b)
    dx = ops.to_host(ops.pointwise_loss_backward(x, target, ops.from_host(np.array([1.0, 9.0])), None, loss, 0.25, b))
    assert np.isnan(ops.to_host(totals)[0]) and np.isnan(dx[4]) and np.isfinite(np.delete(dx, 4)).all()


def test_an_unknown_loss_names_the_known_ones(ops):
    x = ops.zeros((2, 2), np.dtype(np.float32))
    with pytest.raises(ValueError, match="unknown loss 'l1'; .*bce_with_logits, focal, mse"):
        ops.pointwise_loss(x, x, "l1")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape", [(1, 2), (2, 5, 3, 4), (1, 41, 37, 21), (700, 32), (300, 48), (500, 150), (0, 4, 4, 3)]
)
def test_dice_sums_equal_the_reference(ops, rng, dtype, shape, layout):
    logits, labels = labelled(rng, shape, dtype, np.int32)
    p = (softmax_reference.softmax(logits) if logits.size else logits).astype(dtype)
    sums = ops.to_host(ops.dice_sums(place(ops, p, layout), ops.from_host(labels), ignore_index=IGNORE))
    assert sums.dtype == np.float64
    np.testing.assert_allclose(sums, reference.dice_sums(p, labels, IGNORE), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 2, 8), (1, 2, 3, 32)])
@pytest.mark.parametrize("smooth", [1.0, 1e-3])
def test_dice_gradient_is_the_difference(ops, rng, smooth, shape, layout):
    logits, labels = labelled(rng, shape, float32)
    p = place(ops, ops.to_host(ops.softmax(ops.from_host(logits))), layout)
    sums = ops.dice_sums(p, ops.from_host(labels), ignore_index=IGNORE)
    factor = ops.from_host(np.float32([16]))
    dx = ops.dice_backward(p, ops.from_host(labels), sums, factor, smooth=smooth, ignore_index=IGNORE)
    expected = gradient(lambda x: reference.dice(x, labels, smooth, IGNORE), logits, 16.0)
    np.testing.assert_allclose(ops.to_host(dx), expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("label_type", [np.uint8, np.int32, np.int64])
@pytest.mark.parametrize("shape", [(1, 1), (7, 10), (1, 41, 37, 21), (300, 64), (700, 24), (400, 130), (0, 4, 4, 3)])
def test_confusion_counts_equal_the_reference(ops, rng, dtype, shape, label_type, layout):
    logits, labels = labelled(rng, shape, dtype, label_type)
    counts = ops.to_host(ops.confusion_counts(place(ops, logits, layout), ops.from_host(labels), ignore_index=IGNORE))
    assert counts.dtype == np.float64
    np.testing.assert_array_equal(counts, reference.confusion_counts(logits, labels, IGNORE))
