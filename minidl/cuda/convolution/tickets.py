"""Counters in global memory from which the blocks of a kernel take tiles (tickets.cuh).

A kernel leaves its counter at zero, as it found it, so those that run one after another may share one: all of a stream,
and all that a capture recorded on a stream. Kernels that may run side by side have different ones: a graph's from those
of a stream, and from another graph's.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np

from minidl.cuda.device import active_dry_run, driver, import_cupy

__all__ = ["counter"]

BYTES = 64
CHUNK = 4096  # counters that are made at a time
PER_THREAD = 2  # CUDA's name of a stream that each thread has of its own
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: memory may be made while anybody captures

_lock = threading.Lock()
_of: dict[tuple, np.uint64] = {}  # by device, stream, and capture or thread
_free: dict[int, tuple[Any, int]] = {}  # of a device: the newest chunk, and how many of it are taken


def counter() -> np.uint64:
    """Address of the counter for a kernel that is launched now, on CuPy's current stream."""
    if active_dry_run() is not None:
        return np.uint64(0)
    cuda = import_cupy().cuda
    device, stream = cuda.runtime.getDevice(), cuda.get_current_stream().ptr
    apart = 0
    if stream == PER_THREAD:
        apart = -threading.get_ident()
    elif stream and cuda.runtime.streamIsCapturing(stream):
        apart = _capture(stream)
    key = device, stream, apart
    found = _of.get(key)
    if found is None:
        with _lock:
            found = _of.setdefault(key, _new(device))
    return found


def _capture(stream: int) -> int:
    """The number of the capture that goes on, which no other has."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    out = ctypes.byref(status), ctypes.byref(number), None, None, None
    code = driver().cuStreamGetCaptureInfo_v2(ctypes.c_void_p(stream), *out)
    if code:
        raise RuntimeError(f"cuStreamGetCaptureInfo: CUDA error {code}")
    return number.value


def _new(device: int) -> np.uint64:
    chunk, taken = _free.get(device, (None, CHUNK))
    if taken == CHUNK:
        chunk, taken = _zeros(), 0
    _free[device] = chunk, taken + 1
    return np.uint64(chunk.ptr + taken * BYTES)


def _zeros() -> Any:
    """Memory for a chunk of counters, zero, of no pool: it is never given back."""
    cuda, mode = import_cupy().cuda, ctypes.c_int(RELAXED)
    driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        memory, stream = cuda.Memory(CHUNK * BYTES), cuda.Stream(non_blocking=True)
        cuda.runtime.memsetAsync(memory.ptr, 0, CHUNK * BYTES, stream.ptr)
        stream.synchronize()
    finally:
        driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    return memory
