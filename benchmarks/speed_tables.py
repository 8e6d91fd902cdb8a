"""The tables of README.md, made from files of results for report.py, and the commands behind them."""

from __future__ import annotations

import statistics

from result_files import RESULTS, Row, load, machine_of, machines

from minidl.profile.results import load as results_of
from minidl.profile.tables import markdown

__all__ = ["README_TABLES", "commands", "results"]


def training() -> str:
    """Whole steps beside PyTorch, worst ratio first."""
    found = [
        (row["ratio_to_best_peer"], machine_of(file), row)
        for machine in machines()
        for file in load(machine, "bench_train")
        for row in file["rows"]
        if row["peers"]
    ]
    rows = []
    for ratio, machine, row in sorted(found, key=lambda item: item[0]):
        peer, ms = min(row["peers"].items(), key=lambda item: item[1])
        figures = [f"{row['ms']:.1f}", f"{ms:.1f} ({peer})", f"{ratio:.2f}"]
        rows.append([row["case"], machine, row["dtype"], row["arm"], *figures])
    return markdown(
        ["training step", "machine", "dtype", "way", "minidl ms", "PyTorch ms", "speed against PyTorch"], rows
    )


def operations() -> str:
    """Memory-bound operations on large tensors: share of copy bandwidth, and against PyTorch's own."""
    rows: list[Row] = [row for file in load("h200", "bench_ops") for row in file["rows"]]
    if not rows:
        return ""
    families: dict[str, list[Row]] = {}
    for row in rows:
        if row["floor_ms"] >= 0.008:  # smaller ones measure launches
            families.setdefault(row["case"].split("/")[0], []).append(row)
    lines = []
    for name, members in families.items():
        shares = [row["floor_ms"] / row["ms"] for row in members]
        against = [min(row["peers"].values()) / row["ms"] for row in members if row["peers"]]
        speed = f"{statistics.median(against):.2f}" if against else ""
        lines.append((min(shares), [f"`{name}`", f"{min(shares):.0%}", f"{statistics.median(shares):.0%}", speed]))
    lines.sort(key=lambda line: line[0])
    head = ["memory-bound operation, H200", "worst share of copy", "median share", "speed against PyTorch's"]
    return markdown(head, [line for _, line in lines])


def convolutions() -> str:
    """Geometric mean over layers of the library's time (cuDNN, oneDNN) over ours."""
    groups: dict[tuple[str, ...], list[float]] = {}
    for machine in machines():
        for file in load(machine, "bench_conv"):
            for row in file["rows"]:
                key = row["case"].split()[0], machine_of(file), row["dtype"], row["pass"]
                groups.setdefault(key, []).append(min(row["peers"].values()) / row["ms"])
    lines = sorted((statistics.geometric_mean(ratios), *key, min(ratios)) for key, ratios in groups.items())
    rows = [[*key, f"{mean:.2f}", f"{worst:.2f}"] for mean, *key, worst in lines]
    if not rows:
        return ""
    head = ["convolutions of", "machine", "dtype", "pass", "speed against cuDNN or oneDNN, mean", "worst layer"]
    return markdown(head, rows)


def learning() -> str:
    """Networks trained through the whole path."""
    rows = []
    for machine in machines():
        for file in load(machine, "bench_learning"):
            for row in file["rows"]:
                losses = row["losses_by_tenth"]
                what = [row["case"], machine, str(row["ranks"]), row["dtype"], str(row["steps"])]
                rows.append([*what, f"{losses[0]:.3f} → {losses[-1]:.4f}", f"{row['test_accuracy']:.3f}"])
    head = ["network", "machine", "ranks", "dtype", "steps", "loss, first → last tenth", "test accuracy"]
    return markdown(head, rows)


README_TABLES = {
    "bench_train": training,
    "bench_conv": convolutions,
    "bench_ops": operations,
    "bench_learning": learning,
}


def results() -> str:
    """The tables of README.md."""
    return "\n\n".join(part for make in README_TABLES.values() if (part := make()))


def commands() -> str:
    """What made each file of results that a table of README.md shows."""
    lines = []
    for path in sorted(RESULTS.glob("*/*.json*")):
        name = next((name for name in README_TABLES if path.stem.startswith(name)), None)
        if name is not None and (file := results_of(path))["benchmark"] == name:
            head = README_TABLES[name]().splitlines()[0].split("|")[1].strip()
            lines.append([f"`{path.relative_to(RESULTS)}`", head, f"`{file['command']}`"])
    return markdown(["file of results", "table of README.md", "command"], lines)
