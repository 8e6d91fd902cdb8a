"""Updates of the optimizers on one arena of parameters, clipping, and averages of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from minidl import cuda as ops
from minidl.precision import float32
from minidl.profile.timing import Call
from operations.case import DTYPES, Case, noise

PARAMETERS, SEGMENTS, CHUNK = 25_600_000, 160, 64  # as of a ResNet-50; equal segments of whole chunks


def optimizer(dtype: str) -> Iterator[Case]:
    working = dtype != "fp32"

    def arenas(count: int) -> list[Any]:
        return [noise((PARAMETERS,), float32) for _ in range(count)]

    def scalars(momentum: float) -> list[Any]:
        """The segment table and the control array of an update."""
        segment_of = np.repeat(np.arange(SEGMENTS, dtype=np.int32), PARAMETERS // CHUNK // SEGMENTS)
        segments = np.tile(np.float32([1, 1e-4, 1, 1]), (SEGMENTS, 1))
        control = np.float32([1e-9, momentum, 1, 0, 0, 0, 2000, 0])
        return [ops.from_host(array) for array in (segment_of, segments, control)]

    def rounded() -> Any:
        return ops.empty(PARAMETERS, DTYPES[dtype]) if working else None

    def record() -> Any:
        return ops.from_host(np.array([0.9, 0.999, 1e-8, 1, 0.1, 0.001, 1e-3, 0], np.float32))

    def bounds() -> Any:
        return ops.from_host(np.arange(0, PARAMETERS // CHUNK + 1, PARAMETERS // CHUNK // SEGMENTS, dtype=np.int32))

    def sgd() -> Call:
        arrays = [*arenas(3), rounded(), *scalars(0.9)]
        return lambda: ops.sgd_update(*arrays, nesterov=False)

    def adamw() -> Call:
        arrays = [*arenas(4), rounded(), *scalars(0.0), record()]
        return lambda: ops.adamw_update(*arrays)

    def lars() -> Call:
        master, grad, momentum = arenas(3)
        copy, edges, (segment_of, segments, control), adaptive = rounded(), bounds(), scalars(0.9), record()

        def step() -> None:
            norms = ops.segment_norms(master, grad, edges, control)
            ops.lars_update(master, grad, momentum, copy, segment_of, segments, norms, control, adaptive)

        return step

    def lamb() -> Call:
        master, grad, first, second = arenas(4)
        copy, edges, (segment_of, segments, control), adaptive = rounded(), bounds(), scalars(0.0), record()

        def step() -> None:
            both = segment_of, segments
            norms = ops.lamb_moments(master, grad, first, second, *both, edges, control, adaptive)
            ops.lamb_update(master, first, second, copy, *both, norms, control, adaptive)

        return step

    def clip() -> Call:
        grad, control, square = noise((PARAMETERS,), float32), scalars(0.9)[2], ops.from_host(np.array([1.0]))

        def step() -> None:
            ops.gradient_square(grad)
            ops.clip_norm(
                grad, square, 0.999, control
            )  # where it is the gradient's own, the second step finds it clipped

        return step

    def one(call: Callable[..., Any], count: int) -> Callable[[], Call]:
        def make() -> Call:
            arrays = arenas(count)
            return lambda: call(*arrays)

        return make

    def check() -> Call:
        grad, control = noise((PARAMETERS,), float32), ops.zeros(8, np.float32)
        return lambda: ops.find_nonfinite(grad, control)

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

    def torch_blend() -> Call:
        import torch

        average, weight = (torch.randn(PARAMETERS, device="cuda") for _ in range(2))
        return lambda: average.lerp_(weight, 0.001)

    moved = PARAMETERS * (20 + (2 if working else 0)) + PARAMETERS // 16
    yield Case("sgd_update/25.6M", "step", dtype, moved, sgd, {"torch-eager": lambda: torch_make("SGD", momentum=0.9)})
    yield Case("adamw_update/25.6M", "step", dtype, moved + 8 * PARAMETERS, adamw,
               {"torch-eager": lambda: torch_make("AdamW", capturable=True)})  # fmt: skip
    yield Case("lars/25.6M", "step", dtype, moved + 8 * PARAMETERS, lars)
    yield Case("lamb/25.6M", "step", dtype, moved + 20 * PARAMETERS, lamb)
    if not working:
        yield Case("find_nonfinite/25.6M", "step", dtype, 4 * PARAMETERS, check)
        yield Case("clip_norm/25.6M", "step", dtype, 12 * PARAMETERS, clip)
        yield Case("weight_average/25.6M", "step", dtype, 12 * PARAMETERS,
                   one(lambda average, x: ops.blend(average, x, 0.999), 2), {"torch-eager": torch_blend})  # fmt: skip
