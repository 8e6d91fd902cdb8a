"""Kernels that merge what chunks of rows found for each channel; their blocks are those of merge_lanes.cuh."""

from __future__ import annotations

from typing import Any

from minidl.cuda.device import current_device
from minidl.cuda.grid import ints
from minidl.cuda.launch import launch
from minidl.shapes import ceil_div

__all__ = ["merge_lanes"]

SLOTS = 8  # threads of a block side by side along the channels
GROUP = 2 * SLOTS  # channels of a block, if they are even
LANES = 32  # threads over the chunks of a channel
AT_ONCE = 8  # chunks that a lane reads at once
# More chunks than these are shared out among the blocks of a cluster; into how many shares at most.
FEW, SHARES = 512, 8
# Blocks beyond which clusters wait for each other; and where lanes have so many chunks that it pays.
BLOCKS, MANY_BLOCKS, MANY = 128, 256, 64


def shares_of(chunks: int, groups: int) -> int:
    """Into how many the chunks are shared out, as measured on an H200: by sizes alone, as the order of sums follows."""
    shares = 1
    while chunks > FEW and shares < SHARES and chunks > shares * LANES * AT_ONCE:
        if 2 * shares * groups > (MANY_BLOCKS if chunks > shares * LANES * MANY else BLOCKS):
            break
        shares *= 2
    return shares


def merge_lanes(stem: str, kernel: str, chunks: int, channels: int, *args: Any, known: int = 0, **defines: int) -> None:
    """Start a kernel of ``<stem>.cu`` that merges partial results in an order that follows from their number.

    Args:
        args: all of the kernel's but the last two, ``chunks`` and ``channels``.
        known: how many of the channels stand before those of the parts.
    """
    shares, each = shares_of(chunks, ceil_div(channels, GROUP)), 1 if channels % 2 or known % 2 else 2
    cluster = shares if current_device().arch >= (9, 0) else 1
    macros = {"SHARES": shares, "CLUSTER": cluster, "EACH": each, **defines}
    blocks = ceil_div(channels, SLOTS * each) * cluster
    launch(stem, kernel, blocks, SLOTS * LANES, *args, *ints(chunks, channels), defines=macros)
