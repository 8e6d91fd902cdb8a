"""What the Hopper kernels leave for a batch norm, two values per channel and patch of their output, added up."""

from __future__ import annotations

from typing import Any

import numpy as np

from minidl.cuda.array import empty
from minidl.cuda.launch import launch
from minidl.shapes import ceil_div

__all__ = ["moments_of", "sums_of"]

COLUMNS, LANES, MOST_LANES = 32, 8, 32  # threads of a block
FEW = 1024  # patches that one pass adds up
BLOCKS, CHUNKS = 1024, 128  # of the first of two passes: wanted; chunks at most


def sums_of(partial: Any, dtype: Any = np.float32) -> Any:
    """(R, 2, C) with few R: ``partial`` (patches, 2, C) float32, or sums of neighbours in ``dtype``."""
    patches, pair, channels = partial.shape
    if patches <= FEW:
        return partial
    columns = pair * channels
    wanted = min(CHUNKS, ceil_div(BLOCKS, ceil_div(columns, COLUMNS)))
    per = ceil_div(patches, wanted)
    out = empty((ceil_div(patches, per), pair, channels), dtype)
    launch(
        "conv2d_statistics", "conv2d_sums_kernel", (out.shape[0], ceil_div(columns, COLUMNS)), (COLUMNS, LANES),
        partial, out, np.int32(patches), np.int32(per), np.int32(columns), defines={"SUM": _name(dtype)},
    )  # fmt: skip
    return out


def moments_of(partial: Any, count: int) -> Any:
    """What ``batch_norm_stats`` returns for ``count`` rows, from their sums and sums of squares (patches, 2, C)."""
    sums = sums_of(partial, np.float64)
    chunks, _, channels = sums.shape
    stats = empty(1 + 2 * channels, np.float64)
    launch(
        "conv2d_statistics", "conv2d_moments_kernel", ceil_div(channels, COLUMNS), (COLUMNS, MOST_LANES),
        sums, stats, np.int32(chunks), np.int32(channels), np.int32(count), defines={"SUM": _name(sums.dtype)},
    )  # fmt: skip
    return stats


def _name(dtype: Any) -> str:
    return "double" if np.dtype(dtype) == np.float64 else "float"
