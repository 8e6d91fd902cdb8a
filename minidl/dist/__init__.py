"""Ranks of one job: start-up, collectives on arrays, and what happens when one of them fails.

comm = minidl.dist.init()           # SOLO, or the ranks that mpiexec started
work = comm.start_all_reduce(grad)  # returns at once
work.wait()                         # what follows sees the sum
"""

from __future__ import annotations

from minidl.dist.agree import require_same, require_same_arrays
from minidl.dist.communicator import SOLO, Communicator, SoloCommunicator, Work
from minidl.dist.elastic import RankLost
from minidl.dist.world import init, launched_size, shrink, world

__all__ = [
    "SOLO", "Communicator", "RankLost", "SoloCommunicator", "Work", "init", "launched_size", "require_same",
    "require_same_arrays", "shrink", "world",
]  # fmt: skip
