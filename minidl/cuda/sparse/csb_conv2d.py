"""Convolution with a filter in Compressed Sparse Blocks, as in `minidl.cpu.csb_conv2d`: no matrix of patches is made.

Float32 runs on csb_rows.cu (Hopper) or csb.cu, which gather the pixels that a tap meets; 16-bit types, and float32 with
``tf32``, on the dense convolution of the expanded filter: zeros are multiplied there, and an infinity or NaN reaches
every output whose window holds it. `csb_routes.route` forces one. The weight gradient is the dense
convolution's, of which the pattern's elements are taken.
"""

from __future__ import annotations

from math import prod
from typing import Any

from minidl import checks
from minidl.cuda.array import as_rows, contiguous, empty
from minidl.cuda.convolution.channel_sum import check_sum, sum_partials
from minidl.cuda.convolution.conv2d import conv2d, conv2d_backward_data, conv2d_backward_weight
from minidl.cuda.convolution.conv2d_checks import check_tf32
from minidl.cuda.convolution.conv2d_plan import argument, struct
from minidl.cuda.convolution.widen import widen
from minidl.cuda.device import current_device
from minidl.cuda.launch import launch
from minidl.cuda.rows import rows
from minidl.cuda.sparse import csb_rows
from minidl.cuda.sparse.csb import (
    MOST_ROWS,
    PRODUCT_FIELDS,
    THREADS,
    csb_expand,
    csb_pick,
    storage_code,
    vectors_of,
)
from minidl.cuda.sparse.csb_routes import choose_conv_route
from minidl.precision import float32
from minidl.shapes import Pair, ceil_div, conv_output_size, tap_axes

_PRODUCT = struct(PRODUCT_FIELDS[0], PRODUCT_FIELDS[1] + " steps blocks", ("window", csb_rows.WINDOW))

Axes = tuple[tuple[int, ...], ...]


def csb_conv2d(
    indptr: Any,
    indices: Any,
    values: Any,
    x: Any,
    shape: Pair,
    side: int,
    *,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    bias: Any | None = None,
    tf32: int = 0,
    order: Any | None = None,
) -> Any:
    """y[n, p, q, k] = sum over elements (k, r, s, c) of x[n, p*stride - padding + r*dilation, ..., c] * value + bias.

    As `minidl.cpu.csb_conv2d`; ``tf32`` as in `minidl.cuda.convolution.conv2d`, a permission;
    ``order`` as in `minidl.cuda.sparse.csb.csb_matmul`.

    Raises:
        ValueError: ``tf32`` of 16-bit arrays, or not 0, 1 or 3.
    """
    code = _checked("csb_conv2d", "values", values, x, tf32)
    out = tuple(conv_output_size(*axis) for axis in zip(x.shape[1:3], kernel, stride, padding, dilation, strict=True))
    geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": 1}
    if 0 in (x.shape[0], *out, shape[0]):
        return empty((x.shape[0], *out, shape[0]), x.dtype)
    name = choose_conv_route(side, x.dtype, tf32, _density(indices, shape, kernel, x.shape[3]), current_device())
    if name == "dense":
        filters = _filters(indptr, indices, values, shape, side, kernel, x.shape[3])
        return conv2d(x, filters, bias, **geometry, tf32=tf32)
    axes = tap_axes(x.shape[1:3], out, kernel, stride, padding, dilation)
    return _product(name, indptr, indices, values, x, shape, side, axes, shape[0], False, bias, code, order)


def csb_conv2d_backward_data(
    indptr: Any,
    indices: Any,
    values: Any,
    dy: Any,
    x_shape: tuple[int, ...],
    shape: Pair,
    side: int,
    *,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    tf32: int = 0,
    order: Any | None = None,
) -> Any:
    """The gradient of x, (N, H, W, C) = ``x_shape``, from that of y, ``dy`` (N, P, Q, K); all else as `csb_conv2d`."""
    code = _checked("csb_conv2d_backward_data", "values", values, dy, tf32)
    geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": 1}
    if 0 in x_shape:
        return empty(x_shape, dy.dtype)
    name = choose_conv_route(side, dy.dtype, tf32, _density(indices, shape, kernel, x_shape[3]), current_device())
    if name == "dense":
        filters = _filters(indptr, indices, values, shape, side, kernel, x_shape[3])
        return conv2d_backward_data(dy, filters, x_shape, **geometry, tf32=tf32)
    axes = tap_axes(dy.shape[1:3], x_shape[1:3], kernel, stride, padding, dilation, backward=True)
    return _product(name, indptr, indices, values, dy, shape, side, axes, x_shape[3], True, None, code, order)


def csb_conv2d_backward_weight(
    indptr: Any,
    indices: Any,
    dy: Any,
    x: Any,
    shape: Pair,
    side: int,
    *,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    out: Any,
    accumulate: bool = False,
    tf32: int = 0,
) -> None:
    """The gradient of the values: ``out`` (nnz,) float32, overwritten, or added to; at the pattern only.

    Args:
        dy, x: (N, P, Q, K) and (N, H, W, C) of one dtype; all else as `csb_conv2d`.

    As `minidl.cuda.conv2d_backward_weight`, whose dense result is a workspace.
    """
    who = "csb_conv2d_backward_weight"
    check_sum(who, out)
    _checked(who, "dy", dy, x, tf32)
    if out.shape != indices.shape:
        raise checks.bad_shape(who, "out", str(indices.shape), out.shape)
    if out.size == 0 or dy.size == 0:
        sum_partials(None, 0, out, accumulate)
        return
    channels, room = x.shape[3], shape[1] // prod(kernel)
    dense = empty((shape[0], *kernel, channels), float32)
    geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": 1, "tf32": tf32}
    conv2d_backward_weight(dy, x, **geometry, out=dense)
    wide = dense if channels == room else widen(dense, room)
    sum_partials(csb_pick(indptr, indices, wide.reshape(shape), shape, side), 1, out, accumulate)


def _checked(who: str, name: str, first: Any, x: Any, tf32: int) -> int:
    """The code of the storage type."""
    code = storage_code(who, name, first, x)
    check_tf32(who, tf32, code)
    return code


def _density(indices: Any, shape: Pair, kernel: Pair, channels: int) -> float:
    return indices.size / max(shape[0] * prod(kernel) * channels, 1)


def _filters(indptr: Any, indices: Any, values: Any, shape: Pair, side: int, kernel: Pair, channels: int) -> Any:
    """The dense (K, R, S, C) filter."""
    wide = csb_expand(indptr, indices, values, shape, side).reshape(shape[0], *kernel, shape[1] // prod(kernel))
    return contiguous(wide[..., :channels])


def _product(
    name: str, indptr: Any, indices: Any, values: Any, source: Any, shape: Pair, side: int, axes: Axes, features: int,
    transposed: bool, bias: Any, code: int, order: Any,
) -> Any:  # fmt: skip
    """The product whose samples are the places of the grid of ``axes`` in each image, by the route ``name``."""
    source = as_rows(source)
    y = empty((source.shape[0], axes[0][1], axes[1][1], features), source.dtype)
    if name == "rows":
        csb_rows.convolve(indptr, indices, values, source, y, shape, side, transposed, axes, bias, order)
        return y
    samples, depth, taps = prod(y.shape[:3]), source.shape[3], axes[0][2] * axes[1][2]
    across = ceil_div(shape[1], side)
    blocks = ceil_div(shape[0], side) if transposed else across // taps  # that are summed for a tap
    tall = max(8, min(side, MOST_ROWS))
    vec, vectors = vectors_of(source, samples, features, side, tall, True)
    slices = ceil_div(features, side) * ceil_div(side, tall)
    problem = argument(
        _PRODUCT, x_pitch=rows(source)[2], samples=samples, features=features, depth=depth, across=across,
        slices=slices, relu=0, steps=taps * blocks, blocks=across // taps, window=(*axes, depth, blocks),
    )  # fmt: skip
    defines = {"DTYPE": code, "SIDE": side, "ROWS": tall, "VEC": vec, "FEATURES_LAST": 1}
    defines |= {"TRANSPOSED": int(transposed), "CONV": 1} | vectors
    grid = slices * ceil_div(samples, 32 * vec)
    assert grid < 2**31 and samples < 2**32, (shape, samples)
    launch("csb", "csb_matmul_kernel", grid, THREADS, indptr, indices, values, source, bias, y, problem,
           defines=defines, shared=4 * side * (32 * vec + 4))  # fmt: skip
    return y
