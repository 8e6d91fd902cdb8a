"""A cluster that is not there: messages take the time of an alpha-beta model, the other ranks are twins of this one.

    comm = SimulatedCommunicator(8, AlphaBeta(latency=10e-6, bandwidth=12.5e9))
    model = minidl.Model(graph, comm=comm, group_bytes=4 << 20)
    ...                                      # train a step
    print(sum(m.exposed for m in comm.messages))

Every rank is taken to hold what this one holds, so sums are ``size`` times the array: a network trained this way, its
loss divided by the labels of all ranks, follows the training of one rank. With a `VirtualClock` no time passes but what
the program says, and the schedule of a step is computed at once and exactly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from minidl import backend, checks
from minidl.dist.communicator import (
    Communicator,
    SoloCommunicator,
    Span,
    Work,
    check_array,
    check_cuts,
    check_root,
    unseen,
)

_SPIN_SECONDS = 200e-6  # before the end of a wait: the system's sleep is no more exact than that


@dataclass(frozen=True)
class AlphaBeta:
    """What a message costs (Hockney, Parallel Computing 1994): a latency, and a time for each byte on the wire.

    Attributes:
        latency: seconds of a message, whatever its size.
        bandwidth: bytes per second and rank.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        checks.number("AlphaBeta", "latency", self.latency, "of at least 0", lambda v: 0 <= v < float("inf"))
        checks.number("AlphaBeta", "bandwidth", self.bandwidth, "above 0", lambda v: v > 0)

    def all_reduce(self, nbytes: int, ranks: int) -> float:
        """Seconds: in a ring each rank sends and receives 2(n-1)/n of the message."""
        return self.latency + 2 * (ranks - 1) / ranks * nbytes / self.bandwidth if ranks > 1 else 0.0

    def reduce_scatter(self, nbytes: int, ranks: int) -> float:
        """Seconds: half of the ring; giving the parts of such a message to all is the other half."""
        return self.latency + (ranks - 1) / ranks * nbytes / self.bandwidth if ranks > 1 else 0.0

    def all_gather(self, nbytes: int, ranks: int) -> float:
        """Seconds, for ``nbytes`` of each rank."""
        return self.latency + (ranks - 1) * nbytes / self.bandwidth if ranks > 1 else 0.0

    def broadcast(self, nbytes: int, ranks: int) -> float:
        """Seconds, pipelined: every rank receives the message once."""
        return self.latency + nbytes / self.bandwidth if ranks > 1 else 0.0


class Clock(Protocol):
    """Tells the time in seconds, and waits."""

    def now(self) -> float:
        """Seconds since some moment."""

    def wait_until(self, moment: float) -> None:
        """Return at ``moment``, at once if it is past."""


class WallClock:
    """Real time: waits sleep, then spin the last of it."""

    def now(self) -> float:
        return time.perf_counter()

    def wait_until(self, moment: float) -> None:
        while (left := moment - time.perf_counter()) > 0:
            if left > _SPIN_SECONDS:
                time.sleep(left - _SPIN_SECONDS)


@dataclass
class VirtualClock:
    """Time that passes only where the program says so: ``clock.advance(seconds)`` stands for compute."""

    moment: float = 0.0

    def now(self) -> float:
        return self.moment

    def wait_until(self, moment: float) -> None:
        self.moment = max(self.moment, moment)

    def advance(self, seconds: float) -> None:
        """Compute for so long."""
        checks.number("VirtualClock", "seconds", seconds, "of at least 0", lambda v: v >= 0)
        self.moment += seconds


@dataclass
class SimulatedMessage:
    """A started all-reduce and its times on the communicator's clock, in seconds.

    Attributes:
        issued: when the program started it; it begins when the link is free.
        exposed: how long the program stood waiting for it; 0 before `wait`.
    """

    name: str
    nbytes: int
    issued: float
    begin: float
    end: float
    exposed: float = 0.0
    _clock: Clock = field(default_factory=WallClock, repr=False)
    _waited: bool = field(default=False, repr=False)

    def wait(self) -> None:
        if self._waited:
            return
        self._waited = True
        started = self._clock.now()
        self._clock.wait_until(self.end)
        self.exposed = self._clock.now() - started


class SimulatedCommunicator:
    """This process as rank 0 of ``size`` ranks that all hold the same; NumPy arrays of any dtype that multiplies.

    Started messages follow each other on one link, blocking calls on another, as the real engines have two. Sums are
    there at once; only the waits take their time.

    Args:
        size: ranks, at least one.
        model: what a message costs.
        local_size: ranks of a host; default all. Told to those who ask; the model knows one kind of link.
        clock: `WallClock`, or a `VirtualClock` to compute a schedule.

    Attributes:
        messages: the started all-reduces so far; clear it between steps.
        blocked: seconds that blocking calls took so far.
    """

    name = "simulated"
    rank = 0
    local_rank = 0

    def __init__(self, size: int, model: AlphaBeta, *, local_size: int = 0, clock: Clock | None = None) -> None:
        self.size = checks.at_least("SimulatedCommunicator", "size", size, 1)
        self.local_size = checks.at_least("SimulatedCommunicator", "local_size", local_size or size, 1)
        if self.local_size > self.size:
            raise checks.bad_value("SimulatedCommunicator", "local_size", f"at most size, {size}", local_size)
        self.model = model
        self.clock = clock or WallClock()
        self.messages: list[SimulatedMessage] = []
        self.blocked = 0.0
        self._free = self.clock.now()

    def all_reduce(self, array: np.ndarray) -> None:
        self._admit("all_reduce", array)
        self._sum(array)
        self._block(self.model.all_reduce(array.nbytes, self.size))

    def start_all_reduce(self, array: np.ndarray, span: Span = unseen, name: str = "") -> Work:
        self._admit("start_all_reduce", array)
        return self._start(array, self.model.all_reduce(array.nbytes, self.size), span, name, self._sum)

    def _start(
        self, array: np.ndarray, seconds: float, span: Span, name: str, act: Callable[[np.ndarray], None]
    ) -> SimulatedMessage:
        issued = self.clock.now()
        begin = max(issued, self._free)
        self._free = begin + seconds
        with span(None):
            act(array)
        message = SimulatedMessage(name, array.nbytes, issued, begin, self._free, _clock=self.clock)
        self.messages.append(message)
        return message

    def start_reduce_scatter(self, array: np.ndarray, cuts: Sequence[int], span: Span = unseen, name: str = "") -> Work:
        self._admit("start_reduce_scatter", array)
        check_cuts("start_reduce_scatter", array, cuts, self.size)
        return self._start(array, self.model.reduce_scatter(array.nbytes, self.size), span, name, self._sum)

    def start_all_gather(self, array: np.ndarray, cuts: Sequence[int], span: Span = unseen, name: str = "") -> Work:
        """The parts of the other ranks stay as they are: those of twins."""
        self._admit("start_all_gather", array)
        check_cuts("start_all_gather", array, cuts, self.size)
        return self._start(array, self.model.reduce_scatter(array.nbytes, self.size), span, name, lambda array: None)

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        self._admit("all_gather", array, written=False)
        self._block(self.model.all_gather(array.nbytes, self.size))
        return np.stack([array] * self.size)

    def broadcast(self, array: np.ndarray, root: int = 0) -> None:
        check_root(root, self.size)
        self._admit("broadcast", array)
        self._block(self.model.broadcast(array.nbytes, self.size))

    def start_exchange(self, sends: Mapping[int, Any], receives: Mapping[int, Any], name: str = "") -> Work:
        raise self._no_groups()

    def split(self, color: int) -> Communicator:
        raise self._no_groups()

    def barrier(self) -> None:
        self._block(self.model.all_reduce(0, self.size))

    def share(self, value: Any, name: str = "") -> list[Any]:
        return [value] * self.size

    def close(self) -> None:
        pass

    def _no_groups(self) -> RuntimeError:
        return checks.order("simulated", "its other ranks are twins of this one, not parts of one layer", "use mpiexec")

    def _sum(self, array: np.ndarray) -> None:
        array *= array.dtype.type(self.size)

    def _block(self, seconds: float) -> None:
        started = self.clock.now()
        self.clock.wait_until(started + seconds)
        self.blocked += self.clock.now() - started

    def _admit(self, call: str, array: np.ndarray, *, written: bool = True) -> None:
        check_array(call, array, written=written)
        if not isinstance(array, np.ndarray):
            raise checks.bad_dtype(call, "array", "a NumPy array", checks.describe(array), "simulate on the cpu")


class ImaginedCommunicator(SoloCommunicator):
    """Rank 0 of ``size`` alike, for walks on shapes: makes the arrays that other engines make, and touches none."""

    name = "imagined"

    def __init__(self, size: int):
        self.size = self.local_size = checks.at_least("ImaginedCommunicator", "size", size, 1)

    def all_gather(self, array: Any) -> Any:
        check_array("all_gather", array, written=False)
        return backend.ops_of(array).empty((self.size, *array.shape), array.dtype)

    def share(self, value: Any, name: str = "") -> list[Any]:
        return [value] * self.size
