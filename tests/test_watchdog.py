"""Who waits for whom, decided from what the ranks tell: no messages and no clocks here."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from minidl.dist import watchdog
from minidl.dist.calls import _DTYPES, _KINDS, _WITHOUT_ARRAY, RECENT, Call, CallLog, Position, Waiting


def position(*calls, waiting=(), idle=3.0, made=None):
    recent = tuple(
        Call(i, *call) if isinstance(call, tuple) else Call(i, call) for i, call in enumerate(calls, start=1)
    )
    under_way = tuple(Waiting(recent[i - 1], seconds) for i, seconds in waiting)
    return Position(len(recent) if made is None else made, under_way, recent, idle, "train.py:8 in load", "  stack\n")


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("size", [0, 1, 2**40 - 1])
def test_a_code_tells_the_call(kind, size):
    for dtype in _DTYPES:
        call = Call(3, kind, size, "" if kind in _WITHOUT_ARRAY else dtype, 7, "conv1")
        assert Call.decode(call.code, 3, "conv1") == call and 0 < call.code < 2**64


def test_codes_differ_where_calls_do():
    calls = [Call(1, kind, n, dtype, root) for kind in _KINDS for n in (0, 5) for dtype in _DTYPES for root in (0, 1)]
    assert len({call.code for call in calls}) == len(calls)


def test_a_log_counts_keeps_the_last_and_knows_what_waits():
    log = CallLog()
    assert log.made == 0 and log.last == "no call" and log.waiting() == ()
    for _ in range(RECENT + 5):
        call = log.enter("start_all_reduce", np.zeros(3, "float32"), name="conv1")
    assert str(call) == "start_all_reduce of 3 float32 (conv1)" and call.number == log.made == RECENT + 5
    log.begin("messages", call)
    log.begin("inline", log.enter("barrier"))
    assert [waiting.call.kind for waiting in log.waiting()] == ["start_all_reduce", "barrier"]
    log.end("messages")
    told = log.position(place="here")
    assert [waiting.call.kind for waiting in told.waiting] == ["barrier"]
    assert len(told.recent) == RECENT and told.call(RECENT + 6).kind == "barrier" and told.call(1) is None


def test_ranks_that_agree_or_lag_do_not_contradict():
    mine = position("share", ("all_reduce", 5, "float32"), waiting=[(2, 9.0)])
    assert watchdog.contradiction(0, mine, {1: position("share"), 2: mine}) == ""
    assert watchdog.contradiction(0, mine, {}) == ""


def test_the_first_difference_is_named_alike_on_all_ranks():
    one, two = position("share", "barrier", "share"), position("share", ("all_reduce", 5, "float32"), "barrier")
    text = watchdog.contradiction(0, one, {1: two, 2: one})
    assert text == "collective call 2 differs: on ranks 0, 2: barrier; on rank 1: all_reduce of 5 float32"
    assert text == watchdog.contradiction(1, two, {0: one, 2: one})


def test_messages_in_another_order_differ_by_name():
    one, two = (position(("start_all_reduce", 5, "float32", 0, name)) for name in ("conv1", "conv2"))
    assert "(conv1); on rank 1: start_all_reduce of 5 float32 (conv2)" in watchdog.contradiction(0, one, {1: two})


def test_who_is_missing():
    mine = position("share", "barrier", waiting=[(2, 5.0)])
    told = {1: position("share"), 2: position("share", "barrier", waiting=[(2, 4.0)])}
    assert watchdog.missing(mine.waiting[0], 4, 0, told) == [1, 3]


def test_the_report_says_what_everybody_does():
    mine = position("share", ("all_reduce", 5, "float32", 0, "bn1"), waiting=[(2, 5.0)])
    told = {
        1: position("share"),
        2: position("share", ("all_reduce", 5, "float32", 0, "bn1"), waiting=[(2, 4.0)]),
        4: position("share", waiting=[(1, 4.0)]),
    }
    headline, details = watchdog.report(mine.waiting[0], 5, 0, mine, told)
    assert headline == "waits for 5.0 s in its collective call 2, all_reduce of 5 float32 (bn1), for ranks 1, 3-4"
    lines = details.splitlines()
    assert lines[0] == "  rank 1: made 1 calls, the last share; in none for 3.0 s (at train.py:8 in load)"
    assert lines[1] == "  rank 2: waits in the same call (at train.py:8 in load)"
    assert lines[2] == "  rank 3: does not answer: stopped, or its machine is gone"
    assert lines[3] == "  rank 4: waits for 4.0 s in call 1, share (at train.py:8 in load)"
    assert details.count("stack of rank") == 1 and "stack of ranks 0-2, 4:\n  stack\n" in details
    assert "last calls of ranks 1, 4:\n  1: share\nlast calls of ranks 0, 2:\n  1: share\n  2: all_reduce" in details
    assert "MINIDL_TIMEOUT" in lines[-1]


def test_every_ranks_stack_is_shown_those_missing_first_but_of_thousands_some():
    mine = position("barrier", waiting=[(1, 5.0)])
    told = {i: replace(position(*["barrier"] * (i != 3)), stack=f"  line {i}\n") for i in range(1, 5)}
    _, details = watchdog.report(mine.waiting[0], 5, 0, mine, told)
    shown = [line for line in details.splitlines() if line.startswith("stack")]
    assert shown == [f"stack of rank {i}:" for i in (3, 0, 1, 2, 4)] and "stack of rank 3:\n  line 3" in details
    assert "last calls of rank 3:\n  none" in details
    told = {i: replace(position("barrier"), stack=f"  line {i}\n") for i in range(1, 2000)}
    _, details = watchdog.report(mine.waiting[0], 2000, 0, mine, told)
    assert "stack of ranks 8-1999 are others again" in details and details.count("\nstack of rank ") == 8


def test_the_place_is_not_where_pythons_library_waits():
    there, done = [], threading.Event()
    main = threading.main_thread().ident

    def look():
        while "wait" not in sys._current_frames()[main].f_code.co_name:
            time.sleep(0.001)
        there.append(watchdog.stack())
        done.set()

    thread = threading.Thread(target=look)
    thread.start()
    done.wait(20)
    thread.join()
    place, stack = there[0]
    assert "test_the_place_is_not_where_pythons_library_waits" in place and "threading.py" in stack


@pytest.mark.parametrize("text, seconds", [("", 600.0), ("2.5", 2.5), ("0", float("inf")), ("inf", float("inf"))])
def test_the_limit_is_the_users(text, seconds, monkeypatch):
    monkeypatch.setenv("MINIDL_TIMEOUT", text)
    assert watchdog.limit() == seconds


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_no_limit_is_refused_in_silence(text, monkeypatch):
    monkeypatch.setenv("MINIDL_TIMEOUT", text)
    with pytest.raises(ValueError, match="MINIDL_TIMEOUT must be a number of seconds, 0 for no limit, got"):
        watchdog.limit()


def test_the_place_is_the_programs_own_line():
    place, stack = watchdog.stack()
    assert "test_the_place_is_the_programs_own_line" in place and "test_watchdog.py" in stack
