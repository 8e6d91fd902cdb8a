"""Activation functions on the GPU; kernels in activation.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from minidl import checks
from minidl.cuda.array import as_rows, empty
from minidl.cuda.launch import launch
from minidl.cuda.norm.signs import are_signs, mask_by_signs
from minidl.cuda.rows import dtype_code, walk

_NAMES = ("relu", "relu6", "leaky_relu", "sigmoid", "tanh", "silu", "gelu", "gelu_tanh", "hardswish")
_FUNCTIONS = {name: f"{name}_" if name == "tanh" else name for name in _NAMES}  # C++ has a tanh already
# Vectors that a thread has in flight, of other functions two: the more arithmetic, the more of them hide it.
UNROLL = {"relu": 1, "silu": 4, "gelu": 4}


def struct_of(name: str) -> str:
    """The type in activation.cuh that computes an activation.

    Raises:
        ValueError: for an unknown name, listing the known ones.
    """
    if name not in _FUNCTIONS:
        raise checks.unknown("activation", name, _FUNCTIONS)
    return _FUNCTIONS[name]


def activate(x: Any, function: str, slope: float = 0.0) -> Any:
    """As `minidl.cpu.activation.activate`."""
    defines = {"FORWARD": 1, "DTYPE": dtype_code(x, function), "FUNCTION": struct_of(function)}
    x = as_rows(x)
    y = empty(x.shape, x.dtype)
    plan = walk(x, y, unroll=UNROLL.get(function, 2))
    defines |= {"VEC": plan.vec, "UNROLL": plan.unroll}
    args = (x, y, np.float32(slope), plan.argument)
    launch("activation", "activate_kernel", plan.grid, plan.block, *args, defines=defines)
    return y


def activate_backward(dy: Any, kept: Any, function: str, slope: float = 0.0, *, add: Any = None) -> Any:
    """As `minidl.cpu.activation.activate_backward`."""
    defines = {"DTYPE": dtype_code(dy, function, "dy"), "FUNCTION": struct_of(function), "ADD": int(add is not None)}
    operands = (dy, kept) if add is None else (dy, kept, add)
    assert all(x.shape == dy.shape and x.dtype == dy.dtype for x in operands), [checks.describe(x) for x in operands]
    dy, kept = as_rows(dy), as_rows(kept)
    dx = empty(dy.shape, dy.dtype)
    if add is not None:
        add = as_rows(add)
    arrays = (dy, kept, dx) if add is None else (dy, kept, dx, add)
    plan = walk(*arrays, unroll=1)
    defines |= {"VEC": plan.vec, "UNROLL": plan.unroll}
    launch(
        "activation", "activate_backward_kernel", plan.grid, plan.block, dy, kept, add, dx, np.float32(slope),
        plan.argument, defines=defines,
    )  # fmt: skip
    return dx


def relu(x: Any) -> Any:
    """``max(x, 0)``, any shape; NaN stays NaN."""
    return activate(x, "relu")


def relu_backward(dy: Any, y: Any, *, add: Any = None) -> Any:
    """``dy`` where the output ``y`` was positive, else 0, plus ``add`` (all of one shape and dtype).

    In place of ``y`` its signs may come, as ``batch_norm_join`` leaves them.
    """
    if are_signs(y):
        return mask_by_signs(dy, y, add)
    return activate_backward(dy, y, "relu", add=add)
