"""Kernels that do one thing only, as fast as the device can: what the rates of others are held against."""

from __future__ import annotations

from typing import Any

import numpy as np

from minidl.cuda.array import empty
from minidl.cuda.device import current_device
from minidl.cuda.launch import launch
from minidl.shapes import round_up

CHAINS, UNROLL, BATCH = 8, 32, 4  # of ceiling.cu
FMA_BLOCK, FMA_BLOCKS = 256, 8  # threads of a block, blocks of a multiprocessor: all the threads it holds
COPY_BLOCK, COPY_BLOCKS = 512, 2
ITEM = 16  # bytes


def fma_output() -> Any:
    """An array for the results of `fused_multiply_adds`, one for each thread that the device holds."""
    return empty(current_device().multiprocessors * FMA_BLOCKS * FMA_BLOCK, np.float32)


def fused_multiply_adds(output: Any, steps: int, factor: float = 0.999, term: float = 0.001) -> None:
    """In each thread ``steps`` (a multiple of 32) times x = x * factor + term, in each of eight chains.

    Chain c of thread t begins at t % 32 + c; its thread's ends are added up into ``output`` (a `fma_output`).
    """
    assert output.dtype == np.float32 and output.size % FMA_BLOCK == 0 and steps % UNROLL == 0, (output.shape, steps)
    numbers = np.float32(factor), np.float32(term), np.int32(steps)
    launch("ceiling", "fma_kernel", output.size // FMA_BLOCK, FMA_BLOCK, output, *numbers)


def fma_flop(output: Any, steps: int) -> int:
    """Floating-point operations of `fused_multiply_adds`."""
    return 2 * CHAINS * steps * output.size


def l2_copy_bytes(least: int) -> int:
    """The smallest size of at least ``least`` bytes that `l2_copy` takes."""
    return round_up(least, BATCH * ITEM * COPY_BLOCK * COPY_BLOCKS * current_device().multiprocessors)


def l2_copy(output: Any, source: Any, repeats: int) -> None:
    """``repeats`` times ``output`` = ``source`` past the first-level cache; dense, of a size from `l2_copy_bytes`."""
    size = source.nbytes
    assert output.nbytes == size == l2_copy_bytes(size) and output.flags.c_contiguous and source.flags.c_contiguous
    grid = COPY_BLOCKS * current_device().multiprocessors
    count, times = np.int64(size // ITEM), np.int32(repeats)
    launch("ceiling", "l2_copy_kernel", grid, COPY_BLOCK, source, output, count, times)
