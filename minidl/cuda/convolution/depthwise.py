"""Launch plans of the depthwise convolutions in depthwise.cu; `conv2d` and its gradients take them.

The kernels are exact in float32 with and without TF32: they are bound by memory, so there is no product to speed up.
"""

from __future__ import annotations

import functools
from math import prod
from typing import Any

from minidl.cuda.array import as_rows, empty
from minidl.cuda.convolution import depthwise_strip
from minidl.cuda.convolution.channel_sum import sum_partials
from minidl.cuda.convolution.conv2d_plan import Convolution, Launched, argument, lanes_along, pixel_chunk, struct
from minidl.cuda.rows import ACCESS, rows, vector_width
from minidl.precision import float32
from minidl.shapes import Pair, ceil_div

BLOCK = 256
PASSES = 8  # pixels that a thread computes one after the other, as in depthwise.cu
TAPS = 9  # taps of the weight gradient that a thread sums at a time, at most
FILTER_BYTES = 48 * 1024  # shared memory for the filters of a block

# The structure Problem of depthwise.cu.
_PROBLEM = struct(
    "source_pitch other_pitch pixels chunk",
    "height width out_height out_width channels kernel_h padding_h padding_w dilation_h dilation_w slabs",
)


def _filter_bytes(conv: Convolution, backward: bool, slab: int) -> int:
    """Shared memory for the filters that meet in ``slab`` output channels."""
    return 4 * prod(conv.kernel) * slab * (conv.multiplier if backward else 1)


def fits(conv: Convolution, backward: bool) -> bool:
    """Whether forward or data gradient can keep at least one channel's filters in shared memory."""
    return _filter_bytes(conv, backward, 1) <= FILTER_BYTES


def gather(
    conv: Convolution,
    code: int,
    backward: bool,
    source: Any,
    w: Any,
    bias: Any,
    add: Any,
    output: Any,
    statistics: bool = False,
) -> Any:
    """Forward pass or data gradient into ``output``; ``source`` and ``add`` are rows, ``w`` and ``bias`` dense.

    Returns the statistics of a forward pass where they are asked for and the kernel takes them.
    """
    if depthwise_strip.fits(conv, "backward_data" if backward else "forward", source.itemsize):
        return depthwise_strip.gather(conv, code, backward, source, w, bias, add, output, statistics)
    pitches = rows(source)[2], 0 if add is None else rows(add)[2]
    vectors = vector_width(source), vector_width(output) if add is None else vector_width(output, add)
    plan(conv, code, backward, pitches, vectors, source.itemsize).start(source, w, bias, add, output)
    return None


def backward_weight(conv: Convolution, code: int, dy: Any, x: Any, out: Any, accumulate: bool) -> None:
    """Weight gradient into ``out``."""
    if depthwise_strip.fits(conv, "backward_weight", x.itemsize):
        depthwise_strip.backward_weight(conv, code, dy, x, out, accumulate)
        return
    dy, x = as_rows(dy), as_rows(x)
    pitches, vectors = (rows(x)[2], rows(dy)[2]), (vector_width(x), vector_width(dy))
    planned, chunks = plan_weight(conv, code, pitches, vectors, x.itemsize)
    partials = empty((chunks, out.size), float32)
    planned.start(dy, x, partials)
    sum_partials(partials, chunks, out, accumulate)


def _vector(conv: Convolution, vectors: tuple[int, ...], itemsize: int) -> int:
    return min(*vectors, ACCESS // itemsize) if conv.multiplier == 1 else 1


def _defines(conv: Convolution, code: int, vec: int, lanes: int, **more: int) -> dict[str, int]:
    defines = {"DTYPE": code, "VEC": vec, "LANES": lanes, "MULTIPLIER": conv.multiplier, "KERNEL_W": conv.kernel[1]}
    return defines | {"STRIDE_H": conv.stride[0], "STRIDE_W": conv.stride[1]} | more


@functools.lru_cache(maxsize=1024)
def plan(
    conv: Convolution, code: int, backward: bool, pitches: tuple[int, int], vectors: tuple[int, int], itemsize: int
) -> Launched:
    """The launch of the forward pass or of the data gradient.

    Args:
        code: the macro DTYPE.
        pitches: elements per pixel of the source and of the array to be added.
        vectors: widest legal vectors of the source and of the output.
        itemsize: bytes per element.
    """
    channels = conv.channels if backward else conv.out_channels
    vec = _vector(conv, vectors, itemsize)
    lanes = lanes_along(channels, vec, itemsize)
    while _filter_bytes(conv, backward, lanes * vec) > FILTER_BYTES:
        vec, lanes = (vec, lanes // 2) if lanes > 1 else (vec // 2, 1)
    image, out_image = (conv.height, conv.width), (conv.out_height, conv.out_width)
    if backward:
        image, out_image = out_image, image
    pixels, slabs = conv.images * prod(out_image), ceil_div(channels, lanes * vec)
    problem = _problem(conv, image, out_image, channels, pitches, pixels, 0, slabs)
    defines = _defines(conv, code, vec, lanes, BACKWARD=int(backward))
    grid = ceil_div(pixels, PASSES * BLOCK // lanes) * slabs
    shared = _filter_bytes(conv, backward, lanes * vec)
    return Launched("depthwise", "depthwise_kernel", grid, BLOCK, problem, defines, shared)


@functools.lru_cache(maxsize=1024)
def plan_weight(
    conv: Convolution, code: int, pitches: tuple[int, int], vectors: tuple[int, int], itemsize: int
) -> tuple[Launched, int]:
    """The launch that leaves the weight gradient's partial sums, and the number of their chunks.

    Args:
        pitches, vectors: of x and of dy; the rest as in `plan`.
    """
    vec = _vector(conv, vectors, itemsize)
    # What shapes the sum follows from the sizes alone: misaligned arrays cost narrower vectors, not other bits.
    widest = _vector(conv, (ACCESS,), itemsize)
    lanes = lanes_along(conv.out_channels, widest, itemsize)
    taps = min(prod(conv.kernel), TAPS)
    groups = ceil_div(prod(conv.kernel), taps)
    chunk = pixel_chunk(conv.pixels, ceil_div(conv.out_channels, lanes * widest) * groups)
    slabs = ceil_div(conv.out_channels, lanes * vec)
    chunks = ceil_div(conv.pixels, chunk)
    image, out_image = (conv.height, conv.width), (conv.out_height, conv.out_width)
    problem = _problem(conv, image, out_image, conv.out_channels, pitches, conv.pixels, chunk, slabs)
    defines = _defines(conv, code, vec, lanes, TAPS=taps)
    return Launched("depthwise", "depthwise_weight_kernel", slabs * groups * chunks, BLOCK, problem, defines, 0), chunks


def _problem(
    conv: Convolution,
    image: Pair,
    out_image: Pair,
    channels: int,
    pitches: tuple[int, int],
    pixels: int,
    chunk: int,
    slabs: int,
):
    return argument(
        _PROBLEM,
        conv,
        source_pitch=pitches[0],
        other_pitch=pitches[1],
        pixels=pixels,
        chunk=chunk,
        height=image[0],
        width=image[1],
        out_height=out_image[0],
        out_width=out_image[1],
        channels=channels,
        slabs=slabs,
    )
