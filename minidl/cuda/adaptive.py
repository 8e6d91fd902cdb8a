"""Adaptive parameter updates, clipping and averages on flat arenas; the kernels are in adaptive.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from minidl.cuda.array import empty
from minidl.cuda.launch import launch
from minidl.cuda.optim import CHUNK, check_arena, check_update, rounding
from minidl.cuda.totals import column_totals
from minidl.precision import float32
from minidl.shapes import ceil_div

BLOCK, EACH, RUN = 256, 4, 16


def _over(n: int) -> int:
    return ceil_div(n, BLOCK * EACH)


def _check(who: str, n: int, segment_of: Any, segments: Any, control: Any, record: Any, **arenas: Any) -> None:
    check_update(who, n, segment_of, segments, control, **arenas)
    assert record.dtype == float32 and record.shape == (8,), (record.dtype, record.shape)


def _updating(who: str, working: Any | None, n: int) -> dict[str, int | str]:
    return {"UPDATE": 1} | rounding(who, working, n)


def adam_advance(control: Any, record: Any) -> None:
    """As `minidl.cpu.adaptive.adam_advance`."""
    launch("adaptive", "adam_advance", 1, 1, control, record, defines={"WORKING": 0})


def adamw_update(
    master: Any, grad: Any, first: Any, second: Any, working: Any | None, segment_of: Any, segments: Any, control: Any,
    record: Any,
) -> None:  # fmt: skip
    """As `minidl.cpu.adaptive.adamw_update`."""
    n = master.size
    arenas = {"master": master, "grad": grad, "first": first, "second": second}
    _check("adamw_update", n, segment_of, segments, control, record, **arenas)
    args = (master, grad, first, second, working, segment_of, segments, control, record, np.int64(n))
    launch("adaptive", "adamw_update", _over(n), BLOCK, *args, defines=_updating("adamw_update", working, n))


def segment_norms(master: Any, grad: Any, bounds: Any, control: Any) -> Any:
    """As `minidl.cpu.adaptive.segment_norms`."""
    n = master.size
    check_arena("segment_norms", "master", master, n)
    check_arena("segment_norms", "grad", grad, n)
    partial = empty((n // CHUNK, 2), float32)
    args = (master, grad, partial, control, np.int64(n))
    launch("adaptive", "norm_sums", _over(n), BLOCK, *args, defines={"WORKING": 0})
    return _norms(partial, bounds)


def _norms(partial: Any, bounds: Any) -> Any:
    count = bounds.size - 1
    norms = empty((count, 2), float32)
    launch("adaptive", "segment_norms", count, 1024, partial, bounds, norms, defines={"WORKING": 0})
    return norms


def lars_update(
    master: Any, grad: Any, momentum: Any, working: Any | None, segment_of: Any, segments: Any, norms: Any,
    control: Any, record: Any,
) -> None:  # fmt: skip
    """As `minidl.cpu.adaptive.lars_update`."""
    n = master.size
    _check("lars_update", n, segment_of, segments, control, record, master=master, grad=grad, momentum=momentum)
    args = (master, grad, momentum, working, segment_of, segments, norms, control, record, np.int64(n))
    launch("adaptive", "lars_update", _over(n), BLOCK, *args, defines=_updating("lars_update", working, n))


def lamb_moments(
    master: Any, grad: Any, first: Any, second: Any, segment_of: Any, segments: Any, bounds: Any, control: Any,
    record: Any,
) -> Any:  # fmt: skip
    """As `minidl.cpu.adaptive.lamb_moments`."""
    n = master.size
    arenas = {"master": master, "grad": grad, "first": first, "second": second}
    _check("lamb_moments", n, segment_of, segments, control, record, **arenas)
    partial = empty((n // CHUNK, 2), float32)
    args = (master, grad, first, second, partial, segment_of, segments, control, record, np.int64(n))
    launch("adaptive", "lamb_moments", _over(n), BLOCK, *args, defines={"WORKING": 0})
    return _norms(partial, bounds)


def lamb_update(
    master: Any, first: Any, second: Any, working: Any | None, segment_of: Any, segments: Any, norms: Any, control: Any,
    record: Any,
) -> None:  # fmt: skip
    """The second half of a step of LAMB: ``w -= lr * |w| / |u| * u``, norms as `lamb_moments` gave them."""
    n = master.size
    _check("lamb_update", n, segment_of, segments, control, record, master=master, first=first, second=second)
    args = (master, first, second, working, segment_of, segments, norms, control, record, np.int64(n))
    launch("adaptive", "lamb_update", _over(n), BLOCK, *args, defines=_updating("lamb_update", working, n))


def clip_values(grad: Any, limit: float, control: Any) -> None:
    """Bound every gradient by ±``limit``, times the loss scale of ``control``, in place; NaN stays."""
    check_arena("clip_values", "grad", grad, grad.size)
    args = (grad, control, np.float32(limit), np.int64(grad.size))
    launch("adaptive", "clip_values", _over(grad.size), BLOCK, *args, defines={"WORKING": 0})


def gradient_square(grad: Any) -> Any:
    """(1,) float64: the sum of squares of ``grad`` (n,) float32, n a multiple of 64."""
    check_arena("gradient_square", "grad", grad, grad.size)
    partial = empty((max(1, ceil_div(grad.size, BLOCK * EACH * RUN)), 1), np.float64)
    args = (grad, partial, np.int64(grad.size))
    launch("adaptive", "squares", len(partial), BLOCK, *args, defines={"WORKING": 0})
    return column_totals(partial)


def clip_norm(grad: Any, square: Any, limit: float, control: Any) -> None:
    """As `minidl.cpu.adaptive.clip_norm`."""
    check_arena("clip_norm", "grad", grad, grad.size)
    args = (grad, square, control, np.float32(limit), np.int64(grad.size))
    launch("adaptive", "clip_norm", _over(grad.size), BLOCK, *args, defines={"WORKING": 0})


def blend(average: Any, x: Any, keep: float) -> None:
    """``average = keep * average + (1 - keep) * x`` in place, (n,) float32, n a multiple of 64."""
    check_arena("blend", "average", average, x.size)
    check_arena("blend", "x", x, x.size)
    args = (average, x, np.float32(keep), np.int64(x.size))
    launch("adaptive", "blend", _over(x.size), BLOCK, *args, defines={"WORKING": 0})
