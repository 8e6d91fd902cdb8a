"""Sums of columns in a fixed order; the kernel is in totals.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from minidl.cuda.array import empty
from minidl.cuda.grid import ints
from minidl.cuda.launch import launch
from minidl.shapes import ceil_div

SOURCES = {np.dtype(np.float64): "double", np.dtype(np.uint32): "u32"}
SECTOR = 32  # bytes of memory that come together: columns of one block


def column_totals(partial: Any) -> Any:
    """(columns,) float64: the sums over the rows of ``partial`` (rows, columns), float64 or uint32."""
    rows, columns = partial.shape
    if rows == 1 and partial.dtype == np.float64:
        return partial[0]
    totals = empty((columns,), np.float64)
    wide = min(SECTOR // partial.itemsize, 1 << (columns - 1).bit_length())
    args = partial, totals, *ints(rows, columns)
    defines = {"SOURCE": SOURCES[partial.dtype], "WIDE": wide}
    launch("totals", "column_totals", ceil_div(columns, wide), 1024, *args, defines=defines)
    return totals
