"""Tables of sparse products and of pruned networks."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from pages.files import File, Row, load, machine_of, machines, table

FEW = 64  # samples: products that read the matrix and little else
_SPARSE_PASSES = {"forward": "A X", "backward_data": "Aᵀ dY", "backward_weight": "dY Xᵀ at A"}


_SPARSE_PEERS = {
    "scipy-csr": "SciPy CSR", "mkl-csr": "PyTorch CSR (MKL)", "scipy-csr-first": "SciPy CSR, features first",
    "mkl-csr-first": "PyTorch CSR, features first", "numpy-dense": "dense NumPy",
    "cusparse-csr": "cuSPARSE CSR", "cusparse-csr-of-transpose": "cuSPARSE CSR",
    "cusparse-csr-first": "cuSPARSE CSR, features first",
    "cusparse-csr-of-transpose-first": "cuSPARSE CSR, features first", "cublas": "dense cuBLAS",
    "cusparse-csc": "cuSPARSE CSC", "cudnn": "dense cuDNN, 3×3",
}  # fmt: skip


def sparse(machine: str = "cpu") -> str:
    """Time of each peer over that of sparse products: geometric mean over the shapes with batches, worst shape."""
    groups: dict[tuple[str, ...], dict[float, list[float]]] = {}
    for file in load(machine, "bench_csb"):
        for row in file["rows"]:
            for peer, ms in row["peers"].items():
                dtype = "" if machine == "cpu" else f"{row['dtype']}, "
                if machine != "cpu" and len(row["shape"]) == 3 and row["shape"][-1] <= FEW:
                    dtype += f"up to {FEW} samples, "
                key = _SPARSE_PEERS[peer], f"{dtype}{_SPARSE_PASSES[row['pass']]}, {row['arm'].replace('-', ' ')}"
                if row["shape"][-1] > 1:
                    groups.setdefault(key, {}).setdefault(row["sparsity"], []).append(ms / row["ms"])
    levels = sorted({level for found in groups.values() for level in found})
    cell = lambda ratios: f"{statistics.geometric_mean(ratios):.1f} ({min(ratios):.1f})" if ratios else ""  # noqa: E731
    order = list(dict.fromkeys(_SPARSE_PEERS.values()))
    lines = sorted(groups.items(), key=lambda item: order.index(item[0][0]))
    rows = [[*key, *(cell(found.get(level, [])) for level in levels)] for key, found in lines]
    return table(["against", "pass", *(f"{level:.0%}" for level in levels)], rows)


def _pruned_arms() -> list[tuple[str, str, list[Row]]]:
    """(machine, arm, rows of all seeds) of the pruned ResNet-20s, in the order in which they ran."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for machine in machines():
        for file in load(machine, "prune_resnet20"):
            for row in file["rows"]:
                found.setdefault((machine_of(file), row["case"], row["arm"]), []).append(row)
    return [(machine, arm, rows) for (machine, _, arm), rows in found.items()]


def _lost(rows: list[Row]) -> float:
    """Points of accuracy that the dense network, trained as long, has more; mean over the seeds."""
    return 100 * statistics.mean(row["accuracy_dense_trained_on"] - row["accuracy"] for row in rows)


def _accuracy(rows: list[Row]) -> list[str]:
    reached = [100 * row["accuracy"] for row in rows]
    lost = round(_lost(rows), 2) + 0.0  # never -0.00
    return [f"{statistics.mean(reached):.2f} ({min(reached):.2f} to {max(reached):.2f})", f"{lost:.2f}"]


def pruned() -> str:
    """Granularity, accuracy and step of pruned networks; most accuracy lost first."""
    arms = [(machine, arm, rows) for machine, arm, rows in _pruned_arms() if rows[0]["pass"] == "step"]
    lines = []
    for machine, arm, rows in sorted(arms, key=lambda item: (item[2][0]["case"], -_lost(item[2]))):
        first = rows[0]
        steps = (
            [f"{first['ms']:.1f}", *(_faster(first, peer) for peer in ("dense", "masked"))] if first["ms"] else 3 * [""]
        )
        facts = [first["runs_as"], f"{first['sparsity']:.0%}", f"{first['flop_ratio']:.2f}"]
        lines.append([first["case"], f"{machine}", arm, *facts, *_accuracy(rows), *steps])
    columns = ["network", "on", "pruned", "runs as", "parameters dropped", "FLOP left", "accuracy, % (of seeds)",
               "points lost", "step, ms", "speed against dense", "against masked"]  # fmt: skip
    return table(columns, lines)


def _faster(row: Row, peer: str) -> str:
    return f"{row['peers'][peer] / row['ms']:.2f}" if peer in row["peers"] else ""


def shrunk(files: Iterable[File]) -> str:
    """Steps of networks whose pruned filters are cut out, worst first."""
    lines = []
    for file in files:
        rows = [row for row in file["rows"] if row["arm"] != "dense"]
        for row in sorted(rows, key=lambda row: row["peers"]["dense"] / row["ms"]):
            facts = [row["case"], machine_of(file), row["dtype"], row["arm"]]
            left = [f"{row['parameters']:,}", f"{row['flop_ratio']:.2f}", f"{row['bytes_ratio']:.2f}"]
            steps = f"{row['peers']['dense']:.2f}", f"{row['ms']:.2f}"
            lines.append([*facts, *left, *steps, _faster(row, "dense"), _faster(row, "masked")])
    columns = ["network", "on", "dtype", "pruned", "parameters", "FLOP left", "bytes left", "dense ms", "ms",
               "speed against dense", "against masked"]  # fmt: skip
    return table(columns, lines)


def compressed() -> str:
    """Compressed files of pruned networks."""
    lines = []
    for _, arm, rows in _pruned_arms():
        if rows[0]["pass"] == "file":
            parts = ", ".join(f"{name} {size:,}" for name, size in rows[0]["parts"].items())
            before, own, general = (f"{rows[0][key]:,}" for key in ("bytes_before", "bytes", "lzma_bytes"))
            ratios = f"{min(row['ratio'] for row in rows):.1f}"
            lines.append([rows[0]["case"], arm, before, own, parts, general, ratios, *_accuracy(rows)])
    columns = [
        "network", "made from", "bytes before", "bytes", "of which", "LZMA of the same", "times smaller",
        "accuracy, % (of seeds)", "points lost",
    ]  # fmt: skip
    return table(columns, lines)
