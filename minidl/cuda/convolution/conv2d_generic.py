"""The generic family of convolutions, which does everything: launch plans of conv2d.cu and conv2d_weight.cu."""

from __future__ import annotations

import functools
from math import gcd
from typing import Any

import numpy as np

from minidl.cuda.array import as_rows, empty
from minidl.cuda.convolution.channel_sum import sum_partials
from minidl.cuda.convolution.conv2d_family import Choice, Question
from minidl.cuda.convolution.conv2d_plan import (
    DEPTH_BYTES,
    EXACT_TILES,
    HALF_TILES,
    NARROW_TILES,
    PATCH_BYTES,
    TENSOR_TILES,
    TILE_THREADS,
    AxisClass,
    Convolution,
    Launched,
    Tile,
    argument,
    choose_tile,
    parity_classes,
    pixel_chunk,
    struct,
)
from minidl.cuda.device import DeviceRecord, current_device
from minidl.cuda.rows import ACCESS, address, rows, vector_width
from minidl.precision import float32
from minidl.shapes import ceil_div

CLASSES = 16  # parity classes of one launch, at most

# The structures Class and Problem of conv2d.cu, and Problem of conv2d_weight.cu.
_CLASS = struct("", "row column taps_h taps_w first_h first_w offset_h offset_w")
_PRODUCT = struct(
    "source_pitch add_pitch",
    "images height width out_height out_width groups depth columns kernel_h kernel_w step_h step_w delta_h delta_w "
    "tap_step_h tap_step_w class_step_h class_step_w tiles_m tiles_n",
    ("classes", _CLASS, CLASSES),
)
_WEIGHT = struct(
    "dy_pitch x_pitch pixels chunk",
    "height width out_height out_width groups rows channels columns kernel_w stride_h stride_w padding_h padding_w "
    "dilation_h dilation_w tiles_m tiles_n accumulate",
)


def gather(
    conv: Convolution,
    code: int,
    tf32: int,
    backward: bool,
    source: Any,
    w: Any,
    bias: Any,
    add: Any,
    output: Any,
    tile: str = "",
) -> None:
    """Forward pass or data gradient into ``output``; ``source`` and ``add`` are rows, ``w`` and ``bias`` dense.

    ``tile``: the name of one, if it is to be used where it can.
    """
    pitches = rows(source)[2], 0 if add is None else rows(add)[2]
    vec_y = vector_width(output) if add is None else vector_width(output, add)
    vectors = vector_width(source), vector_width(w), vec_y
    for one in _plan_gather(conv, code, tf32, backward, pitches, vectors, source.itemsize, current_device(), tile):
        one.start(source, w, bias, add, output)


def backward_weight(
    conv: Convolution, code: int, tf32: int, dy: Any, x: Any, out: Any, accumulate: bool, tile: str = ""
) -> None:
    """Weight gradient into ``out``; ``tile`` as of `gather`. The sums are the same with all tiles."""
    dy, x = as_rows(dy), as_rows(x)
    vectors = vector_width(x), vector_width(dy), gcd(address(out) // out.itemsize, ACCESS // out.itemsize)
    pitches = rows(x)[2], rows(dy)[2]
    planned, chunks = _plan_weight(conv, code, tf32, pitches, vectors, x.itemsize, current_device(), tile)
    if chunks == 1:
        problem = planned.problem if not accumulate else _accumulating(planned.problem)
        planned._replace(problem=problem).start(dy, x, out)
        return
    partials = empty((chunks, out.size), float32)
    planned.start(dy, x, partials)
    sum_partials(partials, chunks, out, accumulate)


def options(question: Question, device: DeviceRecord) -> list[Choice]:
    """What a tuner may try on dense arrays, first what `choose_tile` says: every tile."""
    conv, code, tf32, itemsize = question.conv, question.code, question.tf32, 2 if question.code else 4
    shapes = conv.channels, conv.channels // conv.groups, conv.out_channels
    vec_x, vec_w, vec_y = (gcd(channels, ACCESS // itemsize) for channels in shapes)

    def planned(wanted: str) -> Launched:
        if question.which == "backward_weight":
            pitches = conv.channels, conv.out_channels
            vectors = vec_x, vec_y, ACCESS // 4
            return _plan_weight(conv, code, tf32, pitches, vectors, itemsize, device, wanted)[0]
        if question.which == "backward_data":
            pitches, vectors = (conv.out_channels, 0), (vec_y, vec_w, vec_x)
            return _plan_gather(conv, code, tf32, True, pitches, vectors, itemsize, device, wanted)[0]
        pitches, vectors = (conv.channels, 0), (vec_x, vec_w, vec_y)
        return _plan_gather(conv, code, tf32, False, pitches, vectors, itemsize, device, wanted)[0]

    every = {tile.name for tile in (*TENSOR_TILES, *EXACT_TILES, *HALF_TILES, *NARROW_TILES)}
    names = ["{TILE_M}x{TILE_N}".format(**planned(wanted).defines) for wanted in ("", *sorted(every))]
    return [Choice("generic", name) for name in dict.fromkeys(names)]


def _tiles(itemsize: int, tf32: int, *vectors: int) -> tuple[Tile, ...]:
    if min(vectors) * itemsize < ACCESS:
        return HALF_TILES if min(vectors) * itemsize == ACCESS // 2 else NARROW_TILES
    return TENSOR_TILES if itemsize == 2 or tf32 == 1 else EXACT_TILES


@functools.lru_cache(maxsize=1024)
def _plan_gather(
    conv: Convolution,
    code: int,
    tf32: int,
    backward: bool,
    pitches: tuple[int, int],
    vectors: tuple[int, int, int],
    itemsize: int,
    device: DeviceRecord,
    wanted: str = "",
) -> list[Launched]:
    """The launches of conv2d.cu: one, or several when there are more than 16 parity classes.

    Args:
        pitches: elements per pixel of the source and of the array to be added.
        vectors: widest legal vectors of the source, of the filters and of the output.
        wanted: a tile's name, see `choose_tile`.
    """
    depth, columns = conv.channels // conv.groups, conv.out_channels // conv.groups
    if backward:
        depth, columns = columns, depth
        classes = parity_classes(conv)
    else:
        classes = [
            tuple(
                AxisClass(0, size, taps, 0, -padding)
                for size, taps, padding in zip(conv.y_shape[1:3], conv.kernel, conv.padding, strict=True)
            )
        ]
    vec_x, vec_w, vec_y = gcd(vectors[0], depth), vectors[1], gcd(vectors[2], columns)
    if not backward:
        vec_x = vec_w = min(vec_x, vec_w)
    counts = tuple(conv.images * h.count * w.count for h, w in classes)
    tiles = _tiles(itemsize, tf32, vec_x, vec_w)
    if tf32 == 3 and tiles is HALF_TILES:
        tiles = NARROW_TILES  # what is left of operands takes the registers that twice the copies do
    tile = choose_tile(tiles, counts, columns, conv.groups, device, wanted)
    stages = tile.pipeline(device)[0]
    height, width = (conv.out_height, conv.out_width) if backward else (conv.height, conv.width)
    images = max(tile.rows // (h.count * w.count) for h, w in classes) + 3  # that rows of one tile may come to lie in
    far = images * height * width * pitches[0] // vec_x >= 2**31
    packed = not backward and depth % (DEPTH_BYTES // itemsize) != 0
    defines = {"DTYPE": code, "TF32": int(tf32), "BACKWARD": int(backward), "PACKED": int(packed)}
    defines |= {"FAR": int(far)} | tile.defines
    defines |= {"VEC_X": vec_x, "VEC_W": vec_w, "VEC_Y": vec_y, "STAGES": stages}
    tiles_n = ceil_div(columns, tile.columns)
    launches = []
    for first in range(0, len(classes), CLASSES):
        part = classes[first : first + CLASSES]
        tiles_m = ceil_div(max(counts[first : first + CLASSES]), tile.rows)
        grid = tiles_n * conv.groups * tiles_m, len(part)
        problem = _gather_problem(conv, backward, pitches, part, tiles_m, tiles_n)
        shared = tile.shared_bytes(stages)
        launches.append(Launched("conv2d", "conv2d_kernel", grid, TILE_THREADS, problem, defines, shared))
    return launches


def _gather_problem(
    conv: Convolution,
    backward: bool,
    pitches: tuple[int, int],
    classes: list[tuple[AxisClass, ...]],
    tiles_m: int,
    tiles_n: int,
) -> np.ndarray:
    image, out_image = (conv.height, conv.width), (conv.out_height, conv.out_width)
    depth, columns = conv.channels // conv.groups, conv.out_channels // conv.groups
    step, delta, tap_step, class_step = conv.stride, conv.dilation, (1, 1), (1, 1)
    if backward:
        image, out_image, depth, columns = out_image, image, columns, depth
        common = tuple(map(gcd, conv.stride, conv.dilation))
        step, class_step = (1, 1), conv.stride
        delta = tuple(-d // g for d, g in zip(conv.dilation, common, strict=True))
        tap_step = tuple(s // g for s, g in zip(conv.stride, common, strict=True))
    table = np.zeros(CLASSES, _CLASS)
    for i, (h, w) in enumerate(classes):
        table[i] = (h.start, w.start, h.taps, w.taps, h.first, w.first, h.offset, w.offset)
    return argument(
        _PRODUCT,
        conv,
        source_pitch=pitches[0],
        add_pitch=pitches[1],
        height=image[0],
        width=image[1],
        out_height=out_image[0],
        out_width=out_image[1],
        depth=depth,
        columns=columns,
        step_h=step[0],
        step_w=step[1],
        delta_h=delta[0],
        delta_w=delta[1],
        tap_step_h=tap_step[0],
        tap_step_w=tap_step[1],
        class_step_h=class_step[0],
        class_step_w=class_step[1],
        tiles_m=tiles_m,
        tiles_n=tiles_n,
        classes=table,
    )


@functools.lru_cache(maxsize=1024)
def _plan_weight(
    conv: Convolution,
    code: int,
    tf32: int,
    pitches: tuple[int, int],
    vectors: tuple[int, int, int],
    itemsize: int,
    device: DeviceRecord,
    wanted: str = "",
) -> tuple[Launched, int]:
    """The launch of conv2d_weight.cu, and the number of partial sums that it leaves.

    Args:
        pitches: elements per pixel of x and dy.
        vectors: widest legal vectors of x, of dy and, as far as its address goes, of the gradient.
        wanted: a tile's name, see `choose_tile`.
    """
    channels, outputs = conv.channels // conv.groups, conv.out_channels // conv.groups
    columns = conv.kernel[0] * conv.kernel[1] * channels
    chunk = pixel_chunk(conv.pixels, ceil_div(outputs, 128) * ceil_div(columns, 128) * conv.groups)
    chunks = ceil_div(conv.pixels, chunk)
    vec_x, vec_dy, vec_y = gcd(vectors[0], channels), gcd(vectors[1], outputs), gcd(vectors[2], columns)
    tiles = _tiles(itemsize, tf32, vec_x, vec_dy)
    tile = choose_tile(tiles, (outputs,), columns, conv.groups * chunks, device, wanted)
    stages = tile.pipeline(device)[0]
    tiles_m, tiles_n = ceil_div(outputs, tile.rows), ceil_div(columns, tile.columns)
    problem = argument(
        _WEIGHT,
        conv,
        dy_pitch=pitches[1],
        x_pitch=pitches[0],
        chunk=chunk,
        rows=outputs,
        channels=channels,
        columns=columns,
        tiles_m=tiles_m,
        tiles_n=tiles_n,
        accumulate=0,
    )
    defines = {"DTYPE": code, "TF32": int(tf32), "VEC_DY": vec_dy, "VEC_X": vec_x, "VEC_Y": vec_y, "STAGES": stages}
    defines |= tile.defines
    grid = tiles_n * tiles_m * conv.groups * chunks
    shared = stages * DEPTH_BYTES // itemsize * PATCH_BYTES + tile.shared_bytes(stages)
    return Launched("conv2d_weight", "conv2d_weight_kernel", grid, TILE_THREADS, problem, defines, shared), chunks


def _accumulating(problem: np.ndarray) -> np.ndarray:
    """The same problem, added to the gradient instead of overwriting it."""
    problem = problem.copy()
    problem["accumulate"] = 1
    return problem
