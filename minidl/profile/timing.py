"""How long a call takes: on a GPU by events, on the CPU by the clock; cold, hot, or replayed from a graph.

Each way answers another question, and none alone tells the truth:

* ``replayed``: a captured graph of calls that rotate among input sets larger than the second-level cache. No time of
  the host is in it and no operand waits in the cache: what a kernel costs within a large network.
* ``cold``: one call after the cache was overwritten, with the host's launching hidden behind a waiting kernel.
* ``hot``: calls one after another on the same operands, launched by the host: what a loop around a small layer sees.

On the CPU there is no graph, and ``replayed`` is None.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from minidl.cuda.capture import Room
    from minidl.dist.communicator import Communicator

CACHE_MULTIPLE = 2  # all input sets together, in sizes of the cache
_ENOUGH_FOR_P95 = 20
_USUAL_CACHE = 64 << 20
_LONGEST_REST = 0.02  # seconds

Call = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call, of at least two samples in the order they were taken."""

    samples_ms: tuple[float, ...]

    @cached_property
    def _quartiles(self) -> tuple[float, float, float]:
        low, median, high = statistics.quantiles(self.samples_ms, n=4, method="inclusive")
        return low, median, high

    @property
    def ms(self) -> float:
        """Median."""
        return self._quartiles[1]

    @property
    def min_ms(self) -> float:
        return min(self.samples_ms)

    @property
    def p95_ms(self) -> float | None:
        """95th percentile; None with fewer than 20 samples, which do not know it."""
        if len(self.samples_ms) < _ENOUGH_FOR_P95:
            return None
        return statistics.quantiles(self.samples_ms, n=20, method="inclusive")[-1]

    @property
    def spread(self) -> float:
        """Interquartile range over the median, a fraction."""
        low, median, high = self._quartiles
        return (high - low) / median if median else 0.0

    def record(self) -> dict[str, Any]:
        """As it stands in result files, the samples to a tenth of a microsecond."""
        figures = {"ms": self.ms, "min_ms": self.min_ms, "p95_ms": self.p95_ms, "spread": self.spread}
        return figures | {"n": len(self.samples_ms), "samples_ms": [round(s, 7) for s in self.samples_ms]}


@dataclass(frozen=True)
class Budget:
    """How long to measure: a sample lasts at least ``sample_ms``; samples are taken until there are ``samples`` or
    ``seconds`` have passed, but never fewer than ``least``.

    After each comes a pause of ``rest`` times its own length, of 20 ms at most. Matrix products one after another take
    a GPU to its limit of power within some samples; its clock then falls by a tenth and comes and goes, and two runs
    differ by more than what is to be told apart.
    """

    samples: int = 25
    seconds: float = 1.0
    least: int = 5
    sample_ms: float = 2.0  # an event's resolution (half a microsecond) is then below a thousandth of a sample
    rest: float = 0.0

    def take(self, sample: Callable[[], float]) -> Timing:
        """Samples of ``sample``, which gives milliseconds."""
        taken: list[float] = []
        end = time.perf_counter() + self.seconds
        while len(taken) < self.samples and (len(taken) < max(self.least, 2) or time.perf_counter() < end):
            started = time.perf_counter()
            taken.append(sample())
            if self.rest:
                time.sleep(min(self.rest * (time.perf_counter() - started), _LONGEST_REST))
        return Timing(tuple(taken))

    def per_call(self, elapsed: Callable[[int], float], calls: int = 1) -> Timing:
        """Of ``elapsed``, the milliseconds of so many repeats of ``calls``; repeated until a sample is long enough."""
        repeats = max(1, math.ceil(self.sample_ms / max(elapsed(1), 1e-3)))
        elapsed(repeats)
        return self.take(lambda: elapsed(repeats) / (repeats * calls))


def balanced(n: int) -> list[list[int]]:
    """Orders for n rivals that take turns: in all of them together each stands at every place equally often, and right
    behind each other rival equally often.

    For who ran before is felt: a GPU at its limit of power is slower after one that draws much. Turns that go to and
    fro leave those in the middle among equals, where it is hottest. (Latin squares balanced for carry-over: Williams,
    "Experimental Designs Balanced for the Estimation of Residual Effects of Treatments", 1949.)
    """
    first = [(i + 1) // 2 if i % 2 else n - i // 2 for i in range(n)]
    rows = [[(place + shift) % n for place in first] for shift in range(n)]
    return rows if n % 2 == 0 or n == 1 else [*rows, *(row[::-1] for row in rows)]


def slowest(comm: Communicator, samples_ms: Sequence[float]) -> Timing:
    """Of each sample that all ranks took together the slowest rank's; a collective."""
    return Timing(tuple(map(max, zip(*comm.share(list(samples_ms)), strict=True))))


def input_sets(bytes_per_set: int, cache_bytes: int) -> int:
    """How many input sets to rotate among so that together they exceed the cache twice; at least two."""
    return max(2, math.ceil(CACHE_MULTIPLE * cache_bytes / max(bytes_per_set, 1)) + 1)


class Timer:
    """Times calls on one device. Get one with `timer`.

    Attributes:
        cache_bytes: size of the last cache before memory, which `cold` overwrites.
    """

    cache_bytes: int

    def replayed(self, calls: Sequence[Call], budget: Budget = Budget()) -> Timing | None:
        """Per call of ``calls``, each bound to its own inputs (see `input_sets`); None where nothing can replay them.

        The calls may be captured in a CUDA graph: they do not wait for the device and do not read it back.
        """
        raise NotImplementedError

    def hot(self, call: Call, budget: Budget = Budget()) -> Timing:
        """Per call, repeated on the same operands."""
        raise NotImplementedError

    def cold(self, call: Call, budget: Budget = Budget()) -> Timing:
        """One call at a time, the cache overwritten before each."""
        raise NotImplementedError

    def in_turns(self, contestants: Sequence[Sequence[Call]], budget: Budget = Budget()) -> list[Timing]:
        """Per call of each contestant, sample by sample in turns: clocks drift by more than rivals differ.

        On a GPU as `replayed`, on the CPU as `hot`.
        """
        raise NotImplementedError

    @staticmethod
    def _turns(runs: Sequence[tuple[Callable[[int], float], int]], budget: Budget) -> list[Timing]:
        """Of (milliseconds of so many repeats, calls of a repeat) for each, in the orders of `balanced`."""
        repeats = [max(1, math.ceil(budget.sample_ms / max(elapsed(1), 1e-3))) for elapsed, _ in runs]
        orders = balanced(len(runs))
        for i in range(len(runs)):
            runs[i][0](repeats[i])
        samples: list[list[float]] = [[] for _ in runs]
        end = time.perf_counter() + budget.seconds
        for turn in range(budget.samples):
            if turn >= max(budget.least, 2) and time.perf_counter() >= end:
                break
            for i in orders[turn % len(orders)]:
                elapsed, calls = runs[i]
                samples[i].append(elapsed(repeats[i]) / (repeats[i] * calls))
        return [Timing(tuple(taken)) for taken in samples]


class DeviceTimer(Timer):
    """By CUDA events on a stream of its own, on CuPy's current device."""

    def __init__(self) -> None:
        import cupy

        from minidl.cuda.capture import Room
        from minidl.cuda.device import current_device

        self._room = Room
        self._cupy, self.cache_bytes = cupy, current_device().l2_bytes
        self._start, self._stop = cupy.cuda.Event(), cupy.cuda.Event()

    def _elapsed(self, stream: Any, body: Call) -> float:
        self._start.record(stream)
        body()
        self._stop.record(stream)
        self._stop.synchronize()
        return self._cupy.cuda.get_elapsed_time(self._start, self._stop)

    def replayed(self, calls: Sequence[Call], budget: Budget = Budget()) -> Timing:
        with self.captured(calls) as (launch, stream):
            launch()
            return budget.per_call(partial(self._repeated, launch, stream), len(calls))

    def in_turns(self, contestants: Sequence[Sequence[Call]], budget: Budget = Budget()) -> list[Timing]:
        room = self._room()
        with ExitStack() as graphs:
            runs = []
            for calls in contestants:
                launch, stream = graphs.enter_context(self.captured(calls, room))
                runs.append((partial(self._repeated, launch, stream), len(calls)))
            return self._turns(runs, budget)

    def _repeated(self, call: Call, stream: Any, repeats: int) -> float:
        return self._elapsed(stream, lambda: [call() for _ in range(repeats)])

    @contextmanager
    def captured(self, calls: Sequence[Call], room: Room | None = None) -> Iterator[tuple[Call, Any]]:
        """(a function that launches all ``calls`` as one graph, the stream it goes to).

        Args:
            room: of graphs that take turns; default: one of its own.
        """
        room = room or self._room()
        self._cupy.cuda.Device().synchronize()  # the inputs were made on another stream
        with room.entered():
            # All results are there at once, so that outputs rotate like inputs; then the room keeps their memory.
            launch = room.capture(lambda: [call() for call in calls])[0]
            try:
                yield launch, room.stream
            finally:
                room.stream.synchronize()  # before what the graph writes to is let go

    def hot(self, call: Call, budget: Budget = Budget()) -> Timing:
        stream = self._cupy.cuda.get_current_stream()
        call()
        return budget.per_call(partial(self._repeated, call, stream))

    def cold(self, call: Call, budget: Budget = Budget()) -> Timing:
        from minidl.cuda.spin import spin

        stream = self._cupy.cuda.get_current_stream()
        scratch = self._cupy.empty(CACHE_MULTIPLE * self.cache_bytes, np.uint8)
        call()
        stream.synchronize()
        started = time.perf_counter()
        call()
        hold = 2 * (time.perf_counter() - started) + 50e-6  # the host is back before the device has waited so long
        stream.synchronize()

        def sample() -> float:
            scratch.data.memset_async(0, scratch.nbytes, stream)
            spin(hold)
            return self._elapsed(stream, call)

        sample()
        return budget.take(sample)


class HostTimer(Timer):
    """By the clock, for work that is done when a call returns."""

    def __init__(self) -> None:
        self.cache_bytes = _last_level_cache()

    def replayed(self, calls: Sequence[Call], budget: Budget = Budget()) -> None:
        return None

    def hot(self, call: Call, budget: Budget = Budget()) -> Timing:
        call()
        repeats = max(1, math.ceil(budget.sample_ms / max(self._elapsed(call), 1e-6)))
        return self._quietly(budget, lambda: self._elapsed(lambda: [call() for _ in range(repeats)]) / repeats)

    def cold(self, call: Call, budget: Budget = Budget()) -> Timing:
        scratch = np.zeros(CACHE_MULTIPLE * self.cache_bytes, np.uint8)

        def sample() -> float:
            scratch.fill(0)
            return self._elapsed(call)

        call()
        return self._quietly(budget, sample)

    def in_turns(self, contestants: Sequence[Sequence[Call]], budget: Budget = Budget()) -> list[Timing]:
        def elapsed(calls: Sequence[Call], repeats: int) -> float:
            for call in calls:
                call()  # not counted: the caches are full of a rival's operands, and its threads may still be spinning
            return self._elapsed(lambda: [call() for _ in range(repeats) for call in calls])

        with _no_collection():
            return self._turns([(partial(elapsed, calls), len(calls)) for calls in contestants], budget)

    @staticmethod
    def _quietly(budget: Budget, sample: Callable[[], float]) -> Timing:
        """Samples without a collection of garbage in them."""
        with _no_collection():
            return budget.take(sample)

    @staticmethod
    def _elapsed(call: Call) -> float:
        started = time.perf_counter()
        call()
        return (time.perf_counter() - started) * 1e3


@contextmanager
def _no_collection() -> Iterator[None]:
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def timer(ops: ModuleType) -> Timer:
    """The timer of an operation table's device."""
    return DeviceTimer() if ops.name == "cuda" else HostTimer()


def _last_level_cache() -> int:
    """Bytes of the largest cache that Linux tells of; a usual size where it tells of none."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text[:-1].isdigit() and text[-1] in units:
            sizes.append(int(text[:-1]) * units[text[-1]])
    # Virtual machines name the whole socket's cache; a few hundred megabytes would take longer than what is measured.
    return min(max(sizes, default=_USUAL_CACHE), 4 * _USUAL_CACHE)
