"""Tables of what several ranks do together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pages.files import Row, load, machine_of, machines, table

__all__ = ["all_reduces", "scaling", "shared_layers", "sums_of_gpus"]

File = dict[str, Any]

_COLUMNS = [
    "network, batch of a rank", "ranks", "messages", "images/s", "efficiency", "adds ms", "DDP images/s",
    "DDP efficiency", "DDP adds ms", "speed against DDP",
]  # fmt: skip


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
    """Training steps on several ranks beside the same without messages, and DDP; worst efficiency first."""
    rows = [row for file in files for row in file["rows"]]
    return table(_COLUMNS, [_step(row) for row in sorted(rows, key=lambda row: row["efficiency"])])


_DDP = {
    "torch-ddp": "", "torch-ddp-graph": " graph", "torch-ddp-compile": " compiled",
    "torch-ddp-compile-graph": " compiled graph",
}  # fmt: skip


def _step(row: Row) -> list[str]:
    figures = [f"{row['images_per_s']:.0f}", f"{row['efficiency']:.1%}", f"{row['exposed_ms']:.2f}"]
    peers = [
        [
            f"{row['peer_images_per_s'][name]:.0f}{_DDP[name]}",
            f"{row['peer_efficiency'][name]:.1%}", f"{row['peer_exposed_ms'][name]:.2f}", f"{ms / row['ms']:.2f}",
        ]
        for name, ms in row["peers"].items()
    ]  # fmt: skip
    theirs = [" / ".join(cells) for cells in zip(*peers, strict=True)] or [""] * 4
    return [f"{row['case']} {row['dtype']}", str(row["ranks"]), _arm(row), *figures, *theirs]


def _arm(row: Row) -> str:
    """As it is called now: in older files messages by links did not wait unless told."""
    older = "waiting" not in row and row["arm"].startswith("links") and "hold" not in row["arm"]
    return f"{row['arm']}/soon" if older else row["arm"]


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
