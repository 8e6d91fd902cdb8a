"""Activations beyond ReLU, gates, resizing, and what normalises each sample by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np

from minidl import cuda as ops
from operations.case import (
    DTYPES,
    Case,
    aten,
    bound,
    noise,
    parameters,
    torch_noise,
    torch_norms,
    torch_parameters,
    torch_type,
)


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

    peers = {"relu6": "hardtanh", "leaky_relu": "leaky_relu", "sigmoid": "sigmoid", "tanh": "tanh"}
    more = {"relu6": (0, 6), "leaky_relu": (0.1,)}
    for function, other in peers.items():
        theirs = lambda x, f=function, o=other: getattr(aten(), o)(x, *more.get(f, ()))  # noqa: E731
        yield case(function, "forward", 2 * size, lambda x, f=function: ops.activate(x, f, 0.1), [shape], theirs)
        last = {"leaky_relu": (0.1, True)}.get(function, more.get(function, ()))
        theirs = lambda dy, y, o=other, last=last: getattr(aten(), f"{o}_backward")(dy, y, *last)  # noqa: E731
        yield case(function, "backward_data", 3 * size,
                   lambda dy, y, f=function: ops.activate_backward(dy, y, f, 0.1), [shape] * 2, theirs)  # fmt: skip
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


@cache
def group_moments(samples: int, groups: int) -> Any:
    return ops.from_host(np.ones((2, samples, groups), np.float32))


@cache
def torch_moments(shape: tuple[int, ...], dtype: str) -> tuple[Any, Any]:
    import torch

    return tuple(torch.ones(shape, device="cuda", dtype=torch_type(dtype)) for _ in range(2))


def torch_resize(mode: str) -> Callable[..., Any]:
    return getattr(aten(), f"upsample_{mode.replace('nearest', 'nearest2d').replace('bilinear', 'bilinear2d')}")
