"""Memory over the time of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minidl.profile.plots import style
from minidl.profile.plots.style import INK, MUTED, PASSES, halo, milliseconds
from minidl.profile.runs import Run, runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PHASES = {
    "forward": ("forward", PASSES["forward"]),
    "backward_data": ("backward", PASSES["backward_data"]),
    "backward_weight": ("backward", PASSES["backward_data"]),
    "update": ("update", PASSES["update"]),
}
_UNITS = (
    (1e12, "TB", " (10¹² bytes)"),
    (1e9, "GB", " (10⁹ bytes)"),
    (1e6, "MB", " (10⁶ bytes)"),
    (1e3, "kB", " (10³ bytes)"),
    (1, "bytes", ""),
)

Phase = tuple[str, str, float, float]  # name, colour, start and end in ms
Samples = list[tuple[float, float]]  # ms, bytes; in order of time


@style.drawn
def memory(run: Run) -> Figure:
    """Bytes in use during a step, the phases behind them, the peak with the layer that it fell in.

    The rank with the highest peak is drawn; others are thin lines.

    Raises:
        NotInFile: without samples of the memory, or with those of another run.
    """
    samples = run.content.get("memory")
    if not samples:
        raise run.lacks("memory", "it has no samples of the memory; measure with minidl bench layers --device cuda")
    first = runs(run.content, run.file)[0]
    if run.key != first.key:
        raise run.lacks("memory", f"the samples of the memory are those of {first.name}")
    ranks: dict[int, Samples] = {}
    for sample in sorted(samples, key=lambda sample: sample["t_ms"]):
        ranks.setdefault(sample["rank"], []).append((sample["t_ms"], sample["bytes"]))
    top = max(ranks, key=lambda rank: max(size for _, size in ranks[rank]))
    spans = [s for s in run.content.get("spans") or () if s["rank"] == top and s["lane"] == "compute"]
    where = f"  ·  rank {top} of {len(ranks)}" if len(ranks) > 1 else ""
    notes = [] if spans else ["The file has no spans: phases are not marked."]
    notes += ["Thin lines: the other ranks."] if len(ranks) > 1 else []
    bottom = 0.8 if notes else 0.6
    figure, (axes,) = style.page(4.6, "Memory over a step", run.heading + where, top=0.75, bottom=bottom)
    scale, unit, power = next(u for u in _UNITS if max(size for _, size in ranks[top]) >= u[0] or u[0] == 1)
    found = phases(spans)
    _draw(axes, ranks, top, scale, found)
    _name_phases(axes, found)
    _peak(axes, ranks[top], spans, scale, unit)
    # A run of replays alone has its spans and samples from one; any other, from an eager step.
    eager = any((row.get("timings") or {}).get("step") for row in run.rows) or run.way != "graph_step"
    kind = "eager" if eager else "captured"
    axes.set(xlabel=f"time of one {kind} step, ms", ylabel=f"memory in use, {unit}{power}")
    style.note(figure, " ".join(notes))
    return figure


def phases(spans: Sequence[Mapping[str, Any]]) -> list[Phase]:
    """Neighbouring spans of one phase joined: forward, backward, update."""
    found: list[Phase] = []
    for span in sorted(spans, key=lambda s: s["start_ms"]):
        if span["pass"] not in _PHASES:
            continue
        name, color = _PHASES[span["pass"]]
        if span["layer"] == "loss":
            name, color = (found[-1][:2]) if found else (name, color)  # the loss is too short to be a phase of its own
        end = span["start_ms"] + span["ms"]
        if found and found[-1][0] == name:
            found[-1] = (name, color, found[-1][2], max(end, found[-1][3]))
        else:
            found.append((name, color, span["start_ms"], end))
    return found


def _draw(axes: Axes, ranks: Mapping[int, Samples], top: int, scale: float, found: Sequence[Phase]) -> None:
    """Each rank's line; under that of ``top`` an area in the colours of the phases."""
    from matplotlib.ticker import MaxNLocator

    for rank, points in ranks.items():
        looks = {"color": INK, "linewidth": 1.3, "zorder": 4} if rank == top else {"color": MUTED, "linewidth": 0.7}
        x, y = zip(*((t, size / scale) for t, size in points), strict=True)
        axes.step(x, y, where="post", label=f"rank {rank}", **looks)
    begin, end = ranks[top][0][0], ranks[top][-1][0]
    for _, color, start, stop in found or [("", MUTED, begin, end)]:
        part = _between(ranks[top], start, stop)
        x, y = zip(*((t, size / scale) for t, size in part), strict=True)
        axes.fill_between(x, y, step="post", color=color, alpha=0.3, linewidth=0, zorder=2)
    axes.xaxis.set_major_formatter(style.plain)
    axes.yaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10]))
    axes.set_xlim(begin, end)
    axes.set_ylim(0, 1.32 * max(size for _, size in ranks[top]) / scale)


def _between(points: Samples, start: float, stop: float) -> Samples:
    """The samples from ``start`` to ``stop``, and what was held at these two moments."""
    held = [size for t, size in points if t <= start] or [points[0][1]]
    inside = [(t, size) for t, size in points if start < t < stop]
    first = (start, held[-1])
    return [first, *inside, (stop, (inside or [first])[-1][1])]


def _name_phases(axes: Axes, found: Sequence[Phase]) -> None:
    """A band above with the phases' names."""
    whole = axes.get_xlim()[1] - axes.get_xlim()[0]
    for name, color, start, end in found:
        axes.axvspan(start, end, ymin=0.93, ymax=1.0, color=color, linewidth=0, zorder=3)
        if end - start > 0.08 * whole:  # the name fits
            axes.text((start + end) / 2, 0.963, name, transform=axes.get_xaxis_transform(), ha="center", va="center",
                      size=9, weight="bold", color="white" if name == "forward" else INK, zorder=4)  # fmt: skip


def _peak(axes: Axes, points: Samples, spans: Sequence[Mapping[str, Any]], scale: float, unit: str) -> None:
    """A dot at the peak, and in words: how much, when, in which pass of which layer."""
    time, size = max(points, key=lambda point: point[1])
    inside = [s for s in spans if s["start_ms"] <= time <= s["start_ms"] + s["ms"]]
    text = f"peak {size / scale:.3g} {unit} at {milliseconds(time)}"
    if inside:
        text += f"\nin {inside[-1]['layer']} {inside[-1]['pass'].replace('_', ' ')}"
    axes.plot([time], [size / scale], marker="o", color=INK, markersize=6, zorder=5, label="peak")
    side = "left" if time < sum(axes.get_xlim()) / 2 else "right"
    axes.annotate(
        text, (time, size / scale), (0, 8), textcoords="offset points", ha=side, va="bottom", zorder=6,
        path_effects=halo(),
    )  # fmt: skip
