"""Counters in global memory from which the blocks of a kernel take tiles (tickets.cuh).

A kernel leaves its counter at zero, as it found it, so those that run one after another may share one: all of a stream.
Streams go by their ids: an address comes back, with work of the stream that had it before perhaps still under way. A
launch that is captured gets a counter of its own, as its graph may run beside anything. (Two instances of one captured
graph, side by side, would share more than counters: what they write to.) Counters are never given back: eight bytes for
each stream, and for each launch that was captured.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np

from minidl.cuda.device import active_dry_run, driver, import_cupy

BYTES = 8  # {taken, left}
CHUNK = 2**18  # counters that are made at a time: as much memory as a device gives at least
_LASTING = (0, 1)  # the default stream, CU_STREAM_LEGACY: no addresses, and always there
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: memory may be made while anybody captures

_lock = threading.Lock()
_of: dict[tuple[int, int], np.ndarray] = {}  # by device and stream
_chunks: dict[int, list[Any]] = {}  # of a device, all that there are
_taken: dict[int, int] = {}  # of a device, counters that have been given


def counter() -> np.ndarray:
    """Address, () uint64, of the counter for a kernel that is launched now, on CuPy's current stream."""
    if active_dry_run() is not None:
        return np.zeros((), np.uint64)
    cuda = import_cupy().cuda
    device, stream = cuda.runtime.getDevice(), cuda.get_current_stream().ptr
    # The default stream cannot be captured, and must not be asked while another one is.
    if stream and cuda.runtime.streamIsCapturing(stream):
        return _new(device)
    key = device, _id(stream)
    found = _of.get(key)
    return _of.setdefault(key, _new(device)) if found is None else found


class _Tickets:
    """An argument of `minidl.cuda.launch.launch`: the counter of each launch as it comes."""

    argument = staticmethod(counter)


TICKETS = _Tickets()


def _id(stream: int) -> int:
    """The number of a stream that is not being captured, which no other has or will have."""
    if stream in _LASTING:
        return -stream
    number = ctypes.c_uint64()
    code = driver().cuStreamGetId(ctypes.c_void_p(stream), ctypes.byref(number))
    if code:
        raise RuntimeError(f"cuStreamGetId: CUDA error {code}")
    return number.value


def _new(device: int) -> np.ndarray:
    with _lock:
        chunks, taken = _chunks.setdefault(device, []), _taken.get(device, 0)
        if taken == CHUNK * len(chunks):
            chunks.append(_zeros())
        _taken[device] = taken + 1
        return np.array(chunks[-1].ptr + taken % CHUNK * BYTES, np.uint64)


def _zeros() -> Any:
    """Memory for a chunk of counters, zero, of no pool."""
    cuda, mode = import_cupy().cuda, ctypes.c_int(RELAXED)
    driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        memory, stream = cuda.Memory(CHUNK * BYTES), cuda.Stream(non_blocking=True)
        cuda.runtime.memsetAsync(memory.ptr, 0, CHUNK * BYTES, stream.ptr)
        stream.synchronize()
    finally:
        driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    return memory
