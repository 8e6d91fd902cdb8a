"""``minidl simulate``: a step on many hosts, from what was measured on few GPUs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from minidl import checks
from minidl.dist.simulated import AlphaBeta
from minidl.profile import scaling
from minidl.profile.plots import save, simulated
from minidl.profile.results import load, result, write
from minidl.profile.runs import NotInFile, Run, runs
from minidl.profile.scaling import Cluster, Outcome, StepTimes
from minidl.profile.tables import show

__all__ = ["add_arguments", "node_counts", "run"]

_BREAKS = 0.9  # efficiency below which more hosts are said to be lost
_SHOWN_MESSAGES = 8
_MIB = 1 << 20


def add_arguments(p: argparse.ArgumentParser) -> None:
    """The options of ``minidl simulate``."""
    p.add_argument("file", help="result of minidl bench model on one rank")
    p.add_argument("--case", help="a part of the network's name in it, such as resnet50/224x224/b64")
    p.add_argument("--nodes", default="1..128", help="hosts: 1..128 (doubling) or 1,2,3")
    p.add_argument("--ranks-per-node", type=int, default=8, help="GPUs of a host")
    p.add_argument("--links", metavar="FILE", help="result of several ranks: its all-reduces are those within a host")
    p.add_argument("--link", metavar="US,GB/S", help="or latency and bandwidth of each rank within a host")
    p.add_argument("--network", metavar="US,GB/S", default="10,50", help="between hosts, of each rank")
    p.add_argument("--group-mib", help="bytes of a message in MiB: 0,4,25 (0: each layer's own); default: several")
    p.add_argument("--message-dtype", default="fp32", choices=["fp32", "bf16"])
    p.add_argument("--interference", type=float, default=scaling.INTERFERENCE, help="speed lost beside a message")
    p.add_argument(
        "--check", nargs="+", metavar="FILE", default=[], help="compare with steps measured on several ranks"
    )
    p.add_argument("--json", help="result file")
    p.add_argument("--plot", metavar="PATH", help="picture, .svg or .png")


def run(a: argparse.Namespace) -> int:
    """Simulate and show, or compare with what was measured."""
    known = {one.case: one for one in runs(load(a.file), a.file) if one.case}
    if a.check:
        _check(known, a)
        return 0
    step = scaling.measured(_chosen(known, a.case, a.file))
    outcomes = sweep(step, _cluster(a), node_counts(a.nodes), a)
    _show(step, outcomes, a)
    if a.json:
        write(a.json, result("simulate", [_row(step, o, a) for found in outcomes for o in found], simulated=True))
    if a.plot:
        save(simulated(step, outcomes), a.plot)
        print(f"wrote {a.plot}")
    return 0


def sweep(step: StepTimes, cluster: Cluster, hosts: Sequence[int], a: argparse.Namespace) -> list[list[Outcome]]:
    """For each number of hosts the outcomes of all group sizes, the fastest first."""
    groups = scaling.GROUPS if a.group_mib is None else [round(_MIB * x) for x in _numbers("--group-mib", a.group_mib)]
    options = {"interference": a.interference, "message_share": 0.5 if a.message_dtype == "bf16" else 1.0}
    return [
        sorted((scaling.simulate(step, cluster, n, size, **options) for size in groups), key=lambda o: o.ms)
        for n in hosts
    ]


def node_counts(text: str) -> list[int]:
    """``1..128``: 1, 2, 4, ..., 128; ``1,3``: those.

    Raises:
        ValueError: for anything else.
    """
    first, dots, last = text.partition("..")
    parts = [first, last] if dots else text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts) or (dots and int(first) > int(last)):
        raise checks.bad_value("simulate", "--nodes", "1..128 or 1,2,3", text)
    numbers = [int(part) for part in parts]
    if not dots:
        return numbers
    doubled = [numbers[0] << i for i in range(numbers[1].bit_length()) if numbers[0] << i < numbers[1]]
    return [*doubled, numbers[1]]


def _chosen(known: dict[str, Run], case: str | None, file: str) -> Run:
    """The one network that is meant.

    Raises:
        ValueError: when there is none, or several.
    """
    found = [one for name, one in known.items() if case is None or case in name]
    exact = [one for one in found if one.case == case]
    if len(exact or found) != 1:
        raise checks.bad_value("simulate", "--case", f"one of the networks of {file}: {', '.join(known)}", case)
    return (exact or found)[0]


def _cluster(a: argparse.Namespace) -> Cluster:
    ranks = checks.at_least("simulate", "--ranks-per-node", a.ranks_per_node, 1)
    if a.links:
        _, points = scaling.points_of(load(a.links), a.links)
    elif a.link:
        line = _line("--link", a.link)
        points = tuple((size, 1e3 * (line.latency + size / line.bandwidth)) for size in (0.0, 1e3, 1e10))
    elif ranks > 1:
        remedy = "give --links h200-x2/bench_model_bf16.json.gz, or --link 10,300"
        raise checks.bad_value("simulate", "--links", "the all-reduces within a host", None, remedy)
    else:
        points = ()
    return Cluster(ranks, points, _line("--network", a.network))


def _line(option: str, text: str) -> AlphaBeta:
    numbers = _numbers(option, text)
    if len(numbers) != 2 or numbers[1] == 0:
        raise checks.bad_value("simulate", option, "microseconds and GB/s, such as 10,50", text)
    return AlphaBeta(numbers[0] * 1e-6, numbers[1] * 1e9)


def _numbers(option: str, text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [-1.0]
    if min(numbers) < 0 or max(numbers) == float("inf"):
        raise checks.bad_value("simulate", option, "numbers of at least 0, separated by commas", text)
    return numbers


# -- what is shown ----------------------------------------------------------------------------------------------------


def _show(step: StepTimes, outcomes: list[list[Outcome]], a: argparse.Namespace) -> None:
    columns = ["nodes", "ranks", "group MiB", "step ms", "efficiency", "images/s", "waited ms", "slowed ms", "sums ms"]
    rows = []
    for found in outcomes:
        o = found[0]
        total = sum(message.end - message.begin for message in o.messages)
        times = [f"{ms:.3f}" for ms in (o.waited_ms, o.slowed_ms, total)]
        figures = [group_name(o), f"{o.ms:.3f}", f"{o.efficiency:.1%}", f"{o.images_per_s:,.0f}"]
        rows.append([str(o.hosts), str(o.ranks), *figures, *times])
    title = f"simulated: {step.case}, {a.message_dtype} messages, one rank alone {step.ms:.3f} ms"
    show(title, columns, rows, notes=[_breaking(outcomes)])
    last = outcomes[-1][0]
    longest = sorted(last.messages, key=lambda m: m.end - m.begin, reverse=True)[:_SHOWN_MESSAGES]
    cells = [
        [_ends(m.layers), f"{m.nbytes / _MIB:.2f}", *(f"{x:.3f}" for x in (m.ready, m.begin, m.end, m.waited))]
        for m in longest
    ]
    show(
        f"the longest of {len(last.messages)} messages on {last.ranks} ranks",
        ["layers", "MiB", "ready ms", "begin ms", "end ms", "waited ms"], cells,
    )  # fmt: skip


def _breaking(outcomes: list[list[Outcome]]) -> str:
    """Where more hosts begin to be lost, and to what."""
    for found in outcomes:
        o = found[0]
        if o.efficiency < _BREAKS:
            late = max(o.messages, key=lambda m: m.waited)
            why = f"the update waits {o.waited_ms:.2f} ms, most for {_ends(late.layers)}"
            if o.slowed_ms > o.waited_ms:
                why = f"compute loses {o.slowed_ms:.2f} ms to the messages beside it"
            return f"below {_BREAKS:.0%} from {o.ranks} ranks: {why}"
    return f"above {_BREAKS:.0%} everywhere"


def group_name(o: Outcome) -> str:
    """The size of messages in MiB, in words at both ends."""
    if o.group_bytes == 0:
        return "a layer"
    return "all" if len(o.messages) == 1 else f"{o.group_bytes / _MIB:g}"


def _ends(layers: Sequence[str]) -> str:
    return layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"


def _row(step: StepTimes, o: Outcome, a: argparse.Namespace) -> dict[str, Any]:
    return {
        "case": step.case, "pass": "step", "dtype": a.message_dtype, "arm": f"simulated, groups of {group_name(o)}",
        "ms": o.ms, "spread": None, "floor_ms": o.alone_ms, "peers": {}, "nodes": o.hosts, "ranks": o.ranks,
        "group_bytes": o.group_bytes, "efficiency": o.efficiency, "images_per_s": o.images_per_s,
        "waited_ms": o.waited_ms, "slowed_ms": o.slowed_ms, "messages": [asdict(message) for message in o.messages],
    }  # fmt: skip


def _check(known: dict[str, Run], a: argparse.Namespace) -> None:
    """Beside what was measured on several ranks: the step, and what communication adds to it."""
    rows, errors = [], []
    for file in a.check:
        for o, one, alone in compared(known, file, a.interference):
            ms = one.step["ms"]
            errors.append(o.ms / ms - 1)
            figures = [f"{ms:.3f}", f"{o.ms:.3f}", f"{errors[-1]:+.1%}", f"{ms - alone:.3f}", f"{o.exposed_ms:.3f}"]
            rows.append([one.case, str(o.ranks), *figures])
    if not rows:
        raise NotInFile(f"{', '.join(a.check)}: no step on several ranks of a network of {a.file}")
    order = sorted(range(len(rows)), key=lambda i: -abs(errors[i]))
    columns = ["network", "ranks", "measured ms", "simulated ms", "error", "added ms, measured", "simulated"]
    worst = max(map(abs, errors))
    show("simulated beside measured", columns, [rows[i] for i in order], notes=[f"worst error of a step: {worst:.1%}"])


def compared(
    known: dict[str, Run], file: str, interference: float = scaling.INTERFERENCE
) -> list[tuple[Outcome, Run, float]]:
    """(simulated, measured, milliseconds of one rank) of every network that both have, as its messages were grouped."""
    content = load(file)
    ranks, points = scaling.points_of(content, file)
    groups = {point["case"]: point["setup"]["group_bytes"] for point in content.get("points", [])}
    cluster = Cluster(ranks, points, AlphaBeta(0.0, 1.0))
    found = []
    for one in runs(content, file):
        if one.case in known and one.case in groups and one.ranks == ranks:
            step = scaling.measured(known[one.case])
            o = scaling.simulate(step, cluster, 1, groups[one.case], interference=interference)
            found.append((o, one, step.ms))
    return found
