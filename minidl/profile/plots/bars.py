"""Time of each layer in network order, stacked by pass, with exposed communication and what stays unaccounted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from minidl.profile.blocks import Block, blocks, singles
from minidl.profile.plots import style
from minidl.profile.plots.style import INK, MUTED, PASSES, milliseconds
from minidl.profile.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BAR_INCHES = 0.21
_SEGMENTS = {
    "forward": "forward",
    "backward_data": "backward data",
    "backward_weight": "backward weight",
    "update": "update",
    "communication": "exposed communication",
    "unaccounted": "unaccounted",
}


@style.drawn
def bars(run: Run) -> Figure:
    """Stacked bars per layer; networks of many layers by block. The bars are times within the step where they are known
    and then sum to the step, marks included.

    Raises:
        NotInFile: no row of a layer has a time.
    """
    layers = singles(run)
    if not any(block.parts.get(name) for block in layers for name in _SEGMENTS if name != "unaccounted"):
        raise run.lacks("bars", "no row of a layer has a time; make the file with minidl bench layers")
    shown = blocks(run)
    height = 2.05 + _BAR_INCHES * len(shown)
    longest = max(len(block.name) for block in shown)
    figure, (axes,) = style.page(height, _title(run), run.heading,
                                 left=0.35 + 0.078 * longest, right=0.95, top=1.2, bottom=0.85)  # fmt: skip
    _draw(axes, shown, run)
    _keys(figure, layers, run.total_ms)
    count = sum(block.is_layer for block in layers)
    joined = f"{count} layers, neighbours joined by block. " if len(shown) < len(layers) else ""
    style.note(figure, f"{joined}Beside each bar: milliseconds, share of the sum.{_marks(run)}")
    return figure


def _marks(run: Run) -> str:
    """What the marks between layers cost, where that shows."""
    if run.step is None or run.total_ms < 1.01 * run.step["ms"]:
        return ""
    return f" The marks between passes lengthen the step to {milliseconds(run.total_ms)}."


def _draw(axes: Axes, shown: list[Block], run: Run) -> None:
    ends = [0.0] * len(shown)
    for segment in _SEGMENTS:
        widths = [block.parts.get(segment, 0.0) for block in shown]
        if any(widths):
            axes.barh(
                range(len(shown)), widths, left=ends, height=0.74, color=PASSES[segment], label=segment,
                edgecolor="white", linewidth=0.4, zorder=3,
            )  # fmt: skip
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
    places = int(np.clip(2 - math.floor(math.log10(max(ends))), 0, 3))  # three figures for the longest bar
    for i, block in enumerate(shown):
        if ms := block.ms:
            text = f"{ms:.{places}f}  {ms / run.total_ms:.1%}"
            axes.annotate(text, (max(ms, 0.0), i), (4, 0), textcoords="offset points", va="center", size=8.5, color=INK)
    axes.set_yticks(range(len(shown)), [block.name for block in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(min(0.0, *ends) * 1.05, max(ends) * 1.04)
    axes.set_xlabel(f"milliseconds {run.how}")
    axes.xaxis.set_major_formatter(style.plain)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    axes.axvline(0, color=MUTED, linewidth=0.8, zorder=4)


def _title(run: Run) -> str:
    if run.step is None:
        return f"Time by layer: {milliseconds(run.total_ms)} in all"
    rate = f", {run.images_per_s:,.0f} images/s" if run.images_per_s else ""
    return f"Time of a step by layer: {milliseconds(run.step['ms'])}{rate}"


def _keys(figure: Figure, layers: list[Block], total: float) -> None:
    """The segments with their sums over all layers."""
    sums = {segment: sum(block.parts.get(segment, 0.0) for block in layers) for segment in _SEGMENTS}
    handles = [
        style.swatch(PASSES[s], f"{_SEGMENTS[s]} {milliseconds(ms)} ({ms / total:.1%})")
        for s, ms in sums.items()
        if abs(ms) > 5e-4 * total
    ]
    style.key(figure, handles, 0.70, ncols=3)
