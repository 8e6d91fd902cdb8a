"""The tables and pictures of README.md and docs/ that are made from benchmarks/results/<machine>/*.json, .json.gz.

python benchmarks/report.py             rewrite the tables
python benchmarks/report.py --pictures  draw the pictures anew, too
python benchmarks/report.py --check     exit 1 when a page does not show what the files say
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import layer_pages
import rank_tables

from minidl.bench import command
from minidl.profile.plots import save
from minidl.profile.results import load as results_of
from minidl.profile.tables import markdown

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

SHOWN = 12  # rows of a table that shows the worst only

Row = dict[str, Any]


def load(machine: str, benchmark: str) -> list[dict[str, Any]]:
    """The result files of a machine that this benchmark made; their names begin with its."""
    found = map(results_of, sorted((RESULTS / machine).glob(f"{benchmark}*.json*")))
    return [file for file in found if file["benchmark"] == benchmark]


def everywhere(benchmark: str) -> list[dict[str, Any]]:
    """The result files of all machines that this benchmark made."""
    return [file for path in sorted(RESULTS.iterdir()) for file in load(path.name, benchmark)]


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
    return markdown(head, rows)


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


def choices() -> str:
    """What convolutions lose without tuning: by pass, and the worst of them."""
    rows = [row for file in load("h200", "bench_conv_choice") for row in file["rows"]]
    losses: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        losses.setdefault((row["pass"], row["dtype"]), []).append(row["ms"] / row["peers"]["tuned"])
    lines = []
    for key, some in losses.items():
        mean, over = f"{statistics.geometric_mean(some) - 1:.1%}", f"{sum(loss > 1.1 for loss in some)} of {len(some)}"
        lines.append([*key, mean, f"{max(some) - 1:.1%}", over])
    head = markdown(["pass", "dtype", "behind, mean", "worst", "by over 10 %"], sorted(lines))
    worst = sorted(rows, key=lambda row: row["peers"]["tuned"] / row["ms"])[:SHOWN]
    lines = []
    for row in worst:
        ms, tuned = row["ms"], row["peers"]["tuned"]
        figures = f"{ms * 1e3:.1f}", f"{tuned * 1e3:.1f}", f"{ms / tuned - 1:.1%}"
        lines.append([f"{row['case']} {row['pass']}", *figures, row["kernel"], row["tuned"]])
    return f"{head}\n\n{markdown(['worst', 'µs', 'tuned µs', 'behind', 'kernel', 'tuned kernel'], lines)}"


def options() -> str:
    """Every option of ``minidl bench``, verb by verb, from its own parser."""
    return "\n\n".join(f"### minidl bench {verb}\n\n{_options(command.parser_of(verb))}" for verb in command.VERBS)


def _options(parser: argparse.ArgumentParser) -> str:
    lines = []
    for action in parser._actions:  # argparse has no public list of options
        if action.dest != "help":
            shown = action.metavar or ("" if action.nargs == 0 else "|".join(map(str, action.choices or [])) or "VALUE")
            name = " ".join([*action.option_strings[-1:], shown + " ..." * (action.nargs == "+")]).strip()
            lines.append([f"`{name}`".replace("|", "\\|"), action.help or "", _default(action)])
    return markdown(["option", "", "default"], lines)


def _default(action: argparse.Action) -> str:
    value = action.default
    if value in (None, False, []) or not action.option_strings:
        return ""
    return f"`{' '.join(map(str, value)) if isinstance(value, list) else value}`"


# -- other pages ------------------------------------------------------------------------------------------------------

_SPARSE_PASSES = {"forward": "A X", "backward_data": "Aᵀ dY", "backward_weight": "dY Xᵀ at A"}
_SPARSE_PEERS = {
    "scipy-csr": "SciPy CSR", "scipy-csr-of-transpose": "SciPy CSR", "numpy-dense": "dense NumPy",
    "cusparse-csr": "cuSPARSE CSR", "cusparse-csr-of-transpose": "cuSPARSE CSR", "cublas": "dense cuBLAS",
    "cusparse-csc": "cuSPARSE CSC", "cudnn": "dense cuDNN, 3×3",
}  # fmt: skip


def sparse(machine: str = "cpu") -> str:
    """Time of each peer over that of sparse products: geometric mean over the shapes with batches, worst shape."""
    groups: dict[tuple[str, ...], dict[float, list[float]]] = {}
    for file in load(machine, "bench_csb"):
        for row in file["rows"]:
            for peer, ms in row["peers"].items():
                dtype = "" if machine == "cpu" else f"{row['dtype']}, "
                key = _SPARSE_PEERS[peer], f"{dtype}{_SPARSE_PASSES[row['pass']]}, {row['arm'].replace('-', ' ')}"
                if row["shape"][-1] > 1:
                    groups.setdefault(key, {}).setdefault(row["sparsity"], []).append(ms / row["ms"])
    if not groups:
        return "Not recorded yet."
    levels = sorted({level for found in groups.values() for level in found})
    cell = lambda ratios: f"{statistics.geometric_mean(ratios):.1f} ({min(ratios):.1f})" if ratios else ""  # noqa: E731
    order = list(dict.fromkeys(_SPARSE_PEERS.values()))
    lines = sorted(groups.items(), key=lambda item: order.index(item[0][0]))
    rows = [[*key, *(cell(found.get(level, [])) for level in levels)] for key, found in lines]
    return markdown(["against", "pass", *(f"{level:.0%}" for level in levels)], rows)


def _pruned_arms() -> list[tuple[str, str, list[Row]]]:
    """(machine, arm, rows of all seeds) of the pruned ResNet-20s, in the order in which they ran."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for machine in sorted(path.name for path in RESULTS.iterdir()):
        for file in load(machine, "prune_resnet20"):
            for row in file["rows"]:
                found.setdefault((_machine(file), row["case"], row["arm"]), []).append(row)
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
    return markdown(columns, lines) if lines else "Not recorded yet."


def _faster(row: Row, peer: str) -> str:
    return f"{row['peers'][peer] / row['ms']:.2f}" if peer in row["peers"] else ""


def shrunk() -> str:
    """Steps of networks whose pruned filters are cut out, worst first."""
    lines = []
    for machine in sorted(path.name for path in RESULTS.iterdir()):
        for file in load(machine, "bench_shrink"):
            rows = [row for row in file["rows"] if row["arm"] != "dense"]
            for row in sorted(rows, key=lambda row: row["peers"]["dense"] / row["ms"]):
                facts = [row["case"], _machine(file), row["dtype"], row["arm"]]
                left = [f"{row['parameters']:,}", f"{row['flop_ratio']:.2f}", f"{row['bytes_ratio']:.2f}"]
                steps = [
                    f"{row['peers']['dense']:.2f}",
                    f"{row['ms']:.2f}",
                    _faster(row, "dense"),
                    _faster(row, "masked"),
                ]
                lines.append([*facts, *left, *steps])
    columns = ["network", "on", "dtype", "pruned", "parameters", "FLOP left", "bytes left", "dense ms", "ms",
               "speed against dense", "against masked"]  # fmt: skip
    return markdown(columns, lines) if lines else "Not recorded yet."


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
    return markdown(columns, lines) if lines else "Not recorded yet."


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
    return markdown(head, [[_size(nbytes), *cells] for nbytes, cells in sorted(sizes.items())])


_SHARED = {
    "images": "data", "rows": "rows", "output channels": "channels", "images and rows": "data+rows",
    "images and channels": "data+channels",
}  # fmt: skip


def shared_layers() -> str:
    """Steps of ranks that share layers, worst first: milliseconds, and the time saved beside one rank alone."""
    lines = []
    for machine in sorted(path.name for path in RESULTS.iterdir()):
        for file in load(machine, "bench_parallel"):
            cases: dict[str, dict[str, Row]] = {}
            for row in file["rows"]:
                cases.setdefault(row["case"], {})[row["arm"]] = row
            for case, arms in sorted(cases.items(), key=lambda found: _least_saved(found[1])):
                for ms, saved, what in (("ms", "saved", ""), ("busy_ms", "busy_saved", ", processor time")):
                    if ms in arms["alone"]:
                        lines.append([case, *_shared_line(arms, _machine(file), ms, saved, what)])
    columns = ["network", "on", "one rank, ms", "PyTorch, one rank", *(f"shared by {what}" for what in _SHARED)]
    filled = [i for i in range(len(columns)) if any(line[i] for line in lines)]
    return markdown([columns[i] for i in filled], [[line[i] for i in filled] for line in lines])


def _least_saved(arms: dict[str, Row]) -> float:
    return min(row["saved"] for name, row in arms.items() if name in _SHARED.values())


def _shared_line(arms: dict[str, Row], machine: str, ms: str, saved: str, what: str) -> list[str]:
    one = arms["alone"]
    torch = one["peers"].get("torch-eager")
    cells = [f"{arms[arm][ms]:.3g} ({arms[arm][saved]:.0%})" if arm in arms else "" for arm in _SHARED.values()]
    return [f"{one['ranks']} ranks, {machine}{what}", f"{one[ms]:.3g}", f"{torch:.3g}" if torch else "", *cells]


def _pinning_rows() -> dict[tuple[str, float | None], dict[str, Row]]:
    found: dict[tuple[str, float | None], dict[str, Row]] = {}
    for file in load("cpu", "bench_pinning"):
        for row in file["rows"]:
            found.setdefault((row["case"], row.get("share")), {})[row["arm"]] = row
    return found


def pinning() -> str:
    """Bytes kept by dynamic programming against an MILP and other policies, over all limits of a network."""
    cases: dict[str, list[dict[str, Row]]] = {}
    for (case, _), arms in _pinning_rows().items():
        if arms["dp"]["feasible"]:
            cases.setdefault(case, []).append(arms)
    rows = []
    for case, found in cases.items():
        proved = [arms["dp"] for arms in found if arms["dp"].get("milp_proven")]
        gap = f"{max(row['gap'] for row in proved):.3g}" if proved else "-"
        times = f"{max(arms['dp']['ms'] for arms in found):.0f}"
        rows.append(
            [case, str(len(found)), str(len(proved)), gap, _kept(found, "static"), _kept(found, "geeps"), times]
        )
    head = ["network, images, batch", "limits with a plan", "MILP proved", "gap", "kept, times static"]
    return markdown([*head, "times GeePS", "plan ms, at most"], rows)


def _kept(found: list[dict[str, Row]], arm: str) -> str:
    """Median over limits of 25 to 75 % of the kept bytes, over those of ``arm``."""
    middle = [arms for arms in found if arms["dp"].get("share") is not None and 0.25 <= arms["dp"]["share"] <= 0.75]
    pairs = [(arms["dp"]["kept_bytes"], arms.get(arm, {}).get("kept_bytes") or 0) for arms in middle]
    ratios = [ours / theirs if theirs else float("inf") for ours, theirs in pairs]
    return f"{statistics.median(ratios):.2f}" if ratios and statistics.median(ratios) < float("inf") else "-"


def predicted_steps() -> str:
    """Simulated steps by policy, in times of the step without a limit."""
    arms = {
        "vdnn-all": "move everything (vDNN)", "geeps": "GeePS", "dp": "fewest bytes moved",
        "joint": "keep, move or rebuild",
    }  # fmt: skip
    wanted = {"resnet50": 0.25, "resnet152": 0.25, "densenet121": 0.25, "unet": 0.3}
    rows = []
    for (case, share), found in _pinning_rows().items():
        if share is not None and share in (wanted.get(case.split("/")[0]), 0.5, 0.75):
            ratio = lambda r: f"{r['step_ms'] / r['step_unlimited_ms']:.2f}" if r and r.get("step_ms") else "-"  # noqa: E731
            if any(found.get(arm, {}).get("step_ms") for arm in arms) and case.split("/")[0] in wanted:
                rows.append([case, f"{share:.0%}", *(ratio(found.get(arm)) for arm in arms)])
    return markdown(["network", "limit", *arms.values()], rows)


def limited_steps() -> str:
    """Training steps under a limit of memory, slowest against the unlimited step first; PyTorch's ways beside them."""
    found = [row for file in load("h200", "bench_memory_step") for row in file["rows"]]
    limited = sorted((row for row in found if "limit_bytes" in row), key=lambda row: -row["ratio"])
    gib = lambda count: f"{count / (1 << 30):.2f}"  # noqa: E731
    rows = [
        [
            row["case"], row["arm"], f"{row['ms']:.1f}", f"{row['ratio']:.2f}", f"{row['ratio_to_bound']:.2f}",
            f"{row['predicted_ratio']:.2f}", gib(row["need_bytes"]),
            gib(row["limit_bytes"]), gib(row["peak_bytes"]), gib(row["moved_bytes"]), gib(row["made_again_bytes"]),
        ]
        for row in limited
    ]  # fmt: skip
    head = ["network, images, batch", "plan, limit", "ms", "times unlimited", "times bound", "predicted"]
    parts = [markdown([*head, "need GiB", "limit GiB", "peak GiB", "moved GiB", "made again GiB"], rows)]
    rows = []
    for case, row in {row["case"]: row for row in limited}.items():
        rows.append([case, "minidl", f"{row['unlimited_ms']:.1f}", gib(row["need_bytes"])])
        for name, ms in sorted(row["peers"].items(), key=lambda item: item[1]):
            rows.append([case, name, f"{ms:.1f}", gib(row["peer_peak_bytes"][name])])
    parts.append(markdown(["network, images, batch", "without a plan", "ms", "GiB"], rows))
    return "\n\n".join(parts) if limited else ""


def _median_and_least(median: float, least: float) -> str:
    return f"{median:.3g} ({least:.3g})"


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def _fusion(part: str) -> list[tuple[str, Row]]:
    """(machine, row) of a part of bench_fusion."""
    return [
        (_machine(file), row)
        for machine in sorted(path.name for path in RESULTS.iterdir())
        for file in load(machine, "bench_fusion")
        for row in file["rows"]
        if row["part"] == part
    ]


def fused_steps() -> str:
    """Steps by fusion plan: the networks first where measuring gains least over the best fixed plan."""
    cases: dict[tuple[str, ...], dict[str, Row]] = {}
    for machine, row in _fusion("steps"):
        cases.setdefault((row["case"], machine, row["dtype"]), {})[row["arm"]] = row
    arms = list(dict.fromkeys(arm for rows in cases.values() for arm in rows))
    lines = []
    for case, rows in cases.items():
        fixed = min(row["ms"] for arm, row in rows.items() if arm not in ("auto", "adaptive"))
        peers = rows[next(iter(rows))]["peers"]
        best = min(peers.items(), key=lambda item: item[1], default=None)
        gains = [f"{fixed / rows[arm]['ms']:.3f}" if arm in rows else "" for arm in ("auto", "adaptive")]
        beside = [f"{best[1]:.2f} ({best[0]})" if best else ""]
        times = [f"{rows[arm]['ms']:.2f}" if arm in rows else "" for arm in arms]
        lines.append((fixed / rows["adaptive"]["ms"] if "adaptive" in rows else 0.0, [*case, *times, *gains, *beside]))
    if not lines:
        return ""
    head = ["network", "machine", "dtype", *arms, "best fixed / auto", "best fixed / adaptive", "PyTorch"]
    return markdown(head, [line for _, line in sorted(lines, key=lambda line: line[0])])


def fused_pairs() -> str:
    """How far the measured plan is from the best of all ways of two neighbours."""
    cases: dict[tuple[str, ...], list[float]] = {}
    for machine, row in _fusion("pairs"):
        cases.setdefault((row["case"], machine, row["dtype"]), []).append(row["regret"])
    lines = sorted(([max(found), *case], found) for case, found in cases.items())
    rows = [
        [*case, str(len(found)), f"{statistics.mean(found):.1%}", f"{worst:.1%}"]
        for (worst, *case), found in reversed(lines)
    ]
    return markdown(["network", "machine", "dtype", "distinct pairs", "regret, mean", "worst"], rows) if rows else ""


# -- pages ------------------------------------------------------------------------------------------------------------


def between(page: str, name: str, text: str) -> str:
    """``page`` with what stands between the marks of ``name`` replaced.

    Raises:
        ValueError: when it has no such marks.
    """
    begin, end = f"<!-- {name}: made by benchmarks/report.py -->", f"<!-- end of {name} -->"
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"a page lacks the marks {begin} and {end}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"results": results},
    "docs/benchmarks.md": {"commands": commands, "options": options},
    "docs/distributed.md": {
        "all-reduces": all_reduces,
        "sums of GPUs": lambda: rank_tables.sums_of_gpus(everywhere("bench_all_reduce")),
        "scaling": lambda: rank_tables.scaling(everywhere("bench_scaling")),
        "shared layers": shared_layers,
    },
    "docs/fusion.md": {"fused steps": fused_steps, "fused pairs": fused_pairs},
    "docs/memory.md": {"pinning": pinning, "predicted": predicted_steps, "limited-steps": limited_steps},
    "docs/sparse.md": {
        "products": sparse,
        "GPU products": lambda: sparse("h200"),
        "pruned networks": pruned,
        "compressed files": compressed,
        "shrunk networks": shrunk,
    },
    "docs/tuning.md": {"choices": choices},
    "docs/layers.md": {"networks": lambda: layer_pages.overview(RESULTS)},
}


def pages() -> dict[Path, str]:
    """Every page as the files of results have it."""
    made = {}
    for name, parts in PARTS.items():
        text = (ROOT / name).read_text()
        for mark, make in parts.items():
            text = between(text, mark, make())
        made[ROOT / name] = text
    for network in layer_pages.of_networks(RESULTS):
        made[ROOT / layer_pages.PAGE.format(network)] = layer_pages.page(RESULTS, network)
    return made


def draw() -> None:
    """All pictures; those that no page shows any more go."""
    folder = (ROOT / layer_pages.PAGE).parent
    made = set()
    for name, _, figure in layer_pages.pictures(RESULTS):
        save(figure(), folder / f"{name}.png")
        made.add(f"{name}.png")
    for path in folder.glob("*.png"):
        if path.name not in made:
            path.unlink()


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--check", action="store_true", help="only compare")
    p.add_argument("--pictures", action="store_true", help="draw the pictures, too")
    a = p.parse_args()
    differ = {path: text for path, text in pages().items() if not path.exists() or path.read_text() != text}
    if a.check:
        for path in differ:
            print(f"{path.relative_to(ROOT)} differs: run python benchmarks/report.py")
        return int(bool(differ))
    for path, text in differ.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if a.pictures:
        draw()
    return 0


if __name__ == "__main__":
    sys.exit(main())
