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


def noise(ops: ModuleType, shape: Sequence[int], dtype: Any, seed: int = 0) -> Any:
    """Normal values of the table's kind; they repeat every 2^22, which no kernel notices."""
    size, start = math.prod(shape), seed % _STARTS * _ALIGNED
    base = ops.from_host(_normals()[start : start + min(size, _PERIOD)])
    if size <= _PERIOD:
        return ops.cast(base.reshape(shape), dtype)
    base, flat = ops.cast(base, dtype), ops.empty(size, dtype)
    for begin in range(0, size, _PERIOD):
        end = min(begin + _PERIOD, size)
        ops.copy_into(flat[begin:end], base[: end - begin])
    return flat.reshape(shape)


@functools.cache
def _normals() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(_PERIOD + _STARTS * _ALIGNED, np.float32)


def labels(ops: ModuleType, shape: tuple[int, ...], classes: int, seed: int = 0) -> Any:
    """Random classes, int32."""
    return ops.from_host(np.random.default_rng(seed).integers(0, classes, shape).astype(np.int32))
