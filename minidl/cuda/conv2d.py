"""Convolution and its two gradients on the GPU; the kernels are in conv2d.cu, conv2d_weight.cu, depthwise.cu
and, for few input channels, conv2d_stem.cu (see conv2d_family.py for which runs when).

Shapes: x (N, H, W, C), dy (N, P, Q, K), dense or pitched; w (K, R, S, C / groups). Sums in float32, one rounding.
With ``tf32`` products of float32 arrays round their operands to TF32 (nearest, ties away from zero) on tensor cores;
without it they are exact float32 multiply-adds. Every result has the same bits on every run, and on every device that
runs the same family of kernels.
"""

from __future__ import annotations

import functools
from math import gcd
from typing import Any

import numpy as np

from minidl import checks
from minidl.cuda import conv2d_stem, depthwise
from minidl.cuda.array import as_rows, contiguous, empty
from minidl.cuda.channel_sum import channel_sum, check_sum, sum_partials
from minidl.cuda.conv2d_plan import (
    DEPTH_BYTES,
    EXACT_TILES,
    HALF_TILES,
    NARROW_TILES,
    PATCH_BYTES,
    TENSOR_TILES,
    AxisClass,
    Convolution,
    Launched,
    Tile,
    argument,
    choose_tile,
    convolution,
    parity_classes,
    pixel_chunk,
    struct,
)
from minidl.cuda.device import DeviceRecord, current_device
from minidl.cuda.launch import launch
from minidl.cuda.rows import ACCESS, address, dtype_code, rows, vector_width
from minidl.cuda.widen import narrow, wide_channels, widen
from minidl.precision import float32
from minidl.shapes import Pair, ceil_div

__all__ = ["channel_sum", "conv2d", "conv2d_backward_data", "conv2d_backward_weight"]

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


def conv2d(
    x: Any,
    w: Any,
    bias: Any | None = None,
    *,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    tf32: bool = False,
) -> Any:
    """Cross-correlation of x (N, H, W, C) with w (K, R, S, C / groups): y (N, P, Q, K) in the dtype of x.

    Args:
        bias: (K,) float32 or None, added before the one rounding.
        stride, padding, dilation: (height, width).
        groups: output channel k sees the input channels of its own group, k // (K / groups), only.
        tf32: round float32 operands to TF32.
    """
    conv = convolution("conv2d", x.shape, w.shape, stride, padding, dilation, groups)
    y = empty(conv.y_shape, x.dtype)
    if conv2d_stem.chosen(conv, x.dtype):
        _check_types("conv2d", x, w, "w", tf32)
        _check_bias("conv2d", bias, w.shape[0])
        conv2d_stem.forward(conv, x, w, bias, y)
        return y
    wide = _wide_channels(conv, x.itemsize)
    if wide > conv.channels:
        x, w, conv = widen(x, wide), widen(w, wide), conv._replace(channels=wide)
    _gather("conv2d", conv, False, x, w, bias, None, y, tf32)
    return y


def conv2d_backward_data(
    dy: Any,
    w: Any,
    x_shape: tuple[int, int, int, int],
    *,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    bias: Any | None = None,
    add: Any | None = None,
    tf32: bool = False,
) -> Any:
    """Gradient of `conv2d` with respect to x: dx of shape ``x_shape`` in the dtype of dy.

    Args:
        bias: (C,) float32 or None: makes this the forward pass of a transposed convolution.
        add: of shape ``x_shape`` and dy's dtype, or None: added in float32 before the one rounding.
        stride, padding, dilation, groups, tf32: as in `conv2d`.
    """
    who = "conv2d_backward_data"
    conv = convolution(who, x_shape, w.shape, stride, padding, dilation, groups)
    if dy.shape != conv.y_shape:
        raise checks.bad_shape(who, "dy", str(conv.y_shape), dy.shape)
    dx = empty(x_shape, dy.dtype)
    _gather(who, conv, True, dy, w, bias, add, dx, tf32)
    return dx


def conv2d_backward_weight(
    dy: Any,
    x: Any,
    *,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    out: Any,
    accumulate: bool = False,
    tf32: bool = False,
) -> None:
    """Gradient of `conv2d` with respect to w, into ``out`` (K, R, S, C / groups) float32: overwritten, or added to.

    The pixels are summed in chunks that depend on the sizes alone, and the chunks in order.
    """
    who = "conv2d_backward_weight"
    conv = convolution(who, x.shape, out.shape, stride, padding, dilation, groups)
    code = _check_types(who, dy, x, "x", tf32)
    check_sum(who, out)
    if dy.shape != conv.y_shape:
        raise checks.bad_shape(who, "dy", str(conv.y_shape), dy.shape)
    if conv.images == 0:
        sum_partials(None, 0, out, accumulate)
        return
    if conv2d_stem.chosen(conv, x.dtype):
        conv2d_stem.backward_weight(conv, dy, x, out, accumulate)
        return
    wide = _wide_channels(conv, x.itemsize)
    if wide > conv.channels:
        gradient, x = empty((*out.shape[:-1], wide), float32), widen(x, wide)
        options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "tf32": tf32}
        conv2d_backward_weight(dy, x, **options, out=gradient)
        narrow(gradient, out, accumulate)
        return
    dy, x = as_rows(dy), as_rows(x)
    pitches, vectors = (rows(x)[2], rows(dy)[2]), (vector_width(x), vector_width(dy))
    if conv.depthwise:
        planned, chunks = depthwise.plan_weight(conv, code, pitches, vectors, x.itemsize)
    else:
        vec_y = gcd(address(out) // out.itemsize, ACCESS // out.itemsize)
        planned, chunks = _plan_weight(conv, code, tf32, pitches, (*vectors, vec_y), x.itemsize, current_device())
        if chunks == 1:
            problem = planned.problem if not accumulate else _accumulating(planned.problem)
            _start(planned._replace(problem=problem), dy, x, out)
            return
    partials = empty((chunks, out.size), float32)
    _start(planned, dy, x, partials)
    sum_partials(partials, chunks, out, accumulate)


def _wide_channels(conv: Convolution, itemsize: int) -> int:
    """Channels that x and w should be padded to before a product over them; grouped channels stay as they are."""
    return wide_channels(conv.channels, itemsize) if conv.groups == 1 else conv.channels


def _check_types(who: str, first: Any, second: Any, name: str, tf32: bool) -> int:
    code = dtype_code(first, who)
    if second.dtype != first.dtype:
        raise checks.bad_dtype(who, name, first.dtype, second.dtype)
    if tf32 and first.dtype != float32:
        raise checks.bad_value(who, "tf32", "False unless the arrays are float32", tf32)
    return code


def _check_bias(who: str, bias: Any, channels: int) -> None:
    if bias is not None and (bias.dtype != float32 or bias.shape != (channels,)):
        raise checks.bad_shape(who, "bias", f"({channels},) in float32", bias.shape)


def _start(planned: Launched, *arrays: Any) -> None:
    stem, name, grid, block, problem, defines, shared = planned
    launch(stem, name, grid, block, *arrays, problem, defines=defines, shared=shared)


def _gather(
    who: str, conv: Convolution, backward: bool, source: Any, w: Any, bias: Any, add: Any, output: Any, tf32: bool
) -> None:
    """Both directions: gather from ``source``, multiply with the filters, add bias and ``add``, write ``output``."""
    code = _check_types(who, source, w, "w", tf32)
    channels = output.shape[-1]
    _check_bias(who, bias, channels)
    if add is not None and (add.dtype != output.dtype or add.shape != output.shape):
        raise checks.bad_shape(who, "add", f"{output.shape} in {output.dtype}", add.shape)
    if output.size == 0:
        return
    source, w = as_rows(source), contiguous(w)
    bias = None if bias is None else contiguous(bias)
    add = None if add is None else as_rows(add)
    vec_y = vector_width(output) if add is None else vector_width(output, add)
    pitches = rows(source)[2], 0 if add is None else rows(add)[2]
    if conv.depthwise and depthwise.fits(conv, backward):
        vectors = vector_width(source), vec_y
        planned = [depthwise.plan(conv, code, backward, pitches, vectors, source.itemsize)]
    else:
        vectors = vector_width(source), vector_width(w), vec_y
        planned = _plan_gather(conv, code, tf32, backward, pitches, vectors, source.itemsize, current_device())
    for one in planned:
        _start(one, source, w, bias, add, output)


def _tiles(itemsize: int, tf32: bool, *vectors: int) -> tuple[Tile, ...]:
    if min(vectors) * itemsize < ACCESS:
        return HALF_TILES if min(vectors) * itemsize == ACCESS // 2 else NARROW_TILES
    return TENSOR_TILES if itemsize == 2 or tf32 else EXACT_TILES


@functools.lru_cache(maxsize=1024)
def _plan_gather(
    conv: Convolution,
    code: int,
    tf32: bool,
    backward: bool,
    pitches: tuple[int, int],
    vectors: tuple[int, int, int],
    itemsize: int,
    device: DeviceRecord,
) -> list[Launched]:
    """The launches of conv2d.cu: one, or several when there are more than 16 parity classes.

    Args:
        pitches: elements per pixel of the source and of the array to be added.
        vectors: widest legal vectors of the source, of the filters and of the output.
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
    tile = choose_tile(_tiles(itemsize, tf32, vec_x, vec_w), counts, columns, conv.groups, device)
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
        launches.append(Launched("conv2d", "conv2d_kernel", grid, tile.threads, problem, defines, shared))
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
        source_pitch=pitches[0],
        add_pitch=pitches[1],
        images=conv.images,
        height=image[0],
        width=image[1],
        out_height=out_image[0],
        out_width=out_image[1],
        groups=conv.groups,
        depth=depth,
        columns=columns,
        kernel_h=conv.kernel[0],
        kernel_w=conv.kernel[1],
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
    tf32: bool,
    pitches: tuple[int, int],
    vectors: tuple[int, int, int],
    itemsize: int,
    device: DeviceRecord,
) -> tuple[Launched, int]:
    """The launch of conv2d_weight.cu, and the number of partial sums that it leaves.

    Args:
        pitches: elements per pixel of x and dy.
        vectors: widest legal vectors of x, of dy and, as far as its address goes, of the gradient.
    """
    channels, outputs = conv.channels // conv.groups, conv.out_channels // conv.groups
    columns = conv.kernel[0] * conv.kernel[1] * channels
    chunk = pixel_chunk(conv.pixels, ceil_div(outputs, 128) * ceil_div(columns, 128) * conv.groups)
    chunks = ceil_div(conv.pixels, chunk)
    vec_x, vec_dy, vec_y = gcd(vectors[0], channels), gcd(vectors[1], outputs), gcd(vectors[2], columns)
    tiles = _tiles(itemsize, tf32, vec_x, vec_dy)
    tile = choose_tile(tiles, (outputs,), columns, conv.groups * chunks, device)
    stages = tile.pipeline(device)[0]
    tiles_m, tiles_n = ceil_div(outputs, tile.rows), ceil_div(columns, tile.columns)
    problem = argument(
        _WEIGHT,
        dy_pitch=pitches[1],
        x_pitch=pitches[0],
        pixels=conv.pixels,
        chunk=chunk,
        height=conv.height,
        width=conv.width,
        out_height=conv.out_height,
        out_width=conv.out_width,
        groups=conv.groups,
        rows=outputs,
        channels=channels,
        columns=columns,
        kernel_w=conv.kernel[1],
        stride_h=conv.stride[0],
        stride_w=conv.stride[1],
        padding_h=conv.padding[0],
        padding_w=conv.padding[1],
        dilation_h=conv.dilation[0],
        dilation_w=conv.dilation[1],
        tiles_m=tiles_m,
        tiles_n=tiles_n,
        accumulate=0,
    )
    defines = {"DTYPE": code, "TF32": int(tf32), "VEC_DY": vec_dy, "VEC_X": vec_x, "VEC_Y": vec_y, "STAGES": stages}
    defines |= tile.defines
    grid = tiles_n * tiles_m * conv.groups * chunks
    shared = stages * DEPTH_BYTES // itemsize * PATCH_BYTES + tile.shared_bytes(stages)
    return Launched("conv2d_weight", "conv2d_weight_kernel", grid, tile.threads, problem, defines, shared), chunks


def _accumulating(problem: np.ndarray) -> np.ndarray:
    """The same problem, added to the gradient instead of overwriting it."""
    problem = problem.copy()
    problem["accumulate"] = 1
    return problem
