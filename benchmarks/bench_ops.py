"""Every memory-bound operation of the CUDA table on large tensors, against a device-to-device copy and against PyTorch.

    python benchmarks/bench_ops.py [--only NAME ...] [--json PATH]    on a GPU
    python benchmarks/bench_ops.py --dry-run                          anywhere: launchers and least bytes, no times

The floor of a row is its least bytes (each input read once, each output written once) at the copy's bandwidth, measured
in the same run; its share is floor over time. Rows are printed worst share first.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from minidl import cuda as ops
from minidl.cuda.device import current_device
from minidl.cuda.launch import dry_run
from minidl.precision import bfloat16, float32
from minidl.profile.device_ceilings import copy_bandwidth
from minidl.profile.results import result, write
from minidl.profile.tables import show
from minidl.profile.timing import Budget, Call, DeviceTimer, input_sets

DTYPES = {"bf16": bfloat16, "fp32": float32}
BATCH = 256
ACTIVATIONS = {"64@56": (56, 56, 64), "256@56": (56, 56, 256), "512@28": (28, 28, 512), "2048@7": (7, 7, 2048)}
POOL = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1)}
PARAMETERS = 25_600_000
BUDGET = Budget(seconds=math.inf)

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


@cache
def noise_base() -> Any:
    return ops.from_host(np.random.default_rng(0).standard_normal(2**22, np.float32))


def noise(shape: tuple[int, ...], dtype: Any) -> Any:
    """Normal values, repeating every 2^22, made on the device."""
    base = noise_base()
    flat = ops.empty(math.prod(shape), float32)
    for begin in range(0, flat.size, base.size):
        end = min(begin + base.size, flat.size)
        ops.copy_into(flat[begin:end], base[: end - begin])
    return ops.cast(flat.reshape(shape), dtype)


def torch_noise(shape: tuple[int, ...], dtype: str) -> Any:
    """The same shape for PyTorch: NHWC in memory, NCHW in name."""
    import torch

    x = torch.randn(shape, device="cuda").to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    return x.permute(0, 3, 1, 2) if len(shape) == 4 else x


def elementwise(label: str, shape: tuple[int, ...], dtype: str) -> Iterator[Case]:
    """Casts, joins and activations, whose cost is the same for any shape of that size."""
    import_type, size = DTYPES[dtype], math.prod(shape)
    width = np.dtype(import_type).itemsize
    source = "fp32" if dtype == "bf16" else "bf16"

    def ours(call: Callable[..., Any], count: int, kind: str = dtype) -> Make:
        return lambda: bound(call, [noise(shape, DTYPES[kind]) for _ in range(count)])

    def torch_peer(call: Callable[..., Any], count: int, kind: str = dtype) -> dict[str, Make]:
        return {"torch-eager": lambda: bound(call, [torch_noise(shape, kind) for _ in range(count)])}

    def case(name: str, direction: str, moved: float, make: Make, peers: dict[str, Make]) -> Case:
        return Case(f"{name}/{label}", direction, dtype, int(moved * size), make, peers)

    yield case("cast", "forward", 6, ours(lambda x: ops.cast(x, import_type), 1, source),
               torch_peer(lambda x: x.to(torch_type(dtype)), 1, source))  # fmt: skip
    yield case("relu", "forward", 2 * width, ours(ops.relu, 1), torch_peer(lambda x: x.relu(), 1))
    yield case("relu", "backward_data", 3 * width, ours(ops.relu_backward, 2),
               torch_peer(lambda dy, y: aten().threshold_backward(dy, y, 0), 2))  # fmt: skip
    yield case("add", "forward", 3 * width, ours(ops.add, 2), torch_peer(lambda a, b: a + b, 2))
    yield case("concat", "forward", 4 * width, ours(lambda a, b: ops.concat([a, b]), 2),
               torch_peer(lambda a, b: aten().cat([a, b], 1), 2))  # fmt: skip
    yield case("dropout", "forward", 2 * width, ours(lambda x: ops.dropout(x, 0.5, dropout_key(), 1), 1),
               torch_peer(lambda x: aten().native_dropout(x, 0.5, True), 1))  # fmt: skip
    yield case("channel_sum", "backward_weight", width, ours(channel_sum, 1),
               torch_peer(lambda x: x.sum((0, 2, 3), dtype=torch_type("fp32")), 1))  # fmt: skip
    n, height, width_, channels = shape
    padded = n * (height + 2) * (width_ + 2) * channels
    yield case("pad2d", "forward", (1 + padded / size) * width, ours(lambda x: ops.pad2d(x, (1, 1, 1, 1)), 1),
               torch_peer(lambda x: aten().constant_pad_nd(x, [1, 1, 1, 1]), 1))  # fmt: skip


def batch_norm(label: str, shape: tuple[int, ...], dtype: str) -> Iterator[Case]:
    """The four passes of batch normalisation; the peer is PyTorch's synchronised batch norm, cut in the same places.

    Then those that a ReLU or a residual join shares; they have no peer.
    """
    size, channels = math.prod(shape), shape[-1]
    width = DTYPES[dtype].itemsize

    def moments() -> tuple[Any, Any]:
        return ops.from_host(np.ones((2, channels), np.float32)), ops.from_host(np.ones(channels, np.float32))

    def ours(call: Callable[..., Any], count: int) -> Make:
        return lambda: bound(call, [noise(shape, DTYPES[dtype]) for _ in range(count)] + list(moments()))

    def torch_peer(call: Callable[..., Any], count: int) -> dict[str, Make]:
        def make() -> Call:
            import torch

            ones = torch.ones(channels, device="cuda")
            return bound(call, [torch_noise(shape, dtype) for _ in range(count)] + [ones])

        return {"torch-eager": make}

    count = ops.from_host(np.array([size / channels]))
    zero_sums = ops.from_host(np.zeros((2, channels)))
    passes: list[tuple[str, str, int, Make, dict[str, Make]]] = [
        ("batch_norm_stats", "forward", 1, ours(lambda x, m, g: ops.batch_norm_stats(x), 1),
         torch_peer(lambda x, g: torch_function("batch_norm_stats")(x, 1e-5), 1)),
        ("batch_norm_apply", "forward", 2, ours(lambda x, m, g: ops.batch_norm_apply(x, m, g, g), 1),
         torch_peer(lambda x, g: torch_function("batch_norm_elemt")(x, g, g, g, g, 1e-5), 1)),
        ("batch_norm_backward_stats", "backward_weight", 2,
         ours(lambda dy, x, m, g: ops.batch_norm_backward_stats(dy, x, m), 2),
         torch_peer(lambda *a: torch_function("batch_norm_backward_reduce")(*a, a[2], a[2], True, True, True), 2)),
        ("batch_norm_backward_apply", "backward_data", 3,
         ours(lambda dy, x, m, g: ops.batch_norm_backward_apply(dy, x, m, g, zero_sums, count), 2),
         torch_peer(lambda dy, x, g: torch_function("batch_norm_backward_elemt")(dy, x, g, g, g, g, g, g.int()), 2)),
        ("batch_norm_apply + add, relu", "forward", 3,
         ours(lambda x, z, m, g: ops.batch_norm_apply(x, m, g, g, add=z, relu=True), 2), {}),
        ("batch_norm_apply + batch norm, relu", "forward", 3,
         ours(lambda x, z, m, g: ops.batch_norm_apply(x, m, g, g, add=z, add_moments=m, add_gamma=g, add_beta=g,
                                                      relu=True), 2), {}),
        ("batch_norm_relu_backward_stats", "backward_weight", 2,
         ours(lambda dy, x, m, g: ops.batch_norm_relu_backward_stats(dy, x, m, g, g), 2), {}),
        ("batch_norm_relu_backward_apply", "backward_data", 3,
         ours(lambda dy, x, m, g: ops.batch_norm_relu_backward_apply(dy, x, m, g, g, zero_sums, count), 2), {}),
        ("batch_norm_join_backward_stats", "backward_weight", 4,
         ours(lambda dy, y, x, m, g: ops.batch_norm_join_backward_stats(dy, y, x, m), 3), {}),
    ]  # fmt: skip
    for name, direction, arrays, make, peers in passes:
        yield Case(f"{name}/{label}", direction, dtype, arrays * width * size, make, peers)


def within_samples(label: str, shape: tuple[int, ...], dtype: str) -> Iterator[Case]:
    """Activations beyond ReLU, gates, resizing, and what normalises each sample by itself."""
    n, height, wide, channels = shape
    size, width, kind, groups = math.prod(shape), DTYPES[dtype].itemsize, DTYPES[dtype], 32
    gate, small = (n, 1, 1, channels), (n, height // 2, wide // 2, channels)

    def case(name: str, direction: str, moved: float, call: Callable[..., Any], shapes: list[tuple[int, ...]],
             peer: Callable[..., Any], planes: bool = False) -> Case:  # fmt: skip
        """``planes``: PyTorch takes NCHW in memory only."""
        make = lambda: bound(call, [noise(s, kind) for s in shapes])  # noqa: E731
        drawn = lambda s: torch_noise(s, dtype).contiguous() if planes else torch_noise(s, dtype)  # noqa: E731
        theirs = lambda: bound(peer, [drawn(s) for s in shapes])  # noqa: E731
        return Case(f"{name}/{label}", direction, dtype, int(moved * width), make, {"torch-eager": theirs})

    for function in ("silu", "gelu", "hardswish"):
        yield case(function, "forward", 2 * size, lambda x, f=function: ops.activate(x, f), [shape],
                   lambda x, f=function: getattr(aten(), f)(x))  # fmt: skip
        yield case(function, "backward_data", 3 * size, lambda dy, x, f=function: ops.activate_backward(dy, x, f),
                   [shape] * 2, lambda dy, x, f=function: getattr(aten(), f"{f}_backward")(dy, x))  # fmt: skip
    yield case("gate", "forward", 2 * size, ops.mul, [shape, gate], lambda a, b: a * b)
    yield case("gate", "backward_data", 2 * size, ops.gate_gradient, [shape] * 2,
               lambda dy, a: (dy * a).sum((2, 3), keepdim=True))  # fmt: skip
    for mode in ("nearest", "bilinear"):
        yield case(
            f"upsample2d {mode}",
            "forward",
            1.25 * size,
            lambda x, m=mode: ops.upsample2d(x, (height, wide), m),
            [small],
            lambda x, m=mode: torch_resize(m)(x, [height, wide], *([False] * (m == "bilinear"))),
        )
        yield case(f"upsample2d {mode}", "backward_data", 1.25 * size,
                   lambda dy, m=mode: ops.upsample2d_backward(dy, small, m), [shape],
                   lambda dy, m=mode: torch_resize(f"{m}_backward")(
                       dy, [height, wide], [n, channels, *small[1:3]], *([False] * (m == "bilinear"))))  # fmt: skip

    def normalised(x: Any) -> Any:
        return ops.group_norm_apply(x, ops.group_norm_stats(x, groups, eps=1e-5), *parameters(channels))

    def group_gradients(dy: Any, x: Any) -> Any:
        gamma, out = parameters(channels)
        moments = group_moments(n, groups)
        sums = ops.group_norm_backward_stats(dy, x, moments, gamma, dgamma=out, dbeta=out)
        return ops.group_norm_backward_apply(dy, x, moments, gamma, sums)

    def layer_gradients(dy: Any, x: Any) -> Any:
        gamma, out = parameters(channels)
        moments = group_moments(n * height * wide, 1)[..., 0]
        ops.layer_norm_backward_weight(dy, x, moments, dgamma=out, dbeta=out)
        return ops.layer_norm_backward_data(dy, x, moments, gamma)

    rows = (n * height * wide, channels)
    yield case("group_norm", "forward", 3 * size, normalised, [shape],
               lambda x: torch_norms().group_norm(x, groups, *torch_parameters(channels, dtype)))  # fmt: skip
    yield case("group_norm", "backward", 5 * size, group_gradients, [shape] * 2,
               lambda dy, x: aten().native_group_norm_backward(
                   dy, x, *torch_moments((n, groups), dtype), torch_parameters(channels, dtype)[0], n, channels,
                   height * wide, groups, [True] * 3), planes=True)  # fmt: skip
    yield case("layer_norm", "forward", 2 * size, lambda x: ops.layer_norm(x, *parameters(channels), eps=1e-5), [rows],
               lambda x: torch_norms().layer_norm(x, [channels], *torch_parameters(channels, dtype)))  # fmt: skip
    yield case("layer_norm", "backward", 5 * size, layer_gradients, [rows] * 2,
               lambda dy, x: aten().native_layer_norm_backward(
                   dy, x, [channels], *torch_moments((len(x), 1), "fp32"), *torch_parameters(channels, dtype),
                   [True] * 3))  # fmt: skip
    yield case("softmax", "forward", 2 * size, ops.softmax, [rows], lambda x: x.softmax(1))
    yield case("softmax", "backward_data", 3 * size, ops.softmax_backward, [rows] * 2,
               lambda dy, y: aten()._softmax_backward_data(dy, y, 1, y.dtype))  # fmt: skip


def pooling(dtype: str) -> Iterator[Case]:
    width = DTYPES[dtype].itemsize
    shape, pooled = (BATCH, 112, 112, 64), (BATCH, 56, 56, 64)
    size, out = math.prod(shape), math.prod(pooled)
    dilated = POOL | {"dilation": (1, 1)}
    average = POOL | {"ceil_mode": False, "count_include_pad": True}
    window = [[3, 3], [2, 2], [1, 1]]

    def max_backward() -> Call:
        _, index = ops.max_pool2d(noise(shape, DTYPES[dtype]), **dilated, ceil_mode=False)
        return bound(lambda dy: ops.max_pool2d_backward(dy, index, shape, **dilated), [noise(pooled, DTYPES[dtype])])

    def torch_max_backward() -> Call:
        x = torch_noise(shape, dtype)
        _, index = aten().max_pool2d_with_indices(x, *window)
        dy = torch_noise(pooled, dtype)
        return lambda: aten().max_pool2d_with_indices_backward(dy, x, *window, [1, 1], False, index)

    def torch_avg_backward() -> Call:
        x, dy = torch_noise(shape, dtype), torch_noise(pooled, dtype)
        return lambda: aten().avg_pool2d_backward(dy, x, *window, False, True, None)

    def one(call: Callable[..., Any], of: tuple[int, ...]) -> Make:
        return lambda: bound(call, [noise(of, DTYPES[dtype])])

    def torch_one(call: Callable[..., Any], of: tuple[int, ...]) -> dict[str, Make]:
        return {"torch-eager": lambda: bound(call, [torch_noise(of, dtype)])}

    label = "3x3s2/64@112"
    yield Case(f"max_pool2d/{label}", "forward", dtype, width * (size + out) + out,
               one(lambda x: ops.max_pool2d(x, **dilated, ceil_mode=False), shape),
               torch_one(lambda x: aten().max_pool2d_with_indices(x, *window), shape))  # fmt: skip
    yield Case(f"max_pool2d/{label}", "backward_data", dtype, width * (size + out) + out, max_backward,
               {"torch-eager": torch_max_backward})  # fmt: skip
    yield Case(f"avg_pool2d/{label}", "forward", dtype, width * (size + out),
               one(lambda x: ops.avg_pool2d(x, **average), shape),
               torch_one(lambda x: aten().avg_pool2d(x, *window), shape))  # fmt: skip
    yield Case(f"avg_pool2d/{label}", "backward_data", dtype, width * (size + out),
               one(lambda dy: ops.avg_pool2d_backward(dy, shape, **average), pooled),
               {"torch-eager": torch_avg_backward})  # fmt: skip
    for name, (height, wide, channels) in {"64@56": (56, 56, 64), "2048@7": (7, 7, 2048)}.items():
        shape_, cell = (BATCH, height, wide, channels), (BATCH, 1, 1, channels)
        moved = width * (math.prod(shape_) + math.prod(cell))

        def torch_adaptive_backward(shape_: Any = shape_, cell: Any = cell) -> Call:
            x, dy = torch_noise(shape_, dtype), torch_noise(cell, dtype)
            return lambda: aten()._adaptive_avg_pool2d_backward(dy, x)

        yield Case(f"adaptive_avg_pool2d/1x1/{name}", "forward", dtype, moved,
                   one(lambda x: ops.adaptive_avg_pool2d(x, (1, 1)), shape_),
                   torch_one(lambda x: aten()._adaptive_avg_pool2d(x, [1, 1]), shape_))  # fmt: skip
        yield Case(f"adaptive_avg_pool2d/1x1/{name}", "backward_data", dtype, moved,
                   one(lambda dy, s=shape_: ops.adaptive_avg_pool2d_backward(dy, s), cell),
                   {"torch-eager": torch_adaptive_backward})  # fmt: skip


def images(dtype: str) -> Iterator[Case]:
    """Bytes of a batch of images to what the network takes."""
    shape = BATCH, 224, 224, 3
    size, width = math.prod(shape), DTYPES[dtype].itemsize

    def make() -> Call:
        pixels, scale, shift = ops.zeros(shape, np.uint8), ops.zeros(3, float32), ops.zeros(3, float32)
        return lambda: ops.normalise(pixels, scale, shift, DTYPES[dtype])

    def torch_make() -> Call:
        import torch

        pixels = torch.zeros(shape, dtype=torch.uint8, device="cuda")
        scale, shift = (torch.zeros(3, device="cuda") for _ in range(2))
        return lambda: (pixels * scale + shift).to(torch_type(dtype))

    yield Case("normalise/3@224", "forward", dtype, size * (1 + width), make, {"torch-eager": torch_make})


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


# ------------------------------------------------------------------------------------------------------------ helpers


def bound(call: Callable[..., Any], arguments: list[Any]) -> Call:
    return lambda: call(*arguments)


def channel_sum(dy: Any) -> Any:
    out = ops.empty(dy.shape[-1], float32)
    ops.channel_sum(dy, out=out)
    return out


@cache
def dropout_key() -> Any:
    return ops.from_host(np.array([1, 2, 3, 0], np.uint32))


@cache
def parameters(channels: int) -> tuple[Any, Any]:
    return ops.from_host(np.ones(channels, np.float32)), ops.from_host(np.zeros(channels, np.float32))


@cache
def group_moments(samples: int, groups: int) -> Any:
    return ops.from_host(np.ones((2, samples, groups), np.float32))


@cache
def torch_parameters(channels: int, dtype: str) -> tuple[Any, Any]:
    import torch

    return tuple(make(channels, device="cuda", dtype=torch_type(dtype)) for make in (torch.ones, torch.zeros))


@cache
def torch_moments(shape: tuple[int, ...], dtype: str) -> tuple[Any, Any]:
    import torch

    return tuple(torch.ones(shape, device="cuda", dtype=torch_type(dtype)) for _ in range(2))


def torch_norms() -> Any:
    import torch

    return torch.nn.functional


def torch_resize(mode: str) -> Callable[..., Any]:
    return getattr(aten(), f"upsample_{mode.replace('nearest', 'nearest2d').replace('bilinear', 'bilinear2d')}")


def torch_gradient(loss: Callable[..., Any], x: Any, target: Any) -> Call:
    import torch

    x = x.requires_grad_()
    return lambda: torch.autograd.grad(loss(x, target), x)


def aten() -> Any:
    import torch

    return torch.ops.aten


def torch_function(name: str) -> Callable[..., Any]:
    import torch

    return getattr(torch, name)


def torch_type(dtype: str) -> Any:
    import torch

    return torch.bfloat16 if dtype == "bf16" else torch.float32


def cases(dtypes: list[str], only: list[str]) -> list[Case]:
    found = []
    for dtype in dtypes:
        for label, size in ACTIVATIONS.items():
            found += elementwise(label, (BATCH, *size), dtype)
            found += batch_norm(label, (BATCH, *size), dtype)
        for label in ("64@56", "256@56"):
            found += within_samples(label, (BATCH, *ACTIVATIONS[label]), dtype)
        found += [*images(dtype), *pooling(dtype), *loss(dtype), *whole_losses(dtype), *optimizer(dtype)]
    return [case for case in found if not only or any(name in case.name for name in only)]


def measure(case: Case, bandwidth: float, peers: bool) -> dict[str, Any]:
    """One row of the result file."""
    if peers:
        from minidl.bench.torch_calls import time_calls
    sets = input_sets(case.least_bytes, current_device().l2_bytes)
    timing = DeviceTimer().replayed([case.make() for _ in range(sets)], BUDGET)
    row = {
        "case": case.name, "pass": case.direction, "dtype": case.dtype, "arm": "minidl",
        "ms": timing.ms, "spread": timing.spread, "floor_ms": case.least_bytes / bandwidth * 1e3,
        "least_bytes": case.least_bytes, "tb_per_s": case.least_bytes / timing.ms * 1e-9, "peers": {},
    }  # fmt: skip
    row["share"] = row["floor_ms"] / row["ms"]
    for name, make in case.peers.items() if peers else ():
        try:
            row["peers"][name] = time_calls([make() for _ in range(sets)], BUDGET, "replayed", "cuda").ms
        except RuntimeError as error:  # a peer that cannot do this leaves a gap in its column, not in ours
            print(f"{case.name} {case.direction}: {name} failed: {str(error).splitlines()[0]}", file=sys.stderr)
        release_memory()
    release_memory()
    return row


def release_memory() -> None:
    """Give both libraries' cached memory back, so that one does not starve the other."""
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


def has_torch() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def report(rows: list[dict[str, Any]], bandwidth: float) -> None:
    columns = ["case", "pass", "dtype", "ms", "spread", "TB/s", "floor ms", "share", "torch ms", "torch / ours"]
    lines = []
    for row in sorted(rows, key=lambda row: row["share"]):
        peer = row["peers"].get("torch-eager")
        beside = [f"{peer:.4f}", f"{peer / row['ms']:.2f}"] if peer else ["", ""]
        times = [f"{row['ms']:.4f}", f"{row['spread']:.1%}", f"{row['tb_per_s']:.2f}", f"{row['floor_ms']:.4f}"]
        lines.append([row["case"], row["pass"], row["dtype"], *times, f"{row['share']:.1%}", *beside])
    show(f"device copy {bandwidth * 1e-12:.2f} TB/s, worst share first", columns, lines)


def rehearse(found: list[Case]) -> None:
    """Every launcher once, without a GPU."""
    lines = []
    for case in found:
        with dry_run() as log:
            case.make()
            setup = len(log.launches)
            case.make()()
        kernels = sorted({launch.name for launch in log.launches[2 * setup :]})
        lines.append([case.name, case.direction, case.dtype, f"{case.least_bytes / 1e6:.1f}", ", ".join(kernels)])
    show("dry run", ["case", "pass", "dtype", "least MB", "kernels"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="cases whose name contains one of these")
    parser.add_argument("--dtype", choices=[*DTYPES], action="append", help="default: all")
    parser.add_argument("--no-peers", action="store_true", help="without PyTorch")
    parser.add_argument("--dry-run", action="store_true", help="call every launcher without a GPU")
    parser.add_argument("--json", metavar="PATH", help="write the result file here")
    options = parser.parse_args()
    if options.dry_run:
        with dry_run():
            found = cases(options.dtype or [*DTYPES], options.only)
        rehearse(found)
        return
    ops.require_device()
    peers = not options.no_peers and has_torch()
    bandwidth = copy_bandwidth(ops, DeviceTimer()) * 1e9
    found = cases(options.dtype or [*DTYPES], options.only)
    rows = [measure(case, bandwidth, peers) for case in found]
    report(rows, bandwidth)
    if options.json:
        content = result("bench_ops", rows)
        content["copy_bytes_per_s"] = bandwidth
        write(options.json, content)


if __name__ == "__main__":
    main()
