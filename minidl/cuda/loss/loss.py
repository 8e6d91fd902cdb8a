"""Softmax cross entropy, plain or with class weights and label smoothing; the kernels are in loss.cu."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from minidl import checks
from minidl.cuda.array import as_rows, contiguous, empty, zeros
from minidl.cuda.launch import launch
from minidl.cuda.loss import short_rows
from minidl.cuda.rows import ACCESS, address, dtype_code, rows
from minidl.cuda.totals import column_totals
from minidl.precision import float32
from minidl.shapes import ceil_div

BLOCK = 256
BLOCK_CLASSES = 8192  # shortest row that gets a whole block
MOST_PARTIALS = 512  # blocks whose totals one more launch adds in a microsecond or two
LABELS_PER_THREAD = 16  # to count, where they are few; more are taken by the same blocks
LABELS = {np.dtype(np.uint8): "u8", np.dtype(np.int32): "int", np.dtype(np.int64): "i64"}


class _Plan(NamedTuple):
    """Which kernel takes rows of this form, forward in blocks of ``passes`` groups of rows each.

    Macros, blocks, threads of a block, shared memory in bytes, arguments.
    """

    defines: dict[str, int | str]
    blocks: int
    block: int
    shared: int
    layout: tuple[Any, ...]
    passes: int


def _label(labels: Any) -> str:
    """The C type of ``labels``."""
    if labels.dtype not in LABELS:
        raise checks.bad_dtype("softmax_cross_entropy", "labels", "uint8, int32 or int64", labels.dtype)
    return LABELS[labels.dtype]


def _plan(logits: Any, labels: Any, weights: Any | None, smoothed: bool, out: Any | None) -> _Plan:
    """The kernel for ``logits``; ``out`` is the dense gradient, None in the forward pass."""
    count, classes, pitch = rows(logits)
    assert labels.shape == logits.shape[:-1] and classes > 0, (labels.shape, logits.shape)
    size = logits.itemsize
    defines: dict[str, int | str] = {
        "DTYPE": dtype_code(logits, "softmax_cross_entropy", "logits"),
        "LABEL": _label(labels),
        "SMOOTHED": int(smoothed),
    }
    vec = ACCESS // size
    if out is None:
        short = short_rows.labelled_rows(logits, labels, _resident(classes, smoothed))
    else:
        short = short_rows.rewritten_rows(logits)
    if short is not None:
        defines |= {"WEIGHTED": int(weights is not None), **short.defines}
        return _Plan(defines, short.blocks, short_rows.BLOCK, short.shared, (), short.passes)
    if out is not None:
        # One vector boundary has to serve the row that is read and the one that is written.
        while ((address(logits) - address(out)) // size) % vec or (pitch - classes) % vec:
            vec //= 2
    aligned = (address(logits) // size) % vec == 0 and pitch % vec == 0 and classes % vec == 0
    vectors = ceil_div(classes, vec) + (not aligned)
    lanes = BLOCK if classes >= BLOCK_CLASSES else min(32, 1 << (vectors - 1).bit_length())
    steps = 1 << (min(4, ceil_div(vectors, lanes)) - 1).bit_length()
    defines |= {"VEC": vec, "ALIGNED": int(aligned), "LANES": lanes, "STEPS": steps}
    # A block's run of rows depends on their number only, never on the device.
    groups = ceil_div(count, BLOCK // lanes)
    passes = ceil_div(groups, MOST_PARTIALS) if out is None else 1
    return _Plan(defines, ceil_div(groups, passes), BLOCK, 0, (np.int32(classes), np.int64(pitch)), passes)


def _resident(classes: int, smoothed: bool) -> int:
    """Blocks of a multiprocessor, where each thread holds a row of ``classes`` and sums."""
    return 2 if classes > 48 else 3 if classes > 32 else 6 if smoothed or classes > 24 else 8


def count_labels(labels: Any, num_classes: int, weights: Any | None = None, *, ignore_index: int) -> Any:
    """As `minidl.cpu.loss.count_labels`."""
    labels = contiguous(labels)
    count = labels.size
    if count == 0:
        return zeros((4,), np.float64)
    blocks = min(MOST_PARTIALS, ceil_div(count, BLOCK * LABELS_PER_THREAD))
    partial = empty((blocks, 4), np.float64)
    args = (labels, weights, partial, np.int64(count), np.int32(num_classes), np.int64(ignore_index))
    launch("loss", "count_labels", blocks, BLOCK, *args, defines={"LABEL": _label(labels), "COUNT": 1})
    return column_totals(partial)


def softmax_cross_entropy(logits: Any, labels: Any, *, ignore_index: int) -> tuple[Any, Any]:
    """As `minidl.cpu.loss.softmax_cross_entropy`."""
    return _forward(logits, labels, None, False, ignore_index)


def smoothed_cross_entropy(
    logits: Any, labels: Any, weights: Any | None = None, *, smoothing: float, ignore_index: int, top: int = 1
) -> tuple[Any, Any]:
    """As `minidl.cpu.loss.smoothed_cross_entropy`."""
    return _forward(logits, labels, weights, True, ignore_index, smoothing, top)


def _forward(
    logits: Any, labels: Any, weights: Any | None, smoothed: bool, ignore_index: int, smoothing: float = 0.0,
    top: int = 1,
) -> tuple[Any, Any]:  # fmt: skip
    logits, labels = as_rows(logits), contiguous(labels)
    lse, columns, count = empty(labels.shape, float32), 6 if smoothed else 4, labels.size
    if count == 0:
        return zeros((columns,), np.float64), lse
    plan = _plan(logits, labels, weights, smoothed, None)
    if "CLASSES" in plan.defines:
        labels = short_rows.aligned(labels)
    partial = empty((plan.blocks, columns), np.float64)
    launch(
        "loss", "softmax_cross_entropy", plan.blocks, plan.block, logits, labels, weights, lse, partial,
        np.int64(count), *plan.layout, np.int32(plan.passes), np.int64(ignore_index), np.float32(smoothing),
        np.int32(top), defines=plan.defines, shared=plan.shared,
    )  # fmt: skip
    return column_totals(partial), lse


def softmax_cross_entropy_backward(
    logits: Any, labels: Any, lse: Any, totals: Any, scale: Any | None = None, *, ignore_index: int
) -> Any:
    """As `minidl.cpu.loss.softmax_cross_entropy_backward`."""
    return _backward(logits, labels, lse, totals, None, scale, False, ignore_index)


def smoothed_cross_entropy_backward(
    logits: Any, labels: Any, lse: Any, totals: Any, weights: Any | None = None, scale: Any | None = None, *,
    smoothing: float, ignore_index: int,
) -> Any:  # fmt: skip
    """As `minidl.cpu.loss.smoothed_cross_entropy_backward`."""
    return _backward(logits, labels, lse, totals, weights, scale, True, ignore_index, smoothing)


def _backward(
    logits: Any, labels: Any, lse: Any, totals: Any, weights: Any | None, scale: Any | None, smoothed: bool,
    ignore_index: int, smoothing: float = 0.0,
) -> Any:  # fmt: skip
    logits, labels, lse = as_rows(logits), contiguous(labels), contiguous(lse)
    assert lse.dtype == float32 and lse.shape == labels.shape, (lse.dtype, lse.shape)
    assert totals.dtype == np.float64 and totals.size > 1, (totals.dtype, totals.shape)
    assert scale is None or scale.dtype == float32, scale
    dlogits = empty(logits.shape, logits.dtype)
    if logits.size:
        plan, count = _plan(logits, labels, weights, smoothed, dlogits), labels.size
        launch(
            "loss", "softmax_cross_entropy_backward", plan.blocks, plan.block, logits, labels,
            weights, lse, totals, scale, dlogits, np.int64(count), *plan.layout, np.int64(ignore_index),
            np.float32(smoothing), defines=plan.defines, shared=plan.shared,
        )  # fmt: skip
    return dlogits
