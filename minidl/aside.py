"""Work that nobody waits for until the end of the backward pass: weight gradients, beside the gradients of the data.

Both need the gradient of a layer's output, and only the update needs weight gradients. In a captured step they go to a
stream of their own, a branch of the graph, and fill the multiprocessors that the chain of data gradients, batch norms
and small kernels between them leaves idle. The kernels, hence the bits, are those of one stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Aside", "Branch"]


class Aside:
    """A service of a model's layers. By itself it runs work at once."""

    def __init__(self) -> None:
        self._branch: Branch | None = None

    def run(self, work: Callable[[Any], None], dy: Any, kept: Any) -> None:
        """Do ``work(dy)``, which reads ``dy`` and ``kept`` and writes nothing that is read before `join`."""
        if self._branch is None:
            work(dy)
        else:
            self._branch.run(work, dy, kept)

    def join(self) -> None:
        """From here on, all work is done."""
        if self._branch is not None:
            self._branch.join()

    @contextmanager
    def on(self, branch: Branch) -> Iterator[None]:
        """Within, work goes to a branch."""
        self._branch = branch
        try:
            yield
        finally:
            self._branch = None


class Branch:
    """A stream beside CuPy's current one.

    Args:
        late: context manager within which freed memory stays in use until ``settle(mark)`` of the mark it gives.
        parallel: False: the same order of allocations on one stream.
    """

    DEPTH = 2  # pieces of work that may be under way: their operands stay in memory

    def __init__(self, late: Any, parallel: bool = True):
        import cupy

        self._cuda, self._late, self._parallel = cupy.cuda, late, parallel
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._under_way: deque[tuple[Any, ...]] = deque()

    def run(self, work: Callable[[Any], None], dy: Any, kept: Any) -> None:
        """See `Aside.run`."""
        while len(self._under_way) >= self.DEPTH:
            self._join_one()
        with self._late.deferred() as freed:
            events = self._start(work, dy) if self._parallel else work(dy)
        self._under_way.append((events, freed, dy, kept))

    def _start(self, work: Callable[[Any], None], dy: Any) -> tuple[Any, Any]:
        """(event behind which the work starts, event when it is done)"""
        ready, done = (self._cuda.Event(disable_timing=True) for _ in range(2))
        ready.record(self._cuda.get_current_stream())
        self._stream.wait_event(ready)
        with self._stream:
            work(dy)
            done.record(self._stream)
        return ready, done

    def join(self) -> None:
        """See `Aside.join`."""
        while self._under_way:
            self._join_one()

    def _join_one(self) -> None:
        events, freed, *_ = self._under_way.popleft()
        if events is not None:
            self._cuda.get_current_stream().wait_event(events[1])
        self._late.settle(freed)
