"""Convolution with a filter in Compressed Sparse Blocks: the kernels of `minidl.cpu.csb`, gathering pixels tap by tap.

The filter (K, R, S, C) is a matrix of K rows and R * S * room columns: column ``(r * S + s) * room + c``; the room is C
rounded up to the side of a block, so that each block column belongs to one tap; with a single tap the room is C.
Columns from C to the room have no elements. No matrix of patches is ever made: tiles of some samples are packed.
"""

from __future__ import annotations

from math import prod

from minidl.cpu import _csb
from minidl.cpu.array import Array, empty, flat_float32, rows_float32, stored, zeros
from minidl.cpu.conv2d import refuse_tf32
from minidl.cpu.csb import packed_room, threads_for
from minidl.precision import float32
from minidl.shapes import Pair, conv_output_size, round_up, tap_axes

Axes = tuple[tuple[int, ...], ...]


def csb_conv2d(
    indptr: Array, indices: Array, values: Array, x: Array, shape: Pair, side: int, *, kernel: Pair, stride: Pair,
    padding: Pair, dilation: Pair, bias: Array | None = None, tf32: int = 0, order: Array | None = None,
) -> Array:  # fmt: skip
    """y[n, p, q, k] = sum over elements (k, r, s, c) of x[n, p*stride - padding + r*dilation, ..., c] * value + bias.

    Args:
        values: (nnz,) in a storage dtype.
        x: (N, H, W, C), dense or pitched; the dtype of ``values``.
        shape: (K, R * S * room), see above.
        kernel, stride, padding, dilation: (height, width) pairs; the padding holds zeros.
        bias: (K,) float32.
        tf32: False, as in `minidl.cpu.conv2d`.
        order: as in `minidl.cpu.csb_matmul`.

    Returns:
        (N, P, Q, K) dense, in the dtype of x. Sums in float32, in the order of (r, s, c), rounded once.
    """
    refuse_tf32("csb_conv2d", tf32)
    out = [conv_output_size(*axis) for axis in zip(x.shape[1:3], kernel, stride, padding, dilation, strict=True)]
    axes = tap_axes(x.shape[1:3], out, kernel, stride, padding, dilation)
    return _apply(indptr, indices, values, x, shape, side, axes, shape[0], False, bias)


def csb_conv2d_backward_data(
    indptr: Array, indices: Array, values: Array, dy: Array, x_shape: tuple[int, ...], shape: Pair, side: int, *,
    kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, tf32: int = 0, order: Array | None = None,
) -> Array:  # fmt: skip
    """The gradient of x, (N, H, W, C) = ``x_shape``, from that of y, ``dy`` (N, P, Q, K); all else as `csb_conv2d`.

    Sums run over (r, s, k) in this order.
    """
    refuse_tf32("csb_conv2d_backward_data", tf32)
    axes = tap_axes(dy.shape[1:3], x_shape[1:3], kernel, stride, padding, dilation, backward=True)
    return _apply(indptr, indices, values, dy, shape, side, axes, x_shape[3], True, None)


def csb_conv2d_backward_weight(
    indptr: Array, indices: Array, dy: Array, x: Array, shape: Pair, side: int, *, kernel: Pair, stride: Pair,
    padding: Pair, dilation: Pair, out: Array, accumulate: bool = False, tf32: int = 0,
) -> None:  # fmt: skip
    """The gradient of the values: ``out`` (nnz,) float32, overwritten, or added to; at the pattern only.

    Args:
        dy, x: (N, P, Q, K) and (N, H, W, C) of one dtype; all else as `csb_conv2d`.
    """
    refuse_tf32("csb_conv2d_backward_weight", tf32)
    assert out.shape == indices.shape and dy.shape[3] == shape[0], (out.shape, indices.shape, dy.shape, shape)
    if dy.size == 0 or out.size == 0:
        if not accumulate:
            out.fill(0)
        return
    axes = tap_axes(x.shape[1:3], dy.shape[1:3], kernel, stride, padding, dilation)
    samples = prod(dy.shape[:3])
    depth = min(_csb.DEPTH, round_up(samples, 16))
    threads = threads_for(out.size * samples)
    packed = packed_room(sum(shape), samples, depth, threads)
    arrays = rows_float32(dy), rows_float32(x)
    _csb.sampled(
        indptr, indices, shape, side, *arrays, True, depth, packed, accumulate, out, threads, axes,
        zeros(x.shape[3], float32),
    )  # fmt: skip


def _apply(
    indptr: Array, indices: Array, values: Array, source: Array, shape: Pair, side: int, axes: Axes, features: int,
    transposed: bool, bias: Array | None,
) -> Array:  # fmt: skip
    """The product whose samples are the places of the grid of ``axes`` in each image of ``source``."""
    out_shape = (source.shape[0], axes[0][1], axes[1][1], features)
    if 0 in out_shape:
        return empty(out_shape, source.dtype)
    samples = prod(out_shape[:3])
    y = empty((samples, features), float32)
    summed = axes[0][2] * axes[1][2] * shape[0] if transposed else shape[1]
    lanes = next((n for n in (1, 8, 16, 32) if samples <= n), 64)
    threads = threads_for(values.size * samples)
    _csb.product(
        indptr, indices, flat_float32(values), shape, side, rows_float32(source), transposed, True, bias, False,
        lanes, False, packed_room(summed, samples, lanes, threads), y, threads,
        axes, zeros(source.shape[3], float32),
    )  # fmt: skip
    return stored(y, out_shape, source.dtype)
