"""Work beside a graph's main line, kernel by kernel: it meets only what is there, and nobody touches what it needs."""

from __future__ import annotations

import functools
import itertools
import re
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

import minidl as m
from minidl.cuda import beside, capture, launch, nvrtc
from minidl.cuda.beside import Beside
from minidl.cuda.hopper import TensorMaps
from minidl.cuda.launch import dry_run
from minidl.fusion import fuse
from minidl.memory.arena import place
from minidl.params import Arena
from minidl.step import EagerStep
from tests.memory_cases import small_graph
from tests.test_random_graphs import BATCH, Builder

GRAIN = 16  # bytes that are told apart: arrays side by side, of 16-bit channels in multiples of eight, share none
# Of the arrays behind a kernel's tensor maps those that it writes.
STORED = {
    "conv2d_hopper_kernel": {2}, "conv2d_halo_kernel": {2}, "conv2d_divided_kernel": {2}, "conv2d_both_kernel": {4},
    "conv2d_both_wide_kernel": {4}, "conv2d_join_kernel": {3, 4, 5}, "conv2d_join_backward_kernel": {3, 4},
    "conv2d_stem_lines_kernel": {0}, "conv2d_stem_pooled_kernel": set(), "conv2d_weight_hopper_kernel": set(),
    "conv2d_weight_halo_kernel": set(),
}  # fmt: skip
OTHER = {"main": "side", "side": "main"}


class Hazard(AssertionError):
    """Two streams may touch the same bytes in either order, and one of them writes."""


@functools.cache
def written(kernel: str) -> tuple[bool | None, ...]:
    """Of each parameter of a kernel whether it writes what that points to; None: it is no pointer."""
    begin = rf"\b{kernel}\("
    texts = (re.sub(r"//[^\n]*", "", path.read_text()) for path in nvrtc.sources().values())
    text = next(text for text in texts if re.search(begin, text) and "__global__" in text)
    found = re.search(begin + r"((?:[^()]|\([^()]*\))*)\)\s*\{", text).group(1)
    return tuple("const" not in one if "*" in one else None for one in found.split(","))


class Streams:
    """What CuPy gives a `Beside`: streams and events, and what each stream has waited for."""

    def __init__(self, deaf: int = -1):
        self.current, self.waits, self._deaf = "main", [], deaf  # to which wait
        self.clock = {name: dict.fromkeys(OTHER, 0) for name in OTHER}
        streams = {name: self._stream(name) for name in OTHER}
        self.side = streams["side"]
        self.cupy = SimpleNamespace(
            cuda=SimpleNamespace(Event=self._event, get_current_stream=lambda: streams[self.current])
        )

    def _event(self, disable_timing):
        event = SimpleNamespace()
        event.record = lambda stream: event.__setattr__("seen", dict(self.clock[stream.name]))
        return event

    def _stream(self, name):
        streams = self

        class Stream:
            def wait_event(self, event):
                streams.waits.append((name, streams.clock[name][name]))
                if len(streams.waits) - 1 != streams._deaf:
                    for other, when in event.seen.items():
                        streams.clock[name][other] = max(streams.clock[name][other], when)

            def __enter__(self):
                streams.current = name

            def __exit__(self, *error):
                streams.current = "main"

        stream = Stream()
        stream.name = name
        return stream


class Arrays:
    """Watches a dry run: where its arrays lie, by an allocator, and which stream touches which bytes when."""

    def __init__(self, streams: Streams):
        self.streams, self.memory, self.size = streams, None, 0
        self.kernels: list[tuple[str, str]] = []  # and their streams
        self._at: dict[int, int] = {}
        self._marks: dict[object, dict] = {}  # of a root: by stream and kind, when its bytes were touched last
        self._kept: dict[int, np.ndarray] = {}  # whose ids are good

    def allocated(self, array):
        if self.memory is not None and array.nbytes:
            self._at[id(array)] = self.memory.malloc(array.nbytes, 0)
            weakref.finalize(array, self._freed, id(array), self.memory)

    def _freed(self, key, memory):
        memory.free(self._at.pop(key), 0)

    def launched(self, name, arguments):
        if not self.size:  # nothing has its place yet
            return
        stream = self.streams.current
        self.streams.clock[stream][stream] += 1
        self.kernels.append((name, stream))
        for argument, writes in zip(arguments, written(name), strict=True):
            if type(argument) is TensorMaps:
                for i, array in enumerate(argument.arrays):
                    if array is not None:
                        self._touch(name, array, i in STORED[name])
            elif writes is not None and isinstance(argument, np.ndarray):
                self._touch(name, argument, writes)

    def _touch(self, name, array, writes):
        stream, other = self.streams.current, OTHER[self.streams.current]
        now, seen = self.streams.clock[stream][stream], self.streams.clock[stream][other]
        marks = {key: self._part(array, key) for key in ((s, kind) for s in OTHER for kind in ("read", "write"))}
        for kind in ("read", "write") if writes else ("write",):
            if marks[other, kind].max(initial=0) > seen:
                raise Hazard(f"{name} on {stream} {'writes' if writes else 'reads'} what {other} may still {kind}")
        marks[stream, "write" if writes else "read"][...] = now

    def _part(self, array, key):
        """When the bytes of an array were touched so, as a view."""
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        address, size, where = self._at.get(id(root)), root.nbytes, "arena"
        if address is None:  # lasting: of the model, or the batch
            address, where = 0, id(root)
            self._kept[id(root)] = root
        else:
            size = self.size
        marks = self._marks.setdefault(where, {}).setdefault(key, np.zeros(size // GRAIN + 1, np.int64))
        first = address + array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
        *rows, last = array.shape or (1,)
        strides = array.strides or (array.itemsize,)
        if first % GRAIN or any(stride % GRAIN for stride in strides[:-1]) or strides[-1] != array.itemsize:
            low, high = np.lib.array_utils.byte_bounds(array)
            return marks[first // GRAIN : (first + high - low - 1) // GRAIN + 1]
        shape = *rows, -(-last * array.itemsize // GRAIN)
        steps = *(stride // GRAIN * marks.itemsize for stride in strides[:-1]), marks.itemsize
        return np.ndarray(shape, marks.dtype, marks, first // GRAIN * marks.itemsize, steps)

    @contextmanager
    def within(self, memory, size):
        """Arrays come from ``memory``, of so many bytes, and work may be beside, as in a step that is compiled."""
        self.memory, self.size = memory, size
        self._marks.clear()
        self.kernels.clear()
        beside._active.append(memory)
        try:
            yield
        finally:
            beside._active.remove(memory)
            self.memory = None


def walked(graph, batch, precision, plan, monkeypatch, deaf=-1, group_bytes=0):
    """A step on shapes, recorded in one line, then in planned memory with branches: its streams, and its kernels."""
    streams = Streams(deaf)
    arrays = Arrays(streams)
    monkeypatch.setattr(beside, "import_cupy", lambda: streams.cupy)
    monkeypatch.setattr(launch, "_behind_maps", iter)
    with dry_run(watcher=arrays):
        model = m.Model(graph, device="cuda", precision=precision, group_bytes=group_bytes)
        fuse(model, plan, batch=batch)
        optimizer = m.SGD(model, 0.1, 0.9)
        step = EagerStep(model, optimizer, m.SoftmaxCrossEntropy())
        x = model.ops.empty((batch, *graph.nodes[0].shape), model.precision.storage)
        labels = model.ops.empty((batch, *graph.output_node.shape[:-1]), np.int32)
        step.part(x, labels, 0)
        addresses = itertools.count(1)
        recording = capture.Recording(lambda size: SimpleNamespace(ptr=next(addresses)))
        with arrays.within(Beside(recording), 0), optimizer.early(rehearse=True):
            totals = step.part(x, labels, 0)
            events = tuple(recording.events)
        del totals
        offsets, size = place(events)
        replaying = capture.Replaying(events, offsets, 0, size)
        with arrays.within(Beside(replaying, streams.side), size), optimizer.early():
            totals = step.part(x, labels, 0)
            replaying.finish()
        del totals
    return streams, arrays.kernels


CASES = [
    ("resnet50", 64, 3, "bf16"), ("resnet20", 32, 4, "fp32"), ("unet", 32, 2, "bf16"), ("mixed", 32, 4, "fp32"),
    ("bare", 32, 4, "bf16"), ("dense", 16, 4, "bf16"), ("gated", 16, 4, "bf16"),
]  # fmt: skip


def small(name, image, batch, precision):
    return small_graph(name, image, width=16), batch, precision


@pytest.mark.parametrize("plan", ["none", "elementwise", "bnff", "auto"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[3]}")
def test_no_kernel_meets_what_another_stream_still_needs(case, plan, monkeypatch):
    streams, kernels = walked(*small(*case), plan, monkeypatch)
    aside = {name for name, stream in kernels if stream == "side"}
    assert len(streams.waits) >= 4 and "sgd_update" in aside and len(kernels) > 2 * len(aside)
    if case[0] == "resnet50" and plan == "bnff":
        assert {name for name, _ in kernels} >= {"conv2d_both_kernel", "conv2d_both_wide_kernel"}
        assert aside >= {"conv2d_weight_hopper_kernel", "sum_partials_kernel"}


# Also some with messages whose updates take too long for a branch.
@pytest.mark.parametrize(("scale", "seed"), [*(("narrow", seed) for seed in range(24)), ("wide", 118), ("wide", 270)])
def test_nor_does_one_of_a_random_network(scale, seed, monkeypatch):
    builder = Builder(seed, scale)
    graph = builder.build()
    walked(graph, BATCH, ("bf16", "fp32", "fp16")[seed % 3], builder.plan(), monkeypatch)


def test_each_wait_that_is_left_out_is_missed(monkeypatch):
    """But for those that are followed by another before the next kernel, and some behind which memory goes to who has
    waited for more."""

    def waits(deaf=-1):
        return walked(*small(*CASES[1]), "bnff", monkeypatch, deaf, group_bytes=1 << 22)[0].waits

    told, missed = waits(), 0
    needed = [number for number, wait in enumerate(told) if wait not in told[number + 1 :]]
    for number in needed:
        try:
            waits(number)
        except Hazard:
            missed += 1
    assert missed > 0.85 * len(needed) > 20


def test_memory_that_is_given_back_under_work_beside_is_missed(monkeypatch):
    monkeypatch.setattr(Beside, "free", Beside._release)
    with pytest.raises(Hazard):
        walked(*small(*CASES[1]), "bnff", monkeypatch)


def test_updates_of_what_a_layer_has_yet_to_read_are_missed(monkeypatch):
    """The scale of a batch norm that leaves its last pass to the convolution below."""
    monkeypatch.setattr(Arena, "lend", lambda self, layer, value, reader: value)
    with pytest.raises(Hazard, match="on main reads what side may still write"):
        walked(*small(*CASES[0]), "bnff", monkeypatch)
