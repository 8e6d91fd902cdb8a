"""Which way of running a batch norm is fastest, over the size of feature maps and the number of channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minidl.profile.plots import style
from minidl.profile.plots.style import INK, MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# What convolutions do on the way, and whether the one above normalises what it reads (hatched).
_COLORS = {
    (): "#DDDDDD",
    ("statistics",): "#88CCEE",
    ("gradients",): "#DDCC77",
    ("statistics", "gradients"): "#44AA99",
}
_WORDS = {
    (): "passes of their own",
    ("statistics",): "statistics below",
    ("gradients",): "gradients above",
    ("statistics", "gradients"): "both",
}
_PLAIN = "elementwise"


@style.drawn
def fusion(rows: Sequence[Mapping[str, Any]], title: str, subtitle: str) -> Figure:
    """A cell for each size and number of channels, a panel for each size of filters: the best way, and its gain.

    Args:
        rows: one for each way at each point, with kernel, size, channels, arm and ms (`minidl.fusion.map`).
        subtitle: what was measured, and on what.
    """
    from matplotlib.patches import Patch

    kernels = sorted({row["kernel"] for row in rows})
    figure, panels = style.page(
        3.9, title, subtitle, panels=(1.0,) * len(kernels), across=True, left=1.0, right=0.2, top=1.35, bottom=0.85,
        gap=1.0,
    )  # fmt: skip
    for kernel, axes in zip(kernels, panels, strict=True):
        _panel(axes, [row for row in rows if row["kernel"] == kernel])
        axes.set_title(f"{kernel}x{kernel} filters", size=10, color=INK, loc="left")
    present = {_key(row) for row in fastest(rows).values()}
    keys = [style.swatch(c, _WORDS[modes]) for modes, c in _COLORS.items() if modes in {modes for modes, _ in present}]
    if any(loads for _, loads in present):
        keys.append(Patch(facecolor="white", edgecolor=MUTED, hatch="////", label="normalised as it is read"))
    style.key(figure, keys, 0.72)
    style.note(
        figure, "Numbers: time with passes of their own over that of the fastest way, both convolutions included."
    )
    return figure


def fastest(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int, int], Mapping[str, Any]]:
    """The row of the best way at each (filter, size, channels)."""
    found: dict[tuple[int, int, int], Mapping[str, Any]] = {}
    for row in rows:
        point = row["kernel"], row["size"], row["channels"]
        found[point] = min(found.get(point, row), row, key=lambda r: r["ms"])
    return found


def _key(row: Mapping[str, Any]) -> tuple[tuple[str, ...], bool]:
    modes = row["arm"].split("+")
    return tuple(name for name in ("statistics", "gradients") if name in modes), "prologue" in modes


def _panel(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib.patches import Rectangle

    sizes, channels = (sorted({row[name] for row in rows}) for name in ("size", "channels"))
    plain = {(row["size"], row["channels"]): row["ms"] for row in rows if row["arm"] == _PLAIN}
    for (_, size, width), row in fastest(rows).items():
        x, y, (modes, loads) = channels.index(width), sizes.index(size), _key(row)
        hatch = "////" if loads else None
        look = {"facecolor": _COLORS[modes], "edgecolor": MUTED if loads else "white", "hatch": hatch}
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, linewidth=0.8, zorder=2, **look))
        gain = plain[size, width] / row["ms"]
        text = axes.text(x, y, f"{gain:.2f}", ha="center", va="center", size=9, color=INK, zorder=3)
        text.set_path_effects(style.halo())
    axes.set_xticks(range(len(channels)), [str(n) for n in channels])
    axes.set_yticks(range(len(sizes)), [f"{n}x{n}" for n in sizes])
    axes.set(xlim=(-0.5, len(channels) - 0.5), ylim=(-0.5, len(sizes) - 0.5), xlabel="channels", ylabel="feature map")
    axes.grid(False)
    axes.tick_params(length=0)
