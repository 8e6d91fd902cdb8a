"""Tables of what several ranks do together."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from pages.files import Row, load, machine_of, machines, table

__all__ = ["all_reduces", "scaling", "shared_layers", "sums_of_gpus"]

File = dict[str, Any]

_COLUMNS = ["network, batch of a rank", "ranks", "way", "images/s", "efficiency", "adds ms", "against DDP"]
_DDP = {
    "torch-ddp": "DDP",
    "torch-ddp-graph": "DDP, graph",
    "torch-ddp-compile": "DDP, compiled",
    "torch-ddp-compile-graph": "DDP, compiled, graph",
}


def sums_of_gpus(files: Iterable[File]) -> str:
    """Microseconds of an all-reduce between GPUs of a host: the fastest of our ways beside NCCL, worst ratio first."""
    lines = []
    for file in files:
        sizes: dict[int, list[Row]] = {}
        for row in file["rows"]:
            if "nccl" in row["peers"]:
                sizes.setdefault(row["bytes"], []).append(row)
        for nbytes, rows in sizes.items():
            best = min(rows, key=lambda row: row["ms"])
            nccl = best["peers"]["nccl"]
            figures = [f"{best['ms'] * 1e3:.1f}", best["arm"], f"{nccl * 1e3:.1f}", f"{nccl / best['ms']:.2f}"]
            lines.append((nccl / best["ms"], [f"{best['ranks']}", f"{nbytes >> 10:,}", *figures]))
    lines.sort(key=lambda line: line[0])
    return table(["GPUs", "KiB", "minidl us", "way", "NCCL us", "speed against NCCL"], [line for _, line in lines])


def scaling(files: Iterable[File]) -> str:
    """Training steps on several ranks beside the same without messages, and DDP: run by run, worst efficiency first."""
    runs: dict[tuple[str, int, int], list[Row]] = {}
    for i, file in enumerate(files):
        for row in file["rows"]:
            runs.setdefault((f"{row['case']} {row['dtype']}", row["ranks"], i), []).append(row)
    ordered = sorted(runs.items(), key=lambda run: [_numbers_apart(run[0][0]), *run[0][1:]])
    return table(_COLUMNS, [[case, str(ranks), *cells] for (case, ranks, _), rows in ordered for cells in _run(rows)])


def _numbers_apart(text: str) -> list[tuple[str, int]]:
    """For an order in which batches count as numbers."""
    return [(word, int(part or 0)) for word, part in re.findall(r"(\D+)(\d*)", text)]


def _run(rows: list[Row]) -> list[list[str]]:
    """The arms of one run and DDP's, worst efficiency first."""
    lines = []
    for row in rows:
        best = min(row["peers"].values(), default=None)
        cells = _step(row["arm"], row["images_per_s"], row["efficiency"], row["exposed_ms"])
        lines.append((row["efficiency"], [*cells, f"{best / row['ms']:.2f}" if best else ""]))
    with_peers = next((row for row in rows if row["peers"]), {"peers": {}})
    for name in with_peers["peers"]:
        rate, efficiency, added = (
            with_peers[f"peer_{key}"][name] for key in ("images_per_s", "efficiency", "exposed_ms")
        )
        lines.append((efficiency, [*_step(_DDP[name], rate, efficiency, added), ""]))
    return [cells for _, cells in sorted(lines, key=lambda line: line[0])]


def _step(way: str, images_per_s: float, efficiency: float, added: float) -> list[str]:
    return [way, f"{images_per_s:.0f}", f"{efficiency:.1%}", f"{added:.2f}"]


def all_reduces() -> str:
    """Milliseconds of an all-reduce between CPU ranks, median (fastest)."""
    files = load("cpu", "bench_all_reduce")
    head, sizes = ["size"], {}
    for file in files:
        ranks = file["rows"][0]["ranks"]
        head += [f"{ranks} ranks: shm, gradients", "shm, any array", "mpi4py"]
        for row in file["rows"]:
            cells = sizes.setdefault(row["bytes"], [])
            if row["arm"] != "mpi":
                cells.append(_median_and_least(row["ms"], row["min_ms"]))
            if row["arm"] == "shm-copied":
                cells.append(_median_and_least(row["peers"]["mpi4py"], row["peers_min"]["mpi4py"]))
    return table(head, [[_size(nbytes), *cells] for nbytes, cells in sorted(sizes.items())])


def _median_and_least(median: float, least: float) -> str:
    return f"{median:.3g} ({least:.3g})"


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


_SHARED = {
    "images": "data", "rows": "rows", "output channels": "channels", "images and rows": "data+rows",
    "images and channels": "data+channels",
}  # fmt: skip


def shared_layers() -> str:
    """Steps of ranks that share layers, worst first: milliseconds, and the time saved beside one rank alone."""
    lines = []
    for machine in machines():
        for file in load(machine, "bench_parallel"):
            cases: dict[str, dict[str, Row]] = {}
            for row in file["rows"]:
                cases.setdefault(row["case"], {})[row["arm"]] = row
            for case, arms in sorted(cases.items(), key=lambda found: _least_saved(found[1])):
                for ms, saved, what in (("ms", "saved", ""), ("busy_ms", "busy_saved", ", processor time")):
                    if ms in arms["alone"]:
                        lines.append([case, *_shared_line(arms, machine_of(file), ms, saved, what)])
    columns = ["network", "on", "one rank, ms", "PyTorch, one rank", *(f"shared by {what}" for what in _SHARED)]
    filled = [i for i in range(len(columns)) if any(line[i] for line in lines)]
    return table([columns[i] for i in filled], [[line[i] for i in filled] for line in lines])


def _least_saved(arms: dict[str, Row]) -> float:
    return min(row["saved"] for name, row in arms.items() if name in _SHARED.values())


def _shared_line(arms: dict[str, Row], machine: str, ms: str, saved: str, what: str) -> list[str]:
    one = arms["alone"]
    torch = one["peers"].get("torch-eager")
    cells = [f"{arms[arm][ms]:.3g} ({arms[arm][saved]:.0%})" if arm in arms else "" for arm in _SHARED.values()]
    return [f"{one['ranks']} ranks, {machine}{what}", f"{one[ms]:.3g}", f"{torch:.3g}" if torch else "", *cells]
