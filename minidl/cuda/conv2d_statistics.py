"""What the Hopper kernels leave for a batch norm, two values per channel and patch of their output, added up."""

from __future__ import annotations

from typing import Any

import numpy as np

from minidl.cuda.array import empty
from minidl.cuda.launch import launch
from minidl.shapes import ceil_div

__all__ = ["moments_of", "sums_of"]

COLUMNS, LANES = 32, 8  # threads of a block
BLOCKS, CHUNKS, LEAST = 1024, 128, 4 * LANES  # wanted; chunks at most, and patches of one at least


def sums_of(partial: Any, dtype: Any = np.float32) -> Any:
    """(R, 2, C) of ``dtype`` with few R: the sums of neighbours of ``partial`` (patches, 2, C) float32."""
    patches, pair, channels = partial.shape
    columns = pair * channels
    wanted = min(CHUNKS, ceil_div(BLOCKS, ceil_div(columns, COLUMNS)))
    per = max(LEAST, ceil_div(patches, wanted))
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
        "conv2d_statistics", "conv2d_moments_kernel", ceil_div(channels, COLUMNS), (COLUMNS, LANES),
        sums, stats, np.int32(chunks), np.int32(channels), np.int32(count), defines={"SUM": _name(np.float64)},
    )  # fmt: skip
    return stats


def _name(dtype: Any) -> str:
    return "double" if np.dtype(dtype) == np.float64 else "float"
