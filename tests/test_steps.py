"""Laws of step profiles: every pass is seen once, times are true, and together they make up the step."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import minidl as m
from minidl import models
from minidl.bench.step import TrainingStep
from minidl.profile import steps
from minidl.profile.steps import COMPUTE, MESSAGES, StepProfiler


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
        stream.begin_capture()
        with profiler.capturing() as piece:
            work(profiler)
        graph = stream.end_capture()
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
    class Counting:
        rank, size, local_rank, local_size, name = 0, 1, 0, 1, "counting"
        sent = 0

        def start_all_reduce(self, array, span=None, name=""):
            Counting.sent += 1
            return self

        def wait(self):
            pass

        def all_reduce(self, array):
            pass

        def share(self, value):
            return [value]

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
