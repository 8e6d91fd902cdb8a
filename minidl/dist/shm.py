"""Collectives between CPU ranks of one host through memory that they share; MPI between hosts.

Sums are added in rank order (those of a host first), so a result does not depend on how gradients are grouped into
messages, and has the same bits on every rank. An array travels in chunks that stay in the caches: copied into the
rank's slot, added up by all ranks together, each a slice, and copied out, three chunks under way at a time
(`minidl/dist/_window.pyx`). The idea is that of MPI-3 shared windows (Hoefler et al., "MPI + MPI", Computing 2013).
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np

from minidl import checks
from minidl.dist import _window
from minidl.dist.agree import together
from minidl.dist.calls import Call, dtype_name
from minidl.dist.communicator import Communicator, Work
from minidl.dist.host import HostCommunicator, different_calls
from minidl.dist.mpi import MPICommunicator, MPILane
from minidl.dist.threads import available_cores, ranks_sharing_cores

CHUNK_BYTES = 1 << 20  # larger ones leave the caches, smaller ones wait more often
ALL_CHUNKS_BYTES = 4 << 20  # of the ranks of a host together
DIRECT_BYTES = 32 << 10
SPINS = 2000  # looks at a flag, some tens of microseconds, where each rank has a core
_KIND = {name: index for index, name in enumerate(_window.SUMMABLE)}


class _Region:
    """Memory in which each rank of a host has a part of the same size, and all see all parts."""

    def __init__(self, memory: mmap.mmap, ranks: int, own: int, stride: int) -> None:
        self.own, self.stride = own, stride
        base = np.frombuffer(memory, np.uint8).ctypes.data
        self.bases = np.array([base + rank * stride for rank in range(ranks)], np.uint64)
        self.start = base + own * stride

    def offset(self, address: int, nbytes: int) -> int:
        """Of an array in this rank's part; -1 for one that is not in it."""
        offset = address - self.start
        return offset if 0 <= offset and offset + nbytes <= self.stride else -1


class _ShmLane:
    """Shared memory among the ranks of a host."""

    summable = _window.SUMMABLE

    def __init__(self, ranks: list[int], channel: _window.Channel, regions: list[_Region]) -> None:
        self._ranks, self.channel, self._regions = ranks, channel, regions

    def all_reduce(self, array: np.ndarray, call: Call) -> None:
        kind = _KIND[dtype_name(array.dtype)]
        address = array.ctypes.data if self._regions and array.nbytes else 0
        for region in self._regions if address else ():
            if (offset := region.offset(address, array.nbytes)) >= 0:
                self._agreed(self.channel.all_reduce_placed, call, array, region.bases, offset, kind)
                return
        self._agreed(self.channel.all_reduce, call, array, kind)

    def reduce_scatter(self, array: np.ndarray, cuts: Sequence[int], call: Call) -> None:
        self.all_reduce(array, call)  # each rank writes its slice of the sum into all anyway

    def all_gather_parts(self, array: np.ndarray, cuts: Sequence[int], call: Call) -> None:
        for root, (begin, end) in enumerate(pairwise(cuts)):
            if begin < end:
                self._agreed(self.channel.broadcast, call, array[begin:end], root)

    def all_gather(self, array: np.ndarray, out: np.ndarray, call: Call) -> None:
        self._agreed(self.channel.all_gather, call, array, out)

    def broadcast(self, array: np.ndarray, call: Call) -> None:
        self._agreed(self.channel.broadcast, call, array, self._ranks.index(call.root))

    def barrier(self, call: Call) -> None:
        self._agreed(lambda code, number, name: self.channel.barrier(code, number), call)

    def part(self, part: np.ndarray, call: Call) -> np.ndarray:
        """This rank's share of the sum of at most a chunk, as an array in the shared memory."""
        share = self._agreed(self.channel.reduce_part, call, part, _KIND[dtype_name(part.dtype)])
        return np.asarray(share).view(part.dtype)

    def close(self) -> None:
        self.channel = None  # the memory goes with the last array that looks at it

    def _agreed(self, action: Callable[..., Any], call: Call, *arguments: Any) -> Any:
        """``action`` of the channel, in which the ranks compare what they call."""
        try:
            return action(*arguments, call.code, call.number, call.name.encode())
        except _window.Mismatch as error:
            told = zip(self._ranks, error.calls, strict=True)
            calls = {rank: Call.decode(code, n, name.decode(errors="replace")) for rank, (code, n, name) in told}
            raise different_calls(calls) from None


class _Hierarchy:
    """Sums over the ranks of each host in shared memory, then each rank's share over the hosts by MPI."""

    summable = MPILane.summable

    def __init__(self, host: _ShmLane, across: MPILane, everywhere: MPILane) -> None:
        self._host, self._across, self._everywhere = host, across, everywhere
        self.all_gather, self.broadcast, self.barrier = everywhere.all_gather, everywhere.broadcast, everywhere.barrier
        self.all_gather_parts = everywhere.all_gather_parts

    def reduce_scatter(self, array: np.ndarray, cuts: Sequence[int], call: Call) -> None:
        self.all_reduce(array, call)

    def all_reduce(self, array: np.ndarray, call: Call) -> None:
        self._across.agree(call)
        flat = array.reshape(-1)
        step = self._host.channel.chunk // array.itemsize
        for first in range(0, max(flat.size, 1), step):
            part = flat[first : first + step]
            share = self._host.part(part, call)
            if share.size:
                self._across.sum(share)
            self._host.channel.collect_part(part)

    def close(self) -> None:
        for lane in (self._host, self._across, self._everywhere):
            lane.close()


class ShmCommunicator(HostCommunicator):
    """Ranks that meet in shared memory; arrays are NumPy's. Sums: float32, float64, int32, int64, bfloat16 (added in
    float32, rounded once; with several hosts once for each host, and once more); other calls take any dtype.
    """

    name = "shm"

    def __init__(self, control: MPICommunicator) -> None:
        """Join all ranks of ``control``, which is closed with this one; a collective.

        Raises:
            ValueError: on every rank, when a host has one rank only, or hosts have different numbers of them.
            RuntimeError: on every rank, when a rank cannot have the memory.
        """
        self.control = control
        self.rank, self.size = control.rank, control.size
        self.local_rank, self.local_size = control.local_rank, control.local_size
        sizes = control.share(self.local_size)
        if min(sizes) < 2 or len(set(sizes)) > 1:
            found = f"hosts with {' or '.join(str(n) for n in sorted(set(sizes)))} ranks"
            raise checks.bad_value(
                "init", "engine", "mpi where hosts do not all have the same ranks, two at least", found
            )
        # Who shares its core with others gives it to them at once.
        spins = SPINS if ranks_sharing_cores(control) <= len(available_cores()) else 0
        self._regions: list[_Region] = []
        inline, messages = (_lane(control, spins, self._regions) for _ in range(2))
        super().__init__(control.roll_call, inline, messages)

    def share(self, value: Any, name: str = "") -> list[Any]:
        return self.control.share(value, name)

    def start_exchange(
        self, sends: Mapping[int, np.ndarray], receives: Mapping[int, np.ndarray], name: str = ""
    ) -> Work:
        return self.control.start_exchange(sends, receives, name)

    def split(self, color: int) -> Communicator:
        """A group in shared memory where each group has several ranks and all of them on one host, else one by MPI."""
        group = self.control.split(color)
        if not all(self.control.share(1 < group.local_size == group.size)):
            return group
        self._groups.append(ShmCommunicator(group))
        return self._groups[-1]

    def enter(self, kind: str, array: Any = None, root: int = 0, name: str = "") -> Call:
        return self.control.enter(kind, array, root, name)

    def place(self, array: np.ndarray) -> np.ndarray:
        placed = any(region.offset(array.ctypes.data, array.nbytes) >= 0 for region in self._regions)
        if placed or self.local_size < self.size:
            return array
        page = _window.PAGE_BYTES
        rank, stride = self.local_rank, max(1, -(-array.nbytes // page)) * page
        own = [(rank * stride, stride)]
        try:
            memory = _shared_memory(self.control, stride * self.local_size, own)
        except RuntimeError:  # on all ranks: no room for it; sums copy then
            return array
        region = _Region(memory, self.local_size, rank, stride)
        placed = np.frombuffer(memory, array.dtype, array.size, rank * stride)
        placed[:] = array.reshape(-1)
        self._regions.append(region)
        weakref.finalize(placed, self._regions.remove, region)
        return placed.reshape(array.shape)

    def depart(self) -> None:
        self._departed = True
        self.control.depart()

    def close(self) -> None:
        super().close()
        self.control.close()


def _chunk(ranks: int) -> int:
    """Bytes that travel at once: whole pages for each rank's slice."""
    page = _window.PAGE_BYTES
    return max(min(CHUNK_BYTES, ALL_CHUNKS_BYTES // ranks) // page, 1) * page


def _lane(control: MPICommunicator, spins: int, regions: list[_Region]) -> Any:
    rank, ranks = control.local_rank, control.local_size
    chunk = _chunk(ranks)
    memory = _shared_memory(control, _window.channel_bytes(ranks, chunk), _window.parts(rank, ranks, chunk))
    channel = _window.Channel(memory, rank, ranks, chunk, spins, DIRECT_BYTES)
    host = _ShmLane(control.host_ranks, channel, regions)
    if control.local_size == control.size:
        return host
    mpi, world = control.mpi, control.mpi.COMM_WORLD
    return _Hierarchy(host, MPILane(mpi, world.Split(control.local_rank, key=world.rank)), MPILane(mpi, world.Dup()))


def _shared_memory(control: MPICommunicator, size: int, own: list[tuple[int, int]]) -> mmap.mmap:
    """``size`` bytes, zero at first, that the ranks of each host share; a collective.

    Each rank makes sure of the pages of its ``own`` parts, (start, length), which then lie near it. The file has no
    name any more when this returns, so it goes with the last rank, however that ends.

    Raises:
        RuntimeError: on every rank, when there is no room for it on one.
    """
    rank = control.local_rank
    what = f"sharing {size / 2**20:.1f} MiB of memory between the ranks of a host"
    call = "sharing memory"  # groups may share more or less
    names = together(control, what, lambda: _make_file(size) if rank == 0 else "", call)
    name, opened = names[control.host_ranks[0]], []
    try:
        together(control, what, lambda: opened.append(_open_file(name, size, own)), call)
    finally:
        if rank == 0:
            with suppress(OSError):
                os.unlink(name)
    return opened[0]


def _make_file(size: int) -> str:
    # Elsewhere a file, whose pages are in memory too.
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    handle, name = tempfile.mkstemp(prefix="minidl-", dir=folder)
    try:
        os.ftruncate(handle, size)
    except OSError:
        os.unlink(name)
        raise
    finally:
        os.close(handle)
    return name


def _open_file(name: str, size: int, own: list[tuple[int, int]]) -> mmap.mmap:
    handle = os.open(name, os.O_RDWR)
    try:
        for start, length in own:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, start, length)  # too little room is an error now, not a bus error later
        return mmap.mmap(handle, size)
    finally:
        os.close(handle)
