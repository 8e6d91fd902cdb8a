"""Share of the step and arithmetic intensity of each layer of one network, over its batch sizes or numbers of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from minidl.profile.blocks import blocks, order
from minidl.profile.plots import style
from minidl.profile.plots.style import INK, MUTED, halo, rate
from minidl.profile.roofline import matrix_rate
from minidl.profile.runs import COMPUTE, NotInFile, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINE_INCHES = 0.21
# Neither passes nor types of layer, but steps of one scale: from light to dark, with a shape each.
_MARKS = (
    ("#b3cde3", "o"), ("#85b6d9", "s"), ("#5a9fce", "D"), ("#3182bd", "^"), ("#1c63a5", "v"), ("#08478a", "P"),
    ("#08306b", "X"), ("#000000", "h"),
)  # fmt: skip


def series(runs: Sequence[Run]) -> Iterator[tuple[str, list[Run]]]:
    """(words for a file's name, runs) of each picture: one network over the batches on so many ranks; over the ranks
    with so many samples each, where there are several. Of the same measurement twice the later one counts.
    """
    networks: dict[tuple[str, ...], dict[tuple[int, int], Run]] = {}
    for run in runs:
        if run.step is not None and run.rank_batch and any(row["pass"] in COMPUTE for row in run.rows):
            what = (run.model, run.dtype, run.arm, run.machine)
            networks.setdefault(what, {})[run.ranks, run.rank_batch] = run
    for (model, dtype, arm, _), found in networks.items():
        words = " ".join([model, dtype, *([arm] if arm != "minidl" else [])])
        several = {batch for _, batch in found if sum(b == batch for _, b in found) > 1}
        for ranks in sorted({ranks for ranks, _ in found}):
            members = [found[key] for key in sorted(found) if key[0] == ranks]
            if len(members) > 1 or members[0].rank_batch not in several:
                yield f"{words} {ranks} rank{'s' * (ranks > 1)}", members
        for batch in sorted(several):
            yield f"{words} b{batch} over ranks", [found[key] for key in sorted(found) if key[1] == batch]


@style.drawn
def layers(runs: Sequence[Run]) -> Figure:
    """One line per layer, or per block of a large network: its share of the step to the left, its FLOP per byte to the
    right, a mark for each run.

    Args:
        runs: of one network, differing in batch or ranks.

    Raises:
        NotInFile: more runs than there are marks.
    """
    if len(runs) > len(_MARKS):
        files = ", ".join(dict.fromkeys(run.file for run in runs))
        raise NotInFile(f"{files}: no layers: {len(runs)} batch sizes of {runs[0].model}, and one picture holds "
                        f"{len(_MARKS)}; give fewer files")  # fmt: skip
    columns = [blocks(run) for run in runs]
    names = order(columns)
    types = {block.name: block.type for block in columns[0] if block.is_layer and block.type}
    lines = [f"{name}  {types[name]}" if name in types else name for name in names]
    first, longest = runs[0], max(map(len, lines))
    several = "" if first.arm == "minidl" else f", {first.arm}"
    figure, axes = style.page(
        2.0 + _LINE_INCHES * len(names), "Share of the step and arithmetic intensity of each layer",
        f"{first.model}, {first.dtype}{several}  ·  {first.machine}", panels=(1.25, 1), across=True,
        left=0.35 + 0.078 * longest, right=0.35, top=1.05, bottom=0.95,
    )  # fmt: skip
    shares = [{b.name: 100 * b.ms / run.total_ms for b in found} for run, found in zip(runs, columns, strict=True)]
    _draw(axes[0], names, shares)
    _draw(axes[1], names, [{b.name: b.intensity for b in found if b.flop} for found in columns])
    _axes(axes, lines, runs[0])
    marks = _marks(len(runs))
    keys = [style.dot(shape, _label(run), 7, markerfacecolor=c) for run, (c, shape) in zip(runs, marks, strict=True)]
    style.key(figure, keys, 0.72)
    joined = "Neighbours joined by block. " if len(types) < sum(b.is_layer for b in columns[0]) else ""
    style.note(figure, f"{joined}Left of the ridge memory bounds products on this machine, right of it arithmetic.")
    return figure


def _marks(count: int) -> Sequence[tuple[str, str]]:
    """Marks for so many runs, far apart; a single one is neither light nor dark."""
    last = len(_MARKS) - 1
    return [_MARKS[round(i * last / (count - 1)) if count > 1 else last // 2] for i in range(count)]


def _label(run: Run) -> str:
    return f"batch {run.rank_batch}" + (f" on each of {run.ranks} ranks" if run.ranks > 1 else "")


def _draw(axes: Axes, names: Sequence[str], values: Sequence[dict[str, float | None]]) -> None:
    """A line from the least to the largest value of each name, and a mark for each run."""
    for y, name in enumerate(names):
        known = [v for column in values if (v := column.get(name)) is not None]
        if len(known) > 1:
            axes.plot([min(known), max(known)], [y, y], color=MUTED, linewidth=1.0, zorder=2)
    sizes = np.linspace(64, 20, len(values)) if len(values) > 1 else [34]  # where they meet all can be seen
    for column, (color, shape), size in zip(values, _marks(len(values)), sizes, strict=True):
        points = [(v, y) for y, name in enumerate(names) if (v := column.get(name)) is not None]
        axes.scatter(
            *zip(*points, strict=True), c=color, marker=shape, s=size, edgecolors="white", linewidths=0.5, zorder=3
        )


def _axes(axes: Sequence[Axes], lines: Sequence[str], run: Run) -> None:
    share, intensity = axes
    for one in axes:
        one.set_ylim(len(lines) - 0.4, -0.6)
        one.tick_params(axis="y", length=0)
        one.set_yticks(range(len(lines)), lines if one is share else [""] * len(lines))
    share.set_xlim(min(0.0, share.get_xlim()[0]), None)
    share.set_xlabel(f"% of the step,\ntimed {run.how}")
    intensity.set_xscale("log")
    intensity.set_xlabel("arithmetic intensity,\nFLOP per byte, all passes")
    style.log_axis(intensity.xaxis)
    _ridge(intensity, run)


def _ridge(axes: Axes, run: Run) -> None:
    """Where the machine's matrix products become compute-bound."""
    ceilings = run.point.get("ceilings") or run.content.get("ceilings") or {}
    memory, matrix = ceilings.get("copy_gb_per_s"), matrix_rate(ceilings, run.dtype)
    if not memory or not matrix:
        return
    ridge = 1e3 * matrix / memory
    axes.axvline(ridge, color=INK, linewidth=1.2, linestyle=(0, (5, 3)), zorder=1.5)
    axes.annotate(
        f"ridge {rate(ridge)}", (ridge, 1), (0, 3), xycoords=("data", "axes fraction"), textcoords="offset points",
        ha="center", va="bottom", size=8.5, path_effects=halo(),
    )  # fmt: skip
