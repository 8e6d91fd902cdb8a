"""Softmax cross entropy in plain float64, row by row."""

from __future__ import annotations

import numpy as np


def softmax_cross_entropy(logits, labels, ignore_index):
    """totals (4,) and lse."""
    logits, labels = np.asarray(logits, np.float64), np.asarray(labels, np.int64)
    totals, lse = np.zeros(4), np.zeros(labels.shape)
    for row in np.ndindex(labels.shape):
        x, label = logits[row], int(labels[row])
        lse[row] = np.max(x) + np.log(np.sum(np.exp(x - np.max(x))))
        if label == ignore_index:
            continue
        if not 0 <= label < len(x):
            totals[3] += 1
            continue
        totals += [lse[row] - x[label], 1, label == list(x).index(max(x)), 0]
    return totals, lse


def softmax_cross_entropy_backward(logits, labels, count, scale, ignore_index):
    """``count`` is the number of valid labels of all ranks."""
    logits, labels = np.asarray(logits, np.float64), np.asarray(labels, np.int64)
    dx = np.zeros(logits.shape)
    for row in np.ndindex(labels.shape):
        x, label = logits[row], int(labels[row])
        if label == ignore_index or not 0 <= label < len(x):
            continue
        p = np.exp(x - np.max(x))
        dx[row] = p / np.sum(p)
        dx[row][label] -= 1
        dx[row] *= scale / count
    return dx
