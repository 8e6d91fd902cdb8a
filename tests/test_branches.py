"""Work beside the main line of a graph: what waits for what, and when memory is given back."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace

import pytest

from minidl.compile import CompiledStep
from minidl.cpu import array
from minidl.cuda import beside
from minidl.cuda.beside import SHORT, Beside
from minidl.step import EagerStep
from tests.test_compile import assert_same, batches, make, take


class Log:
    """CuPy's streams and events, an allocator under them, and what they were told."""

    def __init__(self):
        self.told, self.current, self._made = [], "main", 0
        log = self

        class Event:
            def __init__(self, disable_timing):
                assert disable_timing

            def record(self, stream):
                self.of = stream.name, stream.behind()

        class Stream:
            def __init__(self, name):
                self.name, self.seen = name, {}

            def behind(self):
                return len(log.told)

            def wait_event(self, event):
                log.told.append(("wait", self.name, *event.of))

            def __enter__(self):
                log.current = self.name

            def __exit__(self, *error):
                log.current = "main"

        self.main, self.side = Stream("main"), Stream("side")
        streams = {"main": self.main, "side": self.side}
        cuda = SimpleNamespace(Event=Event, get_current_stream=lambda: streams[self.current])
        self.cupy = lambda: SimpleNamespace(cuda=cuda)

    def malloc(self, size, device):
        self._made += 1
        self.told.append(("malloc", self._made, size))
        return self._made

    def free(self, address, device):
        self.told.append(("free", address))

    @property
    def memory(self):
        return [event for event in self.told if event[0] != "wait"]


@pytest.fixture
def log(monkeypatch):
    log = Log()
    monkeypatch.setattr(beside, "import_cupy", log.cupy)
    return log


def test_what_is_released_beside_work_waits_for_it(log):
    """Also what that work releases itself."""
    memory = Beside(log, log.side)
    x, dy, more = (memory.malloc(size, 0) for size in (10, 20, 30))
    memory.free(more, 0)
    with memory.aside():
        scratch = memory.malloc(5, 0)
        memory.free(scratch, 0)
    memory.free(x, 0)
    assert ("free", more) in log.told and ("free", x) not in log.told and ("free", scratch) not in log.told
    begun, ended = log.told.index(("malloc", scratch, 5)), len(log.told)
    memory.rejoin()
    assert log.told[begun - 1][:3] == ("wait", "side", "main")
    waited = next(event for event in log.told[ended:] if event[0] == "wait")
    assert waited[:3] == ("wait", "main", "side") and waited[3] > begun
    assert log.told[ended:] == [waited, ("free", scratch), ("free", x)]
    memory.free(dy, 0)
    assert log.told[-1] == ("free", dy)


def test_the_main_line_waits_where_memory_would_grow(log):
    """For as many pieces as it takes, the oldest first; not for the one under way."""
    memory = Beside(log, log.side)
    held = [memory.malloc(100, 0) for _ in range(3)]
    for array_ in held[:2]:
        with memory.aside():
            pass
        memory.free(array_, 0)
    count = len(log.told)
    fits = memory.malloc(0, 0)
    assert log.told[count:] == [("malloc", fits, 0)]
    new = memory.malloc(100, 0)
    assert [event[:2] for event in log.told[count + 1 :]] == [("wait", "main"), ("free", held[0]), ("malloc", new)]
    count = len(log.told)
    with memory.aside():
        memory.malloc(100, 0)  # in the place of the second
        memory.malloc(100, 0)  # in none: nothing under way is complete
    assert [event[0] for event in log.told[count:]] == ["wait", "wait", "free", "malloc", "malloc"]


def test_memory_is_handed_out_alike_in_one_line_and_in_branches(log, rng):
    """Of any step: so the record of one is that of the other. No more lives at a time than without branches, where
    work beside has its own memory to its end."""
    for _ in range(50):
        script = [(rng.choice(["malloc", "free", "aside"]), int(rng.integers(1, 9))) for _ in range(60)]
        found, plain = [], []  # how much is needed without branches
        for stream in (log.side, None):
            log.told, log._made = [], 0
            memory, live, sizes = Beside(log, stream), [], {}
            for what, number in script:
                plain.append(sum(sizes[address] for address in live) + (0 if what == "free" else number))
                if what == "malloc":
                    live.append(memory.malloc(number, 0))
                    sizes[live[-1]] = number
                elif what == "free" and live:
                    memory.free(live.pop(number % len(live)), 0)
                elif what == "aside":
                    with memory.aside():
                        scratch = memory.malloc(number, 0)
                        memory.free(scratch, 0)
            memory.rejoin()
            for address in live:
                memory.free(address, 0)
            found.append(log.memory)
            assert stream is not None or not [event for event in log.told if event[0] == "wait"]
        assert found[0] == found[1]
        given = {address: size for kind, address, *rest in found[0] if kind == "malloc" for size in rest}
        changes = [given[address] * (1 if kind == "malloc" else -1) for kind, address, *_ in found[0]]
        assert max(accumulate(changes), default=0) <= max(plain)
        assert sorted(address for kind, address, *_ in found[0] if kind == "free") == list(range(1, log._made + 1))


def test_work_that_takes_long_stays_in_its_line(monkeypatch):
    pieces = []
    monkeypatch.setattr(beside, "_active", [SimpleNamespace(aside=lambda: pieces.append(1) or array.aside(0, 0, 2))])
    for flop, moved, itemsize in ((7e8 * SHORT, 0, 2), (0, 4e6 * SHORT, 2), (7e8 * SHORT, 0, 4), (0, 4.1e6 * SHORT, 2)):
        with beside.aside(flop, moved, itemsize):
            pass
    assert len(pieces) == 2
    beside._active.clear()
    with beside.aside(0, 0, 2):  # in no step that is captured
        pass
    assert len(pieces) == 2


@pytest.mark.parametrize(("parts", "fuse"), [(1, "bnff"), (2, "none")])
def test_steps_with_branches_have_the_bits_of_steps_in_one_line(parts, fuse, cuda_ops, monkeypatch):
    """And there are branches, in each micro-batch."""
    pieces, own = [], Beside.aside
    monkeypatch.setattr(Beside, "aside", lambda self: pieces.append(self._stream) or own(self))
    options = {"accumulate": parts, "group_bytes": 0, "fuse": fuse}
    steps = [make(kind, "resnet20", "bf16", **options) for kind in (EagerStep, CompiledStep)]
    losses = [[], []]
    for number, batch in enumerate(zip(*map(batches, steps), strict=True)):
        for found, step, (x, labels) in zip(losses, steps, batch, strict=True):
            found.append(take(step, x, labels, number))
    assert losses[0] == losses[1] and len(losses[0]) > 4
    assert len([stream for stream in pieces if stream is not None]) >= 15 * parts
    assert_same(*steps)


def test_who_reads_gradients_early_is_known():
    """There are no branches then. A look at each layer's, or updates within the backward pass, is another mode."""
    steps = [make(EagerStep, device="cpu") for _ in range(3)]
    modes = [step.model.modes() for step in steps]
    steps[0].model.arena.watch(print)
    steps[1].optimizer.update_in_backward()
    assert [before == step.model.modes() for before, step in zip(modes, steps, strict=True)] == [False, False, True]
    assert [step.model.arena.read_at_the_end for step in steps] == [False, False, True]
