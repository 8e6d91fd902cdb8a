"""``minidl doctor``: what is installed on this machine; under a launcher also what lies between the ranks, tried."""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np

from minidl import checks, dist
from minidl.backend import get_ops
from minidl.bench.setup import device_of, join
from minidl.dist import Communicator
from minidl.dist.agree import by_value
from minidl.dist.doctor import facts
from minidl.dist.threads import available_cores
from minidl.profile.all_reduce import sweep
from minidl.profile.results import machine_record, result, write
from minidl.profile.tables import show

_ROUNDS = 15  # of comparing clocks
_SECONDS = 3.0  # to answer at a port
_SKEW_MS = 100.0  # beyond it the lines of two hosts cannot be put in order
_SIZES = (1, 1000, 65536, 4 << 20)  # elements of sums that are looked at
_ODD = 4099  # a prime: no size of a vector or a share divides it


def add_arguments(p: argparse.ArgumentParser) -> None:
    """The options of ``minidl doctor``."""
    p.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="whose sums are tried on ranks")
    p.add_argument("--json", metavar="PATH", help="keep what was measured between ranks, for minidl simulate --links")


def run(a: argparse.Namespace) -> int:
    """Look at everything; the exit status: 1 where something between the ranks does not work."""
    if dist.launched_size() == 1:
        if a.json:
            raise checks.bad_value("", "--json", "left out on one rank", a.json, "start it with mpiexec")
        _show_facts()
        return 0
    comm = join(a.device)
    if comm.rank == 0:
        _show_facts()
    device = device_of(a.device, comm)
    problems = _ranks(comm, device) + _hosts(comm) + _sums(comm, device)
    if comm.rank == 0:
        print("all is well between the ranks" if not problems else "\n".join(f"-- {text}" for text in problems))
    found = sweep(get_ops(device), comm, lambda what: comm.barrier())
    if comm.rank == 0:
        _show_sweep(found)
        if a.json:
            write(a.json, result("doctor", [], machine_record(), ceilings={"all_reduce": found}))
    return int(bool(problems))


def _show_facts() -> None:
    table = facts()
    width = max(len(fact.name) for fact in table)
    for fact in table:
        remedy = f"  -> {fact.remedy}" if fact.remedy else ""
        print(f"{'ok ' if fact.ok else '-- '} {fact.name:<{width}}  {fact.value}{remedy}")


def _ranks(comm: Communicator, device: str) -> list[str]:
    """Show where the ranks are; what is wrong with that."""
    own = [socket.gethostname(), comm.local_rank, len(available_cores()), os.environ.get("OMP_NUM_THREADS", "")]
    own += [_gpu()] if device == "cuda" else []
    rows = comm.share(own)
    if comm.rank == 0:
        columns = ["rank", "host", "local rank", "cores", "threads", *(["GPU"] if device == "cuda" else [])]
        direct = getattr(comm, "links", None)
        notes = [] if device == "cpu" else [f"GPUs see each other's memory: {'yes' if direct else 'no'}"]
        cells = [[str(rank), *map(str, row)] for rank, row in enumerate(rows)]
        show(f"{comm.size} ranks joined by {comm.name}", columns, cells, notes=notes)
    versions = comm.share(str(np.__version__))
    return [f"NumPy differs: {by_value(versions)}"] if len(set(versions)) > 1 else []


def _gpu() -> str:
    import cupy

    device = cupy.cuda.runtime.getDevice()
    bus, name = cupy.cuda.runtime.deviceGetPCIBusId(device), cupy.cuda.runtime.getDeviceProperties(device)["name"]
    return f"{device} {name.decode()} at {bus}"


def _hosts(comm: Communicator) -> list[str]:
    """What is wrong between the hosts: clocks that differ, ports that do not answer."""
    offsets = clock_offsets(comm)
    problems = []
    for rank, offset in enumerate(offsets):
        if abs(offset) > _SKEW_MS / 1e3:
            problems.append(f"the clock of rank {rank} is {offset * 1e3:+.0f} ms off that of rank 0: run a time daemon")
    for rank, text in unreachable(comm):
        problems.append(f"rank {rank} cannot reach rank 0 at {text}: a firewall, or a name that means another host?")
    if comm.rank == 0:
        worst = max(offsets, key=abs)
        print(f"clocks differ by {abs(worst) * 1e3:.2f} ms at most")
    return problems


def clock_offsets(comm: Communicator) -> list[float]:
    """Seconds by which the clock of each rank is ahead of rank 0's, to within some barriers; a collective."""
    told = []
    for _ in range(_ROUNDS):
        comm.barrier()
        told.append(time.time())
    rounds = zip(*comm.share(told), strict=True)
    rows = [[moment - moments[0] for moment in moments] for moments in rounds]
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def unreachable(comm: Communicator, host: str = "") -> list[tuple[int, str]]:
    """(rank, address) of the ranks that cannot open a connection to rank 0; a collective.

    Args:
        host: under which name rank 0 is looked for; default: what it calls itself.
    """
    with closing(socket.socket()) as listener:
        listener.bind(("", 0))
        listener.listen(comm.size)
        address = comm.share((host or socket.gethostname(), listener.getsockname()[1]))[0]
        failure = ""
        if comm.rank:
            try:
                socket.create_connection(address, _SECONDS).close()
            except OSError as error:
                failure = f"{address[0]}, port {address[1]} ({error})"
        told = comm.share(failure)
    return [(rank, text) for rank, text in enumerate(told) if text]


def _sums(comm: Communicator, device: str) -> list[str]:
    if sums_are_right(comm, device, (*_SIZES, _ODD)):
        return []
    return [f"sums by {comm.name} are wrong: do not train with it; MINIDL_ENGINE chooses another engine"]


def sums_are_right(comm: Communicator, device: str, sizes: Sequence[int]) -> bool:
    """Whether all-reduces of whole numbers give their sums, on all ranks; a collective."""
    ops, right = get_ops(device), True
    for size in sizes:
        numbers = np.arange(size, dtype=np.float32) % 1000
        for call in ("all_reduce", "start_all_reduce"):
            array: Any = ops.from_host(numbers + np.float32(comm.rank))
            work = getattr(comm, call)(array)
            if work is not None:
                work.wait()
            expected = numbers * comm.size + sum(range(comm.size))
            right = right and bool((ops.to_host(array) == expected).all())
    return all(comm.share(right))


def _show_sweep(found: dict[str, Any]) -> None:
    rows = [
        [f"{point['bytes'] / 1024:,.0f}", f"{point['ms'] * 1e3:,.1f}", f"{point['bus_gb_per_s']:.2f}"]
        for point in found["points"]
    ]
    line = f"{found['latency_us']:.1f} us and {found['bus_gb_per_s']:.2f} GB/s on the wire of each rank"
    show(f"all-reduce by {found['engine']}", ["KiB", "us", "GB/s on the wire"], rows, notes=[f"alpha-beta: {line}"])
