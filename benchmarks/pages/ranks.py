"""Tables of what several ranks do together."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pages.files import NOTHING, File, Row, machine_of, table

_DDP = {  # and its efficiency
    "torch-ddp": "DDP's images/s",
    "torch-ddp-graph": "as a CUDA graph",
    "torch-ddp-compile": "compiled",
    "torch-ddp-compile-graph": "compiled, as a CUDA graph",
}


def sums_of_gpus(files: Iterable[File]) -> str:
    """Microseconds of an all-reduce between GPUs of a host: the fastest of our ways beside NCCL, largest first."""
    sizes: dict[int, dict[int, list[str]]] = {}
    for file in files:
        found: dict[int, list[Row]] = {}
        for row in file["rows"]:
            if "nccl" in row["peers"]:
                found.setdefault(row["bytes"], []).append(row)
        for nbytes, rows in found.items():
            best = min(rows, key=lambda row: row["ms"])
            nccl = best["peers"]["nccl"]
            cells = [f"{best['ms'] * 1e3:.1f}", best["arm"], f"{nccl * 1e3:.1f}", f"{nccl / best['ms']:.2f}"]
            sizes.setdefault(nbytes, {})[best["ranks"]] = cells
    counts = sorted({ranks for cells in sizes.values() for ranks in cells})
    head = ["KiB"]
    for ranks in counts:
        head += [f"{ranks} GPUs: us", "way", "NCCL's us", "speed against it"]
    lines = [
        [f"{nbytes / 1024:,g}", *(cell for ranks in counts for cell in cells.get(ranks, [""] * 4))]
        for nbytes, cells in sorted(sizes.items(), reverse=True)
    ]
    return table(head, lines)


Run = tuple[tuple[str, int], File, list[Row]]  # (network with its type, ranks), the file, its rows of these


def _runs(files: Iterable[File]) -> list[Run]:
    """The cases of all files, in the order of networks, batches as numbers, ranks and dates."""
    runs: dict[tuple[tuple[str, int], str], Run] = {}
    for file in files:
        for row in file["rows"]:
            key = f"{row['case']} {row['dtype']}", row["ranks"]
            runs.setdefault((key, file["date"]), (key, file, []))[2].append(row)
    return sorted(runs.values(), key=lambda run: (_numbers_apart(run[0][0]), run[0][1], run[1]["date"]))


def _numbers_apart(text: str) -> list[tuple[str, int]]:
    """For an order in which batches count as numbers."""
    return [(word, int(part or 0)) for word, part in re.findall(r"(\D+)(\d*)", text)]


def scaling(files: Iterable[File]) -> str:
    """Training steps on several ranks, as they run by themselves, and DDP in the same run: the newest that has DDP."""
    newest: dict[tuple[str, int], Run] = {}
    for key, file, rows in _runs(files):
        if key not in newest or rows[0]["peers"] or not newest[key][2][0]["peers"]:
            newest[key] = key, file, rows
    ddp = [name for name in _DDP if any(name in rows[0]["peers"] for *_, rows in newest.values())]
    lines = []
    for (case, ranks), file, (own, *_) in newest.values():
        best = min(own["peers"].values(), default=None)
        cells = [f"{own['images_per_s']:.0f}", f"{own['efficiency']:.1%}", f"{own['exposed_ms']:.2f}"]
        for name in ddp:
            rate, efficiency = (own[f"peer_{what}"].get(name) for what in ("images_per_s", "efficiency"))
            cells.append(f"{rate:.0f} ({efficiency:.1%})" if rate else "")
        speed = f"{best / own['ms']:.2f}" if best else ""
        lines.append([case, str(ranks), *cells, speed, str(file["commit"])])
    head = ["network, batch of a rank", "ranks", "images/s", "efficiency", "adds ms", *map(_DDP.get, ddp)]
    return table([*head, "speed against the fastest", "commit"], lines)


def ways(files: Iterable[File]) -> str:
    """What messages add to a step, by each way that was tried in a run: GPUs, then CPU ranks."""
    tables: dict[bool, list[Run]] = {True: [], False: []}
    for run in _runs(files):
        if len(run[2]) > 2:
            tables[bool(run[1]["machine"].get("gpu"))].append(run)
    parts = []
    for runs in filter(None, tables.values()):
        arms = list(dict.fromkeys(row["arm"] for run in runs for row in run[2]))
        lines = []
        for (case, ranks), file, rows in runs:
            added = {row["arm"]: f"{row['exposed_ms']:.2f}" for row in rows}
            lines.append([case, str(ranks), *(added.get(arm, "") for arm in arms), str(file["commit"])])
        parts.append(table(["ms added, by way", "ranks", *arms, "commit"], lines))
    return "\n\n".join(parts) or NOTHING


def all_reduces(files: Iterable[File]) -> str:
    """Milliseconds of an all-reduce between CPU ranks, median (fastest)."""
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


def shared_layers(files: Iterable[File]) -> str:
    """Steps of ranks that share layers, worst first: milliseconds, and the time saved beside one rank alone."""
    lines = []
    for file in files:
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
