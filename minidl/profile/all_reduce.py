"""What an all-reduce costs over the size of its message: measured on all ranks, and fitted by a line.

Bytes on the wire are those of a ring, 2(n-1)/n times the message per rank, so that the bus bandwidth compares with a
link's own whatever the number of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from minidl.dist import Communicator
from minidl.dist.communicator import place
from minidl.profile.roofline import wire_bytes
from minidl.profile.timing import Timing, slowest

SIZES = tuple(4096 * 4**i for i in range(9))  # bytes, 4 KiB to 256 MiB
SAMPLES = 5
LONGEST_MS = 3000.0  # of one size; networks slow enough to pass it have shown their bandwidth before
_HOST_MS_PER_CALL = 0.05


def sweep(ops: ModuleType, comm: Communicator, begin: Callable[[str], None]) -> dict[str, Any]:
    """Latency, bus bandwidth and the measured points of ``comm``'s all-reduce of float32; a collective.

    A sample is a number of messages one after another, fixed by the size; the slowest rank's time is the sample.
    """
    points: list[dict[str, float]] = []
    for size in SIZES:
        calls = _calls(size)
        if points and 4 * points[-1]["ms"] * calls * SAMPLES > LONGEST_MS:
            break  # on all ranks: they share the times
        begin(f"all-reduce of {_in_words(size)}")
        ms = timed(ops, comm, size, SAMPLES).ms
        points.append({"bytes": size, "ms": ms, "bus_gb_per_s": wire_bytes(size, comm.size) / (ms * 1e6)})
    latency_us, bus_gb_per_s = fit([(wire_bytes(p["bytes"], comm.size), p["ms"]) for p in points])
    line = {"latency_us": latency_us, "bus_gb_per_s": bus_gb_per_s}
    return {"ranks": comm.size, "engine": comm.name, **line, "points": points}


def timed(ops: ModuleType, comm: Communicator, size: int, samples: int = 10) -> Timing:
    """One all-reduce of ``size`` bytes of gradients (float32), nothing beside it; a collective. The slowest rank's time
    counts.
    """
    elapsed, calls = _device_clock if ops.name == "cuda" else _host_clock, _calls(size)
    # Where gradients lie, which may go another way; values other than zeros would grow out of range, sum after sum.
    message = place(comm, ops.zeros(size // 4, np.float32))
    comm.all_reduce(message)
    return slowest(comm, [elapsed(comm, message, calls) / calls for _ in range(samples)])


def fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Latency in microseconds and bandwidth in GB/s of (bytes on the wire, milliseconds), by least squares of the
    relative errors of t = latency + bytes / bandwidth: each size counts alike. Neither is negative.

    Where larger messages took no longer: the time of the smallest, and the bandwidth of the largest by itself.
    """
    wire, ms = (np.array(column, np.float64) for column in zip(*points, strict=True))
    system = np.stack([1 / ms, wire / (1e6 * ms)], axis=1)
    (latency_ms, ms_per_megabyte), *_ = np.linalg.lstsq(system, np.ones(len(ms)), rcond=None)
    if latency_ms < 0:
        column = system[:, 1]
        latency_ms, ms_per_megabyte = 0.0, column.sum() / (column @ column)
    if ms_per_megabyte <= 0:
        # Other programs held up the small messages: no line fits, but each end still bounds its own figure.
        latency_ms, ms_per_megabyte = ms[wire.argmin()], 1e6 * ms[wire.argmax()] / wire.max()
    return float(1e3 * latency_ms), float(1 / ms_per_megabyte)


def _calls(size: int) -> int:
    """Messages of a sample."""
    return 20 if size < 1 << 20 else 5 if size <= 16 << 20 else 2


def _in_words(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def _host_clock(comm: Communicator, message: Any, calls: int) -> float:
    """Milliseconds of ``calls`` all-reduces that block."""
    comm.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        comm.all_reduce(message)
    return (time.perf_counter() - started) * 1e3


def _device_clock(comm: Communicator, message: Any, calls: int) -> float:
    """Milliseconds of ``calls`` all-reduces in stream order, launched while the device was made to wait."""
    import cupy

    from minidl.cuda.spin import spin

    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    comm.barrier()
    spin(_HOST_MS_PER_CALL * 1e-3 * (calls + 1))
    comm.all_reduce(message[:1])  # from here on the devices, and not only the hosts, stand together
    start.record()
    for _ in range(calls):
        comm.all_reduce(message)
    stop.record()
    stop.synchronize()
    return cupy.cuda.get_elapsed_time(start, stop)
