"""Stopping a job from outside: a batch system's signal ends training after a step, with a checkpoint, on all ranks."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from minidl.dist.communicator import Communicator

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
SECONDS = 1.0  # between two agreements, about
MOST_STEPS = 1000  # from one to the next
REPEATED_SECONDS = 2.0  # a signal that comes again is the same one: batch system and launcher both send it


class StopRequest:
    """Catches SIGTERM and SIGUSR1 while it is entered, and lets the ranks agree that one of them got one.

    A signal that comes again soon is taken for the same; one that comes later does what it did before. Outside the main
    thread nothing is caught.
    """

    def __init__(self, comm: Communicator):
        self.comm = comm
        self._caught: int | None = None
        self._first: dict[int, float] = {}  # when each signal came
        self._before: dict[int, Any] = {}
        self._every, self._steps, self._since = 1, 0, time.perf_counter()

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._catch) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in list(self._before):
            self._restore(number)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self._caught, first = number, self._first.get(number)
        if first is None:
            self._first[number] = time.monotonic()
        elif time.monotonic() - first >= REPEATED_SECONDS:
            self._restore(number)
            signal.raise_signal(number)

    def _restore(self, number: int) -> None:
        before = self._before.pop(number, None)
        signal.signal(number, signal.SIG_DFL if before is None else before)

    def agreed(self) -> signal.Signals | None:
        """After each step, on all ranks alike: the signal that some rank got, told to all within about a second.

        The ranks talk once in so many steps as take the slowest of them `SECONDS`.
        """
        self._steps += 1
        if self._steps < self._every:
            return None
        now = time.perf_counter()
        told = self.comm.share((self._caught, (now - self._since) / self._steps), "signal to stop")
        slowest = max(seconds for _, seconds in told)
        self._every = min(MOST_STEPS, max(1, int(SECONDS / max(slowest, 1e-9))))
        self._steps, self._since = 0, now
        caught = [number for number, _ in told if number is not None]
        return signal.Signals(caught[0]) if caught else None
