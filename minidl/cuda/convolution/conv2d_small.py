"""Fully connected layers of few rows and few channels, whatever their number; the kernel is in conv2d_small.cu.

A squeeze and excitation has such layers: some hundred rows between a thousand channels and twenty.
"""

from __future__ import annotations

import functools
from typing import Any

from minidl.cuda.array import as_rows
from minidl.cuda.convolution.conv2d_plan import Convolution, Launched, argument, struct
from minidl.cuda.rows import rows
from minidl.shapes import ceil_div

THREADS, ROWS = 256, 4  # of a block; of a thread
LANES = (1, 4, 8, 32)  # threads that share the depth of a sum
ENOUGH = 1 << 14  # threads
LEAST_DEPTH = 4  # of a thread
MOST_ROWS, MOST_PRODUCTS = 1024, 1 << 24  # beyond these the matrix units win, on tiles however few

_PROBLEM = struct("a_row a_depth b_column b_depth add_row", "rows columns depth slabs accumulate")


def applies(conv: Convolution, tf32: int) -> bool:
    """Whether the kernel can do all passes: images of one pixel, which no filter but 1x1 sees; exact products."""
    single = conv.height == conv.width == 1 and conv.kernel == conv.stride == (1, 1) and conv.padding == (0, 0)
    return single and conv.groups == 1 and not tf32


def pays(conv: Convolution) -> bool:
    """Whether it should be faster than tiles that Hopper's kernels cannot fetch."""
    return conv.images <= MOST_ROWS and conv.images * conv.channels * conv.out_channels <= MOST_PRODUCTS


def gather(conv: Convolution, code: int, backward: bool, source: Any, w: Any, bias: Any, add: Any, output: Any) -> None:
    """Forward pass or data gradient into ``output``; ``source`` and ``add`` are rows, ``w`` and ``bias`` dense."""
    pitches = rows(source)[2], 0 if add is None else rows(add)[2]
    _plan(conv, code, "backward_data" if backward else "forward", pitches, 0).start(source, w, bias, add, output)


def backward_weight(conv: Convolution, code: int, dy: Any, x: Any, out: Any, accumulate: bool) -> None:
    """Weight gradient into ``out``."""
    dy, x = as_rows(dy), as_rows(x)
    pitches = rows(dy)[2], rows(x)[2]
    _plan(conv, code, "backward_weight", pitches, int(accumulate)).start(dy, x, None, None, out)


def _lanes(height: int, columns: int, depth: int) -> int:
    """As few as give enough threads, each with some depth."""
    fitting = [lanes for lanes in LANES if lanes == 1 or depth >= LEAST_DEPTH * lanes]
    return next((n for n in fitting if ceil_div(height, ROWS) * columns * n >= ENOUGH), fitting[-1])


@functools.lru_cache(maxsize=1024)
def _plan(conv: Convolution, code: int, which: str, pitches: tuple[int, int], accumulate: int) -> Launched:
    """The launch of a pass.

    Args:
        pitches: elements per row of the source and of the array to be added; of a weight gradient, of dy and x.
    """
    n, c, k = conv.images, conv.channels, conv.out_channels
    # Rows, columns and depth of the product, and the steps of both operands along them and along the depth.
    height, columns, depth, a_row, a_depth, b_column, b_depth = {
        "forward": (n, k, c, pitches[0], 1, c, 1),
        "backward_data": (n, c, k, pitches[0], 1, 1, c),
        "backward_weight": (k, c, n, 1, pitches[0], 1, pitches[1]),
    }[which]
    weight = which == "backward_weight"
    lanes = _lanes(height, columns, depth)
    slabs = ceil_div(columns * lanes, THREADS)
    problem = argument(
        _PROBLEM, rows=height, columns=columns, depth=depth, a_row=a_row, a_depth=a_depth, b_column=b_column,
        b_depth=b_depth, add_row=0 if weight else pitches[1], slabs=slabs, accumulate=accumulate,
    )  # fmt: skip
    grid = slabs * ceil_div(height, ROWS)
    defines = {"DTYPE": code, "LANES": lanes, "WEIGHT": int(weight)}
    return Launched("conv2d_small", "conv2d_small_kernel", grid, THREADS, problem, defines, 0)
