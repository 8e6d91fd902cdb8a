"""The ranks keep in touch beside their collectives: who has left, who waits for whom, who fails alike.

All ranks make the same collective calls in the same order. Each counts its own; a rank that leaves tells the others
how many it made. Whoever has entered a later call than that waits for ever, and knows it: it ends the job. Who waits
long asks the others where they are (`minidl.dist.watchdog`).
"""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from minidl.dist import abort, watchdog
from minidl.dist.agree import rank_list
from minidl.dist.calls import Call, CallLog, Passed, Position, Waiting, describe
from minidl.dist.elastic import is_loss

PERIOD_SECONDS = 0.1
GRACE_SECONDS = 1.0  # for all ranks to fail alike (a mistyped option, say) and so to end in good order
SUSPECT_SECONDS = 2.0  # in one call before the others are asked
STAGGER_SECONDS = 0.25  # later for each rank, up to 20 ranks: who is asked by a lower one need not ask
DEFER_SECONDS = 10.0
ANSWER_SECONDS = 1.0
WARN_SECONDS = 60.0
COMPARE_SECONDS = 1.0  # between comparisons of what was called: engines on GPUs do not compare each call
_TAG = 1
_CLOSE = "close"
_LEFT, _ASK, _TOLD, _FAILED, _PASSED = range(5)


class RollCall:
    """Listens, on a thread and a communicator of its own, for ranks that leave, ask or fail."""

    def __init__(self, mpi: Any, world: Any, processes: Mapping[int, int], *, elastic: bool = False) -> None:
        """
        Args:
            processes: the process ids of the other ranks of this host, by rank.
            elastic: the others go on without a rank that is lost, so nobody ends the job for it.
        """
        self.elastic = elastic
        self.log = CallLog()
        self.limit = watchdog.limit()
        self._mpi, self._comm = mpi, world.Dup()
        self._processes = dict(processes)
        self._left: dict[int, int] = {}  # rank -> calls it made before it left in good order
        self._told = 0  # ranks that have told of leaving
        self._failed: dict[int, tuple[str, bool]] = {}  # rank -> how it fails, and whether after another rank
        self._passed: dict[int, tuple[Passed, tuple[Call, ...]]] = {}  # rank -> what it called, to be compared
        self._compared = (0, 0.0)  # calls that were told to the next rank, and when
        self._answers: dict[int, Position] = {}
        self._asked: tuple[int, bool, float] | None = None  # call that was asked about, beyond the limit?, when
        self._asked_by_lower = -DEFER_SECONDS  # when
        self._warned = 0
        self._suspects: dict[int, int] = {}  # rank -> periods that its process was not found
        self._sent: list[Any] = []
        self._spoken, self._heard = ([0] * self._comm.size for _ in range(2))  # messages to and from each rank
        self._sending, self._hearing = threading.Lock(), threading.Lock()
        self._health: list[Callable[[], None]] = []
        self._signals = _open_signals()
        self._interrupted: tuple[int, float] | None = None  # calls made when Ctrl-C came, and when
        self._gone = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="minidl-roll-call", daemon=True)
        self._listener.start()

    @property
    def calls(self) -> int:
        """The collectives that this rank has called so far."""
        return self.log.made

    def watch(self, health: Callable[[], None]) -> None:
        """Run ``health`` now and then; an exception that it raises ends the job."""
        self._health.append(health)

    def leave(self) -> None:
        """Tell the others and return when all have left. Does not return if this rank fails and they do not."""
        how = abort.departure()
        self._tell_all((_LEFT, (how.code, self._calls_so_far())))
        self.log.begin(_CLOSE, describe(self.log.made, _CLOSE))
        everybody, since = self._comm.Ibarrier(), time.monotonic()
        while not everybody.Test():
            if how.code and time.monotonic() - since > GRACE_SECONDS:
                abort.abort(f"ends with status {how.code}", how.details, how.code)
            time.sleep(0.005)
        while self._told < self._comm.size - 1:
            time.sleep(0.005)  # the listener hears them
        self._compare()
        self.log.end(_CLOSE)
        self._gone.set()
        self._listener.join()
        self._hear_the_last()
        self._comm.Free()
        _close_signals(self._signals)
        abort.parted()

    def _hear_the_last(self) -> None:
        """Receive what is still under way, when nobody speaks any more.

        A communicator made later may be given the place of this one, and what comes late then counts as its own: with
        Open MPI its first collective was seen to hang.
        """
        due = self._comm.alltoall(self._spoken)
        while self._heard != due:
            self._hear()
        self._mpi.Request.Waitall(self._sent)

    def revoke(self) -> None:
        """Let the other ranks hear, whatever they do, that one is lost."""
        if not self._comm.Is_revoked():
            self._comm.Revoke()

    def end(self) -> None:
        """Listen no more, for a rank is lost."""
        self._gone.set()
        self._listener.join()
        _close_signals(self._signals)

    def alike(self, failure: str, seconds: float) -> list[int]:
        """Tell the others of this rank's failure; the ranks, this one included, that told of the same in time.

        The first of them speaks for all: the lowest of those that had not heard of another's failure before.
        """
        rank, end = self._comm.rank, time.monotonic() + seconds
        if self._gone.is_set():
            return [rank]
        self._hear_all()
        before = self._alike(failure)
        self._failed[rank] = failure, bool(before)
        self._tell_all((_FAILED, self._failed[rank]))
        while not before and time.monotonic() < end and len(self._failed) < self._comm.size:
            self._hear_all()
            time.sleep(0.01)
        return self._alike(failure)

    def _alike(self, failure: str) -> list[int]:
        """Ranks that told of it, those first that were first."""
        told = [(late, rank) for rank, (text, late) in list(self._failed.items()) if text == failure]
        return [rank for _, rank in sorted(told)]

    def _tell_all(self, message: tuple[int, Any]) -> None:
        for rank in range(self._comm.size):
            if rank != self._comm.rank:
                self._tell(rank, message)

    def _tell(self, rank: int, message: tuple[int, Any]) -> None:
        with self._sending:
            self._sent = [request for request in self._sent if not request.Test()]
            self._sent.append(self._comm.isend(message, rank, _TAG))
            self._spoken[rank] += 1

    def _hear(self) -> None:
        status = self._mpi.Status()
        what, content = self._comm.recv(source=self._mpi.ANY_SOURCE, tag=_TAG, status=status)
        rank = status.source
        self._heard[rank] += 1
        if what == _LEFT:
            code, calls = content
            self._told += 1
            self._processes.pop(rank, None)
            if code == 0:  # a rank that fails speaks for itself
                self._left[rank] = calls[0].number
                self._passed[rank] = calls
        elif what == _ASK:
            if rank < self._comm.rank:
                self._asked_by_lower = time.monotonic()
            if not self._gone.is_set():
                self._tell(rank, (_TOLD, self._position()))
        elif what == _TOLD:
            self._answers[rank] = content
        elif what == _FAILED:
            self._failed[rank] = content
        elif what == _PASSED:
            self._passed[rank] = content

    def _hear_all(self) -> None:
        """From one thread at a time: the listener, or who fails while the listener does as well."""
        if self._hearing.acquire(blocking=False):
            try:
                while self._comm.iprobe(source=self._mpi.ANY_SOURCE, tag=_TAG):
                    self._hear()
            finally:
                self._hearing.release()

    def _position(self) -> Position:
        place, stack = watchdog.stack()
        context = {key: str(value) for key, value in abort.context.items()}
        return self.log.position(place=place, stack=stack, context=context)

    def _listen(self) -> None:
        try:
            while not self._gone.wait(PERIOD_SECONDS):
                self._hear_all()
                for health in self._health:
                    health()
                self._find_missing()
                self._find_different()
                self._find_dead()
                self._find_interrupted()
                self._find_stuck()
        except Exception as error:
            if self.elastic and is_loss(self._mpi, error):
                return  # the calls of the program tell of it
            abort.abort("the engine reports an error", traceback.format_exc())

    def _find_missing(self) -> None:
        call, calls = self.log.last, self.log.made
        for rank, made in self._left.items():
            if made < calls:
                abort.abort(
                    f"waits in its collective call {calls} ({call}), but rank {rank} ended after {made}",
                    "every rank must make the same calls: uneven numbers of batches, or a call on some ranks only?",
                )

    def _calls_so_far(self) -> tuple[Passed, tuple[Call, ...]]:
        return self.log.passed, self.log.recent

    def _find_different(self) -> None:
        """Each rank tells the next one now and then what it has called: so all are compared, in a ring."""
        told, since = self._compared
        if self._comm.size > 1 and self.log.made != told and time.monotonic() - since > COMPARE_SECONDS:
            self._compared = self.log.made, time.monotonic()
            self._tell((self._comm.rank + 1) % self._comm.size, (_PASSED, self._calls_so_far()))
        self._compare()

    def _compare(self) -> None:
        """End the job if a rank that told of its calls made others up to there.

        The listener and a rank that leaves both compare, and nothing is taken away from the other: while one words what
        it has found, the other may not think that all is well and part.
        """
        for rank, (passed, _) in list(self._passed.items()):
            mine = self.log.checksum(passed.number)  # None: not so far yet, or long past
            if mine is not None and mine != passed.checksum:
                told = {other: Position(p.number, (), recent, 0.0) for other, (p, recent) in self._passed.items()}
                differs = watchdog.contradiction(self._comm.rank, self._position(), told)
                text = differs or f"collective calls up to number {passed.number} differ from those of rank {rank}"
                abort.abort(text, watchdog.SAME_CALLS, alike=watchdog.SAME_CALLS)

    def _find_dead(self) -> None:
        """A rank of this host whose process ended without a word, where the launcher does not end the job.

        Each looks at the next one only, so that many ranks are no more work than few.
        """
        others = sorted(self._processes)
        if not others or self.elastic:
            return
        rank = next((other for other in others if other > self._comm.rank), others[0])
        if rank in self._failed:  # it has said so, and ends the job
            return
        process = self._processes[rank]
        self._suspects[rank] = self._suspects.get(rank, 0) + 1 if _ended(process) else 0
        if self._suspects[rank] > 1:
            text = f"rank {rank} (process {process}) is gone without a word: killed, out of memory, or crashed"
            abort.abort(text, alike=text)

    def _find_interrupted(self) -> None:
        """Python raises KeyboardInterrupt when a call of MPI returns, which it may never do."""
        if self._signals is None:
            return
        with suppress(BlockingIOError):
            if signal.SIGINT in os.read(self._signals[0], 64):
                self._interrupted = self.log.made, time.monotonic()
        if self._interrupted is None or time.monotonic() - self._interrupted[1] < GRACE_SECONDS:
            return
        if self.log.made == self._interrupted[0] and self.log.waiting():
            abort.abort(
                "interrupted", "KeyboardInterrupt: while it waited for other ranks", 130, alike="KeyboardInterrupt: "
            )
        self._interrupted = None

    # -- the watchdog -------------------------------------------------------------------------------------------------

    def _find_stuck(self) -> None:
        under_way, now = self.log.waiting(), time.monotonic()
        stagger = STAGGER_SECONDS * min(self._comm.rank, 20)
        # A host may come to the end before its GPU is seen to wait: who is late at the end may be, who does not come to
        # a call may not.
        waiting = next((one for one in under_way if one.call.kind != _CLOSE), under_way[0] if under_way else None)
        if waiting is None or waiting.seconds < min(SUSPECT_SECONDS, self.limit / 2) + stagger:
            self._asked = None
            return
        over, last = waiting.seconds > self.limit + stagger, waiting.seconds > self.limit + stagger + DEFER_SECONDS
        if now - self._asked_by_lower < DEFER_SECONDS and not last:
            return  # that rank looks into it
        if self._asked is None or self._asked[:2] != (waiting.call.number, over):
            self._answers.clear()
            self._asked = waiting.call.number, over, now
            self._tell_all((_ASK, None))
        if len(self._answers) < self._comm.size - 1 and now - self._asked[2] < ANSWER_SECONDS:
            return
        told = dict(self._answers)
        self._judge(waiting, told, over and (self._speaks(waiting, told) or last))

    def _judge(self, waiting: Waiting, told: Mapping[int, Position], over: bool) -> None:
        """End the job if the ranks contradict each other, or the call is ``over``; else perhaps warn."""
        rank, size, mine = self._comm.rank, self._comm.size, self._position()
        if differs := watchdog.contradiction(rank, mine, told):
            abort.abort(differs, watchdog.SAME_CALLS, alike=watchdog.SAME_CALLS)
        busy = waiting.call.kind == _CLOSE and len(told) == size - 1  # at the end, who answers may take its time
        if busy and self._asked is not None and time.monotonic() - self._asked[2] > DEFER_SECONDS:
            self._asked = None  # ask again: it may stop yet
        if over and not busy:
            abort.before_abort(lambda: self._end_silent(told))
            abort.abort(*watchdog.report(waiting, size, rank, mine, told), watchdog.STATUS)
        if waiting.seconds > WARN_SECONDS and self._warned != waiting.call.number and self._speaks(waiting, told):
            self._warned = waiting.call.number
            absent = rank_list(watchdog.missing(waiting, size, rank, told)) or "none"
            abort.say(f"has waited {waiting.seconds:.0f} s in {waiting.call}; not there: {absent}")

    def _end_silent(self, told: Mapping[int, Position]) -> None:
        """Kill the ranks of this host that do not answer: a stopped process outlives the launcher's polite signals."""
        for rank, process in self._processes.items():
            if rank not in told:
                with suppress(OSError):
                    os.kill(process, signal.SIGKILL)

    def _speaks(self, waiting: Waiting, told: Mapping[int, Position]) -> bool:
        """Whether this is the lowest of the ranks that wait in the call."""
        number = waiting.call.number
        lower = [rank for rank, position in told.items() if rank < self._comm.rank]
        return not any(other.call.number == number for rank in lower for other in told[rank].waiting)


def _open_signals() -> tuple[int, int] | None:
    """A pipe through which the numbers of signals come at once; None where somebody else reads them."""
    if threading.current_thread() is not threading.main_thread():
        return None
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    previous = signal.set_wakeup_fd(ends[1], warn_on_full_buffer=False)
    if previous == -1:
        return ends
    signal.set_wakeup_fd(previous)
    for end in ends:
        os.close(end)
    return None


def _close_signals(ends: tuple[int, int] | None) -> None:
    if ends is None or threading.current_thread() is not threading.main_thread():
        return
    if (current := signal.set_wakeup_fd(-1)) != ends[1]:  # somebody else's by now
        signal.set_wakeup_fd(current)
    for end in ends:
        os.close(end)


def _ended(process: int) -> bool:
    """Whether a process of this host has ended, its parent having taken notice or not."""
    with suppress(OSError, IndexError):
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except OSError:  # it is there, and not ours
        pass
    return False
