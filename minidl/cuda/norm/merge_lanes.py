"""Kernels that merge what chunks of rows found for each channel; their blocks are those of merge_lanes.cuh."""

from __future__ import annotations

from typing import Any

from minidl.cuda.device import current_device
from minidl.cuda.grid import ints
from minidl.cuda.launch import launch
from minidl.shapes import ceil_div

__all__ = ["merge_lanes"]

GROUP = 8  # channels of a block
LANES = 32  # threads over the chunks of a channel
EACH = 8  # chunks that a lane reads at once: more are shared out, among the blocks of a cluster
SHARES, BLOCKS = 8, 512  # into how many, at most; blocks that run at a time


def merge_lanes(stem: str, kernel: str, chunks: int, channels: int, *args: Any, **defines: int) -> None:
    """Start a kernel of ``<stem>.cu`` that merges partial results in an order that follows from their number.

    Args:
        args: all of the kernel's but the last two, ``chunks`` and ``channels``.
    """
    shares, groups = 1, ceil_div(channels, GROUP)
    while shares < SHARES and chunks > shares * LANES * EACH and 2 * shares * groups <= BLOCKS:
        shares *= 2
    cluster = shares if current_device().arch >= (9, 0) else 1
    macros = {"SHARES": shares, "CLUSTER": cluster, **defines}
    launch(stem, kernel, groups * cluster, GROUP * LANES, *args, *ints(chunks, channels), defines=macros)
