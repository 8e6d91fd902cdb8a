"""Operands for benchmarks: random values made on the device, as zeros and constants cost a GPU less power and time."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

_PERIOD = 1 << 22
_STARTS, _ALIGNED = 1 << 10, 64  # places where arrays start among the random numbers; values between them


def noise(ops: ModuleType, shape: Sequence[int], dtype: Any, seed: int = 0, values: Any = None) -> Any:
    """Normal values of the table's kind; they repeat every 2^22, which no kernel notices.

    Args:
        values: `placed`, for who draws often; default: what is needed of them is copied.
    """
    size, start = math.prod(shape), seed % _STARTS * _ALIGNED
    part = slice(start, start + min(size, _PERIOD))
    base = ops.cast(ops.from_host(normals()[part]) if values is None else values[part], dtype)
    flat = ops.empty((size,), dtype)
    for begin in range(0, size, _PERIOD):
        end = min(begin + _PERIOD, size)
        ops.copy_into(flat[begin:end], base[: end - begin])
    return flat.reshape(shape)


@functools.cache
def normals() -> np.ndarray:
    """The values that `noise` takes its parts from, float32."""
    return np.random.default_rng(0).standard_normal(_PERIOD + _STARTS * _ALIGNED, np.float32)


@functools.cache
def placed(ops: ModuleType) -> Any:
    """`normals` as an array of the table."""
    return ops.from_host(normals())


def labels(ops: ModuleType, shape: tuple[int, ...], classes: int, seed: int = 0) -> Any:
    """Random classes, int32."""
    return ops.from_host(np.random.default_rng(seed).integers(0, classes, shape).astype(np.int32))
