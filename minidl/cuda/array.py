"""Arrays of the CUDA table: CuPy arrays on the current device; in a dry run, NumPy arrays nobody touches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minidl import checks
from minidl.cuda.device import active_dry_run, import_cupy, recording
from minidl.cuda.launch import launch
from minidl.cuda.rows import DTYPE, address, dense, in_rows, walk
from minidl.precision import bfloat16, float16, float32

_WORDS = 4  # that `assign` takes

_TYPE_NAMES = {float32: "float", bfloat16: "bf16", float16: "f16", np.dtype(np.uint8): "u8"}


def array_type() -> type:
    """The class of this table's arrays: ``cupy.ndarray``, in a dry run ``numpy.ndarray``."""
    return np.ndarray if active_dry_run() is not None else import_cupy().ndarray


def empty(shape: int | Sequence[int], dtype: Any) -> Any:
    """An array whose values are whatever was there: the only way in which the table and the layers allocate."""
    dry = active_dry_run()
    return _made(import_cupy().ndarray, shape, dtype) if dry is None else dry.made(shape, dtype)


def zeros(shape: int | Sequence[int], dtype: Any) -> Any:
    """An array of zeros."""
    dry = active_dry_run()
    return _made(import_cupy().zeros, shape, dtype) if dry is None else dry.zeroed(shape, dtype)


def _made(function: Callable[[Any, Any], Any], shape: int | Sequence[int], dtype: Any) -> Any:
    recorded = recording()
    return recorded.make(function, shape, dtype) if recorded else function(shape, dtype)


def from_host(host: Any, dtype: Any = None) -> Any:
    """A copy on the device of a NumPy array, scalar or list; ``dtype`` converts on the host first."""
    host = np.asarray(host, dtype)
    dry = active_dry_run()
    if dry is not None:
        return dry.copied(host)
    return import_cupy().array(host, order="C")


def to_host(x: Any) -> np.ndarray:
    """A copy on the host; waits for the device. Zeros in a dry run, where nothing was computed."""
    if active_dry_run() is not None:
        return np.zeros(x.shape, x.dtype)
    x = contiguous(x)
    # A copy into pageable memory waits inside of the driver, where another thread's look at events, as the watchdog's,
    # seemed to wait with it: wait before instead.
    synchronize()
    return import_cupy().asnumpy(x)


def synchronize() -> None:
    """Wait until the current stream has done all its work."""
    if active_dry_run() is None:
        import_cupy().cuda.get_current_stream().synchronize()


def contiguous(x: Any) -> Any:
    """``x`` itself when it is dense in C order, else a dense copy."""
    if dense(x):
        return x
    if in_rows(x):
        out = empty(x.shape, x.dtype)
        copy_into(out, x)
        return out
    # Any other strides (transposed, cropped, reversed) come from users, not from layers: CuPy's strided copy serves.
    dry = active_dry_run()
    return import_cupy().ascontiguousarray(x) if dry is None else dry.copied(x)


def as_rows(x: Any) -> Any:
    """``x`` itself when it is dense or pitched, else a dense copy: what every operation does to its inputs first."""
    return x if in_rows(x) else contiguous(x)


def cast(x: Any, dtype: Any) -> Any:
    """A dense copy of ``x`` in ``dtype``, rounded to nearest even."""
    out = empty(x.shape, dtype)
    copy_into(out, x)
    return out


def copy_into(out: Any, x: Any) -> None:
    """``out[...] = x``: both dense or pitched, of one shape; rounds to nearest even where the types differ.

    Nothing is done where ``x`` is what lies there already.

    Raises:
        ValueError: when the shapes differ, or ``out`` is neither dense nor pitched.
        TypeError: for a conversion other than from float32, bfloat16, float16 or uint8 to one of the first three.
    """
    if out.shape != x.shape:
        raise checks.bad_shape("copy_into", "x", str(out.shape), x.shape)
    x = as_rows(x)
    if out.dtype == x.dtype:
        if address(out) != address(x) or out.strides != x.strides:
            _copy(out, x)
        return
    if x.dtype not in _TYPE_NAMES:
        raise checks.bad_dtype("copy_into", "x", "float32, bfloat16, float16 or uint8", x.dtype)
    if out.dtype not in DTYPE:
        raise checks.bad_dtype("copy_into", "out", "float32, bfloat16 or float16", out.dtype)
    plan = walk(x, out, unroll=2)
    defines = {"SOURCE": _TYPE_NAMES[x.dtype], "TARGET": _TYPE_NAMES[out.dtype], "VEC": plan.vec, "UNROLL": plan.unroll}
    launch("array", "convert_kernel", plan.grid, plan.block, x, out, plan.argument, defines=defines)


def assign(out: Any, values: Sequence[float]) -> None:
    """Write a few numbers from the host into ``out``, (n,) float32, int32 or uint32 with n up to 4, in stream order.

    They travel as arguments of a kernel: nothing waits, and no buffer has to live until a copy is done.
    """
    host = np.array(values, out.dtype)
    assert out.dtype.itemsize == 4 and dense(out), (out.dtype, out.strides)
    assert out.shape == host.shape and out.ndim == 1 and out.size <= _WORDS, (out.shape, host.shape)
    words = np.zeros(_WORDS, np.uint32)
    words[: out.size] = host.view(np.uint32)
    launch("array", "assign_kernel", 1, 1, out, np.int32(out.size), *words, defines={"ASSIGN": 1})


def _copy(out: Any, x: Any) -> None:
    plan = walk(x, out, unroll=2, in_bytes=True)
    defines = {"COPY": 1, "VEC": plan.vec, "UNROLL": plan.unroll}
    launch("array", "copy_kernel", plan.grid, plan.block, x, out, plan.argument, defines=defines)
