"""Convolution on the CPU: its passes on arrays, for the kernels in `_conv2d.h`, planned in `conv2d_plan.py`.

A Linear layer (one pixel in, one pixel out) is a plain matrix product and goes to BLAS, whose bits may depend on its
own number of threads (OpenBLAS's do on AMD's Zen 3); those of all else do not depend on ours.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from minidl import checks, shapes
from minidl.cpu import _conv2d
from minidl.cpu.activation import activate, relu_backward
from minidl.cpu.array import QUIET, Array, cast, contiguous, copy_into, empty, rows, write_gradient, zeros
from minidl.cpu.batch_norm import (
    batch_norm_apply,
    batch_norm_backward_apply,
    batch_norm_backward_stats,
    batch_norm_join,
    batch_norm_stats,
)
from minidl.cpu.conv2d_plan import LANES, Plan, apply_tasks, make_plan, reduce_tasks, threads_for
from minidl.cpu.pool2d import batch_norm_max_pool2d_backward
from minidl.precision import float32
from minidl.shapes import Pair, ceil_div

Norm = tuple[Array, Array, Array]  # moments, gamma, beta
_SUM_ROWS = 2048  # rows of a partial channel sum; part of the order of summation
_CONVERTED = 1 << 22  # elements of a 16-bit matrix converted to float32 at a time


def _apply(plan: Plan, source: Array, filters: Array, out: Array, bias: Array | None, add: Array | None) -> Array:
    """Fills ``out`` with one pass, see `_plan`."""
    if out.size == 0:
        return out
    tasks = apply_tasks(plan, out.shape[0], _conv2d.max_threads())
    if bias is not None:
        bias = np.concatenate([bias, zeros(plan.width, float32)])
    packed, scratch = _work(1, plan.filter_floats), _work(tasks.threads, tasks.scratch_floats)
    _conv2d.apply(plan, tasks, _unit_channels(source), contiguous(filters), out, bias, add, packed, scratch)
    return out


def _work(threads: int, floats: int) -> Array:
    """Work space of so many float32 per thread, starting anywhere before the first multiple of 64 bytes."""
    return empty((threads, shapes.round_up(floats + LANES, LANES)), float32)


def _unit_channels(x: Array) -> Array:
    """``x`` with channels side by side: the kernels take any other stride, so pitched and cropped views stay views."""
    return x if x.shape[-1] <= 1 or x.strides[-1] == x.itemsize else contiguous(x)


def refuse_tf32(who: str, tf32: int) -> None:
    """Raise if products are to be rounded."""
    if tf32:
        raise checks.bad_value(who, "tf32", "0 on the CPU", tf32, "TF32 exists on the GPU only")


def _skip_pixels(x: Array, filters: tuple[int, ...], stride: Pair, padding: Pair) -> tuple[Array, Pair]:
    """A strided 1x1 convolution reads every stride-th pixel only: the view of these, and stride one."""
    if filters[1:3] == (1, 1) and padding == (0, 0):
        return x[:, :: stride[0], :: stride[1]], (1, 1)
    return x, stride


def _is_linear(x_shape: tuple[int, ...], filters: tuple[int, ...], padding: Pair, groups: int) -> bool:
    return x_shape[1:3] == (1, 1) == filters[1:3] and padding == (0, 0) and groups == 1


@QUIET
def conv2d(
    x: Array, w: Array, bias: Array | None = None, *, stride: Pair, padding: Pair, dilation: Pair, groups: int,
    norm: Norm | None = None, relu: bool = False, tf32: int = 0, packed: bool = False, out: Array | None = None,
) -> Array:  # fmt: skip
    """y[n, p, q, k] = sum over r, s, c of x[n, p*stride - padding + r*dilation, ..., c] * w[k, r, s, c] (+ bias[k]).

    Args:
        x: input, (N, H, W, C), unit channel stride or else copied.
        w: filters, (K, R, S, C/groups), dtype of ``x``.
        bias: (K,) float32, added before the one rounding to the storage dtype.
        stride, padding, dilation: (height, width) pairs; the padding holds zeros.
        groups: channels are cut into so many groups that do not mix; ``groups == C == K`` is a depthwise convolution.
        norm: (moments, gamma, beta) of (2, C), (C,), (C,) float32, or None: the input is
            ``batch_norm_apply(x, *norm, relu=True)``.
        relu: the result is ``relu`` of that.
        packed: lets a GPU do that in packed 16-bit arithmetic; nothing here.
        out: where the result is to lie, dense or pitched; default: a new array.

    Returns:
        y: (N, P, Q, K), dense but for ``out``, dtype of ``x``.

    Raises:
        ValueError: where ``tf32`` is not 0, which only a GPU has.
    """
    refuse_tf32("conv2d", tf32)
    geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    if out is not None:
        copy_into(out, conv2d(x, w, bias, **geometry, norm=norm, relu=relu))
        return out
    if norm is not None:
        x = batch_norm_apply(x, *norm, relu=True)
    if relu:
        return activate(conv2d(x, w, bias, **geometry), "relu")
    if _is_linear(x.shape, w.shape, padding, groups):
        return _linear(x, w, bias)
    x, stride = _skip_pixels(x, w.shape, stride, padding)
    plan = make_plan(x.shape[1:3], w.shape, stride, padding, dilation, groups, _conv2d.block_width(), False)
    return _apply(plan, x, w, empty((x.shape[0], plan.rows, plan.cols, w.shape[0]), x.dtype), bias, None)


def conv2d_stats(
    x: Array, w: Array, bias: Array | None = None, *, stride: Pair, padding: Pair, dilation: Pair, groups: int,
    norm: Norm | None = None, tf32: int = 0, packed: bool = False, finish: bool = True, out: Array | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """`conv2d`, and ``batch_norm_stats`` of its result, always finished."""
    geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    y = conv2d(x, w, bias, **geometry, norm=norm, tf32=tf32, out=out)
    return y, batch_norm_stats(y)


def conv2d_makes_join(
    x_shape: tuple[int, ...], w: Array, *, stride: Pair, padding: Pair, dilation: Pair, groups: int, tf32: int = 0
) -> bool:
    """Whether a kernel does what `conv2d_join` does: a GPU's may."""
    return False


def conv2d_join(
    x: Array, moments: Array, gamma: Array | None, beta: Array | None, add: Array, w: Array, *, stride: Pair,
    padding: Pair, dilation: Pair, groups: int, add_moments: Array | None = None, add_gamma: Array | None = None,
    add_beta: Array | None = None, tf32: int = 0, statistics: bool = False, finish: bool = True,
) -> tuple[Array, Array | None, Array, Array | None]:  # fmt: skip
    """A residual sum with its ReLU, and the convolution that reads it first.

    Args:
        x, moments, gamma, beta, add, add_moments, add_gamma, add_beta: as `batch_norm_join` takes them.
        w: filters of the convolution of the sum, which has no bias.
        statistics: whether the convolution's are wanted.
        finish: as in `conv2d_stats`.

    Returns:
        The sum and its signs, as of `batch_norm_join`; the convolution and its statistics, as of `conv2d_stats`, or
        None.
    """
    geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "tf32": tf32}
    other = {"add_moments": add_moments, "add_gamma": add_gamma, "add_beta": add_beta}
    z, signs = batch_norm_join(x, moments, gamma, beta, add, **other)
    if statistics:
        return z, signs, *conv2d_stats(z, w, **geometry, finish=finish)
    return z, signs, conv2d(z, w, **geometry), None


def conv2d_adds_spaced(
    x_shape: tuple[int, ...], w: Array, *, stride: Pair, padding: Pair, dilation: Pair, groups: int, tf32: int = 0
) -> bool:
    """Whether the data gradient can add every second pixel of every second line: a GPU's may."""
    return False


@QUIET
def conv2d_backward_data(
    dy: Array, w: Array, x_shape: tuple[int, ...], *, stride: Pair, padding: Pair, dilation: Pair, groups: int,
    bias: Array | None = None, add: Array | None = None, tf32: int = 0, out: Array | None = None,
) -> Array:  # fmt: skip
    """The adjoint of `conv2d` in ``x``: the data gradient, or the forward pass of a transposed convolution.

    Args:
        dy: (N, P, Q, K).
        w: filters, (K, R, S, C/groups), dtype of ``dy``.
        x_shape: (N, H, W, C).
        stride, padding, dilation, groups: those of the forward pass.
        bias: (C,) float32, added before the one rounding.
        add: (N, H, W, C), dtype of ``dy``, added before the one rounding.
        out: as in `conv2d`.

    Returns:
        dx: (N, H, W, C), dense but for ``out``, dtype of ``dy``.

    Raises:
        ValueError: where ``tf32`` is not 0, which only a GPU has.
    """
    refuse_tf32("conv2d_backward_data", tf32)
    x_shape = tuple(x_shape)
    geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    if out is not None:
        copy_into(out, conv2d_backward_data(dy, w, x_shape, **geometry, bias=bias, add=add))
        return out
    if add is not None:
        add = _unit_channels(add)
    if _is_linear(x_shape, w.shape, padding, groups):
        return _linear_backward_data(dy, w, bias, add)
    plan = make_plan(x_shape[1:3], w.shape, stride, padding, dilation, groups, _conv2d.block_width(), True)
    return _apply(plan, dy, w, empty(x_shape, dy.dtype), bias, add)


def conv2d_backward_data_summed(
    dy: Array, w: Array, x_shape: tuple[int, ...], *, stride: Pair, padding: Pair, dilation: Pair, groups: int,
    add: Array | None = None, mask: Array | None = None, tf32: int = 0,
) -> tuple[Array, None]:  # fmt: skip
    """`conv2d_backward_data`, and None: a GPU's may leave parts of its sums, for the bias of the layer below.

    Args:
        mask: (N, H, W, C), the output of a ReLU whose gradient this is, or None: the result counts where it is
            positive.
    """
    geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    dx = conv2d_backward_data(dy, w, x_shape, **geometry, add=add, tf32=tf32)
    return dx if mask is None else relu_backward(dx, mask), None


def conv2d_takes_pair(
    x_shape: tuple[int, ...], w: Array, *, stride: Pair, padding: Pair, dilation: Pair, groups: int, tf32: int = 0
) -> bool:
    """Whether a kernel takes sums for two batch norms in `conv2d_backward_data_masked`: a GPU's may."""
    return False


def conv2d_backward_data_masked(
    dy: Array, w: Array, x: Array, moments: Array, gamma: Array | None = None, beta: Array | None = None, *,
    y: Array | None = None, signs: None = None, other: tuple[Array, Array] | None = None, stride: Pair, padding: Pair,
    dilation: Pair, groups: int, add: Array | None = None, transposed: bool = False, tf32: int = 0,
) -> tuple[Array, Array]:  # fmt: skip
    """`conv2d_backward_data` masked by the ReLU below, and for ``batch_norm_backward_sums`` the sums of its batch norm.

    Args:
        x, moments, gamma, beta: of the batch norm.
        y: the ReLU's output where it is not ``relu(batch_norm_apply(x, moments, gamma, beta))``.
        signs: None; GPUs have them of ``y``.
        other: input and moments of another batch norm under the same sum, whose sums are then the second of two.
        transposed: the gradient of a transposed convolution instead, ``conv2d(dy, w)``; without ``add``.
    """
    geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    assert add is None or not transposed, "a convolution adds nothing"
    if transposed:
        dx = conv2d(dy, w, **geometry, tf32=tf32)
    else:
        dx = conv2d_backward_data(dy, w, x.shape, **geometry, add=add, tf32=tf32)
    dx = relu_backward(dx, batch_norm_apply(x, moments, gamma, beta, relu=True) if y is None else y)
    sums = batch_norm_backward_stats(dx, x, moments)
    return dx, sums if other is None else np.stack([sums, batch_norm_backward_stats(dx, *other)])


def conv2d_makes_both(
    x_shape: tuple[int, ...], w: Array, *, stride: Pair, padding: Pair, dilation: Pair, groups: int,
    norm: bool = False, below: int = 0, add: bool = False, tf32: int = 0,
) -> bool:  # fmt: skip
    """Whether a kernel does what `conv2d_backward_both` does, given a ``norm``, so many batch norms ``below``, and an
    array to ``add``: a GPU's may.
    """
    return False


def conv2d_backward_both(
    dz: Array, y: Array, moments: Array, gamma: Array | None, sums: Array, count: Array, w: Array, x: Array, *,
    stride: Pair, padding: Pair, dilation: Pair, groups: int, out: Array, accumulate: bool = False,
    norm: Norm | None = None, below: tuple[Array, Array] | None = None, other: tuple[Array, Array] | None = None,
    add: Array | None = None, tf32: int = 0,
) -> tuple[Array, Array | None]:  # fmt: skip
    """Both gradients of a convolution under a batch norm over its batch, from what its output's gradient is made of.

    Args:
        dz: (N, P, Q, K), gradient of the batch norm's output.
        y, moments, gamma, sums, count: as `batch_norm_backward_apply` takes them; ``y`` is the convolution's output.
        w, x: of the convolution.
        norm: (moments, gamma, beta) where ``x`` is the input of that batch norm with a ReLU over it, whose output the
            convolution saw; the gradient of ``x`` counts where that is positive.
        below: input and moments of a batch norm under a ReLU, perhaps with more in a sum, whose output ``x`` is; the
            gradient counts where that is positive.
        other: likewise of another batch norm in that sum; as of `conv2d_backward_data_masked`.
        add: as of `conv2d_backward_data`.
        out, accumulate: the filters' gradient, as of `conv2d_backward_weight`.

    Returns:
        The gradient of ``x``; with ``norm`` or ``below`` the parts of that batch norm's sums, as of
        `conv2d_backward_data_masked`, else None.
    """
    geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "tf32": tf32}
    dy = batch_norm_backward_apply(dz, y, moments, gamma, sums, count)
    conv2d_backward_weight(dy, x, **geometry, out=out, accumulate=accumulate, norm=norm)
    if below is not None:
        return conv2d_backward_data_masked(dy, w, *below, y=x, other=other, add=add, **geometry)
    if norm is None:
        return conv2d_backward_data(dy, w, x.shape, **geometry, add=add), None
    return conv2d_backward_data_masked(dy, w, x, *norm, add=add, **geometry)


def conv2d_backward_weight_pooled(
    dz: Array, index: Array, y: Array, moments: Array, gamma: Array | None, sums: Array, count: Array, x: Array, *,
    pooling: Mapping[str, Pair], stride: Pair, padding: Pair, dilation: Pair, groups: int, out: Array,
    accumulate: bool = False, tf32: int = 0,
) -> None:  # fmt: skip
    """`conv2d_backward_weight` under a batch norm over its batch, a ReLU and a max pooling, from what its output's
    gradient is made of, where nobody else needs that.

    Args:
        dz, index, y, moments, gamma, sums, count: as `batch_norm_max_pool2d_backward` takes them; ``y`` (N, P, Q, K) is
            the convolution's output.
        pooling: kernel, stride, padding and dilation of the windows.
        x, stride, padding, dilation, groups, out, accumulate: as of `conv2d_backward_weight`.
    """
    geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "tf32": tf32}
    dy = batch_norm_max_pool2d_backward(dz, index, y, moments, gamma, sums, count, **pooling)
    conv2d_backward_weight(dy, x, **geometry, out=out, accumulate=accumulate)


@QUIET
def conv2d_backward_weight(
    dy: Array, x: Array, *, stride: Pair, padding: Pair, dilation: Pair, groups: int, out: Array,
    accumulate: bool = False, norm: Norm | None = None, tf32: int = 0,
) -> None:  # fmt: skip
    """The gradient of `conv2d` with respect to its filters.

    Images are summed in chunks fixed by the shapes, which are then added in order: the bits do not depend on threads.

    Args:
        dy: (N, P, Q, K).
        x: (N, H, W, C), dtype of ``dy``.
        stride, padding, dilation, groups: those of the forward pass.
        out: (K, R, S, C/groups) float32, dense: overwritten, or added to with ``accumulate``.
        norm: as in `conv2d`.

    Raises:
        ValueError: where ``tf32`` is not 0, which only a GPU has.
    """
    refuse_tf32("conv2d_backward_weight", tf32)
    assert out.dtype == float32 and out.flags.c_contiguous
    if norm is not None:
        x = batch_norm_apply(x, *norm, relu=True)
    if _is_linear(x.shape, out.shape, padding, groups):
        _add_product(out.reshape(out.shape[0], out.shape[-1]), _float32(dy).T, _float32(x), accumulate)
        return
    x, stride = _skip_pixels(x, out.shape, stride, padding)
    plan = make_plan(x.shape[1:3], out.shape, stride, padding, dilation, groups, _conv2d.block_width(), False)
    # A tap that meets nothing but padding is not computed.
    complete = dy.size and plan.classes[0].taps.shape[1] * max(1, plan.fold) == out.shape[1] * out.shape[2]
    if not complete and not accumulate:
        out.fill(0)
    if not dy.size:
        return
    units = reduce_tasks(plan, dy.shape[0], _conv2d.max_threads())
    partial, scratch = _work(1, units.chunks * plan.filter_floats), _work(units.threads, units.scratch_floats)
    _conv2d.reduce(plan, units, _unit_channels(x), _unit_channels(dy), out, partial, scratch, accumulate)


@QUIET
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
        _conv2d.channel_sum(dy, partial, _SUM_ROWS, threads_for(_conv2d.max_threads(), blocks, LANES * dy.size))
    write_gradient(out, np.add.reduce(partial, axis=0), accumulate)


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
