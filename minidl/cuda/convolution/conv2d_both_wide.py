"""Both gradients of a 1x1 convolution to few filters under a batch norm: `conv2d_both` for wide images, whose gradient
goes on through a residual sum. The kernel, for 16-bit types on Hopper, is in conv2d_both_wide.cu.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from minidl.cuda.array import as_rows, contiguous, empty
from minidl.cuda.beside import aside
from minidl.cuda.convolution.channel_sum import sum_partials
from minidl.cuda.convolution.conv2d_hopper import aligned, is_spaced
from minidl.cuda.convolution.conv2d_plan import Convolution, argument, struct
from minidl.cuda.convolution.conv2d_walk import is_one_product
from minidl.cuda.convolution.conv2d_weight_grid import ITEMSIZE
from minidl.cuda.convolution.conv2d_weight_tiles import WORKERS
from minidl.cuda.device import HOPPER, DeviceRecord
from minidl.cuda.hopper import ROOM, TensorMaps, View, Views
from minidl.cuda.launch import launch
from minidl.cuda.rows import rows
from minidl.precision import float32
from minidl.shapes import ceil_div

# As in the kernel: pixels of a tile, tiles of a part of the sums, filters and columns of a block together, threads.
PIXELS, TILES_OF_PART, SUMMED, THREADS = 64, 4, 64 * 256, 640
STAGES = 2
MOST_COLUMNS = 4  # of blocks beside each other, where the kernel is chosen
_BOX = 128 * PIXELS  # bytes

_PROBLEM = struct("", "pixels tiles channels columns filters chunks parts height width added")


class Planned(NamedTuple):
    """A launch of a kernel for both gradients; ``chunks`` of the pixels, ``parts`` of sums that all of them leave."""

    grid: int
    views: Views
    problem: np.ndarray
    defines: dict[str, int]
    shared: int
    chunks: int
    parts: int


def fits(channels: int, filters: int) -> bool:
    """Whether there are blocks for up to 128 filters, in multiples of eight like the channels."""
    return channels % 8 == 0 and filters % 8 == 0 and 0 < filters <= 128


def pays(channels: int, filters: int) -> bool:
    """Whether the kernel `fits`, and is faster than those it stands for: on an H200 with one block of columns (64-64,
    256-64), two (256-128) and four (512-128). Further ones make all of dy once more.
    """
    return fits(channels, filters) and channels <= MOST_COLUMNS * (SUMMED // _room(filters))


def _room(filters: int) -> int:
    """Filters that a block has room for."""
    return 64 if filters <= 64 else 128


@functools.lru_cache(maxsize=1024)
def applies(conv: Convolution, code: int, device: DeviceRecord) -> bool:
    """Whether the kernel takes this convolution's gradients: on compute capability 9.0, of a 16-bit type, 1x1 without
    stride and padding, in one group, where it `fits`.
    """
    if device.arch != HOPPER or not is_one_product(conv, code):
        return False
    return fits(conv.channels, conv.out_channels) and _views(conv, code, (0,) * 6).legal


def backward(
    conv: Convolution, code: int, dz: Any, y: Any, above: tuple[Any, ...], w: Any, x: Any, add: Any | None,
    below: tuple[Any, Any] | None, other: tuple[Any, Any] | None, out: Any, accumulate: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """As `minidl.cpu.conv2d.conv2d_backward_both`, where the kernel `applies`; ``above``: moments, gamma, sums and
    count."""
    spaced = is_spaced(conv, add)
    dz, y, x = (aligned(as_rows(array)) for array in (dz, y, x))
    raw, moments = (None, None) if below is None else (aligned(as_rows(below[0])), below[1])
    other, other_moments = (None, None) if other is None else (aligned(as_rows(other[0])), other[1])
    add = None if add is None else aligned(as_rows(add))
    w, dx = contiguous(w), empty(conv.x_shape, x.dtype)
    pitches = tuple(0 if array is None else rows(array)[2] for array in (dz, y, x, raw, other, add))
    planned = plan(conv, code, pitches, 2 if spaced else int(add is not None), (raw is not None) + (other is not None))
    partials = empty((planned.chunks, out.size), float32)
    left = planned.parts, 2, conv.channels
    sums = None if raw is None else empty(left if other is None else (2, *left), float32)
    arrays = dz, y, w, x, dx, None if spaced else add, raw, other
    launch(
        "conv2d_both_wide", "conv2d_both_wide_kernel", planned.grid, THREADS, TensorMaps(planned.views, arrays),
        partials, sums, *above, moments, other_moments, add if spaced else None, planned.problem,
        defines=planned.defines, shared=planned.shared,
    )  # fmt: skip
    with aside(partials.size, partials.nbytes, partials.itemsize):  # what comes next waits for dx alone
        sum_partials(partials, planned.chunks, out, accumulate)
    return dx, sums


@functools.lru_cache(maxsize=1024)
def plan(conv: Convolution, code: int, pitches: tuple[int, ...], add: int, below: int) -> Planned:
    """The launch, where the kernel `applies`.

    Args:
        pitches: elements per pixel of dz, y, x, the inputs of batch norms below, the addend; 0 for what there is not.
        add: 0: nothing is added; 1: an array like the result; 2: one of every second pixel of every second line.
        below: batch norms under the ReLU whose output x is, and of which sums are taken.
    """
    filters = _room(conv.out_channels)
    columns, tiles = ceil_div(conv.channels, SUMMED // filters), ceil_div(conv.pixels, PIXELS)
    chunks = max(1, min(tiles, WORKERS // columns))
    parts = ceil_div(ceil_div(tiles, chunks), TILES_OF_PART)
    fixed = SUMMED * ITEMSIZE + STAGES * 2 * (filters // 64) * _BOX + 3 * filters * 4 + 8 * (3 * STAGES + 1)
    slot = (2 + below) * _BOX + 4 * 8
    slots = min(8, (ROOM - fixed) // slot)
    problem = argument(
        _PROBLEM, pixels=conv.pixels, tiles=tiles, channels=conv.channels, columns=columns, filters=conv.out_channels,
        chunks=chunks, parts=parts, height=conv.height, width=conv.width, added=pitches[5],
    )  # fmt: skip
    defines = {"DTYPE": code, "FILTERS": filters, "BELOW": below, "ADD": add, "STAGES": STAGES, "SLOTS": slots}
    views = _views(conv, code, pitches)
    return Planned(chunks * columns, views, problem, defines, fixed + slots * slot, chunks, chunks * parts)


def _views(conv: Convolution, code: int, pitches: tuple[int, ...]) -> Views:
    """The structure Maps of conv2d_both_wide.cu."""
    c, k, pixels = conv.channels, conv.out_channels, conv.pixels

    def image(channels: int, pitch: int) -> View:
        return View(code, (channels, pixels), ((pitch or channels) * ITEMSIZE,), (64, PIXELS))

    filters = View(code, (c, k), (c * ITEMSIZE,), (64, _room(k)))
    dz, y, x, raw, other, add = pitches
    images = (image(c, pitch) for pitch in (x, c, add, raw, other))
    views = image(k, dz), image(k, y), filters, *images
    return Views(*((view, i) for i, view in enumerate(views)))
