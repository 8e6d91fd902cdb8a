"""What a machine can do at most, measured once and kept: memory, arithmetic, the link to the host, the network.

    record = find(ops, comm)                  # kept from an earlier run, or measured now
    for what, figure, how in describe(record): ...

All ranks measure at the same time, as they compute at the same time in training, and the slowest rank's figures count.
Records are files in the folder ``ceilings`` of `minidl.cache`, one for each machine, device and number of ranks.
Without a usable cache they are measured each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from minidl import cache
from minidl.dist import SOLO, Communicator
from minidl.dist.agree import on_rank_0
from minidl.dist.threads import available_cores, told_threads
from minidl.profile.all_reduce import sweep
from minidl.profile.results import machine_name, machine_record, rounded, write
from minidl.profile.timing import Budget, HostTimer

VERSION = 2  # of the record; others are measured anew
CACHE_MULTIPLE = 4  # both arrays of a copy together, in sizes of the last cache
LARGEST_MATRIX = 2048
MATRIX_MS = 500.0
BUDGET = Budget(samples=9, seconds=1.0)

Record = dict[str, Any]
Progress = Callable[[str], None]


def measure(ops: ModuleType, comm: Communicator = SOLO, *, progress: Progress | None = None) -> Record:
    """Measure every ceiling of the device of ``ops``: some ten seconds; a collective.

    Args:
        progress: on rank 0, told what is measured next.

    Returns:
        The figures, units in their names: copy_gb_per_s (read plus written), l2_gb_per_s, matrix_tflops and matrix_by
        per precision, vector_tflops, {host_to_device,device_to_host,both_ways}_gb_per_s, and all_reduce (None on one
        rank): ranks, engine, latency_us, bus_gb_per_s, points. None is what a device does not have.
    """

    def begin(what: str) -> None:
        comm.barrier()
        if progress is not None and comm.rank == 0:
            progress(what)

    if ops.name == "cuda":
        from minidl.profile.device_ceilings import measure as figures_of_device

        own = figures_of_device(ops, begin)
    else:
        own = _figures_of_host(ops, begin)
    figures = slowest(comm.share(own))
    figures["all_reduce"] = sweep(ops, comm, begin) if comm.size > 1 else None
    # as a file holds them: who measures and who finds them reckon with the same figures
    return identity(ops, comm) | {"date": datetime.now(UTC).isoformat(timespec="seconds")} | rounded(figures)


def find(
    ops: ModuleType, comm: Communicator = SOLO, *, remeasure: bool = False, progress: Progress | None = None
) -> Record:
    """The ceilings of this machine with so many ranks: rank 0's kept record, else measured now and kept; a collective.

    Args:
        remeasure: measure in any case.
        progress: as in `measure`.
    """
    record = None if remeasure else kept(ops, comm)
    if record is None:
        record = measure(ops, comm, progress=progress)
        path = cache_path(identity(ops, comm))
        if comm.rank == 0:
            with suppress(OSError):  # a home that cannot be written: the next run measures again
                write(path, record)
    return record


def kept(ops: ModuleType, comm: Communicator = SOLO) -> Record | None:
    """What `find` kept earlier, if it did; a collective."""
    who = identity(ops, comm)
    return on_rank_0(comm, lambda: cache.load(cache_path(who), who))


def slowest(records: Sequence[Record]) -> Record:
    """One record from those of all ranks: of each figure the least, of words that differ all."""
    joined: Record = {}
    for key in records[0]:
        values = [record[key] for record in records if record[key] is not None]
        if not values:
            joined[key] = None
        elif isinstance(values[0], dict):
            joined[key] = slowest(values)
        elif isinstance(values[0], str):
            joined[key] = " / ".join(dict.fromkeys(values))
        else:
            joined[key] = min(values)
    return joined


# -- the cache --------------------------------------------------------------------------------------------------------


def identity(ops: ModuleType, comm: Communicator) -> Record:
    """What the figures hold for; the same on all ranks, whose machines may differ."""
    names = comm.share((machine_name(machine_record()), comm.local_size))
    return {
        "version": VERSION,
        "machine": " / ".join(sorted({name for name, _ in names})),
        "device": ops.name,
        "ranks": comm.size,
        "ranks_per_host": max(ranks for _, ranks in names),
        "threads": _threads() if ops.name == "cpu" else None,
    }


def _threads() -> int:
    """CPU threads of this process, as `minidl.dist.threads.cap_threads` or the user chose."""
    return told_threads() or len(available_cores())


def cache_path(identity: Record, kind: str = "ceilings", more: str = "") -> Path:
    """Where the record of a machine, device and number of ranks is kept; ``more`` words for what else it depends on."""
    words = [identity["machine"], identity["device"], f"{identity['ranks']} ranks"]
    if identity["ranks_per_host"] != identity["ranks"]:
        words.append(f"{identity['ranks_per_host']} per host")
    if identity["threads"]:
        words.append(f"{identity['threads']} threads")
    return cache.folder() / kind / cache.file_name(" ".join([*words, more]))


# -- the processor ----------------------------------------------------------------------------------------------------
# Of several samples the fastest counts: others share a processor, and a ceiling is what it gives when they do not.


def _figures_of_host(ops: ModuleType, begin: Progress) -> Record:
    timer = HostTimer()
    begin("copy bandwidth")
    copy = _host_copy(ops, timer)
    begin("matrix rate, fp32")
    # What any product reaches is a ceiling. Ours comes first: NumPy's threads go on waiting busily after a product and
    # would take half of two cores from it.
    rate, by = max((_host_convolution(ops, timer), "minidl conv2d"), (_host_matrix(timer), "numpy"))
    converted = f"{by} in fp32, which bf16 and fp16 are converted to"
    return {
        "copy_gb_per_s": copy,
        "l2_gb_per_s": None,
        "matrix_tflops": {"bf16": rate, "fp16": rate, "tf32": None, "fp32": rate},
        "matrix_by": {"bf16": converted, "fp16": converted, "tf32": None, "fp32": by},
        # A processor's matrix product runs on its vector units.
        "vector_tflops": {"fp32": rate},
        "host_to_device_gb_per_s": None,
        "device_to_host_gb_per_s": None,
        "both_ways_gb_per_s": None,
    }


def _host_copy(ops: ModuleType, timer: HostTimer) -> float:
    """GB/s, read plus written, of a copy between arrays beyond the last cache, each thread on a part of its own."""
    threads = _threads()
    size = CACHE_MULTIPLE * timer.cache_bytes // 2 // (4 * threads) * threads
    source, target = (
        ops.empty((threads, size // threads), np.float32),
        ops.empty((threads, size // threads), np.float32),
    )
    source.fill(1.0)
    target.fill(0.0)  # the system hands out the pages now
    with ThreadPoolExecutor(threads) as pool:
        timing = timer.hot(lambda: list(pool.map(ops.copy_into, target, source)), BUDGET)
    return 2 * source.nbytes / (timing.min_ms * 1e6)


def _host_matrix(timer: HostTimer) -> float:
    """TFLOP/s of NumPy's float32 product of the largest square matrices that take at most half a second."""
    n, rate = 128, 0.0
    while True:
        rng = np.random.default_rng(n)
        a, b = (rng.standard_normal((n, n), np.float32) for _ in range(2))
        out = np.empty_like(a)
        timing = timer.hot(lambda a=a, b=b, out=out: np.matmul(a, b, out=out), Budget(samples=5, seconds=0.5))
        rate = max(rate, 2 * n**3 / (timing.min_ms * 1e9))
        if n >= LARGEST_MATRIX or 8 * timing.min_ms > MATRIX_MS:
            return rate
        n *= 2


def _host_convolution(ops: ModuleType, timer: HostTimer) -> float:
    """TFLOP/s of a 3x3 convolution of 128 channels on 28x28 pixels, two images for each thread."""
    rng, images, size, channels = np.random.default_rng(0), 2 * _threads(), 28, 128
    x = rng.standard_normal((images, size, size, channels), np.float32)
    w = rng.standard_normal((channels, 3, 3, channels), np.float32)
    out = np.empty_like(x)
    geometry = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    timing = timer.hot(lambda: ops.conv2d(x, w, **geometry, out=out), Budget(samples=9, seconds=0.5))
    return 2 * out.size * 9 * channels / (timing.min_ms * 1e9)


# -- in words ---------------------------------------------------------------------------------------------------------

_RATES = (
    ("copy, read and written", "copy_gb_per_s"),
    ("copy within the L2 cache", "l2_gb_per_s"),
    ("host to device", "host_to_device_gb_per_s"),
    ("device to host", "device_to_host_gb_per_s"),
    ("both ways at once", "both_ways_gb_per_s"),
)


def describe(record: Record) -> list[tuple[str, str, str]]:
    """Rows of a table: what was measured, the figure with its unit, and how; without what the device does not have."""
    rows = [(what, f"{record[key]:,.1f} GB/s", "") for what, key in _RATES if record[key] is not None]
    for name, rate in record["matrix_tflops"].items():
        if rate is not None:
            rows.append((f"matrix product, {name}", _tflops(rate), record["matrix_by"][name]))
    for name, rate in record["vector_tflops"].items():
        if rate is not None:
            rows.append((f"vector units, {name}", _tflops(rate), ""))
    messages = record["all_reduce"]
    if messages is not None:
        how = f"{messages['engine']}, {messages['ranks']} ranks"
        rows.append(("all-reduce, bus bandwidth", f"{messages['bus_gb_per_s']:,.1f} GB/s", how))
        rows.append(("all-reduce, latency", f"{messages['latency_us']:,.1f} us", how))
    return rows


def _tflops(rate: float) -> str:
    return f"{rate:,.1f} TFLOP/s" if rate >= 1 else f"{1e3 * rate:,.1f} GFLOP/s"
