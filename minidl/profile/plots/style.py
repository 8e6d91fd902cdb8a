"""How every picture looks: one palette, one page, one way of saving.

A colour means one thing in all pictures. Passes have colours of Okabe and Ito ("Color Universal Design", 2008); types
of layer have shapes in scatter plots and, where they are areas, muted and light colours of Tol ("Colour Schemes",
2021). Both sets were chosen so that all of their members stay apart for readers with any of the usual colour
deficiencies.

Nothing touches pyplot or its state.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minidl import checks
from minidl.checkpoint import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

INK, MUTED, GRID = "#222222", "#666666", "#d9d9d9"

PASSES = {
    "forward": "#0072B2",
    "backward_data": "#E69F00",
    "backward_weight": "#009E73",
    "update": "#CC79A7",
    "communication": "#D55E00",
    "unaccounted": "#5F5F5F",
}
TYPES = {
    "convolution": "#332288",
    "linear": "#88CCEE",
    "batch norm": "#DDCC77",
    "other norms": "#EE8866",
    "ReLU": "#117733",
    "other activations": "#BBCC33",
    "pooling": "#999933",
    "joins": "#6699CC",
    "other": "#DDDDDD",
    "loss": "#661100",
    "optimizer": PASSES["update"],
    "exposed communication": PASSES["communication"],
    "unaccounted": PASSES["unaccounted"],
}
SHAPES = {
    "convolution": "o",
    "linear": "s",
    "batch norm": "D",
    "other norms": "d",
    "ReLU": "^",
    "other activations": ">",
    "pooling": "v",
    "joins": "P",
    "other": "h",
    "loss": "X",
    "optimizer": "*",
}

FORMATS = ("svg", "png")
WIDTH = 9.0  # inches; with DPI the 900 pixels that pages of documentation show
DPI = 100
_MARGIN = 0.15  # inches
_SETTINGS = {
    "figure.dpi": DPI,
    "font.size": 9.5,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "svg.hashsalt": "minidl",  # ids in an SVG are otherwise drawn at random
}


@contextmanager
def _settings() -> Iterator[None]:
    """Matplotlib as it comes from its makers plus ours, whatever the user's own defaults; they are put back after."""
    with checks.needs("plots", "plot"):
        from matplotlib import style
    with style.context(["default", _SETTINGS]):
        yield


def drawn(figure: Callable[..., Figure]) -> Callable[..., Figure]:
    """Decorator of functions that make a picture: matplotlib is there, and set as here."""

    @functools.wraps(figure)
    def wrapper(*args: Any, **kwargs: Any) -> Figure:
        with _settings():
            return figure(*args, **kwargs)

    return wrapper


def page(
    height: float,
    title: str,
    subtitle: str,
    *,
    panels: Sequence[float] = (1.0,),
    left: float = 0.8,
    right: float = 0.3,
    top: float = 0.75,
    bottom: float = 0.75,
    gap: float = 0.25,
    across: bool = False,
) -> tuple[Figure, list[Axes]]:
    """A figure with its heading and, from the top down, panels with these shares of the height (``across``: from the
    left, with these shares of the width); sizes in inches.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height))
    FigureCanvasAgg(figure)
    _fit(figure.text(_MARGIN / WIDTH, 1 - 0.12 / height, title, size=13, weight="bold", va="top"))
    _fit(figure.text(_MARGIN / WIDTH, 1 - 0.40 / height, subtitle, size=10, color=MUTED, va="top"))
    wide, high = WIDTH - left - right, height - top - bottom
    free = (wide if across else high) - gap * (len(panels) - 1)
    axes, before = [], 0.0
    for share in panels:
        size = free * share / sum(panels)
        box = (left + before, bottom, size, high) if across else (left, height - top - before - size, wide, size)
        axes.append(figure.add_axes((box[0] / WIDTH, box[1] / height, box[2] / WIDTH, box[3] / height)))
        before += size + gap
    return figure, axes


def note(figure: Figure, text: str) -> None:
    """A footnote."""
    place = (_MARGIN / WIDTH, 0.1 / figure.get_figheight())
    _fit(figure.text(*place, text, size=8.5, color=MUTED, va="bottom", linespacing=1.35))


def _fit(text: Text) -> None:
    """Make a text smaller that would leave the page: names of networks and processors may be long."""
    width = text.get_window_extent().width / DPI
    text.set_size(text.get_size() * min(1.0, (WIDTH - 2 * _MARGIN) / max(width, 1e-9)))


def key(figure: Figure, handles: Sequence[Any], below_top: float, **options: Any) -> None:
    """A row of keys (rows, with ``ncols``) outside the panels, ``below_top`` inches under the upper edge."""
    place = (_MARGIN / WIDTH, 1 - below_top / figure.get_figheight())
    settings = {
        "ncols": len(handles),
        "handletextpad": 0.4,
        "columnspacing": 1.3,
        "borderpad": 0,
        "borderaxespad": 0,
        "handlelength": 1.2,
    }
    figure.add_artist(
        figure.legend(handles=list(handles), loc="upper left", bbox_to_anchor=place, **settings | options)
    )


def swatch(color: str, label: str, **options: Any) -> Any:
    """A key for a filled area."""
    from matplotlib.patches import Patch

    return Patch(facecolor=color, label=label, **options)


def dot(shape: str, label: str, size: float = 7.0, **options: Any) -> Any:
    """A key for a marker, ``size`` points across."""
    from matplotlib.lines import Line2D

    looks = {"markerfacecolor": MUTED, "markeredgecolor": "white", "markeredgewidth": 0.5}
    return Line2D([], [], linestyle="none", marker=shape, markersize=size, label=label, **looks | options)


def plain(value: float, _: int | None = None) -> str:
    """A number on an axis: 0.01, 1, 20,000."""
    return f"{value:,.12g}"


def log_axis(axis: Any) -> None:
    """Plain numbers at the decades of a logarithmic axis whose limits are set; at 2 and 5 where decades are few."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1,) if high > 100 * low else (1, 2, 5)))
    axis.set_major_formatter(plain)
    axis.set_minor_formatter(NullFormatter())


def flops(tflops: float) -> str:
    """``795 TFLOP/s`` or ``99.5 GFLOP/s``: three figures, or all before the point."""
    return f"{rate(tflops)} TFLOP/s" if tflops >= 1 else f"{rate(1e3 * tflops)} GFLOP/s"


def flops_axis(axes: Axes, top: float, text: str) -> None:
    """A logarithmic y axis of TFLOP/s, labelled in GFLOP/s where the highest ceiling is below one of those."""
    scale, unit = (1.0, "TFLOP/s") if top >= 1 else (1e3, "GFLOP/s")
    log_axis(axes.yaxis)
    axes.yaxis.set_major_formatter(lambda value, _: plain(scale * value))
    axes.set_ylabel(text.format(unit))


def rate(value: float) -> str:
    """Three figures or all before the point: 4,230 or 12.3 or 0.104."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def milliseconds(ms: float) -> str:
    """``12.3 ms`` or ``45 µs``: three figures and the unit."""
    if abs(ms) >= 999.5:
        return f"{ms:,.0f} ms"
    if abs(ms) < 5e-7:  # under the resolution of result files
        return "0 ms"
    value, unit = (1e3 * ms, "µs") if abs(ms) < 0.09995 else (ms, "ms")
    return f"{value:#.3g}".rstrip(".") + f" {unit}"


def halo() -> list[Any]:
    """Path effects of a text that lines may run under."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=2.5, foreground="white")]


# -- files ------------------------------------------------------------------------------------------------------------


def render(figure: Figure, format: str) -> bytes:
    """The picture as SVG or PNG; the same figure gives the same bytes.

    Raises:
        ValueError: another format.
    """
    if format not in FORMATS:
        raise checks.bad_value("plot", "format", "svg or png", format)
    content = io.BytesIO()
    with _settings():
        # PNG at twice the size, for dense screens; neither format says when or by which version it was made
        options = {"metadata": {"Date": None, "Creator": None}} if format == "svg" else {"metadata": {"Software": None}}
        figure.savefig(content, format=format, dpi=DPI if format == "svg" else 2 * DPI, **options)
    return content.getvalue() if format == "svg" else _with_palette(content)


def _with_palette(png: io.BytesIO) -> bytes:
    """The same PNG with a palette, a third of the size. Coverage keeps the colour of a single key apart, k-means puts
    the common colours right.
    """
    from PIL import Image

    picture, small = Image.open(png).convert("RGB"), io.BytesIO()
    flat = picture.quantize(256, method=Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE)
    flat.save(small, "png", optimize=True)
    return small.getvalue()


def require_picture(argument: str, path: str | Path) -> None:
    """Refuse what no picture can be, before the work that it is to show.

    Raises:
        ValueError: naming ``argument``, for a name that ends with no format.
        ImportError: without matplotlib.
    """
    if Path(path).suffix[1:] not in FORMATS:
        raise checks.bad_value("", argument, "a name that ends with .svg or .png", str(path))
    with checks.needs("plots", "plot"):
        import matplotlib  # noqa: F401


def save(figure: Figure, path: str | Path) -> None:
    """Write a picture, whole or not at all, in the format that the name ends with; folders are made."""
    write_whole(path, render(figure, Path(path).suffix[1:]))
