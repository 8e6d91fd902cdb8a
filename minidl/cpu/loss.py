"""Softmax cross entropy and its gradient."""

from __future__ import annotations

import numpy as np

from minidl.cpu import _loss
from minidl.cpu.array import Array, contiguous, empty, rows_float32, stored, zeros
from minidl.precision import float32

__all__ = ["count_labels", "softmax_cross_entropy", "softmax_cross_entropy_backward"]


def count_labels(labels: Array, num_classes: int, *, ignore_index: int) -> Array:
    """How many labels count: totals (4,) float64 as of `softmax_cross_entropy`, all but ``totals[1]`` zero.

    Args:
        labels: (...) int32, int64 or uint8; ``ignore_index`` and all outside ``0 .. num_classes - 1`` do not count.
    """
    counted = (labels != ignore_index) & (labels >= 0) & (labels < num_classes)
    totals = zeros(4, np.float64)
    totals[1] = np.count_nonzero(counted)
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
        lse, totals: of the forward pass, the totals summed over all ranks.
        scale: (1,) float32, the loss scale; None stands for 1.
    """
    assert lse.size == labels.size, (lse.shape, labels.shape)
    count = float(totals[1])
    factor = (1.0 if scale is None else float(scale[0])) / count if count > 0 else 0.0
    x = rows_float32(logits)
    dx = empty(x.shape, float32)
    _loss.backward(x, _flat(logits, labels), ignore_index, contiguous(lse).reshape(-1), np.float32(factor), dx)
    return stored(dx, logits.shape, logits.dtype)


def _flat(logits: Array, labels: Array) -> Array:
    assert labels.shape == logits.shape[:-1], (labels.shape, logits.shape)
    return contiguous(labels).reshape(-1)
