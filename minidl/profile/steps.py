"""StepProfiler: every pass of every layer within real steps, by device events or by the clock.

Between two steps nothing is waited for and nothing is read; each span costs two event records. In a CUDA graph the
records become nodes of the graph, which each launch times anew: the passes of a step with no time of the host in it.
There one record ends a span and begins the next where no other work lies between them, since each keeps the kernels
before and after it apart: some microseconds, which `StepTimes.less_marks` takes off again.
"""

from __future__ import annotations

import ctypes
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from statistics import median
from types import ModuleType
from typing import Any

from minidl.cuda.capture import used_bytes

COMPUTE, MESSAGES = "compute", "messages"
_OF_THE_HOST = ("message",)  # launches on another stream: an interval of the compute stream holds nothing of it
_NOTHING = nullcontext()
_SAME_MOMENT = 1e-6  # milliseconds; events resolve half a microsecond


@dataclass(frozen=True)
class SpanTime:
    """One span of one step. ``lane``: compute, or messages (the communication stream or thread).

    Times in milliseconds, ``start_ms`` from the start of the step.
    """

    layer: str
    pass_name: str
    lane: str
    start_ms: float
    ms: float


@dataclass
class StepTimes:
    """One step: its whole time, its spans in the order they ended on the host, and memory over time.

    Attributes:
        memory: (milliseconds, bytes in use) after each span of the compute lane; empty where nothing tells.
        captured: its spans are those of CUDA graphs.
        marks: milliseconds of each mark of the compute lane, ascending, from the step's begin to its end.
    """

    ms: float
    spans: list[SpanTime] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    captured: bool = False
    marks: list[float] = field(default_factory=list)

    @property
    def unaccounted_ms(self) -> float:
        """Time of the compute lane outside all spans: launching, and what nobody opened a span for."""
        return self.ms - sum(span.ms for span in self.spans if span.lane == COMPUTE)

    def less_marks(self, cost: float) -> StepTimes:
        """The step as it would be if its marks took no time: each interval between two of them ``cost`` milliseconds
        shorter, and what follows so much earlier. A message keeps its length.
        """

        def at(moment: float) -> float:
            return moment - cost * bisect_left(self.marks, moment - _SAME_MOMENT)

        def less(span: SpanTime) -> SpanTime:
            start = at(span.start_ms)
            own = span.ms if span.lane == MESSAGES else max(at(span.start_ms + span.ms) - start, 0.0)
            return replace(span, start_ms=start, ms=own)

        memory = [(at(moment), used) for moment, used in self.memory]
        return replace(self, ms=at(self.ms), spans=list(map(less, self.spans)), memory=memory)


def mark_cost(plain: Sequence[float], watched: Sequence[StepTimes]) -> float:
    """Milliseconds that one mark adds to a captured step: a node of the graph between two kernels, so that it costs
    about the same between any two. 0 where nothing longer was seen.

    Args:
        plain: milliseconds of the same step without marks.
        watched: with them.
    """
    intervals = median(len(step.marks) for step in watched) - 1
    longer = median(step.ms for step in watched) - median(plain)
    return max(longer, 0.0) / intervals if intervals > 0 else 0.0


@dataclass
class Marked:
    """A piece of a step as it was marked: where it began and ended, and its spans with the bytes then in use (or -1).

    Of a piece captured in a CUDA graph the marks are the graph's own: each launch sets them anew.
    """

    begin: Any = None
    end: Any = None
    spans: list[tuple[str, str, str, Any, Any, int]] = field(default_factory=list)


class StepProfiler:
    """Sees all spans of the steps inside `step`, and of no others.

    Args:
        ops: the operation table the steps run on.
    """

    def __init__(self, ops: ModuleType):
        self.on_gpu = ops.name == "cuda"
        self._own = self._marks = _DeviceMarks() if self.on_gpu else _HostMarks()
        self._used: Callable[[], int] | None = None
        self._target: list[tuple[str, str, str, Any, Any, int]] | None = None
        self._launched: list[Marked] | None = None
        self._steps: list[tuple[Marked, list[Marked]]] = []
        self._found: list[StepTimes] = []

    @contextmanager
    def step(self, *, memory: bool = False) -> Iterator[None]:
        """Around one step.

        Args:
            memory: note the bytes in use after each span, on a GPU; asking takes the host some microseconds.
        """
        own, launched = Marked(), []
        self._launched = launched
        try:
            with self._marking(own, memory=memory):
                yield
        finally:
            self._launched = None
        self._steps.append((own, launched))

    @contextmanager
    def capturing(self) -> Iterator[Marked]:
        """Around the capture of a step, or of a part of one, in a CUDA graph: its spans become nodes of the graph."""
        outer = self._marks, self._target, self._used
        self._marks, piece = _CapturedMarks(), Marked()
        try:
            with self._marking(piece, memory=True):
                yield piece
        finally:
            self._marks, self._target, self._used = outer

    @contextmanager
    def _marking(self, piece: Marked, *, memory: bool) -> Iterator[None]:
        piece.begin = self._marks.set(None)
        self._target = piece.spans
        self._used = used_bytes if memory and self.on_gpu else None
        try:
            yield
        finally:
            self._target = None
        piece.end = self._marks.set(None)

    def launching(self, piece: Marked) -> None:
        """The step under way is about to launch what ``piece`` was captured in; an earlier launch is read before."""
        if self._launched is None:
            return
        if any(piece is other for _, launched in self._steps for other in launched):
            self._found = self.read()
        self._launched.append(piece)

    def span(self, layer: str, pass_name: str, stream: Any = None) -> AbstractContextManager[None]:
        if self._target is None or (self.on_gpu and pass_name in _OF_THE_HOST):
            return _NOTHING
        return _Span(self, self._target, layer, pass_name, stream)

    def read(self) -> list[StepTimes]:
        """The steps since the last reading, waited for."""
        found, self._found = self._found, []
        for own, launched in self._steps:
            found.append(self._times(own, launched))
            self._own.reuse([own.begin, own.end, *(mark for span in own.spans for mark in span[3:5])])
        self._steps.clear()
        return found

    def _times(self, own: Marked, launched: Sequence[Marked]) -> StepTimes:
        """A step of captured spans lasts from the first mark of its graphs to the last: launching them is not in it."""
        self._own.wait(own.end)
        pieces = launched or [own]
        begin, known = pieces[0].begin, {}

        def at(mark: Any) -> float:
            if id(mark) not in known:  # two spans share it where one begins as the other ends
                known[id(mark)] = self._own.between(begin, mark)
            return known[id(mark)]

        step = StepTimes(at(pieces[-1].end), captured=bool(launched))
        moments = {at(mark) for piece in pieces for mark in (piece.begin, piece.end)}
        for layer, pass_name, lane, start, stop, used in (span for piece in pieces for span in piece.spans):
            if lane == MESSAGES:
                self._own.wait(stop)  # it may lie after the step's end
            else:
                moments |= {at(start), at(stop)}
            step.spans.append(SpanTime(layer, pass_name, lane, at(start), at(stop) - at(start)))
            if used >= 0:
                step.memory.append((at(stop), used))
        step.marks = sorted(moments)
        return step


class _Span:
    __slots__ = ("profiler", "target", "layer", "pass_name", "stream", "start")

    def __init__(self, profiler: StepProfiler, target: list, layer: str, pass_name: str, stream: Any):
        self.profiler, self.target = profiler, target
        self.layer, self.pass_name, self.stream = layer, pass_name, stream

    def __enter__(self) -> None:
        self.start = self.profiler._marks.set(self.stream)

    def __exit__(self, *failure: Any) -> None:
        profiler = self.profiler
        stop = profiler._marks.set(self.stream)
        lane = MESSAGES if self.pass_name == "all_reduce" else COMPUTE
        used = profiler._used() if profiler._used is not None and lane == COMPUTE else -1
        self.target.append((self.layer, self.pass_name, lane, self.start, stop, used))


class _HostMarks:
    """Moments of the clock. A message's thread may set them too."""

    def set(self, stream: Any) -> float:
        return time.perf_counter()

    def wait(self, mark: float) -> None:
        pass

    def between(self, start: float, stop: float) -> float:
        return (stop - start) * 1e3

    def reuse(self, marks: list[float]) -> None:
        pass


class _DeviceMarks:
    """CUDA events, kept for later steps once they were read."""

    def __init__(self) -> None:
        import cupy

        self._cuda, self._record = cupy.cuda, cupy.cuda.runtime.eventRecord
        self._elapsed = cupy.cuda.runtime.eventElapsedTime
        self._free: list[Any] = []

    def set(self, stream: Any) -> Any:
        event = self._free.pop() if self._free else self._cuda.Event()
        self._record(event.ptr, (stream or self._cuda.get_current_stream()).ptr)
        return event

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def between(self, start: Any, stop: Any) -> float:
        return self._elapsed(start.ptr, stop.ptr)

    def reuse(self, marks: list[Any]) -> None:
        self._free += marks


class _CapturedMarks(_DeviceMarks):
    """CUDA events recorded by nodes of a graph, which can be read after each replay.

    CuPy does not offer such records, nor a way to ask what a captured stream waits for; the driver does.
    """

    _EXTERNAL = 1  # CU_EVENT_RECORD_EXTERNAL

    def __init__(self) -> None:
        super().__init__()
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._last: dict[int, tuple[Any, tuple[int, ...]]] = {}  # of each stream: its last mark, and that mark's node

    def set(self, stream: Any) -> Any:
        stream = (stream or self._cuda.get_current_stream()).ptr
        if stream in self._last:
            event, node = self._last[stream]
            if self._awaited(stream) == node:
                return event  # nothing was launched since
        event = self._cuda.Event()
        pointers = ctypes.c_void_p(event.ptr), ctypes.c_void_p(stream)
        self._succeed(self._driver.cuEventRecordWithFlags(*pointers, self._EXTERNAL))
        self._last[stream] = event, self._awaited(stream)
        return event

    def _awaited(self, stream: int) -> tuple[int, ...]:
        """The nodes that the next node of the stream will depend on."""
        state, identity, count = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_size_t()
        nodes = ctypes.POINTER(ctypes.c_void_p)()
        out = (ctypes.byref(value) for value in (state, identity, ctypes.c_void_p(), nodes, count))
        self._succeed(self._driver.cuStreamGetCaptureInfo_v2(ctypes.c_void_p(stream), *out))
        return tuple(nodes[i] for i in range(count.value))

    @staticmethod
    def _succeed(status: int) -> None:
        if status:
            raise RuntimeError(f"timing a captured step failed with CUDA driver error {status}")
