"""Laws of step profiles: every pass is seen once, times are true, and together they make up the step."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from statistics import median

import numpy as np
import pytest

import minidl as m
from minidl import models
from minidl.bench.network import in_turns
from minidl.bench.step import TrainingStep
from minidl.dist.communicator import SoloCommunicator
from minidl.profile import steps
from minidl.profile.steps import COMPUTE, MESSAGES, SpanTime, StepProfiler, StepTimes, mark_cost


def small_step(device, batch=4):
    return TrainingStep(models.build("resnet20", (16, 16, 3), 4), batch=batch, device=device)


class Clock:
    """A clock that goes on only when it is told to."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(steps.time, "perf_counter", lambda: self.now)

    def go(self, milliseconds):
        self.now += milliseconds * 1e-3


def test_every_pass_of_every_layer_is_seen_once_a_step(ops):
    step = small_step(ops.name)
    step()
    profiler = StepProfiler(ops)
    step.observe(profiler)
    for _ in range(3):
        with profiler.step():
            step()
    step()  # outside of step(): nobody looks
    found = profiler.read()
    assert len(found) == 3
    for times in found:
        seen = [(s.layer, s.pass_name) for s in times.spans if s.lane == COMPUTE]
        for layer in step.model.layers:
            assert seen.count((layer.name, "forward")) == 1
            assert seen.count((layer.name, "backward_weight")) == layer.has_backward_weight
        assert ("conv1", "backward_data") not in seen, "nobody asks for the gradient of the images"
        assert seen.count(("loss", "forward")) == seen.count(("loss", "backward_data")) == 1
        assert ("optimizer", "update") in seen
    assert profiler.read() == [], "read once"


def test_spans_lie_within_their_step_and_make_it_up(ops):
    step = small_step(ops.name)
    step()
    profiler = StepProfiler(ops)
    step.observe(profiler)
    with profiler.step():
        step()
    (times,) = profiler.read()
    slack = 2e-3  # an event's resolution
    end = 0.0
    for span in sorted((s for s in times.spans if s.lane == COMPUTE), key=lambda s: s.start_ms):
        assert span.ms >= 0 and span.start_ms >= end - slack, "spans of one lane do not overlap"
        end = span.start_ms + span.ms
    assert end <= times.ms + slack
    total = sum(s.ms for s in times.spans if s.lane == COMPUTE)
    assert times.unaccounted_ms == pytest.approx(times.ms - total)
    assert times.unaccounted_ms >= -slack


def test_the_clock_tells_known_durations(cpu_ops, monkeypatch):
    clock, profiler = Clock(monkeypatch), StepProfiler(cpu_ops)
    with profiler.step():
        with profiler.span("a", "forward"):
            clock.go(20)
        clock.go(10)
        with profiler.span("b", "backward_data"):
            clock.go(5)
    (times,) = profiler.read()
    a, b = times.spans
    assert (a.ms, b.ms, b.start_ms, times.unaccounted_ms) == pytest.approx((20, 5, 30, 10))


def test_a_message_of_another_thread_has_a_lane_of_its_own(cpu_ops, monkeypatch):
    clock, profiler = Clock(monkeypatch), StepProfiler(cpu_ops)
    begun, told = threading.Event(), threading.Event()

    def send():
        with profiler.span("fc", "all_reduce"):
            begun.set()
            told.wait(10)

    with profiler.step():
        thread = threading.Thread(target=send)
        thread.start()
        assert begun.wait(10)
        clock.go(7)  # computing beside the message
        with profiler.span("fc", "wait"):
            clock.go(3)
            told.set()
            thread.join()
    (times,) = profiler.read()
    found = {s.pass_name: (s.lane, s.ms) for s in times.spans}
    assert found["all_reduce"] == (MESSAGES, pytest.approx(10)) and found["wait"] == (COMPUTE, pytest.approx(3))
    assert times.unaccounted_ms == pytest.approx(7), "a message's time is not taken off the step a second time"


def test_a_step_that_fails_leaves_no_record(cpu_ops):
    profiler = StepProfiler(cpu_ops)
    with pytest.raises(ZeroDivisionError), profiler.step():
        _ = 1 / 0
    assert profiler.read() == []
    with profiler.span("late", "forward"):
        pass
    with profiler.step():
        pass
    assert [len(times.spans) for times in profiler.read()] == [0]


def test_observing_changes_no_bit(ops):
    def trained(watched):
        step = small_step(ops.name)
        profiler = StepProfiler(ops)
        if watched:
            step.observe(profiler)
        for _ in range(3):
            with profiler.step():
                step()
        return step.model.state_dict()

    plain, watched = trained(False), trained(True)
    assert all((plain[name] == watched[name]).all() for name in plain)


@pytest.mark.alone
def test_the_device_tells_known_durations_eager_and_captured(cuda_ops):
    import cupy

    from minidl.cuda.spin import spin

    def work(profiler):
        with profiler.span("a", "forward"):
            spin(2e-3)
        with profiler.span("b", "forward"):
            spin(1e-3)
        spin(5e-4)

    profiler = StepProfiler(cuda_ops)
    work(profiler)
    with profiler.step():
        work(profiler)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        graph, piece = marked_graph(stream, profiler, work)
        for _ in range(3):
            with profiler.step():
                profiler.launching(piece)
                graph.launch(stream)
    found = profiler.read()
    assert [times.captured for times in found] == [False, True, True, True]
    for times in found:
        assert [s.ms for s in times.spans] == pytest.approx([2, 1], rel=0.03)
        assert times.ms == pytest.approx(3.5, rel=0.03)
        assert times.unaccounted_ms == pytest.approx(0.5, rel=0.06)


def test_marks_are_taken_off_wherever_they_lie():
    """Passes of 3, 5 and 2 ms and a rest of 4, each between two marks of 1 ms; a message beside the last two."""
    spans = [
        SpanTime("a", "forward", COMPUTE, 0.0, 4.0),
        SpanTime("a", "backward_weight", COMPUTE, 4.0, 6.0),
        SpanTime("view", "backward_data", COMPUTE, 10.0, 0.0),
        SpanTime("a", "all_reduce", MESSAGES, 10.5, 7.0),
        SpanTime("optimizer", "update", COMPUTE, 15.0, 3.0),
    ]
    watched = StepTimes(18.0, spans, [(4.0, 100), (18.0, 50)], True, [0.0, 4.0, 10.0, 15.0, 18.0])
    cost = mark_cost([14.5, 13.5, 14.0], [watched] * 3)
    assert cost == pytest.approx(1.0)
    less = watched.less_marks(cost)
    compute = [s for s in less.spans if s.lane == COMPUTE]
    assert [s.ms for s in compute] == pytest.approx([3, 5, 0, 2])
    assert [s.start_ms for s in compute] == pytest.approx([0, 3, 8, 12])
    assert [s.ms for s in less.spans if s.lane == MESSAGES] == [7.0], "a message runs beside the marks"
    assert (less.ms, less.unaccounted_ms) == pytest.approx((14, 4)) and less.memory == [(3.0, 100), (14.0, 50)]


def test_no_mark_costs_less_than_nothing():
    watched = [StepTimes(9.0, marks=[0.0, 4.0, 9.0]), StepTimes(11.0, marks=[0.0, 5.0, 11.0])]
    assert mark_cost([12.0, 12.5], watched) == 0.0, "the clocks rose meanwhile"
    assert mark_cost([1.0, 1.0], [StepTimes(2.0)]) == 0.0, "a step without marks"
    short = StepTimes(1.0, [SpanTime("a", "forward", COMPUTE, 0.0, 0.2)], marks=[0.0, 0.2, 1.0]).less_marks(0.3)
    assert short.spans[0].ms == 0.0


@pytest.mark.alone
def test_passes_of_known_duration_in_a_captured_step_are_free_of_their_marks(cuda_ops):
    """Short and long kernels in turns. Beside its own time each has what lies between two kernels of a graph."""
    from minidl.cuda.spin import spin

    durations = [0.02, 0.1] * 40

    def work(profiler):
        for i, ms in enumerate(durations):
            with profiler.span(f"{i}", "forward"):
                spin(1e-3 * ms)

    plain, watched = captured_in_turns(cuda_ops, work)
    gap, cost = (median(plain) - sum(durations)) / len(durations), mark_cost(plain, watched)
    assert 0 <= gap < 3e-3 and 0 < cost < 10e-3
    for first, ms in enumerate(durations[:2]):
        less, raw = (
            median(span.ms for step in steps for span in step.spans[first::2])
            for steps in ([step.less_marks(cost) for step in watched], watched)
        )
        assert less == pytest.approx(ms + gap, rel=0.03) and raw > less + 0.5 * cost


def marked_graph(stream, profiler, work):
    """``work`` captured on the present stream with a profiler's marks, and those."""
    stream.begin_capture()
    with profiler.capturing() as piece:
        work(profiler)
    return stream.end_capture(), piece


def captured_in_turns(ops, work):
    """Milliseconds of replays without marks, and steps with them."""
    import cupy

    stream, quiet, profiler = cupy.cuda.Stream(non_blocking=True), StepProfiler(ops), StepProfiler(ops)
    with stream:
        work(quiet)
        stream.begin_capture()
        work(quiet)
        plain = stream.end_capture()
        marked, piece = marked_graph(stream, profiler, work)
        for _ in range(10):
            with quiet.step():
                plain.launch(stream)
            with profiler.step():
                profiler.launching(piece)
                marked.launch(stream)
    return [step.ms for step in quiet.read()], profiler.read()


class ByBlock:
    """A profiler that lets another see one span around all neighbouring passes of a block ("layer1.0"), each way."""

    def __init__(self, beside):
        self.beside, self.open, self.what = beside, None, None
        self.launching = beside.launching

    @contextmanager
    def capturing(self):
        with self.beside.capturing() as piece:
            yield piece
            self.close()

    @contextmanager
    def span(self, layer, pass_name, stream=None):
        what = block_of(layer), pass_name == "forward"
        if what != self.what:
            self.close()
            self.open, self.what = self.beside.span(what[0], "forward" if what[1] else "backward"), what
            self.open.__enter__()
        yield

    def close(self):
        if self.open is not None:
            self.open.__exit__(None, None, None)
        self.open = self.what = None


def block_of(layer):
    return ".".join(layer.split(".")[:2])


@pytest.mark.alone
def test_the_layers_of_a_block_take_together_what_the_block_takes(cuda_ops):
    """ResNet-50 at batch 32 has ten times as many passes as blocks each way, and kernels of a few microseconds."""
    step = TrainingStep(models.build("resnet50", (224, 224, 3), 1000), batch=32, device="cuda", precision="bf16")
    plain, fine, coarse = (StepProfiler(cuda_ops) for _ in range(3))
    first = step.capture()
    others = step.capture(fine, first), step.capture(ByBlock(coarse), first)
    whole, layers, blocks = in_turns(step, 20, dict(zip((plain, fine, coarse), (first, *others), strict=True)))
    whole = [s.ms for s in whole]
    by_layer, by_block = parts(layers, mark_cost(whole, layers)), parts(blocks, mark_cost(whole, blocks))
    assert by_layer.keys() == by_block.keys() and len(by_block) > 30
    for block, ms in by_block.items():
        assert by_layer[block] == pytest.approx(ms, rel=0.05, abs=2e-3), block
    assert sum(parts(layers, 0.0).values()) > 1.05 * sum(by_block.values()), "with their marks they take longer"


def parts(steps, cost):
    """Milliseconds of each block and way, each mark taken off."""
    found = {}
    for span in (span for step in steps for span in step.less_marks(cost).spans):
        key = block_of(span.layer), span.pass_name == "forward"
        found[key] = found.get(key, 0.0) + span.ms / len(steps)
    return found


def test_a_captured_step_trains_like_an_eager_one_and_its_spans_close(cuda_ops):
    eager, captured = small_step(cuda_ops.name), small_step(cuda_ops.name)
    profiler = StepProfiler(cuda_ops)
    replay = captured.capture(profiler)  # takes one eager step first
    eager()
    for _ in range(3):
        eager()
        with replay.stream, profiler.step():
            replay()
    cuda_ops.synchronize()
    replay.stream.synchronize()
    a, b = eager.model.state_dict(), captured.model.state_dict()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
    found = profiler.read()
    assert len(found) == 3
    for times in found:
        assert 0.95 * times.ms <= sum(s.ms for s in times.spans if s.lane == COMPUTE) <= 1.001 * times.ms


def test_capturing_needs_a_gpu():
    step = TrainingStep(models.build("mlp", (4, 4, 1), 3), batch=2, device="cpu")
    with pytest.raises(RuntimeError, match="captured"):
        step.capture()


def test_silent_steps_send_nothing(cpu_ops):
    class Counting(SoloCommunicator):
        sent = 0

        def start_all_reduce(self, array, span=None, name=""):
            Counting.sent += 1
            return self

        def wait(self):
            pass

    step = TrainingStep(models.build("mlp", (4, 4, 1), 3), batch=2, device="cpu", comm=Counting())
    step()
    sent = Counting.sent
    assert sent > 0
    with step.silent():
        step()
    assert Counting.sent == sent
    step()
    assert Counting.sent == 2 * sent


def test_a_networks_profiler_can_be_changed(cpu_ops):
    step = TrainingStep(models.build("mlp", (4, 4, 1), 3), batch=2, device="cpu")
    seen = m.profile.SpanRecorder()
    step.observe(seen)
    step()
    count = len(seen.events)
    assert ("loss", "forward") in seen.events and ("optimizer", "update") in seen.events
    step.observe()
    step()
    assert len(seen.events) == count
