"""Which operation table an array or a device name belongs to. CuPy is imported only when a GPU is asked for."""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType
from typing import Any

import numpy as np

from minidl import checks

_TABLES = ("cpu", "cuda")


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
