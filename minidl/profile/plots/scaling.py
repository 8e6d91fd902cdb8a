"""Throughput over ranks, against the ideal line; efficiency in a panel of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minidl.profile.plots import style
from minidl.profile.plots.style import INK, MUTED, halo
from minidl.profile.runs import NotInFile, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = ("weak", "strong")

# Curves are neither passes nor types of layer: their own order of colours, and markers.
_CURVES = (("#332288", "o"), ("#661100", "s"), ("#117733", "D"), ("#999933", "^"), ("#6699CC", "v"), (INK, "P"))


@dataclass(frozen=True)
class Curve:
    """One network in one dtype: ranks, images per second over all of them, and the spread of the step's time."""

    name: str
    machine: str
    ranks: tuple[int, ...]
    images_per_s: tuple[float, ...]
    spread: tuple[float, ...]

    @property
    def ideal(self) -> tuple[float, ...]:
        """Images per second if every rank gave as much as on the fewest ranks."""
        return tuple(n * self.images_per_s[0] / self.ranks[0] for n in self.ranks)

    @property
    def efficiency(self) -> tuple[float, ...]:
        return tuple(rate / ideal for rate, ideal in zip(self.images_per_s, self.ideal, strict=True))


def curves(runs: Sequence[Run], kinds: Sequence[str] = KINDS) -> list[Curve]:
    """Runs that differ in ranks alone, as curves: weak scaling where each rank's batch stays, strong where the whole
    batch does. A run may be in one of each.
    """
    points = [run for run in runs if run.images_per_s and run.batch]
    groups: dict[tuple[str, ...], list[Run]] = {}
    for kind in kinds:
        for run in points:
            batch = f"batch {run.batch // run.ranks} per rank" if kind == "weak" else f"batch {run.batch} in all"
            groups.setdefault((run.model, run.dtype, run.arm, run.machine, batch), []).append(run)
    found = []
    for (model, dtype, arm, machine, batch), members in groups.items():
        by_ranks = {run.ranks: run for run in members}  # of the same measurement twice the later one counts
        if len(by_ranks) < 2:
            continue
        ordered = [by_ranks[n] for n in sorted(by_ranks)]
        name = f"{model}, {batch}, {dtype}{'' if arm == 'minidl' else f', {arm}'}"
        spread = tuple(run.step["spread"] or 0.0 for run in ordered)
        rates = tuple(float(run.images_per_s) for run in ordered)
        found.append(Curve(name, machine, tuple(sorted(by_ranks)), rates, spread))
    return found


def apart(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """(words for a file's name, runs) of each picture: all in one where it holds their curves, else one per network."""
    if len(curves(runs)) <= len(_CURVES):
        return [("", list(runs))]
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(f"{run.model} {run.dtype}", []).append(run)
    return list(groups.items())


@style.drawn
def scaling(runs: Sequence[Run], kinds: Sequence[str] = KINDS) -> Figure:
    """Images per second over ranks with the ideal line, and the efficiency below.

    Args:
        runs: of one or several files; those of one network, dtype and batch on several numbers of ranks are a curve.
        kinds: of `KINDS`: weak, with one batch on each rank; strong, with one batch in all.

    Raises:
        NotInFile: when no two runs differ in their ranks alone, and for more than six curves.
    """
    found = curves(runs, kinds)
    files = ", ".join(dict.fromkeys(run.file for run in runs))
    if not found:
        have = sorted({run.ranks for run in runs})
        raise NotInFile(f"{files}: no scaling: it takes one network, dtype and batch (per rank or in all) measured on "
                        f"several numbers of ranks; here are runs on {', '.join(map(str, have))}")  # fmt: skip
    if len(found) > len(_CURVES):
        raise NotInFile(f"{files}: no scaling: {len(found)} curves, and one picture holds {len(_CURVES)}; "
                        "give fewer files")  # fmt: skip
    machines = list(dict.fromkeys(curve.machine for curve in found))
    top = 0.78 + 0.22 * (len(found) + 1)
    figure, (rate, efficiency) = style.page(
        5.0 + top,
        "Throughput over ranks",
        "  ·  ".join(machines),
        panels=(2.2, 1),
        left=0.95,
        top=top,
        bottom=0.8,
        gap=0.3,
    )
    for curve, (color, marker) in zip(found, _CURVES, strict=False):
        _draw(rate, efficiency, curve, color, marker, labelled=len(found) == 1)
    _axes(rate, efficiency, found)
    _keys(figure, found, len(machines) > 1)
    ranges = "Bars: the interquartile range of the step's time."
    style.note(figure, f"Efficiency: images/s per rank over that on the fewest ranks of the curve. {ranges}")
    return figure


def _draw(rate: Axes, efficiency: Axes, curve: Curve, color: str, marker: str, labelled: bool) -> None:
    x, y = curve.ranks, curve.images_per_s
    rate.plot(x, curve.ideal, color=color, linewidth=1.0, linestyle=(0, (5, 3)), zorder=2)
    spread = [s / 2 * value for s, value in zip(curve.spread, y, strict=True)]
    looks = {"color": color, "marker": marker, "markersize": 7, "linewidth": 1.8, "zorder": 3}
    rate.errorbar(x, y, yerr=spread, capsize=3, label=curve.name, **looks)
    efficiency.plot(x, [100 * e for e in curve.efficiency], label=curve.name, **looks)
    if labelled:
        for n, value in zip(x, y, strict=True):
            rate.annotate(
                f"{value:,.0f}", (n, value), (8, -4), textcoords="offset points", va="top", path_effects=halo()
            )


def _efficiencies(axes: Axes, found: Sequence[Curve]) -> None:
    """The last efficiency of each curve beside its end; where ends meet, one over the other."""
    low, high = axes.get_ylim()
    least = 0.11 * (high - low)  # between two lines of text
    above = math.inf
    ends = sorted(zip(found, _CURVES, strict=False), key=lambda item: -item[0].efficiency[-1])
    for curve, (color, _) in ends:
        value = 100 * curve.efficiency[-1]
        above = min(value, above - least)
        offset = (above - value) / (high - low) * 72 * axes.get_window_extent().height / axes.figure.dpi
        axes.annotate(
            f"{value:.0f}%", (curve.ranks[-1], value), (10, offset), textcoords="offset points", va="center",
            color=color, weight="bold", path_effects=halo(),
        )  # fmt: skip


def _axes(rate: Axes, efficiency: Axes, found: Sequence[Curve]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    ranks = sorted({n for curve in found for n in curve.ranks})
    for axes in (rate, efficiency):
        axes.set_xscale("log", base=2)
        axes.set_xlim(ranks[0] / 1.15, ranks[-1] * 1.25)
        axes.set_xticks(ranks, [f"{n}" for n in ranks] if axes is efficiency else [])
        axes.minorticks_off()
    rate.set_yscale("log")
    rates = [rate for curve in found for rate in (*curve.images_per_s, *curve.ideal)]
    rate.set_ylim(min(rates) / 1.35, max(rates) * 1.2)
    rate.set_ylabel("images/s, all ranks")
    rate.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    rate.yaxis.set_minor_locator(NullLocator())
    rate.yaxis.set_major_formatter(style.plain)
    lowest = min(100 * share for curve in found for share in curve.efficiency)
    efficiency.axhline(100, color=MUTED, linewidth=1.0, linestyle=(0, (5, 3)), zorder=2)
    efficiency.set_ylim(min(lowest - 15, 60), 110)
    _efficiencies(efficiency, found)
    efficiency.set(xlabel="ranks", ylabel="efficiency, %")


def _keys(figure: Figure, found: Sequence[Curve], machines: bool) -> None:
    from matplotlib.lines import Line2D

    for i, (curve, (color, marker)) in enumerate(zip(found, _CURVES, strict=False)):
        name = f"{curve.name}, {curve.machine}" if machines else curve.name
        style.key(figure, [Line2D([], [], color=color, marker=marker, label=name)], 0.70 + 0.22 * i, handlelength=2.2)
    ideal = Line2D([], [], color=MUTED, linestyle=(0, (5, 3)), label="ideal: the rate of the fewest ranks, times ranks")
    style.key(figure, [ideal], 0.70 + 0.22 * len(found), handlelength=2.2)
