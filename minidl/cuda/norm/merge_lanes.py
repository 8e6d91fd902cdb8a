"""Kernels that merge what chunks of rows found for each channel; their blocks are those of merge_lanes.cuh."""

from __future__ import annotations

from typing import Any

from minidl.cuda.grid import ints
from minidl.cuda.launch import launch
from minidl.shapes import ceil_div

__all__ = ["FEW_LANES", "merge_lanes"]

GROUP = 8  # channels of a block
LANES, FEW_LANES, FEW_CHUNKS = 128, 32, 256  # threads over the chunks of a channel; where fewer do


def merge_lanes(stem: str, kernel: str, chunks: int, channels: int, *args: Any, **defines: str) -> None:
    """Start a kernel of ``<stem>.cu`` that merges partial results in the order of their chunks.

    Args:
        args: all of the kernel's but the last two, ``chunks`` and ``channels``.
    """
    lanes = FEW_LANES if chunks <= FEW_CHUNKS else LANES
    macros = {"MERGE": lanes, **defines}
    launch(stem, kernel, ceil_div(channels, GROUP), GROUP * lanes, *args, *ints(chunks, channels), defines=macros)
