"""What the Hopper kernels leave for a batch norm, two values per channel and patch of their output, added up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from minidl.cuda.array import empty
from minidl.cuda.launch import launch
from minidl.shapes import ceil_div

__all__ = ["Sums", "added_up", "sums_of"]

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


@dataclass(frozen=True)
class Sums:
    """Statistics that are not finished: sums and sums of squares (R, 2, C), float32 or float64, of ``count`` rows."""

    parts: Any
    count: int

    def statistics(self) -> Any:
        """What ``batch_norm_stats`` returns."""
        chunks, _, channels = self.parts.shape
        stats = empty(1 + 2 * channels, np.float64)
        self._launch("conv2d_moments_kernel", stats, np.int32(chunks), np.int32(channels), np.int32(self.count))
        return stats

    def finalize(self, eps: float, running_mean: Any, running_var: Any, momentum: float) -> tuple[Any, Any]:
        """What ``batch_norm_finalize`` returns."""
        chunks, _, channels = self.parts.shape
        moments, count = empty((2, channels), np.float32), empty(1, np.float64)
        sizes = np.int32(chunks), np.int32(channels), np.int32(self.count)
        args = moments, count, running_mean, running_var, np.float64(eps), np.float64(momentum), *sizes
        self._launch("conv2d_finalize_kernel", *args)
        return moments, count

    def _launch(self, kernel: str, *args: Any) -> None:
        grid, defines = ceil_div(self.parts.shape[2], COLUMNS), {"SUM": _name(self.parts.dtype)}
        launch("conv2d_statistics", kernel, grid, (COLUMNS, MOST_LANES), self.parts, *args, defines=defines)


def added_up(partial: Any, count: int) -> Sums:
    """Statistics of ``count`` rows from sums and sums of squares of patches, (patches, 2, C) float32."""
    return Sums(sums_of(partial, np.float64), count)


def _name(dtype: Any) -> str:
    return "double" if np.dtype(dtype) == np.float64 else "float"
