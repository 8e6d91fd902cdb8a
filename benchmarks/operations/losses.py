"""Losses and their gradients."""

from __future__ import annotations

import math
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

    def forward(rows: int, classes: int) -> Call:
        x, t = noise((rows, classes), DTYPES[dtype]), labels_of(rows, classes)
        return lambda: ops.softmax_cross_entropy(x, t, ignore_index=-100)

    def backward(rows: int, classes: int) -> Call:
        x, t = noise((rows, classes), DTYPES[dtype]), labels_of(rows, classes)
        totals, lse = ops.softmax_cross_entropy(x, t, ignore_index=-100)
        return lambda: ops.softmax_cross_entropy_backward(x, t, lse, totals, ignore_index=-100)

    def torch_both(rows: int, classes: int) -> tuple[Call, Call]:
        import torch

        x, t = torch_noise((rows, classes), dtype), torch_labels(rows, classes)

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
    """Losses that PyTorch makes of several kernels; beside ours its forward and backward together, by its autograd."""
    kind, rows, classes, many = DTYPES[dtype], 32 * 256 * 256, 21, 32768
    size, width, label = rows * classes, DTYPES[dtype].itemsize, "32x256x256x21"
    options = {"smoothing": 0.1, "ignore_index": -100}

    def torch_rows() -> Any:
        return torch_noise((rows, classes), dtype)

    def smoothed_forward(x: Any, t: Any) -> Any:
        return ops.smoothed_cross_entropy(x, t, **options)

    def smoothed_both(x: Any, t: Any) -> Any:
        totals, lse = smoothed_forward(x, t)
        return ops.smoothed_cross_entropy_backward(x, t, lse, totals, **options)

    def torch_smoothed() -> Call:
        entropy = partial(torch_norms().cross_entropy, label_smoothing=0.1)
        return torch_gradient(entropy, torch_rows(), torch_labels(rows, classes))

    def soft_both(x: Any, t: Any) -> Any:
        totals, lse = ops.soft_cross_entropy(x, t)
        return ops.soft_cross_entropy_backward(x, t, lse, totals)

    def torch_soft() -> Call:
        x, t = torch_noise((many, 1000), dtype), torch_noise((many, 1000), dtype).softmax(1)
        return torch_gradient(torch_norms().cross_entropy, x, t)

    def pointwise(name: str, *options: float) -> Callable[[Any, Any], Any]:
        def both(x: Any, t: Any) -> Any:
            return ops.pointwise_loss_backward(x, t, ops.pointwise_loss(x, t, name, *options), None, name, *options)

        return both

    def torch_pointwise(name: str) -> Call:
        return torch_gradient(getattr(torch_norms(), name), torch_rows(), torch_rows().sigmoid())

    def case(name: str, direction: str, moved: int, call: Callable[..., Any], make: Callable[[], list[Any]],
             peer: Callable[[], Call] | None = None) -> Case:  # fmt: skip
        peers = {"torch-eager": peer} if peer else {}
        return Case(name, direction, dtype, moved, lambda: bound(call, make()), peers)

    segmented = lambda: [noise((rows, classes), kind), labels_of(rows, classes)]  # noqa: E731
    mixed = lambda: [noise((many, 1000), kind), ops.softmax(noise((many, 1000), float32))]  # noqa: E731
    pairs = lambda: [noise((rows, classes), kind) for _ in range(2)]  # noqa: E731
    name = f"soft_cross_entropy/{many}x1000"
    yield case(name, "forward", many * 1000 * (width + 4), ops.soft_cross_entropy, mixed)
    yield case(name, "step", many * 1000 * (3 * width + 8), soft_both, mixed, torch_soft)
    name = f"smoothed_cross_entropy/{label}"
    yield case(name, "forward", size * width + rows * (8 + 4), smoothed_forward, segmented)
    yield case(name, "step", 3 * size * width + rows * 2 * (8 + 4), smoothed_both, segmented, torch_smoothed)
    bce = partial(torch_pointwise, "binary_cross_entropy_with_logits")
    yield case(f"bce_with_logits/{label}", "step", 5 * size * width, pointwise("bce_with_logits"), pairs, bce)
    mse = partial(torch_pointwise, "mse_loss")
    yield case(f"mse/{label}", "step", 5 * size * width, pointwise("mse"), pairs, mse)
    yield case(f"focal/{label}", "step", 5 * size * width, pointwise("focal", 0.25, 2.0), pairs)


def segmentation(dtype: str) -> Iterator[Case]:
    """Sums and gradient of a Dice loss, and the confusion matrix; labels at random and, as in images, in stretches."""
    kind, width, shape = DTYPES[dtype], DTYPES[dtype].itemsize, (32, 256, 256)
    rows = math.prod(shape)

    def gradient(classes: int) -> Call:
        p, t, sums = noise((rows, classes), kind), labels_of(rows, classes), ops.from_host(np.ones(3 * classes + 1))
        return lambda: ops.dice_backward(p, t, sums, smooth=1.0, ignore_index=-100)

    def torch_sums(classes: int) -> Call:
        import torch

        p, t = torch_noise((rows, classes), dtype), torch_labels(rows, classes)

        def call() -> Any:
            own = torch.zeros(classes, device="cuda").index_add_(0, t, p.gather(1, t[:, None])[:, 0].float())
            return own, p.sum(0, dtype=torch.float32), torch.bincount(t, minlength=classes)

        return call

    def torch_confusion(classes: int) -> Call:
        import torch

        x, t = torch_noise((rows, classes), dtype), torch_labels(rows, classes)
        ones = torch.ones(rows, device="cuda")

        def call() -> Any:  # bincount would wait for its largest index
            found = torch.zeros(classes * classes, device="cuda")
            return found.scatter_add_(0, t * classes + x.argmax(1), ones)

        return call

    for classes in (21, 32, 3):
        label, read = f"32x256x256x{classes}", rows * (classes * width + 8)
        for name, stretch in (("", 1), (", stretches", 64)):

            def call(op: Callable[..., Any], stretch: int = stretch, classes: int = classes) -> Call:
                x, t = noise((rows, classes), kind), labels_of(rows, classes, stretch)
                return lambda: op(x, t, ignore_index=-100)

            peer = {"torch-eager": partial(torch_sums, classes)} if stretch == 1 else {}
            yield Case(f"dice_sums/{label}{name}", "forward", dtype, read, partial(call, ops.dice_sums), peer)
            peer = {"torch-eager": partial(torch_confusion, classes)} if stretch == 1 else {}
            yield Case(f"confusion/{label}{name}", "forward", dtype, read, partial(call, ops.confusion_counts), peer)
        yield Case(f"dice_backward/{label}", "backward_data", dtype, read + rows * classes * width,
                   partial(gradient, classes))  # fmt: skip


def labels_of(rows: int, classes: int, stretch: int = 1) -> Any:
    """(rows,) int64 at random, each ``stretch`` times in a row."""
    return ops.from_host(np.random.default_rng(1).integers(0, classes, rows // stretch).repeat(stretch))


def torch_labels(rows: int, classes: int) -> Any:
    import torch

    return torch.randint(0, classes, (rows,), device="cuda")


def torch_gradient(loss: Callable[..., Any], x: Any, target: Any) -> Call:
    import torch

    x = x.requires_grad_()
    return lambda: torch.autograd.grad(loss(x, target), x)
