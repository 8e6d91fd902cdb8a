"""Convolution of few input channels, forward and weight gradient; kernels in conv2d_stem.cu, conv2d_stem_weight.cu and,
under a pooling, conv2d_stem_pooled.cu.

The first layer of a network: one to four channels of a 16-bit type, forward also in TF32, under a small filter. Its
data gradient, which no network asks for, and the weight gradient of float32 stay with other kernels.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from minidl.cuda.array import as_rows, contiguous, empty
from minidl.cuda.convolution.channel_sum import sum_partials
from minidl.cuda.convolution.conv2d_hopper import aligned
from minidl.cuda.convolution.conv2d_plan import Convolution, argument, struct
from minidl.cuda.device import HOPPER, DeviceRecord, current_device
from minidl.cuda.hopper import BYTES, TensorMaps, View, Views
from minidl.cuda.launch import launch
from minidl.cuda.norm.statistics import Parts
from minidl.cuda.rows import ACCESS, DTYPE, address, rows, vector_width
from minidl.precision import bfloat16, float32
from minidl.shapes import Pair, ceil_div, round_up

CHANNELS, KERNEL, STRIDE = 4, 11, 4  # at most
# The same on every device, or tiles and with them the order of a sum would differ.
SHARED = 96 * 1024
WARPS = 4
THREADS = 32 * WARPS
GROUP = 8  # values of a filter's row that a fragment takes at a time
WIDEST = 256  # output pixels of a tile's row, at most
WEIGHT_WIDEST = 128
WEIGHT_COLUMNS = 11  # fragments of columns of a warp, at most: with four of rows they fill its registers
LINE_VALUES, LINE_ROWS = 32, 7  # on Hopper, values of a filter's row in a product; rows whose sums a thread can hold
STAGES = 3  # of rows under way
# The max pooling that a weight gradient can undo on its way; rows of its image under way, and stages of its gradient.
POOLING: Mapping[str, Pair] = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1), "dilation": (1, 1)}
AHEAD, POOLED_STAGES, POOLED_THREADS = 3, (3, 4, 5, 6), 4 * THREADS
PLACES = 132  # multiprocessors that a weight gradient is cut for: the same everywhere, so that sums are cut alike
SHARING = 4  # fragments of pixels per load of a filter that is not held in registers
HELD = 176  # registers that a warp may give to the filter
AT_ONCE = 12  # steps of the depth whose fragments of pixels it holds where warps multiply together
HOPPER_SHARED = 228 * 1024  # of a multiprocessor

_FORWARD = struct(
    "",
    "height values out_height out_width columns padding_h first shift strips strip_tiles segments tiles_n",
)
_WEIGHT = struct(
    "dy_pitch",
    "strips chunk height values out_height out_width rows padding_h first shift strips_p strip_rows segments tiles_m "
    "tiles_n",
)


class StemPlan(NamedTuple):
    """A planned launch: `launch`'s arguments but for the arrays.

    Attributes:
        size: forward, words of the packed filter; of a weight gradient, the partials left to be summed.
        parts: of statistics, that warps leave.
    """

    grid: int
    problem: np.ndarray
    defines: dict[str, int]
    shared: int
    size: int
    parts: int = 0


def applies(conv: Convolution, which: str, code: int, tf32: int = 0) -> bool:
    """Whether the kernels can do a pass (``which``, as of a `Question`): by sizes and type alone.

    That is one group of at most four channels of a 16-bit type, forward also of float32 in TF32, under a filter of 2 to
    11 rows or columns, not dilated.
    """
    return (
        (which == "forward" and (code > 0 or tf32 == 1) or which == "backward_weight" and code > 0)
        and conv.groups == 1
        and conv.channels <= CHANNELS
        and 1 < max(conv.kernel) <= KERNEL
        and max(conv.stride) <= STRIDE
        and conv.dilation == (1, 1)
    )


def forward(
    conv: Convolution, x: Any, w: Any, bias: Any | None, y: Any, relu: bool = False, statistics: bool = False
) -> Parts | None:
    """``y`` = the convolution of x with w, plus bias; all of the shapes and types that `conv2d` promises.

    With ``relu``, the output of a ReLU over that. Returns its statistics where they are asked for and the kernel takes
    them: on Hopper, of bfloat16.
    """
    x, w = contiguous(x), contiguous(w)
    bias = None if bias is None else contiguous(bias)
    vectors = row_vector(conv, x), vector_width(y)
    plan = plan_forward(conv, DTYPE[x.dtype], vectors, current_device())
    taken = statistics and bool(plan.defines["WARPGROUP"]) and x.dtype == bfloat16
    parts = empty((plan.parts, 2, conv.out_channels), float32) if taken else None
    packed = empty(plan.size, np.uint32)
    sizes = np.int32(conv.out_channels), np.int32(plan.size)
    grid, defines = ceil_div(plan.size, THREADS), plan.defines | {"RELU": int(relu), "STATISTICS": int(taken)}
    launch("conv2d_stem", "conv2d_stem_pack_kernel", grid, THREADS, w, packed, *sizes, defines=defines)
    arrays = x, packed, bias, y, parts, plan.problem
    launch("conv2d_stem", "conv2d_stem_kernel", plan.grid, THREADS, *arrays, defines=defines, shared=plan.shared)
    return Parts(parts, y.size // conv.out_channels) if taken else None


def backward_weight(conv: Convolution, dy: Any, x: Any, out: Any, accumulate: bool) -> None:
    """``out`` (+)= the gradient with respect to the filters; of the shapes and types that the operation promises."""
    dy, x = as_rows(dy), contiguous(x)
    vectors = row_vector(conv, x), vector_width(dy)
    plan = plan_weight(conv, DTYPE[x.dtype], rows(dy)[2], vectors, current_device())
    partials = empty((plan.size, out.size), float32)
    arrays = dy, x, partials, plan.problem
    launch(
        "conv2d_stem_weight", "conv2d_stem_weight_kernel", plan.grid, THREADS, *arrays, defines=plan.defines,
        shared=plan.shared,
    )  # fmt: skip
    sum_partials(partials, plan.size, out, accumulate)


def makes_pooled(conv: Convolution, code: int, pooling: Mapping[str, Pair], device: DeviceRecord) -> bool:
    """Whether `backward_weight_pooled` takes a convolution: where wgmma sums the gradient of its filters, of a multiple
    of 16, and windows are those of `POOLING`."""
    if not applies(conv, "backward_weight", code) or device.arch != HOPPER or not conv.images or pooling != POOLING:
        return False
    fits = undoes_pooling(conv.channels, conv.out_channels, conv.kernel, conv.stride)
    return fits and conv.pixels < 2**31 and _in_lines(conv) is not None


def undoes_pooling(channels: int, filters: int, kernel: Pair, stride: Pair) -> bool:
    """Whether there is a kernel for `backward_weight_pooled`, if it `applies` and rows are no raggeder than tiles."""
    return filters % 16 == 0 and are_lines(channels, filters, kernel, stride)


def backward_weight_pooled(
    conv: Convolution, dz: Any, index: Any, y: Any, above: tuple[Any, ...], x: Any, out: Any, accumulate: bool
) -> None:
    """`backward_weight` of what ``batch_norm_max_pool2d_backward`` makes of dz, index, y and ``above``, its moments,
    gamma, sums and count: the same bits, in one kernel. Where it `makes_pooled`."""
    dz, index, y, x = aligned(as_rows(dz)), contiguous(index), aligned(contiguous(y)), contiguous(x)
    pooled = dz.shape[1:3], rows(dz)[2]
    plan, views = plan_pooled(conv, DTYPE[x.dtype], pooled, row_vector(conv, x), current_device())
    partials = empty((plan.size, out.size), float32)
    launch(
        "conv2d_stem_pooled", "conv2d_stem_pooled_kernel", plan.grid, POOLED_THREADS,
        TensorMaps(views, (dz, index, y)), *above, x, partials, plan.problem, defines=plan.defines, shared=plan.shared,
    )  # fmt: skip
    sum_partials(partials, plan.size, out, accumulate)


def row_vector(conv: Convolution, x: Any) -> int:
    """Values of x per access: every row of the image starts aligned for it."""
    return gcd(conv.width * conv.channels, address(x) // x.itemsize, ACCESS // x.itemsize)


class Geometry(NamedTuple):
    """Image rows in shared memory under a tile of rows x columns output pixels, as in conv2d_stem.cuh.

    Attributes:
        groups: of eight values, that a filter row is padded to.
    """

    conv: Convolution
    groups: int
    rows: int
    columns: int

    @property
    def step(self) -> int:
        return self.conv.stride[1] * self.conv.channels

    @property
    def image_rows(self) -> int:
        return (self.rows - 1) * self.conv.stride[0] + self.conv.kernel[0]

    @property
    def length(self) -> int:
        return round_up(7 + (self.columns - 1) * self.step + self.groups * GROUP, 8)

    @property
    def values(self) -> int:
        """Of one tile."""
        return self.image_rows * self.length

    @property
    def segments(self) -> int:
        return ceil_div(self.conv.out_width, self.columns)

    @property
    def tiles(self) -> int:
        """Of one image, one below the other."""
        return ceil_div(self.conv.out_height, self.rows)

    @property
    def new(self) -> int:
        """Rows of the image that a step to the next row of pixels adds."""
        return min(self.conv.stride[0], self.conv.kernel[0])

    def ring(self, row_bytes: int) -> int:
        """Bytes of the rows under a filter and of those that a step adds."""
        return (self.conv.kernel[0] + self.new) * row_bytes

    def under_way(self, tile_m: int) -> int:
        """Bytes of what STAGES steps of a weight gradient bring: new rows, and so many channels of a row of dy."""
        return STAGES * (self.columns * tile_m + self.new * self.length) * 2

    @property
    def start(self) -> tuple[int, int]:
        """First value of the leftmost tile's rows, a multiple of eight, and where the first window starts there."""
        window = -self.conv.padding[1] * self.conv.channels
        return window // 8 * 8, window % 8

    @property
    def sizes(self) -> dict[str, int]:
        conv, (first, shift) = self.conv, self.start
        return {
            "height": conv.height, "values": conv.width * conv.channels, "out_height": conv.out_height,
            "out_width": conv.out_width, "padding_h": conv.padding[0], "first": first, "shift": shift,
            "segments": self.segments,
        }  # fmt: skip

    def defines(self, code: int, vector: int) -> dict[str, int]:
        conv = self.conv
        return {
            "DTYPE": code, "CHANNELS": conv.channels, "KERNEL_H": conv.kernel[0], "KERNEL_W": conv.kernel[1],
            "STRIDE_H": conv.stride[0], "STRIDE_W": conv.stride[1], "TILE_Q": self.columns, "VEC_X": vector,
        }  # fmt: skip


def _tile(
    conv: Convolution, groups: int, multiple: int, widest: int, shared: Any, heights: tuple[int, ...] = (4, 2, 1)
) -> Geometry:
    """The widest tile, at most ``widest`` pixels, whose ``shared`` memory is there, and of such the highest."""
    tiles = (
        Geometry(conv, groups, min(height, conv.out_height), round_up(ceil_div(conv.out_width, segments), multiple))
        for segments in itertools.count(ceil_div(conv.out_width, widest))
        for height in heights
    )
    return next(tile for tile in tiles if shared(tile) <= SHARED or tile[2:] == (1, multiple))


@functools.lru_cache(maxsize=256)
def plan_forward(conv: Convolution, code: int, vectors: tuple[int, int], device: DeviceRecord) -> StemPlan:
    """The launch of conv2d_stem.cu. ``vectors``: values per access to x and y."""
    window, step = conv.kernel[1] * conv.channels, conv.stride[1] * conv.channels
    itemsize, word = (2, 2) if code else (4, 1)  # bytes of a value, values of a word
    split, together = step % word, code > 0 and device.arch == HOPPER
    lead = 0 if split else conv.padding[1] * conv.channels % word
    groups = ceil_div(window + (lead if together else split | lead), GROUP)
    steps = ceil_div(conv.kernel[0] * groups, word)
    tile_n = _filter_columns(conv.out_channels, steps, 1 + split)
    registers = steps * tile_n // 4  # that hold the filter
    resident = registers <= HELD and not together
    words = 32 * (1 + split) * registers  # of the packed filter, per column tile
    if together:
        tile_n = 32 if conv.out_channels <= 32 else 64
        registers, words = 4 * (steps if steps <= AT_ONCE else 8), ceil_div(conv.kernel[0] * groups, 8) * tile_n * 32

    def shared(tile: Geometry) -> int:
        return 4 * tile_n + 2 * itemsize * tile.values + (0 if resident else 4 * words) + 4

    tile = _tile(conv, groups, 32 if split else 16, WIDEST, shared)
    fragments = ceil_div(tile.rows * tile.columns // 16, WARPS)  # of pixels, that a warp has of a tile
    tiles_n = ceil_div(conv.out_channels, tile_n)
    # A fifth block leaves float32, whose fragments of pixels are twice as large, too few registers on older devices.
    blocks = min(_blocks(tile_n // 2 + registers + 40), 5 if code else 4) if resident else 2
    if together:  # with sums of statistics
        blocks = max(2, min(_blocks(tile_n + registers + 45), HOPPER_SHARED // (shared(tile) + 1024)))
    columns = conv.images * tile.segments * tiles_n
    strip = _strip(tile.tiles, columns, blocks * device.multiprocessors)
    strips = ceil_div(tile.tiles, strip)
    problem = argument(
        _FORWARD, **tile.sizes, columns=conv.out_channels, strips=strips, strip_tiles=strip, tiles_n=tiles_n
    )
    defines = tile.defines(code, vectors[0]) | {
        "TILE_P": tile.rows, "TILE_N": tile_n, "LEAD": lead, "RESIDENT": int(resident),
        "FRAGMENTS": 1 if resident or together else min(SHARING, fragments), "BLOCKS": blocks, "VEC_Y": vectors[1],
        "WARPGROUP": int(together),
    }  # fmt: skip
    parts = conv.images * tile.tiles * tile.segments * WARPS
    return StemPlan(columns * strips, problem, defines, shared(tile), tiles_n * words, parts)


def _filter_columns(columns: int, steps: int, kinds: int) -> int:
    """Columns of a block: 64 unless 32 are enough, or a filter in shared memory is too large or wastes half of it."""
    held = steps * 64 // 4 <= HELD
    large = 32 * kinds * steps * 64 // 4 * 4 > SHARED * 2 // 3
    return 32 if columns <= 32 or (not held and (large or 0 < columns % 64 <= 32)) else 64


def _strip(tiles: int, columns: int, resident: int) -> int:
    """How many of the ``tiles`` of each column a block should take when ``resident`` blocks run at a time.

    Long strips save starts, worth half a tile each; short ones leave few multiprocessors waiting for the last.
    """
    return min(
        range(1, tiles + 1), key=lambda strip: ceil_div(columns * ceil_div(tiles, strip), resident) * (strip + 0.5)
    )


def _blocks(registers: int) -> int:
    """Blocks per multiprocessor for a kernel that needs about so many registers."""
    return max(2, min(5, 65536 // THREADS // round_up(registers, 8)))


class _Block(NamedTuple):
    """What a block of a weight gradient sums, and of what it is made."""

    tile: Geometry
    tile_m: int
    tiles_n: int
    shared: int
    blocks: int  # per multiprocessor
    rounds: int  # of them
    defines: dict[str, int]


def _in_pairs(conv: Convolution) -> _Block:
    """For mma.sync, as in conv2d_stem_weight_pairs.cuh."""
    groups = ceil_div(conv.kernel[1] * conv.channels, GROUP)
    tile_m = 32 if conv.out_channels <= 32 else 64
    fragments = conv.kernel[0] * groups
    warps_n = 1 if fragments <= WEIGHT_COLUMNS else 2
    tiles_n = ceil_div(fragments, warps_n * WEIGHT_COLUMNS)
    columns = ceil_div(fragments, tiles_n * warps_n)

    def shared(tile: Geometry) -> int:
        behind = STAGES * round_up((tile.step // 2 + 1) * 4, 16)
        sums = warps_n * tile_m * columns * GROUP * 4 if warps_n < WARPS else 0
        return max(tile.under_way(tile_m) + behind + tile.ring(tile.length * 4), sums)

    tile = _tile(conv, groups, 16, WEIGHT_WIDEST, shared, (1,))
    ragged = int(conv.out_width % tile.columns != 0)
    defines = {"WARPGROUP": 0, "COLUMNS": columns, "WARPS_N": warps_n, "RAGGED": ragged}
    blocks = _blocks(tile_m // 16 * columns * 4 + columns + 60)
    return _Block(tile, tile_m, tiles_n, shared(tile), blocks, 2, defines)


def _in_lines(conv: Convolution) -> _Block | None:
    """For wgmma, as in conv2d_stem_weight_lines.cuh; None where windows would start elsewhere than at 16 bytes, or rows
    be ragged.
    """
    if not are_lines(conv.channels, conv.out_channels, conv.kernel, conv.stride):
        return None
    across = ceil_div(conv.kernel[1], conv.stride[1])  # groups of a window

    def shared(tile: Geometry) -> int:
        return tile.under_way(64) + _ring_of_lines(tile)

    groups = ceil_div(across * conv.stride[1] * conv.channels, GROUP)
    tile = _tile(conv, groups, 16, WEIGHT_WIDEST, shared, (1,))
    if conv.out_width % tile.columns:
        return None
    registers = conv.kernel[0] * LINE_VALUES // 2 + tile.columns // 4 + 64
    blocks = min(_blocks(registers), HOPPER_SHARED // (shared(tile) + 1024))
    return _Block(tile, 64, 1, shared(tile), blocks, 1, {"WARPGROUP": 1})


def are_lines(channels: int, filters: int, kernel: Pair, stride: Pair) -> bool:
    """Whether windows start at multiples of 16 bytes, and a thread can hold the sums."""
    if GROUP % stride[1] or channels > GROUP // stride[1] or filters <= 32:
        return False
    return ceil_div(kernel[1], stride[1]) * GROUP <= LINE_VALUES and kernel[0] <= LINE_ROWS


def _ring_of_lines(tile: Geometry) -> int:
    return tile.ring((tile.columns - 1) * 16 + 2 * LINE_VALUES)


@functools.lru_cache(maxsize=256)
def plan_pooled(
    conv: Convolution, code: int, pooled: tuple[Pair, int], vector: int, device: DeviceRecord
) -> tuple[StemPlan, Views]:
    """The launch of conv2d_stem_pooled.cu, and its structure Maps: as `plan_weight` cuts the sums.

    Args:
        pooled: rows and columns of windows, and elements from one to the next.
        vector: values per access to x.
    """
    plan, block = plan_weight(conv, code, conv.out_channels, (vector, ACCESS // 2), device), _in_lines(conv)
    assert block is not None, "refused by makes_pooled"
    tile, filters, ((down, across), pitch) = block.tile, conv.out_channels, pooled
    beside = tile.columns // 2 + 1
    windows = round_up(beside * block.tile_m * 2, 1024) + round_up(beside * block.tile_m, 1024)
    fixed = _ring_of_lines(tile) + AHEAD * tile.new * tile.length * 2
    sizes = {n: fixed + n * (tile.columns * block.tile_m * 2 + 32) + (n // 2 + 3) * windows for n in POOLED_STAGES}
    stages = max(n for n, size in sizes.items() if size + 1024 <= device.shared_per_block)

    def image(code: int, itemsize: int, pitch: int) -> View:
        step = pitch * itemsize
        box = block.tile_m, beside, 1, 1
        return View(code, (filters, across, down, conv.images), (step, step * across, step * across * down), box)

    y = View(code, (filters, conv.pixels), (filters * 2,), (block.tile_m, tile.columns))
    views = Views((image(code, 2, pitch), 0), (image(BYTES, 1, filters), 1), (y, 2))
    return plan._replace(defines=plan.defines | {"STAGES": stages}, shared=sizes[stages]), views


@functools.lru_cache(maxsize=256)
def plan_weight(
    conv: Convolution, code: int, dy_pitch: int, vectors: tuple[int, int], device: DeviceRecord
) -> StemPlan:
    """The launch of conv2d_stem_weight.cu. ``vectors``: values per access to x and dy."""
    block = (_in_lines(conv) if device.arch == HOPPER else None) or _in_pairs(conv)
    tile, tiles_n, tiles_m = block.tile, block.tiles_n, ceil_div(conv.out_channels, block.tile_m)
    wanted = max(1, block.rounds * PLACES * block.blocks // (tiles_m * tiles_n))
    stripes = conv.images * tile.segments
    strip_rows = ceil_div(conv.out_height, max(1, min(wanted // stripes, ceil_div(conv.out_height, 8))))
    strips_p = ceil_div(conv.out_height, strip_rows)
    strips = stripes * strips_p
    chunk = ceil_div(strips, wanted)
    chunks = ceil_div(strips, chunk)
    assert strips < 2**31
    problem = argument(
        _WEIGHT,
        **tile.sizes,
        dy_pitch=dy_pitch,
        strips=strips,
        chunk=chunk,
        rows=conv.out_channels,
        strips_p=strips_p,
        strip_rows=strip_rows,
        tiles_m=tiles_m,
        tiles_n=tiles_n,
    )
    defines = tile.defines(code, vectors[0]) | block.defines | {
        "TILE_M": block.tile_m, "STAGES": STAGES, "BLOCKS": block.blocks, "VEC_DY": vectors[1],
    }  # fmt: skip
    return StemPlan(chunks * tiles_m * tiles_n, problem, defines, block.shared, chunks)
