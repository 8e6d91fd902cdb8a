"""Arrays of other libraries at a layer's door: what speaks DLPack comes in without a copy and is answered in kind."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from minidl import backend, checks

_CPU, _CUDA, _CUDA_HOST = 1, 2, 3  # DLDeviceType of the DLPack standard


def take_in(array: Any, who: str, argument: str) -> tuple[Any, ModuleType]:
    """``array`` as an array of the operation table of its device, and that table.

    Raises:
        TypeError: when ``array`` is not an array, or its library refuses to lend it.
    """
    ops = backend.ops_of(array)
    if ops is not None:
        if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
            raise checks.bad_dtype(who, argument, "an array without a mask", "a masked array", "fill it: x.filled(0)")
        return array, ops
    if not (hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__")):
        raise checks.bad_dtype(
            who, argument, "a NumPy, CuPy or DLPack array", type(array).__name__, "convert it with numpy.asarray(...)"
        )
    device = int(array.__dlpack_device__()[0])
    ops = backend.get_ops("cuda" if device == _CUDA else "cpu")
    if device not in (_CPU, _CUDA, _CUDA_HOST):
        raise checks.bad_dtype(who, argument, "an array in host or CUDA memory", checks.describe(array))
    try:
        return ops.from_dlpack(array), ops
    except (BufferError, TypeError, ValueError, RuntimeError) as error:
        refusal = f"{who}: {argument} ({checks.describe(array)}) cannot be borrowed through DLPack: {error}"
        raise TypeError(refusal) from error


def answer_in_kind(like: Any) -> Callable[[Any], Any]:
    """A function that turns an array of an operation table into what the library of ``like`` calls an array."""
    if backend.ops_of(like) is not None:
        return lambda array: array
    library = sys.modules[type(like).__module__.split(".")[0]]
    borrow = getattr(library, "from_dlpack", None) or library.dlpack.from_dlpack
    return lambda array: None if array is None else borrow(array)
