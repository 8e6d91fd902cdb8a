"""Shape arithmetic: integers in, integers out. Nothing here knows an array.

Activations are NHWC (batch, height, width, channels) and filters are KRSC (out channels, kernel height,
kernel width, in channels per group) everywhere in minidl.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod

Pair = tuple[int, int]


def ceil_div(a: int, b: int) -> int:
    """The smallest integer not below ``a / b``, for positive ``b``."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` not below ``a``."""
    return ceil_div(a, multiple) * multiple


def conv_output_size(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Output length of a convolution along one axis; 0 or less when the kernel does not fit."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def tap_axes(
    image: Sequence[int], grid: Sequence[int], kernel: Pair, stride: Pair, padding: Pair, dilation: Pair,
    backward: bool = False,
) -> tuple[tuple[int, ...], ...]:  # fmt: skip
    """Which pixel a tap of a convolution meets, for each axis: (size, places, taps, multiply, start, step, divide).

    Place a of the grid and tap r meet pixel (a·multiply + start + r·step) / divide of the image, if that is a whole
    number in [0, size). ``backward``: the grid is the convolution's input and the image its output, as the data
    gradient needs it.
    """
    axes = zip(image, grid, kernel, stride, padding, dilation, strict=True)
    if backward:
        return tuple((size, places, taps, 1, pad, -far, by) for size, places, taps, by, pad, far in axes)
    return tuple((size, places, taps, by, -pad, far, 1) for size, places, taps, by, pad, far in axes)


def conv_transpose_output_size(
    size: int, kernel: int, stride: int, padding: int, dilation: int, output_padding: int
) -> int:
    """Output length of a transposed convolution along one axis."""
    return (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1


def pool_output_size(
    size: int, kernel: int, stride: int, padding: int, dilation: int = 1, ceil_mode: bool = False
) -> int:
    """Output length of a pooling window along one axis.

    With ``ceil_mode`` a last, partly filled window is kept, but never one that would start in the right-hand padding.
    """
    if not ceil_mode:
        return conv_output_size(size, kernel, stride, padding, dilation)
    out = ceil_div(size + 2 * padding - dilation * (kernel - 1) - 1, stride) + 1
    if (out - 1) * stride >= size + padding:
        out -= 1
    return out


def resize_axis(size: int, out: int, mode: str, align_corners: bool) -> tuple[int, int, int, int, int, int]:
    """How an axis of ``size`` pixels is resized to ``out``: (a, b, d, size, out, 1 if bilinear).

    Output o lies at max((a·o + b) / d, 0) of the input: a quotient of whole numbers, so that every device finds the
    same pixels and weights. In lowest terms.
    """
    if mode == "nearest":
        a, b, d = size, 0, out
    elif align_corners:
        a, b, d = size - 1 if out > 1 else 0, 0, max(out - 1, 1)
    else:
        a, b, d = 2 * size, size - out, 2 * out
    common = gcd(a, b, d)
    return a // common, b // common, d // common, size, out, int(mode == "bilinear")


def pixel_pitch(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int | None:
    """Elements from one row of channels to the next when an array is seen as (rows, channels), or None.

    minidl's activations may be *pitched*: a slice ``x[..., a:b]`` of the channels of a dense array is legal everywhere.
    None means that the array is something else (transposed, cropped, reversed) and must be copied first.
    """
    if len(shape) == 0:
        return None
    channels = shape[-1]
    if prod(shape) == 0:
        return channels
    if channels > 1 and strides[-1] != itemsize:
        return None
    # Axes of length one carry no information: their strides may be anything.
    expected = None
    pitch = channels
    for size, stride in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=True):
        if size == 1:
            continue
        if expected is None:
            if stride < channels * itemsize or stride % itemsize:
                return None
            pitch = stride // itemsize
        elif stride != expected:
            return None
        expected = stride * size
    return pitch
