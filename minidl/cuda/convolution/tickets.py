"""Counters in global memory from which the blocks of a kernel take tiles (tickets.cuh).

A kernel leaves its counter at zero, as it found it, so those that run one after another may share one: all of a stream,
and all that a capture recorded on a stream. Kernels that may run side by side have different ones: a graph's from those
of a stream, and from another graph's. Streams go by their ids: an address comes back, with work of the stream that had
it before perhaps still under way. (Two instances of one captured graph, side by side, would share more than counters:
what they write to.) Counters are never given back: some bytes for each stream and each capture that launched such a
kernel.
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
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: memory may be made while anybody captures

_lock = threading.Lock()
_of: dict[tuple[int, int, int], np.uint64] = {}  # by device, stream, and capture or 0
_free: dict[int, tuple[Any, int]] = {}  # of a device: the newest chunk, and how many of it are taken


def counter() -> np.uint64:
    """Address of the counter for a kernel that is launched now, on CuPy's current stream."""
    if active_dry_run() is not None:
        return np.uint64(0)
    cuda = import_cupy().cuda
    device, stream = cuda.runtime.getDevice(), cuda.get_current_stream().ptr
    # The default stream cannot be captured, and must not be asked while another one is.
    key = device, _id(stream), _capture(stream) if stream and cuda.runtime.streamIsCapturing(stream) else 0
    found = _of.get(key)
    if found is None:
        with _lock:
            found = _of[key] = _of.get(key) or _new(device)
    return found


def _id(stream: int) -> int:
    """The number of a stream, which no other has or will have."""
    number = ctypes.c_uint64()
    _require(driver().cuStreamGetId(ctypes.c_void_p(stream), ctypes.byref(number)), "cuStreamGetId")
    return number.value


def _capture(stream: int) -> int:
    """The number of the capture that goes on."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    out = ctypes.byref(status), ctypes.byref(number), None, None, None
    _require(driver().cuStreamGetCaptureInfo_v2(ctypes.c_void_p(stream), *out), "cuStreamGetCaptureInfo")
    return number.value


def _require(code: int, name: str) -> None:
    if code:
        raise RuntimeError(f"{name}: CUDA error {code}")


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
