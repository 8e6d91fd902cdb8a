"""Launch plans of depthwise_strip.cu: depthwise convolutions whose filters fit into registers, the usual ones."""

from __future__ import annotations

import functools
from math import gcd, prod
from typing import Any, NamedTuple

import numpy as np

from minidl.cuda.array import as_rows, copy_into, empty
from minidl.cuda.convolution.channel_sum import sum_partials
from minidl.cuda.convolution.conv2d_plan import Convolution, Launched, argument, struct
from minidl.cuda.norm.statistics import Parts
from minidl.cuda.rows import DTYPE, rows, vector_width
from minidl.precision import bfloat16, float32
from minidl.shapes import Pair, ceil_div

THREADS = 128
VECTOR = 2  # channels of a thread, where their number is even
COLUMNS = range(1, 9)  # base positions of a strip
REGISTERS = 165  # that a thread may have, of which so many hold addresses and the like:
AROUND = 42
FEW_REGISTERS = 146  # by this count: in 16 bits and without a stride the compiler then gets by with 128
RESIDENT = 3, 4  # blocks that a multiprocessor holds: with many registers, with few
PLACES = 132  # multiprocessors that the work is cut for: a constant, so that sums are cut alike on every device
LEAST_RUN = 4  # rows of a run, about
AHEAD = 3  # so many steps a weight gradient's thread waits for the first rows of an item
WANTED = 1 << 20  # threads of a data gradient with a stride: enough to fill a GPU many times over
MOST_SUMMED = 256  # values of bfloat16 whose squares float32 adds up without loss, where they are of one binade

# The structures Strips and Problem of depthwise_strip.cu.
STRIPS = struct("", "base_h base_w source_h source_w output_h output_w height width out_height out_width")
_PROBLEM = struct("items chunk", "strips runs run slabs", ("at", STRIPS))


class Strip(NamedTuple):
    """How an image is walked: strips of ``columns`` base positions, down runs of ``run`` rows of them."""

    vector: int
    columns: int
    run: int


def fits(conv: Convolution, which: str, itemsize: int) -> bool:
    """Whether the filters and sums of some strip fit into registers; one output per channel, no dilation."""
    undilated = all(step == 1 or taps == 1 for step, taps in zip(conv.dilation, conv.kernel, strict=True))
    return conv.multiplier == 1 and undilated and _columns(conv, which, 1, itemsize) is not None


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
) -> Parts | None:
    """Forward pass or data gradient into ``output``; ``source`` and ``add`` are rows, ``w`` and ``bias`` dense.

    Returns the statistics of a forward pass in bfloat16, where they are asked for.
    """
    pitches = rows(source)[2], conv.channels if add is None else rows(add)[2]
    arrays = (source, output) if add is None else (source, output, add)
    vector, summed = min(VECTOR, vector_width(*arrays)), statistics and code == DTYPE[bfloat16]
    planned = plan(conv, code, backward, pitches, vector, source.itemsize, summed)
    parts = empty((int(planned.problem["items"][0]), 2, conv.channels), float32) if summed else None
    planned.start(source, w, bias, add, output, parts)
    return Parts(parts, conv.pixels) if summed else None


def backward_weight(conv: Convolution, code: int, dy: Any, x: Any, out: Any, accumulate: bool) -> None:
    """Weight gradient into ``out``."""
    vector = gcd(conv.channels, VECTOR)
    dy, x = aligned(as_rows(dy), vector), aligned(as_rows(x), vector)
    planned, chunks = plan_weight(conv, code, (rows(x)[2], rows(dy)[2]), x.itemsize)
    partials = empty((chunks, out.size), float32)
    planned.start(dy, x, partials)
    sum_partials(partials, chunks, out, accumulate)


def aligned(x: Any, vector: int) -> Any:
    """``x`` itself where vectors can be read from it, else a dense copy: the order of a sum must not depend on this."""
    if vector_width(x) >= vector:
        return x
    out = empty(x.shape, x.dtype)
    copy_into(out, x)
    return out


def ages(conv: Convolution) -> int:
    """Rows of sums under way."""
    return ceil_div(conv.kernel[0], conv.stride[0])


def _bases(conv: Convolution, backward: bool) -> tuple[Pair, Pair, Pair]:
    """(base positions, the source's coordinates at the first, the output's there), as strip.cuh counts them."""
    if not backward:
        return (conv.out_height, conv.out_width), tuple(-padding for padding in conv.padding), (0, 0)
    first = tuple(padding // stride for padding, stride in zip(conv.padding, conv.stride, strict=True))
    output = tuple(m * stride - pad for m, stride, pad in zip(first, conv.stride, conv.padding, strict=True))
    sizes = tuple(
        ceil_div(size - start, stride)
        for size, start, stride in zip((conv.height, conv.width), output, conv.stride, strict=True)
    )
    reach = tuple(ceil_div(taps, stride) - 1 for taps, stride in zip(conv.kernel, conv.stride, strict=True))
    return sizes, tuple(m - far for m, far in zip(first, reach, strict=True)), output


@functools.lru_cache(maxsize=1024)
def _columns(conv: Convolution, which: str, vector: int, itemsize: int) -> int | None:
    """Of the strip that should take the least instructions, if there is one."""
    (_, width), backward = _bases(conv, which == "backward_data")[0], which == "backward_data"
    fitting = [c for c in COLUMNS if _registers(conv, which, vector, itemsize, c) <= REGISTERS]
    taps = prod(conv.kernel)

    def work(columns: int) -> float:
        window, _ = _window(conv, backward, columns)
        # Products, reads and writes, and what a step takes besides.
        return ceil_div(width, columns) * (columns * (taps + 3) + 4 * window * (1 if backward else conv.stride[0]) + 12)

    return min(fitting, key=work, default=None)


def _widest(conv: Convolution, which: str, vector: int, itemsize: int) -> tuple[int, int]:
    """(channels of a thread, at most ``vector``; columns of its strip)"""
    columns = _columns(conv, which, vector, itemsize)
    return (vector, columns) if columns else (1, _columns(conv, which, 1, itemsize))


def _resident(conv: Convolution, which: str, vector: int, itemsize: int, columns: int) -> int:
    """Blocks that a multiprocessor holds, by the registers that their threads are given."""
    few = _registers(conv, which, vector, itemsize, columns) <= FEW_REGISTERS
    return RESIDENT[few and itemsize == 2 and prod(conv.stride) == 1]


def _runs(height: int, most: int) -> list[int]:
    """Rows of a run, at most so many, where ``height`` is cut alike; the longest first, which read the least twice."""
    return sorted({min(ceil_div(height, n), most) for n in range(1, ceil_div(height, LEAST_RUN) + 1)}, reverse=True)


@functools.lru_cache(maxsize=1024)
def _strip(conv: Convolution, which: str, vector: int, itemsize: int, most: int | None = None) -> Strip:
    """The strip of a forward pass or a data gradient; depends on sizes alone.

    A run of rows meets `ages` - 1 rows beside its own. All blocks take about as long, so the GPU is full for whole
    rounds of as many as it holds, and a last round of few costs as much as another: short runs fill rounds, long ones
    read less. Where a data gradient has a stride, most of the time goes to what a row writes, and short runs are best.

    Args:
        most: outputs of a channel that a thread may have.
    """
    vector, columns = _widest(conv, which, vector, itemsize)
    height, width = _bases(conv, which == "backward_data")[0]
    threads, beside = conv.images * ceil_div(width, columns) * conv.channels // vector, ages(conv) - 1
    if which == "backward_data" and prod(conv.stride) > 1:
        runs = max(1, min(ceil_div(WANTED, max(threads, 1)), height // (3 * max(beside, 1))))
        return Strip(vector, columns, ceil_div(height, runs))
    places = PLACES * _resident(conv, which, vector, itemsize, columns)

    def time(run: int) -> int:
        return ceil_div(ceil_div(threads * ceil_div(height, run), THREADS), places) * (run + beside)

    return Strip(vector, columns, min(_runs(height, most // columns if most else height), key=time))


def _window(conv: Convolution, backward: bool, columns: int) -> tuple[int, int]:
    """(columns of the source that a strip sees, sums per base position in all rows under way)"""
    (_, kernel_w), (stride_h, stride_w) = conv.kernel, conv.stride
    if backward:
        return columns - 1 + ceil_div(kernel_w, stride_w), ages(conv) * stride_h * stride_w
    return (columns - 1) * stride_w + kernel_w, ages(conv)


def _registers(conv: Convolution, which: str, vector: int, itemsize: int, columns: int) -> int:
    """About so many does a thread need."""
    backward = which == "backward_data"
    window, sums = _window(conv, backward, columns)
    words = max(1, vector * itemsize // 4)
    lines = 1 if backward else conv.stride[0]
    held = (prod(conv.kernel) + columns * sums) * vector + window * (vector + lines * words)
    return AROUND + held + (columns * words if which == "backward_weight" else 0)


@functools.lru_cache(maxsize=1024)
def plan(
    conv: Convolution, code: int, backward: bool, pitches: tuple[int, int], vector: int, itemsize: int, stats: bool
) -> Launched:
    """The launch of the forward pass or of the data gradient.

    Args:
        code: the macro DTYPE.
        pitches: elements per pixel of the source and of the array to be added.
        vector: widest legal vector of the arrays, at most `VECTOR`.
        itemsize: bytes per element.
        stats: whether each thread sums up what it writes.
    """
    which = "backward_data" if backward else "forward"
    if stats:  # the order of sums follows from the sizes alone: misaligned arrays cost narrower vectors, not other bits
        strip = _strip(conv, which, gcd(conv.channels, VECTOR), itemsize, MOST_SUMMED)
        strip = strip._replace(vector=min(vector, strip.vector))
    else:
        strip = _strip(conv, which, vector, itemsize)
    problem, items = _problem(conv, backward, strip, 0, 0)
    grid = ceil_div(items * (conv.channels // strip.vector), THREADS)
    defines = _defines(conv, which, code, strip, pitches, itemsize) | {"WEIGHT": 0, "STATS": int(stats)}
    return Launched("depthwise_strip", "depthwise_strip_kernel", grid, THREADS, problem, defines, 0)


@functools.lru_cache(maxsize=1024)
def plan_weight(conv: Convolution, code: int, pitches: tuple[int, int], itemsize: int) -> tuple[Launched, int]:
    """The launch that leaves the weight gradient's partial sums, and the number of their chunks.

    As many blocks as the GPU holds at once, or a few less: each leaves partial sums, and a second round would last as
    long as the first. Of the runs that one is taken whose block has the fewest steps. On an H200, 1056 blocks of short
    runs took 13 % longer, the mean of the layers of MobileNetV2 and EfficientNet-B0 at 128 images.

    Args:
        pitches: of x and of dy; the rest as in `plan`.
    """
    which = "backward_weight"
    vector, columns = _widest(conv, which, gcd(conv.channels, VECTOR), itemsize)
    vectors = conv.channels // vector
    lanes = ceil_div(vectors, ceil_div(vectors, 32))
    deep, slabs = THREADS // lanes, ceil_div(vectors, lanes)
    most = max(1, PLACES * _resident(conv, which, vector, itemsize, columns) // slabs)
    strips = conv.images * ceil_div(conv.out_width, columns)

    def share(run: int) -> int:
        """Items of a thread."""
        return ceil_div(ceil_div(strips * ceil_div(conv.out_height, run), deep), most)

    run = min(_runs(conv.out_height, conv.out_height), key=lambda run: share(run) * (run + ages(conv) - 1 + AHEAD))
    strip, chunk = Strip(vector, columns, run), deep * share(run)
    problem, items = _problem(conv, False, strip, chunk, slabs)
    chunks = ceil_div(items, chunk)
    defines = _defines(conv, which, code, strip, pitches, itemsize) | {"WEIGHT": 1, "LANES": lanes, "DEEP": deep}
    shared = 4 * deep * prod(conv.kernel) * lanes * vector
    name = "depthwise_strip_weight_kernel"
    return Launched("depthwise_strip", name, slabs * chunks, lanes * deep, problem, defines, shared), chunks


def _defines(
    conv: Convolution, which: str, code: int, strip: Strip, pitches: tuple[int, int], itemsize: int
) -> dict[str, int]:
    resident = _resident(conv, which, strip.vector, itemsize, strip.columns)
    return {
        "DTYPE": code, "VEC": strip.vector, "COLUMNS": strip.columns, "CHANNELS": conv.channels,
        "SOURCE_PITCH": pitches[0], "OTHER_PITCH": pitches[1], "KERNEL_H": conv.kernel[0], "KERNEL_W": conv.kernel[1],
        "STRIDE_H": conv.stride[0], "STRIDE_W": conv.stride[1], "RESIDENT": resident,
        "BACKWARD": int(which == "backward_data"),
    }  # fmt: skip


def _problem(conv: Convolution, backward: bool, strip: Strip, chunk: int, slabs: int) -> tuple[np.ndarray, int]:
    """(the kernel's structure, items)"""
    at = place_of(conv, backward)
    strips, runs = ceil_div(at["base_w"], strip.columns), ceil_div(at["base_h"], strip.run)
    items = conv.images * strips * runs
    return argument(
        _PROBLEM, items=items, chunk=chunk, strips=strips, runs=runs, run=strip.run, slabs=slabs, at=tuple(at.values())
    ), items  # fmt: skip


def place_of(conv: Convolution, backward: bool) -> dict[str, int]:
    """The fields of Strips in strip.cuh."""
    base, source, output = _bases(conv, backward)
    image, out_image = (conv.height, conv.width), (conv.out_height, conv.out_width)
    if backward:
        image, out_image = out_image, image
    sizes = (*base, *source, *output, *image, *out_image)
    return dict(zip(STRIPS.names, sizes, strict=True))
