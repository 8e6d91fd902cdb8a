"""Launch plans of conv2d_grouped.cu: convolutions in groups of few channels, 16-bit types."""

from __future__ import annotations

import functools
from math import gcd, prod
from typing import Any, NamedTuple

import numpy as np

from minidl.cuda.array import as_rows, contiguous, empty
from minidl.cuda.convolution.channel_sum import sum_partials
from minidl.cuda.convolution.conv2d_plan import Convolution, Launched, argument, struct
from minidl.cuda.convolution.depthwise_strip import STRIPS, ages, aligned, place_of
from minidl.cuda.device import DeviceRecord
from minidl.cuda.rows import rows
from minidl.precision import float32
from minidl.shapes import ceil_div

OCTET = 8  # base columns
WARPS = 2, 2  # along the pixels and along the channels
PAIRS = 2  # of octets, of a warp of a weight gradient
OCTETS = 2 * WARPS[0]  # of a block, as many in both kernels
STAGES = 4
HELD = 136  # words of filters and sums that a thread may hold
BLOCKS = 264  # that run at a time on an H200
WEIGHT_BLOCKS = 264  # of a weight gradient
SUMS_HELD = 150  # words of sums and gradients that a thread of it may hold
COPIES = 8  # of a thread for each row
FULL = 48  # channels of a group that fill the tiles of the generic kernel
# Rows of the generic kernel's tiles, which have a group each, and how many run at a time: of 490 and 1400 pixels in
# four groups of 16 channels it takes 4 to 5 us on an H200, this one 6 to 10.
TILE, ROUND = 64, 132
NARROW = 8  # of which Hopper's tiles multiply mostly zeros in weight gradients

_SIZES = tuple((name, np.int32) for name in ("channels", "out_channels", "slabs"))
_ITEMS = struct("octets count share", "strips runs run")
_PROBLEM = struct("source_pitch add_pitch", "", ("items", _ITEMS), *_SIZES, ("at", STRIPS))
_WEIGHT = struct("dy_pitch x_pitch", "", ("items", _ITEMS), *_SIZES, ("at", STRIPS))


class Units(NamedTuple):
    """How groups are put on the matrix units.

    Attributes:
        group_in, group_out: channels of a group of source and output.
        bundle: groups of a unit.
        warp_units, warp_blocks: units of a warp, and blocks of eight outputs of each.
    """

    group_in: int
    group_out: int
    bundle: int
    warp_units: int
    warp_blocks: int

    @property
    def chunks(self) -> int:
        """Of eight channels of the source."""
        return ceil_div(self.bundle * self.group_in, 8)

    @property
    def sharers(self) -> int:
        """Warps that share a unit."""
        return ceil_div(self.bundle * self.group_out, 8) // self.warp_blocks

    @property
    def units(self) -> int:
        """Of a block."""
        return WARPS[1] * self.warp_units // self.sharers

    @property
    def defines(self) -> dict[str, int]:
        return {name.upper(): value for name, value in self._asdict().items()}


def applies(conv: Convolution, code: int, backward: bool, device: DeviceRecord) -> bool:
    """Whether the kernel does this: 16-bit types, several groups of several channels, no dilation, filters that fit
    into registers, pixels under them into shared memory, of which long strides take much."""
    units = _units(conv, backward) if _suits(conv, code) else None
    return units is not None and _shared_bytes(conv, backward, units) <= device.shared_per_block


def applies_to_weight(conv: Convolution, code: int, device: DeviceRecord) -> bool:
    """As `applies`, to the weight gradient."""
    sets = _sets(conv) if _suits(conv, code) else None
    return sets is not None and _weight_shared_bytes(conv, sets) <= device.shared_per_block


def _suits(conv: Convolution, code: int) -> bool:
    undilated = all(step == 1 or taps == 1 for step, taps in zip(conv.dilation, conv.kernel, strict=True))
    return code in (1, 2) and conv.groups > 1 and not conv.depthwise and undilated


def pays(conv: Convolution, weight: bool, hopper: bool) -> bool:
    """Whether it should beat the generic kernel, whose tiles have 64 columns (measured at 32 and at 80 channels) but
    which starts sooner, and Hopper's, where these can do it. Weight gradients on an H200, 27 shapes: of 8 channels 45
    us against 50 and 79 against 74, of 16 and 32 always slower, 1.2 to 3 times.
    """
    width = max(conv.channels, conv.out_channels) // conv.groups
    if not weight and conv.groups * ceil_div(conv.pixels, TILE) <= ROUND:
        return False
    return width <= FULL and (not hopper or (weight and width <= NARROW))


@functools.lru_cache(maxsize=1024)
def _units(conv: Convolution, backward: bool) -> Units | None:
    """None where the filters of no division fit into registers, or copies would be too narrow."""
    inner, outer = conv.channels // conv.groups, conv.out_channels // conv.groups
    if backward:
        inner, outer = outer, inner
    bundle = max(1, 8 // inner)
    chunks, blocks = ceil_div(bundle * inner, 8), ceil_div(bundle * outer, 8)
    taps, spread = prod(conv.kernel), prod(conv.stride) if backward else 1
    found = []
    for warp_units in (1, 2, 4):
        for warp_blocks in range(1, min(blocks, 8) + 1):
            units = Units(inner, outer, bundle, warp_units, warp_blocks)
            if blocks % warp_blocks or (warp_blocks < blocks and warp_units > 1):
                continue
            if WARPS[1] * warp_units % units.sharers:
                continue
            sums = warp_units * warp_blocks
            held = taps * sums * chunks + ages(conv) * spread * sums * 4
            if held <= HELD and _copies(conv, backward, units) <= COPIES:
                found.append(units)
    # As many outputs as there is room for; of those, whole vectors of outputs.
    return max(found, key=lambda one: (min(one.warp_units * one.warp_blocks, 4), -one.warp_units), default=None)


def _vector_x(conv: Convolution, backward: bool, units: Units) -> int:
    channels = conv.out_channels if backward else conv.channels
    return gcd(units.bundle * units.group_in, channels, 8)


def _copies(conv: Convolution, backward: bool, units: Units) -> int:
    vector = _vector_x(conv, backward, units)
    if vector < 2:
        return COPIES + 1
    step = 1 if backward else conv.stride[1]
    sight = ceil_div(conv.kernel[1], conv.stride[1]) if backward else conv.kernel[1]
    pixels = (OCTET - 1) * step + sight
    each = units.units * units.bundle * units.group_in // vector
    return ceil_div(OCTETS * pixels * each, 32 * prod(WARPS))


def gather(conv: Convolution, code: int, backward: bool, source: Any, w: Any, bias: Any, add: Any, output: Any) -> None:
    """Forward pass or data gradient into ``output``; ``source`` and ``add`` are rows, ``w`` and ``bias`` dense."""
    source = aligned(source, _vector_x(conv, backward, _units(conv, backward)))
    pitches = rows(source)[2], 0 if add is None else rows(add)[2]
    plan(conv, code, backward, pitches).start(source, contiguous(w), bias, add, output)


@functools.lru_cache(maxsize=1024)
def plan(conv: Convolution, code: int, backward: bool, pitches: tuple[int, int]) -> Launched:
    """The launch where the kernel `applies`.

    Args:
        code: the macro DTYPE.
        pitches: elements per pixel of the source and of the array to be added.
    """
    units = _units(conv, backward)
    channels, out_channels = conv.channels, conv.out_channels
    if backward:
        channels, out_channels = out_channels, channels
    slabs = ceil_div(conv.groups, units.bundle * units.units)
    items, blocks = _items(conv, backward, slabs, BLOCKS)
    outer = units.bundle * units.group_out
    vec_y = 8 if outer % 8 == 0 and out_channels % 8 == 0 else 2 - outer % 2
    problem = argument(
        _PROBLEM,
        source_pitch=pitches[0],
        add_pitch=pitches[1],
        items=items,
        channels=channels,
        out_channels=out_channels,
        slabs=slabs,
        at=tuple(place_of(conv, backward).values()),
    )
    defines = {
        "DTYPE": code, "KERNEL_H": conv.kernel[0], "KERNEL_W": conv.kernel[1], "STRIDE_H": conv.stride[0],
        "STRIDE_W": conv.stride[1], "BACKWARD": int(backward), "WARPS_M": WARPS[0], "WARPS_N": WARPS[1],
        "STAGES": STAGES, "VEC_X": _vector_x(conv, backward, units), "VEC_Y": vec_y,
    }  # fmt: skip
    grid, shared = slabs * blocks, _shared_bytes(conv, backward, units)
    name, threads = "conv2d_grouped_kernel", 32 * prod(WARPS)
    return Launched("conv2d_grouped", name, grid, threads, problem, defines | units.defines, shared)


def _shared_bytes(conv: Convolution, backward: bool, units: Units) -> int:
    (step_h, step_w), sight = conv.stride, conv.kernel[1]
    if backward:
        step_h, step_w, sight = 1, 1, ceil_div(conv.kernel[1], conv.stride[1])
    parity = ceil_div((OCTET - 1) * step_w + sight, step_w)
    return STAGES * step_h * OCTETS * step_w * parity * 16 * (units.units * units.chunks | 1)


def _items(conv: Convolution, backward: bool, slabs: int, wanted: int) -> tuple[tuple[int, ...], int]:
    """(the fields of Items, blocks that share them): enough to fill a GPU, runs as long as that allows."""
    place = place_of(conv, backward)
    strips = ceil_div(place["base_w"], OCTET)
    octets = conv.images * strips
    blocks = ceil_div(octets, OCTETS)
    least = 4 * max(ages(conv) - 1, 1)
    runs = max(1, min(ceil_div(wanted, blocks * slabs), place["base_h"] // least))
    run = ceil_div(place["base_h"], runs)
    runs = ceil_div(place["base_h"], run)
    share = ceil_div(blocks * runs, max(1, wanted // slabs))
    return (octets, blocks * runs, share, strips, runs, run), ceil_div(blocks * runs, share)


# ----------------------------------------------------------------------------------------------------- weight gradient


class Sets(NamedTuple):
    """How the products of a weight gradient are put on the matrix units.

    Attributes:
        group_in, group_out: channels of a group of x and dy.
        bundle: groups of a unit.
        warp_chunks: of eight channels, of a warp.
    """

    group_in: int
    group_out: int
    bundle: int
    warp_chunks: int

    @property
    def set_units(self) -> int:
        """Units whose outputs fill the 16 rows of a product."""
        return 2 if self.bundle * self.group_out <= 8 else 1

    @property
    def set_chunks(self) -> int:
        return self.set_units * ceil_div(self.bundle * self.group_in, 8)

    @property
    def warps(self) -> int:
        """Of a set."""
        tiles = ceil_div(self.set_units * ceil_div(self.bundle * self.group_out, 8), 2)
        return tiles * self.set_chunks // self.warp_chunks

    @property
    def sets(self) -> int:
        """Of a block: about four warps."""
        return max(1, 4 // self.warps)

    @property
    def units(self) -> int:
        """Of a block."""
        return self.sets * self.set_units

    @property
    def threads(self) -> int:
        return 32 * self.sets * self.warps

    @property
    def defines(self) -> dict[str, int]:
        return {name.upper(): value for name, value in self._asdict().items()} | {"SETS": self.sets}


def backward_weight(conv: Convolution, code: int, dy: Any, x: Any, out: Any, accumulate: bool) -> None:
    """Weight gradient into ``out``."""
    sets = _sets(conv)
    vec_x, vec_y = _weight_vectors(conv, sets)
    dy, x = aligned(as_rows(dy), vec_y), aligned(as_rows(x), vec_x)
    planned, chunks = plan_weight(conv, code, (rows(x)[2], rows(dy)[2]))
    partials = empty((chunks, out.size), float32)
    planned.start(dy, x, partials)
    sum_partials(partials, chunks, out, accumulate)


def _weight_vectors(conv: Convolution, sets: Sets) -> tuple[int, int]:
    """Values per copy of x and of dy."""
    return gcd(sets.bundle * sets.group_in, conv.channels, 8), gcd(sets.bundle * sets.group_out, conv.out_channels, 8)


@functools.lru_cache(maxsize=1024)
def _sets(conv: Convolution) -> Sets | None:
    """None where the sums do not fit into registers, or copies would be too narrow."""
    inner, outer = conv.channels // conv.groups, conv.out_channels // conv.groups
    found = []
    for warp_chunks in range(1, 9):
        sets = Sets(inner, outer, max(1, 8 // inner), warp_chunks)
        vectors = _weight_vectors(conv, sets)
        held = 4 * (prod(conv.kernel) * warp_chunks + PAIRS * ages(conv))
        if sets.set_chunks % warp_chunks or sets.warps > 8 or held > SUMS_HELD or min(vectors) < 2:
            continue
        pixels = (OCTET - 1) * conv.stride[1] + conv.kernel[1]
        copies = [
            ceil_div(2 * PAIRS * count * sets.units * sets.bundle * channels // vector, sets.threads)
            for count, channels, vector in ((pixels, inner, vectors[0]), (OCTET, outer, vectors[1]))
        ]
        if max(copies) <= COPIES:
            found.append(sets)
    return max(found, key=lambda sets: sets.warp_chunks, default=None)


@functools.lru_cache(maxsize=1024)
def plan_weight(conv: Convolution, code: int, pitches: tuple[int, int]) -> tuple[Launched, int]:
    """The launch that leaves the weight gradient's partial sums, and the number of their chunks.

    Args:
        code: the macro DTYPE.
        pitches: elements per pixel of x and of dy.
    """
    sets = _sets(conv)
    slabs = ceil_div(conv.groups, sets.bundle * sets.units)
    items, chunks = _items(conv, False, slabs, WEIGHT_BLOCKS)
    vec_x, vec_y = _weight_vectors(conv, sets)
    problem = argument(
        _WEIGHT,
        dy_pitch=pitches[1],
        x_pitch=pitches[0],
        items=items,
        channels=conv.channels,
        out_channels=conv.out_channels,
        slabs=slabs,
        at=tuple(place_of(conv, False).values()),
    )
    defines = {
        "DTYPE": code, "KERNEL_H": conv.kernel[0], "KERNEL_W": conv.kernel[1], "STRIDE_H": conv.stride[0],
        "STRIDE_W": conv.stride[1], "PAIRS": PAIRS, "STAGES": STAGES, "VEC_X": vec_x, "VEC_Y": vec_y,
    } | sets.defines  # fmt: skip
    grid, name, shared = slabs * chunks, "conv2d_grouped_weight_kernel", _weight_shared_bytes(conv, sets)
    return Launched("conv2d_grouped_weight", name, grid, sets.threads, problem, defines, shared), chunks


def _weight_shared_bytes(conv: Convolution, sets: Sets) -> int:
    parity = ceil_div((OCTET - 1) * conv.stride[1] + conv.kernel[1], conv.stride[1])
    pixel_x, pixel_y = (
        16 * (sets.units * ceil_div(sets.bundle * channels, 8) | 1) for channels in (sets.group_in, sets.group_out)
    )
    return STAGES * 2 * PAIRS * (prod(conv.stride) * parity * pixel_x + OCTET * pixel_y) + 32
