"""Convolution and its data gradient on Hopper's matrix units, for 16-bit types and for float32 in TF32.

Two kernels: conv2d_hopper.cu, planned here, and for windows with a halo conv2d_halo.cu. Everything is worked out from
sizes and the device record: `applies` says in one place which convolutions the family takes, `choose` with which tile,
`plan` what is launched for them.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from minidl.cuda.array import contiguous, copy_into, empty
from minidl.cuda.conv2d_family import Choice
from minidl.cuda.conv2d_halo import HALO_TILES, HaloTile, halo_applies, plan_halo, windows_of
from minidl.cuda.conv2d_plan import Convolution, argument, struct
from minidl.cuda.conv2d_statistics import moments_of, sums_of
from minidl.cuda.conv2d_walk import (
    STAGE_ROW,
    Planned,
    Walk,
    blocks,
    columns_of,
    depth_of,
    filter_view,
    is_flat,
    itemsize_of,
    reads,
    walks_of,
)
from minidl.cuda.device import DeviceRecord, current_device
from minidl.cuda.hopper import TF32, TensorMaps, View, Views
from minidl.cuda.launch import launch
from minidl.cuda.rows import ACCESS, DTYPE, address, rows
from minidl.precision import bfloat16, float32
from minidl.shapes import Pair, ceil_div, round_up

__all__ = [
    "TILES",
    "Below",
    "HopperTile",
    "aligned",
    "applies",
    "candidates",
    "choose",
    "forward_with_statistics",
    "gather",
    "images_at_once",
    "masked_gradient",
    "options",
    "pays",
    "plan",
    "start",
    "takes_statistics",
]

ARCH = (9, 0)
CLASSES = 4  # parity classes of one launch, at most
TURN = 32  # filters and channels that a block of conv2d_turn.cu turns
SLAB = 64  # rows of an output buffer, of 128 bytes
WARPGROUPS = 2  # that share the rows of a tile
OFFSETS = range(255)  # pixels from the first tap to any other, along one axis
ROW_LIMIT = 2**31 - 1024  # pixels of one launch: with what the last tile hangs over they are counted in 32 bits
REACH = 2**40  # bytes of an image, as far as the engine counts

# The structures Class and Problem of conv2d_hopper.cu.
_CLASS = struct("", "tiles rows height width first_h first_w taps_h taps_w offset_h offset_w tap")
_PROBLEM = struct(
    "",
    "tiles share group tiles_n columns depth step_h step_w delta_h delta_w tap_step_h tap_step_w added",
    ("classes", _CLASS, CLASSES),
)


class Below(NamedTuple):
    """The ReLU and the batch norm below a convolution, for its data gradient.

    Attributes:
        x: the batch norm's input, (N, H, W, C).
        moments, gamma, beta: its (2, C) and (C,) float32, or None.
        y: the ReLU's output where it does not follow from ``x``, or None.
    """

    x: Any
    moments: Any
    gamma: Any
    beta: Any
    y: Any = None


NOTHING = Below(None, None, None, None)


class HopperTile(NamedTuple):
    """Rows x columns of the product that a block computes at a time.

    Attributes:
        rows, columns, stages, slabs, resident: the macros TILE_M, TILE_N, STAGES, SLABS and RESIDENT.
        step, rest: microseconds that one stage takes of a multiprocessor, and what a tile costs beside its stages; as
            measured on an H200 over the layers of ResNet-50, VGG-16 and U-Net and over 50 other shapes in bfloat16.
    """

    rows: int
    columns: int
    stages: int
    slabs: int
    resident: int
    step: float
    rest: float

    @property
    def name(self) -> str:
        """Among all tiles: ``128x256x4``, with ``*2`` for two blocks on a multiprocessor."""
        return f"{self.rows}x{self.columns}x{self.stages}" + (f"*{self.resident}" if self.resident > 1 else "")

    @property
    def fetched(self) -> int:
        """Rows of both operands that a stage takes."""
        return self.rows + self.columns

    @property
    def threads(self) -> int:
        return 384 if self.resident == 1 else 288

    @property
    def shared_bytes(self) -> int:
        return STAGE_ROW * (self.stages * (self.rows + self.columns) + 2 * self.slabs * SLAB) + 1024

    @property
    def defines(self) -> dict[str, int]:
        return {
            "TILE_M": self.rows, "TILE_N": self.columns, "STAGES": self.stages, "SLABS": self.slabs,
            "RESIDENT": self.resident,
        }  # fmt: skip


TILES = (
    HopperTile(128, 256, 4, 2, 1, 0.64, 2.4),
    HopperTile(256, 128, 4, 2, 1, 0.64, 2.4),
    HopperTile(128, 192, 4, 3, 1, 0.54, 1.3),
    HopperTile(256, 64, 4, 2, 1, 0.42, 1.0),
    HopperTile(128, 128, 5, 4, 1, 0.38, 0.9),
    HopperTile(128, 128, 3, 1, 2, 0.37, 0.55),
    HopperTile(128, 64, 4, 1, 2, 0.25, 0.33),
)

# Of the same measurements: bytes per microsecond read and written, and how much of the shorter of arithmetic and memory
# traffic the longer one does not hide; a block without another one beside it to hide its latencies, against two; what
# the second-level cache takes for a row of a stage, for each cache line more that the row lies in, and for a row that
# starts within a sector (see `reads`).
READ, WRITTEN, EXPOSED = 4.9e6, 3.5e6, 0.22
ALONE = 1.3
ROW, CROSSING, ODD = 1.0e-5, 2.8e-5, 2.0e-5
LONGEST = 150.0  # microseconds that a block should last: whatever runs beside it waits for a multiprocessor no longer


@functools.lru_cache(maxsize=1024)
def applies(conv: Convolution, code: int, backward: bool, device: DeviceRecord) -> bool:
    """Whether the family takes a convolution, wherever its arrays lie.

    It does on compute capability 9.0, for one group of a 16-bit type with channels and filters in multiples of eight,
    or of float32 (which it rounds to TF32) in multiples of four, as far as the copy engine can walk the pixels:
    paddings up to 128, strides up to 8, taps up to 254 pixels apart.
    """
    if device.arch != ARCH or conv.groups != 1 or conv.images == 0:
        return False
    vector = ACCESS // itemsize_of(code)
    if conv.channels % vector or conv.out_channels % vector:
        return False
    walks = walks_of(conv, backward)
    if any(axis.farthest not in OFFSETS for pair in walks for axis in pair):
        return False
    pitches = depth_of(conv, backward), columns_of(conv, backward)
    return all(_views(conv, code, backward, walks[i : i + CLASSES], pitches, TILES[0]).legal for i in _firsts(walks))


def pays(conv: Convolution, code: int, backward: bool) -> bool:
    """Whether the family should be faster than the generic one on a convolution that it takes.

    In TF32 it is about twice as fast where stages are full; few channels leave most of each stage empty.
    """
    depth = depth_of(conv, backward)
    return bool(code) or 2 * depth > round_up(depth, STAGE_ROW // itemsize_of(code))


def aligned(x: Any) -> Any:
    """``x`` itself where the engine can walk it, else a dense copy: rows start at multiples of 16 bytes."""
    pitch = rows(x)[2]
    image = x.shape[-3] * x.shape[-2] if x.ndim == 4 else 1
    if address(x) % ACCESS == 0 and pitch * x.itemsize % ACCESS == 0 and image * pitch * x.itemsize < REACH:
        return x
    out = empty(x.shape, x.dtype)
    copy_into(out, x)
    return out


def images_at_once(conv: Convolution) -> int:
    """Images that one launch can take."""
    return max(1, ROW_LIMIT // max(conv.height * conv.width, conv.out_height * conv.out_width))


def candidates(conv: Convolution, backward: bool, device: DeviceRecord, code: int = 1) -> list[HopperTile | HaloTile]:
    """Every tile that can do a convolution that the family takes."""
    return [*TILES, *(tile for tile in HALO_TILES if code and halo_applies(conv, backward, tile, device))]


def work(conv: Convolution, backward: bool, tile: HopperTile | HaloTile, code: int = 1) -> tuple[int, int]:
    """(tiles, stages of all tiles together)"""
    columns = ceil_div(columns_of(conv, backward), tile.columns)
    chunks, tiles, stages = ceil_div(depth_of(conv, backward), STAGE_ROW // itemsize_of(code)), 0, 0
    for h, w in walks_of(conv, backward):
        if isinstance(tile, HaloTile):
            count = ceil_div(windows_of(conv, backward, tile)[0], tile.windows) * columns
        else:
            count = ceil_div(conv.images * h.count * w.count, tile.rows) * columns
        tiles += count
        stages += count * max(h.taps * w.taps * chunks, 1)
    return tiles, stages


def microseconds(
    conv: Convolution, backward: bool, tile: HopperTile | HaloTile, device: DeviceRecord, code: int = 1
) -> tuple[float, float]:
    """Estimates in microseconds: (arithmetic with its operands alone, all), for a chip as fast as an H200.

    A stage of float32 has half the channels of one of a 16-bit type, multiplied at half the rate.
    """
    tiles, stages = work(conv, backward, tile, code)
    share = ceil_div(tiles, device.multiprocessors)
    rounds = share + (ALONE - 1 if share % tile.resident else 0)
    lines, odd = reads(depth_of(conv, backward), itemsize_of(code))
    fetched = stages * tile.fetched * (ROW + CROSSING * lines + ODD * odd)
    arithmetic = max(rounds * (stages / tiles * tile.step + tile.rest), fetched)
    x, y = (itemsize_of(code) * math.prod(shape) for shape in (conv.x_shape, conv.y_shape))
    memory = y / READ + x / WRITTEN if backward else x / READ + y / WRITTEN
    return arithmetic, max(arithmetic, memory) + EXPOSED * min(arithmetic, memory)


@functools.lru_cache(maxsize=1024)
def choose(conv: Convolution, backward: bool, device: DeviceRecord, code: int = 1) -> tuple[HopperTile | HaloTile, int]:
    """The tile that should finish first, and how many of them a block works on."""
    among = candidates(conv, backward, device, code)
    tile = min(among, key=lambda tile: microseconds(conv, backward, tile, device, code)[1])
    return tile, _shares(conv, backward, tile, device, code)[0]


def _shares(
    conv: Convolution, backward: bool, tile: HopperTile | HaloTile, device: DeviceRecord, code: int
) -> tuple[int, int]:
    """Tiles of a block that lasts as long as it should, and when all blocks run at a time."""
    rounds = ceil_div(work(conv, backward, tile, code)[0], device.multiprocessors * tile.resident)
    groups = max(1, round(microseconds(conv, backward, tile, device, code)[0] / LONGEST))
    return ceil_div(rounds, groups), rounds


def options(conv: Convolution, backward: bool, device: DeviceRecord, code: int = 1) -> list[Choice]:
    """What a tuner may try, first what `choose` says: each tile, in blocks of several lengths."""
    chosen, share = choose(conv, backward, device, code)
    found = [Choice("hopper", chosen.name, (share,))]
    for tile in candidates(conv, backward, device, code):
        shares = *_shares(conv, backward, tile, device, code), 1
        found += [Choice("hopper", tile.name, (share,)) for share in shares]
    return list(dict.fromkeys(found))


@functools.lru_cache(maxsize=1024)
def _taken(
    choice: Choice | None, conv: Convolution, backward: bool, device: DeviceRecord, code: int
) -> tuple[HopperTile | HaloTile, int] | None:
    """Tile and share of a choice; None where it names none that can do this."""
    if choice is None or len(choice.split) != 1:
        return None
    tiles = {tile.name: tile for tile in candidates(conv, backward, device, code)}
    return (tiles[choice.tile], choice.split[0]) if choice.tile in tiles else None


@functools.lru_cache(maxsize=1024)
def plan(
    conv: Convolution,
    code: int,
    backward: bool,
    pitches: Pair,
    added: bool,
    device: DeviceRecord,
    chosen: tuple[HopperTile | HaloTile, int] | None = None,
    statistics: bool = False,
    masked: int = 0,
) -> list[Planned]:
    """The launches for a convolution that the family takes: one, or several when there are more than four classes.

    Args:
        pitches: elements per pixel of the source and of the array to be added, of `aligned` arrays.
        added: whether there is one.
        chosen: the tile and the tiles per block; what `choose` says unless given.
        statistics: of a forward pass, leave those of its patches too.
        masked: of a data gradient, arrays that are read for the ReLU and the batch norm below: 0, 1 or 2.
    """
    tile, share = chosen or choose(conv, backward, device, code)
    if isinstance(tile, HaloTile):
        return [plan_halo(conv, code, backward, pitches, added, device, tile, share, statistics, masked)]
    walks, group = walks_of(conv, backward), device.multiprocessors * tile.resident
    if not added:
        pitches = pitches[0], columns_of(conv, backward)
    launches = []
    for i in _firsts(walks):
        part = walks[i : i + CLASSES]
        views = _views(conv, code, backward, part, pitches, tile, masked)
        assert views.legal, (conv, pitches)
        problem = _problem(conv, backward, part, tile, share, group, added)
        defines = {"DTYPE": code, "BACKWARD": int(backward), "FLAT": int(is_flat(conv)), "SPREAD": int(_spread(part))}
        defines |= {"STATISTICS": int(statistics), "MASKED": masked, **tile.defines}
        tiles = int(problem["tiles"][0])
        patches = tiles // int(problem["tiles_n"][0]) * WARPGROUPS
        rest = problem, defines, tile.shared_bytes, patches
        launches.append(Planned("conv2d_hopper", blocks(tiles, share, group), tile.threads, views, *rest))
    return launches


def gather(
    conv: Convolution,
    code: int,
    backward: bool,
    source: Any,
    w: Any,
    bias: Any,
    add: Any,
    output: Any,
    choice: Choice | None = None,
) -> None:
    """Forward pass or data gradient into ``output``, in as many launches as the counters of one make necessary."""
    chosen = _taken(choice, conv, backward, current_device(), code)
    if backward and not code:
        w = _turned(w, conv)
    source, w, bias, add = (None if x is None else aligned(x) for x in (source, w, bias, add))
    pitches = rows(source)[2], 0 if add is None else rows(add)[2]
    step = images_at_once(conv)
    for i in range(0, conv.images, step):
        images = slice(i, min(i + step, conv.images))
        part = conv._replace(images=images.stop - i)
        arrays = w, source[images], output[images], None if add is None else add[images], bias
        for one in plan(part, code, backward, pitches, add is not None, current_device(), chosen):
            start(one, *arrays)


def _turned(w: Any, conv: Convolution) -> Any:
    """Dense filters (K, R, S, C) as (C, R, S, K); the kernel is in conv2d_turn.cu."""
    taps = conv.kernel[0] * conv.kernel[1]
    out = empty((conv.channels, *conv.kernel, conv.out_channels), w.dtype)
    grid = ceil_div(conv.channels, TURN) * ceil_div(conv.out_channels, TURN), taps
    sizes = np.int32(conv.out_channels), np.int32(taps), np.int32(conv.channels)
    launch("conv2d_turn", "conv2d_turn_kernel", grid, (TURN, 8), w, out, *sizes, defines={"DTYPE": 0})
    return out


def takes_statistics(conv: Convolution, code: int) -> bool:
    """Whether `forward_with_statistics` does a convolution that the family takes: in bfloat16, whose squares float32
    adds up without loss, and in one launch."""
    return code == DTYPE[bfloat16] and conv.images <= images_at_once(conv)


def forward_with_statistics(
    conv: Convolution, code: int, x: Any, w: Any, bias: Any, output: Any, choice: Choice | None = None
) -> Any:
    """Forward pass into ``output``, and its statistics as of ``batch_norm_stats``; where `takes_statistics`."""
    x, w, bias = (None if array is None else aligned(array) for array in (x, w, bias))
    device = current_device()
    chosen = _taken(choice, conv, False, device, code)
    (one,) = plan(conv, code, False, (rows(x)[2], 0), False, device, chosen, statistics=True)
    partial = empty((one.patches, 2, conv.out_channels), float32)
    start(one, w, x, output, None, bias, partial)
    return moments_of(partial, math.prod(conv.y_shape[:3]))


def masked_gradient(
    conv: Convolution, code: int, dy: Any, w: Any, add: Any, below: Below, output: Any, choice: Choice | None = None
) -> Any:
    """Data gradient into ``output``, masked by the ReLU below; (R, 2, C) float32 for its batch norm, or None.

    None, and nothing is done, where it takes more than one launch.
    """
    dy, w, add = (None if array is None else aligned(array) for array in (dy, w, add))
    arrays = [aligned(contiguous(array)) for array in (below.x, below.y) if array is not None]
    pitches = rows(dy)[2], 0 if add is None else rows(add)[2]
    if conv.images > images_at_once(conv) or len(walks_of(conv, True)) > CLASSES:
        return None
    chosen = _taken(choice, conv, True, current_device(), code)
    (one,) = plan(conv, code, True, pitches, add is not None, current_device(), chosen, masked=len(arrays))
    partial = empty((one.patches, 2, conv.channels), float32)
    start(one, w, dy, output, add, None, partial, below, tuple(arrays))
    return sums_of(partial)


def start(
    planned: Planned,
    w: Any,
    source: Any,
    output: Any,
    add: Any = None,
    bias: Any = None,
    partial: Any = None,
    below: Below = NOTHING,
    arrays: tuple[Any, ...] = (),
) -> None:
    """Start a planned launch on `aligned` arrays.

    Args:
        partial: for what patches leave, (R, 2, C) float32.
        below, arrays: what a masked gradient knows of the batch norm below, and the arrays it reads of it.
    """
    maps = TensorMaps(planned.views, (w, source, output, add, *arrays))
    launch(
        planned.stem, f"{planned.stem}_kernel", planned.grid, planned.block,
        maps, bias, partial, below.moments, below.gamma, below.beta, planned.problem,
        defines=planned.defines, shared=planned.shared,
    )  # fmt: skip


def _spread(walks: list[tuple[Walk, Walk]]) -> bool:
    """Whether the output pixels of a class lie apart."""
    return max(walks[0][0].spread, walks[0][1].spread) > 1


def _firsts(walks: list[tuple[Walk, Walk]]) -> range:
    return range(0, len(walks), CLASSES)


def _problem(
    conv: Convolution,
    backward: bool,
    walks: list[tuple[Walk, Walk]],
    tile: HopperTile,
    share: int,
    group: int,
    added: bool,
) -> np.ndarray:
    columns, row = columns_of(conv, backward), conv.kernel[1]
    table = np.zeros(CLASSES, _CLASS)
    for i, (h, w) in enumerate(walks):
        count = conv.images * h.count * w.count
        walk = h.first, w.first, h.taps, w.taps, h.offset, w.offset, h.tap * row + w.tap
        table[i] = (ceil_div(count, tile.rows), count, h.count, w.count, *walk)
    h, w = walks[0]
    tiles_n = ceil_div(columns, tile.columns)
    return argument(
        _PROBLEM,
        tiles=int(table["tiles"].sum()) * tiles_n,
        share=share,
        group=group,
        tiles_n=tiles_n,
        columns=columns,
        depth=depth_of(conv, backward),
        step_h=h.step,
        step_w=w.step,
        delta_h=h.delta,
        delta_w=w.delta,
        tap_step_h=h.tap_step * row,
        tap_step_w=w.tap_step,
        added=added,
        classes=table,
    )


def _views(
    conv: Convolution,
    code: int,
    backward: bool,
    walks: list[tuple[Walk, Walk]],
    pitches: Pair,
    tile: HopperTile,
    masked: int = 0,
) -> Views:
    """The structure Maps: filter, then source, output, addend and what a masked gradient reads of each class; unused
    places repeat the first."""
    spread = _spread(walks)
    walks = [*walks, *[walks[0]] * (CLASSES - len(walks) if spread else 0)]
    columns, itemsize = columns_of(conv, backward), itemsize_of(code)
    channels = STAGE_ROW // itemsize

    def source(h: Walk, w: Walk) -> View:
        depth, pixel = depth_of(conv, backward), pitches[0] * itemsize
        if is_flat(conv):
            return View(code or TF32, (depth, conv.images * h.source * w.source), (pixel,), (channels, tile.rows))
        corners = tuple(zip(w.corners, h.corners, strict=True))
        apart = pixel, w.source * pixel, h.source * w.source * pixel
        sizes = depth, w.source, h.source, conv.images
        return View(code or TF32, sizes, apart, (channels, tile.rows), corners, (w.step, h.step))

    def output(h: Walk, w: Walk, pitch: int) -> View:
        height, width = (conv.height, conv.width) if backward else (conv.out_height, conv.out_width)
        pixel = pitch * itemsize
        if not spread:
            return View(code, (columns, conv.images * height * width), (pixel,), (channels, SLAB))
        apart = w.spread * pixel, h.spread * width * pixel, height * width * pixel
        offset = (h.start * width + w.start) * pixel
        sizes, none = (columns, w.count, h.count, conv.images), (0, 0)
        return View(code, sizes, apart, (channels, SLAB), (none, none), (1, 1), offset)

    return Views(
        (filter_view(conv, code, backward, tile.columns), 0),
        *((source(*pair), 1) for pair in walks),
        *((output(*pair, columns), 2) for pair in walks),
        *((output(*pair, pitches[1]), 3) for pair in walks),
        *((output(*pair, columns), 4 + i) for i in range(masked) for pair in walks),
    )
