"""Kernels that merge what chunks of rows found for each channel; their blocks are those of merge_lanes.cuh."""

from __future__ import annotations

from typing import Any

from minidl.cuda.device import HOPPER, current_device
from minidl.cuda.grid import ints
from minidl.cuda.launch import launch
from minidl.shapes import ceil_div

GROUP = 8  # channels of a block
LANES = 32  # threads over the chunks of a channel
EACH = 8  # chunks that a lane reads at once
# More chunks than these are shared out among the blocks of a cluster; into how many shares at most.
FEW, SHARES = 512, 8
# Blocks beyond which clusters wait for each other; and where lanes have so many chunks that it pays.
BLOCKS, MANY_BLOCKS, MANY = 128, 256, 64


def shares_of(chunks: int, groups: int) -> int:
    """Into how many the chunks are shared out, as measured on an H200: by sizes alone, as the order of sums follows."""
    shares = 1
    while chunks > FEW and shares < SHARES and chunks > shares * LANES * EACH:
        if 2 * shares * groups > (MANY_BLOCKS if chunks > shares * LANES * MANY else BLOCKS):
            break
        shares *= 2
    return shares


def merge_lanes(stem: str, kernel: str, chunks: int, channels: int, *args: Any, **defines: int) -> None:
    """Start a kernel of ``<stem>.cu`` that merges partial results in an order that follows from their number.

    Args:
        args: all of the kernel's but the last two, ``chunks`` and ``channels``.
    """
    groups = ceil_div(channels, GROUP)
    shares = shares_of(chunks, groups)
    cluster = shares if current_device().arch >= HOPPER else 1
    macros = {"SHARES": shares, "CLUSTER": cluster, **defines}
    launch(stem, kernel, groups * cluster, GROUP * LANES, *args, *ints(chunks, channels), defines=macros)
