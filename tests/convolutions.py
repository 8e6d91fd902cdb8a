"""What laws of single convolution kernels share: operands of a case, its results by the table and by the definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minidl.cuda.convolution.conv2d_plan import Convolution, convolution
from minidl.precision import bfloat16, float16
from tests.reference import conv2d as reference
from tests.test_conv2d_ops import Case
from tests.tolerance import draw_integers

SIXTEEN = pytest.mark.parametrize("storage", [bfloat16, float16], ids=["bf16", "fp16"])


def draws(rng: np.random.Generator, case: Case, dtype: Any) -> tuple[Any, ...]:
    """Whole numbers for input, filters and output gradient."""
    return tuple(draw_integers(rng, shape, dtype) for shape in (case.x, case.w, case.y))


def plan_of(case: Case) -> Convolution:
    """The case as launchers see it."""
    return convolution("test", case.x, case.w, *(case.options[o] for o in ("stride", "padding", "dilation", "groups")))


def both(ops: Any, case: Case, x: Any, w: Any, dy: Any, forward_bias: Any = None, **backward: Any) -> list[Any]:
    """Output and data gradient, on the host."""
    y = ops.conv2d(x, w, forward_bias, **case.options)
    dx = ops.conv2d_backward_data(dy, w, (dy.shape[0], *case.x[1:]), **case.options, **backward)
    return [ops.to_host(array) for array in (y, dx)]


def weight_gradient(ops: Any, case: Case, dy: Any, x: Any, start: Any = None) -> Any:
    """Set, or added to ``start``; on the host."""
    out = ops.from_host(np.full(case.w, np.nan, np.float32) if start is None else start)
    ops.conv2d_backward_weight(dy, x, **case.options, out=out, accumulate=start is not None)
    return ops.to_host(out)


def both_expected(
    case: Case, x: Any, w: Any, dy: Any, dtype: Any, bias: Any = None, dbias: Any = None, add: Any = None
) -> tuple[Any, Any]:
    """Output and data gradient by the definition, rounded once."""
    y = reference.conv2d(x, w, bias, **case.options).astype(dtype)
    return y, reference.conv2d_backward_data(dy, w, case.x, **case.options, bias=dbias, add=add).astype(dtype)


def same(found: Any, expected: Any) -> None:
    """Arrays of the same values; NaN equals NaN."""
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.astype(np.float64), other.astype(np.float64))


class Guarded:
    """Stands in for a launcher's ``empty``: arrays of NaN between guards, all of which are remembered."""

    _GUARD = 2048

    def __init__(self, ops: Any):
        self._ops, self._buffers = ops, []

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> Any:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        buffer = self._ops.empty(size + 2 * self._GUARD, np.uint8)
        buffer.fill(255)
        self._buffers.append((buffer, size))
        return buffer[self._GUARD : self._GUARD + size].view(dtype).reshape(shape)

    def check(self, count: int) -> None:
        """So many arrays were made, and nothing was written beside them."""
        assert len(self._buffers) == count
        for buffer, size in self._buffers:
            host = self._ops.to_host(buffer)
            assert (host[: self._GUARD] == 255).all() and (host[self._GUARD + size :] == 255).all()
