"""Efficiency over the ranks of a cluster that is not there, a line for each size of messages; below, what is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from minidl.profile.plots import style
from minidl.profile.plots.style import INK, MUTED
from minidl.profile.scaling import ALL, Outcome, StepTimes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = ("#332288", "#661100", "#117733", "#999933", "#6699CC", "#AA4499", INK)
_LOST = {"waited for messages": "#CC6677", "slowed beside messages": "#DDCC77"}


@style.drawn
def simulated(step: StepTimes, outcomes: Sequence[Sequence[Outcome]]) -> Figure:
    """Efficiency over ranks for each size of messages, and of the fastest what communication adds to the step.

    Args:
        outcomes: for each number of hosts those of all group sizes, the fastest first.
    """
    from matplotlib.lines import Line2D

    lines = {_words(o): o.group_bytes for o in sorted(outcomes[-1], key=lambda o: o.group_bytes)}  # equal ones once
    drawn = {_words(o) for o in outcomes[-1][: len(_COLORS)]} if len(lines) > len(_COLORS) else set(lines)
    figure, (efficiency, lost) = style.page(
        5.4, f"{step.case} on a cluster", "simulated from the layers of one rank", panels=(2.0, 1),
        left=0.95, top=1.25, bottom=0.8, gap=0.3,
    )  # fmt: skip
    keys = []
    for words, color in zip((words for words in lines if words in drawn), _COLORS, strict=False):
        line = [o for found in outcomes for o in found if o.group_bytes == lines[words]]
        efficiency.plot([o.ranks for o in line], [100 * o.efficiency for o in line], color=color, marker="o", zorder=3)
        keys.append(Line2D([], [], color=color, marker="o", label=words))
    style.key(figure, keys, 0.70, ncols=len(keys), handlelength=1.6)
    fastest = [found[0] for found in outcomes]
    ranks, parts = [o.ranks for o in fastest], [[o.waited_ms for o in fastest], [o.slowed_ms for o in fastest]]
    lost.stackplot(ranks, parts, colors=list(_LOST.values()), zorder=2)
    style.key(figure, [style.swatch(color, name) for name, color in _LOST.items()], 0.95, ncols=2)
    for axes in (efficiency, lost):
        axes.set_xscale("log", base=2)
        axes.set_xlim(ranks[0] / 1.1, ranks[-1] * 1.1)
        axes.set_xticks(ranks, [f"{n}" for n in ranks] if axes is lost else [])
        axes.minorticks_off()
    efficiency.axhline(100, color=MUTED, linewidth=1.0, linestyle=(0, (5, 3)), zorder=2)
    efficiency.set(ylabel="efficiency, %")
    lost.set(xlabel="ranks", ylabel="ms added")
    lost.set_ylim(bottom=0)
    told = f"One rank alone: {style.milliseconds(step.ms)}. Below, with the size of messages that is fastest."
    slower = len(lines) - len(drawn)
    style.note(figure, told + (f" Not drawn: {slower} slower sizes." if slower else ""))
    return figure


def _words(o: Outcome) -> str:
    if o.group_bytes == 0:
        return "a message per layer"
    return "one message" if o.group_bytes >= ALL or len(o.messages) == 1 else f"{o.group_bytes / 2**20:g} MiB"
