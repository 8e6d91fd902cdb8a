"""Losses that compare every element with a target; the kernels are in pointwise_loss.cu."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minidl import checks
from minidl.cuda.array import contiguous, empty, zeros
from minidl.cuda.launch import launch
from minidl.cuda.rows import ACCESS, address, dtype_code
from minidl.cuda.totals import column_totals
from minidl.shapes import ceil_div

BLOCK, CHUNK = 256, 8192  # as in pointwise_loss.cu
LOSSES = ("bce_with_logits", "mse", "focal")
WHOLE = range(5)  # exponents of focal that are products


def _variant(x: Any, t: Any, loss: str, b: float, *more: Any) -> dict[str, int | str]:
    if loss not in LOSSES:
        raise checks.unknown("loss", loss, LOSSES)
    assert x.shape == t.shape and x.dtype == t.dtype, (checks.describe(x), checks.describe(t))
    # The last chunk may end anywhere: vectors must divide the count.
    vec = math.gcd(ACCESS // x.itemsize, x.size, *(address(a) % ACCESS // x.itemsize for a in (x, t, *more)))
    focus = {"FOCUS": int(b) if b in WHOLE else -1} if loss == "focal" else {}
    return {"DTYPE": dtype_code(x, loss), "VEC": vec, "LOSS": loss} | focus


def pointwise_loss(x: Any, target: Any, loss: str, a: float = 1.0, b: float = 0.0) -> Any:
    """As `minidl.cpu.pointwise_loss.pointwise_loss`."""
    x, target = contiguous(x), contiguous(target)
    if x.size == 0:
        return zeros((2,), np.float64)
    defines = _variant(x, target, loss, b) | {"FORWARD": 1}
    blocks = ceil_div(x.size, CHUNK)
    partial = empty((blocks, 2), np.float64)
    args = (x, target, partial, np.int64(x.size), np.float32(a), np.float32(b))
    launch("pointwise_loss", "pointwise_loss", blocks, BLOCK, *args, defines=defines)
    return column_totals(partial)


def pointwise_loss_backward(
    x: Any, target: Any, totals: Any, scale: Any | None, loss: str, a: float = 1.0, b: float = 0.0
) -> Any:
    """The gradient of ``totals[0] / totals[1]`` by ``x``, times ``scale`` ((1,) float32, or None for 1)."""
    x, target = contiguous(x), contiguous(target)
    dx = empty(x.shape, x.dtype)
    if x.size:
        args = (x, target, totals, scale, dx, np.int64(x.size), np.float32(a), np.float32(b))
        blocks = ceil_div(x.size, CHUNK)
        defines = _variant(x, target, loss, b, dx)
        launch("pointwise_loss", "pointwise_loss_backward", blocks, BLOCK, *args, defines=defines)
    return dx
