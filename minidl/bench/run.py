"""From a setup to the content of a result file; every function here is a collective where ranks are joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from types import ModuleType
from typing import Any

from minidl import backend
from minidl.bench import layers, network, warm
from minidl.bench.isolated import Case, cases
from minidl.bench.launches import absorbed, launches
from minidl.bench.rows import Table, network_rows
from minidl.bench.setup import Setup
from minidl.bench.step import TrainingStep
from minidl.dist.communicator import Communicator
from minidl.fusion import fuse
from minidl.precision import Precision, precision_on
from minidl.precision import precision as parse_precision
from minidl.profile import roofline
from minidl.profile.all_reduce import timed
from minidl.profile.energy import Energy, Meter, clock_warnings
from minidl.profile.results import Row, result
from minidl.summary import SavedBytes

CONVENTIONS = (
    "FLOP: 2 per multiply-add, whole batch of one rank. MB and GB/s: 10^6 and 10^9 bytes; bytes are the fewest a pass "
    "must move. ms: median; replayed from a CUDA graph with operands out of cache on a GPU, cold on the CPU; of the "
    "slowest rank."
)
_LEAST_ACCOUNTED = {"cuda": 0.95, "cpu": 0.90}
_BEYOND = 1.15  # of its roof a pass cannot run; ceilings are measured to a few percent
_OUT_OF_CACHE = ("replayed", "cold")  # within a step operands may still be in the cache, and beat memory's roof
_STARTED = datetime.now(UTC).isoformat(timespec="seconds")  # as dates of ceilings are written

Progress = Callable[[str], None]


def bench_network(
    setup: Setup,
    comm: Communicator,
    ceilings: dict[str, Any] | None,
    *,
    isolated: bool = True,
    options: layers.Options | None = None,
    seconds: float = 3.0,
    capture: bool = True,
    energy: Energy | None = None,
    group_bytes: int | None = None,
    progress: Progress = lambda what: None,
    step: TrainingStep | None = None,
) -> dict[str, Any]:
    """Everything about one network.

    Args:
        isolated: also time each pass of each layer alone.
        seconds, capture, energy: see `minidl.bench.network.measure`.
        group_bytes: neighbouring layers share a message until it holds so many; None: as `Model` takes it.
        step: of the same network, precision and device, in other batches (`new_step`): weights take long to draw.

    Raises:
        ValueError: for a model, size or precision that cannot be.
    """
    ops, precision = _mode(setup)
    graph = setup.graph()
    found = cases(graph, setup.batch)
    meter = Meter(ops)
    clocks = meter.state()
    if ops.name == "cuda":
        progress("compiling kernels")
        for fusion in dict.fromkeys(["none"] * isolated + [setup.fusion]):  # layers alone are not fused
            warm.compile_for_ranks(setup.graph(), setup.batch, setup.precision, fusion, comm)
    alone: Sequence[Row] = ()
    if isolated:
        alone = layers.measure(
            found, setup.title, ops=ops, precision=precision, comm=comm, options=options, progress=progress
        )
    if step is None:
        step = new_step(setup, comm, group_bytes)
    step.resize(setup.batch)
    plan = fuse(step.model, setup.fusion, batch=setup.batch)
    times = network.measure(step, seconds=seconds, capture=capture, energy=energy, progress=progress)
    saved = dict(step.model.store.by_layer)
    kernels = launches(step)
    progress("all-reduces")
    table = Table(
        setup.title, step, setup.batch, found, alone, times, saved, ceilings, lambda nbytes: timed(ops, comm, nbytes),
        plan.sites, kernels, absorbed(step.model.graph, plan, kernels),
    )  # fmt: skip
    rows = network_rows(table)
    content = _content("layers" if isolated else "model", rows, setup.record(), ceilings)
    content["setup"] |= {"group_bytes": step.model.arena.group_bytes, "parameters": step.model.num_parameters}
    content["step"] = step_record(times, setup.batch, setup.ranks)
    content["warnings"] = [*times.warnings, *clock_warnings(clocks, meter.state()), *_closure(content["step"], setup)]
    content["warnings"] += beyond_roof(rows, ceilings)
    return content | {"spans": times.spans, "memory": times.memory}


def new_step(setup: Setup, comm: Communicator, group_bytes: int | None = None) -> TrainingStep:
    """A step of one sample, which `bench_network` resizes; raises as that does."""
    _mode(setup)
    return TrainingStep(
        setup.graph(), batch=1, device=setup.device, precision=setup.precision, comm=comm, store=SavedBytes(),
        group_bytes=group_bytes,
    )  # fmt: skip


def _mode(setup: Setup) -> tuple[ModuleType, Precision]:
    ops = backend.open_device(setup.device)
    return ops, precision_on(ops.name, setup.precision, "", "--precision")


def bench_layer(
    case: Case,
    text: str,
    setup: dict[str, Any],
    comm: Communicator,
    ceilings: dict[str, Any] | None,
    *,
    options: layers.Options | None = None,
    progress: Progress = lambda what: None,
) -> dict[str, Any]:
    """Everything about one layer by itself; between ranks also the all-reduce of its gradients."""
    ops, precision = backend.open_device(setup["device"]), parse_precision(setup["precision"])
    title = f"{text}/{'+'.join('x'.join(map(str, shape)) for shape in case.shapes)}"
    meter = Meter(ops)
    clocks = meter.state()
    rows = layers.measure([case], title, ops=ops, precision=precision, comm=comm, options=options, progress=progress)
    for row in rows:
        roofline.fill(row, ceilings, matrix=any(spec.product for spec in case.layer.specs))
    if comm.size > 1 and case.layer.specs:
        rows.append(_message(case, title, rows, ops, precision, comm, ceilings))
    content = _content("layers", rows, setup | {"layer": text, "batch": case.shapes[0][0]}, ceilings)
    warnings = [*clock_warnings(clocks, meter.state()), *beyond_roof(rows, ceilings)]
    return content | {"step": {}, "warnings": warnings, "spans": [], "memory": []}


def merged(contents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One content of several networks' (same machine, same command); each one's setup and step stand in ``points``.

    Samples of single rows are left out, whose medians and spreads stay: they would be nine tenths of a file.
    """
    first = contents[0]
    points = [
        {"case": c["rows"][0]["case"], **{key: c[key] for key in ("setup", "step", "warnings")}} for c in contents
    ]
    rows = [
        row | {"timings": {way: record and record | {"samples_ms": []} for way, record in row["timings"].items()}}
        for content in contents
        for row in content["rows"]
    ]
    common = {key: first[key] for key in ("ceilings", "conventions")}
    warnings = [f"{p['case']} {p['setup']['precision']}: {text}" for p in points for text in p["warnings"]]
    return result(first["benchmark"], rows, first["machine"], **common, points=points, warnings=warnings)


def _message(
    case: Case, title: str, rows: Sequence[Row], ops: Any, precision: Any, comm: Communicator, ceilings: Any
) -> Row:
    nbytes = 4 * rows[0]["parameters"]
    timing = timed(ops, comm, nbytes)
    row = layers.empty_row(title, case.layer.name, "all_reduce", precision, ops.name, comm.size)
    wire = roofline.wire_bytes(nbytes, comm.size)
    flop = sum(r["flop"] for r in rows)
    row |= {key: rows[0][key] for key in ("type", "index", "input_shapes", "output_shape", "parameters")}
    row |= {"ms": timing.ms, "spread": timing.spread, "timing": "hot", "wire_bytes": wire}
    row["communication_intensity"] = roofline.communication_intensity(flop, wire)
    row["timings"]["hot"] = timing.record()
    roofline.fill(row, ceilings, matrix=False)
    return row


def _content(benchmark: str, rows: Sequence[Row], setup: dict[str, Any], ceilings: Any) -> dict[str, Any]:
    return result(benchmark, rows, setup=setup, ceilings=ceilings, conventions=CONVENTIONS)


def step_record(times: network.NetworkTimes, batch: int, ranks: int) -> dict[str, Any]:
    """The whole step: all ways, what the spans account for and cost, how much communication shows."""
    main = times.main
    exposed = main.plain.ms - main.compute_only.ms if main.compute_only is not None else 0.0
    kinds = {"eager": times.eager, "graph": times.captured}
    record: dict[str, Any] = {}
    for name, kind in kinds.items():
        record[name] = kind.plain.record() if kind is not None else None
        record[f"{name}_compute_only"] = kind.compute_only.record() if kind and kind.compute_only else None
        record[f"{name}_accounted"] = kind.accounted if kind is not None else None
        record[f"{name}_profiling_overhead"] = kind.watched.ms / kind.plain.ms - 1 if kind is not None else None
    record["mark_ms"] = main.mark_ms
    record["images_per_s"] = batch * ranks / main.plain.ms * 1e3
    return record | {"exposed_ms": exposed, "rank_ms": main.ranks, "energy_mj": times.energy_mj}


def _closure(step: dict[str, Any], setup: Setup) -> list[str]:
    shares = {name: step[f"{name}_accounted"] for name in ("eager", "graph")}
    return [
        f"the layers account for only {share:.1%} of the {name} step; the rest is launching and waiting"
        for name, share in shares.items()
        if share is not None and share < _LEAST_ACCOUNTED[setup.device]
    ]


def beyond_roof(rows: Sequence[Row], ceilings: dict[str, Any] | None) -> list[str]:
    """A warning where passes beat a roof that they cannot: then the ceilings are too low. Of those within eager steps
    the compute-bound count, which no cache explains.
    """

    def told(row: Row) -> bool:
        return row["timing"] in _OUT_OF_CACHE or (row["timing"] == "step" and row["bound"] == "compute")

    beyond = [row for row in rows if told(row) and (row["roof_share"] or 0.0) > _BEYOND]
    if not beyond:
        return []
    most = max(beyond, key=lambda row: row["roof_share"])
    text = (
        f"passes beat the roof: {len(beyond)}, most of all {most['layer']} {most['pass']} by "
        f"{most['roof_share'] - 1:.0%}; the ceilings are too low, perhaps since others used the machine meanwhile"
    )
    just_now = ((ceilings or {}).get("date") or "") >= _STARTED
    return [text if just_now else f"{text}; --remeasure measures them again"]
