"""How a convolution on the CPU is cut: the geometry of its passes, their tasks and the work space of these.

Forward and data gradient are the same operation to the kernels: every output is a sum over *taps*, each the product of
one source pixel and one filter position. The outputs of a strided data gradient fall into residue classes modulo the
stride, and each class has its own taps, so that no product with an inserted zero is computed. Integers in, integers
out: nothing here sees an array's content.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from minidl import shapes
from minidl.shapes import Pair, ceil_div

LANES = 16  # channels of a source block, as in the kernels
_TASK_PIXELS = 512  # outputs of a task: many enough to reuse a block of filters, few enough to stay in the L2 cache
_TASK_FLOATS = 1 << 17  # packed source of a task when groups allow to choose: half of a usual L2 cache
_UNIT_PIXELS = 256  # outputs summed up before a partial filter gradient is touched; part of the order of summation
_PACKED_FLOATS = 3 << 18  # most of the source packed at a time, 3 MB, unless a single row of outputs reads more
_PARTIALS = 16  # tasks of a filter gradient, as far as its size allows; part of the order of summation
_FOLDED = 4  # a source of so few channels is folded: a quarter of a block
_THREAD_FLOPS = 1 << 20  # less than this is not worth waking a thread


@dataclass(frozen=True, eq=False)
class OutputClass:
    """Outputs with the same taps: the first one, how many, and ``taps``, (4, T) int64: each tap's position in the
    filters and in the packed source, and the row and column that output (0, 0) reads.
    """

    row: int
    col: int
    rows: int
    cols: int
    taps: np.ndarray


@dataclass(frozen=True, eq=False)
class Plan:
    """Geometry of one pass; the names are those of the records in `_conv2d_types.h`.

    ``groups`` counts groups as the kernels see them: a depthwise convolution has groups of 16 channels. Of a folded
    source ``channels`` are those of ``fold`` pixels, and a tap is a row of the filter.
    """

    groups: int
    channels: int
    out_channels: int
    out_total: int
    depthwise: bool
    width: int  # output channels of a block
    filter_out_stride: int
    filter_in_stride: int
    filter_group_stride: int
    top: int
    left: int
    step_y: int
    step_x: int
    span_y: int
    phase: int
    fold: int
    fold_step: int
    out_step_y: int
    out_step_x: int
    rows: int
    cols: int
    classes: tuple[OutputClass, ...]

    @property
    def blocks(self) -> int:
        """Source blocks of a group."""
        return ceil_div(self.channels, LANES)

    @property
    def out_blocks(self) -> int:
        """Output blocks of a group."""
        return ceil_div(self.out_channels, self.width)

    @property
    def all_blocks(self) -> int:
        return self.groups * self.out_blocks

    @property
    def filter_floats(self) -> int:
        """Packed filters of all classes."""
        taps = sum(c.taps.shape[1] for c in self.classes)
        return self.all_blocks * self.width * taps * (1 if self.depthwise else self.channels)

    @property
    def flops(self) -> int:
        """Of one image."""
        products = sum(c.rows * c.cols * c.taps.shape[1] for c in self.classes)
        return 2 * products * self.groups * self.out_channels * (1 if self.depthwise else self.channels)

    @property
    def line_floats(self) -> int:
        """A line of a folded source with its padding."""
        columns = (self.phase - 1) * self.fold_step + self.fold
        return shapes.round_up(columns * self.channels // self.fold + LANES, LANES) if self.fold else 0

    def packed_floats(self, images: int, rows: int) -> int:
        """Packed source of one group for so many images and output rows."""
        tall = (rows - 1) * self.step_y + self.span_y + 1
        return self.blocks * images * tall * self.step_x * self.phase * LANES


@dataclass(frozen=True)
class Tasks:
    """``images`` images by ``rows`` rows of outputs at a time, the output blocks cut into ``splits`` parts; in a filter
    gradient gathered into ``chunks`` partial sums.
    """

    images: int
    rows: int
    row_blocks: int
    splits: int
    chunks: int
    count: int
    threads: int
    scratch_floats: int


# An axis of a pass: per class the first output, how many, and its taps (filter position, source offset) by offset.
_Axis = list[tuple[int, int, list[tuple[int, int]]]]


def _forward_axis(size: int, kernel: int, stride: int, padding: int, dilation: int, out: int) -> _Axis:
    taps = [(r, r * dilation - padding) for r in range(kernel)]
    return [(0, out, [(r, at) for r, at in taps if at < size and at + (out - 1) * stride >= 0])]


def _backward_axis(size: int, kernel: int, stride: int, padding: int, dilation: int, out: int) -> _Axis:
    # dx[stride*u + a] gathers dy[u + (a + padding - r*dilation)/stride] over the r for which that is an integer.
    axis = []
    for a in range(min(stride, size)):
        count = ceil_div(size - a, stride)
        taps = [(r, divmod(a + padding - r * dilation, stride)) for r in range(kernel)]
        taps = [(r, at) for r, (at, rest) in taps if rest == 0 and at < out and at + count > 0]
        axis.append((a, count, taps[::-1]))
    return axis


def _span(axis: _Axis) -> tuple[int, int]:
    """Smallest source offset of all taps, and the largest one relative to it."""
    offsets = [at for _, _, taps in axis for _, at in taps] or [0]
    return min(offsets), max(offsets) - min(offsets)


@lru_cache(maxsize=1024)
def make_plan(
    image: Pair,
    filters: tuple[int, ...],
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    width: int,
    backward: bool,
) -> Plan:
    """The plan of a forward pass over images of that size, or of the data gradient with respect to them.

    width: output channels that a kernel computes at a time.
    """
    K, R, S, C = filters
    depthwise = C == 1 and groups == K > 1
    sizes = zip(image, (R, S), stride, padding, dilation, strict=True)
    make = _backward_axis if backward else _forward_axis
    ys, xs = (make(*axis, shapes.conv_output_size(*axis)) for axis in sizes)
    fold = S if not backward and groups == 1 and C <= _FOLDED and S > 1 == dilation[1] else 0
    if fold:
        xs, S, C = [(0, xs[0][1], [(0, 0)])], 1, S * C
    (top, span_y), (left, span_x) = _span(ys), _span(xs)
    step_y, step_x = (1, 1) if backward else (stride[0], 1 if fold else stride[1])
    phase = ceil_div((xs[0][1] - 1) * step_x + span_x + 1, step_x)

    def place(y: int, x: int) -> int:
        return ((y - top) * step_x * phase + (x - left) % step_x * phase + (x - left) // step_x) * LANES

    classes = tuple(
        OutputClass(
            row, col, count_y, count_x,
            np.array([((r * S + s) * C, place(y, x), y, x) for r, y in taps_y for s, x in taps_x], np.int64)
            .reshape(-1, 4).T.copy(),
        )
        for row, count_y, taps_y in ys
        for col, count_x, taps_x in xs
    )  # fmt: skip
    inner, outer = (K // groups, C) if backward else (C, K // groups)
    out_stride, in_stride = (1, R * S * C) if backward else (R * S * C, 1)
    if depthwise:
        inner = outer = LANES
        out_stride, in_stride = R * S, 0
    return Plan(
        groups=ceil_div(K, LANES) if depthwise else groups,
        channels=inner,
        out_channels=outer,
        out_total=C * groups if backward else K,
        depthwise=depthwise,
        width=LANES if depthwise else width,
        filter_out_stride=out_stride,
        filter_in_stride=in_stride,
        filter_group_stride=(LANES if depthwise else K // groups) * R * S * C,
        top=top, left=-padding[1] if fold else left, step_y=step_y, step_x=step_x, span_y=span_y, phase=phase,
        fold=fold, fold_step=stride[1],
        out_step_y=stride[0] if backward else 1,
        out_step_x=stride[1] if backward else 1,
        rows=ys[0][1], cols=xs[0][1],
        classes=classes,
    )  # fmt: skip


def threads_for(available: int, tasks: int, flops: int) -> int:
    """How many of the threads to wake for so much work."""
    return max(1, min(available, tasks, flops // _THREAD_FLOPS))


def _blocking(plan: Plan, images: int, pixels: int) -> tuple[int, int, int]:
    """Images and rows of about ``pixels`` outputs, and the number of such row blocks of an image."""
    rows = max(1, min(plan.rows, pixels // plan.cols))
    while rows > 1 and plan.packed_floats(1, rows) > _PACKED_FLOATS:
        rows -= 1
    rows = ceil_div(plan.rows, ceil_div(plan.rows, rows))
    if rows < plan.rows:
        return 1, rows, ceil_div(plan.rows, rows)
    return max(1, min(images, pixels // (rows * plan.cols), _PACKED_FLOATS // plan.packed_floats(1, rows))), rows, 1


@lru_cache(maxsize=1024)
def apply_tasks(plan: Plan, images: int, available: int) -> Tasks:
    """Nothing here changes a bit of the result: every output is summed within one task, in the order of its taps."""
    wanted = 4 * available
    most, block, row_blocks = _blocking(plan, images, _TASK_PIXELS)

    def splits_of(together: int) -> int:
        places = ceil_div(images, together) * row_blocks
        splits = ceil_div(wanted, places) if places < wanted else 1
        if plan.groups > 1:
            splits = max(splits, plan.groups * plan.packed_floats(together, block) // _TASK_FLOATS)
        return min(splits, plan.all_blocks)

    def cost(together: int) -> tuple[int, int]:
        """Tasks that are missing; then floats moved: source packed by every split, filters read at every place."""
        places, splits = ceil_div(images, together) * row_blocks, splits_of(together)
        copies = splits if plan.groups == 1 else 1
        packed = 2 * places * copies * plan.groups * plan.packed_floats(together, block)
        return max(0, wanted - places * splits), packed + places * plan.filter_floats

    together = min(range(most, 0, -1), key=cost)
    splits = splits_of(together)
    places = ceil_div(images, together) * row_blocks
    # A split of b blocks that starts inside a group touches one group more than its size tells.
    groups = min(plan.groups, (ceil_div(plan.all_blocks, splits) + plan.out_blocks - 2) // plan.out_blocks + 1)
    sums = plan.cols * plan.width * (together * block if plan.blocks > 1 else 1)
    threads = threads_for(available, places * splits, images * plan.flops)
    scratch = plan.line_floats + groups * plan.packed_floats(together, block) + sums
    return Tasks(together, block, row_blocks, splits, 0, places * splits, threads, scratch)


@lru_cache(maxsize=1024)
def reduce_tasks(plan: Plan, images: int, available: int) -> Tasks:
    """Units and chunks are part of the order of summation, so they follow from the shapes alone; splits are not."""
    together, block, row_blocks = _blocking(plan, images, _UNIT_PIXELS)
    units = ceil_div(images, together) * row_blocks
    chunks = min(units, max(1, _PARTIALS // plan.all_blocks))
    splits = min(plan.all_blocks, ceil_div(4 * available, chunks))
    threads = threads_for(available, chunks * splits, images * plan.flops)
    scratch = plan.line_floats + plan.packed_floats(together, block) + together * block * plan.cols * plan.width
    return Tasks(together, block, row_blocks, splits, chunks, units, threads, scratch)
