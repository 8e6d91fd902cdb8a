"""``minidl simulate``: a step on many hosts, from what was measured on few GPUs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from minidl import checks
from minidl.dist.simulated import AlphaBeta
from minidl.profile import scaling
from minidl.profile.cluster import Cluster, Sums, sums_of
from minidl.profile.plots import save, simulated
from minidl.profile.results import load, result, write
from minidl.profile.runs import NotInFile, Run, runs
from minidl.profile.scaling import Interference, Outcome, StepTimes
from minidl.profile.tables import show

_BREAKS = 0.9  # efficiency below which more hosts are said to be lost
_SHOWN_MESSAGES = 8
_MIB = 1 << 20


_IMAGINED = (
    "case", "nodes", "ranks_per_node", "engine", "link", "network", "group_mib", "message_dtype", "json", "plot",
)  # fmt: skip


def add_arguments(p: argparse.ArgumentParser) -> None:
    """The options of ``minidl simulate``."""
    p.add_argument("file", help="result of minidl bench model on one rank")
    p.add_argument("--case", help="a part of the network's name in it, such as resnet50/224x224/b64")
    p.add_argument("--nodes", default="1..128", help="hosts: 1..128 (doubling) or 1,2,3")
    p.add_argument("--ranks-per-node", type=int, default=8, help="GPUs of a host")
    p.add_argument(
        "--links", nargs="+", metavar="FILE", default=[],
        help="results of several ranks, such as those of minidl doctor --json: all-reduces within a host",
    )  # fmt: skip
    p.add_argument("--engine", help="whose all-reduces, where a file has several: links, nccl, ...; default: the first")
    p.add_argument("--link", metavar="US,GB/S", help="or latency and bandwidth of each rank within a host")
    p.add_argument("--network", metavar="US,GB/S", default="10,50", help="between hosts, of each rank")
    p.add_argument(
        "--group-mib", metavar="LIST",
        help="bytes of a message in MiB: 0,4,25 (0: each layer's own); default: several",
    )  # fmt: skip
    p.add_argument("--message-dtype", default="fp32", choices=["fp32", "bf16"])
    p.add_argument(
        "--interference", metavar="P,M,US",
        help="share of its speed that compute loses beside a message (where products bound it, and where the memory "
        f"does), and microseconds for each message; default: {scaling.INTERFERENCE}",
    )  # fmt: skip
    p.add_argument(
        "--check", nargs="+", metavar="FILE", default=[], help="compare with steps that bench_scaling.py measured"
    )
    p.add_argument("--fit", action="store_true", help="with --check: also the interference that explains them best")
    p.add_argument("--json", help="result file")
    p.add_argument("--plot", metavar="PATH", help="picture, .svg or .png")


def run(a: argparse.Namespace) -> int:
    """Simulate and show, or compare with what was measured."""
    known = {one.case: one for one in runs(load(a.file), a.file) if one.case}
    if a.check:
        _refuse(a)
        _check(known, a)
        return 0
    if a.fit:
        raise checks.bad_value("", "--fit", "left out without --check", True, "give it steps of several ranks")
    step = scaling.measured(_chosen(known, a.case, a.file))
    outcomes = sweep(step, _cluster(a), node_counts(a.nodes), a)
    _show(step, outcomes, a)
    if a.json:
        write(a.json, result("simulate", [_row(step, o, a) for found in outcomes for o in found], simulated=True))
        print(f"wrote {a.json}")
    if a.plot:
        save(simulated(step, outcomes), a.plot)
        print(f"wrote {a.plot}")
    return 0


def _refuse(a: argparse.Namespace) -> None:
    """Options of a cluster that is not there are errors where steps of one that is are checked."""
    usual = argparse.ArgumentParser()
    add_arguments(usual)
    for name in _IMAGINED:
        if getattr(a, name) != usual.get_default(name):
            raise checks.bad_value("", f"--{name.replace('_', '-')}", "left out with --check", getattr(a, name))


def sweep(step: StepTimes, cluster: Cluster, hosts: Sequence[int], a: argparse.Namespace) -> list[list[Outcome]]:
    """For each number of hosts the outcomes of all group sizes, the fastest first."""
    groups = scaling.GROUPS
    if a.group_mib is not None:
        groups = tuple(round(_MIB * size) for size in _numbers("--group-mib", a.group_mib))
    share = 0.5 if a.message_dtype == "bf16" else 1.0
    options: dict[str, Any] = {"interference": _interference(a.interference), "message_share": share}

    def outcome(n: int, size: int) -> Outcome:
        waits = step.images if n == 1 and cluster.by_kernels else 0
        return scaling.simulate(step, cluster, n, size, waits=waits, **options)

    return [sorted((outcome(n, size) for size in groups), key=lambda o: o.ms) for n in hosts]


def _interference(text: str | None) -> Interference:
    if text is None:
        return scaling.INTERFERENCE
    numbers = _numbers("--interference", text)
    if len(numbers) > 3:
        raise checks.bad_value("", "--interference", "one to three numbers, such as 0.6,0.2,8", text)
    products, memory = numbers[0], numbers[min(1, len(numbers) - 1)]
    return Interference(products, memory, sum(numbers[2:]) / 1e3)


def node_counts(text: str) -> list[int]:
    """``1..128``: 1, 2, 4, ..., 128; ``1,3``: those.

    Raises:
        ValueError: for anything else.
    """
    first, dots, last = text.partition("..")
    parts = [first, last] if dots else text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts) or (dots and int(first) > int(last)):
        raise checks.bad_value("", "--nodes", "1..128 or 1,2,3", text)
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
        raise checks.bad_value("", "--case", f"one of the networks of {file}: {', '.join(known)}", case)
    return (exact or found)[0]


def _cluster(a: argparse.Namespace) -> Cluster:
    ranks = checks.at_least("", "--ranks-per-node", a.ranks_per_node, 1)
    kernels = False
    if a.links:
        sums = _nearest(_links(a.links), ranks)
        points, kernels = sums.points(a.engine or ""), (a.engine or next(iter(sums.engines))).startswith("links")
    elif a.link:
        line = _line("--link", a.link)
        points = tuple((size, 1e3 * (line.latency + size / line.bandwidth)) for size in (0.0, 1e3, 1e10))
    elif ranks > 1:
        remedy = "give --links FILE (minidl doctor --json FILE under mpirun makes one), or --link 10,300"
        raise checks.bad_value("", "--links", "the all-reduces within a host", None, remedy)
    else:
        points = ()
    return Cluster(ranks, points, _line("--network", a.network), kernels)


def _links(files: Sequence[str]) -> list[Sums]:
    return [sums_of(load(file), file) for file in files]


def _nearest(links: Sequence[Sums], ranks: int) -> Sums:
    """Of so many ranks, or of the number next to it: bytes on the wire are those of a ring in any."""
    return min(links, key=lambda sums: abs(sums.ranks - ranks))


def _line(option: str, text: str) -> AlphaBeta:
    numbers = _numbers(option, text)
    if len(numbers) != 2 or numbers[1] == 0:
        raise checks.bad_value("", option, "microseconds and GB/s, such as 10,50", text)
    return AlphaBeta(numbers[0] * 1e-6, numbers[1] * 1e9)


def _numbers(option: str, text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [-1.0]
    if min(numbers) < 0 or max(numbers) == float("inf"):
        raise checks.bad_value("", option, "numbers of at least 0, separated by commas", text)
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
    return "all" if o.group_bytes >= scaling.ALL or len(o.messages) == 1 else f"{o.group_bytes / _MIB:g}"


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
    interference, links = _interference(a.interference), _links(a.links)
    cases = [case for file in a.check for case in measurements(known, file, links)]
    if not cases:
        raise NotInFile(f"{', '.join(a.check)}: no step on several ranks of a network of {a.file}")
    rows, errors = [], []
    for case in cases:
        o = case.simulated(interference)
        errors.append(o.ms / case.ms - 1)
        added = [f"{case.added_ms:.3f}", f"{o.exposed_ms:.3f}"]
        figures = [f"{case.ms:.3f}", f"{o.ms:.3f}", f"{errors[-1]:+.1%}", *added]
        rows.append([case.step.case, str(o.ranks), case.arm, str(case.messages), str(len(o.messages)), *figures])
    order = sorted(range(len(rows)), key=lambda i: -abs(errors[i]))
    columns = ["network", "ranks", "messages", "sent", "simulated", "measured ms", "simulated ms", "error"]
    columns += ["added ms, measured", "simulated"]
    notes = [f"worst error of a step: {max(map(abs, errors)):.1%}"]
    if a.fit:
        found = scaling.fitted([(c.step, c.cluster, c.group_bytes, c.share, c.added_ms) for c in cases])
        notes.append(f"what explains the added times best: --interference {found}")
    show("simulated beside measured", columns, [rows[i] for i in order], notes=notes)


@dataclass(frozen=True)
class Measured:
    """A step on several ranks, and what it is simulated from.

    Attributes:
        added_ms: to the step of the same ranks without messages.
        messages, waiting: that were sent, and of these that waited to start.
    """

    step: StepTimes
    cluster: Cluster
    arm: str
    group_bytes: int
    share: float
    ms: float
    added_ms: float
    messages: int
    waiting: int
    factors: bool

    def simulated(self, interference: Interference) -> Outcome:
        """The same step on paper."""
        options: dict[str, Any] = {"interference": interference, "message_share": self.share}
        options |= {"factors": self.factors, "waits": math.inf if self.waiting else 0.0}  # some files hold by force
        return scaling.simulate(self.step, self.cluster, 1, self.group_bytes, **options)


def measurements(known: dict[str, Run], file: str, links: Sequence[Sums] = ()) -> Iterator[Measured]:
    """The steps on several ranks in a file of ``bench_scaling.py``, of networks whose layers are known from one rank:
    these, in the time of the step without messages of the same run.
    """
    content = load(file)
    if content["benchmark"] != "bench_scaling":
        raise NotInFile(f"{file}: no steps with messages and without in one run; make it with bench_scaling.py")
    for row in content["rows"]:
        engine = row["arm"].partition("/")[0]
        if row["case"] not in known or row["group"] == "near":
            continue
        sums = next((sums for sums in links if sums.ranks == row["ranks"] and engine in sums.engines), None)
        if sums is None:
            remedy = "give --links that minidl doctor --json measured on it, or bench_all_reduce.py"
            expected = f"all-reduces by {engine} of {row['ranks']} ranks, for {file}"
            raise checks.bad_value("", "--links", expected, None, remedy)
        step = scaling.measured(known[row["case"]]).scaled(row["alone_ms"])
        share = 0.5 if row["message_dtype"] == "bf16" else 1.0
        cluster = Cluster(sums.ranks, sums.points(engine), AlphaBeta(0.0, 1.0))
        yield Measured(
            step, cluster, row["arm"], round(_MIB * float(row["group"])), share, row["ms"], row["exposed_ms"],
            row["messages"], row["waiting"], not row["arm"].endswith("/sums"),
        )  # fmt: skip
