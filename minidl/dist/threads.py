"""CPU threads per rank: launchers give every rank all cores, or one, and each rank would start a thread per core."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from minidl import checks
from minidl.dist.communicator import Communicator

_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Host(NamedTuple):
    """A host: hosts of a cloud may all have one name, and differ by when they were booted."""

    name: str
    boot: str

    def __str__(self) -> str:
        return self.name


def this_host() -> Host:
    """The one that this process runs on."""
    with suppress(OSError):
        return Host(socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    return Host(socket.gethostname(), "")


def available_cores() -> frozenset[int]:
    """The cores that this process may run on (what a launcher bound it to)."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))  # macOS binds no process


def sleep_where_cores_are_short() -> None:
    """Before MPI starts: let MPICH sleep in its waits where its launcher started more ranks here than there are cores.

    It would spin, and give up the core only to who spins as well: who computes would wait for its turn. Open MPI's
    launcher sees to that by itself.
    """
    ranks = os.environ.get("MPI_LOCALNRANKS", "")
    if ranks.isdigit() and hasattr(os, "sched_getaffinity"):
        cores = os.sched_getaffinity(os.getppid())  # the launcher's: its ranks may be bound to some of them
        if int(ranks) > len(cores):
            os.environ.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")


def ranks_sharing_cores(comm: Communicator) -> int:
    """How many ranks, this one included, may run on this rank's cores; a collective.

    All of its host under MPICH, which binds nothing; one where Open MPI bound each rank to its own core.
    """
    places = comm.share((this_host(), available_cores()))
    return count_sharing(places, comm.rank)


def count_sharing(places: Sequence[tuple[Host, frozenset[int]]], rank: int) -> int:
    """The number of (host, cores) pairs that overlap with that of ``rank``."""
    host, cores = places[rank]
    return sum(other == host and bool(cores & theirs) for other, theirs in places)


def told_threads() -> int | None:
    """What OMP_NUM_THREADS asks for, of a list for nested loops the first; None where it does not say."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) or None if first.isdigit() else None


def cap_threads(ranks_sharing: int) -> int:
    """Limit OpenMP and BLAS to this rank's part of its cores, at least one, and return that number of threads.

    A user's OMP_NUM_THREADS wins. OpenMP runtimes already loaded take the limit for the calling thread only, which is
    the one that computes; libraries loaded and processes started later find it in the environment.

    Raises:
        ImportError: when threadpoolctl is missing.
    """
    if told := told_threads():
        return told
    with checks.needs("sharing cores between ranks", "mpi"):
        from threadpoolctl import threadpool_limits
    threads = max(1, len(available_cores()) // ranks_sharing)
    for variable in _VARIABLES:
        os.environ.setdefault(variable, str(threads))
    threadpool_limits(threads)
    return threads
