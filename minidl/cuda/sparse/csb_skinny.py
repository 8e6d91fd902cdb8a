"""The product of a matrix in Compressed Sparse Blocks and at most 64 samples in a 16-bit type: csb_skinny.cu."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from minidl.cuda.array import empty
from minidl.cuda.convolution.conv2d_hopper import aligned
from minidl.cuda.convolution.conv2d_plan import argument, struct
from minidl.cuda.device import DeviceRecord
from minidl.cuda.launch import launch
from minidl.cuda.rows import DTYPE, address, rows
from minidl.precision import float32
from minidl.shapes import Pair, ceil_div

SIDE, PITCH = 64, 144
MOST_SAMPLES, MOST_WARPS = 64, 16
BLOCKS_WANTED = 132  # a constant, so that sums are cut alike on every device
VECTOR = 8  # features of x per access
_PROBLEM = struct("x_pitch", "samples features depth steps across slices relu")


class SkinnyTile(NamedTuple):
    """The macros SAMPLES and WARPS_K, and how many slices there are beside the warps'."""

    samples: int
    warps: int
    slices: int

    @property
    def shared_bytes(self) -> int:
        return self.warps * SIDE * PITCH


def applies(side: int, dtype: Any, device: DeviceRecord, samples: int, depth: int) -> bool:
    """Whether this kernel can do a product with features last."""
    fits = samples <= MOST_SAMPLES and MOST_WARPS * SIDE * PITCH <= device.shared_per_block
    return side == SIDE and dtype.itemsize == 2 and depth % VECTOR == 0 and fits


def choose_tile(samples: int, features: int, depth: int) -> SkinnyTile:
    """A function of the sizes alone: slices cut the sums."""
    width = next(n for n in (16, 32, 64) if samples <= n)
    warps = MOST_WARPS // 2 if width == 64 else MOST_WARPS
    groups = ceil_div(features, SIDE)
    steps = ceil_div(depth, SIDE)
    return SkinnyTile(width, warps, max(1, min(BLOCKS_WANTED // groups, steps // (2 * warps))))


def matmul(
    indptr: Any, indices: Any, values: Any, x: Any, y: Any, shape: Pair, transposed: bool, bias: Any, relu: bool,
    tile: SkinnyTile | None = None,
) -> None:  # fmt: skip
    """Write the product to ``y`` (samples, features); x (samples, depth) at any row pitch, nothing empty."""
    x = aligned(x)
    samples, depth, pitch = rows(x)
    features = y.shape[1]
    tile = tile or choose_tile(samples, features, depth)
    # Elements are read four at a time: the array's last word may reach behind its end, never out of its allocation.
    assert address(values) % 8 == address(indices) % 8 == 0, "values and indices start at a multiple of 8 bytes"
    partials = None if tile.slices == 1 else empty((tile.slices, samples, features), float32)
    problem = argument(
        _PROBLEM, x_pitch=pitch, samples=samples, features=features, depth=depth, steps=ceil_div(depth, SIDE),
        across=ceil_div(shape[1], SIDE), slices=tile.slices, relu=relu,
    )  # fmt: skip
    defines = {"DTYPE": DTYPE[y.dtype], "TRANSPOSED": int(transposed), "SAMPLES": tile.samples}
    defines |= {"WARPS_K": tile.warps}
    grid = ceil_div(features, SIDE), tile.slices, ceil_div(samples, tile.samples)
    arrays = indptr, indices, values, x, bias, y, partials
    launch("csb_skinny", "csb_skinny_kernel", grid, 32 * tile.warps, *arrays, problem, defines=defines,
           shared=tile.shared_bytes)  # fmt: skip
    if partials is not None:
        sizes = (np.int32(n) for n in (tile.slices, samples, features, relu))
        launch("csb_skinny", "csb_skinny_fold_kernel", ceil_div(y.size, 256), 256, partials, bias, y, *sizes,
               defines=defines)  # fmt: skip
