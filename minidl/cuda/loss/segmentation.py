"""What segmentation counts: sums of a Dice loss, its gradient, the confusion matrix; kernels in segmentation.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from minidl.cuda.array import as_rows, contiguous, empty, zeros
from minidl.cuda.launch import launch
from minidl.cuda.loss import short_rows
from minidl.cuda.loss.loss import LABELS
from minidl.cuda.loss.softmax import BLOCK, held_variant
from minidl.cuda.rows import ACCESS, dtype_code, rows, vector_width
from minidl.cuda.totals import column_totals
from minidl.shapes import ceil_div, round_up

MOST_PARTIALS = 512  # blocks whose results one more launch adds
SHARED_COUNTS = 8192  # in 32 KiB of shared memory
SHARED_SLOPES = 4096  # the same
GROUPS = 2  # of rows that a block takes with the slopes it has computed


def _row_layout(x: Any) -> tuple[Any, Any]:
    """Elements of a row, and from row to row, as kernels take them."""
    _, channels, pitch = rows(x)
    return np.int32(channels), np.int64(pitch)


def _resident(classes: int, some: int, many: int) -> int:
    """Blocks of a multiprocessor, where each thread holds a row of ``classes``."""
    return 8 if classes <= 16 else some if classes <= 32 else many


def dice_sums(p: Any, labels: Any, *, ignore_index: int) -> Any:
    """As `minidl.cpu.segmentation.dice_sums`."""
    p, labels = as_rows(p), contiguous(labels)
    count, classes, pitch = rows(p)
    assert labels.shape == p.shape[:-1], (labels.shape, p.shape)
    if count == 0:
        return zeros((3 * classes + 1,), np.float64)
    defines = {"SUMS": 1, "DTYPE": dtype_code(p, "dice_sums", "p"), "LABEL": LABELS[labels.dtype]}
    beside = 4 * short_rows.BLOCK * classes + round_up(4 * (classes + 1), ACCESS)
    short = short_rows.labelled_rows(p, labels, _resident(classes, 5, 2), beside, vectors=True)
    if short is not None:
        partial = empty((short.blocks, 3 * classes + 1), np.float64)
        launch(
            "segmentation", "dice_sums", short.blocks, short_rows.BLOCK, p, short_rows.aligned(labels), partial,
            np.int64(count), np.int32(short.passes), np.int64(ignore_index), defines=defines | short.defines,
            shared=short.shared,
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
    """As `minidl.cpu.segmentation.dice_backward`."""
    p, labels = as_rows(p), contiguous(labels)
    dlogits = empty(p.shape, p.dtype)
    if p.size:
        classes, count = p.shape[-1], labels.size
        short = short_rows.rewritten_rows(p)
        if short is not None:
            defines, blocks, block, shared = short.defines, short.blocks, short_rows.BLOCK, short.shared
            defines, layout = defines | {"DTYPE": dtype_code(p, "dice_backward")}, ()
        else:
            defines, groups = held_variant("dice_backward", (p, dlogits), 1)
            held = int(classes <= SHARED_SLOPES)
            defines, block, shared = defines | {"SHARED": held}, BLOCK, 8 * classes * held
            blocks, layout = ceil_div(groups, GROUPS), (*_row_layout(p), np.int32(GROUPS))
        launch(
            "segmentation", "dice_backward", blocks, block, p, labels, sums, scale, dlogits, np.int64(count), *layout,
            np.int64(ignore_index), np.float32(smooth), defines=defines | {"LABEL": LABELS[labels.dtype]},
            shared=shared,
        )  # fmt: skip
    return dlogits


def confusion_counts(logits: Any, labels: Any, *, ignore_index: int) -> Any:
    """As `minidl.cpu.segmentation.confusion_counts`."""
    logits, labels = as_rows(logits), contiguous(labels)
    count, classes, _ = rows(logits)
    assert labels.shape == logits.shape[:-1], (labels.shape, logits.shape)
    size = classes * classes + 1
    if count == 0:
        return zeros((size,), np.float64)
    defines = {"CONFUSION": 1, "LABEL": LABELS[labels.dtype]}
    shared = int(size <= SHARED_COUNTS)
    beside = round_up(4 * (size + 1) * shared, ACCESS)
    # Each block leaves K * K counts, so few blocks; float32 rows of whole vectors are compared faster by four threads.
    pairs = logits.itemsize == 2
    short = short_rows.labelled_rows(logits, labels, _resident(classes, 4, 3), beside, vectors=pairs)
    if short is not None:
        defines |= {"DTYPE": dtype_code(logits, "confusion_counts"), **short.defines}
        labels, block, layout = short_rows.aligned(labels), short_rows.BLOCK, (np.int32(short.passes),)
        blocks, beside = short.blocks, short.shared
    else:
        variant, groups = held_variant("confusion_counts", (logits,), 1)
        passes = ceil_div(groups, MOST_PARTIALS)
        defines |= {"SHARED": shared, **variant}
        blocks, block, layout = ceil_div(groups, passes), BLOCK, (*_row_layout(logits), np.int32(passes))
    # A row for each block; or one that all add to, whole numbers whose order changes nothing.
    partial = empty((blocks, size), np.uint32) if shared else zeros((1, size), np.uint32)
    launch(
        "segmentation", "confusion", blocks, block, logits, labels, partial, np.int64(count), *layout,
        np.int64(ignore_index), defines=defines, shared=beside,
    )  # fmt: skip
    return column_totals(partial)
