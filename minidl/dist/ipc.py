"""Sums by our own kernels among GPUs of one host, each of which sees the memory of the others (CUDA IPC).

NCCL takes some seven microseconds for what fits into a few kilobytes, for which a synchronised batch norm waits in
every layer, and its kernels beside a backward pass cost more than their bytes. So small arrays go by kernels of one
trip, and gradients, which lie in memory that all ranks have mapped (`Links.place`), are added where they are. Values
are added in rank order, so that sums, unlike NCCL's, do not depend on how gradients are grouped into messages. The
kernels are those of `minidl.cuda.all_reduce`. (Copy engines in the place of a kernel were tried, and exposed far more.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from minidl import backend
from minidl.cuda import all_reduce as kernels
from minidl.dist.agree import together
from minidl.dist.mpi import MPICommunicator, Uncounted

LANES = "inline", "messages"

_GRANULE = 2 << 20  # memory is shared in whole pages of the driver, so that nothing else of this process is
_LONGEST_SECONDS = 86400.0  # that a kernel waits, where the watchdog waits for ever
_TRIAL_SECONDS = 10.0
_AFTER_WATCHDOG_SECONDS = 60.0  # which has the better words
_LAZY_PEER_ACCESS = 1


@dataclass(frozen=True)
class Routes:
    """Up to how many bytes a sum goes which way; what is larger goes by NCCL. Equal on all ranks.

    Attributes:
        flagged, one_shot: for any array; placed ones of three ranks and more take two trips sooner.
        two_shot: for arrays in memory that `Links.place` gave.
        blocks: that its kernel takes at most: 16 fill the links between H200s, and more only keep others waiting.
    """

    flagged: float = kernels.SLOT_DATA_BYTES
    one_shot: float = kernels.MAILBOX_BYTES
    two_shot: float = float("inf")
    blocks: int = 16

    def way(self, nbytes: int, ranks: int) -> str:
        """``flagged``, ``one-shot``, ``two-shot`` or ``nccl``; two-shot only if the array lies in shared memory.

        In one trip each rank reads the arrays of all, in two a share: the more ranks, the sooner two are faster.
        """
        if nbytes <= min(self.flagged, kernels.SLOT_DATA_BYTES):
            return "flagged"
        if nbytes <= min(self.one_shot, kernels.MAILBOX_BYTES) / (ranks - 1):
            return "one-shot"
        return "two-shot" if nbytes <= self.two_shot else "nccl"


BY_NCCL = Routes(0, 0, 0)
ROUTES = {"links": Routes(), "nccl": BY_NCCL}
"""By the names that benchmarks have for them."""


def connect(control: MPICommunicator) -> Links | None:
    """Links among the GPUs of all ranks; None where they cannot see each other's memory; a collective.

    Each rank's current device is its own (`minidl.dist.nccl.bind_device`). Sums are tried, and looked at, first.
    """
    with control.as_one("connect") as ranks:
        if not all(ranks.share(1 < control.size == control.local_size)):
            return None
        links = Links(control)
        try:
            links.open(ranks)
            together(ranks, "compiling kernels", links.prepare)
            together(ranks, "adding by way of the memory of other GPUs", links.try_out)
        except RuntimeError:
            links.close(ranks.barrier)
            return None
        return links


class _Shared:
    """Memory of this GPU that the other ranks see, and theirs.

    Attributes:
        addresses: here, of every rank's part, in rank order.
    """

    def __init__(self, ranks: Uncounted, nbytes: int) -> None:
        """A collective.

        Raises:
            RuntimeError: on every rank, where a rank cannot have it or see another's.
        """
        import cupy

        self._runtime, self._rank = cupy.cuda.runtime, ranks.rank
        self.nbytes = -(-max(nbytes, 1) // _GRANULE) * _GRANULE
        self.own, self.addresses = 0, []
        what = f"sharing {self.nbytes >> 20} MiB of GPU memory"
        try:
            handles = together(ranks, what, self._make)
            together(ranks, what, lambda: self._open(handles))
        except RuntimeError:
            self.part()
            ranks.barrier()
            self.free()
            raise

    def _make(self) -> bytes:
        self.own = self._runtime.malloc(self.nbytes)
        self._runtime.memset(self.own, 0, self.nbytes)
        self._runtime.deviceSynchronize()
        return self._runtime.ipcGetMemHandle(self.own)

    def _open(self, handles: Sequence[bytes]) -> None:
        for rank, handle in enumerate(handles):
            own = rank == self._rank
            self.addresses.append(self.own if own else self._runtime.ipcOpenMemHandle(handle, _LAZY_PEER_ACCESS))

    def part(self) -> None:
        """Let go of what the others share; before any of them frees it."""
        for rank, address in enumerate(self.addresses):
            if rank != self._rank:
                self._runtime.ipcCloseMemHandle(address)
        self.addresses = []

    def free(self) -> None:
        """Let go of this rank's own."""
        if self.own:
            self._runtime.free(self.own)
            self.own = 0


class _Owner:
    """Lives as long as an array in a region does."""


class _Region(_Shared):
    """Memory for one array of each rank."""

    def __init__(self, ranks: Uncounted, nbytes: int) -> None:
        super().__init__(ranks, nbytes)
        self.retired = False

    def retire(self) -> None:
        """Nobody here refers to it any more; the other ranks may."""
        self.retired = True
        if not self.addresses:  # they have parted
            self.free()

    def offset(self, address: int, nbytes: int) -> int:
        """Of an array in this rank's part; -1 for one that is not in it."""
        offset = address - self.own
        return offset if 0 <= offset and offset + nbytes <= self.nbytes and not self.retired else -1


class _Lane:
    """A channel: the calls on it follow each other."""

    def __init__(self, links: Links, ranks: Uncounted) -> None:
        size = kernels.channel_bytes(ranks.size)
        self.memory, self._cuda = _Shared(ranks, size), links.cuda
        self.channel = kernels.Channel(
            ranks.rank, ranks.size, kernels.addresses(self.memory.addresses),
            self.memory.own + size - kernels.STATE_BYTES, links.stop.ctypes.data, int(_TRIAL_SECONDS * 1e9),
        )  # fmt: skip
        self._last: tuple[int, Any] | None = None  # stream and event of the last call outside of captures

    def follow(self, stream: Any) -> None:
        """Let a call on ``stream`` come after the one before, perhaps on another one."""
        if self._last is not None and self._last[0] != stream.ptr:
            stream.wait_event(self._last[1])

    def done(self, stream: Any) -> None:
        """The call has been given to ``stream``."""
        if self._last is None or self._last[0] != stream.ptr:
            self._last = stream.ptr, self._cuda.Event(disable_timing=True)
        self._last[1].record(stream)


class Links:
    """The memory that the GPUs of one host share, and sums by way of it.

    Attributes:
        routes: which sums go which way; another one may be set between calls, on all ranks alike.
        stop: two words of the host that waiting kernels look at: (stop now, somebody gave up).
    """

    def __init__(self, control: MPICommunicator) -> None:
        import cupy

        self.rank, self.size, self.routes = control.rank, control.size, Routes()
        self.cuda, self._cupy, self._control = cupy.cuda, cupy, control
        self.stop = np.frombuffer(cupy.cuda.alloc_pinned_memory(8), np.uint32, 2)
        self.stop[:] = 0
        self._lanes: dict[str, _Lane] = {}
        self._regions: list[_Region] = []

    def open(self, ranks: Uncounted) -> None:
        """Make the channels; a collective.

        Raises:
            RuntimeError: on every rank, where the GPUs cannot see each other's memory.
        """
        for name in LANES:
            self._lanes[name] = _Lane(self, ranks)

    def prepare(self) -> None:
        """Compile what `try_out` takes, and gradients."""
        kernels.compiled(self._lanes[LANES[0]].channel)

    def try_out(self) -> None:
        """Add known numbers on each lane; from now on calls wait as long as the watchdog, and somewhat longer.

        Raises:
            RuntimeError: where the sums are wrong or another rank does not come.
        """
        for lane in self._lanes.values():
            for size in (1000, kernels.SLOT_DATA_BYTES):
                array = self._cupy.arange(size, dtype=np.float32) + np.float32(self.rank)
                (kernels.flagged if size == 1000 else kernels.one_shot)(array, lane.channel)
                expected = np.arange(size) * self.size + sum(range(self.size))
                if (array.get() != expected).any() or self.stop.any():
                    raise RuntimeError("sums are wrong")
        limit = min(self._control.roll_call.limit, _LONGEST_SECONDS) + _AFTER_WATCHDOG_SECONDS
        for lane in self._lanes.values():
            lane.channel = replace(lane.channel, limit_ns=int(limit * 1e9))

    def sum(self, name: str, array: Any, stream: Any, capturing: bool) -> bool:
        """Replace ``array`` by its sum, on ``stream``, the current one, if there is a route for it; whether there is.

        Args:
            name: of the lane; calls on different lanes may run at the same time.
        """
        way = self._way(array)
        if way is None:
            return False
        self._call(self._lanes[name], stream, capturing, way)
        return True

    def gather(self, name: str, array: Any, out: Any, stream: Any, capturing: bool) -> bool:
        """Fill ``out`` (size, ...) with the arrays of all ranks, if there is a route for it; whether there is."""
        if not 0 < array.nbytes <= min(self.routes.flagged, kernels.SLOT_DATA_BYTES):
            return False
        self._call(self._lanes[name], stream, capturing, lambda lane: kernels.gather(array, out, lane.channel))
        return True

    def _call(self, lane: _Lane, stream: Any, capturing: bool, way: Callable[[_Lane], None]) -> None:
        if not capturing:
            lane.follow(stream)
        way(lane)
        if not capturing:
            lane.done(stream)

    def _way(self, array: Any) -> Callable[[_Lane], None] | None:
        nbytes = array.nbytes
        if not nbytes:
            return None
        way = self.routes.way(nbytes, self.size)
        if way == "flagged":
            return lambda lane: kernels.flagged(array, lane.channel)
        for region in self._regions if way == "two-shot" else ():
            offset = region.offset(array.data.ptr, nbytes)
            if offset >= 0:
                places, blocks = [address + offset for address in region.addresses], self.routes.blocks
                return lambda lane: kernels.two_shot(places, nbytes, array.dtype, lane.channel, blocks)
        if nbytes <= min(self.routes.one_shot, kernels.MAILBOX_BYTES):
            return lambda lane: kernels.one_shot(array, lane.channel)
        return None

    def place(self, array: Any) -> Any:
        """``array``, or a copy of it where gradients are added without being moved first; a collective.

        All ranks send the same part of it, or all something else.
        """
        with self._control.as_one("place") as ranks:
            self._tidy(ranks)
            if not all(ranks.share(self._unplaced(array))):
                return array
            try:
                region = _Region(ranks, array.nbytes)
            except RuntimeError:  # on all ranks: no room for it; NCCL adds it then
                return array
        owner = _Owner()
        memory = self.cuda.UnownedMemory(region.own, region.nbytes, owner)
        placed = self._cupy.ndarray(array.shape, array.dtype, self.cuda.MemoryPointer(memory, 0))
        backend.get_ops("cuda").copy_into(placed, array)
        weakref.finalize(owner, region.retire).atexit = False  # the driver may be gone by then
        self._regions.append(region)
        return placed

    def _unplaced(self, array: Any) -> bool:
        return array.nbytes > 0 and all(region.offset(array.data.ptr, array.nbytes) < 0 for region in self._regions)

    def _tidy(self, ranks: Uncounted) -> None:
        """Free the regions that no rank refers to any more; a collective."""
        told = ranks.share([region.retired for region in self._regions])
        gone = [region for region, *states in zip(self._regions, *told, strict=True) if all(states)]
        self._regions = [region for region in self._regions if region not in gone]
        self._release(gone, ranks.barrier)

    def _release(self, memories: Sequence[_Shared], barrier: Callable[[], None]) -> None:
        if not memories:
            return
        self.cuda.Device().synchronize()
        for memory in memories:
            memory.part()
        barrier()
        for memory in memories:
            if not isinstance(memory, _Region) or memory.retired:  # an array that is still in use keeps its memory
                memory.free()

    def check(self) -> None:
        """Raise RuntimeError where a kernel has waited too long."""
        if self.stop[1]:
            raise RuntimeError("a sum among the GPUs of this host has waited too long for another rank")

    def abort(self) -> None:
        """Let all kernels that wait come to an end."""
        self.stop[0] = 1

    def close(self, barrier: Callable[[], None]) -> None:
        """Part; arrays that `place` gave go on as any others. ``barrier``: returns when all ranks have called it."""
        memories = [*self._regions, *(lane.memory for lane in self._lanes.values())]
        self._lanes, self._regions = {}, []
        self._release(memories, barrier)
