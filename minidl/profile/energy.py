"""Energy and clocks of a GPU, by NVML: millijoules per call, and whether the device was slowed down meanwhile.

The figures are those of the whole board, what it draws when idle included: a call's energy is the energy that passed
while it ran, not what would have been saved without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any

from minidl import checks

# Millijoules per call, or None where it cannot be measured, of (a function that makes so many calls, how many).
Energy = Callable[[Callable[[], Any], int], float | None]

LOW_CLOCK = 0.75  # of the maximum: below it a timing says more about the clock than about the kernel
SECONDS = 0.15  # of calls that a figure is taken of, at least
BATCH_SECONDS = 0.003  # of calls between two looks at the counter
LOOKS = 50  # at the counter, at least: long calls are looked at one by one
SLOWEST_TICK = 0.25  # seconds; a counter that stands still for longer than this under load does not count

# NVML's bits. An idle GPU (bit 0) is not slowed down, and clocks that its user set (bit 1) are as they should be.
IDLE = 0x1
SLOWDOWNS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "synchronised boost",
    0x20: "temperature, software",
    0x40: "temperature, hardware",
    0x80: "power brake",
    0x100: "display clocks",
}


class Meter:
    """Reads the GPU that is CuPy's current device, wherever it stands among those that NVML sees.

    Attributes:
        reason: why energy cannot be read here; None when it can.
    """

    def __init__(self, ops: ModuleType):
        """A meter for the device of ``ops``; one without readings, and not an error, where NVML has none to give."""
        self._ops, self._nvml, self._handle = ops, None, None
        self.reason: str | None = None
        if ops.name != "cuda":
            self.reason = "energy is read from NVIDIA GPUs only"
            return
        try:
            import pynvml
        except ImportError as error:
            self.reason = str(checks.missing_extra("NVML", "energy", error))
            return
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByPciBusId(_bus_id())
            self.millijoules()
        except pynvml.NVMLError as error:
            self.reason = f"NVML: {error}"

    def millijoules(self) -> int:
        """The energy drawn since the driver was loaded. NVML renews it every 20 to 100 ms.

        Raises:
            RuntimeError: where it cannot be read; see `reason`.
        """
        if self.reason is not None:
            raise RuntimeError(f"no energy can be read: {self.reason}")
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)

    def energy_per_call(self, replay: Callable[[], Any], calls: int = 1, seconds: float = SECONDS) -> float | None:
        """Millijoules of one of the ``calls`` calls that ``replay`` makes on the current stream; None with a `reason`.

        Repeated for at least ``seconds``, from one renewal of the counter to another, so that the error is that of
        knowing when it was renewed: of both a look late at most, 4 % in all. What the board draws when idle is not
        subtracted.
        """
        if self.reason is not None:
            return None
        batch, lasts = self._batch(replay)
        first = self._renewal(replay, batch, 0.0)
        last = self._renewal(replay, batch, max(seconds, LOOKS * lasts))
        if first is None or last is None:
            self.reason = f"NVML's energy counter stood still for {SLOWEST_TICK} s of work"
            return None
        (_, before), (replays, after) = first, last
        return (after - before) / (replays * calls)

    def _batch(self, replay: Callable[[], Any]) -> tuple[int, float]:
        """How many replays last about `BATCH_SECONDS`, and how long they do."""
        replay()
        self._ops.synchronize()
        count = 1
        while True:
            elapsed = self._run(replay, count)
            if elapsed >= BATCH_SECONDS / 2:
                batch = max(1, round(count * BATCH_SECONDS / elapsed))
                return batch, batch * elapsed / count
            count *= 2

    def _run(self, replay: Callable[[], Any], count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            replay()
        self._ops.synchronize()
        return time.perf_counter() - started

    def _renewal(self, replay: Callable[[], Any], batch: int, seconds: float) -> tuple[int, int] | None:
        """Replay for ``seconds`` and on until the counter is renewed: (replays made, its value); None if it is not."""
        started, replays = time.perf_counter(), 0
        while time.perf_counter() - started < seconds:
            self._run(replay, batch)
            replays += batch
        waiting, before = time.perf_counter(), self.millijoules()
        while time.perf_counter() - waiting < SLOWEST_TICK:
            self._run(replay, batch)
            replays += batch
            now = self.millijoules()
            if now != before:
                return replays, now
        return None

    def state(self) -> dict[str, Any] | None:
        """Clocks, temperature and power at this moment; None where NVML cannot be asked, and so for single figures.

        Ask at once after work: an idle GPU lowers its clocks.

        Returns:
            sm_mhz, max_sm_mhz, temperature_c, power_w; throttled: what slows the device down, in words; idle: whether
            it has nothing to do, and its clocks say nothing.
        """
        nvml, handle = self._nvml, self._handle
        if handle is None:
            return None
        reasons = self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
        power = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        return {
            "sm_mhz": self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            "max_sm_mhz": self._ask(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
            "temperature_c": self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            "power_w": None if power is None else power / 1e3,
            "throttled": [name for bit, name in SLOWDOWNS.items() if reasons & bit],
            "idle": bool(reasons & IDLE),
        }

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        with suppress(self._nvml.NVMLError):
            return question(*arguments)
        return None


def clock_warnings(*states: dict[str, Any] | None) -> list[str]:
    """One line for each thing in the states before and after a measurement that makes its times doubtful."""
    found: dict[str, None] = {}
    for state in states:
        if state is None:
            continue
        clock, most = state["sm_mhz"], state["max_sm_mhz"]
        if clock and most and clock < LOW_CLOCK * most and not state["idle"]:
            found[f"the GPU ran at {clock} MHz, under {LOW_CLOCK:.0%} of its maximum of {most} MHz"] = None
        if state["throttled"]:
            found[f"the GPU was slowed down: {', '.join(state['throttled'])}"] = None
    return list(found)


def _bus_id() -> str:
    """The PCI bus id of CuPy's current device: its index is not NVML's where CUDA_VISIBLE_DEVICES chooses."""
    import cupy

    return cupy.cuda.runtime.deviceGetPCIBusId(cupy.cuda.runtime.getDevice())
