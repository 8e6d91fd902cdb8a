"""What the ranks tell each other beside their calls, and how one of them ends the job: without MPI."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from minidl.dist import abort, roll_call, watchdog
from minidl.dist.calls import CHAINED, RECENT, CallLog, describe
from minidl.dist.host import different_calls


def test_a_failure_tells_rank_and_step(monkeypatch):
    monkeypatch.setattr(abort, "context", {})
    text = abort.describe("1", 4, "uncaught exception", "Traceback\n  line")
    assert text.startswith("minidl: rank 1 of 4 (") and text.endswith("): uncaught exception\nTraceback\n  line\n")
    abort.context.update(step=7, layer="fc")
    assert ", step 7, layer fc): broken\n" in abort.describe("0", 2, "broken")


@pytest.mark.parametrize(
    "status, code", [(None, 0), (0, 0), (False, 0), (3, 3), (True, 1), ("text", 1), (256, 1), (-1, 255)]
)
def test_exit_codes_never_turn_a_failure_into_success(status, code):
    assert abort.exit_code(status) == code


def test_departure_of_a_rank_with_an_exception_on_its_way():
    assert abort.departure().code == 0
    try:
        raise KeyError("lost")
    except KeyError:
        assert abort.departure().code == 1 and "KeyError: 'lost'" in abort.departure().details
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert abort.departure().code == 130


def test_a_process_has_ended_whether_or_not_its_parent_took_notice():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert not roll_call._ended(child.pid) and not roll_call._ended(os.getpid())
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
    assert roll_call._ended(child.pid)
    child.wait()
    assert roll_call._ended(child.pid)


def test_nobody_goes_on_to_another_call_while_the_job_is_aborted(monkeypatch):
    """The GPU may have let go of what it waited for: what comes out of it is worth nothing."""
    aborting = threading.Lock()
    monkeypatch.setattr(roll_call.abort, "_aborting", aborting)
    roll_call.abort.hold()
    aborting.acquire()
    held = threading.Thread(target=roll_call.abort.hold, daemon=True)
    held.start()
    held.join(0.2)
    assert held.is_alive()


@pytest.mark.parametrize("heard", [False, True])
def test_of_ranks_that_fail_alike_the_first_speaks_and_no_other(heard):
    """Rank 1 fails; rank 0 fails of the same later, when it has heard of that, or at about the same time."""
    told = {0: [], 1: []}
    ranks = [roll_call.RollCall.__new__(roll_call.RollCall) for _ in range(2)]
    for rank, one in enumerate(ranks):
        one._failed, one._gone, one._comm = {}, threading.Event(), SimpleNamespace(rank=rank, size=2)
        one._hear_all = lambda own=one, other=1 - rank: own._failed.update((other, found) for found in told[other])
        one._tell_all = lambda message, rank=rank: told[rank].append(message[1])
    orders = [None, None]

    def fails(rank, after):
        time.sleep(after)
        orders[rank] = ranks[rank].alike("the same", 0.4)

    if not heard:  # both tell before either listens
        both = threading.Barrier(2)
        for rank, one in enumerate(ranks):
            one._tell_all = lambda message, rank=rank: (told[rank].append(message[1]), both.wait())
            one._hear_all = lambda hear=one._hear_all: hear() if all(told.values()) else None
    threads = [threading.Thread(target=fails, args=(rank, 0.2 * heard * (rank == 0))) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert orders == [[1, 0]] * 2 if heard else orders == [[0, 1]] * 2


def test_different_calls_are_one_failure_whoever_finds_them(monkeypatch):
    """An engine that compares, and raises, or the roll call: whichever way ranks know of it, one speaks."""
    spoken = []
    monkeypatch.setattr(abort, "abort", lambda headline, details, code, *, alike: spoken.append(alike))
    monkeypatch.setattr(abort, "_foreign", lambda: False)
    hook = abort._except_hook(lambda *error: None)
    for error in (different_calls({0: describe(5, "share"), 1: describe(5, "barrier")}), ValueError("its own")):
        hook(type(error), error, None)
    assert spoken == [watchdog.SAME_CALLS, "ValueError: its own"]


def test_a_neighbour_that_is_gone_is_noticed_where_the_launcher_does_not(monkeypatch):
    """Seen twice, so that a rank that ends in good order has been heard of; the next rank of the host, in a ring."""
    said = []

    def aborted(text, **alike):
        said.append(text)

    monkeypatch.setattr(roll_call.abort, "abort", aborted)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    ranks = roll_call.RollCall.__new__(roll_call.RollCall)
    ranks.elastic = False
    ranks._processes, ranks._suspects, ranks._failed = {0: child.pid, 1: os.getpid()}, {}, {0: ("it failed", False)}
    ranks._comm = SimpleNamespace(rank=2, size=3)
    for _ in range(3):
        ranks._find_dead()
    child.kill()
    child.wait()
    for _ in range(3):
        ranks._find_dead()
    assert said == [], "it has spoken, and ends the job"
    ranks._failed.clear()
    ranks._find_dead()
    assert said == []
    ranks._find_dead()
    assert said == [f"rank 0 (process {child.pid}) is gone without a word: killed, out of memory, or crashed"]
    ranks._processes.pop(0)  # it told of leaving
    ranks._find_dead()
    assert len(said) == 1


def test_calls_of_a_gpu_wait_one_after_another_until_the_device_has_done_them():
    from minidl.dist.nccl import _Followed

    log = CallLog()
    followed = _Followed(log, "messages of the GPU")
    events = [SimpleNamespace(done=False) for _ in range(3)]
    for event, name in zip(events, ("conv3", "conv2", "conv1"), strict=True):
        followed.add(log.enter("start_all_reduce", np.zeros(5, "float32"), name=name), event)
    seen = []
    for done in (0, 0, 1, 3):
        for event in events[:done]:
            event.done = True
        followed.look()
        seen.append([(waiting.call.name, waiting.seconds) for waiting in log.waiting()])
        time.sleep(0.01)
    assert [[name for name, _ in names] for names in seen] == [["conv3"], ["conv3"], ["conv2"], []]
    assert seen[1][0][1] >= 0.01 > seen[2][0][1], "each counts from when it is the first"


def _log(*sizes):
    log = CallLog()
    for size in sizes:
        log.enter("start_all_reduce", np.zeros(size, "float32"), name="conv1")
    return log


def _compared(monkeypatch, mine, *others):
    """What rank 0, whose log is ``mine``, says when ranks 1, 2, ... have told of ``others``."""
    said = []
    monkeypatch.setattr(roll_call.abort, "abort", lambda text, *details, **more: said.append(text))
    ranks = roll_call.RollCall.__new__(roll_call.RollCall)
    ranks.log, ranks._comm = mine, SimpleNamespace(rank=0, size=1 + len(others))
    ranks._passed = {rank: (log.passed, log.recent) for rank, log in enumerate(others, start=1)}
    ranks._compare()
    assert len(ranks._passed) == len(others), "another thread compares them as well"
    return said


def test_ranks_whose_engine_does_not_compare_find_out_what_they_call_differently(monkeypatch):
    mine = _log(5, 7, 9)
    assert _compared(monkeypatch, mine, _log(5, 7, 9), _log(5), _log()) == []
    assert _compared(monkeypatch, mine, _log(5, 7, 9, 9)) == [], "not so far yet: compared later"
    said = _compared(monkeypatch, mine, _log(5, 8, 9))
    assert said == [
        "collective call 2 differs: on rank 0: start_all_reduce of 7 float32 (conv1); "
        "on rank 1: start_all_reduce of 8 float32 (conv1)"
    ]
    long = [3] * (2 * RECENT)
    said = _compared(monkeypatch, _log(5, *long), _log(6, *long))
    assert said == [f"collective calls up to number {2 * RECENT + 1} differ from those of rank 1"]


def test_checksums_are_kept_for_ranks_that_lag():
    log = _log(*[1] * (2 * CHAINED))
    assert log.checksum(log.made) == log.passed.checksum and log.checksum(log.made + 1) is None
    assert log.checksum(log.made - CHAINED // 2 + 1) == _log(*[1] * (log.made - CHAINED // 2 + 1)).passed.checksum
    assert log.checksum(log.made - CHAINED // 2) is None
