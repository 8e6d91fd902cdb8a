"""Images as a network takes them."""

from __future__ import annotations

import numpy as np

from minidl.cpu.array import QUIET, Array, empty
from minidl.precision import float32


@QUIET
def normalise(images: Array, scale: Array, shift: Array, dtype) -> Array:
    """``images * scale + shift`` in float32, rounded to ``dtype``; a dense array.

    One image at a time, which stays in the cache, and by rows of pixels: NumPy is slow along three channels.

    Args:
        images: (N, H, W, C) uint8 or float32.
        scale, shift: (C,) float32.
    """
    count, height, width, channels = images.shape
    scale, shift = np.tile(scale, width), np.tile(shift, width)
    image = np.empty((height, width * channels), float32)
    out = empty((count, height, width * channels), dtype)
    for row, pixels in enumerate(images.reshape(out.shape)):
        np.multiply(pixels, scale, out=image)
        np.add(image, shift, out=image)
        out[row] = image
    return out.reshape(images.shape)
