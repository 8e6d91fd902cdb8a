"""What segmentation counts: sums of a Dice loss, its gradient, the confusion matrix; kernels in segmentation.cu."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from minidl.cuda.array import as_rows, contiguous, empty, zeros
from minidl.cuda.grid import ints
from minidl.cuda.launch import launch
from minidl.cuda.loss.loss import LABELS, STAGED_BLOCK, short_rows
from minidl.cuda.loss.softmax import BLOCK, held_variant
from minidl.cuda.rows import ACCESS, dtype_code, rows, vector_width
from minidl.cuda.totals import column_totals
from minidl.shapes import ceil_div, round_up

__all__ = ["confusion_counts", "dice_backward", "dice_sums"]

MOST_PARTIALS = 512  # blocks whose results one more launch adds
FEW_CLASSES = 16  # below them twice as many
SHARED_COUNTS = 8192  # in 32 KiB of shared memory
SHARED_SLOPES = 4096  # the same
GROUPS = 2  # of rows that a block takes with the slopes it has computed


class _Plan(NamedTuple):
    """The kernel for rows: macros, threads of a block, blocks of one group of rows each, shared memory, arguments."""

    defines: dict[str, int | str]
    block: int
    blocks: int
    shared: int
    layout: tuple[Any, ...]


def _rows_plan(who: str, x: Any, *out: Any, staged: bool) -> _Plan:
    count, channels, pitch = rows(x)
    short = short_rows(x, staged)
    if short is None:
        defines, blocks = held_variant(who, (x, *out), 1)
        return _Plan(defines, BLOCK, blocks, 0, (np.int32(channels), np.int64(pitch)))
    defines = {"DTYPE": dtype_code(x, who), **short.defines}
    return _Plan(defines, STAGED_BLOCK, ceil_div(count, short.block_rows), short.shared, ())


def _passes(blocks: int, classes: int) -> int:
    """Groups of rows that a block takes, of ``blocks`` in all; short rows keep less of the memory busy each."""
    return ceil_div(blocks, MOST_PARTIALS * (2 if classes < FEW_CLASSES else 1))


def dice_sums(p: Any, labels: Any, *, ignore_index: int) -> Any:
    """Sums over this rank's pixels, to be added over ranks: (3K + 1,) float64.

    Args:
        p: (..., K) probabilities; labels: (...) int32, int64 or uint8, ``ignore_index`` and what is no class left out.

    Returns:
        For each class the probability on its pixels, that on all valid pixels, its pixels; then the labels out of
        range.
    """
    p, labels = as_rows(p), contiguous(labels)
    count, classes, pitch = rows(p)
    assert labels.shape == p.shape[:-1], (labels.shape, p.shape)
    if count == 0:
        return zeros((3 * classes + 1,), np.float64)
    defines = {"SUMS": 1, "DTYPE": dtype_code(p, "dice_sums", "p"), "LABEL": LABELS[labels.dtype]}
    short = short_rows(p, staged=True)
    if short is not None:
        groups = ceil_div(count, short.block_rows)
        passes = _passes(groups, classes)
        partial = empty((ceil_div(groups, passes), 3 * classes + 1), np.float64)
        launch(
            "segmentation", "dice_sums", len(partial), STAGED_BLOCK, p, labels, partial, np.int64(count),
            np.int32(passes), np.int64(ignore_index), defines=defines | short.defines,
            shared=short.shared + 8 * STAGED_BLOCK * classes,
        )  # fmt: skip
        return column_totals(partial)
    vec = min(vector_width(p), ACCESS // p.itemsize)
    lanes = min(32, 1 << (ceil_div(classes, vec) - 1).bit_length())
    # At most 64 terms in float32, or as many as leave MOST_PARTIALS chunks.
    deep = BLOCK // lanes
    chunk = round_up(max(64 * deep, ceil_div(count, MOST_PARTIALS)), deep)
    partial = empty((ceil_div(count, chunk), 3 * classes + 1), np.float64)
    defines |= {"LANES": lanes, "VEC": vec}
    sizes = np.int64(count), np.int64(chunk), np.int32(classes), np.int64(pitch), np.int64(ignore_index)
    grid = ceil_div(classes, lanes * vec), len(partial)
    launch("segmentation", "dice_sums", grid, BLOCK, p, labels, partial, *sizes, defines=defines)
    return column_totals(partial)


def dice_backward(p: Any, labels: Any, sums: Any, scale: Any | None = None, *, smooth: float, ignore_index: int) -> Any:
    """The gradient of ``1 - mean over classes of (2 hit + smooth) / (mass + pixels + smooth)`` by the logits.

    Args:
        p: (..., K), the softmax of the logits.
        sums: of `dice_sums`, added over all ranks.
        scale: (1,) float32, the loss scale; None stands for 1.
    """
    p, labels = as_rows(p), contiguous(labels)
    dlogits = empty(p.shape, p.dtype)
    if p.size:
        plan, classes = _rows_plan("dice_backward", p, dlogits, staged=False), p.shape[-1]
        defines, shared, blocks, passes = plan.defines | {"LABEL": LABELS[labels.dtype]}, plan.shared, plan.blocks, ()
        if "CLASSES" not in plan.defines:
            held = int(classes <= SHARED_SLOPES)
            defines, shared = defines | {"SHARED": held}, 8 * classes * held
            blocks, passes = ceil_div(blocks, GROUPS), (np.int32(GROUPS),)
        launch(
            "segmentation", "dice_backward", blocks, plan.block, p, labels, sums, scale, dlogits,
            np.int64(labels.size), *plan.layout, *passes, np.int64(ignore_index), np.float32(smooth),
            defines=defines, shared=shared,
        )  # fmt: skip
    return dlogits


def confusion_counts(logits: Any, labels: Any, *, ignore_index: int) -> Any:
    """(K * K + 1,) float64 over this rank's rows: how often [label, first largest logit], then labels out of range."""
    logits, labels = as_rows(logits), contiguous(labels)
    count, classes, _ = rows(logits)
    assert labels.shape == logits.shape[:-1], (labels.shape, logits.shape)
    size = classes * classes + 1
    out = empty((size,), np.float64)
    if count == 0:
        return zeros((size,), np.float64)
    plan, shared = _rows_plan("confusion_counts", logits, staged=True), int(size <= SHARED_COUNTS)
    passes = _passes(plan.blocks, classes)
    blocks = ceil_div(plan.blocks, passes)
    # A row for each block; or one that all add to, whole numbers whose order changes nothing.
    partial = empty((blocks, size), np.uint32) if shared else zeros((1, size), np.uint32)
    launch(
        "segmentation", "confusion", blocks, plan.block, logits, labels, partial, np.int64(count), *plan.layout,
        np.int32(passes), np.int64(ignore_index),
        defines=plan.defines | {"CONFUSION": 1, "LABEL": LABELS[labels.dtype], "SHARED": shared},
        shared=plan.shared + round_up(4 * size * shared, ACCESS),
    )  # fmt: skip
    grid, sizes = ceil_div(size, 32), ints(len(partial), size)
    launch("segmentation", "count_totals", grid, 1024, partial, out, *sizes, defines={"TOTALS": 1})
    return out
