"""Softmax cross entropy: laws of the operations of both tables."""

from __future__ import annotations

import numpy as np
import pytest

from minidl.precision import float32
from tests.layouts import LAYOUTS, place
from tests.reference import loss as reference
from tests.reference.differences import assert_gradient
from tests.tolerance import assert_close, draw

IGNORE = 255
SHAPES = [(1, 1), (7, 10), (2, 5, 3, 4), (33, 1000), (1, 41, 37, 21), (0, 10), (0, 4, 4, 3)]


def case(rng, shape, dtype, label_type=np.int64):
    """Logits and labels, every fifth of them ignored."""
    logits = draw(rng, shape, dtype, scale=3.0)
    labels = rng.integers(0, min(shape[-1], IGNORE), shape[:-1]).astype(label_type)
    labels.reshape(-1)[::5] = IGNORE
    return logits, labels


def assert_totals(actual, expected, terms):
    assert actual.shape == (4,) and actual.dtype == np.float64
    np.testing.assert_array_equal(actual[1:], expected[1:])
    assert_close(actual[:1], expected[:1], float32, terms=terms, scale=8.0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_totals_and_gradient_equal_the_reference(ops, rng, dtype, shape, layout):
    logits, labels = case(rng, shape, dtype)
    logits_, labels_ = place(ops, logits, layout), ops.from_host(labels)
    totals, lse = ops.softmax_cross_entropy(logits_, labels_, ignore_index=IGNORE)
    expected, expected_lse = reference.softmax_cross_entropy(logits, labels, IGNORE)
    assert lse.dtype == np.float32
    assert_totals(ops.to_host(totals), expected, max(labels.size, 1))
    assert_close(ops.to_host(lse), expected_lse, float32, scale=4.0)
    dx = ops.softmax_cross_entropy_backward(logits_, labels_, lse, totals, ignore_index=IGNORE)
    assert dx.dtype == dtype
    count = max(expected[1], 1)
    expected = reference.softmax_cross_entropy_backward(logits, labels, count, 1.0, IGNORE)
    # The float32 lse is off by up to half a unit of about ten, which scales the softmax by as much.
    assert_close(ops.to_host(dx), expected, dtype, scale=4.0 / count)


@pytest.mark.parametrize("label_type", [np.int32, np.int64, np.uint8])
def test_labels_of_any_type(ops, rng, label_type):
    logits, labels = case(rng, (40, 300), float32, label_type)
    totals, _ = ops.softmax_cross_entropy(ops.from_host(logits), ops.from_host(labels), ignore_index=IGNORE)
    assert_totals(ops.to_host(totals), reference.softmax_cross_entropy(logits, labels, IGNORE)[0], 40)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("label_type", [np.int32, np.int64, np.uint8])
@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (3, 5, 11), (300_001,)])
def test_labels_are_counted(ops, rng, shape, label_type, weighted):
    labels = rng.integers(0, 9, shape).astype(label_type)
    if label_type != np.uint8:
        labels[labels == 8] = -1
    weights = rng.uniform(0, 2, 7).astype(float32) if weighted else np.ones(7, float32)
    given = (ops.from_host(weights),) if weighted else ()
    counted = ops.to_host(ops.count_labels(ops.from_host(labels), 7, *given, ignore_index=3))
    expected = weights.astype(np.float64)[labels[(labels >= 0) & (labels < 7) & (labels != 3)]].sum()
    np.testing.assert_allclose(counted, [0, expected, 0, 0], rtol=1e-12 if weighted else 0)


@pytest.mark.parametrize("label_type", [np.int32, np.int64])
def test_labels_out_of_range_are_counted_and_do_nothing_else(ops, rng, label_type):
    logits, labels = case(rng, (12, 6), float32, label_type)
    labels[[1, 4, 7]] = [6, -1, np.iinfo(label_type).max]
    logits_, labels_ = ops.from_host(logits), ops.from_host(labels)
    totals, lse = ops.softmax_cross_entropy(logits_, labels_, ignore_index=IGNORE)
    expected, _ = reference.softmax_cross_entropy(logits, labels, IGNORE)
    assert expected[3] == 3
    assert_totals(ops.to_host(totals), expected, 12)
    dx = ops.to_host(ops.softmax_cross_entropy_backward(logits_, labels_, lse, totals, ignore_index=IGNORE))
    assert not dx[[1, 4, 7]].any()
    expected = reference.softmax_cross_entropy_backward(logits, labels, expected[1], 1.0, IGNORE)
    assert_close(dx, expected, float32, scale=0.5)


def test_a_negative_or_valid_class_can_be_ignored(ops, rng):
    logits = draw(rng, (20, 4), float32)
    labels = rng.integers(-1, 4, 20)
    for ignore in (-1, 2):
        totals, _ = ops.softmax_cross_entropy(ops.from_host(logits), ops.from_host(labels), ignore_index=ignore)
        assert_totals(ops.to_host(totals), reference.softmax_cross_entropy(logits, labels, ignore)[0], 20)


def test_the_first_of_equal_logits_is_the_answer(ops):
    logits = ops.from_host(np.float32([[1, 3, 3, 0], [2, 2, 2, 2], [0, 0, 0, 1]]))
    for labels, correct in (([1, 0, 3], 3), ([2, 1, 0], 0)):
        totals, _ = ops.softmax_cross_entropy(logits, ops.from_host(np.array(labels)), ignore_index=-100)
        assert ops.to_host(totals)[2] == correct


def test_large_logits_do_not_overflow(ops, dtype):
    logits = np.array([[3e4, 0.0, -3e4], [-3e4, -3e4, -3e4]], dtype)
    labels = np.array([1, 2])
    totals, lse = ops.softmax_cross_entropy(ops.from_host(logits), ops.from_host(labels), ignore_index=-100)
    expected, expected_lse = reference.softmax_cross_entropy(logits, labels, -100)
    assert_totals(ops.to_host(totals), expected, 2)
    assert_close(ops.to_host(lse), expected_lse, float32)


@pytest.mark.parametrize("scale", [1.0, 65536.0])
def test_shards_with_joint_totals_give_the_gradient_of_the_whole(ops, rng, scale):
    logits, labels = case(rng, (30, 7), float32)
    labels[12:15] = IGNORE  # a rank without a single valid label
    parts, joint = [], np.zeros(4)
    for a, b in ((0, 12), (12, 15), (15, 15), (15, 30)):
        arrays = ops.from_host(logits[a:b]), ops.from_host(labels[a:b])
        totals, lse = ops.softmax_cross_entropy(*arrays, ignore_index=IGNORE)
        joint += ops.to_host(totals)
        parts.append((*arrays, lse))
    expected, _ = reference.softmax_cross_entropy(logits, labels, IGNORE)
    assert_totals(joint, expected, 30)
    joint, factor = ops.from_host(joint), ops.from_host(np.float32([scale]))
    dx = [ops.to_host(ops.softmax_cross_entropy_backward(*part, joint, factor, ignore_index=IGNORE)) for part in parts]
    expected = reference.softmax_cross_entropy_backward(logits, labels, expected[1], scale, IGNORE)
    assert_close(np.concatenate(dx), expected, float32, scale=4 * scale / 24)


def test_nothing_valid_gives_a_zero_gradient(ops, rng, dtype):
    logits, labels = draw(rng, (6, 5), dtype), np.full(6, IGNORE)
    arrays = ops.from_host(logits), ops.from_host(labels)
    totals, lse = ops.softmax_cross_entropy(*arrays, ignore_index=IGNORE)
    assert not ops.to_host(totals).any()
    dx = ops.to_host(ops.softmax_cross_entropy_backward(*arrays, lse, totals, ignore_index=IGNORE))
    assert not dx.astype(np.float32).any()


def test_reference_gradient_equals_central_differences(rng):
    logits, labels = case(rng, (2, 3, 4), np.float64)
    totals, _ = reference.softmax_cross_entropy(logits, labels, IGNORE)
    dx = reference.softmax_cross_entropy_backward(logits, labels, totals[1], 3.0, IGNORE)
    assert_gradient(dx, lambda v: reference.softmax_cross_entropy(v, labels, IGNORE)[0][0] / totals[1], logits, 3.0)
