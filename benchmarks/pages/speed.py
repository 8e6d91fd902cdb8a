"""Tables of speed beside other libraries: one of README.md, the whole of docs/speed.md, the commands behind them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator

from pages.files import RESULTS, File, Row, everywhere, machine_of, results_of, table

_USUAL = {"GPU": ("compiled, auto", "links"), "CPU": ("eager",)}  # how training runs unless told otherwise
_PEERS = {
    "torch-eager": "PyTorch",
    "torch-graph": "PyTorch as a CUDA graph",
    "torch-compile": "PyTorch, compiled",
    "torch-compile-graph": "PyTorch, compiled, as a CUDA graph",
    "torch-autotune-graph": "PyTorch, compiled with autotuning, as a CUDA graph",
    "torch-ddp": "PyTorch's DDP",
    "torch-ddp-graph": "PyTorch's DDP as a CUDA graph",
    "torch-ddp-compile": "PyTorch's DDP, compiled",
    "torch-ddp-compile-graph": "PyTorch's DDP, compiled, as a CUDA graph",
}
_LEADING = ("torch-compile-graph", "torch-ddp-compile-graph")  # the fastest wherever they were run
_LEAST_MS = 0.008  # memory-bound operations that take less measure launches
_LARGE = 1e8  # bytes, from which on those count as large
_DTYPES = ("bf16", "fp16", "fp32")

Found = tuple[float, str, Row]  # speed against the best peer, on which machine, and the row


def _newest(files: Iterable[File], *what: str, beside: bool = False) -> list[tuple[str, Row]]:
    """The machine and the row; of the same row twice, by case, machine, dtype and ``what``, the newest.

    ``beside``: of those that stand beside peers, or beside PyTorch's fastest way where one of them does: a later run
    without that one would look better for it.
    """
    found = {}
    for file in sorted(files, key=lambda file: file["date"]):
        once = {}
        for row in (row for row in file["rows"] if row["peers"] or not beside):
            key = row["case"], machine_of(file), row["dtype"], *(row.get(name) for name in what)
            assert key not in once, f"two rows of one file would be one: {key}"
            if not beside or _leading(row) or not (key in found and _leading(found[key][1])):
                once[key] = machine_of(file), row
        found |= once
    return list(found.values())


def _leading(row: Row) -> bool:
    return any(name in row["peers"] for name in _LEADING)


def _beside_peers(files: Iterable[File], *what: str) -> list[Found]:
    """Worst first."""
    rows = _newest(files, *what, beside=True)
    found = [(_peer(row)[1] / row["ms"], machine, row) for machine, row in rows]
    return sorted(found, key=lambda item: item[0])


def _steps(files: Iterable[File]) -> list[Found]:
    return _beside_peers(files, "arm", "ranks")


def _convolutions() -> list[Found]:
    return _beside_peers(everywhere("bench_conv"), "pass", "arm")


def _operations() -> list[Row]:
    return [row for _, row in _newest(everywhere("bench_ops"), "pass", "arm") if row["floor_ms"] >= _LEAST_MS]


def _peer(row: Row) -> tuple[str, float]:
    """The fastest peer, or the one that alone does the same work: its name, its milliseconds."""
    name = _fastest(row)
    return _PEERS.get(name, name), row["peers"][name]


def _fastest(row: Row) -> str:
    return min(row["peers"], key=lambda name: (name != row.get("beside"), row["peers"][name]))


# -- one table of all -------------------------------------------------------------------------------------------------


def headline() -> str:
    """Whole steps as training runs them, and the convolutions and operations that they consist of; worst first."""
    lines = sorted([*_usual_steps(), *_all_convolutions(), *_all_operations()])
    head = ["what", "on", "beside", "speed against it", "worst of them"]
    return table(head, [[*what, f"{speed:.2f}", worst] for speed, *what, worst in lines], words=(0, 1, 2, 4))


def _usual_steps() -> Iterator[tuple]:
    """Of a step on several GPUs that on most; none with synchronised batch norms, where PyTorch waits for the host.

    A step in bf16 on one GPU beside a compiled one of PyTorch's has a line; the others have one for each dtype, machine
    and peer.
    """
    scaled = _steps(everywhere("bench_scaling"))
    most = {row["case"]: row.get("ranks", 1) for *_, row in sorted(scaled, key=lambda found: found[2].get("ranks", 1))}
    scaled = [found for found in scaled if found[2].get("ranks", 1) == most[found[2]["case"]]]
    together: dict[tuple[str, str, str], list[tuple[float, str, str]]] = {}
    for speed, machine, row in [*_steps(everywhere("bench_train")), *scaled]:
        if row["arm"] not in _USUAL["CPU" if machine.startswith("CPU") else "GPU"] or "synchronised" in row["case"]:
            continue
        (network, _, batch), (peer, ms), ranks = row["case"].split("/"), _peer(row), row.get("ranks", 1)
        on, case = f"{ranks} {machine}" if ranks > 1 else machine, f"{network}, batch {batch[1:]}"
        if ranks == 1 and row["dtype"] == "bf16" and "compile" in _fastest(row):
            yield speed, f"training step: {case}, bf16", on, f"{peer}: {ms:.1f} ms, here {row['ms']:.1f}", ""
        else:
            together.setdefault((row["dtype"], on, peer), []).append((speed, network, case))
    for (dtype, on, peer), steps in together.items():
        networks, (worst, _, case) = ", ".join(sorted({network for _, network, _ in steps})), min(steps)
        mean = statistics.geometric_mean(speed for speed, *_ in steps)
        yield mean, f"training steps: {networks}, {dtype}", on, peer, f"{worst:.2f}: {case}"


def _all_convolutions() -> Iterator[tuple]:
    groups: dict[tuple[str, str, str], list[tuple[float, str, str]]] = {}
    for speed, machine, row in _convolutions():
        part = f"{row['case']}, {row['pass'].replace('_', ' ')}"
        kind = "fully connected layers" if row["case"].startswith("Linear") else "convolutions"
        kind = "grouped convolutions" if " in " in row["case"] else kind
        groups.setdefault((kind, machine, row["dtype"]), []).append((speed, part, _network(row)))
    for (kind, machine, dtype), members in groups.items():
        networks = ", ".join(sorted({network for _, _, network in members}))
        worst, part, _ = min(members)
        peer = "oneDNN" if machine.startswith("CPU") else "cuDNN, cuBLAS" if kind.startswith("fully") else "cuDNN"
        mean = statistics.geometric_mean(speed for speed, _, _ in members)
        yield mean, f"{kind} of {networks}, {dtype}", machine, peer, f"{worst:.2f}: {part}"


def _network(row: Row) -> str:
    return row["case"].removeprefix("Linear of ").split()[0]


def _all_operations() -> Iterator[tuple]:
    rows, machine = _operations(), "NVIDIA H200"
    beside = {
        "PyTorch": [(_peer(row)[1] / row["ms"], row["case"]) for row in rows if row["peers"]],
        "a copy of as many bytes": [(row["floor_ms"] / row["ms"], row["case"]) for row in rows],
    }
    for peer, speeds in beside.items() if rows else ():
        worst, case = min(speeds)
        middle = statistics.median(speed for speed, _ in speeds)
        yield middle, "memory-bound operations", machine, peer, f"{worst:.2f}: {case}"


# -- docs/speed.md ----------------------------------------------------------------------------------------------------


def training(files: Iterable[File]) -> str:
    """Whole steps beside PyTorch in each of its ways, worst ratio to its fastest first; the memory of both, and how far
    the first losses are from those of any other arm of the run, the unfused one and PyTorch's included.
    """
    steps = _steps(files)
    peers = [peer for peer in _PEERS if any(peer in row["peers"] for _, _, row in steps)]
    rows = []
    for speed, machine, row in steps:
        theirs = [f"{row['peers'][peer]:.1f}" if peer in row["peers"] else "" for peer in peers]
        held = row.get("device_bytes"), row.get("peer_device_bytes", {}).get(_fastest(row))
        gigabytes = [f"{number / 1e9:.1f}" if number else "" for number in held]
        apart = f"{max(row['losses_apart'].values()):.1%}" if row.get("losses_apart") else ""
        figures = [f"{row['images_per_s']:.0f}", f"{row['ms']:.1f}", *theirs, f"{speed:.2f}", *gigabytes, apart]
        rows.append([row["case"], machine, row["dtype"], row["arm"], *figures])
    head = ["training step", "machine", "dtype", "way", "images/s", "ms", *map(_PEERS.get, peers)]
    head += ["speed against the fastest", "GB", "of the fastest", "losses apart"]
    whole, hosts = table(head, rows, words=range(4)), _hosts(files)
    return f"{whole}\n\n{hosts}" if hosts else whole


def _hosts(files: Iterable[File]) -> str:
    """What the host takes to start an uncompiled step, beside PyTorch's uncompiled one; empty without such rows."""
    rows = []
    for machine, row in _newest(files, "arm", "ranks"):
        theirs = row.get("peer_host_ms", {}).get("torch-eager")
        if row["arm"].startswith("eager") and theirs:
            figures = [row["host_ms"], theirs, row["ms"], row["peers"]["torch-eager"]]
            rows.append([row["case"], machine, row["dtype"], row["arm"], *(f"{ms:.1f}" for ms in figures)])
    head = ["uncompiled step", "machine", "dtype", "way", "host, ms", "PyTorch's host", "step, ms", "PyTorch's step"]
    return table(head, rows, words=range(4)) if rows else ""


def operations() -> str:
    """Memory-bound operations: worst share of copy bandwidth, on many bytes in each dtype and on fewer, those that are
    worst on many first; and PyTorch's own over ours.
    """
    families: dict[str, list[Row]] = {}
    for row in _operations():
        families.setdefault(row["case"].split("/")[0], []).append(row)
    lines = []
    for name, members in families.items():
        large = [row for row in members if row["least_bytes"] >= _LARGE]
        shares = [_worst(row for row in large if row["dtype"] == dtype) for dtype in _DTYPES]
        few = _worst(row for row in members if row["least_bytes"] < _LARGE)
        against = [_peer(row)[1] / row["ms"] for row in members if row["peers"]]
        figures = [f"{share:.0%}" if share else "" for share in (*shares, few)]
        figures.append(f"{statistics.median(against):.2f}" if against else "")
        lines.append((_worst(large) or 1.0, few or 1.0, [f"`{name}`", *figures]))
    head = ["memory-bound operation, H200", *(f"{dtype}, worst share of copy" for dtype in _DTYPES)]
    head += ["below 100 MB", "speed against PyTorch's"]
    return table(head, [line for *_, line in sorted(lines)])


def _worst(rows: Iterable[Row]) -> float | None:
    return min((row["floor_ms"] / row["ms"] for row in rows), default=None)


def convolutions() -> str:
    """Geometric mean over layers of the library's time (cuDNN, oneDNN) over ours."""
    groups: dict[tuple[str, ...], list[float]] = {}
    for speed, machine, row in _convolutions():
        groups.setdefault((row["case"].split()[0], machine, row["dtype"], row["pass"]), []).append(speed)
    lines = sorted((statistics.geometric_mean(speeds), *key, min(speeds)) for key, speeds in groups.items())
    head = ["convolutions of", "machine", "dtype", "pass", "speed against cuDNN or oneDNN, mean", "worst layer"]
    return table(head, [[*key, f"{mean:.2f}", f"{worst:.2f}"] for mean, *key, worst in lines], words=range(4))


def learning(files: Iterable[File]) -> str:
    """Networks trained through the whole path."""
    rows = []
    for file in files:
        for row in file["rows"]:
            losses = row["losses_by_tenth"]
            what = [row["case"], machine_of(file), str(row["ranks"]), row["dtype"], row["arm"], str(row["steps"])]
            apart = f"{row['apart']:.1%}" if row.get("apart") is not None else ""
            figures = [f"{losses[0]:.3f} → {losses[-1]:.4f}", apart, f"{row['test_accuracy']:.3f}"]
            rows.append([*what, *figures])
    head = ["network", "machine", "ranks", "dtype", "way", "steps", "loss, first → last tenth"]
    head += ["apart from the first plan", "test accuracy"]
    return table(head, rows)


TABLES = {
    "bench_train": lambda: training(everywhere("bench_train")),
    "bench_conv": convolutions,
    "bench_ops": operations,
    "bench_learning": lambda: learning(everywhere("bench_learning")),
}


def results() -> str:
    """All tables of docs/speed.md."""
    return "\n\n".join(make() for make in TABLES.values())


def commands() -> str:
    """What made each file of results that a table of docs/speed.md shows."""
    lines = []
    for path in sorted(RESULTS.glob("*/*.json*")):
        name = next((name for name in TABLES if path.stem.startswith(name)), None)
        if name is not None and (file := results_of(path))["benchmark"] == name:
            head = TABLES[name]().splitlines()[0].split("|")[1].strip()
            cells = [f"`{path.relative_to(RESULTS)}`", head, str(file["commit"]), f"`{file['command']}`"]
            lines.append(cells)
    return table(["file of results", "table", "commit", "command"], lines, words=range(4))
