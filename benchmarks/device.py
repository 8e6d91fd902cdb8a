"""What benchmarks ask of a whole device: that it is done, memory given back, how long steps in a row take on it."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from typing import Any

from minidl.dist import Communicator


def wait(device: str) -> None:
    """Return when a GPU has done everything, on all streams and of all libraries."""
    if device == "cuda":
        import cupy

        cupy.cuda.Device().synchronize()


def used_bytes(device: str) -> int:
    """Device memory in use, as the driver says."""
    if device != "cuda":
        return 0
    import cupy

    free, total = cupy.cuda.runtime.memGetInfo()
    return total - free


def clean(device: str) -> None:
    """Give back memory that nobody uses, ours and PyTorch's, so that one does not starve the other."""
    gc.collect()
    if device == "cuda":
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()


def row_ms(comm: Communicator, step: Callable[[], Any], steps: int, device: str) -> float:
    """Milliseconds of one of so many steps in a row, on the slowest rank; a collective."""
    wait(device)
    comm.barrier()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    wait(device)
    return max(comm.share((time.perf_counter() - started) / steps * 1e3))
