"""What every benchmark shares: timing on the GPU, the record of the machine, the result file and the printed table.

A measurement times a captured CUDA graph of calls that rotate among several input sets, large enough together that
nothing of a set is left in the second-level cache when its turn comes again, with no time of the host in it. Peers are
captured and timed in the same way, in the same run.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

__all__ = [
    "Timing",
    "add_json_option",
    "copy_bandwidth",
    "input_sets",
    "machine_record",
    "print_table",
    "result_file",
    "summary",
    "time_cupy",
    "time_torch",
    "write_result",
]

SAMPLES = 25
SAMPLE_MS = 2.0  # an event's resolution (half a microsecond) is then below a thousandth of a sample
CACHE_MULTIPLE = 2  # all input sets together, in sizes of the second-level cache

Call = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call.

    Attributes:
        ms: median over the samples.
        spread: interquartile range over the median, a fraction.
    """

    ms: float
    spread: float


def summary(samples: Sequence[float]) -> Timing:
    """Median and relative interquartile range of at least two samples."""
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(median, (high - low) / median)


def input_sets(bytes_per_set: int, cache_bytes: int) -> int:
    """How many input sets to rotate among so that together they exceed the cache twice; at least two."""
    return max(2, math.ceil(CACHE_MULTIPLE * cache_bytes / max(bytes_per_set, 1)) + 1)


def _sample(replay: Call, elapsed_ms: Callable[[int], float], calls: int, samples: int) -> Timing:
    """Times ``replay``, one graph of ``calls`` calls; ``elapsed_ms(n)`` runs it n times between two events."""
    replay()
    repeats = max(1, math.ceil(SAMPLE_MS / max(elapsed_ms(1), 1e-3)))
    elapsed_ms(repeats)
    return summary([elapsed_ms(repeats) / (repeats * calls) for _ in range(samples)])


def time_cupy(calls: Sequence[Call], samples: int = SAMPLES) -> Timing:
    """Time per call of ``calls``, each bound to its own inputs, on CuPy's memory and a stream of their own."""
    import cupy

    stream, start, stop = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event(), cupy.cuda.Event()
    cupy.cuda.Device().synchronize()  # the inputs were made on another stream
    with stream:
        # Kernels are loaded and the memory pool is filled now: neither is allowed while a stream is captured.
        results = [call() for call in calls]
        del results
        stream.synchronize()
        stream.begin_capture()
        results = [call() for call in calls]  # kept to the end, so that outputs rotate like inputs
        graph = stream.end_capture()

        def elapsed_ms(repeats: int) -> float:
            start.record(stream)
            for _ in range(repeats):
                graph.launch(stream)
            stop.record(stream)
            stop.synchronize()
            return cupy.cuda.get_elapsed_time(start, stop)

        timing = _sample(lambda: graph.launch(stream), elapsed_ms, len(calls), samples)
    del results
    return timing


def time_torch(calls: Sequence[Call], samples: int = SAMPLES) -> Timing:
    """The same for calls into PyTorch."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for call in calls]
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def elapsed_ms(repeats: int) -> float:
        start.record()
        for _ in range(repeats):
            graph.replay()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop)

    timing = _sample(graph.replay, elapsed_ms, len(calls), samples)
    del results
    return timing


def copy_bandwidth(size: int = 2**30) -> float:
    """Bytes per second, read plus written, of the faster of two device-to-device copies of ``size`` bytes.

    One is the driver's, outside any graph (as a node of a graph it takes a slower path); the other is a kernel's.
    """
    import cupy

    from minidl.cuda import copy_into

    source, target = cupy.empty(size, cupy.uint8), cupy.empty(size, cupy.uint8)
    source[:] = cupy.arange(size // 8, dtype=cupy.uint64).view(cupy.uint8)
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()

    def driver_ms(copies: int) -> float:
        start.record()
        for _ in range(copies):
            target.data.copy_from_device_async(source.data, size)
        stop.record()
        stop.synchronize()
        return cupy.cuda.get_elapsed_time(start, stop)

    driver = _sample(lambda: driver_ms(1), driver_ms, 1, SAMPLES)
    kernel = time_cupy([lambda: copy_into(target, source)] * 4)
    return 2 * size / (min(driver.ms, kernel.ms) * 1e-3)


# ------------------------------------------------------------------------------------------------------- result files


def machine_record() -> dict[str, Any]:
    """The machine as it stands in result files: GPU, driver and versions, or the processor where there is no GPU."""
    record: dict[str, Any] = {"host": platform.machine(), "python": platform.python_version()}
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
        properties = cupy.cuda.runtime.getDeviceProperties(0)
    except Exception as error:  # no package, no driver or no device: then this is a run on the processor
        return record | {"gpu": None, "count": 0, "why": type(error).__name__}
    return record | {
        "gpu": properties["name"].decode(),
        "count": count,
        "l2_bytes": properties["l2CacheSize"],
        "multiprocessors": properties["multiProcessorCount"],
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "cuda": cupy.cuda.runtime.runtimeGetVersion(),
        "cupy": cupy.__version__,
    }


def _commit() -> str | None:
    """The commit of the tree this file stands in, with ``+`` when files differ from it; None outside a repository."""
    folder = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _command() -> str:
    """The command line, without where its result went."""
    words = ["python", *sys.argv]
    if "--json" in words:
        at = words.index("--json")
        del words[at : at + 2]
    return shlex.join(words)


def result_file(
    benchmark: str, rows: Iterable[dict[str, Any]], machine: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The content of a result file (schema 1).

    Args:
        rows: each with at least the keys case, pass, dtype, arm, ms, spread, floor_ms and peers.
        machine: default: this one.
    """
    rows = list(rows)
    for row in rows:
        missing = {"case", "pass", "dtype", "arm", "ms", "spread", "floor_ms", "peers"} - row.keys()
        if missing:
            raise ValueError(f"{benchmark}: row {row.get('case')!r} lacks {', '.join(sorted(missing))}")
    return {
        "schema": 1,
        "benchmark": benchmark,
        "command": _command(),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine or machine_record(),
        "rows": rows,
    }


def write_result(path: str | Path, content: dict[str, Any]) -> None:
    """Write a result file; folders are made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="PATH", help="write the result file here")


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table of text on the terminal: the first column to the left, numbers to the right."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=None, header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
