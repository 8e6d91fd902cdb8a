"""The energy meter over a simulated NVML: a board that draws a known power and renews its counter now and then."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from minidl.profile import energy
from minidl.profile.energy import Meter, clock_warnings

POWER_W, TICK, CALL = 500.0, 0.05, 0.003  # watts; seconds between renewals, and of a call
BUS = "0000:1B:00.0"


class NVMLError(Exception):
    """As pynvml's."""


class Board:
    """Time passes only while calls run; the counter shows the energy drawn up to the last renewal."""

    def __init__(self):
        self.now = 0.4321  # a moment between two renewals
        self.queued = 0.0
        self.calls = 0
        self.asked_for = None
        self.throttle_reasons = 0
        self.sm_mhz = 1980

    def work(self):
        self.calls += 1
        self.queued += CALL

    def synchronize(self):
        self.now += self.queued
        self.queued = 0.0

    def counter(self):
        return int(POWER_W * 1e3 * TICK * int(self.now / TICK))

    def module(self):
        nvml = ModuleType("pynvml")
        nvml.NVMLError = NVMLError
        nvml.NVML_CLOCK_SM, nvml.NVML_TEMPERATURE_GPU = 1, 0

        def by_bus_id(bus):
            self.asked_for = bus
            return "board"

        nvml.nvmlInit = lambda: None
        nvml.nvmlDeviceGetHandleByPciBusId = by_bus_id
        nvml.nvmlDeviceGetTotalEnergyConsumption = lambda handle: self.counter()
        nvml.nvmlDeviceGetClockInfo = lambda handle, which: self.sm_mhz
        nvml.nvmlDeviceGetMaxClockInfo = lambda handle, which: 1980
        nvml.nvmlDeviceGetTemperature = lambda handle, which: 61
        nvml.nvmlDeviceGetPowerUsage = lambda handle: 512_340
        nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: self.throttle_reasons
        return nvml


@pytest.fixture
def board(monkeypatch):
    board = Board()
    monkeypatch.setitem(sys.modules, "pynvml", board.module())
    monkeypatch.setattr(energy, "_bus_id", lambda: BUS)
    monkeypatch.setattr(energy, "time", SimpleNamespace(perf_counter=lambda: board.now + board.queued))
    board.ops = SimpleNamespace(name="cuda", synchronize=board.synchronize)
    return board


def test_energy_of_a_call_is_power_times_its_time(board):
    meter = Meter(board.ops)
    assert meter.reason is None
    # The counter's renewal is noticed up to a batch of calls late, at both ends.
    expected = POWER_W * CALL * 1e3
    assert meter.energy_per_call(board.work) == pytest.approx(expected, rel=2 * energy.BATCH_SECONDS / energy.SECONDS)
    assert meter.energy_per_call(board.work, seconds=20.0) == pytest.approx(expected, rel=2e-3)


def test_a_replay_of_many_calls_is_divided_among_them(board):
    one = Meter(board.ops).energy_per_call(board.work, seconds=5.0)
    assert Meter(board.ops).energy_per_call(board.work, calls=10, seconds=5.0) == pytest.approx(one / 10, rel=0.01)


@pytest.mark.parametrize("call", [0.02, 0.07, 0.4])
def test_long_calls_are_measured_as_well_as_short_ones(call, board):
    """A step of a large network, and one that outlasts a renewal."""

    def work():
        board.queued += call

    assert Meter(board.ops).energy_per_call(work) == pytest.approx(POWER_W * call * 1e3, rel=2 / energy.LOOKS)


def test_measuring_ends_soon_after_the_time_it_was_given(board):
    began = board.now
    Meter(board.ops).energy_per_call(board.work, seconds=0.5)
    assert 0.5 <= board.now - began < 0.5 + 4 * TICK


def test_the_board_is_found_by_its_bus_id(board):
    Meter(board.ops)
    assert board.asked_for == BUS


def test_two_readings_differ_by_the_energy_between_them(board):
    meter = Meter(board.ops)
    before = meter.millijoules()
    for _ in range(1000):
        board.work()
    board.synchronize()
    assert meter.millijoules() - before == pytest.approx(POWER_W * CALL * 1e6, abs=POWER_W * TICK * 1e3)


def test_a_processor_has_no_meter():
    meter = Meter(SimpleNamespace(name="cpu"))
    assert "NVIDIA" in meter.reason and meter.energy_per_call(lambda: None) is None and meter.state() is None
    with pytest.raises(RuntimeError, match="no energy can be read: energy is read from NVIDIA GPUs only"):
        meter.millijoules()


def test_without_nvml_the_reason_names_the_extra(board, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    meter = Meter(board.ops)
    assert "pip install 'minidl[energy]'" in meter.reason
    assert meter.energy_per_call(board.work) is None and meter.state() is None and board.calls == 0


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetHandleByPciBusId"])
def test_without_a_driver_the_reason_is_nvmls(function, board, monkeypatch):
    def fail(*arguments):
        raise NVMLError("Driver Not Loaded")

    monkeypatch.setattr(sys.modules["pynvml"], function, fail)
    meter = Meter(board.ops)
    assert meter.reason == "NVML: Driver Not Loaded"
    assert meter.energy_per_call(board.work) is None and meter.state() is None


def test_a_board_without_the_counter_still_tells_its_state(board, monkeypatch):
    def fail(handle):
        raise NVMLError("Not Supported")

    monkeypatch.setattr(sys.modules["pynvml"], "nvmlDeviceGetTotalEnergyConsumption", fail)
    meter = Meter(board.ops)
    assert meter.reason == "NVML: Not Supported" and meter.energy_per_call(board.work) is None
    assert meter.state()["sm_mhz"] == 1980


def test_a_counter_that_stands_still_is_a_reason_and_not_zero(board, monkeypatch):
    monkeypatch.setattr(sys.modules["pynvml"], "nvmlDeviceGetTotalEnergyConsumption", lambda handle: 7)
    meter = Meter(board.ops)
    assert meter.energy_per_call(board.work) is None
    assert "stood still" in meter.reason


def test_the_state_of_a_board_in_words(board):
    board.throttle_reasons = 0x4 | 0x40 | 0x2
    assert Meter(board.ops).state() == {
        "sm_mhz": 1980, "max_sm_mhz": 1980, "temperature_c": 61, "power_w": 512.34,
        "throttled": ["power cap", "temperature, hardware"], "idle": False,
    }  # fmt: skip


def test_figures_that_a_board_does_not_have_are_none(board, monkeypatch):
    def fail(*arguments):
        raise NVMLError("Not Supported")

    nvml = sys.modules["pynvml"]
    for name in ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetTemperature", "nvmlDeviceGetCurrentClocksThrottleReasons"):
        monkeypatch.setattr(nvml, name, fail)
    state = Meter(board.ops).state()
    assert state["power_w"] is None and state["temperature_c"] is None and state["throttled"] == []


def test_warnings_name_low_clocks_and_slowdowns(board):
    meter = Meter(board.ops)
    fine = meter.state()
    board.sm_mhz = 1400
    low = meter.state()
    board.throttle_reasons = 0x4
    slowed = meter.state()
    board.throttle_reasons = 0x1
    idle = meter.state()
    assert clock_warnings(fine, fine) == [] and clock_warnings(None, idle) == []
    assert clock_warnings(fine, low) == ["the GPU ran at 1400 MHz, under 75% of its maximum of 1980 MHz"]
    assert clock_warnings(low, slowed) == [
        "the GPU ran at 1400 MHz, under 75% of its maximum of 1980 MHz",
        "the GPU was slowed down: power cap",
    ]


@pytest.mark.gpu
@pytest.mark.alone  # the board's energy is that of all who use it
def test_a_gpu_at_work_draws_what_its_power_meter_says(cuda_ops):
    """The energy of a call over its time is a power within what the board may draw."""
    from minidl.profile.timing import DeviceTimer

    meter = Meter(cuda_ops)
    if meter.reason is not None:
        pytest.skip(meter.reason)
    x = cuda_ops.from_host(np.random.default_rng(1).standard_normal((4096, 1, 1, 4096), np.float32))
    point = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}

    def call():
        cuda_ops.conv2d(x, x, **point, tf32=True)

    with DeviceTimer().captured([call] * 16) as (launch, _):
        millijoules = meter.energy_per_call(launch, 16, seconds=1.0)
        state = meter.state()
    ms = DeviceTimer().replayed([call] * 16).ms
    watts = millijoules / ms
    assert state["power_w"] and 0.5 * state["power_w"] < watts < 1.5 * state["power_w"], (watts, state)
