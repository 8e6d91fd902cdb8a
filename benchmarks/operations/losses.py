"""Losses and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from minidl import cuda as ops
from minidl.precision import float32
from minidl.profile.timing import Call
from operations.case import DTYPES, Case, aten, bound, noise, torch_noise, torch_norms


def loss(dtype: str) -> Iterator[Case]:
    width = DTYPES[dtype].itemsize
    row_overhead = 8 + 4  # an int64 label and a float32 log-sum

    def labels(rows: int, classes: int) -> np.ndarray:
        return np.random.default_rng(1).integers(0, classes, rows)

    def forward(rows: int, classes: int) -> Call:
        x, t = noise((rows, classes), DTYPES[dtype]), ops.from_host(labels(rows, classes))
        return lambda: ops.softmax_cross_entropy(x, t, ignore_index=-100)

    def backward(rows: int, classes: int) -> Call:
        x, t = noise((rows, classes), DTYPES[dtype]), ops.from_host(labels(rows, classes))
        totals, lse = ops.softmax_cross_entropy(x, t, ignore_index=-100)
        return lambda: ops.softmax_cross_entropy_backward(x, t, lse, totals, ignore_index=-100)

    def torch_both(rows: int, classes: int) -> tuple[Call, Call]:
        import torch

        x, t = torch_noise((rows, classes), dtype), torch.from_numpy(labels(rows, classes)).cuda()

        def torch_forward() -> tuple[Any, Any, Any]:
            logp = aten()._log_softmax(x, 1, False)
            return (logp, *aten().nll_loss_forward(logp, t, None, 1, -100))

        logp, value, total = torch_forward()
        one = torch.ones_like(value)

        def torch_backward() -> Any:
            dlogp = aten().nll_loss_backward(one, logp, t, None, 1, -100, total)
            return aten()._log_softmax_backward_data(dlogp, logp, 1, x.dtype)

        return torch_forward, torch_backward

    for label, rows, classes in (("256x1000", 256, 1000), ("32x256x256x21", 32 * 256 * 256, 21)):
        arguments, name = (rows, classes), f"softmax_cross_entropy/{label}"
        yield Case(name, "forward", dtype, rows * (classes * width + row_overhead), partial(forward, *arguments),
                   {"torch-eager": lambda a=arguments: torch_both(*a)[0]})  # fmt: skip
        yield Case(name, "backward_data", dtype, rows * (2 * classes * width + row_overhead),
                   partial(backward, *arguments), {"torch-eager": lambda a=arguments: torch_both(*a)[1]})  # fmt: skip


def whole_losses(dtype: str) -> Iterator[Case]:
    """Losses that PyTorch makes of several kernels: forward and backward together, by its autograd."""
    kind, rows, classes = DTYPES[dtype], 32 * 256 * 256, 21
    size, width = rows * classes, DTYPES[dtype].itemsize

    def smoothed() -> Call:
        labels = ops.from_host(np.random.default_rng(1).integers(0, classes, rows))

        def call(x: Any, t: Any) -> Any:
            totals, lse = ops.smoothed_cross_entropy(x, t, smoothing=0.1, ignore_index=-100)
            return ops.smoothed_cross_entropy_backward(x, t, lse, totals, smoothing=0.1, ignore_index=-100)

        return bound(call, [noise((rows, classes), kind), labels])

    def torch_smoothed() -> Call:
        import torch

        t = torch.randint(0, classes, (rows,), device="cuda")
        return torch_gradient(partial(torch_norms().cross_entropy, label_smoothing=0.1), torch_rows(), t)

    def soft() -> Call:
        def call(x: Any, t: Any) -> Any:
            totals, lse = ops.soft_cross_entropy(x, t)
            return ops.soft_cross_entropy_backward(x, t, lse, totals)

        return bound(call, [noise((many, 1000), kind), ops.softmax(noise((many, 1000), float32))])

    def torch_soft() -> Call:
        x, t = torch_noise((many, 1000), dtype), torch_noise((many, 1000), dtype).softmax(1)
        return torch_gradient(torch_norms().cross_entropy, x, t)

    def bce() -> Call:
        def call(x: Any, t: Any) -> Any:
            totals = ops.pointwise_loss(x, t, "bce_with_logits")
            return ops.pointwise_loss_backward(x, t, totals, None, "bce_with_logits")

        return bound(call, [noise((rows, classes), kind) for _ in range(2)])

    def torch_bce() -> Call:
        return torch_gradient(torch_norms().binary_cross_entropy_with_logits, torch_rows(), torch_rows().sigmoid())

    def torch_rows() -> Any:
        return torch_noise((rows, classes), dtype)

    label, many = "32x256x256x21", 32768
    yield Case(f"soft_cross_entropy/{many}x1000", "step", dtype, many * 1000 * (3 * width + 8), soft,
               {"torch-eager": torch_soft})  # fmt: skip
    yield Case(f"smoothed_cross_entropy/{label}", "step", dtype, 3 * size * width + rows * (2 * 8 + 2 * 4), smoothed,
               {"torch-eager": torch_smoothed})  # fmt: skip
    yield Case(f"bce_with_logits/{label}", "step", dtype, 5 * size * width, bce, {"torch-eager": torch_bce})


def torch_gradient(loss: Callable[..., Any], x: Any, target: Any) -> Call:
    import torch

    x = x.requires_grad_()
    return lambda: torch.autograd.grad(loss(x, target), x)
