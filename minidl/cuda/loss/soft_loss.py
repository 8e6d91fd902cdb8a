"""Softmax cross entropy with a probability for every class; the kernels are in soft_loss.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from minidl import checks
from minidl.cuda.array import as_rows, contiguous, empty, zeros
from minidl.cuda.launch import launch
from minidl.cuda.loss.softmax import BLOCK, row_variant
from minidl.cuda.rows import ACCESS, rows
from minidl.cuda.totals import column_totals
from minidl.precision import float32
from minidl.shapes import ceil_div

COLUMNS = 4
MOST_HELD = 2  # runs of a row and its targets that a thread holds in registers
MOST_RUNS = 32  # of a thread before more than a warp shares a row: so many sums cost more across warps
MOST_PARTIALS = 1024  # blocks whose totals one more launch adds


def _arrays(logits: Any, targets: Any) -> tuple[Any, Any]:
    if targets.dtype != float32:
        raise checks.bad_dtype("soft_cross_entropy", "targets", "float32", targets.dtype)
    assert targets.shape == logits.shape, (targets.shape, logits.shape)
    return as_rows(logits), contiguous(targets)


def _shares(smoothing: float, channels: int) -> tuple[np.float32, np.float32]:
    return np.float32(1 - smoothing), np.float32(smoothing / channels)


def _held(logits: Any, *more: Any) -> tuple[dict[str, int | str], int]:
    """Macros and grid: short rows stay in a thread's registers, unless they are read narrowly."""
    defines, grid = row_variant("soft_cross_entropy", logits, *more, most=MOST_HELD)
    width, lanes, channels = ACCESS // logits.itemsize, int(defines["LANES"]), logits.shape[-1]
    runs = ceil_div(channels, lanes * width)
    held = runs if runs <= MOST_HELD and defines["VEC"] == width else 0
    return defines | {"PER": 1, "HELD": held, "WHOLE": int(channels == held * lanes * width)}, grid


def soft_cross_entropy(
    logits: Any, targets: Any, weights: Any | None = None, *, smoothing: float = 0.0
) -> tuple[Any, Any]:
    """As `minidl.cpu.soft_loss.soft_cross_entropy`."""
    logits, targets = _arrays(logits, targets)
    count, channels, pitch = rows(logits)
    lse = empty(logits.shape[:-1], float32)
    if count == 0:
        return zeros((COLUMNS,), np.float64), lse
    defines, grid = row_variant("soft_cross_entropy", logits, targets, most=MOST_RUNS)
    defines |= {"FORWARD": 1}
    passes = ceil_div(grid, MOST_PARTIALS)
    partial = empty((ceil_div(grid, passes), COLUMNS), np.float64)
    sizes = np.int64(count), np.int32(channels), np.int64(pitch), np.int32(passes), *_shares(smoothing, channels)
    args = (logits, targets, weights, lse, partial, *sizes)
    launch("soft_loss", "soft_cross_entropy", len(partial), BLOCK, *args, defines=defines)
    return column_totals(partial), lse


def soft_cross_entropy_backward(
    logits: Any, targets: Any, lse: Any, totals: Any, weights: Any | None = None, scale: Any | None = None, *,
    smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """As `minidl.cpu.soft_loss.soft_cross_entropy_backward`."""
    logits, targets = _arrays(logits, targets)
    assert totals.dtype == np.float64 and totals.shape == (COLUMNS,), (totals.dtype, totals.shape)
    dlogits = empty(logits.shape, logits.dtype)
    if logits.size:
        defines, grid = _held(logits, targets, dlogits)
        count, channels, pitch = rows(logits)
        sizes = np.int64(count), np.int32(channels), np.int64(pitch), *_shares(smoothing, channels)
        args = (logits, targets, weights, contiguous(lse), totals, scale, dlogits, *sizes)
        launch("soft_loss", "soft_cross_entropy_backward", grid, BLOCK, *args, defines=defines)
    return dlogits
