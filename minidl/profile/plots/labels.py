"""Names beside points of a scatter plot: none over another, no leader through a name, few of them over points."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from minidl.profile.plots.style import INK, MUTED, halo

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Annotation, Text
    from matplotlib.transforms import Bbox

_ANGLES = 32
_DISTANCES = (12, 20, 30, 42, 56, 72, 90, 112, 138, 168, 202, 240)  # points from the marker to the label
_PADDING = 3.0  # pixels around a label
_SAMPLES = np.linspace(0, 1, 17)[3:, None]  # of a leader, without its beginning, where leaders of neighbours meet
_NEAR = 5.0  # pixels from a leader at which a marker may be taken for the one that it ends at
_SWEEPS = 6
_NEVER, _CROSSED, _COVERED, _PASSED, _PIXEL = 1e6, 800.0, 150.0, 6.0, 0.6  # what each fault of a place costs


def place(
    axes: Axes, points: Sequence[tuple[float, float]], texts: Sequence[str], avoid: np.ndarray, blocked: Sequence[Text]
) -> list[Annotation]:
    """Label ``points`` (data coordinates), each at a free place around it.

    One after the other takes the best place beside those before; then each, in turn, moves to where it is better off
    beside all others, until none moves.

    Args:
        axes: with its limits set; labels stay inside.
        avoid: (n, 2) data coordinates of what labels should rather not cover: markers and lines.
        blocked: texts that labels may not cover.
    """
    from matplotlib.text import Text

    renderer = axes.figure.canvas.get_renderer()
    pixel = axes.figure.dpi / 72
    labels = [_annotate(axes, point, text) for point, text in zip(points, texts, strict=True)]
    dots = axes.transData.transform(avoid)
    boxes = [box for text in blocked for box in _boxes(text, text.get_window_extent(renderer))]
    options = []
    for point, label in zip(points, labels, strict=True):
        extent = Text.get_window_extent(label, renderer)  # an annotation's own extent has the leader in it
        option = _Options(axes.transData.transform(point), np.array([extent.width, extent.height]), pixel)
        option.judge(axes.get_window_extent(renderer), dots, boxes)
        options.append(option)
    for label, option, chosen in zip(labels, options, _settle(options), strict=True):
        label.set_position(tuple((option.centers[chosen] - option.anchor) / pixel))
    axes.plot(*zip(*points, strict=True), linestyle="none", marker="o", markersize=2.5, color=INK, zorder=5)
    return labels


def along(axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str, **options: object) -> Text:
    """A text on the line from ``start`` (where it begins, just above the line) to ``end``, turned as the line runs."""
    a, b = axes.transData.transform([start, end])
    angle = math.degrees(math.atan2(b[1] - a[1], b[0] - a[0]))
    return axes.annotate(
        text, start, (-3 * math.sin(math.radians(angle)), 3 * math.cos(math.radians(angle))),
        textcoords="offset points", rotation=angle, rotation_mode="anchor", va="bottom", path_effects=halo(), zorder=5,
        **options,
    )  # fmt: skip


def _annotate(axes: Axes, point: tuple[float, float], text: str) -> Annotation:
    leader = {"arrowstyle": "-", "color": MUTED, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0}
    return axes.annotate(
        text, point, (0, 0), textcoords="offset points", ha="center", va="center", size=9, color=INK, zorder=6,
        arrowprops=leader, path_effects=halo(),
    )  # fmt: skip


class _Options:
    """The places of one label, in pixels: centres, boxes (x0, y0, x1, y1), leaders, and what each costs by itself."""

    def __init__(self, anchor: np.ndarray, size: np.ndarray, pixel: float):
        turn = 2 * np.pi * np.arange(_ANGLES) / _ANGLES
        ways = np.stack([np.cos(turn), np.sin(turn)], axis=1)
        reach = np.array(_DISTANCES)[:, None] * pixel + np.abs(ways) @ size / 2
        self.anchor = anchor
        self.centers = (anchor + reach[..., None] * ways).reshape(-1, 2)
        self.boxes = np.hstack([self.centers - size / 2 - _PADDING, self.centers + size / 2 + _PADDING])
        self.leaders = anchor + _SAMPLES * (self.centers - anchor)[:, None]

    def judge(self, frame: Bbox, dots: np.ndarray, blocked: Sequence[np.ndarray]) -> None:
        """What places cost for themselves: outside, over a text, over points, beside points, far away."""
        low, high = self.boxes[:, :2], self.boxes[:, 2:]
        outside = np.any((low < (frame.x0, frame.y0)) | (high > (frame.x1, frame.y1)), axis=1)
        covered = np.sum(_inside(dots[None], self.boxes[:, None]), axis=1)
        apart = np.min(np.linalg.norm(dots[None, :, None] - self.leaders[:, None, ::2], axis=-1), axis=2)
        self.costs = _NEVER * outside + _COVERED * covered + _PASSED * np.sum(apart < _NEAR, axis=1)
        self.costs += _PIXEL * np.linalg.norm(self.centers - self.anchor, axis=1)
        for box in blocked:
            self.costs += _NEVER * _overlap(self.boxes, box) + _CROSSED * np.any(_inside(self.leaders, box), axis=1)

    def beside(self, other: _Options, chosen: int) -> np.ndarray:
        """What places cost while ``other`` stands at its place ``chosen``."""
        box, leader = other.boxes[chosen], other.leaders[chosen]
        through = np.any(_inside(self.leaders, box), axis=1) | np.any(
            _inside(leader[None], self.boxes[:, None]), axis=1
        )
        crossed = _cross(self.leaders[:, 0], self.leaders[:, -1], leader[0], leader[-1])
        return _NEVER * _overlap(self.boxes, box) + _CROSSED * (1.0 * through + crossed)


def _settle(options: Sequence[_Options]) -> list[int]:
    """The place that each label takes: the best end of several beginnings, each with another label first."""
    count = len(options)
    orders = [[(first + way * i) % count for i in range(count)] for way in (1, -1) for first in range(count)]
    return min((_settle_from(options, order) for order in orders), key=lambda chosen: _total(options, chosen))


def _settle_from(options: Sequence[_Options], order: Sequence[int]) -> list[int]:
    chosen: dict[int, int] = {}
    for _ in range(_SWEEPS):
        before = dict(chosen)
        for i in order:
            chosen[i] = int(np.argmin(_costs(options, chosen, i)))
        if chosen == before:
            break
    return [chosen[i] for i in range(len(options))]


def _costs(options: Sequence[_Options], chosen: Mapping[int, int], i: int) -> np.ndarray:
    """What each place of label ``i`` costs beside the labels that have one."""
    return options[i].costs + sum(options[i].beside(options[j], place) for j, place in chosen.items() if j != i)


def _total(options: Sequence[_Options], chosen: Sequence[int]) -> float:
    return float(sum(_costs(options, dict(enumerate(chosen)), i)[place] for i, place in enumerate(chosen)))


def _inside(points: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    return np.all((points > boxes[..., :2]) & (points < boxes[..., 2:]), axis=-1)


def _overlap(boxes: np.ndarray, box: np.ndarray) -> np.ndarray:
    return np.all((boxes[:, :2] < box[2:]) & (box[:2] < boxes[:, 2:]), axis=1)


def _cross(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray) -> np.ndarray:
    """Whether the lines from ``a`` to ``b`` cross that from ``c`` to ``d``."""

    def side(p: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        u, v = end - start, p - start
        return u[..., 0] * v[..., 1] - u[..., 1] * v[..., 0]

    return (side(a, c, d) * side(b, c, d) < 0) & (side(c, a, b) * side(d, a, b) < 0)


def _boxes(text: Text, extent: Bbox) -> list[np.ndarray]:
    """The box of a text; of a text that runs upwards, a chain of them, for its one box would be mostly empty."""
    links = 1 if text.get_rotation() % 90 == 0 else 8
    corner, step = np.array([extent.x0, extent.y0]), np.array([extent.width, extent.height]) / links
    return [np.concatenate([corner + i * step, corner + (i + 1) * step]) for i in range(links)]
