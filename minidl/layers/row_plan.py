"""Which rows of an image a rank of several holds, and which rows of others it needs: integers in, integers out.

Each rank holds neighbouring rows of every image, and a layer gives it neighbouring rows of the result. It computes them
from its own rows as if the image ended there; what others' rows belong to, at the top and at the bottom, it computes
again in a `Strip`. Rows are counted in the whole image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from minidl.shapes import conv_output_size


class Rows(NamedTuple):
    """Rows ``begin`` to ``end`` - 1."""

    begin: int
    end: int

    def __and__(self, other: Rows) -> Rows:
        return Rows(max(self.begin, other.begin), min(self.end, other.end))

    @property
    def count(self) -> int:
        return max(self.end - self.begin, 0)

    def within(self, other: Rows) -> Rows:
        """The same rows counted from the first of ``other``."""
        return Rows(self.begin - other.begin, self.end - other.begin)


class Axis(NamedTuple):
    """A convolution along the height."""

    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def reach(self) -> int:
        """From the first row of a window to the last."""
        return self.dilation * (self.kernel - 1)

    def windows(self, out: Rows) -> Rows:
        """The input rows under the windows of output rows; on the padding they lie outside of the image."""
        return Rows(out.begin * self.stride - self.padding, (out.end - 1) * self.stride - self.padding + self.reach + 1)

    def outputs(self, rows: Rows) -> Rows:
        """Output rows, some perhaps outside of the image, whose windows cover ``rows`` and hold all that touch them."""
        first = (rows.begin + self.padding - self.reach) // self.stride
        return Rows(first, -(-(rows.end - 1 + self.padding) // self.stride) + 1)


class Strip(NamedTuple):
    """Rows of a result, and the rows it is computed from: own ones, those of others, and zeros outside of the image."""

    target: Rows
    source: Rows


@dataclass(frozen=True)
class Halo:
    """What one pass needs.

    Attributes:
        strips: what is computed from rows of others too.
        sends, receives: rows for, and of, other ranks.
    """

    strips: tuple[Strip, ...]
    sends: dict[int, Rows]
    receives: dict[int, Rows]


@dataclass(frozen=True)
class RowPlan:
    """One rank's part of a convolution.

    Attributes:
        rows, out: own rows of the input and of the output.
        aligned: whether the layer on the own rows alone gives the own rows of the result, but for the strips. If not,
            one strip is all.
        forward: its sources are input rows, its targets output rows; ``backward``: the data gradient, the other way.
    """

    rows: Rows
    out: Rows
    aligned: bool
    forward: Halo
    backward: Halo


def share(height: int, parts: int, part: int) -> Rows:
    """The rows of one rank: equal parts, or nearly so."""
    return Rows(height * part // parts, height * (part + 1) // parts)


@cache
def plan(height: int, axis: Axis, parts: int, part: int) -> RowPlan:
    """The part of one rank; every rank must have at least one row of the input and of the output."""
    out_height = conv_output_size(height, *axis)
    rows = [share(height, parts, i) for i in range(parts)]
    out = [share(out_height, parts, i) for i in range(parts)]
    aligned = all(
        p.begin * axis.stride == r.begin and conv_output_size(r.count, *axis) == p.count
        for r, p in zip(rows, out, strict=True)
    )
    return RowPlan(
        rows[part], out[part], aligned,
        _halo(part, out, rows, axis.windows, aligned), _halo(part, rows, out, axis.outputs, aligned),
    )  # fmt: skip


def _halo(part: int, targets: list[Rows], sources: list[Rows], needs: Callable[[Rows], Rows], aligned: bool) -> Halo:
    strips = [
        _strips(target, source, sources[-1].end, needs, aligned)
        for target, source in zip(targets, sources, strict=True)
    ]

    def received(by: int) -> dict[int, Rows]:
        """What a rank needs of each other: its strips reach beyond its own rows upwards and downwards only."""
        found = {}
        for other, theirs in enumerate(sources):
            parts = [strip.source & theirs for strip in strips[by]]
            parts = [rows for rows in parts if rows.count]
            if other != by and parts:
                found[other] = Rows(min(rows.begin for rows in parts), max(rows.end for rows in parts))
        return found

    sends = {other: rows[part] for other in range(len(targets)) if part in (rows := received(other))}
    return Halo(strips[part], sends, received(part))


def _strips(target: Rows, source: Rows, height: int, needs: Callable[[Rows], Rows], aligned: bool) -> tuple[Strip, ...]:
    """The rows of ``target`` that need rows of the image beyond ``source``."""
    if not aligned:
        return (Strip(target, needs(target)),)
    every = range(target.begin, target.end)
    need = {row: needs(Rows(row, row + 1)) & Rows(0, height) for row in every}
    top = max((row + 1 for row in every if need[row].count and need[row].begin < source.begin), default=target.begin)
    bottom = min((row for row in every if need[row].count and need[row].end > source.end), default=target.end)
    if top >= bottom:
        found = [target]
    else:
        found = [Rows(target.begin, top), Rows(bottom, target.end)]
    return tuple(Strip(rows, needs(rows)) for rows in found if rows.count)
