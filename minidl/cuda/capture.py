"""A piece of work as a CUDA graph whose memory is planned: recorded once, then captured into one block.

CuPy asks the allocator of the current thread for every array and tells it when the last reference goes, so what a step
allocates is seen whole, workspaces included. `Recording` writes it down while the step runs as usual; `Replaying` hands
out the planned places while the same step is captured, and refuses a sequence that differs; `Lending` serves any other
work from the same block.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Protocol

from minidl.cuda.device import import_cupy, unprepared


class Allocator(Protocol):
    """What CuPy's function allocator calls; sizes are positive."""

    def malloc(self, size: int, device: int) -> int:
        """The address of ``size`` bytes."""

    def free(self, address: int, device: int) -> None:
        """Nothing refers to ``address`` any more."""


class Recording:
    """Notes what is allocated and released (as `minidl.memory.arena` reads it); the memory comes from ``malloc``.

    Args:
        malloc: size -> a memory pointer that keeps its memory while it lives, such as a CuPy pool's.
    """

    def __init__(self, malloc: Callable[[int], Any]):
        self.events: list[int] = []
        self._malloc = malloc
        self._held: dict[int, tuple[int, Any]] = {}
        self._made = 0

    def malloc(self, size: int, device: int) -> int:
        memory = self._malloc(size)
        self._held[memory.ptr] = self._made, memory
        self._made += 1
        self.events.append(size)
        return memory.ptr

    def free(self, address: int, device: int) -> None:
        self.events.append(~self._held.pop(address)[0])


class Replaying:
    """Hands out the planned places, in a block of ``size`` bytes at ``base``, in the recorded order.

    Attributes:
        failure: what differed first from the record; None while nothing does.
        free_bytes: what the block has left.
    """

    def __init__(self, events: Sequence[int], offsets: Sequence[int], base: int, size: int):
        self.failure: str | None = None
        self.free_bytes = size
        self._events, self._offsets, self._base = events, offsets, base
        self._live: dict[int, tuple[int, int]] = {}
        self._at = self._made = 0
        self._finished = False

    def malloc(self, size: int, device: int) -> int:
        self._expect(size)
        if self.failure is not None:
            raise RuntimeError(self.failure)
        address = self._base + self._offsets[self._made]
        self._live[address] = self._made, size
        self._made += 1
        self.free_bytes -= size
        return address

    def free(self, address: int, device: int) -> None:
        if not self._finished:  # a difference cannot be raised from here: `finish` tells
            number, size = self._live.pop(address)
            self.free_bytes += size
            self._expect(~number)

    def _expect(self, event: int | None) -> None:
        recorded = self._events[self._at] if self._at < len(self._events) else None
        if self.failure is None and event != recorded:
            self.failure = f"event {self._at} of the step {_words(event)}, of its record {_words(recorded)}"
        self._at += 1

    def finish(self) -> None:
        """The work is done; what it kept is released when its owner likes.

        Raises:
            RuntimeError: when it did not do what the record says.
        """
        self._expect(None)
        self._finished = True
        if self.failure is not None:
            raise RuntimeError(self.failure)


def _words(event: int | None) -> str:
    if event is None:
        return "is its end"
    return f"allocates {event:,} bytes" if event >= 0 else f"releases allocation {~event}"


class Lending:
    """Serves from a block while it has room, else from ``malloc``.

    Args:
        lender: `minidl.memory.arena.Lender` of the block at ``base``.
    """

    def __init__(self, lender: Any, base: int, malloc: Callable[[int], Any]):
        self._lender, self._base, self._malloc = lender, base, malloc
        self._outside: dict[int, Any] = {}

    @property
    def free_bytes(self) -> int:
        """What the block has left."""
        return self._lender.free

    def malloc(self, size: int, device: int) -> int:
        offset = self._lender.take(size)
        if offset is not None:
            return self._base + offset
        memory = self._malloc(size)
        self._outside[memory.ptr] = memory
        return memory.ptr

    def free(self, address: int, device: int) -> None:
        if self._outside.pop(address, None) is None:
            self._lender.give_back(address - self._base)


_lending: list[Lending | Replaying] = []


@contextmanager
def lent(lending: Lending | Replaying) -> Iterator[None]:
    """Within, CuPy's arrays of this thread come from a block that is in use as a whole."""
    _lending.append(lending)
    try:
        with allocating(lending):
            yield
    finally:
        _lending.remove(lending)


def used_bytes() -> int:
    """Bytes in use: of CuPy's pool, less what blocks that are being lent have left."""
    return import_cupy().get_default_memory_pool().used_bytes() - sum(lending.free_bytes for lending in _lending)


class Kept:
    """An allocator that is kept while memory of it is in use.

    Python's cycle collector, which finds an array and its allocator among the same garbage, could take the allocator
    apart before the array gives its memory back.
    """

    _in_use: ClassVar[set[Kept]] = set()

    def __init__(self, allocator: Allocator):
        self._allocator, self._count = allocator, 0

    def malloc(self, size: int, device: int) -> int:
        address = self._allocator.malloc(size, device)
        self._count += 1
        self._in_use.add(self)
        return address

    def free(self, address: int, device: int) -> None:
        self._count -= 1
        if self._count == 0:
            self._in_use.discard(self)
        self._allocator.free(address, device)


@contextmanager
def allocating(allocator: Allocator) -> Iterator[None]:
    """Within, CuPy's arrays of this thread come from ``allocator``."""
    cupy, kept = import_cupy(), Kept(allocator)
    memory = cupy.cuda.PythonFunctionAllocator(kept.malloc, kept.free)
    with cupy.cuda.using_allocator(memory.malloc), unprepared():  # which of two calls is the first must not matter
        yield


@contextmanager
def steady() -> Iterator[None]:
    """Within, Python's cycle collector rests: when it releases memory, it does so at another place each time."""
    resting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if resting:
            gc.enable()


def pooled(size: int) -> Any:
    """``size`` bytes of CuPy's pool."""
    return import_cupy().get_default_memory_pool().malloc(size)


def release() -> None:
    """The pool gives back what nobody uses, so that what is made next and stays is not cut from a piece that it blocks.

    Waits for the device.
    """
    import_cupy().get_default_memory_pool().free_all_blocks()


_NO_MEMORY = 2  # cudaErrorMemoryAllocation


class Room:
    """A stream and memory of their own, for graphs that never run at the same time.

    A graph goes on writing to what its work made and dropped while it was captured. CuPy's pool takes that for free: it
    gives it to others, or back to the device, by `release` or where memory runs out. A room's memory stays with the
    room as long as anybody refers to it, then goes back to the device; its graphs may share it, as each begins by
    writing what it reads.

    Attributes:
        stream: on which work is captured and graphs are launched.
    """

    def __init__(self) -> None:
        cupy = import_cupy()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._pool = cupy.cuda.MemoryPool(_never_taken_back)
        # A pool that is only dropped gives nothing back (CuPy 14).
        weakref.finalize(self, self._pool.free_all_blocks).atexit = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within, arrays of this thread come from the room's memory, and the stream is the current one."""
        with import_cupy().cuda.using_allocator(self._pool.malloc), self.stream:
            yield

    def capture(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """(what launches the CUDA graph of ``work`` on the room's stream, what ``work`` returned), as `capture`.

        It runs once before: kernels are loaded and the room is filled, which no capture allows.
        """
        with self.entered():
            work()
            self.stream.synchronize()
            graph, result = capture(work, self.stream)
        return lambda: graph.launch(self.stream), result


def _never_taken_back(size: int) -> Any:
    """Memory for a room's pool, which must not see the device's own error: it would give back what it has to spare."""
    cupy = import_cupy()
    for last in (False, True):
        try:
            return cupy.cuda.MemoryPointer(cupy.cuda.Memory(size), 0)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            if error.status != _NO_MEMORY:
                raise
            if last:
                raise MemoryError(f"capture: no {size:,} bytes left on the device; capture fewer graphs") from error
        release()


def capture(work: Callable[[], Any], stream: Any = None) -> tuple[Any, Any]:
    """(CUDA graph of ``work``, what it returned); nothing runs. The graph may be launched on any stream.

    Args:
        stream: on which ``work`` finds itself; default: one of its own.

    Raises:
        RuntimeError: or whatever ``work`` raises: it waits for the device, for instance, or copies from the host.
    """
    cupy = import_cupy()
    stream = stream or cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        try:
            result = work()
        except BaseException:
            with suppress(cupy.cuda.runtime.CUDARuntimeError):  # the capture is lost anyway
                stream.end_capture()
            raise
        return stream.end_capture(), result
