"""Work of a captured step beside its main line, and the memory that waits for it.

In a backward pass nothing waits for the gradient of a weight until the update: the next layer needs that of the input.
Where kernels are short, multiprocessors idle as each begins and ends, and work beside them fills these gaps (Oh, Lee,
Kim, Seo: Out-of-order backprop, EuroSys 2022). In a CUDA graph it is a branch: captured on a stream of its own, behind
all that the main line has started so far, and of a higher priority, as its blocks would else wait for the end of
kernels that fill the device.

What is released while such work is under way may still be read by it, and what it releases itself it may still write:
all this keeps its place until the main line has waited for the work. It waits only where memory would grow, and
at `rejoin`. What that gains, and what was tried: docs/architecture.md, docs/tuning.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from minidl.cuda.capture import Allocator, allocating
from minidl.cuda.device import import_cupy

# Work that takes more microseconds fills a device by itself. What an H200 computes in one, by bytes of an element, and
# moves.
SHORT = 12.0
FLOP, BYTES = {2: 7e8, 4: 3.5e8}, 4e6
PRIORITY = -1  # above that of other streams, 0


class _Piece:
    """Work beside: what was released since it began and before the next; the event at its end, once it has one."""

    def __init__(self) -> None:
        self.released: list[tuple[int, int]] = []
        self.complete = False
        self.done: Any = None


class Beside:
    """The memory of a step whose work runs beside its main line in places.

    What is handed out and released, and in which order, depends on the sizes alone: it is the same while a step is
    recorded, when all of it runs in one line, and while it is captured.

    Args:
        allocator: has the memory.
        stream: of the work beside, while a graph is captured; None: it takes its turn in the main line.
    """

    def __init__(self, allocator: Allocator, stream: Any = None):
        self._allocator, self._stream = allocator, stream
        self._pieces: deque[_Piece] = deque()
        self._sizes: dict[int, int] = {}
        self._live = self._most = 0
        self._main: Any = None

    def malloc(self, size: int, device: int) -> int:
        while self._pieces and self._pieces[0].complete and self._live + size > self._most:
            self._join()
        address = self._allocator.malloc(size, device)
        self._sizes[address] = size
        self._live += size
        if not self._pieces:
            self._most = max(self._most, self._live)
        return address

    def free(self, address: int, device: int) -> None:
        if self._pieces:
            self._pieces[-1].released.append((address, device))
        else:
            self._release(address, device)

    def _release(self, address: int, device: int) -> None:
        self._live -= self._sizes.pop(address)
        self._allocator.free(address, device)

    @contextmanager
    def aside(self) -> Iterator[bool]:
        """Within, work is beside the main line: it may read what that, and work beside, has made so far."""
        piece = _Piece()
        self._pieces.append(piece)
        if self._stream is None:
            yield True
        else:
            self._main = import_cupy().cuda.get_current_stream()
            self._stream.wait_event(_recorded(self._main))
            with self._stream:
                yield True
            piece.done = _recorded(self._stream)
        piece.complete = True

    def _join(self) -> None:
        """The main line waits for the oldest piece; then what was released meanwhile is free."""
        piece = self._pieces.popleft()
        if piece.done is not None:
            self._main.wait_event(piece.done)
        for address, device in piece.released:
            self._release(address, device)

    def rejoin(self) -> None:
        """What comes next may read what all of the work beside has made."""
        while self._pieces:
            self._join()


def _recorded(stream: Any) -> Any:
    """An event behind what ``stream`` has been given."""
    event = import_cupy().cuda.Event(disable_timing=True)
    event.record(stream)
    return event


_active: list[Beside] = []


@contextmanager
def branching(allocator: Allocator, stream: Any = None) -> Iterator[None]:
    """Within, CuPy's arrays of this thread come from ``allocator``, and work may run `aside`."""
    memory = Beside(allocator, stream)
    _active.append(memory)
    try:
        with allocating(memory):
            yield
    finally:
        _active.remove(memory)


def new_stream() -> Any:
    """For work beside the main line."""
    return import_cupy().cuda.Stream(non_blocking=True, priority=PRIORITY)


def aside(flop: float, moved: float, itemsize: int) -> AbstractContextManager[bool]:
    """As `minidl.cpu.array.aside`: of a step that is captured, work that takes little time is a branch of its graph."""
    short = max(flop / FLOP[itemsize], moved / BYTES) <= SHORT
    return _active[-1].aside() if _active and short else nullcontext(not _active)


def rejoin() -> None:
    """As `minidl.cpu.array.rejoin`."""
    if _active:
        _active[-1].rejoin()
