"""Losses and counts in plain float64, row by row. Their gradients are central differences of these."""

from __future__ import annotations

import math

import numpy as np


def _valid(label, classes, ignore_index):
    return label != ignore_index and 0 <= label < classes


def smoothed_cross_entropy(logits, labels, weights, smoothing, ignore_index, top=1):
    """totals (6,): loss, weight, correct, outside, valid, within the ``top`` largest."""
    logits, labels = np.asarray(logits, np.float64), np.asarray(labels, np.int64)
    classes = logits.shape[-1]
    w = np.ones(classes) if weights is None else np.asarray(weights, np.float64)
    totals = np.zeros(6)
    for row in np.ndindex(labels.shape):
        x, label = logits[row], int(labels[row])
        if not _valid(label, classes, ignore_index):
            totals[3] += label != ignore_index
            continue
        losses = np.max(x) + np.log(np.sum(np.exp(x - np.max(x)))) - x
        order = sorted(range(classes), key=lambda k, x=x: (-x[k], k))
        totals[0] += (1 - smoothing) * w[label] * losses[label] + smoothing / classes * np.sum(w * losses)
        totals[1:] += [w[label], order[0] == label, 0, 1, label in order[:top]]
    return totals


def soft_cross_entropy(logits, targets, weights, smoothing):
    """totals (4,): loss, rows, rows whose largest logit is the largest target, 0."""
    logits, targets = np.asarray(logits, np.float64), np.asarray(targets, np.float64)
    classes = logits.shape[-1]
    w = np.ones(classes) if weights is None else np.asarray(weights, np.float64)
    totals = np.zeros(4)
    for row in np.ndindex(logits.shape[:-1]):
        x, t = logits[row], targets[row]
        losses = np.max(x) + np.log(np.sum(np.exp(x - np.max(x)))) - x
        totals[0] += np.sum(w * ((1 - smoothing) * t + smoothing / classes) * losses)
        totals[1:] += [1, np.argmax(x) == np.argmax(t), 0]
    return totals


def bce_with_logits(x, t, a, b):
    softplus = lambda v: max(v, 0.0) + math.log1p(math.exp(-abs(v)))  # noqa: E731
    return a * t * softplus(-x) + (1 - t) * softplus(x)


def mse(x, t, a, b):
    return (x - t) ** 2


def focal(x, t, a, b):
    p = 1 / (1 + math.exp(-x))
    return (a * t + (1 - a) * (1 - t)) * bce_with_logits(x, t, 1, 0) * (t * (1 - p) + (1 - t) * p) ** b


POINTWISE = {"bce_with_logits": bce_with_logits, "mse": mse, "focal": focal}


def pointwise(x, t, loss, a, b):
    """The sum of the terms."""
    pairs = zip(np.ravel(np.asarray(x, np.float64)), np.ravel(np.asarray(t, np.float64)), strict=True)
    return math.fsum(POINTWISE[loss](float(v), float(w), a, b) for v, w in pairs)


def dice_sums(p, labels, ignore_index):
    p, labels = np.asarray(p, np.float64), np.asarray(labels, np.int64)
    classes = p.shape[-1]
    sums = np.zeros((3, classes))
    outside = 0
    for row in np.ndindex(labels.shape):
        label = int(labels[row])
        if not _valid(label, classes, ignore_index):
            outside += label != ignore_index
            continue
        sums[0, label] += p[row][label]
        sums[1] += p[row]
        sums[2, label] += 1
    return np.append(sums.ravel(), outside)


def dice(logits, labels, smooth, ignore_index):
    """1 - mean over classes of (2 hit + smooth) / (mass + pixels + smooth), with the softmax of the logits."""
    e = np.exp(logits - np.max(logits, axis=-1, keepdims=True))
    hit, mass, pixels = dice_sums(e / e.sum(axis=-1, keepdims=True), labels, ignore_index)[:-1].reshape(3, -1)
    return 1 - np.mean((2 * hit + smooth) / (mass + pixels + smooth))


def confusion_counts(logits, labels, ignore_index):
    logits, labels = np.asarray(logits, np.float64), np.asarray(labels, np.int64)
    classes = logits.shape[-1]
    counts, outside = np.zeros((classes, classes)), 0
    for row in np.ndindex(labels.shape):
        label = int(labels[row])
        if _valid(label, classes, ignore_index):
            counts[label, list(logits[row]).index(max(logits[row]))] += 1
        else:
            outside += label != ignore_index
    return np.append(counts.ravel(), outside)
