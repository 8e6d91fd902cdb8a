"""Tables of fusion plans, and the maps of the fastest."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from minidl.fusion import PLANS
from minidl.profile import plots
from minidl.profile.tables import markdown
from pages.files import NOTHING, File, Row, machine_of, table

_CHOSEN, _RIVALS = ("auto", "adaptive"), ("none", "bnff-everywhere")
_ARMS = [*PLANS, "bnff-everywhere", *_CHOSEN]
_SHOWN = 12  # rows of a table that shows the worst only
_WHOLE = "ms", "apart_ms"  # with what the kernel leaves added up, and in passes of their own


def _fusion(files: Iterable[File], part: str) -> list[tuple[str, Row]]:
    """(machine, row and its commit) of a part of bench_fusion: of each case and precision those of the newest file that
    has any.
    """
    found: dict[tuple[str, ...], list[tuple[str, Row]]] = {}
    for file in sorted(files, key=itemgetter("date")):
        own, machine = {"commit": file["commit"]}, machine_of(file)
        rows = [(machine, row | own) for row in file["rows"] if row["part"] == part]
        key = lambda pair: (pair[0], _case(pair[1]), pair[1]["dtype"])  # noqa: E731
        found |= {one: [pair for pair in rows if key(pair) == one] for one in map(key, rows)}
    return [pair for pairs in found.values() for pair in pairs]


def _cases(files: Iterable[File], part: str) -> dict[tuple[str, ...], list[Row]]:
    """Its rows by network, machine and dtype."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for machine, row in _fusion(files, part):
        found.setdefault((row["case"], machine, row["dtype"]), []).append(row)
    return found


def _case(row: Row) -> str:
    """What is measured at one go: a network, or one thing that all convolutions of one do on the way."""
    return row["case"] if row["part"] != "convolutions" else f"{row['case'].split()[0]} {_kind(row)}"


def _kind(row: Row) -> str:
    return row["arm"].split(",")[0]


def fused_steps(files: Iterable[File]) -> str:
    """Steps by fusion plan: the networks first where measuring gains least over the best fixed plan.

    After the times stand what the chosen plans gain over the best fixed one, what measuring gains over the best one in
    which kernels choose nothing either, and over the rivals that the literature has, the memory that a step without a
    plan and a chosen one hold, and the largest spread. A gain is that of the median turn, with the turns in which there
    was one.
    """
    cases = {case: {row["arm"]: row for row in rows} for case, rows in _cases(files, "steps").items()}
    arms = sorted({arm for rows in cases.values() for arm in rows}, key=_ARMS.index)
    chosen = [arm for arm in _CHOSEN if arm in arms]
    lines = []
    for case, rows in cases.items():
        ms = {arm: row["ms"] for arm, row in rows.items()}
        best = next((arm for arm in ("adaptive", "auto") if arm in ms), min(ms, key=ms.__getitem__))
        fixed = min((arm for arm in ms if arm not in _CHOSEN), key=ms.__getitem__, default=best)
        uniform = min((arm for arm in ms if arm not in (*_CHOSEN, "bnff")), key=ms.__getitem__, default=best)
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


def fused_sites(files: Iterable[File]) -> str:
    """What choosing for each site could gain: the sums of all sites' times by plan and with the best way at each;
    how far `auto` is behind that, in all and at the site where it is most.
    """
    lines = []
    for case, rows in _cases(files, "sites").items():
        sites = [_site(own) for own in _by(rows, "site").values()]
        sums = {plan: sum(site.count * site.ms(site.by_plan[plan]) for site in sites) for plan in (*PLANS, "auto")}
        best, fixed = sum(site.count * site.ms(site.best()) for site in sites), min(PLANS, key=sums.__getitem__)
        gains = [f"{sums[fixed] / best:.3f} ({fixed})", f"{sums['auto'] / best:.3f}"]
        gains += [f"{max(site.behind('auto') for site in sites):.3f}"]
        lines.append((sums[fixed] / best, [*case, *(f"{ms:.2f}" for ms in (*sums.values(), best)), *gains]))
    head = ["network", "machine", "dtype", *PLANS, "auto", "best of each", "best fixed / best", "auto / best"]
    head += ["auto / best at the worst"]
    return table(head, [line for _, line in sorted(lines, key=lambda line: line[0])])


def each_site(files: Iterable[File]) -> str:
    """Every distinct site by network: forward + backward microseconds by plan and of the best way; those last where
    `auto` is farthest behind it.
    """
    parts = []
    head = ["batch norm", "shape", "times", *PLANS, "best", "bnff / best", "auto / best", "by"]
    for case, rows in _cases(files, "sites").items():
        found = sorted(map(_site, _by(rows, "site").values()), key=lambda site: site.behind("auto"))
        title = f"{', '.join(case)}, commit {rows[0]['commit']}"
        parts.append(f"## {title}\n\n{markdown(head, [_cells(site) for site in found])}")
    return "\n\n".join(parts) or NOTHING


def _by(rows: list[Row], key: str) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row[key], []).append(row)
    return found


class _Site(NamedTuple):
    """One of the rows, which of them run each way, and each plan's way."""

    row: Row
    ways: dict[str, list[Row]]
    by_plan: dict[str, str]

    @property
    def count(self) -> int:
        return self.row["count"]

    def ms(self, way: str) -> float:
        return sum(row["ms"] for row in self.ways[way])

    def best(self) -> str:
        return min(self.ways, key=self.ms)

    def behind(self, plan: str) -> float:
        """Its time over that of the best way."""
        return self.ms(self.by_plan[plan]) / self.ms(self.best())


def _site(rows: list[Row]) -> _Site:
    return _Site(rows[0], _by(rows, "arm"), {plan: row["arm"] for row in rows for plan in row["plans"]})


def _cells(site: _Site) -> list[str]:
    ways = [*(site.by_plan[plan] for plan in PLANS), site.best()]
    times = [" + ".join(f"{1e3 * row['ms']:.0f}" for row in site.ways[way]) for way in ways]  # forward before backward
    shape = "x".join(map(str, site.row["shape"]))
    behind = [f"{site.behind(plan):.3f}" for plan in ("bnff", "auto")]
    return [site.row["site"], shape, str(site.count), *times, *behind, site.best()]


def fusion_maps(files: Iterable[File]) -> dict[str, Callable[[], Any]]:
    """The pictures of the fastest way over sizes and channels: name without suffix, and what draws it."""
    maps: dict[tuple[str, str, str], list[Row]] = {}
    for machine, row in _fusion(files, "map"):
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


def fused_convolutions(files: Iterable[File]) -> str:
    """What convolutions take longer for what they do for batch norms: by kind, and where that is most."""
    rows = [row for _, row in _fusion(files, "convolutions")]
    if not rows:
        return NOTHING
    kinds: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        kinds.setdefault((row["pass"], _kind(row)), []).append(row)
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


def fused_pairs(files: Iterable[File]) -> str:
    """How far the measured plan is from the best of all ways of two neighbours."""
    cases = {case: [row["regret"] for row in rows] for case, rows in _cases(files, "pairs").items()}
    lines = sorted(([max(found), *case], found) for case, found in cases.items())
    rows = [
        [*case, str(len(found)), f"{statistics.mean(found):.1%}", f"{worst:.1%}"]
        for (worst, *case), found in reversed(lines)
    ]
    return table(["network", "machine", "dtype", "distinct pairs", "regret, mean", "worst"], rows)
