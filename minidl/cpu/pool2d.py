"""Two-dimensional pooling and its gradients, NHWC. Window arguments are (height, width) pairs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minidl.cpu import _pool2d
from minidl.cpu.array import Array, contiguous, empty, rows_float32, stored, zeros
from minidl.cpu.batch_norm import (
    batch_norm_activate_backward_apply,
    batch_norm_activate_backward_stats,
    batch_norm_apply,
    batch_norm_backward_apply,
)
from minidl.precision import float32
from minidl.shapes import Pair, ceil_div, pool_output_size


def max_pool2d(
    x: Array, *, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, ceil_mode: bool
) -> tuple[Array, Array]:
    """Maximum over windows of ``x`` (N, H, W, C); padding never wins.

    Returns:
        y (N, P, Q, C) in the dtype of ``x``; index (N, P, Q, C), uint8 (uint16 when the window has more than 256
        positions): the row-major position in the window of the first maximum. A NaN wins over every number, and a later
        NaN over an earlier one.
    """
    n, height, width, channels = x.shape
    out = tuple(
        pool_output_size(size, *axis, ceil_mode)
        for size, *axis in zip((height, width), kernel, stride, padding, dilation, strict=True)
    )
    shape = (n, *out, channels)
    index = empty(shape, np.uint8 if kernel[0] * kernel[1] <= 256 else np.uint16)
    y = empty((n * out[0] * out[1], channels), float32)
    if y.size:
        axes = zip((height, width), out, kernel, stride, padding, dilation, strict=True)
        _pool2d.max_pool(rows_float32(x), *axes, y, _bytes(index))
    return stored(y, shape, x.dtype), index


def max_pool2d_backward(
    dy: Array, index: Array, x_shape: Sequence[int], *, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair,
    add: Array | None = None,
) -> Array:  # fmt: skip
    """Gradient of `max_pool2d` for ``x`` of shape ``x_shape``: each ``dy`` goes where its maximum was (+ ``add``)."""
    n, height, width, channels = x_shape
    assert dy.shape == index.shape and dy.shape[::3] == (n, channels), (dy.shape, index.shape, x_shape)
    if dy.size == 0:
        return zeros(x_shape, dy.dtype)
    dx = empty((n * height * width, channels), float32)
    axes = zip((height, width), dy.shape[1:3], kernel, stride, padding, dilation, strict=True)
    _pool2d.max_pool_backward(_dense_rows(dy), _bytes(contiguous(index)), *axes, dx)
    if add is not None:
        dx += rows_float32(add)
    return stored(dx, x_shape, dy.dtype)


def batch_norm_max_pool2d(
    x: Array, moments: Array, gamma: Array, beta: Array, *, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair,
    ceil_mode: bool,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """`max_pool2d` of ``relu(batch_norm_apply(x, moments, gamma, beta))``; and ``x`` at each maximum.

    Returns:
        y, index: as of `max_pool2d`; largest (N, P, Q, C) in the dtype of ``x``.
    """
    window = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation, "ceil_mode": ceil_mode}
    y, index = max_pool2d(batch_norm_apply(x, moments, gamma, beta, relu=True), **window)
    n, p, q, c = np.indices(y.shape, sparse=True)
    tap = index.astype(np.intp)
    h, w = (
        at * stride[i] - padding[i] + tap_at * dilation[i]
        for i, (at, tap_at) in enumerate(zip((p, q), np.divmod(tap, kernel[1]), strict=True))
    )
    return y, index, np.ascontiguousarray(x[n, h, w, c])


def batch_norm_max_pool2d_backward(
    dy: Array, index: Array, x: Array, moments: Array, gamma: Array, sums: Array | None, count: Array | None, *,
    kernel: Pair, stride: Pair, padding: Pair, dilation: Pair,
) -> Array:  # fmt: skip
    """``batch_norm_backward_apply`` of `max_pool2d_backward` of ``dy``.

    Args:
        dy: gradient of `batch_norm_max_pool2d`'s output where that is positive, else 0.
        index: as that gave it.
        x, moments, gamma, sums, count: as of ``batch_norm_backward_apply``.
    """
    window = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    return batch_norm_backward_apply(max_pool2d_backward(dy, index, x.shape, **window), x, moments, gamma, sums, count)


def batch_norm_max_tiles(
    x: Array, moments: Array, gamma: Array, beta: Array, *, kernel: Pair, ceil_mode: bool, out: Array | None = None
) -> tuple[Array, Array]:
    """``relu(batch_norm_apply(x, moments, gamma, beta))``, and what `max_pool2d` makes of it.

    Args:
        kernel: of windows that lie side by side.
        out: where the first of the two is to lie.
    """
    y = batch_norm_apply(x, moments, gamma, beta, relu=True, out=out)
    return y, max_pool2d(y, **_tiles(kernel), ceil_mode=ceil_mode)[0]


def batch_norm_max_tiles_backward_stats(
    dy: Array, add: Array | None, x: Array, moments: Array, gamma: Array, beta: Array, *, kernel: Pair,
    dgamma: Array | None = None, dbeta: Array | None = None, accumulate: bool = False,
) -> Array:  # fmt: skip
    """``batch_norm_activate_backward_stats`` where two read the ReLU's output.

    Args:
        dy: gradient of what `batch_norm_max_tiles` pooled.
        add: that of its output elsewhere, or None.
    """
    gradient, norm = _untiled(dy, add, x, moments, gamma, beta, kernel), (x, moments, gamma, beta)
    return batch_norm_activate_backward_stats(gradient, *norm, dgamma=dgamma, dbeta=dbeta, accumulate=accumulate)


def batch_norm_max_tiles_backward_apply(
    dy: Array, add: Array | None, x: Array, moments: Array, gamma: Array, beta: Array, sums: Array | None,
    count: Array | None, *, kernel: Pair,
) -> Array:  # fmt: skip
    """``batch_norm_activate_backward_apply``, of gradients as `batch_norm_max_tiles_backward_stats` has them."""
    gradient, norm = _untiled(dy, add, x, moments, gamma, beta, kernel), (x, moments, gamma, beta)
    return batch_norm_activate_backward_apply(gradient, *norm, sums, count)


def _untiled(dy: Array, add: Array | None, x: Array, moments: Array, gamma: Array, beta: Array, kernel: Pair) -> Array:
    """The gradient of a ReLU's output that is pooled in tiles and read elsewhere."""
    y = batch_norm_apply(x, moments, gamma, beta, relu=True)
    ceil_mode = dy.shape[1] * kernel[0] > x.shape[1] or dy.shape[2] * kernel[1] > x.shape[2]
    _, index = max_pool2d(y, **_tiles(kernel), ceil_mode=ceil_mode)
    return max_pool2d_backward(dy, index, x.shape, **_tiles(kernel), add=add)


def _tiles(kernel: Pair) -> dict[str, Pair]:
    """The window of a pooling whose windows lie side by side."""
    return {"kernel": kernel, "stride": kernel, "padding": (0, 0), "dilation": (1, 1)}


def avg_pool2d(
    x: Array, *, kernel: Pair, stride: Pair, padding: Pair, ceil_mode: bool, count_include_pad: bool
) -> Array:
    """Mean over windows of ``x`` (N, H, W, C) -> (N, P, Q, C).

    The divisor is the number of positions of the window within the padded input, or with ``count_include_pad=False``
    within the input itself. What ``ceil_mode`` lets a window reach beyond the padding never counts.
    """
    return _mean(x, *_windows(x.shape, kernel, stride, padding, ceil_mode, count_include_pad))


def avg_pool2d_backward(
    dy: Array, x_shape: Sequence[int], *, kernel: Pair, stride: Pair, padding: Pair, ceil_mode: bool,
    count_include_pad: bool,
) -> Array:  # fmt: skip
    """Gradient of `avg_pool2d` for ``x`` of shape ``x_shape``."""
    return _mean_backward(dy, x_shape, *_windows(x_shape, kernel, stride, padding, ceil_mode, count_include_pad))


def adaptive_avg_pool2d(x: Array, output_size: Pair) -> Array:
    """Mean over bins: (N, H, W, C) -> (N, P, Q, C); bin i of P covers ``floor(i*H/P) .. ceil((i+1)*H/P)``."""
    return _mean(x, *_adaptive_bins(x.shape, output_size))


def adaptive_avg_pool2d_backward(dy: Array, x_shape: Sequence[int]) -> Array:
    """Gradient of `adaptive_avg_pool2d` for ``x`` of shape ``x_shape``."""
    return _mean_backward(dy, x_shape, *_adaptive_bins(x_shape, dy.shape[1:3]))


def _bytes(index: Array) -> Array:
    """A dense index array (N, P, Q, C) as rows of bytes; their width tells the kernel the type."""
    return index.view(np.uint8).reshape(-1, index.shape[-1] * index.itemsize)


def _dense_rows(x: Array) -> Array:
    return rows_float32(contiguous(x))


def _windows(x_shape, kernel, stride, padding, ceil_mode, count_include_pad) -> list[Array]:
    """For each axis the bins (3, out) of average pooling: first and last + 1 position in the input, and divisor."""
    bins = []
    for size, k, s, pad in zip(x_shape[1:3], kernel, stride, padding, strict=True):
        out = pool_output_size(size, k, s, pad, ceil_mode=ceil_mode)
        start = np.arange(out, dtype=np.intp) * s - pad
        end = np.minimum(start + k, size + pad)
        first, last = np.maximum(start, 0), np.minimum(end, size)
        # A window wholly in the padding has nothing to sum: its mean is 0 / 1.
        count = end - start if count_include_pad else np.maximum(last - first, 1)
        bins.append(np.stack([first, last, count]))
    return bins


def _adaptive_bins(x_shape, output_size) -> list[Array]:
    """For each axis the bins (3, out) of adaptive pooling, as in `_windows`."""
    bins = []
    for size, out in zip(x_shape[1:3], output_size, strict=True):
        first = [i * size // out for i in range(out)]
        last = [ceil_div((i + 1) * size, out) for i in range(out)]
        bins.append(np.array([first, last, np.subtract(last, first)], dtype=np.intp))
    return bins


def _mean(x: Array, bins_h: Array, bins_w: Array) -> Array:
    n, height, width, channels = x.shape
    shape = (n, bins_h.shape[1], bins_w.shape[1], channels)
    y = empty((n * shape[1] * shape[2], channels), float32)
    if y.size:
        _pool2d.mean(rows_float32(x), bins_h, bins_w, height, width, y)
    return stored(y, shape, x.dtype)


def _mean_backward(dy: Array, x_shape: Sequence[int], bins_h: Array, bins_w: Array) -> Array:
    n, height, width, channels = x_shape
    assert dy.shape == (n, bins_h.shape[1], bins_w.shape[1], channels), (dy.shape, x_shape)
    if dy.size == 0:
        return zeros(x_shape, dy.dtype)
    dx = empty((n * height * width, channels), float32)
    _pool2d.mean_backward(_dense_rows(dy), bins_h, bins_w, height, width, dx)
    return stored(dx, x_shape, dy.dtype)
