"""How long work on a GPU takes while gradients travel: a captured graph of calls beside all-reduces without a pause.

The all-reduces start first, as many as outlast the work; a sample during which they ended does not count. Rivals are
sampled in turn, alone and beside. All ranks measure together, and of each sample the slowest rank's time is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from minidl import checks
from minidl.cuda.array import copy_into, empty
from minidl.dist.communicator import Communicator
from minidl.precision import float32
from minidl.profile.inputs import noise
from minidl.profile.timing import Timing

SAMPLE_MS = 3.0
ROOM = 2.0  # all-reduces for so many times the work's own duration, to begin with
MOST = 180  # all-reduces of a sample: each doubles the numbers, which start at 1e-30
TRIES = 6  # at outlasting a sample

Call = Callable[[], Any]
Sample = Callable[[int], tuple[float, bool]]


class Run(NamedTuple):
    """``launch`` starts so many ``calls`` on ``stream``, which is of CuPy's kind."""

    launch: Call
    stream: Any
    calls: int


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

    def measure(self, runs: Sequence[Run], samples: int) -> list[tuple[Timing, Timing]]:
        """Milliseconds of a call of each run: alone, and beside all-reduces; a collective."""
        contestants = [one for run in runs for one in self._contestants(run)]
        times = outlasted(self.comm, contestants, samples)
        return list(zip(times[::2], times[1::2], strict=True))

    def _contestants(self, run: Run) -> list[tuple[Sample, int]]:
        """The run's samples and how many all-reduces may outlast one: none, and some."""
        start, stop, end = self._events
        launch, stream, calls = run

        def sample(count: int, repeats: int) -> tuple[float, bool]:
            works = []
            if count:
                copy_into(self._array, self._fresh)
            self.comm.barrier()
            if count:
                works = [self.comm.start_all_reduce(self._array) for _ in range(count + 1)]
                with stream:
                    works[0].wait()  # from here on they run without a pause
            start.record(stream)
            for _ in range(repeats):
                launch()
            stop.record(stream)
            for work in works:
                work.wait()
            end.record()
            end.synchronize()
            stop.synchronize()
            ms = self._cuda.get_elapsed_time(start, stop) / (repeats * calls)
            return ms, not works or self._cuda.get_elapsed_time(stop, end) > 0

        sample(0, 1)
        once = max(self.comm.share(sample(0, 1)[0])) * calls
        repeats = max(1, math.ceil(SAMPLE_MS / max(once, 1e-3)))
        return [
            (partial(sample, repeats=repeats), count) for count in (0, math.ceil(ROOM * repeats * once / self.ms) + 1)
        ]


def outlasted(comm: Communicator, contestants: Sequence[tuple[Sample, int]], samples: int) -> list[Timing]:
    """So many samples of each contestant, in turns, that the traffic outlasted on all ranks; of each the slowest rank's
    time; a collective.

    Args:
        contestants: a sample, given the number of all-reduces: milliseconds, and whether they went on to the end; and
            their number to begin with, more where they were too few.

    Raises:
        RuntimeError: on all ranks, when they are too few again and again.
    """
    taken: list[list[float]] = [[] for _ in contestants]
    counts = [count for _, count in contestants]
    for _ in range(max(samples, 2)):
        for i, (sample, _) in enumerate(contestants):
            for _ in range(TRIES):
                outcomes = comm.share(sample(min(counts[i], MOST)))
                if all(went_on for _, went_on in outcomes):
                    taken[i].append(max(ms for ms, _ in outcomes))
                    break
                counts[i] = math.ceil(1.5 * counts[i])
            else:
                few = f"{min(counts[i], MOST)} all-reduces end before the work beside them"
                raise RuntimeError(f"{few}; make messages larger")
    return [Timing(tuple(ms)) for ms in taken]
