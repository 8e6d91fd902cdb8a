"""Who has left: finds ranks that ended while others wait for them, without any timeout.

All ranks make the same collective calls in the same order. Each counts its own; a rank that leaves tells the others
how many it made. Whoever has entered a later call than that waits for ever, and knows it: it ends the job.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from minidl.dist import abort

__all__ = ["RollCall"]

PERIOD_SECONDS = 0.1
GRACE_SECONDS = 1.0  # for all ranks to fail alike (a mistyped option, say) and so to end in good order
_TAG = 1


class RollCall:
    """Counts this rank's calls and listens, on a thread and a communicator of its own, for ranks that leave."""

    def __init__(self, mpi: Any, world: Any) -> None:
        self.calls = 0
        self._mpi, self._comm = mpi, world.Dup()
        self._call = "no call"
        self._left: dict[int, int] = {}  # rank -> calls it made before it left in good order
        self._told = 0  # ranks that have told of leaving
        self._health: list[Callable[[], None]] = []
        self._gone = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="minidl-roll-call", daemon=True)
        self._listener.start()

    def enter(self, call: str) -> None:
        """Note that this rank now makes the collective ``call``."""
        self._call = call
        self.calls += 1

    def watch(self, health: Callable[[], None]) -> None:
        """Run ``health`` now and then; an exception that it raises ends the job."""
        self._health.append(health)

    def leave(self) -> None:
        """Tell the others and return when all have left. Does not return if this rank fails and they do not."""
        how = abort.departure()
        others = [rank for rank in range(self._comm.size) if rank != self._comm.rank]
        told = [self._comm.isend((self.calls, how.code), rank, _TAG) for rank in others]
        everybody, since = self._comm.Ibarrier(), time.monotonic()
        while not everybody.Test():
            if how.code and time.monotonic() - since > GRACE_SECONDS:
                abort.abort(f"ends with status {how.code}", how.details, how.code)
            time.sleep(0.005)
        self._gone.set()
        self._listener.join()
        while self._told < len(others):
            self._hear()
        self._mpi.Request.waitall(told)
        self._comm.Free()

    def _hear(self) -> None:
        status = self._mpi.Status()
        calls, code = self._comm.recv(source=self._mpi.ANY_SOURCE, tag=_TAG, status=status)
        self._told += 1
        if code == 0:  # a rank that fails speaks for itself
            self._left[status.source] = calls

    def _listen(self) -> None:
        try:
            while not self._gone.wait(PERIOD_SECONDS):
                while self._comm.iprobe(source=self._mpi.ANY_SOURCE, tag=_TAG):
                    self._hear()
                for health in self._health:
                    health()
                self._find_missing()
        except Exception:
            abort.abort("the engine reports an error", traceback.format_exc())

    def _find_missing(self) -> None:
        call, calls = self._call, self.calls
        for rank, made in self._left.items():
            if made < calls:
                abort.abort(
                    f"waits in its collective call {calls} ({call}), but rank {rank} ended after {made}",
                    "every rank must make the same calls: uneven numbers of batches, or a call on some ranks only?",
                )
