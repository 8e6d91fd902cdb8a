"""Weight gradient of a convolution in TF32 on Hopper's matrix units: x in planes, then conv2d_weight_tf32.cu.

Everything here is worked out from sizes: what cuts a sum must not depend on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np

from minidl.cuda.array import as_rows, empty
from minidl.cuda.channel_sum import sum_partials
from minidl.cuda.conv2d_hopper import aligned
from minidl.cuda.conv2d_plan import Convolution, argument, struct
from minidl.cuda.device import DeviceRecord
from minidl.cuda.hopper import TF32, TensorMaps, View, Views
from minidl.cuda.launch import launch
from minidl.cuda.rows import address, rows
from minidl.precision import float32
from minidl.shapes import Pair, ceil_div, round_up

__all__ = ["Planes", "Work", "applies", "backward_weight", "pays", "planes", "work"]

ARCH = (9, 0)
SPAN = 64  # channels of a block of columns
POINTS = 32  # of a stage
BOX = 32  # filters
STAGES = 4
TURNED = 256, 32  # points and channels that a block of conv2d_weight_planes.cu turns
WORKERS = 132  # multiprocessors of an H100 or H200: a constant, so that sums are cut alike on every device
WARPGROUPS = (2, 1), (1, 2)  # that share a tile, 128 x 128 sums each
# Microseconds, and what goes through in one.
_PRODUCTS, _GENERIC = 1.4e6, 62e6  # multiply-adds of a multiprocessor; of the whole device by conv2d_weight.cu
_MEMORY, _START, _SECOND, _SUMMED = 4.0e6, 2.0, 1.6, 4.9e5  # bytes; of a block; second kernel, values it adds
LEAST = 8  # stages that make a block worth while

# The structures Problem of conv2d_weight_planes.cu and of conv2d_weight_tf32.cu.
_PLANES = struct(
    "x_pitch pitch",
    "points height width channels grid_h grid_w planes_w stride_h stride_w padding_h padding_w",
)
_PROBLEM = struct(
    "",
    "steps chunks rows channels columns spans blocks kernel_w stride_h stride_w dilation_h dilation_w grid_h grid_w "
    "planes_w further_n further_h further_w tiles_m tiles_n accumulate",
)


class Planes(NamedTuple):
    """x as the kernel wants it.

    Attributes:
        grid: points per image along (h, w).
        counts: planes along (h, w), one for each remainder of a tap's offset by the stride.
        points: of all images.
    """

    grid: Pair
    counts: Pair
    points: int

    @property
    def pitch(self) -> int:
        """Elements from plane to plane."""
        return round_up(self.points, 4)


class Work(NamedTuple):
    """How the gradient is cut: warpgroups of a tile along rows and columns, and partial sums."""

    warpgroups: Pair
    parts: int

    @property
    def tile(self) -> Pair:
        return 128 * self.warpgroups[0], 128 * self.warpgroups[1]


def _axis(size: int, outputs: int, kernel: int, stride: int, padding: int, dilation: int) -> tuple[int, int]:
    """(points, planes) of one axis.

    Output p and tap r meet at p * stride - padding + r * dilation, which is point p + a of plane t, where
    ``r * dilation = a * stride + t``. There are so many points that what lies behind the last one, the next row's
    first, is padding wherever a tap reaches it.
    """
    points, planes = outputs, 1
    for tap in range(kernel):
        a, t = divmod(tap * dilation, stride)
        zeros = max(0, ceil_div(padding - t, stride))
        end = ceil_div(size + padding - t, stride)
        points = max(points, outputs + a - zeros, min(outputs + a, end))
        planes = max(planes, t + 1)
    return points, planes


@functools.lru_cache(maxsize=1024)
def planes(conv: Convolution) -> Planes:
    """The grid that dy and x are laid over."""
    axes = zip((conv.height, conv.width), conv.y_shape[1:3], conv.kernel, conv.stride, conv.padding, conv.dilation,
               strict=True)  # fmt: skip
    found = [_axis(*axis) for axis in axes]
    grid, counts = (found[0][0], found[1][0]), (found[0][1], found[1][1])
    return Planes(grid, counts, conv.images * prod(grid))


def _views(conv: Convolution, pitch: int) -> Views:
    """Of dy, walked over the grid, and of the planes."""
    laid, pixel = planes(conv), 4 * pitch
    images, height, width, filters = conv.y_shape
    corners = (0, 0), (laid.grid[1] - width, laid.grid[0] - height)
    pitches = (pixel, width * pixel, height * width * pixel)
    dy = View(TF32, (filters, width, height, images), pitches, (BOX, POINTS), corners)
    sizes = laid.points, prod(laid.counts) * conv.channels
    return Views((dy, 0), (View(TF32, sizes, (4 * laid.pitch,), (POINTS, SPAN)), 1))


@functools.lru_cache(maxsize=4096)
def applies(conv: Convolution, device: DeviceRecord) -> bool:
    """Whether the kernel can do this: compute capability 9.0, one group, channels and filters multiples of four."""
    if device.arch != ARCH or conv.groups != 1 or conv.channels % 4 or conv.out_channels % 4:
        return False
    laid = planes(conv)
    if max(laid.points, conv.images * conv.height * conv.width) >= 2**30 or prod(laid.counts) >= 2**16:
        return False
    return _views(conv, conv.out_channels).legal


def _candidates(conv: Convolution) -> Iterator[tuple[float, Work]]:
    """(microseconds, work)"""
    blocks = prod(conv.kernel) * ceil_div(conv.channels, SPAN)
    steps, gradient = ceil_div(planes(conv).points, POINTS), conv.out_channels * prod(conv.kernel) * conv.channels
    for warpgroups in WARPGROUPS:
        rows_of, columns_of = Work(warpgroups, 1).tile
        tiles = ceil_div(conv.out_channels, rows_of) * ceil_div(blocks * SPAN, columns_of)
        step = POINTS * rows_of * columns_of / _PRODUCTS
        for rounds in (1, 2, 3):
            parts = max(1, min(rounds * WORKERS // tiles, steps // LEAST))
            busy = ceil_div(tiles * parts, WORKERS) * (ceil_div(steps, parts) * step + _START)
            yield busy + (_SECOND + parts * gradient / _SUMMED if parts > 1 else 0), Work(warpgroups, parts)


@functools.lru_cache(maxsize=1024)
def work(conv: Convolution) -> Work:
    """What should finish first."""
    return min(_candidates(conv))[1]


@functools.lru_cache(maxsize=1024)
def pays(conv: Convolution) -> bool:
    """Whether it should beat conv2d_weight.cu, with the planes made first."""
    laid = planes(conv)
    made = (
        _START
        + 4 * conv.channels * (conv.images * conv.height * conv.width + prod(laid.counts) * laid.points) / _MEMORY
    )
    columns = round_up(prod(conv.kernel) * conv.channels, 128)
    return made + min(_candidates(conv))[0] < conv.pixels * round_up(conv.out_channels, 64) * columns / _GENERIC


def backward_weight(conv: Convolution, dy: Any, x: Any, out: Any, accumulate: bool) -> None:
    """Weight gradient into ``out``; takes as much memory as x besides."""
    dy, x = aligned(as_rows(dy)), aligned(as_rows(x))
    laid, cut = planes(conv), work(conv)
    planar = empty((prod(laid.counts) * conv.channels, laid.pitch), float32)
    sizes = {"grid_h": laid.grid[0], "grid_w": laid.grid[1], "planes_w": laid.counts[1]}
    problem = argument(_PLANES, conv, x_pitch=rows(x)[2], pitch=laid.pitch, points=laid.points, **sizes)
    grid = ceil_div(laid.points, TURNED[0]), ceil_div(conv.channels, TURNED[1]), prod(laid.counts)
    launch("conv2d_weight_planes", "conv2d_weight_planes_kernel", grid, 256, x, planar, problem, defines={})
    problem, blocks = _problem(conv, cut, accumulate)
    partials = out if cut.parts == 1 else empty((cut.parts, out.size), float32)
    vec_y = 1 if cut.parts == 1 and address(out) % 8 else 2
    defines = {"DTYPE": 0, "WARPGROUPS_M": cut.warpgroups[0], "WARPGROUPS_N": cut.warpgroups[1], "STAGES": STAGES,
               "CLUSTER": 1, "VEC_Y": vec_y}  # fmt: skip
    maps = TensorMaps(_views_of(conv, rows(dy)[2]), (dy, planar))
    stem, shared = "conv2d_weight_tf32", STAGES * 4 * POINTS * sum(cut.tile) + 1024
    launch(stem, f"{stem}_kernel", blocks, 384, maps, partials, problem, defines=defines, shared=shared)
    if cut.parts > 1:
        sum_partials(partials, cut.parts, out, accumulate)


@functools.lru_cache(maxsize=1024)
def _views_of(conv: Convolution, pitch: int) -> Views:
    views = _views(conv, pitch)
    assert views.legal, (conv, pitch)
    return views


@functools.lru_cache(maxsize=1024)
def _problem(conv: Convolution, cut: Work, accumulate: bool) -> tuple[np.ndarray, int]:
    """(the kernel's structure, blocks)"""
    laid, taps, spans = planes(conv), prod(conv.kernel), ceil_div(conv.channels, SPAN)
    tiles_m = ceil_div(conv.out_channels, cut.tile[0])
    tiles_n = ceil_div(taps * spans, cut.tile[1] // SPAN)
    lines, further_w = divmod(POINTS, laid.grid[1])
    further_n, further_h = divmod(lines, laid.grid[0])
    problem = argument(
        _PROBLEM,
        conv,
        steps=ceil_div(laid.points, POINTS),
        chunks=cut.parts,
        rows=conv.out_channels,
        columns=taps * conv.channels,
        spans=spans,
        blocks=taps * spans,
        grid_h=laid.grid[0],
        grid_w=laid.grid[1],
        planes_w=laid.counts[1],
        further_n=further_n,
        further_h=further_h,
        further_w=further_w,
        tiles_m=tiles_m,
        tiles_n=tiles_n,
        accumulate=accumulate and cut.parts == 1,
    )
    return problem, tiles_m * tiles_n * cut.parts
