"""Where branches of a network meet: sum, product and concatenation on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minidl import checks
from minidl.cuda.array import as_rows, cast, contiguous, copy_into, empty, zeros
from minidl.cuda.grid import ints
from minidl.cuda.launch import launch
from minidl.cuda.norm.group_norm import PRODUCT, sample_sums
from minidl.cuda.rows import dtype_code, rows, walk, walk_channels
from minidl.precision import float32


def add(a: Any, b: Any) -> Any:
    """``a + b``, both of one shape and dtype, added in float32 and rounded once."""
    return _join(a, b, "add")


def mul(a: Any, b: Any) -> Any:
    """As `minidl.cpu.join.mul`."""
    return _join(a, b, "mul") if a.shape == b.shape else _gated(a, b)


def _join(a: Any, b: Any, name: str) -> Any:
    code = dtype_code(a, name, "a")
    assert a.shape == b.shape and a.dtype == b.dtype, (checks.describe(a), checks.describe(b))
    a, b = as_rows(a), as_rows(b)
    y = empty(a.shape, a.dtype)
    plan = walk(a, b, y, unroll=1)
    defines = {"DTYPE": code, "VEC": plan.vec, "UNROLL": plan.unroll, "PRODUCT": int(name == "mul")}
    launch("join", "join_kernel", plan.grid, plan.block, a, b, y, plan.argument, defines=defines)
    return y


def gate_backward(dy: Any, gate: Any, dmean: Any) -> Any:
    """As `minidl.cpu.join.gate_backward`."""
    return _gated(dy, gate, dmean)


def _gated(a: Any, gate: Any, mean: Any = None) -> Any:
    code = dtype_code(a, "mul", "a")
    n, channels = a.shape[0], a.shape[-1]
    for one in (gate,) if mean is None else (gate, mean):
        assert one.shape == (n, *(1,) * (a.ndim - 2), channels) and one.dtype == a.dtype, checks.describe(one)
    a, gate, mean = as_rows(a), contiguous(gate), None if mean is None else contiguous(mean)
    y = empty(a.shape, a.dtype)
    if a.size:
        plan = walk_channels(a, y, unroll=2, parameters=(gate, mean))
        sizes = ints(rows(a)[0] // n, channels)
        defines = {"DTYPE": code, "VEC": plan.vec, "UNROLL": plan.unroll, "GATE": 1, "MEAN": int(mean is not None)}
        launch("join", "gate_kernel", plan.grid, plan.block, a, gate, mean, y, *sizes, plan.argument, defines=defines)
    return y


def gate_gradient(dy: Any, a: Any) -> Any:
    """The gradient of the gate of `mul`: ``dy * a`` (N, ..., C) added up over each sample, (N, 1, ..., 1, C)."""
    assert dy.shape == a.shape and dy.dtype == a.dtype, (checks.describe(dy), checks.describe(a))
    shape = (a.shape[0], *(1,) * (a.ndim - 2), a.shape[-1])
    total = zeros(shape, float32) if a.size == 0 else empty(shape, float32)
    if a.size:
        sample_sums(PRODUCT, as_rows(dy), as_rows(a), None, a.shape[0]).total(0, total)
    return total if a.dtype == float32 else cast(total, a.dtype)


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
