"""The result tables of README.md, made from benchmarks/results/<machine>/*.json.

python benchmarks/report.py            rewrite the tables
python benchmarks/report.py --check    exit 1 when README.md does not show what the files say
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- results: made by benchmarks/report.py -->", "<!-- end of results -->"

Row = dict[str, Any]


def load(machine: str, benchmark: str) -> list[dict[str, Any]]:
    """The result files of a machine whose names begin with ``benchmark``."""
    return [json.loads(path.read_text()) for path in sorted((RESULTS / machine).glob(f"{benchmark}*.json"))]


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, first column to the left."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _machine(file: dict[str, Any]) -> str:
    """In a word: the GPU, or how many cores."""
    machine = file["machine"]
    return machine.get("gpu") or f"CPU, {machine.get('cores', 2)} cores"


def training() -> str:
    """Whole steps beside PyTorch, worst ratio first."""
    found = [
        (row["ratio_to_best_peer"], _machine(file), row)
        for machine in sorted(path.name for path in RESULTS.iterdir())
        for file in load(machine, "bench_train")
        for row in file["rows"]
    ]
    rows = []
    for ratio, machine, row in sorted(found, key=lambda item: item[0]):
        peer, ms = min(row["peers"].items(), key=lambda item: item[1])
        figures = [f"{row['ms']:.1f}", f"{ms:.1f} ({peer})", f"{ratio:.2f}"]
        rows.append([row["case"], machine, row["dtype"], *figures])
    return table(["training step", "machine", "dtype", "minidl ms", "PyTorch ms", "speed against PyTorch"], rows)


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
    return table(head, [line for _, line in lines])


def convolutions() -> str:
    """Geometric mean over layers of the library's time (cuDNN, oneDNN) over ours."""
    groups: dict[tuple[str, ...], list[float]] = {}
    for machine in sorted(path.name for path in RESULTS.iterdir()):
        for file in load(machine, "bench_conv"):
            for row in file["rows"]:
                key = row["case"].split()[0], _machine(file), row["dtype"], row["pass"]
                groups.setdefault(key, []).append(min(row["peers"].values()) / row["ms"])
    lines = sorted((statistics.geometric_mean(ratios), *key, min(ratios)) for key, ratios in groups.items())
    rows = [[*key, f"{mean:.2f}", f"{worst:.2f}"] for mean, *key, worst in lines]
    if not rows:
        return ""
    head = ["convolutions of", "machine", "dtype", "pass", "speed against cuDNN or oneDNN, mean", "worst layer"]
    return table(head, rows)


def learning() -> str:
    """Networks trained through the whole path."""
    rows = []
    for machine in sorted(path.name for path in RESULTS.iterdir()):
        for file in load(machine, "bench_learning"):
            for row in file["rows"]:
                losses = row["losses_by_tenth"]
                what = [row["case"], machine, str(row["ranks"]), row["dtype"], str(row["steps"])]
                rows.append([*what, f"{losses[0]:.3f} → {losses[-1]:.4f}", f"{row['test_accuracy']:.3f}"])
    head = ["network", "machine", "ranks", "dtype", "steps", "loss, first → last tenth", "test accuracy"]
    return table(head, rows)


def text() -> str:
    """The whole generated part."""
    return "\n\n".join(part for part in (training(), convolutions(), operations(), learning()) if part)


def rewritten(readme: str) -> str:
    """``readme`` with its generated part made anew."""
    before, _, rest = readme.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"README.md lacks the marks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{text()}\n\n{END}{after}"


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--check", action="store_true", help="only compare")
    a = p.parse_args()
    old = README.read_text()
    new = rewritten(old)
    if a.check:
        print("README.md is up to date" if new == old else "README.md differs: run python benchmarks/report.py")
        return int(new != old)
    README.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
