"""The roofline of a run (Williams, Waterman, Patterson, "Roofline: an insightful visual performance model for multicore
architectures", CACM 2009): every layer and pass against the measured ceilings of its machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from minidl.profile.plots import labels, style
from minidl.profile.plots.style import INK, MUTED, PASSES, SHAPES, halo, rate
from minidl.profile.results import Row
from minidl.profile.roofline import matrix_rate
from minidl.profile.runs import COMPUTE, Run, family

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

_NAMED = 5
_LOW = 0.5  # a pass that takes more than twice its floor stands out
_BEYOND = 1.15  # of its roof: more than measuring errs; the rest of the work was a neighbour's
_ROOM = 0.4  # of the width: what the longest text on a line takes
_LARGEST, _SMALLEST = 420.0, 9.0  # areas of markers, square points


@style.drawn
def roofline(run: Run, passes: Sequence[str] = COMPUTE) -> Figure:
    """Arithmetic intensity and achieved rate of each layer and pass under the measured ceilings.

    With a fusion plan, passes far above the roof are left out: their kernels finish what a neighbour's have done, and
    their rate would be that of work which they do not do.

    Args:
        run: with ceilings and FLOP per row.
        passes: those to draw.

    Raises:
        NotInFile: no ceilings, or no pass with FLOP.
    """
    ceilings = run.ceilings("roofline")
    roofs = _roofs(run, ceilings)
    chosen = [row for row in run.rows if row["pass"] in passes]
    worked = [row for row in chosen if row.get("tflops") and row.get("intensity")]
    if not worked:
        raise run.lacks("roofline", f"no {' or '.join(passes)} row has both FLOP and time")
    rows = [row for row in worked if run.fusion == "none" or (row.get("roof_share") or 0.0) < _BEYOND]
    rows.sort(key=lambda row: -run.ms(row))
    figure, (axes,) = style.page(6.4, "Roofline: each layer and pass", run.heading, top=1.42, bottom=0.95)
    _limits(axes, rows, roofs, run.how_alone)
    blocked = _draw_roofs(axes, roofs)
    _draw_rows(axes, rows, run)
    _name_longest(axes, rows, roofs, blocked, run)
    _keys(figure, rows, run)
    _notes(figure, rows, len(chosen) - len(worked), len(worked) - len(rows), run)
    return figure


def marker_area(share: float, largest: float) -> float:
    """Area of a marker in square points, in proportion to its share of the step, with a least area to be seen."""
    return max(_LARGEST * share / largest, _SMALLEST) if largest else _SMALLEST


def short(pass_name: str) -> str:
    """A pass as labels say it."""
    return pass_name.replace("_", " ")


def _roofs(run: Run, ceilings: Mapping[str, Any]) -> dict[str, Any]:
    """GB/s of memory, TFLOP/s of matrix products and of other arithmetic (None where not measured)."""
    memory = ceilings.get("copy_gb_per_s")
    matrix = matrix_rate(ceilings, run.dtype)
    if not memory or not matrix:
        lacking = "copy bandwidth" if not memory else f"matrix rate for {run.dtype}"
        raise run.lacks("roofline", f"its ceilings have no {lacking}; run minidl bench ceilings, then measure again")
    return {
        "memory": memory,
        "matrix": matrix,
        "matrix_by": (ceilings.get("matrix_by") or {}).get(run.dtype),
        "vector": _other_rate(matrix, (ceilings.get("vector_tflops") or {}).get("fp32")),
        "dtype": run.dtype,
    }


def _other_rate(matrix: float, vector: float | None) -> float | None:
    """The rate of other arithmetic; None where products run on the same units, as on processors."""
    return None if vector is None or rate(vector) == rate(matrix) else vector


def _limits(axes: Axes, rows: list[Row], roofs: Mapping[str, Any], how: str) -> None:
    ridge = 1e3 * roofs["matrix"] / roofs["memory"]
    intensity = [row["intensity"] for row in rows]
    rates = [row["tflops"] for row in rows]
    left = min(*intensity, ridge) / 2
    bottom = min(*rates, 1e-3 * roofs["memory"] * left) / 2
    axes.set(xscale="log", yscale="log", xlabel="arithmetic intensity, FLOP per byte")
    axes.set_xlim(left, max(*intensity, 4 * ridge) * 2)
    axes.set_ylim(bottom, 2.2 * max(*rates, roofs["matrix"], roofs["vector"] or 0))
    axes.grid(True, which="major")
    style.log_axis(axes.xaxis)
    style.flops_axis(axes, max(roofs["matrix"], roofs["vector"] or 0), f"achieved, {{}}, {how}")


def _draw_roofs(axes: Axes, roofs: Mapping[str, Any]) -> list[Text]:
    """The ceilings with their numbers on them, and the band within a factor of two; the texts."""
    left, right = axes.get_xlim()
    diagonal = lambda x: 1e-3 * roofs["memory"] * x  # noqa: E731
    ridge = 1e3 * roofs["matrix"] / roofs["memory"]
    x = np.array([left, ridge, right])
    roof = np.minimum(diagonal(x), roofs["matrix"])
    axes.fill_between(x, _LOW * roof, roof, color="#eef3ee", zorder=0.5, linewidth=0)
    axes.plot(x, roof, color=INK, linewidth=1.6, zorder=3)
    by = f" ({roofs['matrix_by']})" if roofs["matrix_by"] else ""
    texts = [
        labels.along(axes, (left * 1.35, diagonal(left * 1.35)), (ridge, roofs["matrix"]),
                     f"memory: {rate(roofs['memory'])} GB/s, copied", weight="bold"),
    ]  # fmt: skip
    lifted, vector = roofs["matrix"], roofs["vector"]
    if vector:
        begin = 1e3 * vector / roofs["memory"]
        axes.plot([begin, right], [vector] * 2, color=MUTED, linewidth=1.2, linestyle=(0, (5, 3)), zorder=3)
        text = f"other arithmetic fp32: {style.flops(vector)}"
        if axes.transAxes.inverted().transform(axes.transData.transform((begin, vector)))[0] > _ROOM:
            # Over the roof of memory, where no point can be.
            texts.append(axes.annotate(text, (begin, vector), (-10, 1), textcoords="offset points", ha="right",
                                       va="center", color=MUTED, path_effects=halo(), zorder=5))  # fmt: skip
        else:
            close = 1 <= vector / roofs["matrix"] < 2  # then both texts stand over the upper line, one over the other
            lifted = vector if close else lifted
            up = vector > roofs["matrix"]
            offset = 17 if close else 3 if up else -3
            texts.append(_at_right(axes, vector, offset, text, va="bottom" if up else "top", color=MUTED))
    text = f"matrix products {roofs['dtype']}{by}: {style.flops(roofs['matrix'])}"
    return [*texts, _at_right(axes, lifted, 3, text, va="bottom", weight="bold")]


def _at_right(axes: Axes, y: float, offset: float, text: str, **options: Any) -> Text:
    """A text at the right end of a level line, ``offset`` points over it, and over the markers."""
    place = (axes.get_xlim()[1], y)
    return axes.annotate(
        text, place, (-2, offset), textcoords="offset points", ha="right", path_effects=halo(), zorder=5, **options
    )


def _low(row: Row) -> bool:
    share = row.get("roof_share")
    return share is not None and share < _LOW


def _draw_rows(axes: Axes, rows: list[Row], run: Run) -> None:
    """Shape by type, colour by pass, area by time; below half of the roof solid and edged, else faint."""
    from matplotlib.colors import to_rgba

    largest = run.ms(rows[0])
    for kind, shape in SHAPES.items():
        mine = [row for row in rows if family(row) == kind]
        if not mine:
            continue
        axes.scatter(
            [row["intensity"] for row in mine],
            [row["tflops"] for row in mine],
            s=[marker_area(run.ms(row), largest) for row in mine],
            c=[to_rgba(PASSES[row["pass"]], 0.85 if _low(row) else 0.18) for row in mine],
            edgecolors=[to_rgba(INK, 0.9) if _low(row) else to_rgba(PASSES[row["pass"]], 0.5) for row in mine],
            linewidths=0.6,
            marker=shape,
            zorder=4,
            label=kind,
        )


def _longest(rows: list[Row]) -> list[tuple[Row, int]]:
    """The longest passes, and how many of other layers do the same work: those are named once."""
    alike: dict[Any, list[Row]] = {}
    for row in rows:
        work = (row.get("type"), row["pass"], row["flop"], row["bytes"], row.get("output_shape"))
        alike.setdefault(str(work), []).append(row)
    return [(members[0], len(members) - 1) for members in list(alike.values())[:_NAMED]]


def _name_longest(axes: Axes, rows: list[Row], roofs: Mapping[str, Any], blocked: list[Text], run: Run) -> None:
    x = np.geomspace(*axes.get_xlim(), 200)
    roof = np.minimum(1e-3 * roofs["memory"] * x, roofs["matrix"])
    points = [(row["intensity"], row["tflops"]) for row in rows]
    avoid = np.vstack([np.array(points), np.stack([x, roof], axis=1)])
    texts, named = [], _longest(rows)
    for row, others in named:
        of_roof = "" if row.get("roof_share") is None else f", {row['roof_share']:.0%} of roof"
        like = f", {others} more like it" if others else ""
        name = row["layer"] if run.case is not None else row["case"]
        texts.append(f"{name}{like}\n{short(row['pass'])} {run.ms(row) / run.total_ms:.1%}{of_roof}")
    labels.place(axes, [(row["intensity"], row["tflops"]) for row, _ in named], texts, avoid, blocked)


def _keys(figure: Figure, rows: list[Row], run: Run) -> None:
    present = {row["pass"] for row in rows}
    style.key(figure, [style.dot("o", short(p), 8, markerfacecolor=PASSES[p]) for p in COMPUTE if p in present], 0.70)
    kinds = {family(row) for row in rows}
    style.key(figure, [style.dot(shape, kind) for kind, shape in SHAPES.items() if kind in kinds], 0.92)
    strong = style.dot("o", "under half of its roof", 8, markeredgecolor=INK, markeredgewidth=0.8)
    faint = style.dot("o", "within a factor of two", 8, alpha=0.35)
    largest = run.ms(rows[0]) / run.total_ms
    across = marker_area(largest / 4, largest) ** 0.5
    size = style.dot("o", f"area: share of the {_whole(run)}, here {largest / 4:.2%}", across, alpha=0.35)
    style.key(figure, [strong, faint, size], 1.14)


def _whole(run: Run) -> str:
    return "step" if run.step else "time"


def _notes(figure: Figure, rows: list[Row], left_out: int, shared: int, run: Run) -> None:
    low = [row for row in rows if _low(row)]
    share = sum(run.ms(row) for row in low) / run.total_ms
    text = f"{len(rows)} passes; {len(low)} of them, {share:.0%} of the {_whole(run)}, run under half of their roof. "
    text += f"Named: the longest, with their share, timed {run.how}."
    text += "\nFLOP: 2 per multiply-add; bytes: every operand once."
    if left_out or shared:
        text += f" Not drawn: {left_out} passes without FLOP or time (copies, views, work in a neighbour)"
        text += f", {shared} that a neighbour's kernels mostly do." if shared else "."
    style.note(figure, text)
