"""Collectives on CuPy arrays by NCCL, each rank on a GPU of its own; MPI carries the control plane.

Two NCCL communicators, because one runs its operations in the order of their calls whatever their streams: a batch
norm's sum must not wait behind the gradients under way. Every rank enqueues on both in program order, and no kernel
that a collective could wait for waits for it, so the two cannot block each other.

Where all ranks are on one host and see each other's memory, small sums and those of gradients go by kernels of our own
(`minidl.dist.ipc`), on the same two lanes.
"""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from types import ModuleType
from typing import Any

from minidl import backend, checks
from minidl.cuda.device import import_cupy
from minidl.dist import abort, ipc
from minidl.dist.agree import rank_list, require_same, together
from minidl.dist.calls import Call, CallLog
from minidl.dist.communicator import Span, Work, check_array, check_cuts, check_exchange, check_root, unseen
from minidl.dist.mpi import MPICommunicator
from minidl.dist.threads import Host, this_host

_SUMMABLE = {
    "float32": "NCCL_FLOAT32",
    "bfloat16": "NCCL_BFLOAT16",
    "float16": "NCCL_FLOAT16",
    "float64": "NCCL_FLOAT64",
    "int32": "NCCL_INT32",
    "int64": "NCCL_INT64",
}
_INLINE, _MESSAGES = "inline of the GPU", "messages of the GPU"
_HIGHEST_PRIORITY = -5  # CUDA takes the nearest that the device has
_RELEASE_SECONDS = 30.0  # more than one where GPUs are shared by many


def load_nccl() -> ModuleType:
    """CuPy's NCCL module.

    Raises:
        ImportError: when CuPy finds no NCCL library, with the command that installs it.
    """
    import cupy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns where the error below says the same
        from cupy.cuda import nccl
    if not nccl.available:
        raise checks.missing_extra("NCCL", f"cuda{cupy.cuda.runtime.runtimeGetVersion() // 1000}")
    return nccl


def bind_device(control: MPICommunicator) -> int:
    """Make one GPU this rank's current device and return its index; a collective.

    The GPU is that of the local rank, or the only one where the launcher shows each rank its own. With
    MINIDL_SHARE_GPUS=1 ranks may share one, which then runs them in turns: for trying a job of several ranks out.

    Raises:
        RuntimeError: on every rank, when a rank has no GPU or, otherwise, two ranks share one.
    """

    def choose() -> tuple[tuple[Host, str], int, bool]:
        cupy = import_cupy()
        index = control.local_rank % cupy.cuda.runtime.getDeviceCount()
        cupy.cuda.Device(index).use()
        place = this_host(), cupy.cuda.runtime.deviceGetPCIBusId(index)
        return place, index, os.environ.get("MINIDL_SHARE_GPUS") == "1"

    found = together(control, "binding a GPU to each rank", choose)
    places = [place for place, _, _ in found]
    if not all(may_share for _, _, may_share in found):
        refuse_shared_devices(places)
    place, index, _ = found[control.rank]
    if turn := places[: control.rank].count(place):
        # NCCL takes no GPU twice on one host, but on two; messages then go by its sockets.
        os.environ["NCCL_HOSTID"] = " ".join([*place[0], str(turn)])
    return index


def refuse_shared_devices(places: Sequence[tuple[Host, str]]) -> None:
    """Raise RuntimeError when two ranks have the same (host, PCI bus id), naming them."""
    for host, bus in sorted(set(places)):
        ranks = [rank for rank, place in enumerate(places) if place == (host, bus)]
        if len(ranks) > 1:
            raise checks.order(
                "init",
                f"ranks {rank_list(ranks)} share GPU {bus} of {host}",
                "start at most one rank per GPU, or set MINIDL_SHARE_GPUS=1 to try a job out on fewer",
            )


class _Message:
    """What the communication stream does; it keeps the arrays.

    One that is dropped before anybody waited lets the stream that it was started from wait: the memory of its arrays
    may be another array's at once, and would be written to.
    """

    def __init__(self, cuda: ModuleType, done: Any, *arrays: Any) -> None:
        self._cuda, self._done, self._arrays = cuda, done, arrays
        self._from = cuda.get_current_stream()

    def wait(self) -> None:
        self._cuda.get_current_stream().wait_event(self._done)
        self._arrays = ()  # from here on stream order keeps their memory safe

    def __del__(self) -> None:
        if self._arrays:
            with suppress(Exception):  # the driver may be gone, or the event part of a graph
                self._from.wait_event(self._done)


class _Followed:
    """Calls that were given to the device on one communicator, until it has done them: what the watchdog sees.

    The program adds calls and the listener looks; a call waits from when it is seen to be the first that is not done.
    """

    def __init__(self, log: CallLog, lane: str) -> None:
        self._log, self._lane = log, lane
        self._pending: deque[tuple[Call, Any]] = deque()
        self._first: Call | None = None

    def add(self, call: Call, done: Any) -> None:
        """``done``: an event recorded behind the call."""
        self._pending.append((call, done))

    def look(self) -> None:
        """Forget what is done; tell the log what is under way."""
        while self._pending and self._pending[0][1].done:
            self._pending.popleft()
        first = self._pending[0][0] if self._pending else None
        if first is self._first:
            return
        self._first = first
        if first is None:
            self._log.end(self._lane)
        else:
            self._log.begin(self._lane, first)


class NCCLCommunicator:
    """Ranks joined by NCCL; arrays are CuPy's, on the device bound at the start.

    Sums: float32, float64, bfloat16 and float16 (these two rounded at each hop), int32, int64; other calls take any
    dtype. All calls but the control plane's (`barrier`, `share`) may be captured in a CUDA graph, by all ranks alike.

    Attributes:
        links: by which some sums go past NCCL, added in float32 in rank order and rounded once; None where there are
            none.
    """

    name = "nccl"

    def __init__(self, control: MPICommunicator, device: int, *, direct: bool = True) -> None:
        """Join all ranks of ``control``, each with its current device ``device`` (`bind_device`); a collective.

        Args:
            direct: have links, if the GPUs see each other's memory.

        Raises:
            RuntimeError, ValueError: on every rank, when NCCL is missing on one, or its versions differ.
        """
        # Multicast reductions (NVLS) differ in their last bits from call to call; results here are reproducible.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        versions = together(control, "loading NCCL", lambda: load_nccl().get_version())
        require_same(control, "NCCL version", [str(versions[control.rank])])
        self._nccl = load_nccl()
        self._ops = backend.get_ops("cuda")
        self._control, self._device, self.closed = control, device, False
        self._captured = self._capturing = False
        log = control.roll_call.log
        self._followed = {lane: _Followed(log, f"{lane} {id(self)}") for lane in (_INLINE, _MESSAGES)}
        self._health = threading.Lock()  # of the NCCL communicators, between the listener and `close`
        self._groups: list[NCCLCommunicator] = []
        self.rank, self.size = control.rank, control.size
        self.local_rank, self.local_size = control.local_rank, control.local_size
        self._direct, self.links = direct, ipc.connect(control) if direct else None
        self._connect()

    def _connect(self) -> None:
        import cupy

        self._cuda, make_id = cupy.cuda, self._nccl.get_unique_id
        ids = together(self, "making the NCCL ids", lambda: (make_id(), make_id()) if self.rank == 0 else ())[0]
        log = self._control.roll_call.log
        log.begin(_INLINE, self._control.enter("connect"))
        # A rank that fails in here cannot tell the others, who wait inside NCCL: its exception ends the job.
        self._inline, self._messages = (self._nccl.NcclCommunicator(self.size, unique, self.rank) for unique in ids)
        log.end(_INLINE)
        self._control.roll_call.watch(self._check_health)
        abort.before_abort(self._abort)
        self._stream = cupy.cuda.Stream(non_blocking=True, priority=_HIGHEST_PRIORITY)
        self._ready = cupy.cuda.Event(disable_timing=True)
        # NCCL sets up its connections in the first operation; none of that belongs into a timed or captured step.
        first = cupy.zeros(1, cupy.float32)
        self.all_reduce(first)
        self.start_all_reduce(first).wait()
        cupy.cuda.get_current_stream().synchronize()

    def all_reduce(self, array: Any) -> None:
        kind = self._summable("all_reduce", array)
        call, stream = self._enter("all_reduce", array), self._cuda.get_current_stream()
        if self.links is None or not self.links.sum("inline", array, stream, self._capturing):
            self._inline.allReduce(array.data.ptr, array.data.ptr, array.size, kind, self._nccl.NCCL_SUM, stream.ptr)
        self._follow(_INLINE, call, stream)

    def start_all_reduce(self, array: Any, span: Span = unseen, name: str = "") -> Work:
        kind = self._summable("start_all_reduce", array)
        call, pointer = self._enter("start_all_reduce", array, name=name), array.data.ptr
        self._wait_for_current()
        with span(self._stream):
            if not self._sent_directly(array):
                self._messages.allReduce(pointer, pointer, array.size, kind, self._nccl.NCCL_SUM, self._stream.ptr)
        return _Message(self._cuda, self._follow(_MESSAGES, call, self._stream), array)

    def _sent_directly(self, array: Any) -> bool:
        if self.links is None:
            return False
        with self._stream:
            return self.links.sum("messages", array, self._stream, self._capturing)

    def start_reduce_scatter(self, array: Any, cuts: Sequence[int], span: Span = unseen, name: str = "") -> Work:
        kind = self._summable("start_reduce_scatter", array)
        check_cuts("start_reduce_scatter", array, cuts, self.size)
        call, add, stream = self._enter("start_reduce_scatter", array, name=name), self._nccl.NCCL_SUM, self._stream.ptr
        parts = [(array.data.ptr + begin * array.itemsize, end - begin) for begin, end in pairwise(cuts)]
        own, count = parts[self.rank]
        self._wait_for_current()
        with span(self._stream):
            if all(size == count for _, size in parts):
                self._messages.reduceScatter(array.data.ptr, own, count, kind, add, stream)
            else:
                self._nccl.groupStart()
                for root, (pointer, size) in enumerate(parts):
                    self._messages.reduce(pointer, pointer, size, kind, add, root, stream)
                self._nccl.groupEnd()
        return _Message(self._cuda, self._follow(_MESSAGES, call, self._stream), array)

    def start_all_gather(self, array: Any, cuts: Sequence[int], span: Span = unseen, name: str = "") -> Work:
        check_cuts("start_all_gather", array, cuts, self.size, self._ops)
        call, kind, stream = self._enter("start_all_gather", array, name=name), self._nccl.NCCL_UINT8, self._stream.ptr
        parts = [(array.data.ptr + b * array.itemsize, (e - b) * array.itemsize) for b, e in pairwise(cuts)]
        own, count = parts[self.rank]
        self._wait_for_current()
        with span(self._stream):
            if all(size == count for _, size in parts):
                self._messages.allGather(own, array.data.ptr, count, kind, stream)
            else:
                self._nccl.groupStart()
                for root, (pointer, size) in enumerate(parts):
                    self._messages.broadcast(pointer, pointer, size, kind, root, stream)
                self._nccl.groupEnd()
        return _Message(self._cuda, self._follow(_MESSAGES, call, self._stream), array)

    def all_gather(self, array: Any) -> Any:
        check_array("all_gather", array, written=False, of=self._ops)
        call, stream = self._enter("all_gather", array), self._cuda.get_current_stream()
        out = self._ops.empty((self.size, *array.shape), array.dtype)
        if self.links is None or not self.links.gather("inline", array, out, stream, self._capturing):
            self._inline.allGather(array.data.ptr, out.data.ptr, array.nbytes, self._nccl.NCCL_UINT8, stream.ptr)
        self._follow(_INLINE, call, stream)
        return out

    def broadcast(self, array: Any, root: int = 0) -> None:
        check_root(root, self.size)
        check_array("broadcast", array, written=True, of=self._ops)
        call, stream, pointer = self._enter("broadcast", array, root), self._cuda.get_current_stream(), array.data.ptr
        self._inline.broadcast(pointer, pointer, array.nbytes, self._nccl.NCCL_UINT8, root, stream.ptr)
        self._follow(_INLINE, call, stream)

    def start_exchange(self, sends: Mapping[int, Any], receives: Mapping[int, Any], name: str = "") -> Work:
        check_exchange(self.rank, self.size, sends, receives, self._ops)
        arrays = *sends.values(), *receives.values()
        call = self._enter("start_exchange", name=name)
        self._wait_for_current()
        nccl, stream = self._nccl, self._stream.ptr
        nccl.groupStart()
        for rank, array in _with_bytes(sends):
            self._messages.send(array.data.ptr, array.nbytes, nccl.NCCL_UINT8, rank, stream)
        for rank, array in _with_bytes(receives):
            self._messages.recv(array.data.ptr, array.nbytes, nccl.NCCL_UINT8, rank, stream)
        nccl.groupEnd()
        return _Message(self._cuda, self._follow(_MESSAGES, call, self._stream), *arrays)

    def split(self, color: int) -> NCCLCommunicator:
        self._groups.append(NCCLCommunicator(self._control.split(color), self._device, direct=self._direct))
        return self._groups[-1]

    def place(self, array: Any) -> Any:
        if self.links is None:
            self._control.enter("place")  # as groups with links do
            return array
        return self.links.place(array)

    def follow(self, name: str) -> None:
        """Count what the current stream was given just now, such as a replayed graph that holds collectives, as one
        call. Calls captured in a graph are not seen otherwise, and a rank that waits in one for ever is not missed.
        """
        stream = self._cuda.get_current_stream()
        self._follow(_INLINE, self._enter("follow", name=name), stream)

    def barrier(self) -> None:
        self._control.barrier()

    def share(self, value: Any, name: str = "") -> list[Any]:
        return self._control.share(value, name)

    def close(self) -> None:
        if self.closed:
            return
        self._control.depart()  # from here on no message lacks its partners, so the device comes to an end
        for group in self._groups:
            group.close()
        with self._health:
            self.closed = True
        self._cuda.Device(self._device).synchronize()
        if self.links is not None:
            self.links.close(self._control.gather_to_part)
        # NCCL ties a communicator to each graph that holds one of its calls, and a program's graphs may live to its
        # end: then the communicators do as well, and go with the process. Destroying them first was seen to crash.
        if self._captured:
            self._keep()
        else:
            self._release()
        self._control.close()

    def _release(self) -> None:
        """Destroy the communicators and wait: beside that no call may go on, nor the process end (seen to crash)."""
        release = threading.Thread(target=self._destroy, name="minidl-nccl-release", daemon=True)
        release.start()
        release.join(_RELEASE_SECONDS)
        if release.is_alive():
            self._keep()
            abort.end_hard()
            seconds = f"{_RELEASE_SECONDS:g} s"
            abort.tell(f"minidl: NCCL does not let go of a communicator in {seconds}; it goes with the process")

    def _keep(self) -> None:
        for engine in (self._inline, self._messages):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))

    def _summable(self, kind: str, array: Any) -> int:
        """NCCL's name for the dtype of an array that is fit to be summed."""
        check_array(kind, array, written=True, of=self._ops)
        dtype = _SUMMABLE.get(array.dtype.name)
        if dtype is None:
            raise checks.bad_dtype(kind, "array", f"one of {', '.join(_SUMMABLE)}", array.dtype)
        return getattr(self._nccl, dtype)

    def _enter(self, kind: str, array: Any = None, root: int = 0, name: str = "") -> Call:
        self._capturing = self._cuda.runtime.streamIsCapturing(self._cuda.get_current_stream().ptr)
        self._captured = self._captured or self._capturing
        return self._control.enter(kind, array, root, name)

    def _wait_for_current(self) -> None:
        """Let the communication stream wait for what the current one was given so far."""
        # A wait refers to the last record before it, so one event serves all messages.
        self._ready.record(self._cuda.get_current_stream())
        self._stream.wait_event(self._ready)

    def _follow(self, lane: str, call: Call, stream: Any) -> Any:
        """An event behind the call, at which the watchdog looks: not in a capture, whose events tell nothing."""
        done = self._cuda.Event(disable_timing=True)
        done.record(stream)
        if not self._capturing:
            self._followed[lane].add(call, done)
        return done

    def _check_health(self) -> None:
        with self._health:
            if self.closed:
                return
            for followed in self._followed.values():
                followed.look()
            for engine in (self._inline, self._messages):
                engine.check_async_error()
            if self.links is not None:
                self.links.check()

    def _destroy(self) -> None:
        with self._cuda.Device(self._device):
            self._inline.destroy()
            self._messages.destroy()

    def _abort(self) -> None:
        if self.closed:
            return
        if self.links is not None:
            self.links.abort()
        with self._cuda.Device(self._device):
            self._inline.abort()
            self._messages.abort()


def _with_bytes(arrays: Mapping[int, Any]) -> list[tuple[int, Any]]:
    """Empty arrays have no address that NCCL would take."""
    return [(rank, array) for rank, array in arrays.items() if array.nbytes]
