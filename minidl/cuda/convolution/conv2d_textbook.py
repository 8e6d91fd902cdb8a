"""Launch plans of the textbook convolutions in conv2d_textbook.cu: baselines to measure others against."""

from __future__ import annotations

import functools
from math import prod
from typing import Any

from minidl.cuda.array import as_rows, contiguous
from minidl.cuda.convolution.conv2d_plan import Convolution, Launched, argument, struct
from minidl.cuda.device import DeviceRecord, current_device
from minidl.cuda.rows import rows
from minidl.precision import float32
from minidl.shapes import ceil_div

# constants of conv2d_textbook.cu
TILE, FILTERS, CHUNK = 16, 16, 8
_THREADS = 256  # of a block of direct_kernel

# The structure Problem of conv2d_textbook.cu.
_PROBLEM = struct(
    "pitch",
    "images height width channels out_height out_width filters kernel_h kernel_w stride_h stride_w padding_h padding_w "
    "dilation_h dilation_w tiles_h tiles_w",
)


def forward(name: str, conv: Convolution, x: Any, w: Any, bias: Any, y: Any) -> None:
    """``y`` = the convolution of x with w, plus bias, by the kernel called ``name``.

    Raises:
        ValueError: where it cannot do that.
    """
    x = as_rows(x)
    planned = plan(conv, name, rows(x)[2], current_device()) if x.dtype == float32 else None
    if planned is None:
        raise ValueError(f"conv2d: the {name} family does not apply to {conv} of {x.dtype}")
    planned.start(x, contiguous(w), bias, y)


@functools.lru_cache(maxsize=1024)
def plan(conv: Convolution, name: str, pitch: int, device: DeviceRecord) -> Launched | None:
    """The launch of a forward pass in float32; None where the kernel cannot do it.

    Args:
        name: "direct", which takes every size, or "tiled", whose patch of the image must fit into shared memory.
        pitch: elements per pixel of x.
    """
    if conv.groups > 1:
        return None
    tiles = [ceil_div(size, TILE) for size in (conv.out_height, conv.out_width)]
    patch = [
        (TILE - 1) * stride + (kernel - 1) * dilation + 1
        for stride, kernel, dilation in zip(conv.stride, conv.kernel, conv.dilation, strict=True)
    ]
    problem = argument(
        _PROBLEM,
        conv,
        pitch=pitch,
        filters=conv.out_channels,
        tiles_h=tiles[0],
        tiles_w=tiles[1],
    )
    if name == "direct":
        grid = ceil_div(conv.pixels * conv.out_channels, _THREADS)
        return Launched("conv2d_textbook", "direct_kernel", grid, _THREADS, problem, {}, 0)
    shared = 4 * CHUNK * (prod(patch) + FILTERS * prod(conv.kernel))
    if shared > device.shared_per_block:
        return None
    grid = conv.images * prod(tiles), ceil_div(conv.out_channels, FILTERS)
    return Launched("conv2d_textbook", "tiled_kernel", grid, TILE * TILE, problem, {}, shared)
