"""Operands for benchmarks: random values made on the device, since zeros and constants cost a GPU less power."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np

from minidl.precision import float32

__all__ = ["labels", "noise"]

_PERIOD = 1 << 22


def noise(ops: ModuleType, shape: tuple[int, ...], dtype: Any, seed: int = 0) -> Any:
    """Normal values of the table's kind; they repeat every 2^22, which no kernel notices."""
    size = math.prod(shape)
    base = ops.from_host(np.random.default_rng(seed).standard_normal(min(size, _PERIOD), np.float32))
    if size <= _PERIOD:
        return ops.cast(base.reshape(shape), dtype)
    flat = ops.empty(size, float32)
    for begin in range(0, size, _PERIOD):
        end = min(begin + _PERIOD, size)
        ops.copy_into(flat[begin:end], base[: end - begin])
    return ops.cast(flat.reshape(shape), dtype)


def labels(ops: ModuleType, shape: tuple[int, ...], classes: int, seed: int = 0) -> Any:
    """Random classes, int32."""
    return ops.from_host(np.random.default_rng(seed).integers(0, classes, shape).astype(np.int32))
