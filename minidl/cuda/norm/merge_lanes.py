"""Kernels that merge what chunks of rows found for each channel; their blocks are those of merge_lanes.cuh."""

from __future__ import annotations

from typing import Any

from minidl.cuda.device import current_device
from minidl.cuda.grid import ints
from minidl.cuda.launch import launch
from minidl.shapes import ceil_div

__all__ = ["merge_lanes"]

GROUP = 8  # channels of a block
LANES, FEW_LANES, FEW_CHUNKS = 128, 32, 256  # threads over the chunks of a channel; where fewer do
SHARES, MANY_CHUNKS = 8, 1024  # into which more chunks are shared out, among the blocks of a cluster


def merge_lanes(stem: str, kernel: str, chunks: int, channels: int, *args: Any, **defines: int) -> None:
    """Start a kernel of ``<stem>.cu`` that merges partial results in an order that follows from their number.

    Args:
        args: all of the kernel's but the last two, ``chunks`` and ``channels``.
    """
    lanes = FEW_LANES if chunks <= FEW_CHUNKS else LANES
    shares = SHARES if chunks > MANY_CHUNKS else 1
    cluster = shares if current_device().arch >= (9, 0) else 1
    macros = {"MERGE": lanes, "SHARES": shares, "CLUSTER": cluster, **defines}
    grid = ceil_div(channels, GROUP) * cluster
    launch(stem, kernel, grid, GROUP * lanes, *args, *ints(chunks, channels), defines=macros)
