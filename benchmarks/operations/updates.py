"""Updates of the optimizers on one arena of parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from minidl import cuda as ops
from minidl.precision import float32
from minidl.profile.timing import Call
from operations.case import DTYPES, Case, noise

PARAMETERS = 25_600_000


def optimizer(dtype: str) -> Iterator[Case]:
    working = dtype != "fp32"

    def make() -> Call:
        master, grad, momentum = (noise((PARAMETERS,), float32) for _ in range(3))
        copy = ops.empty(PARAMETERS, DTYPES[dtype]) if working else None
        segment_of = ops.zeros(PARAMETERS // 64, np.int32)
        segments = ops.from_host(np.array([[1, 1e-4, 1, 0]], np.float32))
        control = ops.from_host(np.array([1e-9, 0.9, 1, 0, 0, 0, 2000, 0], np.float32))
        return lambda: ops.sgd_update(master, grad, momentum, copy, segment_of, segments, control, nesterov=False)

    def adamw() -> Call:
        master, grad, first, second = (noise((PARAMETERS,), float32) for _ in range(4))
        copy = ops.empty(PARAMETERS, DTYPES[dtype]) if working else None
        segment_of = ops.zeros(PARAMETERS // 64, np.int32)
        segments = ops.from_host(np.array([[1, 1e-4, 1, 0]], np.float32))
        control = ops.from_host(np.array([1e-9, 0, 1, 0, 0, 0, 2000, 0], np.float32))
        record = ops.from_host(np.array([0.9, 0.999, 1e-8, 1, 0.1, 0.001, 0, 0], np.float32))
        return lambda: ops.adamw_update(master, grad, first, second, copy, segment_of, segments, control, record)

    def torch_make(kind: str, **options: Any) -> Call:
        import torch

        weight = torch.nn.Parameter(torch.randn(PARAMETERS, device="cuda"))
        weight.grad = torch.randn(PARAMETERS, device="cuda")
        peer = getattr(torch.optim, kind)([weight], lr=1e-9, weight_decay=1e-4, fused=True, **options)
        copy = torch.empty(PARAMETERS, device="cuda", dtype=torch.bfloat16)

        def step() -> None:
            peer.step()
            if working:
                copy.copy_(weight.detach())

        return step

    def check() -> Call:
        grad, control = noise((PARAMETERS,), float32), ops.zeros(8, np.float32)
        return lambda: ops.find_nonfinite(grad, control)

    moved = PARAMETERS * (20 + (2 if working else 0)) + PARAMETERS // 16
    yield Case("sgd_update/25.6M", "step", dtype, moved, make, {"torch-eager": lambda: torch_make("SGD", momentum=0.9)})
    yield Case("adamw_update/25.6M", "step", dtype, moved + 8 * PARAMETERS, adamw,
               {"torch-eager": lambda: torch_make("AdamW", capturable=True)})  # fmt: skip
    if not working:
        yield Case("find_nonfinite/25.6M", "step", dtype, 4 * PARAMETERS, check)
