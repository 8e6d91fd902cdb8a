"""What a row of bench_ops.py is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from minidl import cuda as ops
from minidl.precision import bfloat16, float16, float32
from minidl.profile import inputs
from minidl.profile.timing import Call

DTYPES = {"bf16": bfloat16, "fp16": float16, "fp32": float32}
BATCH = 256
ACTIVATIONS = {"64@56": (56, 56, 64), "256@56": (56, 56, 256), "512@28": (28, 28, 512), "2048@7": (7, 7, 2048)}

Make = Callable[[], Call]  # builds one input set and returns the call bound to it


@dataclass(frozen=True)
class Case:
    """One row: what runs, the bytes it has to move, and who else does it."""

    name: str
    direction: str
    dtype: str
    least_bytes: int
    make: Make
    peers: dict[str, Make] = field(default_factory=dict)


def noise(shape: tuple[int, ...], dtype: Any) -> Any:
    """Normal values, made on the device."""
    return inputs.noise(ops, shape, dtype, values=inputs.placed(ops))


def torch_noise(shape: tuple[int, ...], dtype: str) -> Any:
    """The same shape for PyTorch: NHWC in memory, NCHW in name."""
    import torch

    x = torch.randn(shape, device="cuda").to(torch_type(dtype))
    return x.permute(0, 3, 1, 2) if len(shape) == 4 else x


def bound(call: Callable[..., Any], arguments: list[Any]) -> Call:
    return lambda: call(*arguments)


@cache
def parameters(channels: int) -> tuple[Any, Any]:
    return ops.from_host(np.ones(channels, np.float32)), ops.from_host(np.zeros(channels, np.float32))


@cache
def torch_parameters(channels: int, dtype: str) -> tuple[Any, Any]:
    import torch

    return tuple(make(channels, device="cuda", dtype=torch_type(dtype)) for make in (torch.ones, torch.zeros))


def torch_norms() -> Any:
    import torch

    return torch.nn.functional


def aten() -> Any:
    import torch

    return torch.ops.aten


def torch_type(dtype: str) -> Any:
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
