"""How many bytes of gradients one message should carry on this machine: measured beside compute, and kept.

Small messages start earlier and cost more: a latency each, on a CPU a thread that takes a core from the products, on a
GPU multiprocessors that kernels lack. So 64 layers of equal gradients pass through a backward pass, once for each size
of group, in turn; the least time wins. On a CPU that pass is matrix products, about twice as long as the exchange by
itself; on a GPU convolutions and memory-bound passes in turn, as between them they bear messages differently (large
ones are best beside products, a few megabytes beside the others), replayed as a CUDA graph like a compiled step: a
host that launches such short kernels one by one would set the pace, and messages would seem to cost nothing.
`minidl tune comm` measures, `Model` reads what was kept for this machine, engine and number of ranks. Records are files
in the folder ``grouping`` of `minidl.cache`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from minidl import cache, checks
from minidl.dist import Communicator
from minidl.dist.agree import on_rank_0
from minidl.dist.communicator import by_kernels, capturable, place
from minidl.precision import bfloat16
from minidl.profile import ceilings
from minidl.profile.all_reduce import fit
from minidl.profile.results import write
from minidl.profile.roofline import wire_bytes
from minidl.profile.timing import DeviceTimer

DEFAULT_BYTES = 4 << 20  # where nothing was measured
ON_GPUS = 25 << 20  # the same between GPUs: the best of what was tried on two H200s
LAYERS = 64
LAYER_BYTES = {"cpu": 256 << 10, "cuda": 1 << 20}
SAMPLES = 15
COMPUTE_SHARE = 2.0  # of the exchange's own time, on a CPU
WITHIN = 1.02  # of the best step: among those the smallest group, whose tail is shortest
_MATRIX = 192
_IMAGES, _FILTERS = (128, 56, 56, 64), (64, 3, 3, 64)  # some 100 us on an H200, as in a step of such a batch
_VERSION = 4

Record = dict[str, Any]
Arm = tuple[str, int]  # the kind of compute beside messages of so many bytes
Start = Callable[[], None]


def group_bytes(ops: ModuleType, comm: Communicator) -> int:
    """What was measured for this machine, engine and number of ranks, else what is usual; a collective.

    Where messages wait for passes that bear them (`minidl.messages.neighbourhood.departures`) what is usual was best:
    what runs beside a message is then not what comes next.
    """
    record = kept(ops, comm) if comm.size > 1 and not by_kernels(comm) else None
    if record is None:
        return ON_GPUS if ops.name == "cuda" and comm.size > 1 else DEFAULT_BYTES
    return record["group_bytes"]


def kept(ops: ModuleType, comm: Communicator) -> Record | None:
    """What `tune` kept earlier, if it did; a collective."""
    identity = _identity(ops, comm)
    return on_rank_0(comm, lambda: cache.load(_path(identity), identity))


def tune(ops: ModuleType, comm: Communicator, progress: Callable[[str], None] | None = None) -> tuple[Record, str]:
    """Measure and keep; (the record, where it lies: empty where it could not be written). A collective."""
    record, path = measure(ops, comm, progress), ""
    if comm.rank == 0:
        with suppress(OSError):  # a home that cannot be written
            write(_path(record), record)
            path = str(_path(record))
    return record, comm.share(path)[0]


def measure(ops: ModuleType, comm: Communicator, progress: Callable[[str], None] | None = None) -> Record:
    """Time every size of group beside compute: some ten seconds; a collective.

    Returns:
        The record: group_bytes, latency_us and bus_gb_per_s (an alpha-beta model of the messages alone), compute_ms of
        the backward pass without messages, and ``groups``: for each size bytes, step_ms, exposed_ms, alone_ms (the
        exchange without compute). On a GPU ``beside``: groups beside products and beside memory-bound passes alone. The
        slowest rank's times, of several samples the fastest.

    Raises:
        ValueError: on one rank alone.
    """
    if comm.size < 2:
        raise checks.bad_value("tune comm", "ranks", "at least 2", comm.size, "start it with mpiexec or minidl.launch")
    layer_bytes = LAYER_BYTES[ops.name]
    arena = place(comm, ops.zeros((LAYERS * layer_bytes // 4,), np.dtype(np.float32)))
    sizes = [layer_bytes << i for i in range(LAYERS.bit_length())]
    step, once = partial(_backward, comm, arena), partial(_timed, ops, comm)
    exchange = _slowest(comm, [once(partial(step, sizes[-1], None)) for _ in range(3)])
    computes = _products(comm, COMPUTE_SHARE * exchange / LAYERS) if ops.name == "cpu" else _kernels(ops)
    arms = {(kind, size): partial(step, size, computes[kind]) for kind in computes for size in (0, *sizes)}
    arms |= {("", size): partial(step, size, None) for size in sizes}
    times: dict[Arm, list[float]] = {arm: [] for arm in arms}
    with ExitStack() as graphs:
        if ops.name == "cuda" and capturable(comm):
            arms = _replays(arms, graphs)
        for sample in range(SAMPLES):
            if progress is not None and comm.rank == 0:
                progress(f"group sizes, sample {sample + 1} of {SAMPLES}")
            for arm, start in arms.items():
                times[arm].append(once(start))
    best = {arm: _slowest(comm, taken) for arm, taken in times.items()}
    whole, *apart = _groups(best, computes, sizes)
    messages = [(wire_bytes(size, comm.size), best["", size] * size / arena.nbytes) for size in sizes]
    latency_us, bus_gb_per_s = fit(messages)
    figures = {"latency_us": latency_us, "bus_gb_per_s": bus_gb_per_s, "compute_ms": best[next(iter(computes)), 0]}
    figures |= {"beside": dict(zip(list(computes)[1:], apart, strict=True))}
    head = {"date": datetime.now(UTC).isoformat(timespec="seconds")}
    return _identity(ops, comm) | head | {"group_bytes": choose(whole), "groups": whole} | figures


def _groups(best: Record, kinds: Iterable[str], sizes: Sequence[int]) -> Iterator[list[Record]]:
    """What was measured for each size of group, beside each kind of compute."""
    for kind in kinds:
        yield [
            {
                "bytes": size, "step_ms": best[kind, size], "exposed_ms": best[kind, size] - best[kind, 0],
                "alone_ms": best["", size],
            }
            for size in sizes
        ]  # fmt: skip


def choose(groups: Sequence[Record]) -> int:
    """The smallest group whose step is about as fast as the fastest."""
    limit = WITHIN * min(group["step_ms"] for group in groups)
    return min(group["bytes"] for group in groups if group["step_ms"] <= limit)


def disturbed(record: Record) -> bool:
    """Whether messages seem to make a step faster: then others used the machine, and the choice says little."""
    return any(group["exposed_ms"] < -0.05 * record["compute_ms"] for group in record["groups"])


def _timed(ops: ModuleType, comm: Communicator, start: Start) -> float:
    """Milliseconds from when all ranks begin until what ``start`` starts has ended."""
    ops.synchronize()
    comm.barrier()
    started = time.perf_counter()
    start()
    ops.synchronize()
    return (time.perf_counter() - started) * 1e3


def _backward(comm: Communicator, arena: Any, size: int, compute: Start | None) -> None:
    """A backward pass whose layers share messages of ``size`` bytes; 0: no messages."""
    works, sent = [], 0
    for layer in range(LAYERS):
        if compute is not None:
            compute()
        end = (layer + 1) * arena.nbytes // LAYERS
        if size and end - sent >= size:
            works.append(comm.start_all_reduce(arena[sent // 4 : end // 4]))
            sent = end
    for work in works:
        work.wait()


def _replays(arms: Mapping[Arm, Start], graphs: ExitStack) -> dict[Arm, Start]:
    """What launches each pass as a CUDA graph, on the current stream as long as ``graphs`` is open; a collective."""
    from minidl.cuda.capture import Room

    timer, room = DeviceTimer(), Room()
    return {arm: graphs.enter_context(timer.captured([work], room))[0] for arm, work in arms.items()}


def _kernels(ops: ModuleType) -> dict[str, Start]:
    """A convolution, which the products bound, and a pass that the memory bounds: both in turn, and each alone."""
    x, w = (
        ops.from_host(np.random.default_rng(0).random(shape, np.float32), bfloat16) for shape in (_IMAGES, _FILTERS)
    )

    def products() -> None:
        ops.conv2d(x, w, stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1)

    def both() -> None:
        ops.relu(ops.conv2d(x, w, stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1))

    return {"both": both, "products": products, "memory": lambda: ops.relu(x)}


def _products(comm: Communicator, milliseconds: float) -> dict[str, Start]:
    """Matrix products of about so long, equally many on all ranks."""
    a = np.random.default_rng(0).standard_normal((_MATRIX, _MATRIX), np.float32)
    out = np.empty_like(a)
    times = []
    for _ in range(10):
        started = time.perf_counter()
        np.matmul(a, a, out=out)
        times.append((time.perf_counter() - started) * 1e3)
    count = max(1, math.ceil(milliseconds / max(comm.share(statistics.median(times)))))

    def compute() -> None:
        for _ in range(count):
            np.matmul(a, a, out=out)

    return {"both": compute}


def _slowest(comm: Communicator, own: Sequence[float]) -> float:
    """Of each sample the slowest rank, of those the fastest: others share the machine."""
    return min(max(times) for times in zip(*comm.share(list(own)), strict=True))


def _identity(ops: ModuleType, comm: Communicator) -> Record:
    engine = "links" if by_kernels(comm) else comm.name  # what is best for the one is not for NCCL
    return ceilings.identity(ops, comm) | {"version": _VERSION, "engine": engine}


def _path(identity: Record) -> Path:
    return ceilings.cache_path(identity, "grouping", identity["engine"])
