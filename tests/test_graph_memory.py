"""Who owns the memory of a captured graph: older ones keep theirs whatever is tuned, broken off or given back later."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from minidl import fusion, models
from minidl.bench.step import TrainingStep
from minidl.compile import CompiledStep
from minidl.cuda import capture
from minidl.fusion.apply import machine_of
from minidl.fusion.clock import DeviceClock
from minidl.fusion.groups import groups
from minidl.fusion.measure import compile_ahead, measure
from minidl.profile.timing import Budget, DeviceTimer
from minidl.step import EagerStep
from tests.test_compile import assert_same, batches, make, take
from tests.tolerance import assert_same_arrays

STEPS = 8


class BrokenOff(BaseException):
    """As a signal or a time limit raises it: no `Exception`."""


def break_tuning_off(monkeypatch, cuda_ops, model, after):
    """Tune by measuring until the ``after``-th convolution, which raises."""
    found = groups(model.graph, 6, model.precision, machine_of(cuda_ops), everything=True)
    compile_ahead(model.graph, 6, model.precision, found)
    convolve, left = cuda_ops.conv2d, [after]

    def counted(*args, **options):
        left[0] -= 1
        if left[0] == 0:
            raise BrokenOff
        return convolve(*args, **options)

    with monkeypatch.context() as patch, pytest.raises(BrokenOff):
        patch.setattr(cuda_ops, "conv2d", counted)
        measure(model.graph, 6, found, DeviceClock(cuda_ops, model.precision))


class Claimed:
    """What was free, written to: arrays of all sizes, in memory that everybody has given back."""

    def __init__(self):
        import cupy

        capture.release()
        self.arrays = [cupy.full(1 << k, 0xA5, np.uint8) for k in range(9, 28) for _ in range(4)]
        cupy.cuda.Device().synchronize()

    def untouched(self):
        return all(bool((array == 0xA5).all()) for array in self.arrays)


@pytest.mark.parametrize("after", [1, 3, 7, 60, 200])
def test_tuning_that_is_broken_off_leaves_older_graphs_as_they_were(after, cuda_ops, monkeypatch):
    """A third of these end within a capture; the plan is another afterwards, and then the first one again."""
    steps = [make(kind, "resnet20", "bf16", fuse="statistics") for kind in (EagerStep, CompiledStep)]
    losses = [[], []]
    for number, batch in enumerate(zip(*map(batches, steps), strict=True)):
        if number == 4:
            break_tuning_off(monkeypatch, cuda_ops, steps[1].model, after)
            claimed = Claimed()
        if number in (5, 6):
            for step in steps:
                fusion.fuse(step.model, "gradients" if number == 5 else "statistics")
        for found, step, (x, labels) in zip(losses, steps, batch, strict=True):
            found.append(take(step, x, labels, number))
    assert losses[0] == losses[1] and len(losses[0]) > 6 and claimed.untouched()
    assert_same(*steps)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("at", ["first", "last"])
def test_a_capture_that_is_interrupted_leaves_no_graph_behind(accumulate, at, cuda_ops, monkeypatch):
    """The third call captures; what was captured until then wrote to memory that is given back."""
    steps = [make(kind, "resnet20", accumulate=accumulate) for kind in (EagerStep, CompiledStep)]
    captured = capture.capture
    for number, batch in enumerate(zip(*map(batches, steps), strict=True)):
        if number == 2:
            left = [1 if at == "first" else accumulate]

            def interrupted(work, left=left):
                left[0] -= 1
                if left[0] == 0:
                    raise BrokenOff
                return captured(work)

            with monkeypatch.context() as patch, pytest.raises(BrokenOff):
                patch.setattr(capture, "capture", interrupted)
                take(steps[1], *batch[1], number)
            claimed = Claimed()
        assert take(steps[0], *batch[0], number) == take(steps[1], *batch[1], number)
    assert_same(*steps)
    assert claimed.untouched()


def test_a_replay_owns_what_it_writes_to(cuda_ops, monkeypatch):
    """Two replays in one room and one in another, between them tuning broken off and memory given back and claimed."""
    networks = [models.build("resnet20", (32, 32, 3), 4) for _ in range(2)]
    eager, captured = (TrainingStep(graph, batch=64, device="cuda", precision="bf16") for graph in networks)
    first = captured.capture()
    replays = [first, captured.capture(None, first), captured.capture()]
    for _ in replays:  # each capture takes one eager step
        eager()
    for number in range(STEPS):
        break_tuning_off(monkeypatch, cuda_ops, captured.model, 5 + 9 * number)
        claimed = Claimed()
        replay = replays[number % 3]
        replay()
        replay.stream.synchronize()
        assert float(replay.totals.loss) == float(eager().loss) and claimed.untouched()
    assert_same_arrays(captured.model.state_dict(), eager.model.state_dict())


def test_contestants_share_a_room_that_nobody_empties(cuda_ops):
    """What the calls drop on the way is written again by each replay: given back to the device it would be gone."""
    import cupy

    x = [cuda_ops.from_host(np.full(1 << 20, i + 1, np.float32)) for i in range(3)]
    out = [cupy.zeros(1 << 20, np.float32) for _ in x]

    def call(i, factor):
        capture.release()
        cuda_ops.copy_into(out[i], (x[i] * np.float32(factor) + np.float32(1)) * np.float32(2))

    contestants = [[lambda i=i, f=factor: call(i, f) for i in range(3)] for factor in (2, 3)]
    found = DeviceTimer().in_turns(contestants, Budget(samples=3, sample_ms=0.1))
    assert len(found) == 2 and all(timing.ms > 0 for timing in found)
    for i, array in enumerate(out):
        assert np.unique(cuda_ops.to_host(array)) in ([2 * (2 * (i + 1) + 1)], [2 * (3 * (i + 1) + 1)])


def test_a_room_refuses_what_the_device_does_not_have(cuda_ops):
    """By an error of its own: at the device's, its pool would take memory from under earlier graphs."""
    import cupy

    room = capture.Room()
    with room.entered():
        kept = cupy.zeros(1 << 20, np.uint8)
        del kept
        with pytest.raises(MemoryError, match="capture fewer graphs"):
            cupy.empty(1 << 50, np.uint8)
        held = room._pool.total_bytes()
        cupy.zeros(1 << 20, np.uint8)  # from what the room has kept
        assert room._pool.total_bytes() == held >= 1 << 20


def test_a_room_that_is_dropped_gives_its_memory_back(cuda_ops):
    """Whoever made it: a timer, or a step that was captured."""
    import cupy

    room = capture.Room()
    pool = room._pool
    with room.entered():
        kept = cupy.zeros(3 << 20, np.uint8)
        cupy.zeros(1 << 20, np.uint8)
    assert pool.total_bytes() >= 4 << 20
    del kept, room
    assert pool.total_bytes() == 0


def test_a_timer_drops_its_rooms(cuda_ops, monkeypatch):
    import cupy

    rooms, own = [], capture.Room

    def room():
        made = own()
        rooms.append(made._pool)
        return made

    monkeypatch.setattr(capture, "Room", room)
    x, budget = cupy.ones(1 << 20, np.float32), Budget(samples=2, sample_ms=0.1)
    calls = [lambda: x * np.float32(2)]
    DeviceTimer().replayed(calls, budget)
    DeviceTimer().in_turns([calls, calls], budget)
    assert [pool.total_bytes() for pool in rooms] == [0, 0]


def test_rooms_end_with_their_last_reference(monkeypatch):
    """Needs no GPU: their pool is told to give back what nobody uses once, and not before."""
    told = []

    class Pool:
        def __init__(self, allocator):
            self.malloc = allocator

        def free_all_blocks(self):
            told.append(self)

    cuda = SimpleNamespace(Stream=lambda non_blocking: object(), MemoryPool=Pool)
    monkeypatch.setattr(capture, "import_cupy", lambda: SimpleNamespace(cuda=cuda))
    room = capture.Room()
    other, pool = room, room._pool
    del room
    assert not told
    del other
    assert told == [pool]
