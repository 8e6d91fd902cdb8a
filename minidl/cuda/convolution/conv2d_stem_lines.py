"""Convolution of few input channels, forward, by conv2d_stem_lines.cu: of 16-bit types on Hopper. Where it applies, the
kernel of conv2d_stem.py is taken by name, ``kernel(Choice("stem", "registers"))``.
"""

from __future__ import annotations

import functools
from typing import Any

from minidl.cuda.array import contiguous, empty
from minidl.cuda.convolution import conv2d_stem
from minidl.cuda.convolution.conv2d_plan import Convolution, argument, struct
from minidl.cuda.convolution.conv2d_stem import GROUP, PLACES, Geometry, StemPlan
from minidl.cuda.device import HOPPER, DeviceRecord, current_device
from minidl.cuda.hopper import TensorMaps, View, Views
from minidl.cuda.launch import launch
from minidl.cuda.norm.statistics import Parts
from minidl.cuda.rows import DTYPE
from minidl.precision import bfloat16, float32
from minidl.shapes import ceil_div, round_up

# As in the kernel: filters of a block, warpgroups that rewrite and that multiply, outputs of each, rows of pixels whose
# lines are there, rows of the image under way, values of a channel in a part of the statistics.
FILTERS, MAKING, MULTIPLYING, OUTPUTS, UNDER_WAY, AHEAD, PART = 64, 2, 2, 2, 4, 3, 256
THREADS = (MAKING + MULTIPLYING) * conv2d_stem.THREADS
WIDTHS = (32, 64, 80, 96, 112, 128)  # pixels of a tile's row, for which wgmma.cuh has products

_PROBLEM = struct(
    "",
    "height values out_height out_width columns padding_h first shift strips strip_rows segments tiles_n",
)


def applies(conv: Convolution, code: int, device: DeviceRecord) -> bool:
    """Whether there is a kernel: where windows are lines, and every row of pixels is whole tiles of one of `WIDTHS`."""
    if device.arch != HOPPER or code == 0 or not conv2d_stem.applies(conv, "forward", code):
        return False
    fits = conv2d_stem.are_lines(conv.channels, conv.out_channels, conv.kernel, conv.stride)
    width = _tile(conv).columns
    whole = width in WIDTHS and conv.out_width % width == 0 and conv.out_channels % 8 == 0
    return fits and whole and 0 < conv.pixels < 2**31


def forward(
    conv: Convolution, x: Any, w: Any, bias: Any | None, y: Any, relu: bool = False, statistics: bool = False
) -> Parts | None:
    """As `conv2d_stem.forward`, where the kernel `applies`."""
    x, w = contiguous(x), contiguous(w)
    plan, views = plan_forward(conv, DTYPE[x.dtype], conv2d_stem.row_vector(conv, x), current_device())
    taken = statistics and x.dtype == bfloat16
    parts = empty((plan.parts, 2, conv.out_channels), float32) if taken else None
    launch(
        "conv2d_stem_lines", "conv2d_stem_lines_kernel", plan.grid, THREADS,
        TensorMaps(views, (y,)), x, w, None if bias is None else contiguous(bias), parts, plan.problem,
        defines=plan.defines | {"RELU": int(relu), "STATISTICS": int(taken)}, shared=plan.shared,
    )  # fmt: skip
    return Parts(parts, y.size // conv.out_channels) if taken else None


def _tile(conv: Convolution) -> Geometry:
    """One row, as wide as a thread can hold the sums of."""
    across = ceil_div(conv.kernel[1], conv.stride[1])
    groups, segments = ceil_div(across * conv.stride[1] * conv.channels, GROUP), ceil_div(conv.out_width, WIDTHS[-1])
    return Geometry(conv, groups, 1, round_up(ceil_div(conv.out_width, segments), 16))


@functools.lru_cache(maxsize=256)
def plan_forward(conv: Convolution, code: int, vector: int, device: DeviceRecord) -> tuple[StemPlan, Views]:
    """The launch, and the structure Maps. ``vector``: values per access to x."""
    tile, filters = _tile(conv), conv.out_channels
    across, tiles_n = ceil_div(conv.kernel[1], conv.stride[1]), ceil_div(filters, FILTERS)
    blocks, start = conv.images * tile.segments * tiles_n, (conv.kernel[0] - 1) // tile.new + UNDER_WAY
    # Long strips save starts, worth so many rows each; short ones leave few multiprocessors waiting for the last.
    strips = min(
        range(1, ceil_div(conv.out_height, 8) + 1),
        key=lambda strips: ceil_div(blocks * strips, PLACES) * (ceil_div(conv.out_height, strips) + start),
    )
    strip_rows = ceil_div(conv.out_height, strips)
    strips = ceil_div(conv.out_height, strip_rows)
    line = (tile.columns - 1 + across) * 16
    tails, zeros = int(conv.kernel[1] % conv.stride[1] > 0), across % 2
    shared = (
        MULTIPLYING * OUTPUTS * tile.columns * FILTERS * 2
        + (1 + tails) * (conv.kernel[0] + (UNDER_WAY - 1) * tile.new) * line
        + zeros * tile.columns * 16
        + AHEAD * tile.new * tile.length * 2
        + 2 * UNDER_WAY * 8
    )
    parts = MULTIPLYING * ceil_div(ceil_div(strip_rows, MULTIPLYING), PART // tile.columns)
    problem = argument(_PROBLEM, **tile.sizes, columns=filters, strips=strips, strip_rows=strip_rows, tiles_n=tiles_n)
    y = View(code, (filters, conv.pixels), (filters * 2,), (FILTERS, tile.columns))
    parts *= conv.images * tile.segments * strips
    return StemPlan(blocks * strips, problem, tile.defines(code, vector), shared, 0, parts), Views((y, 0))
