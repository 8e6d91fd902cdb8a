"""Softmax cross entropy and its gradient; the kernels are in loss.cu."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from minidl import checks
from minidl.cuda.array import as_rows, contiguous, empty
from minidl.cuda.launch import launch
from minidl.cuda.rows import ACCESS, address, dtype_code, rows
from minidl.precision import float32
from minidl.shapes import ceil_div

__all__ = [
    "LABELS",
    "STAGED_BLOCK",
    "count_labels",
    "short_rows",
    "softmax_cross_entropy",
    "softmax_cross_entropy_backward",
]

BLOCK = 256
STAGED_BLOCK = 128  # where a thread takes whole rows
STAGED_CLASSES = 64  # longest row that one thread holds in registers
BLOCK_CLASSES = 8192  # shortest row that gets a whole block
STAGED_BYTES = 48 * 1024  # shared memory up to which a block has room for the rows to come
MOST_PARTIALS = 512  # blocks whose totals one more block can add in a microsecond or two
LABELS_PER_THREAD = 16  # to count, where they are few; more are taken by the same blocks
LABELS = {np.dtype(np.uint8): "u8", np.dtype(np.int32): "int", np.dtype(np.int64): "i64"}


class ShortRows(NamedTuple):
    """How threads take short, unaligned rows (short_rows.cuh): macros, rows of a block, shared memory in bytes."""

    defines: dict[str, int | str]
    block_rows: int
    shared: int


def short_rows(logits: Any, staged: bool) -> ShortRows | None:
    """How a thread takes whole rows of ``logits``; None where they are long, aligned, or at a pitch.

    Args:
        staged: copy the next rows during the work on these, where shared memory has room for both.
    """
    _, classes, pitch = rows(logits)
    size = logits.itemsize
    if classes > STAGED_CLASSES or classes % (ACCESS // size) == 0 or pitch != classes or address(logits) % ACCESS:
        return None
    block_rows = STAGED_BLOCK * (2 if size == 2 and classes % 2 else 1)
    tile = block_rows * classes * size
    stages = 2 if 2 * tile <= STAGED_BYTES else 1
    return ShortRows({"CLASSES": classes, "STAGES": stages}, block_rows, tile * (stages if staged else 1))


class _Plan(NamedTuple):
    """Which kernel takes rows of this form: its macros, threads and rows of a block, its shared memory in bytes."""

    defines: dict[str, int | str]
    block: int
    block_rows: int
    shared: int

    @property
    def staged(self) -> bool:
        return "CLASSES" in self.defines


def _label(labels: Any) -> str:
    """The C type of ``labels``."""
    if labels.dtype not in LABELS:
        raise checks.bad_dtype("softmax_cross_entropy", "labels", "uint8, int32 or int64", labels.dtype)
    return LABELS[labels.dtype]


def _plan(logits: Any, labels: Any, out: Any | None) -> _Plan:
    """The kernel for ``logits``; ``out`` is the dense gradient, None in the forward pass."""
    count, classes, pitch = rows(logits)
    assert labels.shape == logits.shape[:-1] and classes > 0, (labels.shape, logits.shape)
    size = logits.itemsize
    defines: dict[str, int | str] = {
        "DTYPE": dtype_code(logits, "softmax_cross_entropy", "logits"),
        "LABEL": _label(labels),
    }
    vec = ACCESS // size
    short = short_rows(logits, staged=out is None)
    if short is not None:
        return _Plan(defines | short.defines, STAGED_BLOCK, short.block_rows, short.shared)
    if out is not None:
        # One vector boundary has to serve the row that is read and the one that is written.
        while ((address(logits) - address(out)) // size) % vec or (pitch - classes) % vec:
            vec //= 2
    aligned = (address(logits) // size) % vec == 0 and pitch % vec == 0 and classes % vec == 0
    vectors = ceil_div(classes, vec) + (not aligned)
    lanes = BLOCK if classes >= BLOCK_CLASSES else min(32, 1 << (vectors - 1).bit_length())
    steps = 1 << (min(4, ceil_div(vectors, lanes)) - 1).bit_length()
    defines |= {"VEC": vec, "ALIGNED": int(aligned), "LANES": lanes, "STEPS": steps}
    return _Plan(defines, BLOCK, BLOCK // lanes, 0)


def _layout(plan: _Plan, logits: Any) -> tuple[Any, ...]:
    """The arguments (classes, pitch) of kernels that do not have them as macros."""
    _, classes, pitch = rows(logits)
    return () if plan.staged else (np.int32(classes), np.int64(pitch))


def count_labels(labels: Any, num_classes: int, *, ignore_index: int) -> Any:
    """How many labels count: totals (4,) float64 as of `softmax_cross_entropy`, all but ``totals[1]`` zero.

    Args:
        labels: (...) int32, int64 or uint8; ``ignore_index`` and all outside ``0 .. num_classes - 1`` do not count.
    """
    labels = contiguous(labels)
    count = labels.size
    blocks = min(MOST_PARTIALS, ceil_div(count, BLOCK * LABELS_PER_THREAD))
    partial = empty((blocks, 4), np.float64)
    launch(
        "loss", "count_labels", blocks, BLOCK, labels, partial, np.int64(count), np.int32(num_classes),
        np.int64(ignore_index), defines={"LABEL": _label(labels), "COUNT": 1},
    )  # fmt: skip
    return _total(partial)


def _total(partial: Any) -> Any:
    """(4,) float64: the sum over ``partial`` (blocks, 4)."""
    if len(partial) == 1:  # a small batch is spared the launch
        return partial[0]
    totals = empty(4, np.float64)
    launch("loss", "softmax_cross_entropy_totals", 1, 128, partial, totals, np.int32(len(partial)))
    return totals


def softmax_cross_entropy(logits: Any, labels: Any, *, ignore_index: int) -> tuple[Any, Any]:
    """Totals of the loss over this rank's rows, to be added over ranks before anything is divided.

    Args:
        logits: (..., K), any storage dtype, dense or pitched.
        labels: (...) int32, int64 or uint8; ``ignore_index`` marks rows that do not count. Labels outside ``0 .. K-1``
            are reported in ``totals[3]`` and do not count either.

    Returns:
        totals (4,) float64: sum of ``-log p[label]``, valid labels, labels that are the first largest logit of their
        row, labels out of range; lse (...) float32: the logarithm of each row's sum of exponentials.
    """
    logits, labels = as_rows(logits), contiguous(labels)
    plan = _plan(logits, labels, None)
    count = labels.size
    # A block's run of rows depends on their number only, never on the device.
    passes = max(1, ceil_div(count, plan.block_rows * MOST_PARTIALS))
    blocks = ceil_div(count, plan.block_rows * passes)
    lse = empty(labels.shape, float32)
    partial = empty((blocks, 4), np.float64)
    launch(
        "loss", "softmax_cross_entropy", blocks, plan.block, logits, labels, lse, partial, np.int64(count),
        *_layout(plan, logits), np.int32(passes), np.int64(ignore_index), defines=plan.defines, shared=plan.shared,
    )  # fmt: skip
    return _total(partial), lse


def softmax_cross_entropy_backward(
    logits: Any, labels: Any, lse: Any, totals: Any, scale: Any | None = None, *, ignore_index: int
) -> Any:
    """``(softmax - onehot) * scale / totals[1]`` in the dtype of ``logits``; 0 where the label does not count.

    Args:
        lse, totals: of the forward pass, the totals summed over all ranks.
        scale: (1,) float32, the loss scale; None stands for 1.
    """
    logits, labels, lse = as_rows(logits), contiguous(labels), contiguous(lse)
    assert lse.dtype == float32 and lse.shape == labels.shape, (lse.dtype, lse.shape)
    assert totals.dtype == np.float64 and totals.shape == (4,), (totals.dtype, totals.shape)
    assert scale is None or scale.dtype == float32, scale
    dlogits = empty(logits.shape, logits.dtype)
    plan = _plan(logits, labels, dlogits)
    count = labels.size
    launch(
        "loss", "softmax_cross_entropy_backward", ceil_div(count, plan.block_rows), plan.block, logits, labels, lse,
        totals, scale, dlogits, np.int64(count), *_layout(plan, logits), np.int64(ignore_index),
        defines=plan.defines, shared=plan.shared,
    )  # fmt: skip
    return dlogits
