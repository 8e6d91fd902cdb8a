"""Spans: the hook through which every pass of every layer is seen, in one place.

`Layer.forward` and `Layer.backward` open a span around each pass, the gradient arena around each message and the wait
for it, the loss and the optimizer around theirs. The null profiler makes that free; a recorder notes the order of
events (tests, planners); `minidl.profile.steps` reads clocks and device events through the same one method.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, runtime_checkable

_NOTHING = nullcontext()


class Profiler:
    """What layers, arena, loss and optimizer call; this one sees nothing and costs nothing."""

    def span(self, layer: str, pass_name: str, stream: Any = None) -> AbstractContextManager[None]:
        """A context around the launching of some work.

        Args:
            layer: full name; "loss", "optimizer" for those, names joined by "+" for a message of several layers.
            pass_name: forward, backward_weight, backward_data; update; message (the starting of an all-reduce on the
                host), all_reduce (its transfer, on the message's stream or thread), wait (the wait for it, or for the
                other ranks' totals of the loss).
            stream: the CUDA stream that the work goes to; None: the current one, or the calling thread on a CPU.
        """
        return _NOTHING


NULL_PROFILER = Profiler()


@runtime_checkable
class GraphProfiler(Protocol):
    """A profiler that also sees steps that are launches of CUDA graphs."""

    def span(self, layer: str, pass_name: str, stream: Any = None) -> AbstractContextManager[None]:
        """See `Profiler`."""

    def capturing(self) -> AbstractContextManager[Any]:
        """Around the capture of a step, or of a part of one, whose spans the graph times: what `launching` is told."""

    def launching(self, piece: Any) -> None:
        """The graph of ``piece`` is about to be launched."""


class SpanRecorder:
    """Notes each span when it opens: the order of work in a step, without times."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    @contextmanager
    def span(self, layer: str, pass_name: str, stream: Any = None) -> Iterator[None]:
        self.events.append((layer, pass_name))
        yield
