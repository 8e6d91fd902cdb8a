"""Laws of planned memory: places never overlap in space and time; replays do what the record says, or are refused."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import minidl as m
from minidl import models
from minidl.cuda.capture import Kept, Lending, Recording, Replaying, allocating
from minidl.cuda.launch import dry_run
from minidl.memory.arena import Lender, most_live, place
from minidl.memory.placement import ALIGN
from minidl.step import EagerStep


def random_events(rng, count):
    """A sequence of allocations and releases, some never released, as a step makes them: mostly last in, first out."""
    events, live = [], []
    for number in range(count):
        events.append(int(rng.integers(0, 20 * ALIGN)) if rng.random() < 0.7 else int(rng.integers(1, 200)) * ALIGN)
        live.append(number)
        while live and rng.random() < 0.48:
            events.append(~live.pop(-1 if rng.random() < 0.7 else int(rng.integers(len(live)))))
    return events


def lifetimes(events):
    lives = []
    for at, event in enumerate(events):
        if event >= 0:
            lives.append([event, at, len(events)])
        else:
            lives[~event][2] = at
    return lives


def assert_apart(events, offsets, size):
    lives = lifetimes(events)
    assert len(offsets) == len(lives) and all(o % ALIGN == 0 for o in offsets)
    for i, (size_i, begin_i, end_i) in enumerate(lives):
        assert 0 <= offsets[i] and offsets[i] + size_i <= size
        for j in range(i):
            size_j, begin_j, end_j = lives[j]
            if begin_i < end_j and begin_j < end_i:
                assert offsets[i] + size_i <= offsets[j] or offsets[j] + size_j <= offsets[i], (i, j)


@pytest.mark.parametrize("seed", range(40))
def test_what_lives_at_once_lies_apart(seed):
    rng = np.random.default_rng(seed)
    events = random_events(rng, int(rng.integers(1, 120)))
    offsets, size = place(events)
    assert_apart(events, offsets, size)
    assert most_live(events) <= size <= 1.35 * most_live(events)


def test_what_is_released_in_reverse_needs_no_more_than_lives_at_once():
    """A forward pass that keeps everything and a backward pass that drops it, with workspaces between."""
    sizes = [3, 1, 4, 1, 5, 9, 2, 6]
    events, workspaces = [], 0
    for size in sizes:
        events += [size * ALIGN]
    for number in reversed(range(len(sizes))):
        made = len(sizes) + workspaces
        workspaces += 1
        events += [2 * ALIGN, ~made, ~number]
    offsets, size = place(events)
    assert_apart(events, offsets, size)
    assert size == most_live(events) == (sum(sizes) + 2) * ALIGN


class Watcher:
    """Notes what a dry run makes and drops."""

    def __init__(self):
        self.events, self.live = [], []

    def allocated(self, array):
        events, number = self.events, len(self.live)
        events.append(array.nbytes)
        self.live.append(weakref.ref(array, lambda _: events.append(~number)))

    def launched(self, name, arguments):
        pass


@pytest.mark.parametrize("name", ["resnet50", "densenet121", "unet", "vgg16"])
def test_networks_are_placed_within_one_per_cent_of_the_least(name):
    watcher = Watcher()
    graph = models.build(name, (64, 64, 3), 10)
    for layer in graph.layers:
        layer.specs = [replace(spec, init=lambda rng, shape: np.zeros(shape, np.float32)) for spec in layer.specs]
    with dry_run(watcher=watcher):
        model = m.Model(graph, device="cuda", precision="bf16")
        step = EagerStep(model, m.SGD(model, 0.1, 0.9), m.SoftmaxCrossEntropy())
        x = model.ops.empty((8, 64, 64, 3), model.precision.storage)
        labels = model.ops.empty((8, *graph.output_node.shape[:-1]), np.int32)
        watcher.events, watcher.live = [], []
        step(x, labels)
        events = list(watcher.events)
    assert len(events) > 100
    assert most_live(events) <= place(events)[1] <= 1.01 * most_live(events)


def test_nothing_is_placed_in_nothing():
    assert place([]) == ([], 0) and most_live([]) == 0
    assert place([0, ~0, 0]) == ([0, 0], 0)


@pytest.mark.parametrize("seed", range(10))
def test_a_lender_never_lends_twice_and_gets_everything_back(seed):
    rng = np.random.default_rng(seed)
    lender, live, refused = Lender(64 * ALIGN), {}, 0
    for _ in range(400):
        if live and rng.random() < 0.5:
            lender.give_back(live_offset := rng.choice(list(live)))
            del live[live_offset]
            continue
        size = int(rng.integers(0, 12 * ALIGN))
        offset = lender.take(size)
        if offset is None:
            refused += 1
            continue
        assert 0 <= offset and offset + size <= 64 * ALIGN and offset % ALIGN == 0
        assert all(offset + size <= other or other + held <= offset for other, held in live.items())
        live[offset] = max(size, 1)
        assert lender.free == 64 * ALIGN - sum(max(-(-held // ALIGN), 1) * ALIGN for held in live.values())
    assert refused
    for offset in list(live):
        lender.give_back(offset)
    assert lender.free == 64 * ALIGN
    assert lender.take(64 * ALIGN) == 0, "all holes must have joined"


class Memory:
    """Addresses that are never used twice."""

    def __init__(self):
        self.next = 1 << 20

    def __call__(self, size):
        self.next += 1 << 20
        return SimpleNamespace(ptr=self.next)


def test_a_record_says_what_was_done():
    recording = Recording(Memory())
    a, b = recording.malloc(100, 0), recording.malloc(200, 0)
    recording.free(a, 0)
    c = recording.malloc(300, 0)
    recording.free(c, 0)
    assert recording.events == [100, 200, ~0, 300, ~2]
    recording.free(b, 0)


EVENTS = [100, 200, ~0, 300, ~2]


def replay(steps):
    offsets, size = place(EVENTS)
    replaying, addresses = Replaying(EVENTS, offsets, 1 << 30, size), []
    for step in steps:
        if step >= 0:
            addresses.append(replaying.malloc(step, 0))
        else:
            replaying.free(addresses[~step], 0)
    return replaying, addresses


def test_a_replay_gets_the_planned_places():
    replaying, addresses = replay(EVENTS)
    replaying.finish()
    assert addresses == [(1 << 30) + offset for offset in place(EVENTS)[0]]
    replaying.free(addresses[1], 0)  # what the work kept goes later
    assert replaying.failure is None


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([100, 256], "event 1 of the step allocates 256 bytes, of its record allocates 200 bytes"),
        ([100, 200, ~1], "event 2 of the step releases allocation 1, of its record releases allocation 0"),
        ([100, 200, 300], "event 2 of the step allocates 300 bytes, of its record releases allocation 0"),
        ([100, 200, ~0, 300], "event 4 of the step is its end, of its record releases allocation 2"),
        ([*EVENTS, 7], "event 5 of the step allocates 7 bytes, of its record is its end"),
    ],
)
def test_a_step_that_differs_from_its_record_is_refused(steps, words):
    with pytest.raises(RuntimeError, match=words):
        replay(steps)[0].finish()


def test_lent_memory_comes_from_the_block_while_it_has_room():
    elsewhere = Memory()
    lending = Lending(Lender(4 * ALIGN), 1 << 40, elsewhere)
    inside = [lending.malloc(2 * ALIGN, 0) for _ in range(2)]
    outside = lending.malloc(1, 0)
    assert [address - (1 << 40) for address in inside] == [0, 2 * ALIGN] and outside == elsewhere.next
    lending.free(inside[0], 0)
    lending.free(outside, 0)
    assert lending.malloc(ALIGN, 0) == inside[0]


def test_an_allocator_is_kept_while_its_memory_is_in_use():
    kept = Kept(Lending(Lender(4 * ALIGN), 1 << 40, Memory()))
    seen = weakref.ref(kept)
    addresses = [kept.malloc(1, 0) for _ in range(2)]
    del kept
    for address in addresses:
        seen().free(address, 0)
    assert seen() is None


def test_arrays_among_garbage_give_back_what_they_were_lent(cuda_ops):
    """The collector may take the objects of a cycle apart in any order, and all that nobody else refers to."""
    import cupy

    lender, block = Lender(64 * ALIGN), cupy.zeros(64 * ALIGN, np.uint8)
    whole = lender.free
    for _ in range(10):
        with allocating(Lending(lender, block.data.ptr, lambda size: None)):
            cycle = [cuda_ops.zeros((3,), np.dtype(np.float32))]
        cycle.append(cycle)
        assert lender.free < whole
        del cycle
        gc.collect()
        assert lender.free == whole
