"""Statistics of a batch norm's input as parts of its rows left them, merged once it is known what they are for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from minidl.cuda.array import empty
from minidl.cuda.grid import ints
from minidl.cuda.launch import launch
from minidl.cuda.norm.merge_lanes import merge_lanes
from minidl.shapes import ceil_div

__all__ = ["Joined", "Parts", "beside"]


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

    def merged(self, before: Any = None) -> Any:
        """What ``batch_norm_stats`` returns; behind the channels of ``before``, such statistics of the same rows."""
        known = _channels(before)
        stats = empty(1 + 2 * (known + self.channels), np.float64)
        self._merge("batch_norm_merge_kernel", known, before, stats, self._inverse)
        return stats

    def finalize(
        self, eps: float, running_mean: Any, running_var: Any, momentum: float, before: Any = None, stats: Any = None
    ) -> tuple[Any, Any]:
        """What ``batch_norm_finalize`` returns; ``stats``: where `merged` is left besides."""
        known = _channels(before)
        moments, count = empty((2, known + self.channels), np.float32), empty(1, np.float64)
        unbiased = np.float64(1 / (self.rows - 1) if self.rows > 1 else 1)
        args = moments, count, running_mean, running_var, np.float64(eps), np.float64(momentum), self._inverse, unbiased
        self._merge("batch_norm_moments_kernel", known, before, stats, *args)
        return moments, count

    @property
    def _inverse(self) -> np.float64:
        return np.float64(1 / self.rows if self.rows else 0)

    def _merge(self, kernel: str, known: int, *args: Any) -> None:
        sizes, summed = ints(known, self.rows, self.chunk_rows), int(self.squares is None)
        operands = self.first, self.squares, *args, *sizes
        merge_lanes("batch_norm_merge", kernel, len(self.first), known + self.channels, *operands, SUMS=summed)


class Joined:
    """Statistics of arrays side by side: of the first channels known, of the last not merged yet.

    Whoever asks first, for statistics or for moments, has them merged; they are then there for all.
    """

    def __init__(self, before: Any, last: Parts):
        self.channels = _channels(before) + last.channels
        self._before, self._last, self._stats = before, last, None

    def merged(self) -> Any:
        """What ``batch_norm_stats`` of the whole returns."""
        if self._stats is None:
            self._keep(self._last.merged(self._before))
        return self._stats

    def finalize(self, eps: float, running_mean: Any, running_var: Any, momentum: float) -> tuple[Any, Any] | None:
        """What ``batch_norm_finalize`` returns; None where the statistics are merged already."""
        if self._stats is not None:
            return None
        stats = empty(1 + 2 * self.channels, np.float64)
        found = self._last.finalize(eps, running_mean, running_var, momentum, self._before, stats)
        self._keep(stats)
        return found

    def _keep(self, stats: Any) -> None:
        self._before, self._last, self._stats = None, None, stats


def beside(first: Any, second: Any) -> Any:
    """Statistics of arrays side by side along channels, from those of each, (1 + 2 C_i,) float64."""
    assert first.dtype == second.dtype == np.float64, (first.dtype, second.dtype)
    known, channels = _channels(first), _channels(first) + _channels(second)
    both = empty(1 + 2 * channels, np.float64)
    launch(
        "batch_norm_moments", "batch_norm_concat_kernel", ceil_div(both.size, 128), 128,
        first, second, both, *ints(known, channels),
    )  # fmt: skip
    return both


def _channels(stats: Any) -> int:
    return 0 if stats is None else stats.size // 2
