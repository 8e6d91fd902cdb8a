"""The tables of a result file: times, ways of timing, roofline, communication, memory, kernels, peers, networks.

Every view is a pure function of the runs of result files, so that a file shows the same later and elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from minidl import checks
from minidl.profile.cost import PASSES
from minidl.profile.results import Row
from minidl.profile.runs import FAMILIES, NotInFile, Run, runs

_SHORT = {"forward": "fwd", "backward_data": "bwd-data", "backward_weight": "bwd-weight", "all_reduce": "all-reduce"}
_WAYS = ("replayed", "cold", "hot", "step", "graph_step")
_NONE = "-"

Content = Mapping[str, Any]
Table = tuple[str, list[str], list[list[str]]]


def tables(found: Sequence[Run], names: Sequence[str]) -> tuple[list[Table], list[str]]:
    """The tables of `VIEWS` that the runs have, and for each that a run does not have, why.

    Raises:
        ValueError: for an unknown view.
    """
    made: list[Table] = []
    reasons: list[str] = []
    for name in names:
        for members in [found] if name == "networks" else [[run] for run in found]:
            try:
                made.append(networks(members) if name == "networks" else view(members[0], name))
            except NotInFile as error:
                reasons.append(str(error))
    return made, reasons


def default_view(found: Sequence[Run]) -> str:
    """What to show of a file when nothing is asked for: its layers, or a line for each of its networks."""
    return "time" if len(found) == 1 else "networks"


def view(run: Run, name: str) -> Table:
    """(title, column names, cells) of one of `VIEWS`.

    Raises:
        NotInFile: when the run has nothing of it.
        ValueError: for an unknown view.
    """
    if name not in VIEWS:
        raise checks.unknown("view", name, VIEWS)
    return _OF_ONE[name](run) if name in _OF_ONE else networks([run])


# -- cells ------------------------------------------------------------------------------------------------------------


def _ms(value: float | None) -> str:
    if value is None:
        return _NONE
    return f"{value:.4f}" if abs(value) < 1 else f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"


def _number(value: float | None, scale: float = 1.0, digits: int = 1) -> str:
    return _NONE if value is None else f"{value * scale:.{digits}f}"


def _figures(value: float | None, scale: float = 1.0) -> str:
    """Three of them."""
    return _NONE if value is None else f"{value * scale:.3g}" if abs(value * scale) < 100 else f"{value * scale:.0f}"


def _flops(rates: Sequence[float | None]) -> tuple[str, list[str]]:
    """TFLOP/s of several rows under one unit, and that: processors are far below one TFLOP/s."""
    unit, scale = ("GFLOP/s", 1e3) if max((rate or 0 for rate in rates), default=0) < 1 else ("TFLOP/s", 1)
    return unit, [_figures(rate, scale) for rate in rates]


def _share(value: float | None) -> str:
    return _NONE if value is None else f"{value:.1%}"


def _shape(shape: Sequence[int] | None) -> str:
    return _NONE if not shape else "x".join(map(str, shape[1:])) or str(shape[0])


def _time(row: Row | None) -> str:
    """The row's main figure; where a neighbour did the work, its name."""
    if row is None:
        return _NONE
    return f"in {row['in']}" if row.get("in") else _ms(row["ms"])


def _line(run: Run, row: Row) -> str:
    """Layer and pass."""
    layer = run.layer_name((row["case"], row.get("index"), row["layer"]))
    return f"{layer} {_SHORT.get(row['pass'], row['pass'])}"


def _layers(run: Run) -> list[tuple[str, dict[str, Row]]]:
    """The rows of each layer by pass, in network order; loss, optimizer and the whole step are no layers."""
    return [(run.layer_name(key), rows) for key, rows in run.layers() if key[1] is not None]


def _title(run: Run, what: str) -> str:
    device = next((row["device"] for row in run.rows if row.get("device")), None)
    return f"{run.name}{f', {device}' if device else ''}: {what}"


# -- the views --------------------------------------------------------------------------------------------------------


def _times(run: Run) -> Table:
    several = run.ranks > 1
    within = run.way is not None
    columns = ["layer", "type", "output", "fwd", "bwd-data", "bwd-weight", "in step", "share"]
    columns += ["all-reduce", "exposed"] if several else []
    rows = []
    for name, passes in _layers(run):
        first = next(iter(passes.values()))
        total = sum(run.ms(passes[p]) for p in PASSES if p in passes) if within else None
        cells = [name, first["type"] or _NONE, _shape(first["output_shape"])]
        cells += [_time(passes.get(p)) for p in PASSES]
        cells += [_ms(total), _share(total / run.total_ms if within and run.total_ms else None)]
        if several:
            message = passes.get("all_reduce")
            cells += [_time(message), _ms(message["exposed_ms"]) if message else _NONE]
        rows.append(cells)
    rows += [_extra(run, row, len(columns)) for row in run.rows if row.get("index") is None]
    return _title(run, f"milliseconds, {run.how_alone}"), columns, rows


def _extra(run: Run, row: Row, width: int) -> list[str]:
    """Loss, optimizer, unaccounted, the whole step."""
    name = row["pass"] if row["layer"] == "step" else f"{row['layer']} {_SHORT.get(row['pass'], row['pass'])}"
    whole = row["pass"] == "step"
    cells = [name, "", "", "", "", "", _ms(row["ms"] if whole else run.ms(row))]
    cells.append(_NONE if whole or not run.total_ms else _share(run.ms(row) / run.total_ms))
    return cells + [""] * (width - len(cells))


def _ways(run: Run) -> Table:
    columns = ["layer and pass", *(way.replace("_", " ") for way in _WAYS), "spread", "min", "p95", "n"]
    rows = []
    for row in run.rows:
        records = [row["timings"].get(way) for way in _WAYS]
        main = row["timings"].get(row["timing"]) if row["timing"] else None
        cells = [_line(run, row), *(_ms(record["ms"]) if record else _NONE for record in records)]
        cells += [_share(row["spread"]), *(_ms(main[what]) if main else _NONE for what in ("min_ms", "p95_ms"))]
        cells.append(str(main["n"]) if main else _NONE)
        rows.append(cells)
    return _title(run, "milliseconds in each way of timing"), columns, rows


def _roof(run: Run) -> Table:
    found = [row for row in run.rows if (row.get("flop"), row.get("bytes")) != (None, None) and row["pass"] != "step"]
    unit, rates = _flops([row["tflops"] for row in found])
    columns = ["layer and pass", "GFLOP", "MB", "FLOP/B", "ms", unit, "GB/s", "floor ms", "roof", "bound"]
    rows = []
    for row, rate in zip(found, rates, strict=True):
        cells = [_line(run, row), _figures(row["flop"], 1e-9), _figures(row["bytes"], 1e-6)]
        cells += [_number(row["intensity"]), _time(row), rate, _figures(row["gb_per_s"])]
        rows.append([*cells, _ms(row["floor_ms"]), _share(row["roof_share"]), row["bound"] or _NONE])
    return _title(run, "work and share of the measured roofline"), columns, rows


def _communication(run: Run) -> Table:
    columns = [
        "layer",
        "wire kB",
        "FLOP/wire B",
        "message kB",
        "all-reduce",
        "GB/s (bus)",
        "transfer",
        "wait",
        "exposed",
    ]
    rows = []
    for name, passes in _layers(run):
        row = passes.get("all_reduce")
        if row is None:
            continue
        cells = [name, _number(row["wire_bytes"], 1e-3), _number(row["communication_intensity"], 1, 0)]
        if row.get("in"):
            rows.append([*cells, "", _time(row), "", "", "", ""])
            continue
        cells += [_number(row.get("message_bytes"), 1e-3), _time(row), _figures(row["bus_gb_per_s"])]
        rows.append([*cells, *(_ms(row[key]) for key in ("transfer_ms", "wait_ms", "exposed_ms"))])
    if not rows:
        why = "measured on one rank; run it under mpirun -n 2" if run.ranks == 1 else "no layer has gradients"
        raise run.lacks("gradient messages", why)
    return _title(run, "gradient messages, milliseconds"), columns, rows


def _memory(run: Run) -> Table:
    columns = ["layer", "type", "output", "saved MB", "parameters", "energy mJ"]
    rows = []
    for name, passes in _layers(run):
        row = passes.get("forward") or next(iter(passes.values()))
        energies = [p["energy_mj"] for p in passes.values() if p["energy_mj"] is not None]
        cells = [name, row["type"] or _NONE, _shape(row["output_shape"]), _figures(row["saved_bytes"], 1e-6)]
        rows.append([*cells, str(row["parameters"] or 0), _number(sum(energies) if energies else None, 1, 2)])
    return _title(run, "kept for the backward pass, and energy"), columns, rows


def _kernels(run: Run) -> Table:
    columns = ["layer and pass, and its kernels", "ms", "spread"]
    rows = []
    for row in run.rows:
        if row.get("kernels") is None:
            continue
        rows.append([_line(run, row), _time(row), _share(row["spread"])])
        rows += [[f"    {kernel['name']}", _ms(kernel["ms"]), ""] for kernel in row["kernels"]]
    if not rows:
        raise run.lacks("kernels", "none were noted; minidl bench layers notes them on a GPU")
    return _title(run, "kernels"), columns, rows


def _peers(run: Run) -> Table:
    names = list(dict.fromkeys(name for row in run.rows for name in row["peers"]))
    if not names:
        raise run.lacks("peers", "nothing was measured beside it; add --peer torch to minidl bench layers")
    columns = ["layer and pass", "ms", *(f"{name} ms" for name in names), *(f"speed against {name}" for name in names)]
    lines = []
    for name, ms, peers in _beside_peers(run):
        times = [peers.get(peer) for peer in names]
        speeds = [t / ms if t is not None else None for t in times]
        lines.append((min(peers.values()) / ms, [name, _ms(ms), *map(_ms, times), *(_number(s, 1, 2) for s in speeds)]))
    lines.sort(key=lambda line: line[0])
    return _title(run, "beside its peers, slowest against them first"), columns, [cells for _, cells in lines]


def _beside_peers(run: Run) -> Iterator[tuple[str, float, dict[str, float]]]:
    """(layer and pass, our milliseconds, the peers'). Where a peer makes both gradients at once, ours are added up."""
    for name, passes in _layers(run):
        data, weight = passes.get("backward_data"), passes.get("backward_weight")
        joint = bool(data and weight and data["peers"] and not weight["peers"])
        for pass_name in PASSES:
            row = passes.get(pass_name)
            if not row or not row["peers"] or not row["ms"]:
                continue
            both = joint and pass_name == "backward_data"
            what = "bwd, both gradients" if both else _SHORT[pass_name]
            yield f"{name} {what}", row["ms"] + (weight["ms"] if both else 0.0), row["peers"]


def networks(found: Sequence[Run]) -> Table:
    """A line for each network, batch and number of ranks: step, rate, intensity and the share of each kind of work.

    Raises:
        NotInFile: when no run has a step.
    """
    whole = [run for run in found if run.step is not None and run.step.get("flop")]
    if not whole:
        files = ", ".join(dict.fromkeys(run.file for run in found))
        raise NotInFile(f"{files}: no networks: no row of a whole step; run minidl bench model")
    shares = [run.shares() for run in whole]
    names = [name for name in _KINDS if any(abs(share.get(name, 0.0)) >= 5e-4 for share in shares)]
    energy, added = [run.step.get("energy_mj") for run in whole], [run.added for run in whole]
    several = any(more is not None for more in added)
    unit, rates = _flops([1e-9 * run.step["flop"] / run.step["ms"] for run in whole])
    columns = ["network", "batch", "ranks", "dtype", "step ms", *["messages add"] * several, "images/s", unit]
    columns += ["FLOP/B", *["mJ/image"] * any(energy), *names]
    cells = []
    for run, share, millijoules, more, rate in zip(whole, shares, energy, added, rates, strict=True):
        ms, arm = run.step["ms"], "" if run.arm == "minidl" else f", {run.arm}"
        line = [run.model + arm, str(run.rank_batch or _NONE), str(run.ranks), run.dtype, _ms(ms)]
        line += [_share(more)] * several
        line += [_number(run.images_per_s, 1, 0), rate, _number(run.step["intensity"])]
        if any(energy):
            line.append(_number(millijoules / run.batch if millijoules and run.batch else None, 1, 0))
        cells.append(line + [_share(share.get(name, 0.0)) for name in names])
    ways = " or ".join(dict.fromkeys(run.how for run in whole))
    return f"training steps; batch and {unit} of each rank; shares timed {ways}", columns, cells


_KINDS = (*FAMILIES, "other", "loss", "optimizer", "exposed communication", "unaccounted")
_OF_ONE: dict[str, Callable[[Run], Table]] = {
    "time": _times,
    "ways": _ways,
    "roof": _roof,
    "comm": _communication,
    "memory": _memory,
    "kernels": _kernels,
    "peers": _peers,
}
VIEWS = (*_OF_ONE, "networks")
_BETWEEN_RANKS = (
    "wire: bytes that each rank sends, around a ring 2 (n - 1) / n of what is summed; bus: these over transfer. "
    "exposed: for how long computing stood still for messages, which is not part of in step."
)


def footer(content: Content) -> list[str]:
    """What a reader must know beside a table: the whole step of a single network, conventions, warnings."""
    found = runs(content, "")
    lines = _steps(found[0].record) if len(found) == 1 else []
    lines += [content["conventions"]] if content.get("conventions") else []
    lines += [_BETWEEN_RANKS] if any(run.ranks > 1 for run in found) else []
    return lines + [f"warning: {text}" for text in content.get("warnings") or ()]


def _steps(step: Content) -> list[str]:
    lines = []
    for name, what in (("eager", "eager step"), ("graph", "step as a CUDA graph")):
        if not step.get(name):
            continue
        text = f"{what}: {_ms(step[name]['ms'])} ms, spread {step[name]['spread']:.1%}"
        if step.get(f"{name}_compute_only"):
            text += f"; without messages {_ms(step[f'{name}_compute_only']['ms'])} ms"
        if (accounted := step.get(f"{name}_accounted")) is not None:
            text += f"; layers account for {accounted:.1%} of it"
        cost = step.get(f"{name}_profiling_overhead")  # not known of a training run, which times some steps only
        if cost is not None:
            spread = step[name]["spread"]
            text += "; timing them costs "
            text += f"{cost:+.1%}" if cost > spread else f"less than can be told (spread {spread:.1%})"
        if name == "graph" and step.get("mark_ms"):
            text += f", of which their times are free: {1e3 * step['mark_ms']:.1f} us for each mark were taken off"
        lines.append(text)
    if step.get("images_per_s"):
        lines.append(f"{step['images_per_s']:.0f} images/s, all ranks together")
    if step.get("energy_mj"):
        lines.append(f"{1e-3 * step['energy_mj']:.3g} J a step, idle power of the board included")
    return lines
