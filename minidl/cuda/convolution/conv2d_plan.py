"""What the convolution kernels are told, worked out from sizes alone: tiles, parity classes, chunks.

Pure functions of integers and of the device record; the tests state their laws without a GPU. Whatever changes the
order of a sum (the chunks of a weight gradient) depends on the problem only, never on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import product
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from minidl import checks
from minidl.cuda.device import DeviceRecord
from minidl.cuda.launch import launch
from minidl.shapes import Pair, ceil_div, conv_output_size, round_up

DEPTH_BYTES, TILE_THREADS = 128, 128  # of tile.cuh: summed values of one stage; of a block
PATCH_BYTES = 16  # where an output pixel's patch starts, in conv2d_weight.cu
BLOCKS_WANTED = 512  # constants, so that sums are cut alike on every device
WEIGHT_BLOCKS = 792  # of a weight gradient: whole rounds of 2 and of 3 blocks on each of 132 multiprocessors


class Launched(NamedTuple):
    """A planned launch: `launch`'s arguments but for the arrays. ``problem``: the kernel's structure of that name."""

    stem: str
    name: str
    grid: int | tuple[int, ...]
    block: int
    problem: np.ndarray
    defines: dict[str, int]
    shared: int

    def start(self, *arrays: Any) -> None:
        """Start it: the arrays, then the problem."""
        options = {"defines": self.defines, "shared": self.shared}
        launch(self.stem, self.name, self.grid, self.block, *arrays, self.problem, **options)


def struct(wide: str, narrow: str, *last: tuple) -> np.dtype:
    """The NumPy twin of a C structure: 64-bit fields, 32-bit fields, then whatever comes last."""
    fields = [(name, np.int64) for name in wide.split()] + [(name, np.int32) for name in narrow.split()]
    return np.dtype([*fields, *last], align=True)


def argument(dtype: np.dtype, conv: Convolution | None = None, **fields: Any) -> np.ndarray:
    """One structure with all of its fields, to be passed to a kernel by value.

    Fields that are named like one of the `Convolution.sizes` of ``conv`` need not be given.
    """
    if conv is not None:
        fields = {name: size for name, size in conv.sizes.items() if name in dtype.names} | fields
    assert set(fields) == set(dtype.names), set(fields) ^ set(dtype.names)
    value = np.zeros(1, dtype)
    for name, field in fields.items():
        value[name] = field
    value.setflags(write=False)
    return value


class Convolution(NamedTuple):
    """One convolution's sizes, whichever of its three products is asked for. Hashable: the key of the cached plans."""

    images: int
    height: int
    width: int
    channels: int
    out_height: int
    out_width: int
    out_channels: int
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int

    @property
    def x_shape(self) -> tuple[int, int, int, int]:
        return self.images, self.height, self.width, self.channels

    @property
    def y_shape(self) -> tuple[int, int, int, int]:
        return self.images, self.out_height, self.out_width, self.out_channels

    @property
    def sizes(self) -> dict[str, int]:
        """By the names that the kernels' structures give them; pairs as ``..._h`` and ``..._w``."""
        pairs = {name: getattr(self, name) for name in ("kernel", "stride", "padding", "dilation")}
        flat = {f"{name}_{axis}": size for name, pair in pairs.items() for axis, size in zip("hw", pair, strict=True)}
        names = ("images", "height", "width", "channels", "out_height", "out_width", "pixels", "groups")
        return flat | {name: getattr(self, name) for name in names}

    @property
    def pixels(self) -> int:
        """Output pixels of all images."""
        return self.images * self.out_height * self.out_width

    @property
    def depthwise(self) -> bool:
        """Each output channel sees one input channel."""
        return self.channels == self.groups > 1

    @property
    def multiplier(self) -> int:
        """Output channels per group: of a depthwise convolution, per input channel."""
        return self.out_channels // self.groups


def convolution(
    who: str,
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
) -> Convolution:
    """The sizes of a convolution of ``x_shape`` with ``w_shape``; ValueError worded for ``who`` if they do not fit."""
    return _convolution(who, tuple(x_shape), tuple(w_shape), tuple(stride), tuple(padding), tuple(dilation), groups)


@functools.lru_cache(maxsize=4096)
def _convolution(
    who: str, x_shape: tuple, w_shape: tuple, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> Convolution:
    (n, h, w, c), (k, r, s, depth) = x_shape, w_shape
    if c != depth * groups or k % groups:
        raise checks.bad_shape(who, "w", f"(K, R, S, {c} / {groups}), K a multiple of {groups}", w_shape)
    p, q = (conv_output_size(*axis) for axis in zip((h, w), (r, s), stride, padding, dilation, strict=True))
    if min(p, q) < 1:
        raise checks.bad_shape(who, "w", f"(K, R, S, C / groups) with a kernel that fits into {h} x {w}", w_shape)
    # The kernels count the pixels of one image in 32 bits, with room for a chunk beside them.
    assert max(h * w, p * q) <= 2**30, (x_shape, w_shape)
    return Convolution(n, h, w, c, p, q, k, (r, s), stride, padding, dilation, groups)


class Tile(NamedTuple):
    """Rows x columns of the product that one block computes.

    Attributes:
        rows, columns: the macros TILE_M and TILE_N.
        resident: blocks that a multiprocessor's registers hold, as the kernels' launch bounds say.
        speed: throughput of a busy multiprocessor relative to the widest tile: wide tiles re-read less.
    """

    rows: int
    columns: int
    resident: int
    speed: float

    @property
    def name(self) -> str:
        """Among the tiles of a table."""
        return f"{self.rows}x{self.columns}"

    @property
    def defines(self) -> dict[str, int]:
        return {"TILE_M": self.rows, "TILE_N": self.columns}

    def shared_bytes(self, stages: int) -> int:
        """Dynamic shared memory: the pipeline's stages, later reused for the float32 results."""
        return max(stages * DEPTH_BYTES * (self.rows + self.columns), 4 * self.rows * self.columns)

    def pipeline(self, device: DeviceRecord) -> tuple[int, int]:
        """(stages, resident blocks): two stages, and a third where it costs no resident block."""
        # The driver keeps 1 KiB of shared memory per block to itself, and the opt-in limit is 1 KiB short of the whole.
        room, patches = device.shared_per_block + 1024, DEPTH_BYTES // 2 * PATCH_BYTES
        fit = {stages: room // (self.shared_bytes(stages) + stages * patches + 1024) for stages in (2, 3)}
        resident = min(self.resident, fit[2])
        return (3 if fit[3] >= resident else 2), resident


TENSOR_TILES = (
    Tile(128, 128, 2, 1.0),
    Tile(128, 64, 3, 0.85),
    Tile(64, 128, 3, 0.85),
    Tile(64, 64, 3, 0.7),
)
EXACT_TILES = (Tile(128, 64, 2, 1.0), Tile(64, 64, 2, 0.8))
HALF_TILES = (Tile(128, 64, 2, 1.0), Tile(64, 64, 3, 0.8))  # vectors of 8 bytes: twice the copies
NARROW_TILES = (Tile(64, 64, 2, 1.0),)  # below that copying, not the product, sets the pace


@functools.lru_cache(maxsize=4096)
def choose_tile(
    tiles: tuple[Tile, ...], rows: tuple[int, ...], columns: int, repeats: int, device: DeviceRecord, wanted: str = ""
) -> Tile:
    """The tile of that name, if there is such a one here; else the one that should finish first.

    Args:
        tiles: the candidates.
        rows: rows of each of several products (parity classes) of one launch.
        columns: columns of each product.
        repeats: how often each occurs (groups times chunks).
        device: its multiprocessors and shared memory bound the blocks that run at a time.
    """

    def time(tile: Tile) -> tuple[float, int]:
        blocks = sum(ceil_div(m, tile.rows) for m in rows) * ceil_div(columns, tile.columns) * repeats
        resident = tile.pipeline(device)[1]
        share = ceil_div(blocks, device.multiprocessors)
        last = share % resident
        # Fewer blocks than a multiprocessor holds run faster than all together, but not in proportion.
        rounds = share + (resident - last) / 2 if last else share
        # A block always alone on its multiprocessor has nobody to hide its latencies behind.
        speed = tile.speed * (1.0 if resident > 1 else 0.7)
        return rounds * tile.rows * tile.columns / speed, -tile.rows * tile.columns

    fitting = [tile for tile in tiles if tile.pipeline(device)[1]]
    named = [tile for tile in fitting if tile.name == wanted]
    return min(named or fitting, key=time)


class AxisClass(NamedTuple):
    """The input coordinates ``start + i * stride`` of one axis and the filter taps that reach them.

    Its tap j is the filter's ``first + j * tap_step``, and reads the output gradient at ``i + offset - j * delta``,
    where ``tap_step = stride / gcd(stride, dilation)`` and ``delta = dilation / gcd(stride, dilation)``.
    """

    start: int
    count: int
    taps: int
    first: int
    offset: int


def axis_classes(size: int, kernel: int, stride: int, padding: int, dilation: int) -> tuple[AxisClass, ...]:
    """How the data gradient of a strided convolution falls apart along one axis, by ``coordinate % stride``.

    Output p and tap r meet at input ``h = p * stride - padding + r * dilation``; so h sees only the taps with
    ``(h + padding - r * dilation) % stride == 0``, which are the same for all h of one class.
    """
    step = stride // gcd(stride, dilation)
    classes = []
    for start in range(min(stride, size)):
        meets = (r for r in range(min(step, kernel)) if (start + padding - r * dilation) % stride == 0)
        first = next(meets, kernel)
        offset = (start + padding - first * dilation) // stride if first < kernel else 0
        classes.append(AxisClass(start, ceil_div(size - start, stride), ceil_div(kernel - first, step), first, offset))
    return tuple(classes)


def parity_classes(conv: Convolution) -> list[tuple[AxisClass, AxisClass]]:
    """The (height, width) classes of the input's pixels, those with most taps first: long blocks must not come last."""
    axes = zip((conv.height, conv.width), conv.kernel, conv.stride, conv.padding, conv.dilation, strict=True)
    return sorted(product(*(axis_classes(*axis) for axis in axes)), key=lambda pair: -pair[0].taps * pair[1].taps)


@functools.lru_cache(maxsize=4096)
def pixel_chunk(pixels: int, tiles: int) -> int:
    """Pixels of one partial sum of a weight gradient: enough chunks to fill a GPU, few enough to keep partials small.

    Args:
        pixels: output pixels to be summed, at least 1.
        tiles: blocks that one chunk occupies.
    """
    wanted = max(1, WEIGHT_BLOCKS // tiles)
    chunk = max(256, ceil_div(pixels, wanted))
    # 32 bits count the pixels of a chunk.
    return min(round_up(chunk, 32), 2**29)


def lanes_along(channels: int, vec: int, itemsize: int) -> int:
    """Threads side by side along the channels, a power of two: at most 128 bytes, a warp, and what is needed."""
    most = min(32, 128 // (vec * itemsize))
    lanes = 1
    while lanes < most and lanes * vec < channels:
        lanes *= 2
    return lanes
