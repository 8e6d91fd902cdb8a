"""Nothing hangs: who waits too long asks the others where they are, and ends the job with what they answer.

A rank that is in one call for two seconds asks all others. If their calls contradict its own (the same number, another
call), no waiting helps and the job ends at once; else it ends after `limit` seconds, naming who did not come and what
those were doing instead. The rules alone stand here, without messages or clocks, so that they can be tested.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path

from minidl import checks
from minidl.dist.agree import by_value, rank_list
from minidl.dist.calls import Position, Waiting

LIMIT_SECONDS = 600.0
VARIABLE = "MINIDL_TIMEOUT"
SAME_CALLS = "every rank must make the same calls in the same order"
STATUS = 124  # of a job that hung, as that of timeout(1)
_PACKAGE = str(Path(__file__).parent)
_LIBRARY = sysconfig.get_path("stdlib")
_SHOWN_CALLS = 5
_SHOWN_TEXTS = 8  # stacks that differ: a job of thousands of ranks still fits a screen or two
_STACK_LETTERS = 4000  # the innermost: a message that MPI sends without asking the receiver


def limit() -> float:
    """Seconds that a collective may take: $MINIDL_TIMEOUT, or ten minutes; 0 or ``inf``: for ever.

    Raises:
        ValueError: when the variable holds no such number.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        seconds = float(text) if text else LIMIT_SECONDS
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise checks.bad_value("init", VARIABLE, "a number of seconds, 0 for no limit", text)
    return seconds or float("inf")


def contradiction(rank: int, mine: Position, told: Mapping[int, Position]) -> str:
    """The first call that ranks disagree about, by number, in words that are the same on all ranks; empty if none."""
    known = {rank: mine, **told}
    for number in sorted({call.number for position in known.values() for call in position.recent}):
        calls = {other: call for other, position in sorted(known.items()) if (call := position.call(number))}
        if len({str(call) for call in calls.values()}) > 1:
            return f"collective call {number} differs: {by_value(map(str, calls.values()), calls)}"
    return ""


def missing(waiting: Waiting, size: int, rank: int, told: Mapping[int, Position]) -> list[int]:
    """The ranks that are not in this call, nor beyond it: they answer otherwise, or do not answer."""
    number = waiting.call.number
    return [
        other
        for other in range(size)
        if other != rank and (other not in told or (told[other].made < number and told[other].call(number) is None))
    ]


def report(waiting: Waiting, size: int, rank: int, mine: Position, told: Mapping[int, Position]) -> tuple[str, str]:
    """(headline, details) of a job that hangs."""
    absent = missing(waiting, size, rank, told)
    text = f"waits for {waiting.seconds:.1f} s in its collective call {waiting.call.number}, {waiting.call}"
    if absent:
        text += f", for rank{'s' * (len(absent) > 1)} {rank_list(absent)}"
    lines = [f"  rank {other}: {_doing(told.get(other), waiting)}" for other in range(size) if other != rank]
    known = {rank: mine, **told}
    first = [*(other for other in absent if other in told), rank]
    order = first + sorted(set(known) - set(first))
    lines += _shown("stack", {other: known[other].stack.rstrip() for other in order})
    lines += _shown("last calls", {other: _last_calls(known[other]) for other in order})
    lines.append(f"if the others are only slow, set {VARIABLE} to more seconds")
    return text, "\n".join(lines)


def _shown(what: str, texts: Mapping[int, str]) -> list[str]:
    """Each text once, with the ranks that it is of; of very many the first."""
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    lines = []
    for text, where in list(ranks.items())[:_SHOWN_TEXTS]:
        lines += [f"{what} of rank{'s' * (len(where) > 1)} {rank_list(where)}:", text]
    left = [rank for where in list(ranks.values())[_SHOWN_TEXTS:] for rank in where]
    return lines + [f"{what} of ranks {rank_list(left)} are others again"] * bool(left)


def _last_calls(position: Position) -> str:
    return "\n".join(f"  {call.number}: {call}" for call in position.recent[-_SHOWN_CALLS:]) or "  none"


def stack() -> tuple[str, str]:
    """(innermost line outside of this folder and of Python's library, all lines) of this process's main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "", ""
    lines = traceback.extract_stack(frame)
    outer = [line for line in lines if not _inner(line.filename)] or lines
    place = f"{outer[-1].filename}:{outer[-1].lineno} in {outer[-1].name}"
    return place, "".join(traceback.format_list(lines))[-_STACK_LETTERS:]


def _inner(filename: str) -> bool:
    library = filename.startswith(_LIBRARY) and "-packages" not in filename[len(_LIBRARY) :]
    return filename.startswith((_PACKAGE, "<frozen")) or library


def _doing(position: Position | None, waiting: Waiting) -> str:
    if position is None:
        return "does not answer: stopped, or its machine is gone"
    where = ", ".join([*(f"{key} {value}" for key, value in position.context.items()), f"at {position.place}"])
    if any(other.call.number == waiting.call.number for other in position.waiting):
        return f"waits in the same call ({where})"
    if position.waiting:
        other = position.waiting[0]
        return f"waits for {other.seconds:.1f} s in call {other.call.number}, {other.call} ({where})"
    last = f"the last {position.recent[-1]}" if position.recent else "none at all"
    return f"made {position.made} calls, {last}; in none for {position.idle_seconds:.1f} s ({where})"
