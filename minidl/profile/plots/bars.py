"""Time of each layer in network order, stacked by pass, with exposed communication and what stays unaccounted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from minidl.profile.plots import style
from minidl.profile.plots.records import Run, milliseconds
from minidl.profile.plots.style import INK, MUTED, PASSES
from minidl.profile.results import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["bars"]

MOST = 60  # bars that one page holds with readable names
_JOINED = 40  # and how many there are at most once layers are joined
_BAR_INCHES = 0.21
_SEGMENTS = {
    "forward": "forward",
    "backward_data": "backward data",
    "backward_weight": "backward weight",
    "update": "update",
    "communication": "exposed communication",
    "unaccounted": "unaccounted",
}

Bar = tuple[str, dict[str, float]]  # its name, milliseconds of each segment


@style.drawn
def bars(run: Run) -> Figure:
    """Stacked bars per layer; networks of more than sixty layers by block. The bars sum to the step.

    Raises:
        NotInFile: no row of a layer has a time.
    """
    layers = _layers(run)
    if not any(sum(map(abs, parts.values())) for _, parts in layers):
        raise run.lacks("bars", "no row of a layer has a time; make the file with minidl bench layers")
    shown, depth = _grouped(layers)
    height = 2.05 + _BAR_INCHES * len(shown)
    longest = max(len(name) for name, _ in shown)
    figure, (axes,) = style.page(height, _title(run), run.heading,
                                 left=0.35 + 0.078 * longest, right=0.95, top=1.2, bottom=0.85)  # fmt: skip
    _draw(axes, shown, run.total_ms)
    _keys(figure, layers, run.total_ms)
    count = sum(name not in ("loss", "optimizer", "unaccounted") for name, _ in layers)
    joined = f"{count} layers, neighbours joined by block. " if depth is not None else ""
    style.note(figure, joined + "Beside each bar: milliseconds, share of the " + ("step." if run.step else "time."))
    return figure


def _layers(run: Run) -> list[Bar]:
    """The bars of single layers. The exposed time of a message of several layers is the first one's."""
    found: dict[tuple[str, int | None, str], dict[str, float]] = {}
    firsts: dict[tuple[str, str], tuple[str, int | None, str]] = {}
    for key, rows in run.layers():
        case, _, layer = key
        owner = key
        if set(rows) == {"all_reduce"}:
            owner = firsts.get((case, layer.split("+")[0]), key)
        else:
            firsts.setdefault((case, layer), key)
        parts = found.setdefault(owner, {})
        for segment, ms in _segments(rows).items():
            parts[segment] = parts.get(segment, 0.0) + ms
    alone = run.case is None
    return [
        ("unaccounted" if set(parts) == {"unaccounted"} else case if alone else layer, parts)
        for (case, _, layer), parts in found.items()
    ]


def _segments(rows: Mapping[str, Row]) -> dict[str, float]:
    found = {}
    for name, row in rows.items():
        if name == "all_reduce":
            found["communication"] = row.get("exposed_ms") or 0.0
        else:
            found[name] = row["ms"] or 0.0
    return found


def _grouped(layers: list[Bar]) -> tuple[list[Bar], int | None]:
    """Neighbours of one block joined until there are few enough, and how many parts of the names were kept."""
    if len(layers) <= MOST:
        return layers, None
    deepest = max(name.count(".") for name, _ in layers)
    for depth in range(max(deepest, 1), 0, -1):
        joined = _joined(layers, depth)
        if len(joined) <= _JOINED or depth == 1:
            return joined, depth
    raise AssertionError("a depth of one always returns")


def _joined(layers: list[Bar], depth: int) -> list[Bar]:
    joined: list[Bar] = []
    for name, parts in layers:
        block = ".".join(name.split(".")[:depth])
        if not joined or joined[-1][0] != block:
            joined.append((block, {}))
        for segment, ms in parts.items():
            joined[-1][1][segment] = joined[-1][1].get(segment, 0.0) + ms
    return joined


def _draw(axes: Axes, shown: list[Bar], total: float) -> None:
    ends = [0.0] * len(shown)
    for segment in _SEGMENTS:
        widths = [parts.get(segment, 0.0) for _, parts in shown]
        if any(widths):
            axes.barh(
                range(len(shown)), widths, left=ends, height=0.74, color=PASSES[segment], label=segment,
                edgecolor="white", linewidth=0.4, zorder=3,
            )  # fmt: skip
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
    places = int(np.clip(2 - math.floor(math.log10(max(ends))), 0, 3))  # three figures for the longest bar
    for i, (_, parts) in enumerate(shown):
        ms = sum(parts.values())
        if ms:
            text = f"{ms:.{places}f}  {ms / total:.1%}"
            axes.annotate(text, (max(ms, 0.0), i), (4, 0), textcoords="offset points", va="center", size=8.5, color=INK)
    axes.set_yticks(range(len(shown)), [name for name, _ in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(min(0.0, *ends) * 1.05, max(ends) * 1.04)
    axes.set_xlabel("milliseconds")
    axes.xaxis.set_major_formatter(style.plain)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    axes.axvline(0, color=MUTED, linewidth=0.8, zorder=4)


def _title(run: Run) -> str:
    if run.step is None:
        return f"Time by layer: {milliseconds(run.total_ms)} in all"
    rate = f", {run.images_per_s:,.0f} images/s" if run.images_per_s else ""
    return f"Time of a step by layer: {milliseconds(run.total_ms)}{rate}"


def _keys(figure: Figure, layers: list[Bar], total: float) -> None:
    """The segments with their sums over all layers."""
    sums = {segment: sum(parts.get(segment, 0.0) for _, parts in layers) for segment in _SEGMENTS}
    handles = [
        style.swatch(PASSES[s], f"{_SEGMENTS[s]} {milliseconds(ms)} ({ms / total:.1%})") for s, ms in sums.items() if ms
    ]
    style.key(figure, handles, 0.70, ncols=3)
