"""Tables of choices among kernels and of fusion plans, made from files of results for report.py."""

from __future__ import annotations

import statistics

from result_files import Row, load, machine_of, machines

from minidl.profile.tables import markdown

__all__ = ["choices", "fused_convolutions", "fused_pairs", "fused_steps"]

_SHOWN = 12  # rows of a table that shows the worst only
_WHOLE = "ms", "apart_ms"  # with what the kernel leaves added up, and in passes of their own


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
    worst = sorted(rows, key=lambda row: row["peers"]["tuned"] / row["ms"])[:_SHOWN]
    lines = []
    for row in worst:
        ms, tuned = row["ms"], row["peers"]["tuned"]
        figures = f"{ms * 1e3:.1f}", f"{tuned * 1e3:.1f}", f"{ms / tuned - 1:.1%}"
        lines.append([f"{row['case']} {row['pass']}", *figures, row["kernel"], row["tuned"]])
    return f"{head}\n\n{markdown(['worst', 'µs', 'tuned µs', 'behind', 'kernel', 'tuned kernel'], lines)}"


def _fusion(part: str) -> list[tuple[str, Row]]:
    """(machine, row) of a part of bench_fusion."""
    return [
        (machine_of(file), row)
        for machine in machines()
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


def fused_convolutions() -> str:
    """What convolutions take longer for what they do for batch norms: by kind, and where that is most."""
    rows = [row for _, row in _fusion("convolutions")]
    kinds: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        kinds.setdefault((row["pass"], row["arm"].split(",")[0]), []).append(row)
    lines = []
    for key, some in kinds.items():
        costs, whole = [row["cost"] for row in some], [sum(row["count"] * row[k] for row in some) for k in _WHOLE]
        within = sum(row["cost"] <= row["limit"] for row in some)
        figures = f"{statistics.geometric_mean(1 + cost for cost in costs) - 1:+.1%}", f"{max(costs):+.1%}"
        beyond = sum(row["cost"] - row["bytes_ms"] / row["plain_ms"] <= row["limit"] for row in some)
        limit = f"{within} of {len(some)} ({some[0]['limit']:.0%})"
        lines.append([*key, *figures, limit, str(beyond), *(f"{ms:.2f}" for ms in whole)])
    if not lines:
        return ""
    head = markdown(
        ["pass", "on the way", "cost, mean", "worst", "within", "beyond bytes", "ms whole", "ms apart"], sorted(lines)
    )
    lines = [
        [f"{row['case']} {row['pass']}", row["arm"], f"{1e3 * row['plain_ms']:.1f}", f"{1e3 * row['kernel_ms']:.1f}"]
        + [f"{row['cost']:+.1%}", f"{row['bytes_ms'] / row['plain_ms']:+.1%}"]
        + [f"{1e3 * ms:.1f}" for ms in (row["ms"], row["apart_ms"], row["peers"]["torch-eager"])]
        for row in sorted(rows, key=lambda row: row["limit"] - row["cost"])[:_SHOWN]
    ]
    columns = ["worst", "on the way", "µs without", "with", "cost", "of it bytes", "whole", "apart", "PyTorch"]
    return f"{head}\n\n{markdown(columns, lines)}"


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
