"""Sums by memory that GPUs share, without GPUs: ranks are threads, and what the kernels do is done here by address.

The kernels themselves are tested on GPUs (`tests/dist/test_nccl.py`); here it is what they are given: addresses,
shares, routes, memory that comes and goes, and what happens where a GPU cannot see another's.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from minidl.cuda import all_reduce as real
from minidl.dist import ipc
from tests.threads import Array, Meeting, on_threads


def view(address, nbytes, dtype):
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype)


class Memory:
    """Stands for the GPUs' memory: what was allocated and is not freed."""

    def __init__(self):
        self.live, self.opened, self.lock = {}, [], threading.Lock()

    def malloc(self, nbytes):
        block = np.zeros(nbytes, np.uint8)
        with self.lock:
            self.live[block.ctypes.data] = block
        return block.ctypes.data

    def open(self, handle, flags):
        with self.lock:
            address = int.from_bytes(handle, "little")
            assert address in self.live
            self.opened.append(address)
        return address

    def close(self, address):
        with self.lock:
            self.opened.remove(address)

    def free(self, address):
        with self.lock:
            assert address not in self.opened, "freed while another rank sees it"
            del self.live[address]


class Kernels:
    """Stands for minidl.cuda.all_reduce: the same sums, made by one call of each rank."""

    Channel = real.Channel
    addresses, shares = staticmethod(real.addresses), staticmethod(real.shares)
    channel_bytes, compiled = staticmethod(real.channel_bytes), staticmethod(lambda channel: None)
    STATE_BYTES, SLOT_DATA_BYTES, MAILBOX_BYTES = real.STATE_BYTES, real.SLOT_DATA_BYTES, real.MAILBOX_BYTES

    def __init__(self, meetings):
        self._meetings, self.calls = meetings, []

    def _meet(self, channel, item=None):
        lanes = tuple(np.frombuffer(channel.peers.tobytes(), np.uint64))
        assert len(lanes) == channel.ranks
        return self._meetings[lanes[0]].exchange(channel.rank, item)

    def _sum(self, name, array, channel):
        self.calls.append(name)
        array[...] = sum(self._meet(channel, array.copy()))
        self._meet(channel)

    def flagged(self, array, channel):
        assert array.nbytes <= self.SLOT_DATA_BYTES
        self._sum("flagged", array, channel)

    def one_shot(self, array, channel):
        assert array.nbytes <= self.MAILBOX_BYTES
        self._sum("one_shot", array, channel)

    def gather(self, array, out, channel):
        self.calls.append("gather")
        out[...] = self._meet(channel, array.copy())

    def two_shot(self, places, nbytes, dtype, channel, blocks):
        self.calls.append("two_shot")
        self._meet(channel)
        cuts = real.shares(nbytes, dtype.itemsize, channel.ranks)
        begin, end = cuts[channel.rank : channel.rank + 2]
        total = sum(view(place + begin, end - begin, dtype).copy() for place in places)
        for place in places:
            view(place + begin, end - begin, dtype)[:] = total
        self._meet(channel)


@pytest.fixture
def job(monkeypatch):
    """Runs a program on so many ranks, each in a thread, with its links; what they answer."""
    memory = Memory()
    runtime = SimpleNamespace(
        malloc=memory.malloc, free=memory.free, memset=lambda *arguments: None, deviceSynchronize=lambda: None,
        ipcGetMemHandle=lambda address: address.to_bytes(8, "little"), ipcOpenMemHandle=memory.open,
        ipcCloseMemHandle=memory.close,
    )  # fmt: skip
    stream = SimpleNamespace(ptr=0)
    cuda = SimpleNamespace(
        runtime=runtime, alloc_pinned_memory=lambda nbytes: bytearray(nbytes), get_current_stream=lambda: stream,
        Event=lambda disable_timing: SimpleNamespace(record=lambda stream: None),
        Device=lambda: SimpleNamespace(synchronize=lambda: None), MemoryPointer=lambda memory, offset: memory,
        UnownedMemory=lambda address, nbytes, owner: SimpleNamespace(address=address, owner=owner),
    )  # fmt: skip

    def array(shape, dtype, memory):
        found = view(memory.address, int(np.prod(shape)) * dtype.itemsize, dtype).reshape(shape).view(Array)
        found.owner = memory.owner
        return found

    cupy = SimpleNamespace(
        cuda=cuda, arange=np.arange, ndarray=array,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(ipc, "backend", SimpleNamespace(get_ops=lambda name: SimpleNamespace(copy_into=np.copyto)))
    monkeypatch.setattr(ipc.Links, "try_out", lambda self: None)

    def run(size, program, left=0):
        meetings: dict = {}
        lock = threading.Lock()

        class Meetings:
            def __getitem__(self, key):
                with lock:
                    return meetings.setdefault(key, Meeting(size))

        kernels = Kernels(Meetings())
        monkeypatch.setattr(ipc, "kernels", kernels)

        def rank(control):
            control.roll_call.limit, run.controls[control.rank] = 5.0, control
            links = ipc.connect(control)
            answer = program(links, control.rank)
            if links is not None:
                links.close(control.barrier)
            return answer

        answers = on_threads(size, rank)
        assert len(memory.live) == left and not memory.opened
        return answers, kernels.calls

    run.memory, run.runtime, run.controls = memory, runtime, {}
    return run


def drawn(rank, size):
    return np.random.default_rng(rank).integers(0, 50, size).astype(np.float32)


STREAM = SimpleNamespace(ptr=0)
ALL = float("inf")


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("routes", [ipc.Routes(0, 0, ALL), ipc.Routes()], ids=["two_shot", "usual"])
def test_any_part_of_a_placed_array_is_summed_where_it_lies(size, routes, job):
    def program(links, rank):
        links.routes, wrong = routes, 0
        arena = links.place(drawn(rank, 300_000).view(Array))
        whole = np.sum([drawn(r, 300_000) for r in range(size)], axis=0)
        for begin, end in ((0, 1), (1, 64), (64, 70), (1001, 5002), (8192, 300_000)):
            before = arena.copy()
            assert links.sum("messages", arena[begin:end], STREAM, False)
            before[begin:end] = whole[begin:end]
            wrong += int((arena != before).sum())
        return wrong

    answers, _ = job(size, program)
    assert answers == [0] * size


def test_sizes_choose_the_way(job):
    def program(links, rank):
        links.routes = ipc.Routes(1000, 4000, 40000)
        arena = links.place(np.zeros(20_000, np.float32).view(Array))
        elsewhere = np.zeros(20_000, np.float32).view(Array)
        taken = []
        for count in (0, 250, 251, 1000, 1001, 4000, 4001, 10_000, 10_001):
            taken.append([links.sum("inline", array[:count], STREAM, False) for array in (arena, elsewhere)])
        return taken

    answers, calls = job(2, program)
    small, never = [True, True], [False, False]
    assert (
        answers == [[never, small, small, small, [True, False], [True, False], [True, False], [True, False], never]] * 2
    )
    ranks = 2
    assert calls.count("flagged") == 2 * ranks and calls.count("one_shot") == 4 * ranks
    assert calls.count("two_shot") == 4 * ranks


def test_more_ranks_take_two_trips_sooner_where_arrays_are_placed(job):
    def program(links, rank):
        links.routes = ipc.Routes(0, 3000, 40000)
        arena = links.place(np.zeros(2000, np.float32).view(Array))
        elsewhere = np.zeros(2000, np.float32).view(Array)
        return [
            links.sum("inline", array[:count], STREAM, False) for array in (arena, elsewhere) for count in (250, 750)
        ]

    for ranks, one, two in ((2, 4, 0), (4, 3, 1)):
        answers, calls = job(ranks, program)
        assert answers == [[True] * 4] * ranks
        assert (calls.count("one_shot"), calls.count("two_shot")) == (one * ranks, two * ranks)


def test_small_arrays_are_gathered_and_others_left_to_nccl(job):
    def program(links, rank):
        out = np.zeros((3, 10), np.float32)
        assert links.gather("inline", drawn(rank, 10).view(Array), out, STREAM, False)
        large = np.zeros(real.SLOT_DATA_BYTES, np.float32).view(Array)
        assert not links.gather("inline", large, None, STREAM, False)
        assert not links.gather("inline", large[:0], None, STREAM, False)
        return out.tolist()

    answers, _ = job(3, program)
    assert answers == [[drawn(rank, 10).tolist() for rank in range(3)]] * 3


def test_memory_that_no_rank_uses_any_more_is_given_back(job):
    def program(links, rank):
        kept, counts = [], []
        for turn in range(4):
            array = links.place(np.zeros(1000, np.float32).view(Array))
            if rank == 0 and turn == 1:
                kept.append(array)
            del array
            counts.append(len(links._regions))
        return counts

    answers, _ = job(2, program)
    assert answers == [[1, 1, 2, 2]] * 2, "what rank 0 keeps stays on both"


def test_an_array_outlives_the_links(job):
    kept = []

    def program(links, rank):
        array = links.place(drawn(rank, 1000).view(Array))
        if rank == 0:
            kept.append(array)
        return None

    job(2, program, left=1)
    np.testing.assert_array_equal(kept[0], drawn(0, 1000))
    kept.clear()
    assert not job.memory.live


def test_an_array_that_lies_there_already_stays(job):
    def program(links, rank):
        array = links.place(np.zeros(1000, np.float32).view(Array))
        again, part = links.place(array), links.place(array[10:20])
        return [again is array, part.data.ptr - array.data.ptr, len(links._regions)]

    answers, _ = job(2, program)
    assert answers == [[True, 40, 1]] * 2


def test_where_one_gpu_cannot_see_another_no_rank_has_links(job):
    opened, lock, failed = job.runtime.ipcOpenMemHandle, threading.Lock(), []

    def refused(handle, flags):
        with lock:
            if not failed:
                failed.append(handle)
                raise RuntimeError("peer access is not supported between these two devices")
        return opened(handle, flags)

    job.runtime.ipcOpenMemHandle = refused
    answers, _ = job(3, lambda links, rank: links is None)
    assert answers == [True] * 3


def test_a_kernel_that_gave_up_is_told(job):
    def program(links, rank):
        links.check()
        links.stop[1] = 1
        with pytest.raises(RuntimeError, match="has waited too long for another rank"):
            links.check()
        links.abort()
        return int(links.stop[0])

    answers, _ = job(2, program)
    assert answers == [1, 1]


@pytest.mark.parametrize("size", [1, 2])
def test_connecting_and_placing_count_as_one_call_each(size, job):
    """With links or, as a group of one rank, without: all ranks number the same calls, or the job would end for it."""

    def program(links, rank):
        made = [job.controls[rank].log.made]
        for count in (1000, 10, 0):
            if links is not None:
                links.place(np.zeros(count, np.float32).view(Array))
                made.append(job.controls[rank].log.made)
        return made

    answers, _ = job(size, program)
    assert answers == ([[1, 2, 3, 4]] * 2 if size == 2 else [[1]])
