"""The roofline of the network: which layer's all-reduce can hide behind the layer's own computation. Neighbours that
share a message are one layer here.

A layer that computes at r FLOP/s and sends one byte per c FLOP keeps a network busy with r / c bytes per second. If the
network carries more than that, the point (c, r) lies under the network's diagonal and the message can hide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minidl.profile import cost
from minidl.profile.plots import labels, style
from minidl.profile.plots.roofline import marker_area
from minidl.profile.plots.style import INK, PASSES, SHAPES, halo, milliseconds, rate
from minidl.profile.results import Row
from minidl.profile.roofline import matrix_rate
from minidl.profile.runs import Run, family

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

_NAMED = 5
_TINT = "#fbeee6"
_SHOWN = 20.0  # the diagonal is seen from this factor under its end at least


@dataclass(frozen=True)
class _Message:
    name: str
    kind: str
    intensity: float  # FLOP per wire byte
    tflops: float  # of the layer's own passes
    compute_ms: float
    transfer_ms: float
    exposed_ms: float

    @property
    def outlasts(self) -> bool:
        return self.transfer_ms > self.compute_ms


@style.drawn
def communication(run: Run) -> Figure:
    """Communication intensity and rate of each layer that has a message, under network and compute ceilings.

    Raises:
        NotInFile: one rank, no messages, or no measured bandwidth of the network.
    """
    if run.ranks < 2:
        raise run.lacks(
            "communication roofline", "measured on one rank, which sends nothing; run it under mpiexec -n 2"
        )
    network, compute = _ceilings(run)
    messages = sorted(_messages(run), key=lambda message: -message.transfer_ms)
    if not messages:
        raise run.lacks("communication roofline", "no all_reduce row has a time and FLOP of its layer")
    figure, (axes,) = style.page(6.0, "Can each layer's all-reduce hide behind its own computation?",
                                 run.heading, top=1.2, bottom=0.95)  # fmt: skip
    _limits(axes, messages, network, compute, run.how_alone)
    blocked = _draw_ceilings(axes, network, compute, run)
    _draw_messages(axes, messages)
    _name_largest(axes, messages, network, compute, blocked)
    _keys(figure, messages)
    _notes(figure, messages, network)
    return figure


def _ceilings(run: Run) -> tuple[float, float]:
    """Bus bandwidth in GB/s, TFLOP/s of matrix products."""
    ceilings = run.ceilings("communication roofline")
    network = (ceilings.get("all_reduce") or {}).get("bus_gb_per_s")
    compute = matrix_rate(ceilings, run.dtype)
    if not network or not compute:
        lacking = "bandwidth of all-reduce" if not network else f"matrix rate for {run.dtype}"
        remedy = f"run mpiexec -n {run.ranks} minidl bench ceilings, then measure again"
        raise run.lacks("communication roofline", f"its ceilings have no {lacking}; {remedy}")
    return network, compute


def _messages(run: Run) -> list[_Message]:
    """Messages with time and FLOP; one that several layers share is set against the passes of all of them."""
    own: dict[tuple[str, str], list[Row]] = {}
    shared: dict[tuple[str, str], list[Row]] = {}
    for row in run.rows:
        if row["pass"] in cost.PASSES and row.get("layer"):
            own.setdefault((row["case"], row["layer"]), []).append(row)
        elif row["pass"] == "all_reduce" and row.get("wire_bytes"):
            shared.setdefault((row["case"], row.get("in") or row["layer"]), []).append(row)
    found = []
    for (case, carrier), rows in shared.items():
        passes = [r for row in rows for r in own.get((case, row["layer"]), ())]
        compute, flop = sum(r["ms"] or 0.0 for r in passes), sum(r.get("flop") or 0 for r in passes)
        first = next((row for row in rows if row["layer"] == carrier), None)
        transfer = (first.get("transfer_ms") or first["ms"]) if first else None
        if compute and flop and transfer:
            wire = sum(row["wire_bytes"] for row in rows)
            name = carrier + (f" and {len(rows) - 1} more" if len(rows) > 1 else "")
            exposed = first.get("exposed_ms") or 0.0
            kind = family(max(passes, key=lambda r: r["ms"] or 0.0))
            found.append(_Message(name, kind, flop / wire, 1e-9 * flop / compute, compute, transfer, exposed))
    return found


def _limits(axes: Axes, messages: list[_Message], network: float, compute: float, how: str) -> None:
    intensity = [m.intensity for m in messages]
    rates = [m.tflops for m in messages]
    ridge = 1e3 * compute / network
    axes.set(xscale="log", yscale="log", xlabel="communication intensity, FLOP of the layers' passes per wire byte")
    axes.set_xlim(min(*intensity, ridge / _SHOWN) / 2.5, max(*intensity, 2 * ridge) * 3)
    axes.set_ylim(min(rates) / 3, 2.2 * max(*rates, compute))
    style.log_axis(axes.xaxis)
    style.flops_axis(axes, compute, f"{{}} of these passes, {how}")


def _draw_ceilings(axes: Axes, network: float, compute: float, run: Run) -> list[Text]:
    left, right = axes.get_xlim()
    bottom, top = axes.get_ylim()
    ridge = 1e3 * compute / network
    start = max(left, 1e3 * bottom / network)
    x = np.array([left, start, ridge, right])
    roof = np.clip(1e-3 * network * x, bottom, compute)
    axes.fill_between(x, roof, top, color=_TINT, zorder=0.5, linewidth=0)
    axes.plot(x[1:], roof[1:], color=INK, linewidth=1.6, zorder=3)
    engine = run.ceilings("communication roofline")["all_reduce"].get("engine")
    text = f"network: {rate(network)} GB/s{f' ({engine})' if engine else ''}"
    begin = start * (ridge / start) ** 0.35
    return [
        labels.along(axes, (begin, 1e-3 * network * begin), (ridge, compute), text, weight="bold"),
        axes.annotate(f"matrix products {run.dtype}: {style.flops(compute)}", (right, compute), (-2, 3),
                      textcoords="offset points", ha="right", va="bottom", weight="bold", path_effects=halo()),
        axes.annotate("the message takes longer\nthan the layer computes", (0, 1), (8, -8), xycoords="axes fraction",
                      textcoords="offset points", ha="left", va="top", color=PASSES["communication"], weight="bold"),
        axes.annotate("the message can hide\nbehind the layer's own computation", (1, 0), (-8, 8),
                      xycoords="axes fraction", textcoords="offset points", ha="right", va="bottom", color=INK,
                      weight="bold"),
    ]  # fmt: skip


def _draw_messages(axes: Axes, messages: list[_Message]) -> None:
    """Solid where the measured transfer outlasts the layer's computation, hollow where it does not."""
    from matplotlib.colors import to_rgba

    color = PASSES["communication"]
    for kind, shape in SHAPES.items():
        mine = [m for m in messages if m.kind == kind]
        if mine:
            axes.scatter(
                [m.intensity for m in mine],
                [m.tflops for m in mine],
                s=[marker_area(m.transfer_ms, messages[0].transfer_ms) for m in mine],
                c=[to_rgba(color, 0.8) if m.outlasts else to_rgba("white", 0.6) for m in mine],
                edgecolors=[INK if m.outlasts else color for m in mine],
                linewidths=[0.6 if m.outlasts else 1.2 for m in mine],
                marker=shape,
                zorder=4,
                label=kind,
            )


def _name_largest(axes: Axes, messages: list[_Message], network: float, compute: float, blocked: list[Text]) -> None:
    x = np.geomspace(*axes.get_xlim(), 200)
    roof = np.stack([x, np.minimum(1e-3 * network * x, compute)], axis=1)
    points = [(m.intensity, m.tflops) for m in messages]
    texts = [f"{m.name}\n{milliseconds(m.transfer_ms)} / {milliseconds(m.compute_ms)}" for m in messages[:_NAMED]]
    labels.place(axes, points[:_NAMED], texts, np.vstack([np.array(points), roof]), blocked)


def _keys(figure: Figure, messages: list[_Message]) -> None:
    color = PASSES["communication"]
    kinds = {m.kind for m in messages}
    style.key(figure, [style.dot(shape, kind) for kind, shape in SHAPES.items() if kind in kinds], 0.70)
    longest = messages[0].transfer_ms
    style.key(
        figure,
        [
            style.dot("o", "measured transfer longer than the computation", 8, markerfacecolor=color,
                      markeredgecolor=INK, markeredgewidth=0.6),
            style.dot("o", "shorter", 8, markerfacecolor="white", markeredgecolor=color, markeredgewidth=1.2),
            style.dot("o", f"area: transfer time, largest {milliseconds(longest)}", 8, alpha=0.35),
        ],
        0.92,
    )  # fmt: skip


def _notes(figure: Figure, messages: list[_Message], network: float) -> None:
    sent, exposed = sum(m.transfer_ms for m in messages), sum(m.exposed_ms for m in messages)
    count = f"{len(messages)} message{'s' if len(messages) > 1 else ''}"
    text = f"{count}, {milliseconds(sent)} of transfers, {milliseconds(exposed)} exposed in the step. "
    text += "Beside names: transfer / computation. Shape: of the longest pass."
    if any(m.outlasts and m.tflops < 1e-3 * network * m.intensity for m in messages):
        text += "\nSolid points under the diagonal wait for the latency of the network, not for its bandwidth."
    style.note(figure, text)
