"""Collectives in shared memory with threads as ranks: any sizes, any order of calls, rank-order sums to the bit."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from minidl.dist import _window
from minidl.dist.calls import Call
from minidl.precision import bfloat16
from tests.threads import on_threads

CHUNK = 4096
KIND = {name: index for index, name in enumerate(_window.SUMMABLE)}


class Host:
    """The channels of some ranks in one process; waits release the interpreter's lock, so threads can be ranks."""

    def __init__(self, size: int, chunk: int = CHUNK, direct: int = 0):
        self.size = size
        memory = bytearray(_window.channel_bytes(size, chunk))
        self.channels = [_window.Channel(memory, rank, size, chunk, 0, direct) for rank in range(size)]
        self.number = 0

    def run(self, action):
        """``action(channel, rank)`` on every rank at once; the answers in rank order, exceptions included."""

        def body(control):
            try:
                return action(self.channels[control.rank], control.rank)
            except Exception as error:
                return error

        answers = on_threads(self.size, body)
        for answer in answers:
            if isinstance(answer, Exception) and not isinstance(answer, _window.Mismatch):
                raise answer
        return answers

    def all_reduce(self, arrays):
        self.number += 1
        code = Call(self.number, "all_reduce", arrays[0].size, arrays[0].dtype.name).code
        self.run(lambda c, rank: c.all_reduce(arrays[rank], KIND[arrays[rank].dtype.name], code, self.number, b""))


def in_rank_order(arrays):
    """The sum that is promised: ((a0 + a1) + a2) + ..., bfloat16 in float32 and rounded once."""
    dtype = arrays[0].dtype
    wide = [array.astype("float32") if dtype == bfloat16 else array for array in arrays]
    total = wide[0].copy()
    for array in wide[1:]:
        total += array
    return total.astype(dtype)


def bits(array):
    return array.view(f"u{array.dtype.itemsize}")


@pytest.mark.parametrize("direct", [0, 1 << 30], ids=["slices", "direct"])
@pytest.mark.parametrize("dtype", [*_window.SUMMABLE])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_sums_are_those_of_rank_order_to_the_bit(size, dtype, direct):
    host, dtype = Host(size, direct=direct), bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    each = CHUNK // dtype.itemsize
    rng = np.random.default_rng(0)
    for n in (0, 1, 15, 16, 17, each - 1, each, each + 1, 2 * each, 3 * each + 7, 8 * each + 1):
        arrays = [(1e3 * rng.standard_normal(n)).astype(dtype) for _ in range(size)]
        expected = in_rank_order(arrays)
        host.all_reduce(arrays)
        for array in arrays:
            np.testing.assert_array_equal(bits(array), bits(expected))


def test_integers_wrap_like_numpys():
    arrays = [np.array([2**31 - 1, -(2**31)], "int32"), np.array([1, -1], "int32")]
    Host(2).all_reduce(arrays)
    np.testing.assert_array_equal(arrays[0], [-(2**31), 2**31 - 1])


def test_bfloat16_keeps_infinities_and_nans():
    with np.errstate(over="ignore"):
        arrays = [np.array([3.3e38, np.inf, np.inf, np.nan, 1.0], "float32").astype(bfloat16) for _ in range(2)]
    arrays[1][2] = -np.inf
    Host(2).all_reduce(arrays)
    out = arrays[0].astype("float32")
    assert out[0] == np.inf and out[1] == np.inf and np.isnan(out[2]) and np.isnan(out[3]) and out[4] == 2


@pytest.mark.parametrize("size", [2, 4])
def test_calls_of_all_kinds_and_sizes_follow_each_other(size):
    """A slot may be written again only when all have read it: ranks of very different pace, hundreds of calls."""
    host, rng = Host(size, direct=600), np.random.default_rng(1)
    plan = [(rng.choice(["sum", "gather", "cast", "part", "meet"]), int(rng.integers(0, 5000))) for _ in range(300)]
    plan = [(what, min(n, CHUNK // 4) if what == "part" else n) for what, n in plan]

    def body(channel, rank):
        pace = np.random.default_rng(rank)
        for i, (what, n) in enumerate(plan):
            if pace.random() < 0.05:
                threading.Event().wait(0.001)
            mine = np.full(n, rank + i, "float32")
            total = np.float32(size * i + size * (size - 1) // 2)
            if what == "sum":
                channel.all_reduce(mine, KIND["float32"], i, i, b"")
                assert (mine == total).all()
            elif what == "gather":
                channel.all_gather(mine, out := np.empty((size, n), "float32"), i, i, b"")
                assert (out == (np.arange(size) + i)[:, None]).all()
            elif what == "cast":
                channel.broadcast(mine, i % size, i, i, b"")
                assert (mine == i % size + i).all()
            elif what == "part":
                share = np.asarray(channel.reduce_part(mine, KIND["float32"], i, i, b"")).view("float32")
                assert (share == total).all()
                share *= 2  # what other hosts add
                channel.collect_part(mine)
                assert (mine == 2 * total).all()
            else:
                channel.barrier(i, i)
        return "through"

    assert host.run(body) == ["through"] * size


def test_every_rank_learns_who_calls_what():
    host = Host(3)
    calls = [
        Call(7, "all_reduce", 5, "float32"), Call(7, "all_reduce", 6, "float32"), Call(7, "all_reduce", 5, "float32"),
    ]  # fmt: skip

    def body(channel, rank):
        call = calls[rank]
        channel.all_reduce(np.zeros(call.size, "float32"), 0, call.code, call.number, f"layer{rank}".encode())

    for error in host.run(body):
        assert isinstance(error, _window.Mismatch)
        told = [Call.decode(code, number, name.decode()) for code, number, name in error.calls]
        assert told == [call._replace(name=f"layer{rank}") for rank, call in enumerate(calls)]
    for channel in host.channels:
        assert channel.broken
        with pytest.raises(RuntimeError, match="interrupted"):
            channel.barrier(0, 0)


def test_equal_sizes_under_different_names_are_different_calls():
    host = Host(2)
    errors = host.run(lambda c, rank: c.all_reduce(np.zeros(3, "float32"), 0, 1, 1, b"ab"[rank : rank + 1]))
    assert all(isinstance(error, _window.Mismatch) for error in errors)


@pytest.fixture
def ctrl_c():
    """Ctrl-C raises KeyboardInterrupt, also where the tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_wait_gives_way_to_signals(ctrl_c):
    """A rank alone in a barrier hears of Ctrl-C."""
    import _thread

    host = Host(2)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: (threading.Event().wait(0.1), _thread.interrupt_main()))
        with pytest.raises(KeyboardInterrupt):
            host.channels[0].barrier(0, 0)
    assert host.channels[0].broken
