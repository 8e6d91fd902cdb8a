"""Arrays from elsewhere: other libraries', and a loader's through pinned memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from minidl.cuda.array import empty
from minidl.cuda.device import import_cupy


def from_dlpack(array: Any) -> Any:
    """As `minidl.cpu.transfer.from_dlpack`; CuPy's current stream waits for the producer's."""
    return import_cupy().from_dlpack(array)


def uploader() -> Uploader:
    """A function that brings a batch to the GPU; a loader has it do so beside the step."""
    return Uploader()


class Uploader:
    """Copies host arrays to the device through pinned memory on a stream of its own.

    `start` fills one of a ring of pinned buffers and returns at once; `wait` makes later work on the current stream
    wait for what was started. Whoever starts the next batch's copies, enqueues a step and waits only then, has them run
    beside the step. The ring holds two batches of images and labels, as the loader asks for one batch ahead; before a
    buffer is filled again the host waits for its copy, which by then is long done.
    """

    RING = 6

    def __init__(self) -> None:
        cupy = import_cupy()
        self._cupy = cupy
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._buffers: list[Any] = [None] * self.RING
        self._events = [cupy.cuda.Event(disable_timing=True) for _ in range(self.RING)]
        self._next = 0

    def __call__(self, host: np.ndarray) -> Any:
        """``host`` on the device, for work that is enqueued later."""
        array = self.start(host)
        self.wait()
        return array

    def start(self, host: np.ndarray) -> Any:
        """An array on the device that will hold ``host``: not to be read before `wait`.

        The copy starts when work already enqueued is done, since the pool may have handed out memory that this work
        still reads.
        """
        array = empty(host.shape, host.dtype)
        if host.size == 0:
            return array
        slot, self._next = self._next, (self._next + 1) % self.RING
        self._events[slot].synchronize()
        staged = self._pinned(slot, host.nbytes)[: host.nbytes]
        staged[:] = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
        self._stream.wait_event(self._cupy.cuda.get_current_stream().record())
        runtime = self._cupy.cuda.runtime
        runtime.memcpyAsync(
            array.data.ptr, staged.ctypes.data, host.nbytes, runtime.memcpyHostToDevice, self._stream.ptr
        )
        self._events[slot].record(self._stream)
        return array

    def wait(self) -> None:
        """Work enqueued on the current stream from now on finds every array that `start` returned so far filled."""
        self._cupy.cuda.get_current_stream().wait_event(self._events[self._next - 1])

    def _pinned(self, slot: int, size: int) -> np.ndarray:
        """The slot's buffer, grown to at least ``size`` bytes."""
        if self._buffers[slot] is None or self._buffers[slot].size < size:
            memory = self._cupy.cuda.alloc_pinned_memory(size)
            self._buffers[slot] = np.frombuffer(memory, np.uint8, size)
        return self._buffers[slot]
