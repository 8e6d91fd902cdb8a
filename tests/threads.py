"""Ranks that are threads of this process: where they meet, and the control plane of each."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import numpy as np

from minidl.dist.calls import CallLog

PATIENCE = 20.0


class Array(np.ndarray):
    """A NumPy array that tells its address as CuPy's do."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data if self.size else 0)


class Meeting:
    """Where the ranks of one communicator meet: all put something down, then all see everything."""

    def __init__(self, size):
        self.barrier = threading.Barrier(size, timeout=PATIENCE)
        self.table = [None] * size

    def exchange(self, rank, item):
        self.table[rank] = item
        self.barrier.wait()
        found = list(self.table)
        self.barrier.wait()
        return found


class Control:
    """The control plane of one rank."""

    def __init__(self, rank, size, meeting, log=None):
        self.rank = self.local_rank = rank
        self.size = self.local_size = size
        self.health, self.log, self._meeting = [], log or CallLog(), meeting
        self.roll_call = SimpleNamespace(log=self.log, watch=self.health.append)

    def enter(self, kind, array=None, root=0, name=""):
        return self.log.enter(kind, array, root, name)

    def share(self, value, name=""):
        self.enter("share")
        return self._meeting.exchange(self.rank, value)

    def barrier(self):
        self.share(None)

    @contextlib.contextmanager
    def as_one(self, kind):
        self.enter(kind)
        yield Control(self.rank, self.size, self._meeting)

    def split(self, color):
        told = self._meeting.exchange(self.rank, (color, Meeting))
        members = [rank for rank, (other, _) in enumerate(told) if other == color]
        made = self._meeting.exchange(self.rank, Meeting(len(members)))
        return Control(members.index(self.rank), len(members), made[members[0]], self.log)

    def depart(self):
        self.barrier()

    def close(self):
        pass


def on_threads(size, program):
    """What ``program(control)`` answers on each of so many ranks; the first exception of any is raised."""
    meeting, problems, answers = Meeting(size), [], [None] * size

    def rank(index):
        try:
            answers[index] = program(Control(index, size, meeting))
        except Exception as error:
            problems.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=rank, args=(index,), daemon=True) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * PATIENCE)
    assert problems or not any(thread.is_alive() for thread in threads), "a rank hangs"
    if problems:
        raise problems[0]
    return answers
