"""Convolution on the CPU: the geometry of its passes, cut into tasks for the kernels in `_conv2d.h`.

Forward and data gradient are the same operation to the kernels: every output is a sum over *taps*, each the product of
one source pixel and one filter position. The outputs of a strided data gradient fall into residue classes modulo the
stride, and each class has its own taps, so that no product with an inserted zero is computed. A Linear layer (one pixel
in, one pixel out) is a plain matrix product and goes to BLAS.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from minidl import checks, shapes
from minidl.cpu import _conv2d
from minidl.cpu.array import Array, cast, contiguous, empty, rows, zeros
from minidl.precision import float32
from minidl.shapes import Pair, ceil_div

__all__ = ["channel_sum", "conv2d", "conv2d_backward_data", "conv2d_backward_weight"]

_LANES = 16  # channels of a source block, as in the kernels
_TASK_PIXELS = 512  # outputs of a task: many enough to reuse a block of filters, few enough to stay in the L2 cache
_TASK_FLOATS = 1 << 17  # packed source of a task when groups allow to choose: half of a usual L2 cache
_UNIT_PIXELS = 256  # outputs summed up before a partial filter gradient is touched; part of the order of summation
_PARTIALS = 16  # tasks of a filter gradient, as far as its size allows; part of the order of summation
_FOLDED = 4  # a source of so few channels is folded: a quarter of a block
_THREAD_FLOPS = 1 << 20  # less than this is not worth waking a thread
_SUM_ROWS = 2048  # rows of a partial channel sum; part of the order of summation
_CONVERTED = 1 << 22  # elements of a 16-bit matrix converted to float32 at a time

# Overflow and NaN are ordinary events in training (a loss scale reacts to them), not news.
_QUIET = np.errstate(over="ignore", invalid="ignore")


@dataclass(frozen=True, eq=False)
class _Class:
    """Outputs with the same taps: the first one, how many, and ``taps``, (4, T) int64: each tap's position in the
    filters and in the packed source, and the row and column that output (0, 0) reads.
    """

    row: int
    col: int
    rows: int
    cols: int
    taps: Array


@dataclass(frozen=True, eq=False)
class _Plan:
    """Geometry of one pass; the names are those of the records in `_conv2d_types.h`.

    ``groups`` counts groups as the kernels see them: a depthwise convolution has groups of 16 channels. Of a folded source
    ``channels`` are those of ``fold`` pixels, and a tap is a row of the filter.
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
    classes: tuple[_Class, ...]

    @property
    def blocks(self) -> int:
        """Source blocks of a group."""
        return ceil_div(self.channels, _LANES)

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
        return shapes.round_up(columns * self.channels // self.fold + _LANES, _LANES) if self.fold else 0

    def packed_floats(self, images: int, rows: int) -> int:
        """Packed source of one group for so many images and output rows."""
        tall = (rows - 1) * self.step_y + self.span_y + 1
        return self.blocks * images * tall * self.step_x * self.phase * _LANES


@dataclass(frozen=True)
class _Tasks:
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
def _plan(
    image: Pair,
    filters: tuple[int, ...],
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    width: int,
    backward: bool,
) -> _Plan:
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
        return ((y - top) * step_x * phase + (x - left) % step_x * phase + (x - left) // step_x) * _LANES

    classes = tuple(
        _Class(
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
        inner = outer = _LANES
        out_stride, in_stride = R * S, 0
    return _Plan(
        groups=ceil_div(K, _LANES) if depthwise else groups,
        channels=inner,
        out_channels=outer,
        out_total=C * groups if backward else K,
        depthwise=depthwise,
        width=_LANES if depthwise else width,
        filter_out_stride=out_stride,
        filter_in_stride=in_stride,
        filter_group_stride=(_LANES if depthwise else K // groups) * R * S * C,
        top=top, left=-padding[1] if fold else left, step_y=step_y, step_x=step_x, span_y=span_y, phase=phase,
        fold=fold, fold_step=stride[1],
        out_step_y=stride[0] if backward else 1,
        out_step_x=stride[1] if backward else 1,
        rows=ys[0][1], cols=xs[0][1],
        classes=classes,
    )  # fmt: skip


def _threads(available: int, tasks: int, flops: int) -> int:
    return max(1, min(available, tasks, flops // _THREAD_FLOPS))


def _blocking(plan: _Plan, images: int, pixels: int) -> tuple[int, int, int]:
    """Images and rows of about ``pixels`` outputs, and the number of such row blocks of an image."""
    rows_per_block = ceil_div(plan.rows, ceil_div(plan.rows, max(1, pixels // plan.cols)))
    row_blocks = ceil_div(plan.rows, rows_per_block)
    together = max(1, min(images, pixels // (plan.rows * plan.cols))) if row_blocks == 1 else 1
    return together, rows_per_block, row_blocks


@lru_cache(maxsize=1024)
def _apply_tasks(plan: _Plan, images: int, available: int) -> _Tasks:
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
    threads = _threads(available, places * splits, images * plan.flops)
    scratch = plan.line_floats + groups * plan.packed_floats(together, block) + sums
    return _Tasks(together, block, row_blocks, splits, 0, places * splits, threads, scratch)


@lru_cache(maxsize=1024)
def _reduce_tasks(plan: _Plan, images: int, available: int) -> _Tasks:
    """Units and chunks are part of the order of summation, so they follow from the shapes alone; splits are not."""
    together, block, row_blocks = _blocking(plan, images, _UNIT_PIXELS)
    units = ceil_div(images, together) * row_blocks
    chunks = min(units, max(1, _PARTIALS // plan.all_blocks))
    splits = min(plan.all_blocks, ceil_div(4 * available, chunks))
    threads = _threads(available, chunks * splits, images * plan.flops)
    scratch = plan.line_floats + plan.packed_floats(together, block) + together * block * plan.cols * plan.width
    return _Tasks(together, block, row_blocks, splits, chunks, units, threads, scratch)


def _apply(plan: _Plan, source: Array, filters: Array, out: Array, bias: Array | None, add: Array | None) -> Array:
    """Fills ``out`` with one pass, see `_plan`."""
    if out.size == 0:
        return out
    tasks = _apply_tasks(plan, out.shape[0], _conv2d.max_threads())
    if bias is not None:
        bias = np.concatenate([bias, zeros(plan.width, float32)])
    packed, scratch = _work(1, plan.filter_floats), _work(tasks.threads, tasks.scratch_floats)
    _conv2d.apply(plan, tasks, _unit_channels(source), contiguous(filters), out, bias, add, packed, scratch)
    return out


def _work(threads: int, floats: int) -> Array:
    """Work space of so many float32 per thread, starting anywhere before the first multiple of 64 bytes."""
    return empty((threads, shapes.round_up(floats + _LANES, _LANES)), float32)


def _unit_channels(x: Array) -> Array:
    """``x`` with channels side by side: the kernels take any other stride, so pitched and cropped views stay views."""
    return x if x.shape[-1] <= 1 or x.strides[-1] == x.itemsize else contiguous(x)


def _refuse_tf32(who: str, tf32: bool) -> None:
    if tf32:
        raise checks.bad_value(who, "tf32", "False on the CPU", tf32, "TF32 exists on the GPU only")


def _skip_pixels(x: Array, filters: tuple[int, ...], stride: Pair, padding: Pair) -> tuple[Array, Pair]:
    """A strided 1x1 convolution reads every stride-th pixel only: the view of these, and stride one."""
    if filters[1:3] == (1, 1) and padding == (0, 0):
        return x[:, :: stride[0], :: stride[1]], (1, 1)
    return x, stride


def _is_linear(x_shape: tuple[int, ...], filters: tuple[int, ...], padding: Pair, groups: int) -> bool:
    return x_shape[1:3] == (1, 1) == filters[1:3] and padding == (0, 0) and groups == 1


@_QUIET
def conv2d(
    x: Array, w: Array, bias: Array | None = None, *, stride: Pair, padding: Pair, dilation: Pair, groups: int,
    tf32: bool = False,
) -> Array:  # fmt: skip
    """y[n, p, q, k] = sum over r, s, c of x[n, p*stride - padding + r*dilation, ..., c] * w[k, r, s, c] (+ bias[k]).

    Args:
        x: input, (N, H, W, C), unit channel stride or else copied.
        w: filters, (K, R, S, C/groups), dtype of ``x``.
        bias: (K,) float32, added before the one rounding to the storage dtype.
        stride, padding, dilation: (height, width) pairs; the padding holds zeros.
        groups: channels are cut into so many groups that do not mix; ``groups == C == K`` is a depthwise convolution.

    Returns:
        y: (N, P, Q, K), dense, dtype of ``x``.

    Raises:
        ValueError: ``tf32=True``, which only a GPU has.
    """
    _refuse_tf32("conv2d", tf32)
    if _is_linear(x.shape, w.shape, padding, groups):
        return _linear(x, w, bias)
    x, stride = _skip_pixels(x, w.shape, stride, padding)
    plan = _plan(x.shape[1:3], w.shape, stride, padding, dilation, groups, _conv2d.block_width(), False)
    return _apply(plan, x, w, empty((x.shape[0], plan.rows, plan.cols, w.shape[0]), x.dtype), bias, None)


@_QUIET
def conv2d_backward_data(
    dy: Array, w: Array, x_shape: tuple[int, ...], *, stride: Pair, padding: Pair, dilation: Pair, groups: int,
    bias: Array | None = None, add: Array | None = None, tf32: bool = False,
) -> Array:  # fmt: skip
    """The adjoint of `conv2d` in ``x``: the data gradient, or the forward pass of a transposed convolution.

    Args:
        dy: (N, P, Q, K).
        w: filters, (K, R, S, C/groups), dtype of ``dy``.
        x_shape: (N, H, W, C).
        stride, padding, dilation, groups: those of the forward pass.
        bias: (C,) float32, added before the one rounding.
        add: (N, H, W, C), dtype of ``dy``, added before the one rounding.

    Returns:
        dx: (N, H, W, C), dense, dtype of ``dy``.

    Raises:
        ValueError: ``tf32=True``, which only a GPU has.
    """
    _refuse_tf32("conv2d_backward_data", tf32)
    x_shape = tuple(x_shape)
    if add is not None:
        add = _unit_channels(add)
    if _is_linear(x_shape, w.shape, padding, groups):
        return _linear_backward_data(dy, w, bias, add)
    plan = _plan(x_shape[1:3], w.shape, stride, padding, dilation, groups, _conv2d.block_width(), True)
    return _apply(plan, dy, w, empty(x_shape, dy.dtype), bias, add)


@_QUIET
def conv2d_backward_weight(
    dy: Array, x: Array, *, stride: Pair, padding: Pair, dilation: Pair, groups: int, out: Array,
    accumulate: bool = False, tf32: bool = False,
) -> None:  # fmt: skip
    """The gradient of `conv2d` with respect to its filters.

    Images are summed in chunks fixed by the shapes, which are then added in order: the bits do not depend on threads.

    Args:
        dy: (N, P, Q, K).
        x: (N, H, W, C), dtype of ``dy``.
        stride, padding, dilation, groups: those of the forward pass.
        out: (K, R, S, C/groups) float32, dense: overwritten, or added to with ``accumulate``.

    Raises:
        ValueError: ``tf32=True``, which only a GPU has.
    """
    _refuse_tf32("conv2d_backward_weight", tf32)
    assert out.dtype == float32 and out.flags.c_contiguous
    if _is_linear(x.shape, out.shape, padding, groups):
        _add_product(out.reshape(out.shape[0], out.shape[-1]), _float32(dy).T, _float32(x), accumulate)
        return
    x, stride = _skip_pixels(x, out.shape, stride, padding)
    plan = _plan(x.shape[1:3], out.shape, stride, padding, dilation, groups, _conv2d.block_width(), False)
    # A tap that meets nothing but padding is not computed.
    complete = dy.size and plan.classes[0].taps.shape[1] * max(1, plan.fold) == out.shape[1] * out.shape[2]
    if not complete and not accumulate:
        out.fill(0)
    if not dy.size:
        return
    units = _reduce_tasks(plan, dy.shape[0], _conv2d.max_threads())
    partial, scratch = _work(1, units.chunks * plan.filter_floats), _work(units.threads, units.scratch_floats)
    _conv2d.reduce(plan, units, _unit_channels(x), _unit_channels(dy), out, partial, scratch, accumulate)


@_QUIET
def channel_sum(dy: Array, *, out: Array, accumulate: bool = False) -> None:
    """The gradient of a bias: ``out[c]`` = sum of ``dy[..., c]``.

    Args:
        dy: (..., C).
        out: (C,) float32: overwritten, or added to with ``accumulate``.
    """
    dy = rows(dy)
    blocks = ceil_div(dy.shape[0], _SUM_ROWS)
    partial = zeros((blocks, dy.shape[1]), np.float64)
    if dy.size:
        _conv2d.channel_sum(dy, partial, _SUM_ROWS, _threads(_conv2d.max_threads(), blocks, _LANES * dy.size))
    total = np.add.reduce(partial, axis=0)
    out[...] = out + total if accumulate else total


def _float32(x: Array) -> Array:
    """(N, 1, 1, C) as float32 (N, C)."""
    x = x.reshape(x.shape[0], x.shape[-1])
    return x if x.dtype == float32 else cast(x, float32)


def _add_product(out: Array, a: Array, b: Array, accumulate: bool) -> None:
    """out (+)= a @ b"""
    if not accumulate:
        np.matmul(a, b, out=out)
        return
    product = empty(out.shape, float32)
    np.matmul(a, b, out=product)
    np.add(out, product, out=out)


def _finish(y: Array, shape: tuple[int, ...], bias: Array | None, add: Array | None, dtype: np.dtype) -> Array:
    """y (float32, overwritten) plus bias and ``add``, rounded once."""
    if bias is not None:
        y += bias
    y = y.reshape(shape)
    if add is not None:
        y += add if add.dtype == float32 else cast(add, float32)
    return y if y.dtype == dtype else cast(y, dtype)


def _filter_parts(w: Array):
    """(first, last, part) of a (K, C) matrix in float32: itself, or so many rows of a 16-bit one at a time."""
    step = len(w) if w.dtype == float32 else max(1, _CONVERTED // max(1, w.shape[1]))
    for k in range(0, len(w), max(1, step)):
        yield k, min(k + step, len(w)), w[k : k + step] if w.dtype == float32 else cast(w[k : k + step], float32)


def _linear(x: Array, w: Array, bias: Array | None) -> Array:
    """(N, 1, 1, C) and (K, 1, 1, C) -> (N, 1, 1, K)"""
    rows_x, y = _float32(x), empty((x.shape[0], w.shape[0]), float32)
    for first, last, part in _filter_parts(w.reshape(w.shape[0], w.shape[-1])):
        np.matmul(rows_x, part.T, out=y[:, first:last])
    return _finish(y, (x.shape[0], 1, 1, w.shape[0]), bias, None, x.dtype)


def _linear_backward_data(dy: Array, w: Array, bias: Array | None, add: Array | None) -> Array:
    rows_dy, dx = _float32(dy), empty((dy.shape[0], w.shape[3]), float32)
    for first, last, part in _filter_parts(w.reshape(w.shape[0], w.shape[-1])):
        _add_product(dx, rows_dy[:, first:last], part, first > 0)
    return _finish(dx, (dy.shape[0], 1, 1, w.shape[3]), bias, add, dy.dtype)
