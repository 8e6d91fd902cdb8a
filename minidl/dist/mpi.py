"""Collectives on NumPy arrays by MPI (mpi4py), and the control plane of the other engines."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

import numpy as np

from minidl import checks
from minidl.dist import _window
from minidl.dist.calls import Call, describe
from minidl.dist.communicator import Work, check_exchange
from minidl.dist.elastic import RankLost, is_loss
from minidl.dist.host import HostCommunicator, Lane, different_calls
from minidl.dist.roll_call import RollCall
from minidl.dist.threads import Host, this_host
from minidl.precision import bfloat16

SIMULATED_HOSTS = "MINIDL_RANKS_PER_HOST"
_TAGS = 32768  # that every MPI has
_LOOKS, _PAUSE_SECONDS = 200, 50e-6


class MPILane:
    """A communicator of MPI. Ranks first compare what they call: MPI itself gives wrong numbers, hangs or crashes."""

    summable = _window.SUMMABLE
    on_device: ModuleType | None = None  # whose arrays it is given, where those are not of the host

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self.comm = mpi, comm
        self._digests = np.empty(2, np.int64)

    def all_reduce(self, array: np.ndarray, call: Call) -> None:
        self.agree(call)
        self.sum(array)

    def sum(self, array: np.ndarray) -> None:
        """`all_reduce` where the ranks have agreed already."""
        if array.dtype != bfloat16:
            self.comm.Allreduce(self._mpi.IN_PLACE, array)
        elif self.on_device is None:
            self._sum_halves(array)
        else:
            host = self.on_device.to_host(array)
            self._sum_halves(host)
            self.on_device.copy_into(array, self.on_device.from_host(host))

    def _sum_halves(self, array: np.ndarray) -> None:
        """MPI cannot add bfloat16. Each rank gets its slice of all arrays, adds in float32 in rank order, rounds once,
        and gives it to all: the bytes of a ring, its bits those of the engine in shared memory.
        """
        ranks = self.comm.size
        if ranks == 1:  # a group of its own
            return
        each = -(-array.size // ranks)
        given, rows = np.zeros((2, ranks, each), array.dtype)
        given.reshape(-1)[: array.size] = array.reshape(-1)
        self.comm.Alltoall(_bytes(given), _bytes(rows))
        _window.add_rows(rows, given[0], _window.SUMMABLE.index("bfloat16"))
        self.comm.Allgather(_bytes(given[0]), _bytes(rows))
        array.reshape(-1)[:] = rows.reshape(-1)[: array.size]

    def reduce_scatter(self, array: np.ndarray, cuts: Sequence[int], call: Call) -> None:
        self.agree(call)
        if array.dtype == bfloat16:
            self.sum(array)
            return
        own = array[cuts[self.comm.rank] : cuts[self.comm.rank + 1]]
        total = np.empty_like(own)
        self.comm.Reduce_scatter(array, total, np.diff(cuts))
        own[:] = total

    def all_gather_parts(self, array: np.ndarray, cuts: Sequence[int], call: Call) -> None:
        self.agree(call)
        places = np.array(cuts) * array.itemsize
        every = [_bytes(array), np.diff(places), places[:-1], self._mpi.BYTE]
        self.comm.Allgatherv(self._mpi.IN_PLACE, every)

    def all_gather(self, array: np.ndarray, out: np.ndarray, call: Call) -> None:
        self.agree(call)
        self.comm.Allgather(_bytes(array), _bytes(out))

    def broadcast(self, array: np.ndarray, call: Call) -> None:
        self.agree(call)
        self.comm.Bcast(_bytes(array), call.root)

    def barrier(self, call: Call) -> None:
        self.agree(call)  # nobody knows the answer before all have asked

    def share(self, value: Any, call: Call) -> list[Any]:
        """The values of all ranks: picklable objects."""
        self.agree(call)
        return self.comm.allgather(value)

    def agree(self, call: Call) -> None:
        """Compare the call with those of the other ranks.

        Raises:
            RuntimeError: on every rank, when they differ.
        """
        text = f"{call.code} {call.name}".encode()
        digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
        self._digests[:] = digest, -digest
        self.comm.Allreduce(self._mpi.IN_PLACE, self._digests, self._mpi.MIN)
        if self._digests[0] != -self._digests[1]:
            raise different_calls(dict(self.comm.allgather((self._mpi.COMM_WORLD.rank, call))))

    def close(self) -> None:
        self.comm.Free()


class _Exchange:
    """Messages to and from some ranks, from when they are posted until somebody waits for them.

    MPI moves what is small at once and the rest while both sides wait: a thread that helped would have to be given the
    core that computes, which on a busy machine takes milliseconds.
    """

    def __init__(
        self, comm: MPICommunicator, call: Call, sent: list[Any], received: list[tuple[int, int, Any]]
    ) -> None:
        """``received``: (rank, bytes, request) of each."""
        self._comm, self._call, self._sent, self._received = comm, call, sent, received

    def wait(self) -> None:
        log = self._comm.roll_call.log
        with self._comm.losses(self._call), log.under_way(f"exchange {self._call.number}", self._call):
            found = self._finish([request for _, _, request in self._received])
            for (rank, nbytes, _), status in zip(self._received, found, strict=True):
                if (count := status.Get_count(self._comm.mpi.BYTE)) != nbytes:
                    expected = f"the {nbytes} bytes that are expected of rank {rank}"
                    raise checks.bad_value(str(self._call), "message", expected, count)
            self._finish(self._sent)
        self._sent, self._received = [], []

    def _finish(self, requests: list[Any]) -> list[Any]:
        """Without spinning for long, as MPI does: others may need the core."""
        mpi, looks = self._comm.mpi, 0
        statuses = [mpi.Status() for _ in requests]
        try:
            while not mpi.Request.Testall(requests, statuses):
                looks += 1
                time.sleep(0 if looks < _LOOKS else _PAUSE_SECONDS)
        except mpi.Exception:  # which says that there is an error in some status
            told = [status.Get_error() for status in statuses]
            for request in (*(request for _, _, request in self._received), *self._sent):
                if request != mpi.REQUEST_NULL:
                    request.Free()  # it would keep MPI from coming to its end
            raise mpi.Exception(next((code for code in told if code != mpi.SUCCESS), mpi.ERR_IN_STATUS)) from None
        return statuses


class Uncounted:
    """`share` and `barrier` of a communicator's ranks, in a call that counts as one (`MPICommunicator.as_one`)."""

    def __init__(self, ranks: Any) -> None:
        self._ranks, self.rank, self.size = ranks, ranks.rank, ranks.size

    def share(self, value: Any, name: str = "") -> list[Any]:
        return self._ranks.allgather(value)

    def barrier(self) -> None:
        self._ranks.Barrier()


class MPICommunicator(HostCommunicator):
    """Ranks joined by MPI; arrays are NumPy's.

    Sums: float32, float64, int32, int64, bfloat16 (added in float32, rounded once); other calls take any dtype.

    Attributes:
        host_ranks: the ranks of this host, in order.
        elastic: whether a lost rank is an error that the others may catch (`minidl.dist.elastic`).
    """

    name = "mpi"

    def __init__(self, mpi: Any, ranks: Any = None, *, elastic: bool = False) -> None:
        """Join all ranks of ``mpi``, the module ``mpi4py.MPI``, or of its communicator ``ranks``; a collective."""
        ranks, self.elastic = ranks or mpi.COMM_WORLD, elastic
        host_ranks, processes = _host(mpi, ranks)
        self._settle(mpi, ranks, host_ranks, RollCall(mpi, ranks, processes, elastic=elastic))

    def _settle(self, mpi: Any, ranks: Any, host_ranks: list[int], roll_call: RollCall) -> None:
        self.mpi, self._ranks, self._revoked = mpi, ranks, False
        self.rank, self.size, self.host_ranks = ranks.rank, ranks.size, host_ranks
        self.local_rank, self.local_size = host_ranks.index(self.rank), len(host_ranks)
        self._control, self._exchanges = MPILane(mpi, ranks.Dup()), ranks.Dup()
        super().__init__(roll_call, self._control, MPILane(mpi, ranks.Dup()))

    def carry(self, ops: ModuleType) -> None:
        """Take arrays of that table from now on, and hand them to MPI as they are; sums of bfloat16 go by the host."""
        self.ops = ops
        for lane in self._lanes.values():
            lane.on_device = ops

    def share(self, value: Any, name: str = "") -> list[Any]:
        call = self.enter("share", name=name)
        return self._run("inline", call, lambda lane: self._control.share(value, call))

    @contextmanager
    def as_one(self, kind: str) -> Iterator[Uncounted]:
        """Whatever is agreed on within counts as one call of that kind: in one group it may be more than in another."""
        call = self.enter(kind)
        with self.losses(call), self.roll_call.log.under_way(f"{kind} {id(self)}", call):
            yield Uncounted(self._ranks)

    def start_exchange(
        self, sends: Mapping[int, np.ndarray], receives: Mapping[int, np.ndarray], name: str = ""
    ) -> Work:
        check_exchange(self.rank, self.size, sends, receives, self.ops)
        call = self.enter("start_exchange", name=name)
        # Ranks that have nothing for each other do not meet. With the call's number as tag messages of two calls never
        # match: who waits for one that nobody sends is told so by the watchdog.
        tag, comm = call.number % _TAGS, self._exchanges
        with self.losses(call):
            received = [(rank, array.nbytes, comm.Irecv(_bytes(array), rank, tag)) for rank, array in receives.items()]
            sent = [comm.Isend(_bytes(array), rank, tag) for rank, array in sends.items()]
        return _Exchange(self, call, sent, received)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._exchanges.Free()

    def _run(self, lane: str, call: Call, action: Callable[[Lane], Any]) -> Any:
        with self.losses(call):
            return super()._run(lane, call, action)

    @contextmanager
    def losses(self, call: Call) -> Iterator[None]:
        """What MPI tells of a lost rank in here is `RankLost`, and all other ranks are made to hear of it."""
        try:
            yield
        except self.mpi.Exception as error:
            if not self.elastic or not is_loss(self.mpi, error):
                raise
            self.revoke()
            raise RankLost(f"{call}: the process of another rank is gone; minidl.dist.shrink() goes on") from error

    def revoke(self) -> None:
        """Let every call that is under way on any rank, or made later, end as that of a lost rank."""
        if self._revoked:
            return
        self._revoked = True
        self.roll_call.revoke()
        for comm in (self._exchanges, *(lane.comm for lane in self._lanes.values())):
            if not comm.Is_revoked():
                comm.Revoke()
        for group in self._groups:
            group.revoke()

    def shrink(self) -> MPICommunicator:
        """The ranks that are left, joined anew in their order; a collective of them."""
        self.revoke()
        self.roll_call.end()
        self._departed = self.closed = True
        return MPICommunicator(self.mpi, self._ranks.Shrink(), elastic=True)

    def gather_to_part(self) -> None:
        """Return when all ranks have called it; after `depart`, when there are no calls any more."""
        self._ranks.Barrier()

    def split(self, color: int) -> MPICommunicator:
        self._groups.append(_Group(self, color))
        return self._groups[-1]


class _Group(MPICommunicator):
    """Some of the ranks of another communicator.

    Its calls are counted with all others, so that every rank knows how far the rest is; their sizes are compared inside
    the group only.
    """

    def __init__(self, parent: MPICommunicator, color: int) -> None:
        call = parent.enter("split")
        ranks = parent._run("inline", call, lambda lane: parent._ranks.Split(color, key=parent.rank))
        members = ranks.allgather(parent.rank)
        self._parent, self.elastic = parent, parent.elastic
        here = [rank for rank, member in enumerate(members) if member in parent.host_ranks]
        self._settle(parent.mpi, ranks, here, parent.roll_call)
        if parent.ops is not self.ops:
            self.carry(parent.ops)

    def enter(self, kind: str, array: Any = None, root: int = 0, name: str = "") -> Call:
        if self._departed:
            raise checks.order("communicator", f"{kind} called after close")
        number = self._parent.enter(kind, name=f"{name} in a group".strip()).number
        return describe(number, kind, array, root, name)

    def revoke(self) -> None:
        super().revoke()
        self._parent.revoke()

    def depart(self) -> None:
        if not self._departed:
            if not self._parent._departed:  # then the others are waited for already
                self.barrier()
            self._departed = True


def _host(mpi: Any, world: Any) -> tuple[list[int], dict[int, int]]:
    """The ranks of this host, and the process ids of the others among them.

    Raises:
        ValueError: when the variable that simulates hosts holds no number.
    """
    chosen = os.environ.get(SIMULATED_HOSTS, "")
    if chosen and (not chosen.isdigit() or int(chosen) < 1):
        raise checks.bad_value("init", SIMULATED_HOSTS, "an integer of at least 1", chosen)
    if chosen:
        local = world.Split(world.rank // int(chosen), key=world.rank)
    else:  # the launchers' own variables disagree with each other and with this under oversubscription
        local = world.Split_type(mpi.COMM_TYPE_SHARED, key=world.rank)
    told = local.allgather((world.rank, _process_space(), os.getpid()))
    local.Free()
    others = {rank: process for rank, space, process in told if rank != world.rank and space == _process_space()}
    return [rank for rank, _, _ in told], others


def _process_space() -> tuple[Host, str]:
    """Where process ids name the same processes: the host, and its container, which may number its own."""
    with suppress(OSError):
        return this_host(), os.readlink("/proc/self/ns/pid")
    return this_host(), ""


def _bytes(array: np.ndarray) -> np.ndarray:
    """``array`` as bytes: MPI has no name for bfloat16, and moving data needs none."""
    return array.reshape(-1).view(np.uint8)
