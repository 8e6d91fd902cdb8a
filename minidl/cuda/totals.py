"""Sums of columns in a fixed order; the kernel is in totals.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from minidl.cuda.array import empty
from minidl.cuda.grid import ints
from minidl.cuda.launch import launch
from minidl.shapes import ceil_div

BLOCK = 512
# What rows are made of, and the columns of a block: of many counts as many as memory gives together.
SOURCES = {np.dtype(np.float64): ("double", 1), np.dtype(np.uint32): ("u32", 8)}


def column_totals(partial: Any) -> Any:
    """(columns,) float64: the sums over the rows of ``partial`` (rows, columns), float64 or uint32."""
    rows, columns = partial.shape
    if rows == 1 and partial.dtype == np.float64:
        return partial[0]
    totals = empty((columns,), np.float64)
    source, wide = SOURCES[partial.dtype]
    args = partial, totals, *ints(rows, columns)
    defines = {"SOURCE": source, "WIDE": wide}
    launch("totals", "column_totals", ceil_div(columns, wide), BLOCK, *args, defines=defines)
    return totals
