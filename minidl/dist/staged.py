"""Collectives on CuPy arrays by an engine of the host: copied into pinned memory, sent from there, copied back.

For machines without NCCL, or whose GPUs it cannot join. On one host sums are made in memory that its ranks share,
between hosts each rank sends its share of them by MPI (`minidl.dist.shm`): a reduction in two levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from minidl import backend
from minidl.dist.communicator import Communicator, Span, Work, check_array, unseen
from minidl.dist.host import HostCommunicator

if TYPE_CHECKING:
    from minidl.dist.cuda_mpi import InPlace

_ANY_WAY = 4  # cudaMemcpyDefault: the addresses tell


class DeviceCopies:
    """Copies between arrays of this rank's GPU and pinned memory of the host, on a stream of their own."""

    def __init__(self, device: int) -> None:
        import cupy

        self._cuda, self._device = cupy.cuda, cupy.cuda.Device(device)
        self.ops = backend.get_ops("cuda")
        self._stream = cupy.cuda.Stream(non_blocking=True)

    def host(self, array: Any) -> np.ndarray:
        """Pinned memory of an array's shape and dtype."""
        memory = self._cuda.alloc_pinned_memory(max(array.nbytes, 1))
        flat = np.frombuffer(memory, np.uint8, array.nbytes)
        return flat.view(array.dtype).reshape(array.shape)

    def ready(self) -> Any:
        """A mark behind what the current stream was given so far."""
        return self._cuda.get_current_stream().record(self._cuda.Event(disable_timing=True))

    def wait(self, ready: Any) -> None:
        """Let further copies come behind the mark, and what the host does."""
        ready.synchronize()

    def fetch(self, host: np.ndarray, array: Any, ready: Any) -> None:
        """Fill ``host``, from any thread; returns when it is filled."""
        with self._device:
            self._stream.wait_event(ready)
            self._copy(host.ctypes.data, array.data.ptr, array.nbytes)

    def put(self, array: Any, host: np.ndarray) -> None:
        """Fill ``array``, from any thread; returns when it is filled."""
        with self._device:
            self._copy(array.data.ptr, host.ctypes.data, array.nbytes)

    def taken(self, gathered: np.ndarray) -> Any:
        """What `HostCommunicator.all_gather` made, on the device."""
        return self.ops.from_host(gathered)

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        if nbytes:
            self._cuda.runtime.memcpyAsync(target, source, nbytes, _ANY_WAY, self._stream.ptr)
            self._stream.synchronize()


class _Exchange:
    """Halos on their way into the host, and then to the GPU."""

    def __init__(self, work: Work, arrive: Callable[[], None]) -> None:
        self._work, self._arrive = work, arrive
        self._waited = False

    def wait(self) -> None:
        self._work.wait()
        if not self._waited:
            self._waited = True
            self._arrive()


class StagedCommunicator:
    """Ranks joined by an engine of the host; arrays are CuPy's, on the device bound at the start.

    Sums are those of the engine beneath; the host waits for each, messages in its helper thread.

    Args:
        copies: to where that engine takes arrays from; `minidl.dist.cuda_mpi.InPlace`: none, it takes them as they are.

    Attributes:
        host: that engine.
    """

    def __init__(self, host: HostCommunicator, copies: DeviceCopies | InPlace, name: str = "staged") -> None:
        self.host, self._copies, self.name = host, copies, name
        self.rank, self.size = host.rank, host.size
        self.local_rank, self.local_size = host.local_rank, host.local_size

    @property
    def closed(self) -> bool:
        return self.host.closed

    def all_reduce(self, array: Any) -> None:
        with self._staged("all_reduce", array) as host:
            self.host.all_reduce(host)

    def start_all_reduce(self, array: Any, span: Span = unseen, name: str = "") -> Work:
        host, around = self._around("start_all_reduce", array, span)
        return self.host.start_all_reduce(host, around, name)

    def start_reduce_scatter(self, array: Any, cuts: Sequence[int], span: Span = unseen, name: str = "") -> Work:
        host, around = self._around("start_reduce_scatter", array, span)
        return self.host.start_reduce_scatter(host, cuts, around, name)

    def start_all_gather(self, array: Any, cuts: Sequence[int], span: Span = unseen, name: str = "") -> Work:
        host, around = self._around("start_all_gather", array, span)
        return self.host.start_all_gather(host, cuts, around, name)

    def all_gather(self, array: Any) -> Any:
        with self._staged("all_gather", array, written=False) as host:
            gathered = self.host.all_gather(host)
        return self._copies.taken(gathered)

    def broadcast(self, array: Any, root: int = 0) -> None:
        with self._staged("broadcast", array) as host:
            self.host.broadcast(host, root)

    def start_exchange(self, sends: Mapping[int, Any], receives: Mapping[int, Any], name: str = "") -> Work:
        sent, received = (
            {rank: self._on_host("start_exchange", array, written=arrays is receives) for rank, array in arrays.items()}
            for arrays in (sends, receives)
        )
        ready = self._copies.ready()
        self._copies.wait(ready)  # also where nothing is sent: what is received may still be read
        for rank, host in sent.items():
            self._copies.fetch(host, sends[rank], ready)

        def arrive() -> None:
            for rank, host in received.items():
                self._copies.put(receives[rank], host)

        return _Exchange(self.host.start_exchange(sent, received, name), arrive)

    def split(self, color: int) -> Communicator:
        return StagedCommunicator(self.host.split(color), self._copies, self.name)

    def barrier(self) -> None:
        self.host.barrier()

    def share(self, value: Any, name: str = "") -> list[Any]:
        return self.host.share(value, name)

    def close(self) -> None:
        self.host.close()

    def _on_host(self, kind: str, array: Any, *, written: bool = True) -> np.ndarray:
        check_array(kind, array, written=written, of=self._copies.ops)
        return self._copies.host(array)

    @contextmanager
    def _staged(self, kind: str, array: Any, *, written: bool = True) -> Iterator[np.ndarray]:
        """The array on the host; what is done to it in here is done to the array."""
        host = self._on_host(kind, array, written=written)
        self._copies.fetch(host, array, self._copies.ready())
        yield host
        if written:
            self._copies.put(array, host)

    def _around(self, kind: str, array: Any, span: Span) -> tuple[np.ndarray, Span]:
        """(room for the array on the host, the span of its message): it comes and goes in the helper thread."""
        host, ready = self._on_host(kind, array), self._copies.ready()

        @contextmanager
        def around(stream: Any) -> Iterator[None]:
            with span(stream):
                self._copies.fetch(host, array, ready)
                yield
                self._copies.put(array, host)

        return host, around
