"""ReLU on the GPU; kernels in activation.cu."""

from __future__ import annotations

from typing import Any

from minidl import checks
from minidl.cuda.array import as_rows, empty
from minidl.cuda.launch import launch
from minidl.cuda.rows import dtype_code, walk

__all__ = ["relu", "relu_backward"]


def relu(x: Any) -> Any:
    """``max(x, 0)``; NaN stays NaN."""
    code = dtype_code(x, "relu")
    x = as_rows(x)
    y = empty(x.shape, x.dtype)
    plan = walk(x, y, unroll=2)
    defines = {"FORWARD": 1, "DTYPE": code, "VEC": plan.vec, "UNROLL": plan.unroll}
    launch("activation", "relu_kernel", plan.grid, plan.block, x, y, plan.argument, defines=defines)
    return y


def relu_backward(dy: Any, y: Any, *, add: Any = None) -> Any:
    """``dy`` where ``y > 0``, else 0 (+ ``add``), from the output ``y`` of `relu`."""
    code = dtype_code(dy, "relu_backward", "dy")
    operands = (dy, y) if add is None else (dy, y, add)
    assert all(x.shape == dy.shape and x.dtype == dy.dtype for x in operands), [checks.describe(x) for x in operands]
    dy, y = as_rows(dy), as_rows(y)
    dx = empty(dy.shape, dy.dtype)
    if add is not None:
        add = as_rows(add)
    arrays = (dy, y, dx) if add is None else (dy, y, dx, add)
    plan = walk(*arrays, unroll=1)
    defines = {"DTYPE": code, "VEC": plan.vec, "UNROLL": plan.unroll, "ADD": int(add is not None)}
    launch("activation", "relu_backward_kernel", plan.grid, plan.block, dy, y, add, dx, plan.argument, defines=defines)
    return dx
