"""Tables of fusion plans, and the maps of the fastest."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

from minidl.fusion import PLANS
from minidl.profile import plots
from minidl.profile.tables import markdown
from pages.files import NOTHING, Row, load, machine_of, machines, table

_CHOSEN, _RIVALS = ("auto", "adaptive"), ("none", "bnff-everywhere")
_ARMS = [*PLANS, "bnff-everywhere", *_CHOSEN]
_SHOWN = 12  # rows of a table that shows the worst only
_WHOLE = "ms", "apart_ms"  # with what the kernel leaves added up, and in passes of their own


def _fusion(part: str) -> list[tuple[str, Row]]:
    """(machine, row) of a part of bench_fusion: of each case and precision those of the newest file that has any."""
    files = sorted((file for machine in machines() for file in load(machine, "bench_fusion")), key=itemgetter("date"))
    found: dict[tuple[str, ...], list[tuple[str, Row]]] = {}
    for file in files:
        rows = [(machine_of(file), row) for row in file["rows"] if row["part"] == part]
        key = lambda pair: (pair[0], _case(pair[1]), pair[1]["dtype"])  # noqa: E731
        found |= {one: [pair for pair in rows if key(pair) == one] for one in map(key, rows)}
    return [pair for pairs in found.values() for pair in pairs]


def _case(row: Row) -> str:
    """What is measured at one go: a network, or all convolutions of one."""
    return row["case"] if row["part"] != "convolutions" else row["case"].split()[0]


def fused_steps() -> str:
    """Steps by fusion plan: the networks first where measuring gains least over the best fixed plan.

    After the times stand what the chosen plans gain over the best fixed one, what measuring gains over the best one in
    which kernels choose nothing either, and over the rivals that the literature has, the memory that a step without a
    plan and a chosen one hold, and the largest spread. A gain is that of the median turn, with the turns in which there
    was one.
    """
    cases: dict[tuple[str, ...], dict[str, Row]] = {}
    for machine, row in _fusion("steps"):
        cases.setdefault((row["case"], machine, row["dtype"]), {})[row["arm"]] = row
    arms = sorted({arm for rows in cases.values() for arm in rows}, key=_ARMS.index)
    chosen = [arm for arm in _CHOSEN if arm in arms]
    lines = []
    for case, rows in cases.items():
        ms = {arm: row["ms"] for arm, row in rows.items()}
        fixed = min((arm for arm in ms if arm not in _CHOSEN), key=ms.__getitem__)
        uniform = min((arm for arm in ms if arm not in (*_CHOSEN, "bnff")), key=ms.__getitem__)
        best = "adaptive" if "adaptive" in ms else "auto"
        gains = [_gain(rows[fixed], rows[arm])[1] if arm in ms else "" for arm in chosen]
        gains += [_gain(rows[uniform], rows[best])[1] if "bnff-everywhere" in ms else ""]
        gains += [f"{ms[rival] / ms[best]:.2f}" if rival in ms else "" for rival in _RIVALS]
        held = [rows[arm].get("device_bytes") for arm in ("none", best)]
        gains += [" → ".join(f"{number / 1e9:.1f}" for number in held) if all(held) else ""]
        spread = max(row["spread"] for row in rows.values())
        times = [f"{ms[arm]:.2f}" if arm in ms else "" for arm in arms]
        lines.append((_gain(rows[fixed], rows[best])[0], [*case, *times, *gains, f"{spread:.1%}"]))
    gained = [*(f"best fixed / {arm}" for arm in chosen), "best where none declines / chosen"]
    gained += [*(f"{rival} / chosen" for rival in _RIVALS), "GB", "spread"]
    head = ["network", "machine", "dtype", *arms, *gained]
    return table(head, [line for _, line in sorted(lines, key=lambda line: line[0])])


def _gain(before: Row, after: Row) -> tuple[float, str]:
    """Of steps that took turns: in the median one; and in words, with the turns that gained."""
    ratios = [a / b for a, b in zip(before.get("turns_ms", ()), after.get("turns_ms", ()), strict=True)]
    if not ratios:
        return before["ms"] / after["ms"], f"{before['ms'] / after['ms']:.3f}"
    gain = statistics.median(ratios)
    return gain, f"{gain:.3f}, {sum(ratio > 1 for ratio in ratios)} of {len(ratios)}"


def fused_sites() -> str:
    """What choosing for each site could gain: the sums of all sites' times by plan, and with the best way at each."""
    cases: dict[tuple[str, ...], list[Row]] = {}
    for machine, row in _fusion("sites"):
        cases.setdefault((row["case"], machine, row["dtype"]), []).append(row)
    lines, plans = [], []
    for case, rows in cases.items():
        sums, best = _sums(rows)
        plans = [plan for plan in sums if plan not in ("auto", "adaptive")]
        fixed = min(plans, key=sums.__getitem__)
        gain = sums[fixed] / best
        cells = [f"{sums[plan]:.2f}" for plan in (*plans, "auto")]
        lines.append((gain, [*case, *cells, f"{best:.2f}", f"{gain:.3f} ({fixed})", f"{sums['auto'] / best:.3f}"]))
    head = ["network", "machine", "dtype", *plans, "auto", "best of each", "best fixed / best", "auto / best"]
    return table(head, [line for _, line in sorted(lines, key=lambda line: line[0])])


def each_site() -> str:
    """Every distinct site by network: forward + backward microseconds by plan, and of the best way."""
    cases: dict[tuple[str, ...], dict[str, list[Row]]] = {}
    for machine, row in _fusion("sites"):
        cases.setdefault((row["case"], machine, row["dtype"]), {}).setdefault(row["site"], []).append(row)
    parts = []
    for case, of_sites in cases.items():
        lines = sorted((_site_line(rows) for rows in of_sites.values()), key=lambda line: line[0])
        head = ["batch norm", "shape", "times", *PLANS, "best", "bnff / best", "by"]
        parts.append(f"## {', '.join(case)}\n\n{markdown(head, [line for _, line in lines])}")
    return "\n\n".join(parts) or NOTHING


def _site_line(rows: list[Row]) -> tuple[float, list[str]]:
    """(what the best way gains over the plan that fuses everything, the cells of a site)"""
    ways: dict[str, list[Row]] = {}
    for row in rows:  # forward before backward
        ways.setdefault(row["arm"], []).append(row)
    ms = {way: sum(row["ms"] for row in both) for way, both in ways.items()}
    best = min(ms, key=ms.__getitem__)
    by_plan = {plan: way for way, (first, _) in ways.items() for plan in first["plans"]}
    cells = [" + ".join(f"{1e3 * row['ms']:.0f}" for row in ways[way]) for way in (*map(by_plan.get, PLANS), best)]
    gain = ms[by_plan["bnff"]] / ms[best]
    shape = "x".join(map(str, rows[0]["shape"]))
    return gain, [rows[0]["site"], shape, str(rows[0]["count"]), *cells, f"{gain:.3f}", best]


def _sums(rows: list[Row]) -> tuple[dict[str, float], float]:
    """(milliseconds of all sites by plan, and by the best way of each)"""
    ways: dict[tuple[str, str], Row] = {}
    for row in rows:
        entry = ways.setdefault((row["site"], row["arm"]), {**row, "ms": 0.0})
        entry["ms"] += row["ms"]
    sums: dict[str, float] = {}
    best: dict[str, float] = {}
    for (site, _), row in ways.items():
        ms = row["count"] * row["ms"]
        best[site] = min(best.get(site, ms), ms)
        for plan in row["plans"]:
            sums[plan] = sums.get(plan, 0.0) + ms
    return sums, sum(best.values())


def fusion_maps() -> dict[str, Callable[[], Any]]:
    """The pictures of the fastest way over sizes and channels: name without suffix, and what draws it."""
    maps: dict[tuple[str, str, str], list[Row]] = {}
    for machine, row in _fusion("map"):
        maps.setdefault((machine, row["case"], row["dtype"]), []).append(row)
    found = {}
    for (machine, case, dtype), rows in maps.items():
        batch = case.partition("/b")[2]
        words = "The fastest way of running a batch norm", f"{machine}, batch {batch}, {dtype}"
        found[f"fusion-map-{dtype}-b{batch}"] = partial(plots.fusion, rows, *words)
    return found


def bound(row: Row) -> float:
    """What a convolution takes longer for what it does on the way, over its time without, if only what it reads and
    writes then counted, at the speed of a copy."""
    return max(0.0, row["floor_ms"] / row["plain_ms"] - 1)


def fused_convolutions() -> str:
    """What convolutions take longer for what they do for batch norms: by kind, and where that is most."""
    rows = [row for _, row in _fusion("convolutions")]
    if not rows:
        return NOTHING
    kinds: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        kinds.setdefault((row["pass"], row["arm"].split(",")[0]), []).append(row)
    lines = []
    for key, some in kinds.items():
        costs, whole = [row["cost"] for row in some], [sum(row["count"] * row[k] for row in some) for k in _WHOLE]
        within = sum(row["cost"] <= row["limit"] for row in some)
        figures = f"{statistics.geometric_mean(1 + cost for cost in costs) - 1:+.1%}", f"{max(costs):+.1%}"
        above = sum(1 + row["cost"] <= (1 + bound(row)) * (1 + row["limit"]) for row in some)
        chosen = [1 + row["cost"] for row in some if row.get("planned")]
        planned = f"{statistics.geometric_mean(chosen) - 1:+.1%} of {len(chosen)}" if chosen else "–"
        limit = f"{within} of {len(some)} ({some[0]['limit']:.0%})"
        lines.append([*key, *figures, limit, str(above), planned, *(f"{ms:.2f}" for ms in whole)])
    head = markdown(
        ["pass", "on the way", "cost, mean", "worst", "within", "of bound", "in the plan", "ms whole", "ms apart"],
        sorted(lines),
    )
    lines = [
        [f"{row['case']} {row['pass']}", row["arm"], f"{1e3 * row['plain_ms']:.1f}", f"{1e3 * row['kernel_ms']:.1f}"]
        + [f"{row['cost']:+.1%}", f"{bound(row):+.1%}"]
        + [f"{1e3 * ms:.1f}" for ms in (row["ms"], row["apart_ms"], row["peers"]["torch-eager"])]
        for row in sorted(rows, key=lambda row: row["limit"] - row["cost"])[:_SHOWN]
    ]
    columns = ["worst", "on the way", "µs without", "with", "cost", "bound", "whole", "apart", "PyTorch"]
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
    return table(["network", "machine", "dtype", "distinct pairs", "regret, mean", "worst"], rows)
