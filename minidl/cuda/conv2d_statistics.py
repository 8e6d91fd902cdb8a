"""Statistics of a convolution's output from those of its patches, which the kernels for Hopper leave on the way."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from minidl.cuda.array import empty
from minidl.cuda.batch_norm import merge_chunks
from minidl.cuda.conv2d_plan import argument, struct
from minidl.cuda.launch import launch
from minidl.shapes import ceil_div

__all__ = ["Patches", "merge_patches", "sum_patches"]

COLUMNS, LANES = 32, 8  # threads of a block: channels, patches
CHUNKS = 256  # at most; as many as one block of the last merge takes at once

_CUT = struct("", "patches per channels across down width height patch_width patch_height")


class Patches(NamedTuple):
    """A cut of images into patches, counted across, then down, then over the images; those at the edges are smaller.

    Attributes:
        images, height, width: of the images; a cut that minds no lines has one image of one line.
        patch_height, patch_width: of a patch.
    """

    images: int
    height: int
    width: int
    patch_height: int
    patch_width: int

    @property
    def across(self) -> int:
        return ceil_div(self.width, self.patch_width)

    @property
    def down(self) -> int:
        return ceil_div(self.height, self.patch_height)

    @property
    def count(self) -> int:
        return self.images * self.down * self.across


def merge_patches(partial: Any, patches: Patches) -> Any:
    """(1 + 2C,) float64 as of ``batch_norm_stats``, from the means and squared deviations (patches, 2, C) float32."""
    count, _, channels = partial.shape
    assert count == patches.count, (partial.shape, patches)
    per = ceil_div(count, CHUNKS)
    chunks = ceil_div(count, per)
    mean, squares = empty((chunks, channels), np.float64), empty((chunks, channels), np.float32)
    counts = empty(chunks, np.float64)
    cut = argument(
        _CUT, patches=count, per=per, channels=channels, across=patches.across, down=patches.down,
        width=patches.width, height=patches.height, patch_width=patches.patch_width, patch_height=patches.patch_height,
    )  # fmt: skip
    grid = chunks, ceil_div(channels, COLUMNS)
    launch("conv2d_statistics", "conv2d_statistics_kernel", grid, (COLUMNS, LANES), partial, mean, squares, counts, cut)
    return merge_chunks(mean, squares, counts, patches.images * patches.height * patches.width)


def sum_patches(partial: Any) -> Any:
    """(R, 2, C) float32 with few R: what patches left (patches, 2, C) float32, neighbours added up in their order."""
    count, pair, channels = partial.shape
    per = ceil_div(count, CHUNKS)
    if per == 1:
        return partial
    out = empty((ceil_div(count, per), pair, channels), np.float32)
    grid = out.shape[0], ceil_div(pair * channels, COLUMNS)
    sizes = np.int32(count), np.int32(per), np.int32(pair * channels)
    launch("conv2d_statistics", "conv2d_sums_kernel", grid, (COLUMNS, LANES), partial, out, *sizes)
    return out
