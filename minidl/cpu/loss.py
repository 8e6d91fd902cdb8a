"""Softmax cross entropy, plain or with class weights and label smoothing, and its gradient."""

from __future__ import annotations

import numpy as np

from minidl.cpu import _loss
from minidl.cpu.array import QUIET, Array, contiguous, empty, rows_float32, stored, zeros
from minidl.precision import float32


def count_labels(labels: Array, num_classes: int, weights: Array | None = None, *, ignore_index: int) -> Array:
    """What a loss of labels is divided by, before there are logits: totals (4,) float64, all but ``totals[1]`` zero.

    Args:
        labels: (...) int32, int64 or uint8; ``ignore_index`` and all outside ``0 .. num_classes - 1`` do not count.
        weights: (num_classes,) float32, of the classes, whose sum over the labels is wanted; None for ones.
    """
    label, valid, _ = sorted_out(labels, num_classes, ignore_index)
    totals = zeros(4, np.float64)
    totals[1] = valid.sum() if weights is None else weights[label[valid]].sum(dtype=np.float64)
    return totals


def softmax_cross_entropy(logits: Array, labels: Array, *, ignore_index: int) -> tuple[Array, Array]:
    """Totals of the loss over this rank's rows, to be added over ranks before anything is divided.

    Args:
        logits: (..., K), any storage dtype.
        labels: (...) int32, int64 or uint8; ``ignore_index`` marks rows that do not count. Labels outside ``0 .. K-1``
            are reported in ``totals[3]`` and do not count either.

    Returns:
        totals (4,) float64: sum of ``-log p[label]``, valid labels, labels that are the first largest logit of their
        row, labels out of range; lse (...) float32: the logarithm of each row's sum of exponentials.
    """
    totals = empty(4, np.float64)
    lse = empty(labels.size, float32)
    _loss.forward(rows_float32(logits), _flat(logits, labels), ignore_index, totals, lse)
    return totals, lse.reshape(labels.shape)


def softmax_cross_entropy_backward(
    logits: Array, labels: Array, lse: Array, totals: Array, scale: Array | None = None, *, ignore_index: int
) -> Array:
    """``(softmax - onehot) * scale / totals[1]`` in the dtype of ``logits``; 0 where the label does not count.

    Args:
        lse: of the forward pass.
        totals: of the forward pass or `count_labels`, summed over all ranks: ``totals[1]`` is read.
        scale: (1,) float32, the loss scale; None stands for 1.
    """
    assert lse.size == labels.size, (lse.shape, labels.shape)
    count = float(totals[1])
    factor = (1.0 if scale is None else float(scale[0])) / count if count > 0 else 0.0
    x = rows_float32(logits)
    dx = empty(x.shape, float32)
    _loss.backward(x, _flat(logits, labels), ignore_index, contiguous(lse).reshape(-1), np.float32(factor), dx)
    return stored(dx, logits.shape, logits.dtype)


@QUIET
def smoothed_cross_entropy(
    logits: Array, labels: Array, weights: Array | None = None, *, smoothing: float, ignore_index: int, top: int = 1
) -> tuple[Array, Array]:
    """Totals over this rank's rows, to be added over ranks before anything is divided.

    Args:
        logits: (..., K), any storage dtype; labels: (...) int32, int64 or uint8.
        weights: (K,) float32, of the classes; None for ones.
        smoothing: share of every label that is spread over all classes.
        top: how many of the largest logits the last total looks at; equal ones in the order of their classes.

    Returns:
        totals (6,) float64: summed loss, sum of the labels' weights, labels that are the first largest logit, labels
        out of range, valid labels, valid labels among the ``top`` largest, neither where a logit is NaN; lse (...)
        float32.
    """
    x = rows_float32(logits).astype(np.float64)
    count, classes = x.shape
    w = np.ones(classes) if weights is None else weights.astype(np.float64)
    label, valid, outside = sorted_out(labels, classes, ignore_index)
    peak = x.max(axis=1, keepdims=True) if count else x[:, :1]
    lse = peak[:, 0] + np.log(np.exp(x - peak).sum(axis=1))
    own = np.take_along_axis(x, label[:, None], axis=1)[:, 0]
    before = (x > own[:, None]).sum(axis=1) + ((x == own[:, None]) & (np.arange(classes) < label[:, None])).sum(axis=1)
    terms = (1 - smoothing) * w[label] * (lse - own)
    if smoothing:
        terms += smoothing / classes * ((lse[:, None] - x) @ w)
    known = ~np.isnan(lse)
    columns = (terms, w[label], known & (before == 0), np.ones(count), known & (before < top))
    loss, weight, correct, labels_, within = (float(np.sum(column[valid])) for column in columns)
    totals = np.array([loss, weight, correct, outside, labels_, within])
    return totals, lse.astype(float32).reshape(labels.shape)


@QUIET
def smoothed_cross_entropy_backward(
    logits: Array, labels: Array, lse: Array, totals: Array, weights: Array | None = None, scale: Array | None = None,
    *, smoothing: float, ignore_index: int,
) -> Array:  # fmt: skip
    """The gradient of ``totals[0] / totals[1]`` times ``scale``, in the dtype of ``logits``.

    Args:
        lse, totals, scale: as of `softmax_cross_entropy_backward`.
    """
    x = rows_float32(logits)
    count, classes = x.shape
    w = np.ones(classes, float32) if weights is None else weights
    label, valid, _ = sorted_out(labels, classes, ignore_index)
    factor = (1.0 if scale is None else float(scale[0])) / float(totals[1]) if totals[1] > 0 else 0.0
    own = ((1 - smoothing) * w[label]).astype(float32)
    share = (smoothing / classes * w).astype(float32)
    dx = empty(x.shape, float32)
    np.exp(x - lse.reshape(-1, 1), out=dx)
    dx *= (own + share.sum(dtype=np.float64).astype(float32))[:, None]
    dx -= share
    dx[np.arange(count), label] -= own
    dx *= np.where(valid, np.float32(factor), np.float32(0))[:, None]
    return stored(dx, logits.shape, logits.dtype)


def sorted_out(labels: Array, classes: int, ignore_index: int) -> tuple[Array, Array, int]:
    """Labels as indices (0 where none), which rows count, and how many labels are no class."""
    label = labels.reshape(-1).astype(np.int64)
    inside = (label >= 0) & (label < classes)
    kept = label != ignore_index
    return np.where(inside, label, 0), inside & kept, int((kept & ~inside).sum())


def _flat(logits: Array, labels: Array) -> Array:
    assert labels.shape == logits.shape[:-1], (labels.shape, logits.shape)
    return contiguous(labels).reshape(-1)
