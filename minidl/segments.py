"""Where parameters lie in an arena, and the messages their gradients are cut into."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from minidl import backend, checks
from minidl.dist.communicator import Work
from minidl.initializers import Initializer
from minidl.shapes import round_up

ALIGN = 64  # float32 elements: 256 bytes, and the chunk of the optimizer's segment table


@dataclass(frozen=True)
class ParameterSpec:
    """What a layer declares: ``product`` parameters enter matrix products and are read in the storage dtype.

    ``rows``: the layer computes the gradient in tiles of so many rows (of the first axis), one after the other, in
    `minidl.Layer.backward_weight_tile`; 0: at once.
    """

    name: str
    shape: tuple[int, ...]
    init: Initializer
    product: bool
    rows: int = 0


@dataclass(frozen=True)
class Segment:
    """One parameter's place: ``offset`` and ``size`` in elements of the arena; JSON-able but for nothing."""

    layer: str
    name: str
    shape: tuple[int, ...]
    offset: int
    product: bool
    trainable: bool
    rows: int = 0

    @property
    def tile(self) -> int:
        """Elements of a tile of its gradient; 0 where that is made at once."""
        return self.rows * prod(self.shape[1:])

    @property
    def tiles(self) -> list[slice]:
        """The rows of each tile."""
        return [slice(i, min(i + self.rows, self.shape[0])) for i in range(0, self.shape[0], self.rows)]

    def span(self, rows: slice) -> tuple[int, int]:
        """Where in the arena these rows begin and end."""
        row = prod(self.shape[1:])
        return self.offset + rows.start * row, self.offset + rows.stop * row

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> int:
        """End of the segment including its padding."""
        return self.offset + round_up(self.size, ALIGN)

    @property
    def full_name(self) -> str:
        return f"{self.layer}.{self.name}" if self.layer else self.name

    def describe(self) -> str:
        """One line that is equal on two ranks exactly when their plans agree here."""
        return f"{self.full_name} {self.shape} at {self.offset}{'' if self.trainable else ' frozen'}"


@dataclass
class Message:
    """A contiguous slice of gradients that is sent at once and updated at once: one layer or several neighbours."""

    begin: int
    end: int
    layers: tuple[str, ...]
    waiting: int = 0
    work: Work | None = None
    cuts: tuple[int, ...] = ()  # of a sharded arena: where the parts of the ranks begin and end, from ``begin``
    own: tuple[int, int] = (0, 0)  # begin and end in the arena of what this rank gets the sum of, and updates
    before: str = ""  # the layer whose backward pass it waits for, to start then; else it starts when it is complete
    summed: bool = False  # the layer makes sums over ranks itself in this step: nothing is sent
    begun: bool = False  # to be updated in this step, within the backward pass
    updated: bool = False  # all of it

    @property
    def name(self) -> str:
        """The names of its layers, joined by ``+``, as profilers know it."""
        return "+".join(self.layers)


def by_name(flat: np.ndarray, segments: Iterable[Segment], prefix: str = "") -> dict[str, np.ndarray]:
    """Copies of what a flat host array holds of each parameter, by ``prefix`` and full name."""
    return {f"{prefix}{s.full_name}": flat[s.offset : s.offset + s.size].reshape(s.shape).copy() for s in segments}


def flattened(named: Mapping[str, np.ndarray], segments: Iterable[Segment], size: int, prefix: str = "") -> np.ndarray:
    """The flat host array, float32 (size,), that `by_name` gives ``named`` of; zeros elsewhere."""
    flat = np.zeros(size, np.float32)
    for s in segments:
        flat[s.offset : s.offset + s.size] = named[f"{prefix}{s.full_name}"].reshape(-1)
    return flat


def drawn(init: Initializer, rng: np.random.Generator, segment: Segment) -> np.ndarray:
    """Starting values of one parameter; zeros in a dry run, where nobody reads them.

    Raises:
        TypeError: when ``init`` is no function.
        ValueError: when it gives another shape.
    """
    if not callable(init):
        remedy = "see minidl.initializers"
        raise checks.bad_dtype(segment.full_name, "initializer", "a function (rng, shape) -> array", repr(init), remedy)
    values = np.zeros(segment.shape, np.float32) if backend.dry() else np.asarray(init(rng, segment.shape))
    if values.shape != segment.shape:
        raise checks.bad_shape(segment.full_name, "starting values", str(segment.shape), values.shape)
    return values


def lay_out(layers: Sequence[tuple[str, Sequence[ParameterSpec]]], frozen: Sequence[str]) -> list[Segment]:
    """Segments with offsets: trainable ones in backward order, then the frozen ones."""
    found = [
        Segment(name, spec.name, spec.shape, 0, spec.product, True, spec.rows)
        for name, specs in reversed(layers)
        for spec in specs
    ]
    for pattern in frozen:
        if not any(fnmatch.fnmatchcase(s.full_name, pattern) for s in found):
            raise checks.unknown("parameter pattern", pattern, [s.full_name for s in found])
    placed: list[Segment] = []
    offset = 0
    held = [any(fnmatch.fnmatchcase(s.full_name, p) for p in frozen) for s in found]
    for want_frozen in (False, True):
        for s, is_frozen in zip(found, held, strict=True):
            if is_frozen is want_frozen:
                placed.append(replace(s, offset=offset, trainable=not is_frozen))
                offset = placed[-1].stop
    return placed
