"""The NCCL engine without a GPU: ranks are threads, NumPy stands for CuPy, and a stand-in for NCCL moves the bytes.

What NCCL itself does is not tested here (`tests/dist/test_nccl.py` does that on GPUs), but what the engine asks of it:
pointers, counts, types, roots, groups, and what it tells the watchdog.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from minidl.dist import nccl
from minidl.precision import bfloat16
from tests.dist.laws import tried
from tests.threads import PATIENCE, Array, Meeting, on_threads

_DTYPES = {
    "NCCL_FLOAT32": np.float32, "NCCL_FLOAT64": np.float64, "NCCL_FLOAT16": np.float16, "NCCL_BFLOAT16": bfloat16,
    "NCCL_INT32": np.int32, "NCCL_INT64": np.int64, "NCCL_UINT8": np.uint8,
}  # fmt: skip


def stand_in(meetings):
    """A module that looks like CuPy's of NCCL; ``meetings``: of each communicator, by its id."""
    grouped = threading.local()

    def later(act):
        queue = getattr(grouped, "queue", None)
        act() if queue is None else queue.append(act)

    def group_start():
        grouped.queue = []

    def group_end():
        """Sends first, as they wait for nobody."""
        queue, grouped.queue = grouped.queue, None
        for act in sorted(queue, key=lambda act: act.__name__ != "send"):
            act()

    def memory(pointer, count, kind):
        dtype = np.dtype(_DTYPES[kind])
        if not count:
            return np.empty(0, dtype)
        return np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(pointer), dtype)

    class NcclCommunicator:
        def __init__(self, size, unique, rank):
            self.size, self.rank = size, rank
            self.meeting = meetings.setdefault(unique, Meeting(size))
            self.mail = self.meeting.__dict__.setdefault("mail", {})
            self.sent, self.taken, self.asked = {}, {}, 0

        def _total(self, pointer, count, kind):
            every = self.meeting.exchange(self.rank, memory(pointer, count, kind).copy())
            assert len({each.size for each in every}) == 1 and len({each.dtype for each in every}) == 1
            return np.sum([each.astype(np.float64) for each in every], axis=0).astype(every[0].dtype)

        def allReduce(self, source, target, count, kind, op, stream):
            def act():
                memory(target, count, kind)[:] = self._total(source, count, kind)

            later(act)

        def reduceScatter(self, source, target, count, kind, op, stream):
            def act():
                total = self._total(source, count * self.size, kind)
                memory(source, count * self.size, kind)[:] = 77  # the other parts are lost
                memory(target, count, kind)[:] = total[count * self.rank :][:count]

            later(act)

        def reduce(self, source, target, count, kind, op, root, stream):
            def act():
                total = self._total(source, count, kind)
                memory(target, count, kind)[:] = total if root == self.rank else 77

            later(act)

        def allGather(self, source, target, count, kind, stream):
            def act():
                every = self.meeting.exchange(self.rank, memory(source, count, kind).copy())
                memory(target, count * self.size, kind)[:] = np.concatenate(every)

            later(act)

        def broadcast(self, source, target, count, kind, root, stream):
            def act():
                every = self.meeting.exchange(self.rank, memory(source, count, kind).copy())
                memory(target, count, kind)[:] = every[root]

            later(act)

        def send(self, source, count, kind, peer, stream):
            def send():
                number = self.sent[peer] = self.sent.get(peer, 0) + 1
                box = self.mail.setdefault((self.rank, peer, number), [threading.Event(), None])
                box[1] = memory(source, count, kind).copy()
                box[0].set()

            later(send)

        def recv(self, target, count, kind, peer, stream):
            def receive():
                number = self.taken[peer] = self.taken.get(peer, 0) + 1
                box = self.mail.setdefault((peer, self.rank, number), [threading.Event(), None])
                assert box[0].wait(PATIENCE), "nobody sent it"
                memory(target, count, kind)[:] = box[1]

            later(receive)

        def check_async_error(self):
            self.asked += 1

        def destroy(self):
            pass

    ids = itertools.count()
    names = {name: name for name in (*_DTYPES, "NCCL_SUM")}
    return SimpleNamespace(
        NcclCommunicator=NcclCommunicator, groupStart=group_start, groupEnd=group_end, get_version=lambda: 22809,
        get_unique_id=lambda: next(ids), **names,
    )  # fmt: skip


@pytest.fixture
def engine(monkeypatch):
    """Runs a program on so many ranks, each in a thread with its communicator; what they answer."""
    ops = SimpleNamespace(
        Array=Array, name="cuda", to_host=np.asarray, copy_into=np.copyto, synchronize=lambda: None,
        empty=lambda shape, dtype: np.empty(shape, dtype).view(Array),
        from_host=lambda host: np.array(host).view(Array),
    )  # fmt: skip
    stream = SimpleNamespace(ptr=0, wait_event=lambda event: None, synchronize=lambda: None)
    events = []

    class Event:
        def __init__(self, disable_timing):
            self.done = True
            events.append(self)

        def record(self, stream):
            pass

    cuda = SimpleNamespace(
        Event=Event, Stream=lambda **options: stream, get_current_stream=lambda: stream,
        Device=lambda index: SimpleNamespace(synchronize=lambda: None, __enter__=None, __exit__=None),
        runtime=SimpleNamespace(streamIsCapturing=lambda stream: False),
    )  # fmt: skip
    cupy = SimpleNamespace(
        cuda=cuda, float32=np.float32, ndarray=type("ndarray", (), {}),  # of which no array is one
        zeros=lambda n, dtype: np.zeros(n, dtype).view(Array),
    )  # fmt: skip
    module = stand_in({})
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(nccl, "load_nccl", lambda: module)
    monkeypatch.setattr(nccl, "backend", SimpleNamespace(get_ops=lambda name: ops))
    monkeypatch.setattr(nccl.abort, "before_abort", lambda action: None)
    monkeypatch.setattr(nccl.NCCLCommunicator, "_destroy", lambda self: None)

    def run(size, program):
        def rank(control):
            return program(nccl.NCCLCommunicator(control, 0, direct=False), ops)

        return on_threads(size, rank)

    run.events, run.stream = events, stream
    return run


@pytest.mark.parametrize("size", [1, 2, 3])
def test_laws_hold(engine, size):
    def program(comm, ops):
        found = tried(comm, ops)
        comm.close()
        comm.close()
        return found

    for failures, count in engine(size, program):
        assert not failures, next(iter(failures.items()))
        assert count > 100


def test_placing_counts_as_a_call_without_links_too(engine):
    def program(comm, ops):
        before = comm._control.log.made
        array = ops.from_host(np.zeros(3, np.float32))
        return comm.place(array) is array, comm._control.log.made - before

    assert engine(2, program) == [(True, 1)] * 2


def test_the_watchdog_sees_what_the_device_has_not_done(engine):
    def program(comm, ops):
        log = comm._control.log
        array = ops.from_host(np.ones(1000, "float32"))
        look = lambda: [check() for check in comm._control.health] and [str(w.call) for w in log.waiting()]  # noqa: E731
        seen = [look()]
        comm.start_all_reduce(array, name="conv1").wait()
        engine.events[-1].done = False  # the device is still at it
        comm.follow("the captured step")
        seen.append(look())
        for event in engine.events:
            event.done = True
        seen.append(look())
        return seen

    (seen,) = engine(1, program)
    assert seen == [[], ["start_all_reduce of 1000 float32 (conv1)"], []]


@pytest.mark.parametrize("patience", [30.0, 0.3])
def test_nothing_goes_on_before_nccl_is_done_or_given_up(patience, engine, monkeypatch):
    """Seen to crash where jobs shared two GPUs. What NCCL keeps for ever is told, and the process ends without it."""
    done, told, kept, hard = threading.Event(), [], [], []

    def slowly(self):
        time.sleep(1.5)
        done.set()

    monkeypatch.setattr(nccl, "_RELEASE_SECONDS", patience)
    monkeypatch.setattr(nccl.NCCLCommunicator, "_destroy", slowly)
    monkeypatch.setattr(nccl.NCCLCommunicator, "_keep", lambda self: kept.append(self))
    monkeypatch.setattr(nccl.abort, "tell", told.append)
    monkeypatch.setattr(nccl.abort, "end_hard", lambda: hard.append(True))

    def program(comm, ops):
        comm.close()
        return done.is_set()

    patient = patience > 1
    assert engine(1, program) == [patient]
    assert len(told) == len(kept) == len(hard) == (not patient)
    assert patient or told == ["minidl: NCCL does not let go of a communicator in 0.3 s; it goes with the process"]


def test_the_memory_of_a_message_that_nobody_keeps_is_not_reused_under_way(engine):
    """The next array may get it, and the device has not sent it yet: the stream waits, as if somebody had waited."""

    def program(comm, ops):
        waits, array = [], ops.from_host(np.ones(1000, "float32"))
        engine.stream.wait_event = waits.append
        comm.start_all_reduce(array)
        dropped = waits[-1] is engine.events[-1]
        waits.clear()
        work = comm.start_all_reduce(array)
        waits.clear()
        work.wait()
        done, awaited = engine.events[-1], list(waits)
        del work
        return dropped, [event is done for event in awaited], len(waits)

    assert engine(1, program) == [(True, [True], 1)]
