"""Softmax cross entropy with class weights and label smoothing; the kernels are in smoothed_loss.cu."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from minidl import checks
from minidl.cuda.array import as_rows, contiguous, empty, zeros
from minidl.cuda.launch import launch
from minidl.cuda.loss import LABELS, STAGED_BLOCK, short_rows
from minidl.cuda.rows import dtype_code, rows
from minidl.cuda.softmax import BLOCK, row_variant
from minidl.cuda.totals import column_totals
from minidl.precision import float32
from minidl.shapes import ceil_div

__all__ = ["smoothed_cross_entropy", "smoothed_cross_entropy_backward"]

COLUMNS = 6
MOST_PARTIALS = 512  # blocks whose totals one more launch adds


class _Plan(NamedTuple):
    """The kernel: its macros, threads of a block, blocks of one group of rows each, shared memory, and arguments."""

    defines: dict[str, int | str]
    block: int
    blocks: int
    shared: int
    layout: tuple[Any, ...]


def _plan(logits: Any, labels: Any, weights: Any | None, out: Any | None) -> _Plan:
    """The kernel for ``logits``; ``out`` is the dense gradient, None in the forward pass."""
    if labels.dtype not in LABELS:
        raise checks.bad_dtype("smoothed_cross_entropy", "labels", "uint8, int32 or int64", labels.dtype)
    assert labels.shape == logits.shape[:-1], (labels.shape, logits.shape)
    count, channels, pitch = rows(logits)
    short = short_rows(logits, staged=out is None)
    if short is not None:
        code = dtype_code(logits, "smoothed_cross_entropy", "logits")
        defines = {"DTYPE": code, "LABEL": LABELS[labels.dtype], "WEIGHTED": int(weights is not None), **short.defines}
        return _Plan(defines, STAGED_BLOCK, ceil_div(count, short.block_rows), short.shared, ())
    defines, blocks = row_variant("smoothed_cross_entropy", logits, *(() if out is None else (out,)))
    defines |= {"LABEL": LABELS[labels.dtype]} | ({"FORWARD": 1} if out is None else {})
    return _Plan(defines, BLOCK, blocks, 0, (np.int32(channels), np.int64(pitch)))


def smoothed_cross_entropy(
    logits: Any, labels: Any, weights: Any | None = None, *, smoothing: float, ignore_index: int, top: int = 1
) -> tuple[Any, Any]:
    """Totals over this rank's rows, to be added over ranks before anything is divided.

    Args:
        logits: (..., K), any storage dtype; labels: (...) int32, int64 or uint8.
        weights: (K,) float32, of the classes; None for ones.
        smoothing: share of every label that is spread over all classes.
        top: how many of the largest logits the last total looks at; equal ones in the order of their classes.

    Returns:
        totals (6,) float64: summed loss, sum of the labels' weights, labels that are the first largest logit, labels
        out of range, valid labels, valid labels among the ``top`` largest; lse (...) float32.
    """
    logits, labels = as_rows(logits), contiguous(labels)
    count = labels.size
    lse = empty(labels.shape, float32)
    if count == 0:
        return zeros((COLUMNS,), np.float64), lse
    plan = _plan(logits, labels, weights, None)
    # A block's run of rows depends on their number only, never on the device.
    passes = ceil_div(plan.blocks, MOST_PARTIALS)
    partial = empty((ceil_div(plan.blocks, passes), COLUMNS), np.float64)
    launch(
        "smoothed_loss", "smoothed_cross_entropy", len(partial), plan.block, logits, labels, weights, lse, partial,
        np.int64(count), *plan.layout, np.int32(passes), np.int64(ignore_index), np.float32(smoothing), np.int32(top),
        defines=plan.defines, shared=plan.shared,
    )  # fmt: skip
    return column_totals(partial), lse


def smoothed_cross_entropy_backward(
    logits: Any,
    labels: Any,
    lse: Any,
    totals: Any,
    weights: Any | None = None,
    scale: Any | None = None,
    *,
    smoothing: float,
    ignore_index: int,
) -> Any:
    """The gradient of ``totals[0] / totals[1]`` times ``scale``, in the dtype of ``logits``.

    Args:
        lse, totals: of the forward pass, the totals summed over all ranks.
        scale: (1,) float32, the loss scale; None stands for 1.
    """
    logits, labels, lse = as_rows(logits), contiguous(labels), contiguous(lse)
    assert totals.dtype == np.float64 and totals.shape == (COLUMNS,), (totals.dtype, totals.shape)
    dlogits = empty(logits.shape, logits.dtype)
    if logits.size:
        plan = _plan(logits, labels, weights, dlogits)
        launch(
            "smoothed_loss", "smoothed_cross_entropy_backward", plan.blocks, plan.block, logits, labels, weights, lse,
            totals, scale, dlogits, np.int64(labels.size), *plan.layout, np.int64(ignore_index), np.float32(smoothing),
            defines=plan.defines, shared=plan.shared,
        )  # fmt: skip
    return dlogits
