"""Tiles that blocks take from a counter: each is computed once, and no bit depends on who came when."""

from __future__ import annotations

from itertools import islice, product

import numpy as np
import pytest

from minidl.cuda.capture import Room, capture
from minidl.cuda.convolution import tickets
from minidl.cuda.convolution.conv2d_walk import blocks
from minidl.cuda.device import current_device
from minidl.cuda.launch import dry_run, launch
from minidl.precision import bfloat16, float32
from minidl.shapes import ceil_div
from tests.convolutions import put

REPEATS = 1000
HELD = 200 * 1024  # bytes of shared memory: nothing else of note is on a multiprocessor beside
# Of several tiles for each block. (N, H, W, C), K, kernel, stride, padding
CASES = {
    "1x1": ((64, 28, 28, 64), 256, 1, 1, 0),
    "3x3": ((64, 28, 28, 64), 192, 3, 1, 1),
    "strided": ((64, 28, 28, 136), 128, 3, 2, 1),
    "windows": ((32, 56, 56, 64), 64, 3, 1, 1),
}


def test_a_dry_run_asks_no_device():
    with dry_run():
        assert tickets.counter() == 0


def test_counters_are_never_given_twice(monkeypatch):
    class Chunk:
        made = 0

        def __init__(self):
            self.ptr = (1 + Chunk.made) << 20
            Chunk.made += 1

    for name, value in (("_zeros", Chunk), ("_chunks", {}), ("_taken", {}), ("CHUNK", 100)):
        monkeypatch.setattr(tickets, name, value)
    found = {int(tickets._new(device)) for device in (0, 1) for _ in range(200)}
    assert len(found) == 400 and Chunk.made == 4, "and memory is made when it is needed"
    assert [len(chunks) for chunks in tickets._chunks.values()] == [2, 2], "and kept"


def _deal(tiles, share, group, at_once, rng):
    """Who computes which tile, as `deal` of tickets.cuh says; so many blocks at once go on at paces of their own."""
    grid, counter, done = blocks(tiles, share, group), [0, 0], {}

    def take():
        counter[0] += 1
        return counter[0] - 1

    def block(number):
        rest = 1 if grid == tiles else share if number + group < grid else tiles
        tile = take() if grid < tiles else number
        yield
        while tile < tiles:
            done.setdefault(number, []).append(tile)
            rest -= 1
            yield
            tile = take() if rest > 0 else tiles
        if grid < tiles:
            counter[1] = (counter[1] + 1) % grid
            if counter[1] == 0:
                counter[0] = 0

    waiting = iter([block(number) for number in range(grid)])
    running = list(islice(waiting, at_once))
    while running:
        i = int(rng.integers(len(running)))
        if next(running[i], "ended") == "ended":
            running[i : i + 1] = islice(waiting, 1)
    assert counter == [0, 0], "as the next launch needs it"
    return done


def test_each_tile_is_computed_once_whoever_comes_when(rng):
    for tiles, share, group in product((1, 7, 132, 133, 400, 1000), (1, 2, 5), (1, 4, 132)):
        for at_once in {1, ceil_div(group, 2), group, 2 * group}:
            done = _deal(tiles, share, group, at_once, rng)
            assert sorted(tile for some in done.values() for tile in some) == list(range(tiles))
            first = blocks(tiles, share, group) - group
            assert all(len(some) <= share for number, some in done.items() if number < first), "they leave"


class Passes:
    """Forward pass, forward pass with statistics, data gradient and masked data gradient of a case."""

    def __init__(self, ops, rng, name):
        shape, filters, kernel, stride, padding = CASES[name]
        self.ops, self.options = (
            ops,
            {"stride": (stride,) * 2, "padding": (padding,) * 2, "dilation": (1, 1), "groups": 1},
        )
        x = rng.standard_normal(shape, np.float32).astype(bfloat16)
        w = rng.standard_normal((filters, kernel, kernel, shape[-1]), np.float32).astype(bfloat16)
        self.x, self.w = put(ops, x, w)
        self.moments, self.gamma = put(
            ops, np.abs(rng.standard_normal((2, shape[-1]), np.float32)), np.ones(shape[-1], float32)
        )
        self.dy = ops.conv2d(self.x, self.w, **self.options)

    def run(self):
        ops, o = self.ops, self.options
        y, sums = ops.conv2d_stats(self.x, self.w, **o)
        masked, parts = ops.conv2d_backward_data_masked(self.dy, self.w, self.x, self.moments, self.gamma, **o)
        both = ops.conv2d(self.x, self.w, **o), ops.conv2d_backward_data(self.dy, self.w, self.x.shape, **o)
        return *both, y, sums, masked, parts

    def bits(self, arrays):
        return [self.ops.to_host(array).view(np.uint8).tobytes() for array in arrays]


@pytest.fixture(params=CASES)
def passes(hopper, rng, request):
    return Passes(hopper, rng, request.param)


def _counters():
    """What stands in every counter that has been made."""
    import cupy

    cupy.cuda.Device().synchronize()
    found = []
    for chunk in tickets._chunks[cupy.cuda.runtime.getDevice()]:
        host = np.full(tickets.CHUNK * tickets.BYTES, 7, np.uint8)
        cupy.cuda.runtime.memcpy(host.ctypes.data, chunk.ptr, host.nbytes, cupy.cuda.runtime.memcpyDeviceToHost)
        found.append(host)
    return np.array(found)


def test_repeats_are_alike_and_leave_counters_at_zero(passes):
    expected = passes.bits(passes.run())
    assert len(_counters()) and not _counters().any()
    arrays = [passes.run() for _ in range(20)]
    assert all(passes.bits(one) == expected for one in arrays)
    for _ in range(REPEATS):
        last = passes.ops.conv2d(passes.x, passes.w, **passes.options)
    assert passes.bits([last]) == expected[:1] and not _counters().any()


def test_blocks_that_begin_late_change_nothing(passes):
    """Other kernels hold some multiprocessors, most of them, or all for a while."""
    import cupy

    expected, other = passes.bits(passes.run()), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    for held in (1, 24, current_device().multiprocessors - 1, current_device().multiprocessors):
        with other:
            launch("spin", "spin", held, 1, np.uint64(2_000_000), shared=HELD)
        arrays = [passes.run() for _ in range(3)]
        assert all(passes.bits(one) == expected for one in arrays), held
        other.synchronize()
    assert not _counters().any()


def test_streams_and_graphs_beside_each_other_have_counters_of_their_own(passes):
    import cupy

    expected, rooms = passes.bits(passes.run()), [Room(), Room()]
    others = [cupy.cuda.Stream(non_blocking=True) for _ in rooms]
    cupy.cuda.Device().synchronize()
    graphs, found, given = [], [], []
    for room in rooms:
        with room.entered():
            passes.run()  # kernels are loaded
            before = sum(tickets._taken.values())
            graphs.append(capture(passes.run, room.stream))
            given.append(sum(tickets._taken.values()) - before)
    assert given[0] == given[1] > 0, "they share none"
    for _ in range(10):
        for room, other, (graph, arrays) in zip(rooms, others, graphs, strict=True):
            graph.launch(other)
            with room.stream:
                found.append(passes.run())
            found.append(arrays)
    cupy.cuda.Device().synchronize()
    assert all(passes.bits(arrays) == expected for arrays in found)
    assert not _counters().any()


def test_counters_are_made_while_a_stream_is_captured(hopper, rng, monkeypatch):
    passes = Passes(hopper, rng, "3x3")
    expected, room = passes.bits(passes.run()), Room()
    with room.entered():
        passes.run()  # kernels are loaded
        for name in ("_chunks", "_taken"):
            monkeypatch.setattr(tickets, name, {})
        graph, arrays = capture(passes.run, room.stream)
    assert len(_counters()) == 1
    graph.launch(room.stream)
    room.stream.synchronize()
    assert passes.bits(arrays) == expected and not _counters().any()


def test_streams_that_live_shortly_do_not_inherit_a_counter_in_use(passes):
    """The address of one that is gone comes back while its kernels are still under way."""
    import cupy

    ops, options = passes.ops, passes.options
    expected, found = passes.bits(passes.run())[:2], []
    cupy.cuda.Device().synchronize()
    for _ in range(40):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:  # nothing is made and let go: CuPy, too, gives out memory by addresses of streams
            both = (
                ops.conv2d(passes.x, passes.w, **options),
                ops.conv2d_backward_data(passes.dy, passes.w, passes.x.shape, **options),
            )
        found.append(both)
        del stream
    cupy.cuda.Device().synchronize()
    assert [i for i, arrays in enumerate(found) if passes.bits(arrays) != expected] == []
    assert not _counters().any()
