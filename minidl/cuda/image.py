"""Images as a network takes them; the kernel is in image.cu."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minidl.cuda.array import contiguous, empty
from minidl.cuda.launch import launch
from minidl.cuda.rows import ACCESS, address, dtype_code
from minidl.precision import float32
from minidl.shapes import ceil_div

BLOCK, STEPS = 256, 4  # threads, at most; vectors of a thread
WARP = 32
_SOURCES = {np.dtype(np.uint8): "u8", float32: "float"}


def normalise(images: Any, scale: Any, shift: Any, dtype: Any) -> Any:
    """As `minidl.cpu.image.normalise`."""
    images = contiguous(images)
    out = empty(images.shape, dtype)
    vec = ACCESS // out.itemsize if address(images) % ACCESS == 0 else 1
    channels = images.shape[-1]
    period = math.lcm(WARP, max(channels, 1) // math.gcd(channels or 1, vec))  # of the channels that warps begin with
    block = BLOCK // period * period or BLOCK
    defines = {"DTYPE": dtype_code(out, "normalise"), "SOURCE": _SOURCES[images.dtype], "VEC": vec}
    sizes = np.int64(images.size), np.int32(channels)
    grid = ceil_div(images.size, block * vec * STEPS)
    launch("image", "normalise_kernel", grid, block, images, scale, shift, out, *sizes, defines=defines)
    return out
