"""One arena on the device, one on the host, and copies between them on streams of their own.

The device has an engine for copies each way; with one stream each they run beside the kernels and beside each other.
Streams wait for each other by events, the host for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from minidl import checks
from minidl.cuda.device import import_cupy

_TO_HOST, _TO_DEVICE = 2, 1  # cudaMemcpyKind


class CopyEngine:
    """Memory and streams of the current device for `minidl.memory.execute.ScriptedStore`.

    The compute stream is CuPy's current one, whatever it is when work is issued. Both arenas are allocated here, once:
    the device's past CuPy's pool, the host's pinned and past its pool, which would round it up to a power of two.

    Args:
        arena_bytes: on the device.
        host_bytes: on the host.

    Attributes:
        host_address: where the host's arena begins; 0 if there is none.

    Raises:
        RuntimeError: when the device or the host has not so much memory.
    """

    def __init__(self, arena_bytes: int, host_bytes: int):
        self._cupy = cupy = import_cupy()
        self.arena_bytes, self.host_bytes = arena_bytes, host_bytes
        cupy.get_default_memory_pool().free_all_blocks()  # the arena takes the place of what steps left there
        try:
            self._arena = cupy.cuda.memory.Memory(max(arena_bytes, 1))
        except cupy.cuda.memory.OutOfMemoryError as error:
            remedy = "take a lower memory limit, or a smaller batch"
            raise checks.order("memory", f"the GPU has no {arena_bytes} bytes left ({error})", remedy) from error
        try:
            self._host = cupy.cuda.pinned_memory.PinnedMemory(host_bytes) if host_bytes else None
        except cupy.cuda.runtime.CUDARuntimeError as error:
            remedy = "take a higher memory limit, or a smaller batch"
            raise checks.order("memory", f"the host has no {host_bytes} bytes to pin ({error})", remedy) from error
        self.host_address = self._host.ptr if host_bytes else 0
        self._streams = {name: cupy.cuda.Stream(non_blocking=True) for name in ("out", "in")}
        self._events: dict[int, Any] = {}

    @contextmanager
    def allocating(self, place: Callable[[int], int | None]) -> Iterator[None]:
        """Within, CuPy's arrays of n bytes lie at offset ``place(n)`` of the arena; at None, where they usually do."""
        usual = self._cupy.cuda.get_allocator()
        pointer, arena = self._cupy.cuda.MemoryPointer, self._arena

        def allocate(count: int) -> Any:
            offset = place(count)
            return usual(count) if offset is None else pointer(arena, offset)

        with self._cupy.cuda.using_allocator(allocate):
            yield

    def view(self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> Any:
        """An array at ``offset`` of the arena."""
        return self._cupy.ndarray(shape, dtype, self._cupy.cuda.MemoryPointer(self._arena, offset), strides=strides)

    def offset(self, array: Any) -> int | None:
        """Where in the arena ``array`` begins; None outside."""
        offset = array.data.ptr - self._arena.ptr
        return offset if 0 <= offset < self.arena_bytes else None

    def copy_out(self, offset: int, host: int, count: int) -> None:
        """Start a copy of ``count`` bytes of the arena to the host, on the stream ``out``."""
        runtime, stream = self._cupy.cuda.runtime, self._streams["out"].ptr
        runtime.memcpyAsync(self.host_address + host, self._arena.ptr + offset, count, _TO_HOST, stream)

    def copy_in(self, offset: int, host: int, count: int) -> None:
        """Start a copy back, on the stream ``in``."""
        runtime, stream = self._cupy.cuda.runtime, self._streams["in"].ptr
        runtime.memcpyAsync(self._arena.ptr + offset, self.host_address + host, count, _TO_DEVICE, stream)

    def host(self, offset: int, count: int) -> np.ndarray:
        """So many float32 of the host's memory; waits until all streams are idle."""
        self.drain()
        return np.frombuffer(self._cupy.cuda.PinnedMemoryPointer(self._host, offset), np.float32, count)

    def record(self, stream: str, event: int) -> None:
        """Event number ``event`` is over when what was issued to ``stream`` so far is."""
        if event not in self._events:
            self._events[event] = self._cupy.cuda.Event(disable_timing=True)
        self._events[event].record(self._stream(stream))

    def wait(self, stream: str, event: int) -> None:
        """What is issued to ``stream`` from now on starts behind the event."""
        self._stream(stream).wait_event(self._events[event])

    def _stream(self, name: str) -> Any:
        return self._cupy.cuda.get_current_stream() if name == "compute" else self._streams[name]

    def drain(self) -> None:
        """Wait until all streams are idle; under capture nothing runs, and nothing is waited for."""
        compute = self._cupy.cuda.get_current_stream()
        if not compute.is_capturing():
            for stream in (compute, *self._streams.values()):
                stream.synchronize()
