"""How long work on a GPU takes while gradients travel: a captured graph of calls beside all-reduces without a pause.

The all-reduces start first, as many as outlast the work; a sample during which they ended does not count. All ranks
measure together, and of each sample the slowest rank's time is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from minidl import checks
from minidl.cuda.array import copy_into, empty
from minidl.dist.communicator import Communicator
from minidl.precision import float32
from minidl.profile.inputs import noise
from minidl.profile.timing import Timing

__all__ = ["Traffic", "outlasted"]

SAMPLE_MS = 3.0
ROOM = 2.0  # all-reduces for so many times the work's own duration, to begin with
MOST = 180  # all-reduces of a sample: each doubles the numbers, which start at 1e-30
TRIES = 6  # at outlasting a sample

Call = Callable[[], Any]
Sample = Callable[[int], tuple[float, bool]]


class Traffic:
    """All-reduces of one size between the GPUs of all ranks; making one is a collective.

    Args:
        comm: of two ranks or more, on GPUs.
        nbytes: of a message.

    Attributes:
        ms: of an all-reduce with nothing beside it.

    Raises:
        ValueError: on one rank.
    """

    def __init__(self, comm: Communicator, nbytes: int):
        import cupy

        import minidl.cuda as ops

        if comm.size < 2:
            raise checks.bad_value(
                "traffic", "ranks", "at least 2", comm.size, "start it with mpiexec or minidl.launch"
            )
        self.comm, self._cuda = comm, cupy.cuda
        size = max(1, nbytes // 4)
        self.nbytes = 4 * size
        self._fresh = noise(ops, (size,), float32, seed=comm.rank)
        self._fresh *= np.float32(1e-30)
        self._array = empty((size,), float32)
        copy_into(self._array, self._fresh)
        self._events = [cupy.cuda.Event() for _ in range(3)]
        self._alone(3)
        self.ms = max(comm.share(self._alone(10)))

    def _alone(self, count: int) -> float:
        start, _, end = self._events
        self.comm.barrier()
        start.record()
        works = [self.comm.start_all_reduce(self._array) for _ in range(count)]
        for work in works:
            work.wait()
        end.record()
        end.synchronize()
        return self._cuda.get_elapsed_time(start, end) / count

    def beside(self, launch: Call, stream: Any, calls: int, samples: int) -> Timing:
        """Milliseconds of each of the ``calls`` that ``launch`` starts on a stream of CuPy's kind; a collective."""
        start, stop, end = self._events

        def alone(repeats: int) -> float:
            start.record(stream)
            for _ in range(repeats):
                launch()
            stop.record(stream)
            stop.synchronize()
            return self._cuda.get_elapsed_time(start, stop)

        alone(1)
        once = max(self.comm.share(alone(1)))
        repeats = max(1, math.ceil(SAMPLE_MS / max(once, 1e-3)))

        def sample(count: int) -> tuple[float, bool]:
            copy_into(self._array, self._fresh)
            self.comm.barrier()
            first = self.comm.start_all_reduce(self._array)
            works = [self.comm.start_all_reduce(self._array) for _ in range(count)]
            with stream:
                first.wait()  # from here on they run without a pause
            start.record(stream)
            for _ in range(repeats):
                launch()
            stop.record(stream)
            for work in works:
                work.wait()
            end.record()
            end.synchronize()
            stop.synchronize()
            return self._cuda.get_elapsed_time(start, stop) / (repeats * calls), end_after(stop, end)

        def end_after(one: Any, other: Any) -> bool:
            return self._cuda.get_elapsed_time(one, other) > 0

        return outlasted(self.comm, sample, math.ceil(ROOM * repeats * once / self.ms) + 1, samples)


def outlasted(comm: Communicator, sample: Sample, count: int, samples: int) -> Timing:
    """So many samples that the traffic outlasted on all ranks, of each the slowest rank's time; a collective.

    Args:
        sample: given the number of all-reduces; milliseconds, and whether they went on to the end.
        count: of all-reduces to begin with; more where they were too few.

    Raises:
        RuntimeError: on all ranks, when they are too few again and again.
    """
    taken: list[float] = []
    failed = 0
    while len(taken) < max(samples, 2):
        outcomes = comm.share(sample(min(count, MOST)))
        if all(went_on for _, went_on in outcomes):
            taken.append(max(ms for ms, _ in outcomes))
            continue
        failed, count = failed + 1, math.ceil(1.5 * count)
        if failed == TRIES:
            raise RuntimeError(f"{min(count, MOST)} all-reduces end before the work beside them; make messages larger")
    return Timing(tuple(taken))
