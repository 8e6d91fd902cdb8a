"""Share of the step by type of layer, for several networks, batch sizes and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from minidl.profile.plots import style
from minidl.profile.plots.style import INK, TYPES, milliseconds
from minidl.profile.runs import COMPUTE, NotInFile, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMED = 0.045  # a segment narrower than this has no room for its number
_DARK = {"convolution", "ReLU", "loss", "unaccounted"}  # segments with white numbers


@style.drawn
def share(runs: Sequence[Run]) -> Figure:
    """One stacked bar per network, batch size and number of ranks, in the order given.

    Raises:
        NotInFile: when no run has both a step and layers.
    """
    whole = [run for run in runs if run.step is not None and any(row["pass"] in COMPUTE for row in run.rows)]
    if not whole:
        files = ", ".join(dict.fromkeys(run.file for run in runs))
        raise NotInFile(f"{files}: no share: no network with both its layers and its step; run minidl bench layers "
                        "--model NAME")  # fmt: skip
    machines = list(dict.fromkeys(run.machine for run in whole))
    names = [run.name + (f", {run.machine}" if len(machines) > 1 else "") for run in whole]
    left = 0.30 + 0.069 * max(map(len, names))
    figure, (axes,) = style.page(
        1.95 + 0.42 * len(whole), "Share of the step by type of layer", "  ·  ".join(machines),
        left=left, right=1.05, top=1.25, bottom=0.65,
    )  # fmt: skip
    table = [run.shares() for run in whole]
    _draw(axes, table)
    ways = list(dict.fromkeys(run.how for run in whole))
    axes.set_xlabel(f"% of the step, timed {ways[0]}" if len(ways) == 1 else "% of the step")
    axes.set_yticks(range(len(whole)), names)
    for i, run in enumerate(whole):
        end = sum(max(part, 0.0) for part in table[i].values())
        axes.annotate(milliseconds(run.step["ms"]), (100 * end, i), (5, 0), textcoords="offset points", va="center",
                      annotation_clip=False)  # fmt: skip
    present = [name for name in TYPES if any(abs(row.get(name, 0.0)) >= 5e-4 for row in table)]
    half = (len(present) + 1) // 2 if len(present) > 7 else len(present)
    for i, names in enumerate((present[:half], present[half:])):
        if names:
            style.key(figure, [style.swatch(TYPES[name], name) for name in names], 0.72 + 0.22 * i)
    return figure


def _draw(axes: Axes, table: Sequence[dict[str, float]]) -> None:
    ends = [0.0] * len(table)
    for name, color in TYPES.items():
        widths = [100 * row.get(name, 0.0) for row in table]
        if not any(widths):
            continue
        axes.barh(range(len(table)), widths, left=ends, height=0.66, color=color, edgecolor="white", linewidth=0.8,
                  label=name, zorder=3)  # fmt: skip
        for i, (end, width) in enumerate(zip(ends, widths, strict=True)):
            if width >= 100 * _NAMED:
                axes.text(end + width / 2, i, f"{width:.0f}", ha="center", va="center", zorder=4,
                          color="white" if name in _DARK else INK)  # fmt: skip
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    axes.set_ylim(len(table) - 0.5, -0.5)
    axes.set_xlim(min(0.0, *(100 * row.get("unaccounted", 0.0) for row in table)), 100.0)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
