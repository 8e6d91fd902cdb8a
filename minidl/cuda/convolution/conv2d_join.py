"""A residual sum that is made on its way into a 1x1 convolution, in one kernel.

By kernels of their own the sum is written, and read again at once. The kernel, for 16-bit types on Hopper, is in
conv2d_join.cu.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from minidl.cuda.array import as_rows, contiguous, empty
from minidl.cuda.convolution.conv2d import conv2d, conv2d_stats
from minidl.cuda.convolution.conv2d_checks import check_alike, check_operands
from minidl.cuda.convolution.conv2d_family import forced_family
from minidl.cuda.convolution.conv2d_hopper import aligned
from minidl.cuda.convolution.conv2d_plan import Convolution, argument, convolution, struct
from minidl.cuda.convolution.conv2d_walk import blocks, is_flat
from minidl.cuda.convolution.conv2d_weight_grid import ITEMSIZE
from minidl.cuda.convolution.tickets import BYTES as TICKET_BYTES
from minidl.cuda.convolution.tickets import TICKETS
from minidl.cuda.device import HOPPER, DeviceRecord, current_device
from minidl.cuda.hopper import BYTES, TensorMaps, View, Views
from minidl.cuda.launch import launch
from minidl.cuda.norm.batch_norm import batch_norm_join, batch_norm_merge, batch_norm_stats
from minidl.cuda.norm.signs import signs_pitch, signs_shape
from minidl.cuda.norm.statistics import Parts
from minidl.cuda.rows import dtype_code, rows
from minidl.precision import float32
from minidl.shapes import Pair, ceil_div

__all__ = ["conv2d_join", "conv2d_makes_join"]

PIXELS, CHANNELS = 64, 64  # of a tile; of a stage
FILTERS = (64, 128, 256)
LEAST_STAGES, MOST_STAGES = 3, 8
THREADS = 384
_BOX = 128 * PIXELS  # bytes
_STAGE = 2 * _BOX + 3 * 8 + TICKET_BYTES  # bytes: of x and add, of its barriers and its ticket
_STRIPS = 2  # tiles whose signs are in shared memory
_ROOM = 227 * 1024  # shared memory of a block

_PROBLEM = struct("", "pixels tiles share group")


class Planned(NamedTuple):
    """A launch of conv2d_join_kernel, of so many ``tiles``."""

    grid: int
    views: Views
    problem: np.ndarray
    defines: dict[str, int]
    shared: int
    tiles: int


def fits(channels: int, filters: int) -> bool:
    """Whether there are blocks for 64, 128 or 256 filters of so many channels: in multiples of 128, as many as fit into
    shared memory with their filters.
    """
    return filters in FILTERS and channels % 128 == 0 and _stages(channels, filters, True) >= LEAST_STAGES


@functools.lru_cache(maxsize=1024)
def applies(conv: Convolution, code: int, device: DeviceRecord) -> bool:
    """Whether the kernel takes this convolution's input: on compute capability 9.0, of a 16-bit type, 1x1 without
    stride and padding, in one group, where it `fits`.
    """
    if device.arch != HOPPER or not code or not is_flat(conv) or conv.groups > 1 or not 0 < conv.pixels < 2**30:
        return False
    return fits(conv.channels, conv.out_channels) and _views(conv, code, (conv.channels,) * 2).legal


def conv2d_makes_join(
    x_shape: tuple[int, int, int, int], w: Any, *, stride: Pair, padding: Pair, dilation: Pair, groups: int,
    tf32: int = False,
) -> bool:  # fmt: skip
    """Whether one kernel does what `conv2d_join` does."""
    who = "conv2d_makes_join"
    return _taken(convolution(who, x_shape, w.shape, stride, padding, dilation, groups), dtype_code(w, who))


def _taken(conv: Convolution, code: int) -> bool:
    return forced_family() in (None, "hopper") and applies(conv, code, current_device())


def conv2d_join(
    x: Any, moments: Any, gamma: Any, beta: Any, add: Any, w: Any, *, stride: Pair, padding: Pair, dilation: Pair,
    groups: int, add_moments: Any = None, add_gamma: Any = None, add_beta: Any = None, tf32: int = False,
    statistics: bool = False, finish: bool = True,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """As `minidl.cpu.conv2d.conv2d_join`; in one kernel where `conv2d_makes_join`."""
    who = "conv2d_join"
    geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    conv = convolution(who, x.shape, w.shape, **geometry)
    code = check_operands(who, x, w, None, None, x, tf32)
    check_alike(who, x, add=add)
    norms = moments, gamma, beta, add_moments, add_gamma, add_beta
    if not _taken(conv, code):
        z, signs = batch_norm_join(x, *norms[:3], add, add_moments=add_moments, add_gamma=add_gamma, add_beta=add_beta)
        if statistics:
            return z, signs, *conv2d_stats(z, w, None, **geometry, tf32=tf32, finish=finish)
        return z, signs, conv2d(z, w, None, **geometry, tf32=tf32), None
    z, signs, y, stats = _forward(conv, code, x, add, w, norms, statistics and code == 1)
    if not statistics:
        return z, signs, y, None
    if stats is None:
        return z, signs, y, batch_norm_stats(y, finish=finish)
    return z, signs, y, batch_norm_merge(stats) if finish else stats


def _forward(
    conv: Convolution, code: int, x: Any, add: Any, w: Any, norms: tuple[Any, ...], statistics: bool
) -> tuple[Any, ...]:
    """z, its signs, y, and y's statistics, which are not merged yet, or None; by the kernel."""
    x, add, w = aligned(as_rows(x)), aligned(as_rows(add)), contiguous(w)
    z, y = empty(conv.x_shape, x.dtype), empty(conv.y_shape, x.dtype)
    signs = empty(signs_shape(conv.x_shape), np.uint8)
    planned = plan(conv, code, (rows(x)[2], rows(add)[2]), norms[3] is not None, statistics, current_device())
    parts = empty((planned.tiles, 2, conv.out_channels), float32) if statistics else None
    launch(
        "conv2d_join", "conv2d_join_kernel", planned.grid, THREADS,
        TensorMaps(planned.views, (x, add, w, z, signs, y)), parts, *norms, planned.problem, TICKETS,
        defines=planned.defines, shared=planned.shared,
    )  # fmt: skip
    return z, signs, y, None if parts is None else Parts(parts, conv.pixels)


@functools.lru_cache(maxsize=1024)
def plan(
    conv: Convolution, code: int, pitches: tuple[int, int], two: bool, statistics: bool, device: DeviceRecord
) -> Planned:
    """The launch, where the kernel `applies`.

    Args:
        pitches: elements per pixel of x and add.
        two: whether ``add`` is the input of a batch norm.
        statistics: whether y's are taken, of bfloat16.
    """
    deep, tiles, stages = (
        conv.channels // CHANNELS,
        ceil_div(conv.pixels, PIXELS),
        _stages(conv.channels, conv.out_channels, two),
    )
    group = device.multiprocessors
    share = max(1, ceil_div(tiles, group))
    problem = argument(_PROBLEM, pixels=conv.pixels, tiles=tiles, share=share, group=group)
    defines = {"DTYPE": code, "TWO": int(two), "DEEP": deep, "FILTERS": conv.out_channels, "STAGES": stages}
    defines["STATISTICS"] = int(statistics)
    shared = _fixed(conv.channels, conv.out_channels, two) + stages * _STAGE
    return Planned(blocks(tiles, share, group), _views(conv, code, pitches), problem, defines, shared, tiles)


def _fixed(channels: int, filters: int, two: bool) -> int:
    """Bytes of shared memory that do not grow with the stages: of filters, y, signs, factors and barriers."""
    weights, y = channels * filters * ITEMSIZE, filters // 64 * _BOX
    signs, factors = _STRIPS * PIXELS * channels // 8, (2 + two) * channels * 4
    return weights + y + signs + factors + 8 * (_STRIPS + 1)


def _stages(channels: int, filters: int, two: bool) -> int:
    """That there is room for."""
    return min(MOST_STAGES, (_ROOM - _fixed(channels, filters, two)) // _STAGE)


def _views(conv: Convolution, code: int, pitches: tuple[int, int]) -> Views:
    """The structure Maps of conv2d_join.cu."""

    def image(channels: int, pitch: int) -> View:
        return View(code, (channels, conv.pixels), (pitch * ITEMSIZE,), (CHANNELS, PIXELS))

    c, k, signs = conv.channels, conv.out_channels, signs_pitch(conv.channels)
    filters = View(code, (c, k), (c * ITEMSIZE,), (CHANNELS, k))
    bits = View(BYTES, (signs, conv.pixels), (signs,), (signs, PIXELS), neighbours=False)
    views = image(c, pitches[0]), image(c, pitches[1]), filters, image(c, c), bits, image(k, k)
    return Views(*((view, i) for i, view in enumerate(views)))
