"""Casts, joins, activations, the passes of a batch norm, and images on their way in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np

from minidl import cuda as ops
from minidl.precision import float32
from minidl.profile.timing import Call
from operations.case import BATCH, DTYPES, Case, Make, aten, bound, noise, torch_noise, torch_type


def elementwise(label: str, shape: tuple[int, ...], dtype: str) -> Iterator[Case]:
    """Casts, joins and activations, whose cost is the same for any shape of that size."""
    import_type, size = DTYPES[dtype], math.prod(shape)
    width = np.dtype(import_type).itemsize
    source = "bf16" if dtype == "fp32" else "fp32"

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
    gate = noise((shape[0], *(1,) * (len(shape) - 2), channels), DTYPES[dtype])
    signed = 1 / 16 if DTYPES[dtype].itemsize == 2 else 0  # in arrays

    def by_signs() -> Call:
        dy, x, z = (noise(shape, DTYPES[dtype]) for _ in range(3))
        m, g = moments()
        signs = ops.batch_norm_join(x, m, g, g, z)[1]
        return lambda: ops.batch_norm_join_backward_stats(dy, signs, x, m)

    passes: list[tuple[str, str, float, Make, dict[str, Make]]] = [
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
        ("batch_norm_backward_apply_stats", "backward_data", 4,
         ours(lambda dy, x, z, m, g: ops.batch_norm_backward_apply_stats(dy, x, m, g, zero_sums, count, z, m), 3), {}),
        ("batch_norm_join", "forward", 3 + signed,
         ours(lambda x, z, m, g: ops.batch_norm_join(x, m, g, g, z), 2), {}),
        ("batch_norm_join of two", "forward", 3 + signed,
         ours(lambda x, z, m, g: ops.batch_norm_join(x, m, g, g, z, add_moments=m, add_gamma=g, add_beta=g), 2), {}),
        ("batch_norm_relu_backward_stats", "backward_weight", 2,
         ours(lambda dy, x, m, g: ops.batch_norm_activate_backward_stats(dy, x, m, g, g), 2), {}),
        ("batch_norm_relu_backward_apply", "backward_data", 3,
         ours(lambda dy, x, m, g: ops.batch_norm_activate_backward_apply(dy, x, m, g, g, zero_sums, count), 2), {}),
        ("batch_norm_activate silu", "forward", 2,
         ours(lambda x, m, g: ops.batch_norm_activate(x, m, g, g, "silu"), 1), {}),
        ("batch_norm_silu_backward_stats", "backward_weight", 2,
         ours(lambda dy, x, m, g: ops.batch_norm_activate_backward_stats(dy, x, m, g, g, "silu"), 2), {}),
        ("batch_norm_silu_backward_apply", "backward_data", 3,
         ours(lambda dy, x, m, g: ops.batch_norm_activate_backward_apply(dy, x, m, g, g, zero_sums, count, "silu"), 2),
         {}),
        ("batch_norm_means silu", "forward", 1, ours(lambda x, m, g: ops.batch_norm_means(x, m, g, g, "silu"), 1), {}),
        ("batch_norm_gate silu", "forward", 2,
         ours(lambda x, m, g: ops.batch_norm_gate(x, m, g, g, gate, "silu"), 1), {}),
        ("batch_norm_gate_gradient silu", "backward_weight", 2,
         ours(lambda dy, x, m, g: ops.batch_norm_gate_gradient(dy, x, m, g, g, "silu"), 2), {}),
        ("batch_norm_gate_backward_apply silu", "backward_data", 3,
         ours(lambda dy, x, m, g: ops.batch_norm_gate_backward_apply(
             dy, gate, gate, x, m, g, g, zero_sums, count, "silu"), 2), {}),
        ("batch_norm_join_backward_stats", "backward_weight", 4,
         ours(lambda dy, y, x, m, g: ops.batch_norm_join_backward_stats(dy, y, x, m), 3), {}),
    ]  # fmt: skip
    if signed:
        passes.append(("batch_norm_join_backward_stats, signs", "backward_weight", 3 + signed, by_signs, {}))
    for name, direction, arrays, make, peers in passes:
        yield Case(f"{name}/{label}", direction, dtype, round(arrays * width * size), make, peers)


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


def channel_sum(dy: Any) -> Any:
    out = ops.empty(dy.shape[-1], float32)
    ops.channel_sum(dy, out=out)
    return out


@cache
def dropout_key() -> Any:
    return ops.from_host(np.array([1, 2, 3, 0], np.uint32))


def torch_function(name: str) -> Callable[..., Any]:
    import torch

    return getattr(torch, name)
