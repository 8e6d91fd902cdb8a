"""Products with a matrix in Compressed Sparse Blocks, on one of several routes (csb_routes.py).

The arrays of a pattern are those of `minidl.cpu.csb`. Float32 products multiply stored elements only, in the order of
the summed index, on every device. 16-bit types and ``split`` ones may run over dense tiles, zeros and all: there an
infinity or NaN in the dense operand can reach every output of its sample.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minidl import checks
from minidl.cuda.activation import relu as apply_relu
from minidl.cuda.array import as_rows, contiguous, empty, zeros
from minidl.cuda.convolution.channel_sum import check_sum, sum_partials
from minidl.cuda.convolution.conv2d import conv2d, conv2d_backward_data
from minidl.cuda.convolution.conv2d_plan import DEPTH_BYTES, TILE_THREADS, argument, pixel_chunk, struct
from minidl.cuda.device import HOPPER, current_device
from minidl.cuda.launch import launch
from minidl.cuda.rows import ACCESS, dtype_code, rows, vector_width
from minidl.cuda.sparse import csb_dots, csb_rows, csb_sampled_hopper, csb_skinny, csb_skinny_hopper, csb_tensor
from minidl.cuda.sparse.csb_routes import Product, choose_route
from minidl.precision import float32
from minidl.shapes import Pair, ceil_div

THREADS = 256
MOST_ROWS = 128  # output features of a thread block: 16 for each warp, as many as the registers hold
TURNED_FLOATS = 64 * 256  # of a block's part of x in shared memory: 64 samples at the largest block side
SAMPLED_TILE, STAGES = 64, 3  # of csb_sampled.cu

_POINTWISE = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}

# The structures Problem of csb.cu and csb_sampled.cu.
PRODUCT_FIELDS = "x_pitch samples", "features depth across slices relu"
SAMPLED_FIELDS = "dy_pitch x_pitch samples chunk nnz", "rows columns across tiles_m tiles_n accumulate"
_PRODUCT, _SAMPLED = struct(*PRODUCT_FIELDS), struct(*SAMPLED_FIELDS)


def csb_matmul(
    indptr: Any,
    indices: Any,
    values: Any,
    x: Any,
    shape: Pair,
    side: int,
    *,
    transposed: bool = False,
    features_last: bool = False,
    bias: Any | None = None,
    relu: bool = False,
    split: str | None = None,
    order: Any | None = None,
) -> Any:
    """``A @ x``, or ``A.T @ x`` if ``transposed``, then + bias and ReLU; sums in float32, rounded once.

    Args:
        values: (nnz,) in a storage dtype.
        x: (features, samples), or (samples, features) with ``features_last``; the dtype of ``values``; any row pitch.
        bias: (output features,) float32.
        split: "tf32x3" or "bf16x3" allows float32 products as three TF32 or bfloat16 products, where they are faster.
        order: of the output features, `minidl.sparse.CSBPattern.order`; who computes what, so it changes no bit.

    Returns:
        (output features, samples), or (samples, output features), dense, in the dtype of x. The bits of float32 depend
        neither on ``features_last`` nor on the number of samples; those of other routes on the sizes, never on the run.

    Raises:
        ValueError: another number of features; ``split`` of 16-bit arrays.
    """
    code = storage_code("csb_matmul", "values", values, x)
    check_split("csb_matmul", split, code)
    x = as_rows(x)
    count, length, _ = rows(x)
    samples, depth = (count, length) if features_last else (length, count)
    summed, features = shape if transposed else shape[::-1]
    if depth != summed:
        raise checks.bad_shape("csb_matmul", "x", f"with {summed} features for a matrix {shape}", x.shape)
    y = empty((samples, features) if features_last else (features, samples), x.dtype)
    if y.size == 0:
        return y
    product = Product(shape, side, indices.size, x.dtype, samples, transposed, features_last, split, bias is not None)
    arrays = indptr, indices, values, x
    name = choose_route(product, current_device()) if depth else "generic"
    if name == "rows":
        csb_rows.matmul(*arrays, y, shape, side, transposed, features_last, bias, relu, order)
    elif name == "split":
        csb_tensor.matmul(*arrays, y, shape, side, transposed, features_last, bias, relu, split)
    elif name == "skinny":
        kernels = csb_skinny_hopper if current_device().arch == HOPPER else csb_skinny
        kernels.matmul(*arrays, y, shape, transposed, bias, relu)
    elif name == "dense":
        return _dense(product, *arrays, bias, relu)
    else:
        _generic(product, *arrays, bias, relu, y, code)
    return y


def _dense(product: Product, indptr: Any, indices: Any, values: Any, x: Any, bias: Any, relu: bool) -> Any:
    """The matrix expanded, then multiplied like the filter of a 1x1 convolution of one image. Features first it is the
    image, or rather the gradient of one, and x the filter: bias is None.
    """
    if not product.features_last:
        gradient = _expand(indptr, indices, values, product.shape, product.side, product.transposed)[None, None]
        y_shape = (1, 1, product.features, product.samples)
        y = conv2d_backward_data(gradient, contiguous(x)[:, None, None], y_shape, **_POINTWISE)
        return (apply_relu(y) if relu else y).reshape(product.features, product.samples)
    filters = csb_expand(indptr, indices, values, product.shape, product.side)[:, None, None]
    image = x[None, None]
    if product.transposed:
        x_shape = (1, 1, product.samples, product.features)
        y = conv2d_backward_data(image, filters, x_shape, bias=bias, **_POINTWISE)
    else:
        y = conv2d(image, filters, bias, **_POINTWISE)
    return (apply_relu(y) if relu else y).reshape(product.samples, product.features)


def _generic(
    product: Product, indptr: Any, indices: Any, values: Any, x: Any, bias: Any, relu: bool, y: Any, code: int
) -> None:
    """csb.cu: any side, type and device."""
    shape, side, samples, features_last = product.shape, product.side, product.samples, product.features_last
    features, pitch = product.features, rows(x)[2]
    assert pitch * side < 2**32 and max(shape) < 2**30, (x.shape, shape)
    tall = max(8, min(side, MOST_ROWS))
    vec, vectors = vectors_of(x, samples, features, side, tall, features_last)
    slices = ceil_div(features, side) * ceil_div(side, tall)
    problem = argument(
        _PRODUCT, x_pitch=pitch, samples=samples, features=features, depth=product.depth,
        across=ceil_div(shape[1], side), slices=slices, relu=relu,
    )  # fmt: skip
    defines = {"DTYPE": code, "SIDE": side, "ROWS": tall, "VEC": vec, "FEATURES_LAST": int(features_last)}
    defines |= {"TRANSPOSED": int(product.transposed), "CONV": 0} | vectors
    grid = slices * ceil_div(samples, 32 * vec)
    assert grid < 2**31, (shape, samples)
    shared = 4 * side * (32 * vec + 4) if features_last else 0
    arrays = indptr, indices, values, x, bias, y
    launch("csb", "csb_matmul_kernel", grid, THREADS, *arrays, problem, defines=defines, shared=shared)


def vectors_of(x: Any, samples: int, features: int, side: int, tall: int, features_last: bool) -> tuple[int, dict]:
    """Samples per lane, 1, 2 or 4, and the macros of the other accesses."""
    vec = 4
    while vec > 1 and 16 * vec >= samples:  # fewer samples than half of the lanes' registers
        vec //= 2
    if not features_last:
        return math.gcd(vec, vector_width(x)), {}
    while vec > 1 and 32 * vec * side > TURNED_FLOATS:
        vec //= 2
    widest = ACCESS // x.itemsize
    each = tall // 8
    return vec, {"VEC_X": math.gcd(widest, vector_width(x), side), "VEC_Y": math.gcd(widest, features, each, side)}


def csb_sampled(
    indptr: Any,
    indices: Any,
    dy: Any,
    x: Any,
    shape: Pair,
    side: int,
    *,
    features_last: bool = False,
    out: Any,
    accumulate: bool = False,
    split: str | None = None,
) -> None:
    """The gradient of the values: ``out`` (nnz,) float32 = ``dy @ x.T`` at the pattern only; overwritten, or added to.

    Args:
        dy: (M, samples), or (samples, M) with ``features_last``.
        x: (K, samples), or (samples, K); the dtype of dy; any row pitch.
        split: "bf16x3" allows float32 products as three bfloat16 products, where they are faster; "tf32x3" changes
            nothing.

    Samples are summed in chunks that depend on the sizes alone, and the chunks in order.

    Raises:
        ValueError: shapes that do not fit; ``split`` of 16-bit arrays.
    """
    who = "csb_sampled"
    check_sum(who, out)
    code = storage_code(who, "dy", dy, x)
    check_split(who, split, code)
    dy, x = as_rows(dy), as_rows(x)
    spans = rows(dy), rows(x)
    samples = spans[0][0 if features_last else 1]
    expected = [(samples, n) if features_last else (n, samples) for n in shape]
    for name, array, wanted in zip(("dy", "x"), (dy, x), expected, strict=True):
        if array.shape != wanted:
            raise checks.bad_shape(who, name, str(wanted), array.shape)
    if out.shape != indices.shape:
        raise checks.bad_shape(who, "out", str(indices.shape), out.shape)
    if out.size == 0 or samples == 0:
        sum_partials(None, 0, out, accumulate)
        return
    device = current_device()
    hopper = csb_sampled_hopper.applies(side, x.dtype, shape, samples, features_last, device)
    if hopper or csb_sampled_hopper.splits(split, side, shape, out.size, samples, features_last, device):
        csb_sampled_hopper.sampled(indptr, indices, dy, x, shape, side, features_last, out, accumulate)
        return
    if csb_dots.applies(side, x.dtype, shape, out.size, features_last, device):
        csb_dots.sampled(indptr, indices, dy, x, shape, side, features_last, out, accumulate)
        return
    tiles = ceil_div(shape[0], SAMPLED_TILE), ceil_div(shape[1], SAMPLED_TILE)
    chunk = pixel_chunk(samples, tiles[0] * tiles[1])
    chunks = ceil_div(samples, chunk)
    problem = argument(
        _SAMPLED, dy_pitch=spans[0][2], x_pitch=spans[1][2], samples=samples, chunk=chunk, nnz=out.size, rows=shape[0],
        columns=shape[1], across=ceil_div(shape[1], side), tiles_m=tiles[0], tiles_n=tiles[1],
        accumulate=accumulate and chunks == 1,
    )  # fmt: skip
    widest = ACCESS // dy.itemsize
    defines = {"DTYPE": code, "STAGES": STAGES, "SIDE": side, "FEATURES_LAST": int(features_last)}
    defines |= {"VEC_DY": min(widest, vector_width(dy)), "VEC_X": min(widest, vector_width(x))}
    grid = tiles[0] * tiles[1] * chunks
    assert grid < 2**31, (shape, samples)
    shared = max(STAGES * DEPTH_BYTES * 2 * SAMPLED_TILE, 4 * SAMPLED_TILE**2)
    partials = out if chunks == 1 else empty((chunks, out.size), float32)
    arrays = indptr, indices, dy, x, partials
    launch("csb_sampled", "csb_sampled_kernel", grid, TILE_THREADS, *arrays, problem, defines=defines, shared=shared)
    if chunks > 1:
        sum_partials(partials, chunks, out, accumulate)


def csb_expand(indptr: Any, indices: Any, values: Any, shape: Pair, side: int) -> Any:
    """The dense (M, K) matrix, in the dtype of ``values``."""
    return _expand(indptr, indices, values, shape, side, False)


def _expand(indptr: Any, indices: Any, values: Any, shape: Pair, side: int, transposed: bool) -> Any:
    """The dense matrix, or its transpose."""
    dense = zeros(shape[::-1] if transposed else shape, values.dtype)
    _move("csb_expand", indptr, indices, values, dense, shape, side, (1, shape[0]) if transposed else (shape[1], 1))
    return dense


def csb_pick(indptr: Any, indices: Any, dense: Any, shape: Pair, side: int) -> Any:
    """The elements of a dense (M, K) matrix at the pattern, (nnz,) in its dtype, in the order of the values."""
    if dense.shape != tuple(shape):
        raise checks.bad_shape("csb_pick", "dense", str(tuple(shape)), dense.shape)
    values = empty(indices.shape, dense.dtype)
    _move("csb_pick", indptr, indices, contiguous(dense), values, shape, side, (shape[1], 1))
    return values


def _move(
    name: str, indptr: Any, indices: Any, source: Any, target: Any, shape: Pair, side: int, steps: Pair
) -> None:  # fmt: skip
    """``steps``: from row to row and from column to column of the dense matrix."""
    code = dtype_code(source, name, "values")
    sizes = *map(np.int64, steps), np.int32(ceil_div(shape[1], side))
    grid = indptr.size - 1 if indices.size else 0
    defines = {"DTYPE": code, "SIDE": side}
    launch("csb", f"{name}_kernel", grid, 256, indptr, indices, source, target, *sizes, defines=defines)


def check_split(who: str, split: str | None, code: int) -> None:
    """Raise unless products of this storage type may be split so."""
    if split is not None and (code or split not in csb_tensor.SPLITS):
        expected = "None unless the arrays are float32" if code else f"None or {' or '.join(csb_tensor.SPLITS)}"
        raise checks.bad_value(who, "split", expected, split)


def storage_code(who: str, name: str, first: Any, x: Any) -> int:
    """The code of the one storage type of both arrays."""
    code = dtype_code(first, who, name)
    if x.dtype != first.dtype:
        raise checks.bad_dtype(who, "x", first.dtype, x.dtype)
    return code
