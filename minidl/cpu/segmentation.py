"""What segmentation counts: sums of a Dice loss, its gradient, the confusion matrix."""

from __future__ import annotations

import numpy as np

from minidl.cpu.array import QUIET, Array, empty, rows_float32, stored
from minidl.cpu.loss import sorted_out
from minidl.precision import float32


@QUIET
def dice_sums(p: Array, labels: Array, *, ignore_index: int) -> Array:
    """Sums over this rank's pixels, to be added over ranks: (3K + 1,) float64.

    Args:
        p: (..., K) probabilities; labels: (...) int32, int64 or uint8, ``ignore_index`` and what is no class left out.

    Returns:
        For each class the probability on its pixels, that on all valid pixels, its pixels; then the labels out of
        range.
    """
    x = rows_float32(p)
    classes = x.shape[1]
    label, valid, outside = sorted_out(labels, classes, ignore_index)
    own = x[np.arange(len(x)), np.where(valid, label, 0)][valid]
    hit = np.bincount(label[valid], own, classes)
    mass = x.sum(axis=0, dtype=np.float64, where=valid[:, None])
    return np.concatenate([hit, mass, np.bincount(label[valid], minlength=classes), [outside]]).astype(np.float64)


@QUIET
def dice_backward(
    p: Array, labels: Array, sums: Array, scale: Array | None = None, *, smooth: float, ignore_index: int
) -> Array:
    """The gradient of ``1 - mean over classes of (2 hit + smooth) / (mass + pixels + smooth)`` by the logits.

    Args:
        p: (..., K), the softmax of the logits.
        sums: of `dice_sums`, added over all ranks.
        scale: (1,) float32, the loss scale; None stands for 1.
    """
    x = rows_float32(p)
    classes = x.shape[1]
    label, valid, _ = sorted_out(labels, classes, ignore_index)
    hit, mass, pixels = sums[:-1].reshape(3, classes)
    inverse = 1 / (mass + pixels + smooth)
    factor = (1.0 if scale is None else float(scale[0])) / classes
    slope = empty(x.shape, float32)
    slope[...] = (2 * hit + smooth) * inverse * inverse * factor
    rows = np.flatnonzero(valid)
    slope[rows, label[rows]] -= (2 * factor * inverse)[label[rows]].astype(float32)
    slope -= (slope * x).sum(axis=1, keepdims=True)
    slope *= x
    slope[~valid] = 0
    return stored(slope, p.shape, p.dtype)


def confusion_counts(logits: Array, labels: Array, *, ignore_index: int) -> Array:
    """(K * K + 1,) float64 over this rank's rows: how often [label, first largest logit], then labels out of range."""
    x = rows_float32(logits)
    classes = x.shape[1]
    label, valid, outside = sorted_out(labels, classes, ignore_index)
    found = x.argmax(axis=1) if x.size else np.zeros(0, np.int64)
    counts = np.bincount((label * classes + found)[valid], minlength=classes * classes)
    return np.append(counts, outside).astype(np.float64)
