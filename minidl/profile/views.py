"""The tables of a per-layer result: times, ways of timing, roofline, communication, memory, kernels.

Every view is a pure function of a result file's content, so that a file shows the same later and elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from minidl import checks
from minidl.profile.results import Row

__all__ = ["VIEWS", "footer", "view"]

PASSES = ("forward", "backward_data", "backward_weight")
_SHORT = {"forward": "fwd", "backward_data": "bwd-data", "backward_weight": "bwd-weight", "all_reduce": "all-reduce"}
_WAYS = ("replayed", "cold", "hot", "step", "graph_step")
_NONE = "-"

Content = Mapping[str, Any]
Table = tuple[str, list[str], list[list[str]]]


def view(content: Content, name: str) -> Table:
    """(title, column names, cells) of one of `VIEWS`.

    Raises:
        ValueError: for an unknown view.
    """
    if name not in VIEWS:
        raise checks.unknown("view", name, VIEWS)
    return VIEWS[name](content)


# -- cells ------------------------------------------------------------------------------------------------------------


def _ms(value: float | None) -> str:
    if value is None:
        return _NONE
    return f"{value:.4f}" if abs(value) < 1 else f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"


def _number(value: float | None, scale: float = 1.0, digits: int = 1) -> str:
    return _NONE if value is None else f"{value * scale:.{digits}f}"


def _share(value: float | None) -> str:
    return _NONE if value is None else f"{value:.1%}"


def _shape(shape: Sequence[int] | None) -> str:
    return _NONE if not shape else "x".join(map(str, shape[1:])) or str(shape[0])


def _time(row: Row | None) -> str:
    """The row's main figure; where a neighbour did the work, its name."""
    if row is None:
        return _NONE
    return f"in {row['in']}" if row.get("in") else _ms(row["ms"])


def _in_step(row: Row) -> float | None:
    """Milliseconds within a step: captured where known, else eager."""
    for way in ("graph_step", "step"):
        if (record := row["timings"].get(way)) is not None:
            return record["ms"]
    return None


def _layers(content: Content) -> list[tuple[str, dict[str, Row]]]:
    """The rows of each layer by pass, in network order; loss, optimizer and the whole step are no layers."""
    found: dict[str, dict[str, Row]] = {}
    for row in content["rows"]:
        if row.get("index") is not None:
            found.setdefault(row["layer"], {})[row["pass"]] = row
    return list(found.items())


def _whole(content: Content) -> float | None:
    """Milliseconds of everything within the step: what the shares are of, so that they add up to one."""
    found = [_in_step(row) for row in content["rows"] if row["pass"] != "step"]
    return sum(ms for ms in found if ms is not None) or None


def _title(content: Content, what: str) -> str:
    setup = content.get("setup", {})
    name = setup.get("layer") or setup.get("model") or content["benchmark"]
    batch = f", batch {setup['batch']}" if setup.get("batch") else ""
    ranks = setup.get("ranks") or 1
    several = f" on each of {ranks} ranks" if ranks > 1 else ""
    return f"{name}{batch}{several}, {setup.get('precision', '')}, {setup.get('device', '')}: {what}"


# -- the views --------------------------------------------------------------------------------------------------------


def _times(content: Content) -> Table:
    several = (content.get("setup", {}).get("ranks") or 1) > 1
    whole = _whole(content)
    columns = ["layer", "type", "output", "fwd", "bwd-data", "bwd-weight", "in step", "share"]
    columns += ["all-reduce", "exposed"] if several else []
    rows = []
    for name, passes in _layers(content):
        first = next(iter(passes.values()))
        within = [_in_step(passes[p]) for p in PASSES if p in passes]
        total = sum(t for t in within if t is not None) if any(t is not None for t in within) else None
        cells = [name, first["type"] or _NONE, _shape(first["output_shape"])]
        cells += [_time(passes.get(p)) for p in PASSES]
        cells += [_ms(total), _share(total / whole if total is not None and whole else None)]
        if several:
            message = passes.get("all_reduce")
            cells += [_time(message), _ms(message["exposed_ms"]) if message else _NONE]
        rows.append(cells)
    rows += [_extra(row, whole, len(columns)) for row in content["rows"] if row.get("index") is None]
    return _title(content, "milliseconds"), columns, rows


def _extra(row: Row, whole: float | None, width: int) -> list[str]:
    """Loss, optimizer, unaccounted, the whole step."""
    within = _in_step(row)
    name = row["pass"] if row["layer"] == "step" else f"{row['layer']} {_SHORT.get(row['pass'], row['pass'])}"
    share = within / whole if within is not None and whole and row["pass"] != "step" else None
    cells = [name, "", "", "", "", "", _ms(within), _share(share)]
    return cells + [""] * (width - len(cells))


def _ways(content: Content) -> Table:
    columns = ["layer and pass", *(way.replace("_", " ") for way in _WAYS), "spread", "p95", "n"]
    rows = []
    for row in content["rows"]:
        records = [row["timings"].get(way) for way in _WAYS]
        main = row["timings"].get(row["timing"]) if row["timing"] else None
        cells = [f"{row['layer']} {_SHORT.get(row['pass'], row['pass'])}"]
        cells += [_ms(record["ms"]) if record else _NONE for record in records]
        cells += [_share(row["spread"]), _ms(main["p95_ms"]) if main else _NONE, str(main["n"]) if main else _NONE]
        rows.append(cells)
    return _title(content, "milliseconds in each way of timing"), columns, rows


def _roof(content: Content) -> Table:
    columns = ["layer and pass", "GFLOP", "MB", "FLOP/B", "ms", "TFLOP/s", "GB/s", "floor ms", "roof", "bound"]
    rows = []
    for row in content["rows"]:
        if row.get("flop") is None and row.get("bytes") is None or row["pass"] == "step":
            continue
        cells = [f"{row['layer']} {_SHORT.get(row['pass'], row['pass'])}", _number(row["flop"], 1e-9, 3)]
        cells += [_number(row["bytes"], 1e-6, 2), _number(row["intensity"]), _time(row), _number(row["tflops"], 1, 2)]
        cells += [
            _number(row["gb_per_s"], 1, 0),
            _ms(row["floor_ms"]),
            _share(row["roof_share"]),
            row["bound"] or _NONE,
        ]
        rows.append(cells)
    return _title(content, "work and share of the measured roofline"), columns, rows


def _communication(content: Content) -> Table:
    columns = [
        "layer",
        "wire MB",
        "FLOP/wire B",
        "all-reduce ms",
        "GB/s (bus)",
        "transfer",
        "wait",
        "exposed",
        "slowest rank",
    ]
    rows = []
    for name, passes in _layers(content):
        row = passes.get("all_reduce")
        if row is None:
            continue
        cells = [name, _number(row["wire_bytes"], 1e-6, 3), _number(row["communication_intensity"], 1, 0), _time(row)]
        cells += [_number(row["bus_gb_per_s"]), _ms(row["transfer_ms"]), _ms(row["wait_ms"]), _ms(row["exposed_ms"])]
        rows.append([*cells, _NONE if row["slowest_rank"] is None else str(row["slowest_rank"])])
    return _title(content, "gradient messages, milliseconds"), columns, rows


def _memory(content: Content) -> Table:
    columns = ["layer", "type", "output", "saved MB", "parameters", "energy mJ"]
    rows = []
    for name, passes in _layers(content):
        row = passes.get("forward") or next(iter(passes.values()))
        energies = [p["energy_mj"] for p in passes.values() if p["energy_mj"] is not None]
        cells = [name, row["type"] or _NONE, _shape(row["output_shape"]), _number(row["saved_bytes"], 1e-6, 2)]
        rows.append([*cells, str(row["parameters"] or 0), _number(sum(energies) if energies else None, 1, 2)])
    return _title(content, "kept for the backward pass, and energy"), columns, rows


def _kernels(content: Content) -> Table:
    columns = ["layer and pass, and its kernels", "ms", "spread"]
    rows = []
    for row in content["rows"]:
        if row.get("kernels") is None:
            continue
        rows.append([f"{row['layer']} {_SHORT.get(row['pass'], row['pass'])}", _time(row), _share(row["spread"])])
        rows += [[f"    {kernel['name']}", _ms(kernel["ms"]), ""] for kernel in row["kernels"]]
    return _title(content, "kernels"), columns, rows


def _peers(content: Content) -> Table:
    names = list(dict.fromkeys(name for row in content["rows"] for name in row["peers"]))
    columns = ["layer and pass", "ms", *(f"{name} ms" for name in names), *(f"speed against {name}" for name in names)]
    lines = []
    for name, ms, peers in _beside_peers(content):
        times = [peers.get(peer) for peer in names]
        speeds = [t / ms if t is not None else None for t in times]
        lines.append((min(peers.values()) / ms, [name, _ms(ms), *map(_ms, times), *(_number(s, 1, 2) for s in speeds)]))
    lines.sort(key=lambda line: line[0])
    return _title(content, "beside its peers, slowest against them first"), columns, [cells for _, cells in lines]


def _beside_peers(content: Content) -> Iterator[tuple[str, float, dict[str, float]]]:
    """(layer and pass, our milliseconds, the peers'). Where a peer makes both gradients at once, ours are added up."""
    for name, passes in _layers(content):
        data, weight = passes.get("backward_data"), passes.get("backward_weight")
        joint = bool(data and weight and data["peers"] and not weight["peers"])
        for pass_name in PASSES:
            row = passes.get(pass_name)
            if not row or not row["peers"] or not row["ms"]:
                continue
            both = joint and pass_name == "backward_data"
            what = "bwd, both gradients" if both else _SHORT[pass_name]
            yield f"{name} {what}", row["ms"] + (weight["ms"] if both else 0.0), row["peers"]


VIEWS: dict[str, Callable[[Content], Table]] = {
    "time": _times,
    "ways": _ways,
    "roof": _roof,
    "comm": _communication,
    "memory": _memory,
    "kernels": _kernels,
    "peers": _peers,
}


def footer(content: Content) -> list[str]:
    """What a reader must know beside a table: conventions, the whole step, warnings."""
    lines = []
    step = content.get("step") or {}
    for name, what in (("eager", "eager step"), ("graph", "step as a CUDA graph")):
        if not step.get(name):
            continue
        text = f"{what}: {_ms(step[name]['ms'])} ms, spread {step[name]['spread']:.1%}"
        if step.get(f"{name}_compute_only"):
            text += f"; without messages {_ms(step[f'{name}_compute_only']['ms'])} ms"
        if step.get(f"{name}_accounted") is not None:  # of a step of ours; a peer's is timed as a whole
            text += f"; layers account for {step[f'{name}_accounted']:.1%} of it"
        cost = step.get(f"{name}_profiling_overhead")  # not known of a training run, which times some steps only
        lines.append(f"{text}; timing them costs {cost:+.1%}" if cost is not None else text)
    if step.get("images_per_s"):
        lines.append(f"{step['images_per_s']:.0f} images/s, all ranks together")
    lines += [content["conventions"]] if content.get("conventions") else []
    return lines + [f"warning: {text}" for text in content.get("warnings") or ()]
