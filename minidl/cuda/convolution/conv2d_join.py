"""An array that is made of two on its way into a 1x1 convolution, in one kernel: a residual sum, or backward the
gradient of a batch norm's input.

By kernels of their own it is written, and read again at once. The kernel, for 16-bit types on Hopper, is in
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
from minidl.cuda.convolution.conv2d_walk import blocks, is_one_product
from minidl.cuda.convolution.conv2d_weight_grid import ITEMSIZE
from minidl.cuda.convolution.tickets import BYTES as TICKET_BYTES
from minidl.cuda.convolution.tickets import TICKETS
from minidl.cuda.device import HOPPER, DeviceRecord, current_device
from minidl.cuda.hopper import BYTES, ROOM, TensorMaps, View, Views
from minidl.cuda.launch import launch
from minidl.cuda.norm.batch_norm import batch_norm_join, batch_norm_merge, batch_norm_stats
from minidl.cuda.norm.signs import signs_pitch, signs_shape
from minidl.cuda.norm.statistics import Parts
from minidl.cuda.rows import dtype_code, rows
from minidl.precision import float32
from minidl.shapes import Pair, ceil_div

__all__ = ["backward", "conv2d_join", "conv2d_makes_join", "fits", "makes_backward"]

CHANNELS, COLUMNS, GROUP = 64, 64, 64  # of a stage; of a slab of the output; pixels of a group
WIDTHS, STREAMED = (64, 128, 256), 256  # channels of the output, and where the filters need not stay
# Of filters that do not stay: pieces under way, which come from the L2 cache with its latency, their bytes; and tiles
# from which on the kernel is faster than two, for with fewer multiprocessors are idle.
PIECES, PIECE, LEAST_TILES = 5, 128 * 128, 132
LEAST_STAGES, MOST_STAGES = 3, 8
_SLAB = 128 * 64  # bytes
_STRIPS, _STRIP = 2, 4  # of signs; stages of one, at most

_PROBLEM = struct("", "pixels tiles whole share group")


class Product(NamedTuple):
    """What a kernel makes and multiplies: ``depth`` channels, of which each has so many ``tables`` of factors, by
    filters to ``width``; forward signs are kept, or backward what is ``below`` is read.
    """

    depth: int
    width: int
    tables: int
    backward: bool = False
    below: bool = False

    @property
    def resident(self) -> bool | None:
        """Whether filters stay in shared memory; None where there are no blocks for it."""
        if self.width not in WIDTHS or self.depth % (2 * CHANNELS):
            return None
        ways = (() if self.backward else (True,)) + ((False,) if self.width == STREAMED else ())
        return next((way for way in ways if self.stages(way) >= LEAST_STAGES), None)

    @property
    def pixels(self) -> int:
        """Of a whole tile: a group for each warpgroup that multiplies."""
        return GROUP * _consumers(bool(self.resident))

    @property
    def sign_row(self) -> int:
        """Bytes of a strip of signs, for a pixel."""
        return min(self.depth // CHANNELS, _STRIP) * CHANNELS // 8

    def fixed(self, resident: bool) -> int:
        """Bytes of shared memory that do not grow with the stages."""
        consumers = _consumers(resident)
        filters = self.depth * self.width * ITEMSIZE if resident else PIECES * PIECE
        slabs = consumers * ((self.width // COLUMNS if resident else 1) + self.below)
        signs = 0 if self.backward else _STRIPS * GROUP * consumers * self.sign_row
        barriers = 8 * (_STRIPS + consumers + 2 * (1 if resident else PIECES))
        return filters + slabs * _SLAB + signs + self.tables * self.depth * 4 + barriers

    def stage(self, resident: bool) -> int:
        """Bytes of one, with its barriers and its ticket."""
        return 2 * _consumers(resident) * _SLAB + 3 * 8 + TICKET_BYTES

    def stages(self, resident: bool) -> int:
        """That there is room for."""
        return min(MOST_STAGES, (ROOM - self.fixed(resident)) // self.stage(resident))


def _consumers(resident: bool) -> int:
    """Warpgroups that multiply."""
    return 1 if resident else 2


class Planned(NamedTuple):
    """A launch; ``parts`` of sums that it leaves."""

    grid: int
    threads: int
    views: Views
    problem: np.ndarray
    defines: dict[str, int]
    shared: int
    parts: int


def fits(channels: int, filters: int, backward: bool = False) -> bool:
    """Whether there are blocks: forward for 64, 128 or 256 filters of channels in multiples of 128, which with less
    than 256 filters must fit into shared memory with these; backward likewise for 256 channels.
    """
    return _product(channels, filters, backward).resident is not None


def _product(channels: int, filters: int, backward: bool) -> Product:
    """That needs most room."""
    return Product(filters, channels, 3, True, True) if backward else Product(channels, filters, 3)


@functools.lru_cache(maxsize=1024)
def applies(conv: Convolution, code: int, device: DeviceRecord, backward: bool = False) -> bool:
    """Whether the kernel takes this convolution's input, or gradient: on compute capability 9.0, of a 16-bit type, 1x1
    without stride and padding, in one group, where it `fits`.
    """
    if device.arch != HOPPER or not is_one_product(conv, code):
        return False
    product = _product(conv.channels, conv.out_channels, backward)
    return product.resident is not None and _views(conv, code, product, (product.depth,) * 2).legal


def conv2d_makes_join(
    x_shape: tuple[int, int, int, int], w: Any, *, stride: Pair, padding: Pair, dilation: Pair, groups: int,
    tf32: int = 0,
) -> bool:  # fmt: skip
    """Whether one kernel does what `conv2d_join` does, and should be faster than two."""
    who = "conv2d_makes_join"
    return _taken(convolution(who, x_shape, w.shape, stride, padding, dilation, groups), dtype_code(w, who))


def _taken(conv: Convolution, code: int, backward: bool = False) -> bool:
    family, product = forced_family(), _product(conv.channels, conv.out_channels, backward)
    pays = product.resident or ceil_div(conv.pixels, product.pixels) >= LEAST_TILES
    wanted = family == "hopper" or (family is None and pays)
    return wanted and applies(conv, code, current_device(), backward)


def conv2d_join(
    x: Any, moments: Any, gamma: Any, beta: Any, add: Any, w: Any, *, stride: Pair, padding: Pair, dilation: Pair,
    groups: int, add_moments: Any = None, add_gamma: Any = None, add_beta: Any = None, tf32: int = 0,
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
    parts = empty((planned.parts, 2, conv.out_channels), float32) if statistics else None
    launch(
        "conv2d_join", "conv2d_join_kernel", planned.grid, planned.threads,
        TensorMaps(planned.views, (x, add, w, z, y, signs)), parts, *norms, planned.problem, TICKETS,
        defines=planned.defines, shared=planned.shared,
    )  # fmt: skip
    return z, signs, y, None if parts is None else Parts(parts, conv.pixels)


def makes_backward(conv: Convolution, code: int) -> bool:
    """Whether `backward` does it, and should be faster than two kernels."""
    return _taken(conv, code, True)


def backward(
    conv: Convolution, code: int, dz: Any, y: Any, above: tuple[Any, ...], w: Any, x: Any, norm: tuple[Any, ...] | None
) -> tuple[Any, Any, Any]:
    """The gradient dy of a batch norm's input, and the data gradient of the convolution below that is made of it.

    Args:
        dz, y, above, w, x, norm: as `minidl.cpu.conv2d.conv2d_backward_both` takes them, ``above`` its moments, gamma,
            sums and count.

    Returns:
        dy; dx, masked for the ReLU below where there is a ``norm``, and parts of the sums for that, or None.
    """
    dz, y, x, w = aligned(as_rows(dz)), aligned(as_rows(y)), aligned(as_rows(x)), contiguous(w)
    dy, dx = empty(conv.y_shape, x.dtype), empty(conv.x_shape, x.dtype)
    planned = plan_backward(conv, code, (rows(dz)[2], rows(y)[2]), rows(x)[2], norm is not None, current_device())
    parts = None if norm is None else empty((planned.parts, 2, conv.channels), float32)
    launch(
        "conv2d_join", "conv2d_join_backward_kernel", planned.grid, planned.threads,
        TensorMaps(planned.views, (dz, y, w, dy, dx, x)), parts, *above, *(norm or (None,) * 3), planned.problem,
        TICKETS, defines=planned.defines, shared=planned.shared,
    )  # fmt: skip
    return dy, dx, parts


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
    product = Product(conv.channels, conv.out_channels, 2 + two)
    defines = {"TWO": int(two), "BELOW": 0, "STATISTICS": int(statistics)}
    return _plan(conv, code, pitches, product, defines, 0, device)


@functools.lru_cache(maxsize=1024)
def plan_backward(
    conv: Convolution, code: int, pitches: tuple[int, int], x_pitch: int, below: bool, device: DeviceRecord
) -> Planned:
    """Likewise of `backward`; ``pitches`` of dz and y, ``below`` whether x is the input of a batch norm with a ReLU
    over it."""
    product = Product(conv.out_channels, conv.channels, 3, True, below)
    return _plan(conv, code, pitches, product, {"TWO": 0, "BELOW": int(below), "STATISTICS": 0}, x_pitch, device)


def _plan(
    conv: Convolution, code: int, pitches: tuple[int, int], product: Product, defines: dict[str, int], x_pitch: int,
    device: DeviceRecord,
) -> Planned:  # fmt: skip
    resident = product.resident
    assert resident is not None
    consumers, stages, group = _consumers(resident), product.stages(resident), device.multiprocessors
    groups = ceil_div(conv.pixels, GROUP)
    whole = _whole_tiles(groups, consumers, group)
    tiles = groups - whole * (consumers - 1)
    share = max(1, ceil_div(tiles, group))
    problem = argument(_PROBLEM, pixels=conv.pixels, tiles=tiles, whole=whole, share=share, group=group)
    defines = defines | {
        "DTYPE": code, "BACKWARD": int(product.backward), "DEEP": product.depth // CHANNELS, "WIDTH": product.width,
        "RESIDENT": int(resident), "STAGES": stages, "PIECES": PIECES,
    }  # fmt: skip
    shared = product.fixed(resident) + stages * product.stage(resident)
    views = _views(conv, code, product, pitches, x_pitch)
    return Planned(blocks(tiles, share, group), 128 * (consumers + 2), views, problem, defines, shared, groups)


def _whole_tiles(groups: int, consumers: int, multiprocessors: int) -> int:
    """Tiles that have a group for each warpgroup that multiplies; the others have one.

    Tiles of the last round that leave half of the multiprocessors idle are cut in two.
    """
    tiles = ceil_div(groups, consumers)
    last = tiles % multiprocessors
    return min(tiles - last if consumers * last <= multiprocessors else tiles, groups // consumers)


def _views(conv: Convolution, code: int, product: Product, pitches: tuple[int, int], x_pitch: int = 0) -> Views:
    """The structure Maps of conv2d_join.cu."""
    c, k = conv.channels, conv.out_channels

    def image(channels: int, pitch: int) -> View:
        return View(code, (channels, conv.pixels), (pitch * ITEMSIZE,), (COLUMNS, GROUP))

    piece = COLUMNS if product.backward else product.width if product.resident else PIECE // 128
    filters, y = View(code, (c, k), (c * ITEMSIZE,), (CHANNELS, piece)), image(product.width, product.width)
    further = image(product.width, x_pitch or product.width)
    if not product.backward:
        signs = signs_pitch(c)
        further = View(BYTES, (signs, conv.pixels), (signs,), (product.sign_row, GROUP), neighbours=False)
    x, add, z = (image(product.depth, pitch) for pitch in (*pitches, product.depth))
    return Views(*((view, i) for i, view in enumerate((x, add, filters, z, y, further))))
