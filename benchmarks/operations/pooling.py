"""Pooling over windows and over whole images."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from minidl import cuda as ops
from minidl.profile.timing import Call
from operations.case import BATCH, DTYPES, Case, Make, aten, bound, noise, parameters, torch_noise

POOL = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1)}


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


def pooled_norms(dtype: str) -> Iterator[Case]:
    """A batch norm under a ReLU, pooled on the way: alone (a ResNet's stem), and beside other readers (a U-Net)."""
    width, kind = DTYPES[dtype].itemsize, DTYPES[dtype]
    window, kernel = POOL | {"dilation": (1, 1)}, {"kernel": (2, 2)}

    def case(name: str, direction: str, least: int, call: Callable[..., Any], made: Callable[[], Any]) -> Case:
        return Case(name, direction, dtype, least, lambda: bound(call, made()))

    def norm(shape: tuple[int, ...]) -> tuple[Any, ...]:
        x, channels = noise(shape, kind), shape[-1]
        moments = ops.batch_norm_finalize(ops.batch_norm_stats(x), 1e-5)[0]
        return x, moments, *parameters(channels)

    def known(channels: int) -> tuple[Any, Any]:
        return ops.zeros((2, channels), np.float64), ops.from_host(np.full(1, 1e6))

    shape, pooled = (BATCH, 112, 112, 64), (BATCH, 56, 56, 64)
    size, out, name = math.prod(shape), math.prod(pooled), "batch_norm_max_pool2d/3x3s2/64@112"
    yield case(name, "forward", width * (size + 2 * out) + out,
               lambda *n: ops.batch_norm_max_pool2d(*n, **window, ceil_mode=False), lambda: norm(shape))  # fmt: skip

    def gathered() -> list[Any]:
        x, moments, gamma, beta = norm(shape)
        index = ops.batch_norm_max_pool2d(x, moments, gamma, beta, **window, ceil_mode=False)[1]
        return [noise(pooled, kind), index, x, moments, gamma, *known(64)]

    yield case(name, "backward_data", width * (2 * size + out) + out,
               lambda *a: ops.batch_norm_max_pool2d_backward(*a, **window), gathered)  # fmt: skip
    tiled, halved = (32, 256, 256, 64), (32, 128, 128, 64)
    size, out, name = math.prod(tiled), math.prod(halved), "batch_norm_max_tiles/2x2/64@256"
    yield case(name, "forward", width * (2 * size + out),
               lambda *n: ops.batch_norm_max_tiles(*n, **kernel, ceil_mode=False), lambda: norm(tiled))  # fmt: skip
    both = lambda: [noise(halved, kind), noise(tiled, kind), *norm(tiled)]  # noqa: E731
    yield case(name, "backward_weight", width * (2 * size + out),
               lambda *a: ops.batch_norm_max_tiles_backward_stats(*a, **kernel), both)  # fmt: skip
    yield case(name, "backward_data", width * (3 * size + out),
               lambda *a: ops.batch_norm_max_tiles_backward_apply(*a, **kernel),
               lambda: [*both(), *known(64)])  # fmt: skip
