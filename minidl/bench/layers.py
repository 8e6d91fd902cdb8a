"""Each pass of each layer, alone: replayed, cold and hot; on all ranks at once, of which the slowest counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from statistics import median
from types import ModuleType
from typing import Any

from minidl import checks
from minidl.bench.isolated import Case, Passes
from minidl.dist.communicator import SOLO, Communicator
from minidl.precision import Precision
from minidl.profile.energy import Energy
from minidl.profile.results import Row
from minidl.profile.timing import Budget, Timer, Timing, timer

ISOLATED = ("replayed", "cold", "hot")
SAMPLES = 25
_LEAST_MEMORY = 1 << 30
_KERNEL_RUNS = 7

_REST = 2.0  # an H200 draws some 800 W in products: a third of that, and what it draws idle, is below its limit

Baseline = Callable[[Case, Precision, str, int], dict[str, float | None]]


def budget_on(device: str, samples: int = SAMPLES) -> Budget:
    """How long each pass is timed alone, ours and a peer's."""
    if device == "cuda":
        return Budget(samples=samples, seconds=0.25, least=5, sample_ms=1.0, rest=_REST)
    return Budget(samples=samples, seconds=0.25, least=7)


@dataclass(frozen=True)
class Options:
    """What to measure beside the time.

    Attributes:
        ways: of `ISOLATED`; the first that the device knows is the row's main figure.
        budget: of each timing; default: `budget_on` the device.
        kernels: time the kernels of each pass one by one; their names are noted anyway.
        energy: of each pass, on a GPU.
        peers: baselines by name, each giving milliseconds by pass.
    """

    ways: Sequence[str] = ISOLATED
    budget: Budget | None = None
    kernels: bool = False
    energy: Energy | None = None
    peers: dict[str, Baseline] = field(default_factory=dict)


def require_ways(ways: Sequence[str], known: Sequence[str]) -> None:
    """Refuse ways of timing of which none is ``known``: there would be no time at all."""
    if not set(ways) & set(known):
        raise checks.bad_value("", "--ways", f"{' or '.join(known)} on this device", " ".join(ways))


def empty_row(case: str, layer: str, pass_name: str, precision: Precision, device: str, ranks: int) -> Row:
    """A row in which nothing is known yet."""
    unknown = (
        "type", "index", "input_shapes", "output_shape", "parameters", "ms", "spread", "timing", "flop", "bytes",
        "intensity", "floor_ms", "bound", "roof_share", "tflops", "gb_per_s", "saved_bytes", "wire_bytes",
        "communication_intensity", "transfer_ms", "wait_ms", "exposed_ms", "bus_gb_per_s", "rank_ms", "slowest_rank",
        "kernels", "plan", "in", "energy_mj",
    )  # fmt: skip
    named = {
        "case": case, "layer": layer, "pass": pass_name, "dtype": precision.name, "arm": "minidl", "device": device,
        "ranks": ranks,
    }  # fmt: skip
    timings = dict.fromkeys((*ISOLATED, "step", "graph_step"))
    return named | dict.fromkeys(unknown) | {"timings": timings, "peers": {}}


def measure(
    found: Sequence[Case],
    title: str,
    *,
    ops: ModuleType,
    precision: Precision,
    comm: Communicator = SOLO,
    options: Options | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> list[Row]:
    """One row for each pass of each case; equal cases are measured once.

    Args:
        found: the same on all ranks; none of the layers belongs to a model.
        title: the rows' case.
        comm: ranks that measure at the same time. The row's times are the slowest rank's.
        progress: told the name of each layer before it is measured.

    Raises:
        ValueError: for ways of which the device knows none.
    """
    options = options or Options()
    require_ways(options.ways, ISOLATED if ops.name == "cuda" else ("cold", "hot"))
    clock = timer(ops)
    known: dict[tuple, dict[str, Row]] = {}
    rows = []
    for case in found:
        progress(case.layer.name)
        if case.key not in known:
            known[case.key] = _joined(_measured(case, title, ops, precision, clock, comm.size, options), comm)
        for row in known[case.key].values():
            own = {"layer": case.layer.name, "index": case.index}
            rows.append(row | own | {key: dict(row[key]) for key in ("timings", "peers")})
    return rows


def _measured(
    case: Case, title: str, ops: ModuleType, precision: Precision, clock: Timer, ranks: int, options: Options
) -> dict[str, Row]:
    """The rows of one case on this rank. A copy of the layer works, which goes with all its operands: the memory of
    the steps that are measured later is to be theirs alone.
    """
    case = replace(case, layer=copy(case.layer))
    passes = Passes(case, ops, precision, clock, _free_memory(ops))
    itemsize = precision.storage.itemsize
    peers = {name: peer(case, precision, ops.name, len(passes.x)) for name, peer in options.peers.items()}
    rows = {}
    for pass_name, calls in passes.calls().items():
        row = empty_row(title, case.layer.name, pass_name, precision, ops.name, ranks)
        cost = case.cost(pass_name, itemsize)
        row |= case.facts | {
            "flop": cost.flop,
            "bytes": cost.bytes,
            "kernels": kernel_rows(ops, calls[0], timed=options.kernels),
            "peers": {name: times[pass_name] for name, times in peers.items() if times.get(pass_name) is not None},
        }
        for way in options.ways:
            timing = _timed(clock, way, calls, options.budget or budget_on(ops.name))
            if timing is not None:
                row["timings"][way] = timing.record()
                row["timing"] = row["timing"] or way
        if options.energy is not None and ops.name == "cuda":
            with clock.captured(calls) as (launch, _):
                row["energy_mj"] = options.energy(launch, len(calls))
        rows[pass_name] = row
    _release(ops)
    return rows


def _timed(clock: Timer, way: str, calls: Sequence[Callable[[], Any]], budget: Budget) -> Timing | None:
    return clock.replayed(calls, budget) if way == "replayed" else getattr(clock, way)(calls[0], budget)


def _joined(rows: dict[str, Row], comm: Communicator) -> dict[str, Row]:
    """The rows with the times of the slowest rank, and everybody's main figure."""
    everybody = comm.share({name: (row["timing"], row["timings"]) for name, row in rows.items()})
    for name, row in rows.items():
        way = row["timing"]
        times = [timings[name][1][way]["ms"] for timings in everybody]
        slowest = max(range(comm.size), key=times.__getitem__)
        row["timings"] = everybody[slowest][name][1]
        row |= {"rank_ms": times, "slowest_rank": slowest}
        row |= {key: row["timings"][way][key] for key in ("ms", "spread")}
    return rows


def _free_memory(ops: ModuleType) -> int:
    if ops.name != "cuda":
        return _LEAST_MEMORY
    import cupy

    pool = cupy.get_default_memory_pool()
    return max(cupy.cuda.runtime.memGetInfo()[0] + pool.free_bytes(), _LEAST_MEMORY)


def _release(ops: ModuleType) -> None:
    if ops.name == "cuda":
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()


def kernel_rows(ops: ModuleType, call: Callable[[], Any], *, timed: bool) -> list[dict[str, Any]] | None:
    """The kernels that ``call`` launches, in order, with their milliseconds if ``timed``; None on the CPU.

    A kernel's time here includes what separates it from its neighbours: the sum exceeds the pass by a microsecond or
    two each.
    """
    if ops.name != "cuda":
        return None
    from minidl.cuda.launch import observed
    from minidl.cuda.spin import spin

    names: list[str] = []
    runs: list[list[tuple[Any, Any]]] = []
    for _ in range(_KERNEL_RUNS if timed else 1):
        names.clear()
        runs.append([])
        if timed:
            spin(1e-3)  # the host launches everything meanwhile
        with observed(_watcher(names, runs[-1], timed)):
            call()
    if not timed:
        return [{"name": name, "ms": None} for name in names]
    ops.synchronize()
    times = [[_elapsed(*pair) for pair in run] for run in runs]
    return [{"name": name, "ms": median(run[i] for run in times)} for i, name in enumerate(names)]


def _watcher(names: list[str], marks: list[tuple[Any, Any]], timed: bool) -> Callable[..., Any]:
    @contextmanager
    def watch(stem: str, name: str, defines: Any) -> Iterator[None]:
        names.append(f"{stem}.{name}")
        if not timed:
            yield
            return
        import cupy

        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        yield
        stop.record()
        marks.append((start, stop))

    return watch


def _elapsed(start: Any, stop: Any) -> float:
    import cupy

    return cupy.cuda.get_elapsed_time(start, stop)
