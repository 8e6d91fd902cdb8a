"""Where branches of a network meet: sum and concatenation on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minidl import checks
from minidl.cuda.array import as_rows, copy_into, empty
from minidl.cuda.launch import launch
from minidl.cuda.rows import dtype_code, walk

__all__ = ["add", "concat"]


def add(a: Any, b: Any) -> Any:
    """``a + b`` of one shape and type, rounded once."""
    code = dtype_code(a, "add", "a")
    assert a.shape == b.shape and a.dtype == b.dtype, (checks.describe(a), checks.describe(b))
    a, b = as_rows(a), as_rows(b)
    y = empty(a.shape, a.dtype)
    plan = walk(a, b, y, unroll=1)
    defines = {"DTYPE": code, "VEC": plan.vec, "UNROLL": plan.unroll}
    launch("join", "add_kernel", plan.grid, plan.block, a, b, y, plan.argument, defines=defines)
    return y


def concat(parts: Sequence[Any]) -> Any:
    """The channels (last axis) of all ``parts`` side by side; they agree in type and in all other axes."""
    first = parts[0]
    assert all(x.shape[:-1] == first.shape[:-1] and x.dtype == first.dtype for x in parts), [
        checks.describe(x) for x in parts
    ]
    y = empty((*first.shape[:-1], sum(x.shape[-1] for x in parts)), first.dtype)
    start = 0
    for x in parts:
        end = start + x.shape[-1]
        copy_into(y[..., start:end], x)
        start = end
    return y
