"""Statistics of a batch norm's input as parts of its rows left them, merged once it is known what they are for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from minidl.cuda.array import empty
from minidl.cuda.grid import ints
from minidl.cuda.norm.merge_lanes import merge_lanes

__all__ = ["Parts"]


@dataclass(frozen=True)
class Parts:
    """Statistics of ``rows`` rows that are not merged yet.

    ``first``: sums and sums of squares (R, 2, C) float32; or, with ``squares``, means (R, C) float64 of chunks of
    ``chunk_rows`` rows, the last perhaps shorter. ``squares``: (R, C) float32, sums of squared deviations from them.
    """

    first: Any
    rows: int
    squares: Any = None
    chunk_rows: int = 0

    @property
    def channels(self) -> int:
        return self.first.shape[-1]

    def merged(self) -> Any:
        """What ``batch_norm_stats`` returns."""
        stats = empty(1 + 2 * self.channels, np.float64)
        self._merge("batch_norm_merge_kernel", stats)
        return stats

    def finalize(self, eps: float, running_mean: Any, running_var: Any, momentum: float) -> tuple[Any, Any]:
        """What ``batch_norm_finalize`` returns."""
        moments, count = empty((2, self.channels), np.float32), empty(1, np.float64)
        args = moments, count, running_mean, running_var, np.float64(eps), np.float64(momentum)
        self._merge("batch_norm_moments_kernel", *args)
        return moments, count

    def _merge(self, kernel: str, *args: Any) -> None:
        sizes, summed = ints(self.rows, self.chunk_rows), int(self.squares is None)
        operands = self.first, self.squares, *args, *sizes
        merge_lanes("batch_norm_merge", kernel, len(self.first), self.channels, *operands, SUMS=summed)
