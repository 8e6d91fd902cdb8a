"""Products with a matrix in Compressed Sparse Blocks (`minidl.sparse.csb`); the kernels are in `_csb.h`.

The pattern comes as its arrays: ``indptr`` (block rows * block columns + 1,) int32 in block-row-major order,
``indices`` (nnz,) uint16 = row in block * 256 + column in block, row-major in a block; then ``shape`` (M, K) and the
``side`` of a block.
Only stored elements are multiplied: an infinity in the dense operand reaches no output that has no element for it.
"""

from __future__ import annotations

import numpy as np

from minidl import checks
from minidl.cpu import _csb
from minidl.cpu.array import Array, cast, empty, flat_float32, rows_float32, stored, zeros
from minidl.precision import float32
from minidl.shapes import Pair, ceil_div, round_up

_PACKED_FLOATS = 1 << 18  # of the dense operand at a time and for each thread: what a second-level cache holds
_REUSE = 16  # uses of an element of the dense operand up to which packing it first does not pay
_REUSE_NEAR, _NEAR_FLOATS = 4, 1 << 13  # the same where a packed tile fits a first-level cache
_THREADS_FROM = 1 << 17  # multiply-adds below which one thread is as fast

_NO_ROOM = np.empty(0, float32)


def csb_matmul(
    indptr: Array, indices: Array, values: Array, x: Array, shape: Pair, side: int, *, transposed: bool = False,
    features_last: bool = False, bias: Array | None = None, relu: bool = False, split: str | None = None,
    order: Array | None = None,
) -> Array:  # fmt: skip
    """``A @ x``, or ``A.T @ x`` if ``transposed``, then + bias and ReLU; sums in float32, rounded once.

    Args:
        values: (nnz,) in a storage dtype.
        x: (features, samples), or (samples, features) with ``features_last``; the dtype of ``values``; any row pitch.
        bias: (output features,) float32.
        split: has no meaning on a CPU and must be None.
        order: of what GPUs share out; has no meaning on a CPU.

    Returns:
        (output features, samples), or (samples, output features), dense, in the dtype of x. The bits do not depend on
        ``features_last``, on the number of samples or of threads.
    """
    refuse_split("csb_matmul", split)
    wide = rows_float32(x)
    samples, features = wide.shape if features_last else wide.shape[::-1]
    inner, outer = shape if transposed else shape[::-1]
    assert features == inner, (x.shape, shape, transposed, features_last)
    out_shape = (samples, outer) if features_last else (outer, samples)
    if samples == 0 or outer == 0:
        return empty(out_shape, x.dtype)
    if samples == 1:  # the same in memory either way
        wide, features_last = np.ascontiguousarray(wide).reshape(1, features), True
    y = empty((samples, outer) if features_last else (outer, samples), float32)
    lanes = next((n for n in (1, 8, 16, 32) if samples <= n), 64)
    reuse = _REUSE_NEAR if features * lanes <= _NEAR_FLOATS else _REUSE
    direct = (lanes > _csb.STREAM and not features_last and values.size <= reuse * features) or (
        samples == lanes and _lies_packed(wide, lanes, features_last)
    )
    threads = threads_for(values.size * samples)
    rest = samples % lanes if direct else samples
    packed = packed_room(features, rest, lanes, threads) if rest else _NO_ROOM
    _csb.product(
        indptr, indices, flat_float32(values), shape, side, wide, transposed, features_last, bias, relu, lanes, direct,
        packed, y, threads,
    )  # fmt: skip
    return stored(y, out_shape, x.dtype)


def csb_sampled(
    indptr: Array, indices: Array, dy: Array, x: Array, shape: Pair, side: int, *, features_last: bool = False,
    out: Array, accumulate: bool = False, split: str | None = None,
) -> None:  # fmt: skip
    """The gradient of the values: ``out`` (nnz,) float32 = ``dy @ x.T`` at the pattern only; overwritten, or added to.

    Args:
        dy: (M, samples), or (samples, M) with ``features_last``.
        x: (K, samples), or (samples, K); the dtype of dy; both dense or pitched.
        split: None.

    Sums over samples run in a fixed order, the same in both orientations.

    Raises:
        ValueError: another ``split``.
    """
    refuse_split("csb_sampled", split)
    samples = dy.shape[0 if features_last else 1]
    expected = [(samples, n) if features_last else (n, samples) for n in shape]
    assert [dy.shape, x.shape] == expected and out.shape == indices.shape, (dy.shape, x.shape, shape, out.shape)
    if samples == 0 or out.size == 0:
        if not accumulate:
            out.fill(0)
        return
    depth = min(_csb.DEPTH, round_up(samples, 16))
    threads = threads_for(out.size * samples)
    packed = packed_room(sum(shape), samples, depth, threads)
    wide_dy, wide_x = rows_float32(dy), rows_float32(x)
    _csb.sampled(indptr, indices, shape, side, wide_dy, wide_x, features_last, depth, packed, accumulate, out, threads)


def csb_expand(indptr: Array, indices: Array, values: Array, shape: Pair, side: int) -> Array:
    """The dense (M, K) matrix, in the dtype of ``values``."""
    dense = zeros(shape, values.dtype)
    dense[_coordinates(indptr, indices, shape, side)] = values
    return dense


def csb_pick(indptr: Array, indices: Array, dense: Array, shape: Pair, side: int) -> Array:
    """The elements of a dense (M, K) matrix at the pattern, (nnz,) in its dtype, in the order of the values."""
    assert dense.shape == tuple(shape), (dense.shape, shape)
    return cast(dense[_coordinates(indptr, indices, shape, side)], dense.dtype)


def _lies_packed(x: Array, lanes: int, features_last: bool) -> bool:
    """Whether ``x``, of ``lanes`` samples, lies in memory as packing would leave it, no vector across two lines."""
    if not x.flags.c_contiguous:
        return False
    return lanes == 1 or (not features_last and x.__array_interface__["data"][0] % (4 * lanes) == 0)


def _coordinates(indptr: Array, indices: Array, shape: Pair, side: int) -> tuple[Array, Array]:
    """Row and column of every element, int64."""
    across = ceil_div(shape[1], side)
    block = np.repeat(np.arange(indptr.size - 1), np.diff(indptr))
    return block // max(across, 1) * side + (indices >> 8), block % max(across, 1) * side + (indices & 255)


def refuse_split(who: str, split: str | None) -> None:
    """Raise unless it is None."""
    if split is not None:
        raise checks.bad_value(who, "split", "None on the CPU", split, "tensor cores exist on the GPU only")


def packed_room(features: int, samples: int, lanes: int, threads: int) -> Array:
    """Room for packed samples: as many tiles as the caches hold, one for each thread at least, all at most."""
    tiles = max(threads, min(threads * _PACKED_FLOATS // max(features * lanes, 1), ceil_div(samples, lanes)))
    return empty(max(tiles * features, 1) * lanes, float32)


def threads_for(products: int) -> int:
    """Threads for so many multiply-adds."""
    return 1 if products < _THREADS_FROM else _csb.max_threads()
