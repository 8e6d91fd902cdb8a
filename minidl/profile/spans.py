"""Spans: the hook through which every pass of every layer is seen, in one place.

`Layer.forward` and `Layer.backward` open a span around each pass. The null profiler makes that free; a recorder notes
the order of events (tests, planners); timers that read device events build on the same three methods.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

__all__ = ["NULL_PROFILER", "NullProfiler", "Profiler", "SpanRecorder"]


class Profiler(Protocol):
    """What a layer calls. ``pass_name``: forward, backward_weight, backward_data or message."""

    def span(self, layer: str, pass_name: str) -> AbstractContextManager[None]: ...


class NullProfiler:
    """Sees nothing and costs nothing."""

    _nothing = nullcontext()

    def span(self, layer: str, pass_name: str) -> AbstractContextManager[None]:
        return self._nothing


NULL_PROFILER = NullProfiler()


class SpanRecorder:
    """Notes each span when it opens: the order of work in a step, without times."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    @contextmanager
    def span(self, layer: str, pass_name: str) -> Iterator[None]:
        self.events.append((layer, pass_name))
        yield
