"""Tables of what several GPUs do together, made from result files for report.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from minidl.profile.tables import markdown

__all__ = ["scaling", "sums_of_gpus"]

Row = dict[str, Any]
Files = Iterable[dict[str, Any]]

_COLUMNS = [
    "network, batch of a rank", "ranks", "messages", "images/s", "efficiency", "adds ms", "DDP images/s",
    "DDP efficiency", "DDP adds ms", "speed against DDP",
]  # fmt: skip


def sums_of_gpus(files: Files) -> str:
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
    return markdown(["GPUs", "KiB", "minidl us", "way", "NCCL us", "speed against NCCL"], [line for _, line in lines])


def scaling(files: Files) -> str:
    """Training steps on several ranks beside the same without messages, and DDP; worst efficiency first."""
    rows = sorted((row for file in files for row in file["rows"]), key=lambda row: row["efficiency"])
    return markdown(_COLUMNS, [_step(row) for row in rows])


def _step(row: Row) -> list[str]:
    figures = [f"{row['images_per_s']:.0f}", f"{row['efficiency']:.1%}", f"{row['exposed_ms']:.2f}"]
    theirs = [""] * 4
    if row["peers"]:
        name, ms = min(row["peers"].items(), key=lambda peer: peer[1])
        kind = " compiled" * name.endswith("compile")
        theirs = [f"{row['peer_images_per_s'][name]:.0f}{kind}", f"{row['peer_efficiency'][name]:.1%}"]
        theirs += [f"{row['peer_exposed_ms'][name]:.2f}", f"{ms / row['ms']:.2f}"]
    return [f"{row['case']} {row['dtype']}", str(row["ranks"]), row["arm"], *figures, *theirs]
