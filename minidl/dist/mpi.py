"""Collectives on NumPy arrays by MPI (mpi4py), and the control plane of the GPU engine."""

from __future__ import annotations

import queue
import threading
from typing import Any

import numpy as np

from minidl import backend, checks
from minidl.dist.communicator import Span, Work, check_array, check_root, unseen
from minidl.dist.roll_call import RollCall

__all__ = ["MPICommunicator"]

_SUMMABLE = tuple(np.dtype(name) for name in ("float32", "float64", "int32", "int64"))


class _Message:
    """An all-reduce on its way through the helper thread."""

    def __init__(self, array: np.ndarray, span: Span) -> None:
        self.array = array
        self.span = span
        self.done = threading.Event()
        self.error: BaseException | None = None

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error


class MPICommunicator:
    """Ranks joined by MPI; arrays are NumPy's. Sums: float32, float64, int32, int64; other calls take any dtype.

    Started messages are blocking all-reduces in a helper thread, one after another on a communicator of their own:
    the MPI libraries at hand do not progress a non-blocking collective by themselves, so beside 20 matrix products
    it cost more than no overlap at all, and the thread less.
    """

    name = "mpi"

    def __init__(self, mpi: Any) -> None:
        """Join all ranks of ``mpi``, the module ``mpi4py.MPI``; a collective."""
        world = mpi.COMM_WORLD
        self._mpi = mpi
        self._comm, self._messages = world.Dup(), world.Dup()
        self.rank, self.size = world.rank, world.size
        # The launchers' own variables disagree with each other and with this under oversubscription.
        local = world.Split_type(mpi.COMM_TYPE_SHARED, key=world.rank)
        self.local_rank, self.local_size = local.rank, local.size
        local.Free()
        self.roll_call = RollCall(mpi, world)
        self._queue: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._helper: threading.Thread | None = None
        self._departed = self.closed = False

    def all_reduce(self, array: np.ndarray) -> None:
        self._admit("all_reduce", array, summed=True)
        self._comm.Allreduce(self._mpi.IN_PLACE, array)

    def start_all_reduce(self, array: np.ndarray, span: Span = unseen) -> Work:
        self._admit("start_all_reduce", array, summed=True)
        if self._helper is None:
            self._helper = threading.Thread(target=self._send_messages, name="minidl-messages", daemon=True)
            self._helper.start()
        message = _Message(array, span)
        self._queue.put(message)
        return message

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        self._admit("all_gather", array, written=False)
        out = backend.get_ops("cpu").empty((self.size, *array.shape), array.dtype)
        self._comm.Allgather(_bytes(array), _bytes(out))
        return out

    def broadcast(self, array: np.ndarray, root: int = 0) -> None:
        check_root(root, self.size)
        self._admit("broadcast", array)
        self._comm.Bcast(_bytes(array), root)

    def barrier(self) -> None:
        self.enter("barrier")
        self._comm.Barrier()

    def share(self, value: Any) -> list[Any]:
        self.enter("share")
        return self._comm.allgather(value)

    def enter(self, call: str) -> None:
        """Count a collective.

        Raises:
            RuntimeError: after `close`.
        """
        if self._departed:
            raise checks.order("communicator", f"{call} called after close")
        self.roll_call.enter(call)

    def depart(self) -> None:
        """Return when all ranks are done with their calls; the messages they started may still be on their way."""
        if not self._departed:
            self._departed = True
            self.roll_call.leave()

    def close(self) -> None:
        if self.closed:
            return
        self.depart()
        self.closed = True
        if self._helper is not None:
            self._queue.put(None)
            self._helper.join()
        self._messages.Free()
        self._comm.Free()

    def _admit(self, call: str, array: np.ndarray, *, written: bool = True, summed: bool = False) -> None:
        check_array(call, array, written=written)
        if not isinstance(array, np.ndarray):
            remedy = "start with init(device='cuda') for arrays on a GPU"
            raise checks.bad_dtype(call, "array", "a NumPy array", checks.describe(array), remedy)
        if summed and array.dtype not in _SUMMABLE:
            known = ", ".join(str(dtype) for dtype in _SUMMABLE)
            raise checks.bad_dtype(call, "array", f"one of {known}", array.dtype, "sum in float32, then convert")
        self.enter(call)

    def _send_messages(self) -> None:
        while (message := self._queue.get()) is not None:
            try:
                with message.span(None):
                    self._messages.Allreduce(self._mpi.IN_PLACE, message.array)
            except Exception as error:  # told where the result is waited for
                message.error = error
            message.done.set()


def _bytes(array: np.ndarray) -> np.ndarray:
    """``array`` as bytes: MPI has no name for bfloat16, and moving data needs none."""
    return array.reshape(-1).view(np.uint8)
