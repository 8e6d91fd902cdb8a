"""Both gradients of a 1x1 convolution under a batch norm, from one read of what its output's gradient is made of.

By kernels of their own the gradient of the batch norm's input is written once and read twice, after what it is made of
was read twice over. The kernel, for 16-bit types on Hopper, is in conv2d_both.cu.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from minidl import checks
from minidl.cuda.array import as_rows, contiguous, empty
from minidl.cuda.beside import aside
from minidl.cuda.convolution import conv2d_both_wide, conv2d_hopper, conv2d_join
from minidl.cuda.convolution.channel_sum import check_sum, sum_partials
from minidl.cuda.convolution.conv2d import (
    Norm,
    conv2d_backward_data,
    conv2d_backward_data_masked,
    conv2d_backward_weight,
)
from minidl.cuda.convolution.conv2d_both_wide import Planned
from minidl.cuda.convolution.conv2d_checks import check_alike, check_operands
from minidl.cuda.convolution.conv2d_family import forced_family
from minidl.cuda.convolution.conv2d_hopper import aligned
from minidl.cuda.convolution.conv2d_plan import Convolution, argument, convolution, struct
from minidl.cuda.convolution.conv2d_walk import is_one_product
from minidl.cuda.convolution.conv2d_weight_grid import ITEMSIZE
from minidl.cuda.convolution.conv2d_weight_tiles import WORKERS
from minidl.cuda.device import HOPPER, DeviceRecord, current_device
from minidl.cuda.hopper import ROOM, TensorMaps, View, Views
from minidl.cuda.launch import launch
from minidl.cuda.norm.batch_norm import batch_norm_backward_apply
from minidl.cuda.rows import dtype_code, rows
from minidl.precision import float32
from minidl.shapes import Pair, ceil_div

__all__ = ["conv2d_backward_both", "conv2d_makes_both"]

PIXELS, COLUMNS, FILTERS = 64, 64, 128  # of a tile; filters of a stage
DEEPEST = 4  # stages of a tile, at most: of more filters the sums would not fit into registers
MOST_COLUMNS = 3  # of 64 channels, where the kernel is chosen; one more of 128 filters
THREADS = 640
_BOX = 128 * PIXELS  # bytes
_RINGS = 2  # tiles whose input, or output, is in shared memory

_PROBLEM = struct("", "pixels tiles channels columns filters chunks")


def fits(channels: int, filters: int) -> bool:
    """Whether there are blocks for up to 512 filters in multiples of 128, of channels in multiples of eight."""
    return channels % 8 == 0 and filters % FILTERS == 0 and filters <= DEEPEST * FILTERS


def pays(channels: int, filters: int) -> bool:
    """Whether the kernel `fits`, and is faster than those it stands for. Blocks of further columns, 64 channels each,
    make all of the gradient once more: on an H200 one column takes about half of the time, two 0.6 to 0.7 of it, three
    0.77 to 0.84, four 0.78 to 0.9 with 128 filters and up to 1.03 with more.
    """
    return fits(channels, filters) and channels <= (MOST_COLUMNS + (filters == FILTERS)) * COLUMNS


@functools.lru_cache(maxsize=1024)
def applies(conv: Convolution, code: int, device: DeviceRecord) -> bool:
    """Whether the kernel takes this convolution's gradients: on compute capability 9.0, of a 16-bit type, 1x1 without
    stride and padding, in one group, where it `fits`.
    """
    if device.arch != HOPPER or not is_one_product(conv, code):
        return False
    return fits(conv.channels, conv.out_channels) and _views(conv, code, (conv.channels,) * 3).legal


def conv2d_makes_both(
    x_shape: tuple[int, int, int, int], w: Any, *, stride: Pair, padding: Pair, dilation: Pair, groups: int,
    norm: bool = False, below: int = 0, add: bool = False, tf32: int = 0,
) -> bool:  # fmt: skip
    """Whether `conv2d_backward_both` has kernels of its own, which should be faster than a pass for each.

    Args:
        norm, below, add: whether it will get these; ``below`` 2: and ``other``.
    """
    who = "conv2d_makes_both"
    conv, code = convolution(who, x_shape, w.shape, stride, padding, dilation, groups), dtype_code(w, who)
    return _way(conv, code, norm, below, add) is not None


def _way(conv: Convolution, code: int, norm: bool, below: int, add: bool) -> str | None:
    """Which kernel: "deep", of conv2d_both.cu; "wide", of conv2d_both_wide.cu; "join", of conv2d_join.cu, and one for
    the filters' gradient; None: passes."""
    if not below and not add and _taken(conv, code, pays, applies):
        return "deep"
    if not norm and _taken(conv, code, conv2d_both_wide.pays, conv2d_both_wide.applies):
        return "wide"
    return "join" if not below and not add and conv2d_join.makes_backward(conv, code) else None


def _taken(conv: Convolution, code: int, pays: Callable[..., bool], applies: Callable[..., bool]) -> bool:
    family = forced_family()
    wanted = family == "hopper" or (family is None and pays(conv.channels, conv.out_channels))
    return wanted and applies(conv, code, current_device())


def conv2d_backward_both(
    dz: Any, y: Any, moments: Any, gamma: Any, sums: Any, count: Any, w: Any, x: Any, *,
    stride: Pair, padding: Pair, dilation: Pair, groups: int, out: Any, accumulate: bool = False,
    norm: Norm | None = None, below: tuple[Any, Any] | None = None, other: tuple[Any, Any] | None = None,
    add: Any | None = None, tf32: int = 0,
) -> tuple[Any, Any]:  # fmt: skip
    """As `minidl.cpu.conv2d.conv2d_backward_both`; in one kernel, or with the data gradient made on its way
    (`conv2d_join.backward`), where `conv2d_makes_both`. Of a step that is captured ``out`` may be `aside`: it is there
    after `rejoin`."""
    who = "conv2d_backward_both"
    geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    conv = convolution(who, x.shape, w.shape, **geometry)
    code = check_operands(who, dz, w, None, None if conv2d_hopper.is_spaced(conv, add) else add, x, tf32)
    check_alike(who, dz, y=y)
    check_sum(who, out)
    for name, array, shape in (("dz", dz, conv.y_shape), ("out", out, w.shape)):
        if array.shape != shape:
            raise checks.bad_shape(who, name, str(shape), array.shape)
    if below is not None:
        check_alike(who, x, raw=below[0], other=None if other is None else other[0])
    number = (below is not None) + (other is not None)
    above, way = (moments, gamma, sums, count), _way(conv, code, norm is not None, number, add is not None)
    if other is not None and (way != "wide" or below is None):
        raise checks.bad_value(who, "other", "None unless conv2d_makes_both, and with below", "a batch norm")
    if way == "deep":
        return _backward(conv, code, dz, y, above, w, x, norm, out, accumulate)
    if way == "wide":
        return conv2d_both_wide.backward(conv, code, dz, y, above, w, x, add, below, other, out, accumulate)
    if way == "join":
        dy, dx, parts = conv2d_join.backward(conv, code, dz, y, above, w, x, norm)
    else:
        dy = batch_norm_backward_apply(dz, y, *above)
    conv2d_backward_weight(dy, x, **geometry, out=out, accumulate=accumulate, norm=norm, tf32=tf32)
    if way == "join":
        return dx, parts
    if below is not None:
        return conv2d_backward_data_masked(dy, w, *below, y=x, add=add, **geometry, tf32=tf32)
    if norm is None:
        return conv2d_backward_data(dy, w, x.shape, **geometry, add=add, tf32=tf32), None
    return conv2d_backward_data_masked(dy, w, x, *norm, add=add, **geometry, tf32=tf32)


def _backward(
    conv: Convolution, code: int, dz: Any, y: Any, above: tuple[Any, ...], w: Any, x: Any, norm: Norm | None, out: Any,
    accumulate: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """By the kernel, where it `applies`; ``above``: moments, gamma, sums and count."""
    dz, y, x = (aligned(as_rows(array)) for array in (dz, y, x))
    w, dx = contiguous(w), empty(conv.x_shape, x.dtype)
    planned = plan(conv, code, (rows(dz)[2], rows(y)[2], rows(x)[2]), norm is not None)
    partials = empty((planned.chunks, out.size), float32)
    parts = None if norm is None else empty((planned.parts, 2, conv.channels), float32)
    launch(
        "conv2d_both", "conv2d_both_kernel", planned.grid, THREADS,
        TensorMaps(planned.views, (dz, y, w, x, dx)), partials, parts, *above, *(norm or (None,) * 3), planned.problem,
        defines=planned.defines, shared=planned.shared,
    )  # fmt: skip
    with aside(partials.size, partials.nbytes, partials.itemsize):  # what comes next waits for dx alone
        sum_partials(partials, planned.chunks, out, accumulate)
    return dx, parts


@functools.lru_cache(maxsize=1024)
def plan(conv: Convolution, code: int, pitches: tuple[int, int, int], below: bool) -> Planned:
    """The launch, where the kernel `applies`.

    Args:
        pitches: elements per pixel of dz, y and x.
        below: whether x is the input of a batch norm with a ReLU over it.
    """
    deep, columns, tiles = conv.out_channels // FILTERS, ceil_div(conv.channels, COLUMNS), ceil_div(conv.pixels, PIXELS)
    chunks = max(1, min(tiles, WORKERS // columns))
    fixed = deep * FILTERS * (128 + 3 * 4) + _RINGS * _BOX * (3 if below else 2)
    stages = min(4, (ROOM - fixed) // (4 * _BOX))
    barriers = 8 * (3 * stages + 3 * _RINGS + 1)
    problem = argument(
        _PROBLEM, pixels=conv.pixels, tiles=tiles, channels=conv.channels, columns=columns, filters=conv.out_channels,
        chunks=chunks,
    )  # fmt: skip
    defines = {"DTYPE": code, "BELOW": int(below), "DEEP": deep, "STAGES": stages}
    shared = fixed + stages * 4 * _BOX + barriers
    return Planned(chunks * columns, _views(conv, code, pitches), problem, defines, shared, chunks, tiles)


def _views(conv: Convolution, code: int, pitches: tuple[int, int, int]) -> Views:
    """The structure Maps of conv2d_both.cu."""

    def image(channels: int, pitch: int) -> View:
        return View(code, (channels, conv.pixels), (pitch * ITEMSIZE,), (COLUMNS, PIXELS))

    filters = View(code, (conv.channels, conv.out_channels), (conv.channels * ITEMSIZE,), (COLUMNS, FILTERS))
    k, c = conv.out_channels, conv.channels
    views = image(k, pitches[0]), image(k, pitches[1]), filters, image(c, pitches[2]), image(c, c)
    return Views(*((view, i) for i, view in enumerate(views)))
