"""Layer normalisation over channels on the GPU; kernels in layer_norm.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from minidl import checks
from minidl.cuda.array import as_rows, empty
from minidl.cuda.convolution.channel_sum import check_sum, sum_partials
from minidl.cuda.launch import launch
from minidl.cuda.loss.softmax import BLOCK, held_variant
from minidl.cuda.norm.group_norm import ROW_SUMS, sample_sums
from minidl.cuda.rows import rows
from minidl.precision import float32


def _present(*arrays: Any) -> tuple[Any, ...]:
    return tuple(a for a in arrays if a is not None)


def layer_norm(x: Any, gamma: Any | None = None, beta: Any | None = None, *, eps: float) -> tuple[Any, Any]:
    """As `minidl.cpu.layer_norm.layer_norm`."""
    x = as_rows(x)
    count, channels, pitch = rows(x)
    y, moments = empty(x.shape, x.dtype), empty((2, count), float32)
    if x.size:
        defines, grid = held_variant("layer_norm", (x, y, *_present(gamma, beta)), 1, in_flight=3)
        args = (x, gamma, beta, y, moments, np.int64(count), np.int32(channels), np.int64(pitch), np.float32(eps))
        launch("layer_norm", "layer_norm_kernel", grid, BLOCK, *args, defines=defines | {"FORWARD": 1})
    return y, moments


def layer_norm_backward_weight(
    dy: Any, x: Any, moments: Any, *, dgamma: Any | None = None, dbeta: Any | None = None, accumulate: bool = False
) -> None:
    """``dgamma`` (C,) float32 = sum over rows of ``dy * xhat``, ``dbeta`` = sum of ``dy``; overwritten, or added to."""
    assert dy.shape == x.shape and dy.dtype == x.dtype, (checks.describe(dy), checks.describe(x))
    partials = sample_sums(ROW_SUMS, as_rows(dy), as_rows(x), moments, 1) if x.size else None
    for which, out in enumerate((dbeta, dgamma)):
        if out is None:
            continue
        check_sum("layer_norm_backward_weight", out)
        if partials is None:
            sum_partials(None, 0, out, accumulate)
        else:
            partials.total(which, out, accumulate)


def layer_norm_backward_data(dy: Any, x: Any, moments: Any, gamma: Any | None = None, *, add: Any | None = None) -> Any:
    """The gradient of the input, plus ``add``: ``rstd * (g - mean of g - xhat * mean of g * xhat)``, g = dy * gamma."""
    operands = (dy, x) if add is None else (dy, x, add)
    assert all(a.shape == x.shape and a.dtype == x.dtype for a in operands), [checks.describe(a) for a in operands]
    operands = tuple(as_rows(a) for a in operands)
    dx = empty(x.shape, x.dtype)
    if x.size:
        (count, channels, dy_pitch), pitches = rows(operands[0]), [rows(a)[2] for a in operands[1:]]
        # Up to four runs of 16 bits are sooner read twice by a warp than shared by two, which meet at barriers.
        shared = 4 if x.itemsize == 2 and channels <= 1024 else None
        defines, grid = held_variant("layer_norm_backward_data", (*operands, dx, *_present(gamma)), 2, shared)
        more = operands[2] if add is not None else None
        sizes = np.int64(count), np.int32(channels), *map(np.int64, (dy_pitch, *pitches, 0)[:3])
        args = (operands[0], operands[1], moments, gamma, more, dx, *sizes)
        defines |= {"ADD": int(add is not None)}
        launch("layer_norm", "layer_norm_backward_kernel", grid, BLOCK, *args, defines=defines)
    return dx
