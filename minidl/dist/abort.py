"""One rank's failure ends the job, with that rank's words.

Without this a rank that raises, or calls ``sys.exit(3)``, leaves the others waiting in a collective for ever (seen
with Open MPI 5.0 and MPICH 5.0, started as plain ``mpiexec python script.py``). `install` hooks the three ways in
which Python reports a failure, and ``os._exit``; each ends in `abort`, which speaks, then kills all ranks, in bounded
time. Of ranks that fail alike the lowest speaks for all.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, TextIO

from minidl.dist.agree import rank_list

ALIKE_SECONDS = 0.5  # for other ranks to fail of the same
HEARD_SECONDS = 0.2  # for the launcher to pass on the message: MPICH's, told to kill all, may leave it unread
ENGINE_SECONDS = 2.0  # for engines to let go of the GPU
SILENT_SECONDS = 2.0  # for the rank that speaks for this one
KILL_SECONDS = 5.0  # for MPI to end the job; afterwards at least this process goes

context: dict[str, object] = {}
"""What the program is doing, for the message: the training loop keeps ``step`` and ``layer`` here."""


@dataclass(frozen=True)
class Departure:
    """How this rank leaves: exit status ``code`` (0: in good order) and, for a failure, what to print."""

    code: int
    details: str = ""


@dataclass(frozen=True)
class _Job:
    rank: int
    size: int
    kill: Callable[[int], None]
    calls: Callable[[], int]
    alike: Callable[[str, float], list[int]]
    process: int


_job: _Job | None = None
_stderr: TextIO | None = None  # as it was at the start: torch.distributed catches what an except hook prints
_engines: list[Callable[[], None]] = []
_aborting = threading.Lock()
_end_process = os._exit
_hard = False
_parted = False  # all ranks have left in good order
_exit: tuple[int, Departure] | None = None  # calls made before sys.exit, and its status


def install(
    rank: int,
    size: int,
    kill: Callable[[int], None],
    calls: Callable[[], int],
    alike: Callable[[str, float], list[int]],
) -> None:
    """Hook ``sys.excepthook``, ``threading.excepthook``, ``sys.exit`` and ``os._exit`` of this process, once.

    Args:
        rank, size: this rank among all, for the message.
        kill: ends all ranks with a status.
        calls: how many collectives this rank has called so far.
        alike: tells the others of a failure and waits some seconds; the ranks that told of the same.
    """
    global _job, _parted, _stderr
    _parted, _stderr = False, sys.stderr
    first, _job = _job is None, _Job(rank, size, kill, calls, alike, os.getpid())
    if first:
        sys.excepthook = _except_hook(sys.excepthook)
        threading.excepthook = _thread_hook(threading.excepthook)
        sys.exit = _exit_hook(sys.exit)
        os._exit = _hard_exit  # after which MPICH ends the other ranks and calls the job a success


def parted() -> None:
    """All ranks have left: from here on each may end as it likes."""
    global _parted
    _parted = True


def end_hard() -> None:
    """Let this process end without the ends of its libraries, one of which would hang or crash."""
    global _hard
    _hard = True


def end_now(status: int) -> None:
    """The last thing of the program, after all ranks have parted: end at once where `end_hard` was called."""
    if _hard:
        sys.stdout.flush()
        sys.stderr.flush()
        _end_process(status)


def hold() -> None:
    """Wait for the end where the job is being aborted: what the GPU was to wait for may have been let go by then."""
    if _aborting.locked():
        threading.Event().wait()


def before_abort(action: Callable[[], None]) -> None:
    """Let an engine free itself (NCCL: abort its communicators) before the job is killed."""
    _engines.append(action)


def describe(ranks: str, size: int, headline: str, details: str = "") -> str:
    """The message of a failing rank: ``rank 1 of 4 (node3, step 12, layer conv1): headline``, then the details."""
    doing = ", ".join([socket.gethostname(), *(f"{key} {value}" for key, value in context.items())])
    several = "s" * (not ranks.isdigit())
    text = f"minidl: rank{several} {ranks} of {size} ({doing}): {headline}\n"
    return text + (details if not details or details.endswith("\n") else details + "\n")


def exit_code(status: Any) -> int:
    """The process status that Python gives ``sys.exit(status)``, kept non-zero where a shell would cut it to zero."""
    if status is None or status == 0:
        return 0
    return (status & 0xFF or 1) if isinstance(status, int) else 1


def abort(headline: str, details: str = "", code: int = 1, *, alike: str = "") -> NoReturn:
    """Print what happened on this rank, then end all ranks with status ``code``.

    Ranks that fail of the same at about the same time print it once: the lowest speaks for all.

    Args:
        alike: what must be equal for that; default: headline and details.
    """
    if not _aborting.acquire(blocking=False):
        threading.Event().wait()  # another thread of this process is at it, and the first failure is the one to tell
    assert _job is not None, "abort before install"
    last_resort = threading.Timer(ALIKE_SECONDS + HEARD_SECONDS + ENGINE_SECONDS + KILL_SECONDS, _end_process, (code,))
    last_resort.daemon = True
    last_resort.start()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    ranks = _ranks_alike(alike or f"{headline}\n{details}")
    if ranks[0] == _job.rank:
        _write(describe(rank_list(ranks), _job.size, f"{headline}; ending all ranks", details))
        time.sleep(HEARD_SECONDS)
    else:
        time.sleep(SILENT_SECONDS)  # the rank that speaks ends this one
    release = threading.Thread(target=_release_engines, daemon=True)
    release.start()
    release.join(ENGINE_SECONDS)
    with contextlib.suppress(Exception):
        _job.kill(code)
    _end_process(code)


def known_as(error: Exception, failure: str) -> Exception:
    """``error``, which when nobody catches it counts as the same failure as others of that name (see `abort`)."""
    error.alike = failure  # type: ignore[attr-defined]
    return error


def tell(line: str) -> None:
    """Write a line to stderr, once for all ranks that tell the same at about the same time."""
    if _job is None or _aborting.locked():
        _write(f"{line}\n")
        return
    ranks = _ranks_alike(line)
    if ranks[0] == _job.rank:
        _write(f"{line}\n" if len(ranks) == _job.size else f"{line} (rank {rank_list(ranks)} of {_job.size})\n")


def leave(status: int) -> NoReturn:
    """End this rank with a status whose reason it has told: one more line where others have to be ended for it."""
    global _exit
    if not _foreign():
        assert _job is not None
        _exit = _job.calls(), Departure(status)
    raise SystemExit(status)


def say(line: str) -> None:
    """Write a line about this rank to stderr; the job goes on."""
    assert _job is not None, "say before install"
    _write(describe(str(_job.rank), _job.size, line))


def _ranks_alike(failure: str) -> list[int]:
    assert _job is not None
    try:
        return _job.alike(hashlib.sha256(failure.encode()).hexdigest(), ALIKE_SECONDS)
    except Exception:  # MPI is broken or gone: then everyone speaks for himself
        return [_job.rank]


def _write(text: str) -> None:
    with contextlib.suppress(Exception):
        # One write: the lines of ranks that fail together stay together.
        stream = _stderr or sys.stderr
        stream.write(text)
        stream.flush()


def departure() -> Departure:
    """How this rank is leaving at this moment: with an exception on its way, after a ``sys.exit``, or in good order."""
    error = sys.exception()
    if error is not None and not isinstance(error, SystemExit):
        return Departure(_code_of(type(error)), "".join(traceback.format_exception(error)))
    # A collective after sys.exit means that somebody caught it and the program went on.
    if _exit is not None and _job is not None and _exit[0] == _job.calls():
        return _exit[1]
    return Departure(0)


def _release_engines() -> None:
    for action in _engines:
        with contextlib.suppress(Exception):
            action()


def _code_of(kind: type[BaseException]) -> int:
    return 130 if issubclass(kind, KeyboardInterrupt) else 1  # 130: what shells report after an interrupt


def _foreign() -> bool:
    """In a forked child: its failures are its parent's business."""
    return _job is None or os.getpid() != _job.process


def _except_hook(previous: Callable[..., Any]) -> Callable[..., None]:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if _foreign():
            previous(kind, error, trace)
            return
        last = "" if issubclass(kind, KeyboardInterrupt) else str(error)  # each rank is interrupted elsewhere
        details = "".join(traceback.format_exception(kind, error, trace))
        same = getattr(error, "alike", f"{kind.__name__}: {last}")
        abort("uncaught exception", details, _code_of(kind), alike=same)

    return hook


def _thread_hook(previous: Callable[..., Any]) -> Callable[..., None]:
    def hook(args: threading.ExceptHookArgs) -> None:
        if _foreign() or issubclass(args.exc_type, SystemExit):
            previous(args)
            return
        name = args.thread.name if args.thread else "unknown"
        trace = traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
        abort(f"uncaught exception in thread {name}", "".join(trace), _code_of(args.exc_type))

    return hook


def _hard_exit(status: int) -> NoReturn:
    if not _foreign() and not _parted:
        abort(f"os._exit({status}) called", "".join(traceback.format_stack(sys._getframe(1))), exit_code(status) or 1)
    _end_process(status)


def _exit_hook(previous: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    def hook(status: Any = None) -> NoReturn:
        global _exit
        code = exit_code(status)
        if code and not _foreign() and threading.current_thread() is threading.main_thread():
            assert _job is not None
            where = "".join(traceback.format_stack(sys._getframe(1)))
            _exit = _job.calls(), Departure(code, f"sys.exit({status!r}) called from\n{where}")
        previous(status)

    return hook
