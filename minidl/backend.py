"""Which operation table an array or a device name belongs to. CuPy is imported only when a GPU is asked for.

Arrays of other libraries that speak DLPack come in at a layer's door without a copy and are answered in kind.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from minidl import checks

_TABLES = ("cpu", "cuda")
_CPU, _CUDA, _CUDA_HOST = 1, 2, 3  # DLDeviceType of the DLPack standard


@functools.cache
def get_ops(device: str) -> ModuleType:
    """The operation table of ``"cpu"`` or ``"cuda"``.

    Raises:
        ValueError: for another name.
        ImportError: when the table's packages are not installed, naming the extra that brings them.
    """
    if device not in _TABLES:
        raise checks.unknown("device", device, _TABLES)
    return importlib.import_module(f"minidl.{device}")


def open_device(device: str) -> ModuleType:
    """The operation table of ``device``, ready to compute.

    Raises:
        ValueError, ImportError: as `get_ops`.
        RuntimeError: when a GPU is asked for and none is usable.
    """
    ops = get_ops(device)
    if device == "cuda":
        ops.require_device()
    return ops


def take_in(array: Any, who: str, argument: str) -> tuple[Any, ModuleType]:
    """``array`` as an array of the operation table of its device, and that table.

    Raises:
        TypeError: when ``array`` is not an array, or its library refuses to lend it.
    """
    ops = ops_of(array)
    if ops is not None:
        if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
            raise checks.bad_dtype(who, argument, "an array without a mask", "a masked array", "fill it: x.filled(0)")
        return array, ops
    if not (hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__")):
        raise checks.bad_dtype(
            who, argument, "a NumPy, CuPy or DLPack array", type(array).__name__, "convert it with numpy.asarray(...)"
        )
    device = int(array.__dlpack_device__()[0])
    ops = get_ops("cuda" if device == _CUDA else "cpu")
    if device not in (_CPU, _CUDA, _CUDA_HOST):
        raise checks.bad_dtype(who, argument, "an array in host or CUDA memory", checks.describe(array))
    try:
        return ops.from_dlpack(array), ops
    except (BufferError, TypeError, ValueError, RuntimeError) as error:
        refusal = f"{who}: {argument} ({checks.describe(array)}) cannot be borrowed through DLPack: {error}"
        raise TypeError(refusal) from error


def answer_in_kind(like: Any) -> Callable[[Any], Any]:
    """A function that turns an array of an operation table into what the library of ``like`` calls an array."""
    if ops_of(like) is not None:
        return lambda array: array
    library = sys.modules[type(like).__module__.split(".")[0]]
    borrow = getattr(library, "from_dlpack", None) or getattr(getattr(library, "dlpack", None), "from_dlpack", None)
    if borrow is None:  # an object of no array library
        return lambda array: array
    return lambda array: None if array is None else borrow(array)


def ops_of(array: Any) -> ModuleType | None:
    """The table whose arrays ``array`` is one of; None for any other kind of object."""
    # A CuPy array can only exist when its owner has imported CuPy.
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        return get_ops("cuda")
    if isinstance(array, np.ndarray):
        return get_ops("cuda" if dry() else "cpu")
    return None


def dry() -> bool:
    """Whether this is a dry run, in which NumPy arrays that nobody touches stand for those of the GPU."""
    device = sys.modules.get("minidl.cuda.device")
    return device is not None and device.active_dry_run() is not None
