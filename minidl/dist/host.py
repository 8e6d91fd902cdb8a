"""What all engines on NumPy arrays have in common: checks at the door, numbered calls, messages in a helper thread.

How bytes travel is a `Lane`'s business. An engine has two, one for the calls that block and one for the messages
beside them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from minidl import backend, checks
from minidl.dist import abort, watchdog
from minidl.dist.agree import by_value
from minidl.dist.calls import Call, dtype_name
from minidl.dist.communicator import Span, Work, check_array, check_cuts, check_root, unseen
from minidl.dist.roll_call import RollCall

_INLINE, _MESSAGES = "inline", "messages"


class Lane(Protocol):
    """A way between all ranks on which one call follows another. Arrays are dense, and checked.

    All raise RuntimeError (`different_calls`), on every rank, when the ranks are at different calls.
    """

    summable: tuple[str, ...]

    def all_reduce(self, array: np.ndarray, call: Call) -> None:
        """Replace ``array`` by the sum of those of all ranks."""

    def reduce_scatter(self, array: np.ndarray, cuts: Sequence[int], call: Call) -> None:
        """Replace this rank's part by the sum of those of all ranks; the others may hold anything."""

    def all_gather_parts(self, array: np.ndarray, cuts: Sequence[int], call: Call) -> None:
        """Overwrite each rank's part by what that rank has in it."""

    def all_gather(self, array: np.ndarray, out: np.ndarray, call: Call) -> None:
        """Fill ``out`` (size, ...) with the arrays of all ranks."""

    def broadcast(self, array: np.ndarray, call: Call) -> None:
        """Overwrite ``array`` by that of rank ``call.root``."""

    def barrier(self, call: Call) -> None:
        """Return when all ranks have come this far."""

    def close(self) -> None:
        """Let go of it; a collective."""


def different_calls(calls: dict[int, Call]) -> RuntimeError:
    """The error, the same on all ranks, when these make different calls."""
    told = by_value((f"call {call.number}, {call}" for call in calls.values()), calls)
    error = checks.order("communicator", f"collective calls differ: {told}", watchdog.SAME_CALLS)
    return abort.known_as(error, watchdog.SAME_CALLS)  # ranks that are told of it otherwise, by the roll call


class _Message:
    """A collective on its way through the helper thread."""

    def __init__(self, action: Callable[[Lane], None], span: Span, call: Call) -> None:
        self.action, self.span, self.call = action, span, call
        self.done = threading.Event()
        self.error: BaseException | None = None

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error


class HostCommunicator:
    """Collectives on NumPy arrays. Started messages are blocking calls in a helper thread, one after another.

    The MPI libraries at hand do not progress a non-blocking collective by themselves, so beside 20 matrix products it
    cost more than no overlap at all, and the thread less.
    """

    name: str
    rank: int
    size: int
    local_rank: int
    local_size: int

    def __init__(self, roll_call: RollCall, inline: Lane, messages: Lane) -> None:
        self.roll_call = roll_call
        self._lanes = {_INLINE: inline, _MESSAGES: messages}
        self._queue: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._helper: threading.Thread | None = None
        self._groups: list[HostCommunicator] = []
        self._departed = self.closed = False
        self.ops = backend.get_ops("cpu")  # whose arrays it takes

    def all_reduce(self, array: np.ndarray) -> None:
        call = self._admit("all_reduce", array, summed=True)
        self._run(_INLINE, call, lambda lane: lane.all_reduce(array, call))

    def start_all_reduce(self, array: np.ndarray, span: Span = unseen, name: str = "") -> Work:
        call = self._admit("start_all_reduce", array, summed=True, name=name)
        return self._start(_Message(lambda lane: lane.all_reduce(array, call), span, call))

    def start_reduce_scatter(self, array: np.ndarray, cuts: Sequence[int], span: Span = unseen, name: str = "") -> Work:
        check_cuts("start_reduce_scatter", array, cuts, self.size)
        call = self._admit("start_reduce_scatter", array, summed=True, name=name)
        return self._start(_Message(lambda lane: lane.reduce_scatter(array, cuts, call), span, call))

    def start_all_gather(self, array: np.ndarray, cuts: Sequence[int], span: Span = unseen, name: str = "") -> Work:
        check_cuts("start_all_gather", array, cuts, self.size)
        call = self._admit("start_all_gather", array, name=name)
        return self._start(_Message(lambda lane: lane.all_gather_parts(array, cuts, call), span, call))

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        call = self._admit("all_gather", array, written=False)
        out = self.ops.empty((self.size, *array.shape), array.dtype)
        self._run(_INLINE, call, lambda lane: lane.all_gather(array, out, call))
        return out

    def broadcast(self, array: np.ndarray, root: int = 0) -> None:
        check_root(root, self.size)
        call = self._admit("broadcast", array, root=root)
        self._run(_INLINE, call, lambda lane: lane.broadcast(array, call))

    def barrier(self) -> None:
        call = self.enter("barrier")
        self._run(_INLINE, call, lambda lane: lane.barrier(call))

    def enter(self, kind: str, array: Any = None, root: int = 0, name: str = "") -> Call:
        """Count a collective.

        Raises:
            RuntimeError: after `close`.
        """
        abort.hold()
        if self._departed:
            raise checks.order("communicator", f"{kind} called after close")
        return self.roll_call.log.enter(kind, array, root, name)

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
        for group in self._groups:
            group.close()
        if self._helper is not None:
            self._queue.put(None)
            self._helper.join()
        for lane in self._lanes.values():
            lane.close()

    def _run(self, lane: str, call: Call, action: Callable[[Lane], Any]) -> Any:
        """``action`` on a lane, under the watchdog's eyes."""
        with self.roll_call.log.under_way(f"{lane} {id(self)}", call):
            return action(self._lanes[lane])

    def _start(self, message: _Message) -> Work:
        if self._helper is None:
            self._helper = threading.Thread(target=self._send_messages, name="minidl-messages", daemon=True)
            self._helper.start()
        self._queue.put(message)
        return message

    def _admit(
        self, kind: str, array: np.ndarray, *, written: bool = True, summed: bool = False, root: int = 0, name: str = ""
    ) -> Call:
        check_array(kind, array, written=written, of=self.ops)
        known = self._lanes[_INLINE].summable
        if summed and dtype_name(array.dtype) not in known:
            remedy = "sum in float32, then convert"
            raise checks.bad_dtype(kind, "array", f"one of {', '.join(known)}", array.dtype, remedy)
        return self.enter(kind, array, root, name)

    def _send_messages(self) -> None:
        while (message := self._queue.get()) is not None:
            try:
                with message.span(None):
                    self._run(_MESSAGES, message.call, message.action)
            except Exception as error:  # told where the result is waited for
                message.error = error
            message.done.set()
